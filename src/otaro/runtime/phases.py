"""The precisions of one generation: which of its steps run at which."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from otaro.errors import PrecisionError
from otaro.runtime.modules import SefpModule, bits_of
from otaro.runtime.precision import Attachment, PrecisionLike, chosen_bits
from otaro.sefp.precision import Precision, of_mantissa_bits


class Phases:
    """Precisions by the number of new tokens when a step begins: the step that reads the prompt is 0.

    They belong to one generation and are set on no model. Before the first of them a model runs as it is set.
    """

    def __init__(self, attached: Attachment, steps: Mapping[int, PrecisionLike]) -> None:
        if any(not isinstance(step, int) or step < 0 for step in steps):
            raise PrecisionError(f"a schedule maps numbers of new tokens to precisions, not {min(steps, key=str)!r}")
        self._attached = attached
        self._steps = {step: chosen_bits(attached, precision) for step, precision in steps.items()}
        self.own: Mapping[SefpModule, int] = {}
        """Mantissa bits of every module, from the first phase on."""
        finest = max((bits for phase in self._steps.values() for bits in phase.values()), default=None)
        if finest is not None:
            attached.nested.require(of_mantissa_bits(finest))  # refuse at once what the directory cannot do

    def __bool__(self) -> bool:
        return bool(self._steps)

    def enter(self, step: int) -> bool:
        """Whether a phase begins with this step."""
        if step not in self._steps:
            return False
        modules = self._attached.modules.values()
        before = self.own or dict(zip(modules, bits_of(modules, self._attached.nested), strict=True))
        self.own = {**before, **self._steps[step]}
        for module, bits in self.own.items():
            module.packed.reach(bits)
        return True

    def bits(self, modules: Sequence[SefpModule]) -> bytes:
        """Mantissa bits of some modules: its own, or else those that are set."""
        return bytes([self.own[module] for module in modules]) if self.own else bits_of(modules, self._attached.nested)


def steps_and_rows(
    prefill: PrecisionLike | None,
    decode: PrecisionLike | None,
    schedule: Mapping[int, PrecisionLike] | None,
    precision: PrecisionLike | Sequence[PrecisionLike] | None,
) -> tuple[dict[int, PrecisionLike], list[PrecisionLike] | None]:
    """The precisions of steps, or those of rows, that the arguments of `generate` name."""
    if schedule is not None and (prefill is not None or decode is not None):
        raise PrecisionError("a schedule says all there is to say: give either schedule, or prefill and decode")
    steps = dict(schedule or {})
    if prefill is not None:
        steps[0] = prefill
    if decode is not None:
        steps[1] = decode
    if precision is None:
        return steps, None
    if steps:
        raise PrecisionError("give either precision, for all of a generation, or prefill, decode and schedule")
    if isinstance(precision, str | Precision | Mapping):
        return {0: precision}, None
    if not isinstance(precision, Iterable):
        raise PrecisionError(f"precision={precision!r}: give one such as E5M4, or a list with one for each row")
    return {}, list(precision)


def described(bits: Iterable[int]) -> str:
    """The precision of a step: one, or the range where modules differ."""
    found = set(bits)
    names = [str(of_mantissa_bits(m)) for m in (min(found), max(found))]
    return names[0] if len(found) == 1 else " to ".join(names)
