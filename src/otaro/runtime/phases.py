"""The precisions of one generation: which of its steps run at which."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

from otaro.errors import PrecisionError
from otaro.file.fits import Fit
from otaro.runtime.modules import SefpModule, bits_of
from otaro.runtime.precision import Attachment, PrecisionLike, chosen_bits
from otaro.sefp.precision import COARSEST, Precision, of_mantissa_bits


class Phases:
    """Precisions by the number of new tokens when a step begins: the step that reads the prompt is 0.

    They belong to one generation and are set on no model. Before the first of them a model runs as it is set.
    """

    def __init__(
        self,
        attached: Attachment,
        steps: Mapping[int, PrecisionLike | None],
        modules: Sequence[SefpModule] = (),
    ) -> None:
        """A precision of None is what the model is set to now. `modules` are those whose mantissa bits are
        wanted, by default all.
        """
        if any(not isinstance(step, int) or step < 0 for step in steps):
            raise PrecisionError(
                f"a schedule maps numbers of new tokens to precisions, not {min(steps, key=str)!r}"
            )
        self._attached, self.modules = attached, modules or list(attached.modules.values())
        self._steps = {step: self._checked(precision) for step, precision in steps.items()}
        self._switches: deque[dict[SefpModule, int]] = deque()  # by other threads
        self._bits = b""
        self.own: Mapping[SefpModule, int] = {}
        """Mantissa bits of every module, from the first phase on."""

    def __bool__(self) -> bool:
        return bool(self._steps)

    def __contains__(self, step: int) -> bool:
        return step in self._steps

    def writing_bits(self, before: bytes) -> list[bytes]:
        """Those of each phase that writes, not of one for the prompt alone; `before`: as the model is set."""
        steps = [step for step in self._steps if step or 1 not in self._steps]
        phases = [
            bytes(bits for module, bits in self._steps[step].items() if module in self.modules)
            for step in steps
        ]
        return phases if min(self._steps, default=2) < 2 else [before, *phases]

    def switch(self, precision: PrecisionLike) -> None:
        """Run at this from the next step on, whatever was to come; refused here and now if it cannot be."""
        self._switches.append(self._checked(precision))

    def bits(self, step: int) -> bytes:
        """Mantissa bits of a step; empty where it runs as the model is set. Steps come in their order."""
        while self._switches:
            self._steps = {step: self._switches.popleft()}
            self._enter(step)
        if step in self._steps:
            self._enter(step)
        return self._bits

    def _checked(self, precision: PrecisionLike | None) -> dict[SefpModule, int]:
        every = self._attached.modules.values()
        bits = (
            dict(zip(every, bits_of(every, self._attached.nested), strict=True))
            if precision is None
            else chosen_bits(self._attached, precision)
        )
        self._attached.nested.require(
            of_mantissa_bits(max(bits.values(), default=COARSEST))
        )  # refuse at once what the directory cannot do
        return bits

    def _enter(self, step: int) -> None:
        modules = self._attached.modules.values()
        before = self.own or dict(zip(modules, bits_of(modules, self._attached.nested), strict=True))
        self.own = {**before, **self._steps[step]}
        for module, bits in self.own.items():
            module.packed.reach(bits)
        self._bits = bytes([self.own[module] for module in self.modules])


def steps_and_rows(
    prefill: PrecisionLike | None,
    decode: PrecisionLike | None,
    schedule: Mapping[int, PrecisionLike] | None,
    precision: PrecisionLike | Mapping[int, PrecisionLike] | Sequence[PrecisionLike] | None,
) -> tuple[dict[int, PrecisionLike | None], list[PrecisionLike] | None]:
    """The precisions of steps, or those of rows, that the arguments of `generate` name.

    None is what the model is set to.
    """
    if schedule is not None and (prefill is not None or decode is not None):
        raise PrecisionError(
            "a schedule says all there is to say: give either schedule, or prefill and decode"
        )
    if not isinstance(schedule, Mapping | None):
        example = '{0: "E5M8", 100: "E5M4"}'
        raise PrecisionError(f"schedule={schedule!r}: give a mapping from numbers of new tokens, {example}")
    steps: dict[int, PrecisionLike | None] = dict(schedule or {})
    if prefill is not None:
        steps |= {0: prefill, 1: None}
    if decode is not None:
        steps[1] = decode
    if precision is None:
        return steps, None
    if steps:
        raise PrecisionError(
            "give either precision, for all of a generation, or prefill, decode and schedule"
        )
    if isinstance(precision, Mapping) and all(isinstance(key, int) for key in precision):
        return dict(cast(Mapping[int, PrecisionLike], precision)), None
    if isinstance(precision, str | Precision | Fit | Mapping):
        return {0: cast(PrecisionLike, precision)}, None
    if not isinstance(precision, Iterable):
        raise PrecisionError(
            f"precision={precision!r}: give one such as E5M4, or a list with one for each row"
        )
    return {}, list(precision)


def described(bits: Iterable[int]) -> str:
    """The precision of a step: one, or the range where modules differ."""
    found = set(bits)
    names = [str(of_mantissa_bits(m)) for m in (min(found), max(found))]
    return names[0] if len(found) == 1 else " to ".join(names)
