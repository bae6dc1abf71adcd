"""Switching precision. A module's precision is one integer on it: switching writes integers and moves no
weights.

What is set here is set for the model, whichever thread runs it: from its next call on, or its decoder's next
step. A switch is made under the lock of the model's directory, so that of several at once one is the last,
for all modules. A generation that was given precisions of its own (`generate`) neither sets nor minds what is
set.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

from otaro.errors import PrecisionError
from otaro.file.fits import Fit, is_fit, known
from otaro.file.header import BASE
from otaro.file.io import NestedDirectory
from otaro.kernels import cpu
from otaro.runtime.modules import PackedWeight, SefpModule, bits_of
from otaro.sefp.precision import COARSEST, Precision, of_mantissa_bits

PrecisionLike = str | Precision | Fit | Mapping[str, str | Precision | Fit]
"""One for all modules: a precision, or the name of a fit (`fit:90MB`); or a mapping from patterns to either.
"""


@dataclass
class Attachment:
    """What ties a model to its nested directory; kept as `model.sefp`."""

    nested: NestedDirectory
    modules: Mapping[str, SefpModule]
    """Every packed module by its name in the model."""
    reached: int = field(default=BASE, init=False, repr=False, compare=False)
    """Mantissa bits for which the planes of all modules are known to be attached."""
    decoder: Any = field(default=None, init=False, repr=False, compare=False)
    """What `serving.decoder_of` made."""
    warned: set[str] = field(default_factory=set, init=False, repr=False, compare=False)
    """What the user was told about this model, so as not to say it again."""

    @cached_property
    def states(self) -> list[dict[str, Any]]:
        """What the modules' attributes are kept in: a switch between tokens writes one integer into each."""
        return [module.__dict__ for module in self.modules.values()]

    def __deepcopy__(self, memo: dict[int, Any]) -> Attachment:
        """A copy of the model has modules and a decoder of its own, from the same files."""
        copied = Attachment(self.nested, copy.deepcopy(self.modules, memo))
        copied.reached = self.reached
        return copied


def attachment(model: Any) -> Attachment:
    """The model's attachment; refused for a model that does not come from a nested directory."""
    found = getattr(model, "sefp", None)
    if not isinstance(found, Attachment):
        raise PrecisionError(
            f"this {type(model).__name__} has no precision to switch; pass a whole model as otaro.load(DIR) "
            "returns it, "
            "from a directory that `otaro pack` wrote"
        )
    return found


def set_precision(model: Any, precision: PrecisionLike) -> None:
    """Run `model` at `precision` from the next call on.

    A mapping from patterns to precisions sets modules one by one: patterns are matched against module names
    with `*`, `?` and `[...]`, a later pattern overrides an earlier one, and modules that no pattern matches
    stay as they are.

    >>> set_precision(model, "E5M5")                                         # doctest: +SKIP
    >>> set_precision(model, {"*": "E5M3", "*.self_attn.*": "E5M5", "lm_head": "E5M8"})   # doctest: +SKIP
    >>> set_precision(model, "fit:90MB")                                     # doctest: +SKIP

    The last is a fit that `otaro fit` made: every module at a precision of its own. A precision whose shard
    is not in the directory is refused and nothing changes; add the file and ask again.
    """
    attached = attachment(model)
    if isinstance(precision, Mapping | Fit) or is_fit(precision):
        _apply(attached.nested, chosen_bits(attached, precision))
        return
    chosen = Precision(precision)
    attached.nested.require(chosen)  # refuse before anything changes
    bits = chosen.mantissa_bits
    with attached.nested.lock:
        if bits > attached.reached:
            for module in attached.modules.values():
                module.packed.reach(bits)
            attached.reached = bits
        for state in attached.states:
            state["mantissa_bits"] = bits


@contextmanager
def at_precision(model: Any, precision: PrecisionLike) -> Iterator[None]:
    """Run `model` at `precision` inside the block, and as before after it."""
    with keeping_precision(model):
        set_precision(model, precision)
        yield


@contextmanager
def keeping_precision(model: Any) -> Iterator[None]:
    """Whatever is set inside the block, run `model` as before after it."""
    attached = attachment(model)
    modules = attached.modules.values()
    before = dict(zip(modules, bits_of(modules, attached.nested), strict=True))
    try:
        yield
    finally:
        _apply(attached.nested, before)


def precisions_of(model: Any) -> dict[str, Precision]:
    """The precision of every packed module, by module name."""
    attached = attachment(model)
    bits = bits_of(attached.modules.values(), attached.nested)
    return {name: of_mantissa_bits(m) for name, m in zip(attached.modules, bits, strict=True)}


def trim(model: Any, *, everything: bool = False) -> int:
    """Hand the memory of planes above the precisions in use back to the operating system; returns how many
    bytes they hold.

    With `everything` also of those in use, for a model that is not to run for a while.

    Planes are mapped from their files and never written to, so the system may drop them whenever memory is
    short; this does not wait for that. The next switch to a finer precision reads them again. Planes that
    were copied, to another device for one, are left alone, and so is everything where the system has no /proc
    (it is Linux's).
    """
    used: dict[PackedWeight, int] = {}
    for module in attachment(model).modules.values():
        used[module.packed] = max(used.get(module.packed, COARSEST), module.mantissa_bits)
    mapped, dropped = _mapped_ranges(attachment(model).nested.path), 0
    for packed, bits in used.items():
        for plane in [packed.base, *packed.planes_above(BASE)] if everything else packed.planes_above(bits):
            start, size = plane.data_ptr(), plane.nbytes
            if any(begin <= start and start + size <= end for begin, end in mapped):
                cpu.release_pages(plane)
                dropped += size
    return dropped


def _mapped_ranges(directory: Path) -> list[tuple[int, int]]:
    """Where files of a directory lie in this process's memory."""
    maps = Path("/proc/self/maps")
    if cpu.MISSING or not maps.exists():
        return []
    prefix, found = f"{directory.resolve()}{os.sep}", []
    for line in maps.read_text().splitlines():
        addresses, *_, path = line.split(maxsplit=5) if line.count("/") else ("", "")
        if path.startswith(prefix):
            begin, _, end = addresses.partition("-")
            found.append((int(begin, 16), int(end, 16)))
    return found


def chosen_bits(attached: Attachment, precision: PrecisionLike) -> dict[SefpModule, int]:
    """The mantissa bits that a precision, or a mapping (as `set_precision`'s), gives some modules or all."""
    patterns = precision if isinstance(precision, Mapping) else {"*": precision}
    modules, bits = attached.modules, dict[SefpModule, int]()
    for pattern, one in patterns.items():
        matched = [module for name, module in modules.items() if fnmatchcase(name, pattern)]
        if not matched:
            raise PrecisionError(
                f"no packed module matches {pattern!r}; names look like {next(iter(modules), 'none')!r}"
            )
        chosen = known(attached.nested, one)
        for module in matched:
            its = chosen.precisions[module.packed.name] if isinstance(chosen, Fit) else chosen
            bits[module] = its.mantissa_bits
    return bits


def _apply(nested: NestedDirectory, bits: Mapping[SefpModule, int]) -> None:
    nested.require(of_mantissa_bits(max(bits.values(), default=COARSEST)))  # refuse before anything changes
    with nested.lock:
        for module, wanted in bits.items():
            module.packed.reach(wanted)
        for module, wanted in bits.items():
            # past nn.Module's __setattr__, which would take most of the time
            module.__dict__["mantissa_bits"] = wanted
