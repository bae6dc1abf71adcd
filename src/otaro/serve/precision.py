"""Which precision a request is answered at.

It is named behind the model's name (`NAME:E5M4`), or by the field `precision`: "E5M4", {"prefill": "E5M8",
"decode": "E5M4"}, a schedule by numbers of new tokens {"0": "E5M8", "100": "E5M4"}, or "auto". A precision
may be a fit that `otaro fit` made for the model, "fit:90MB"; those that are made while it is served are
found.

auto answers at the coarsest precision that is good enough now. While answers wait for a place it goes down, a
step at a time, so that the places become free sooner; when nobody waits and half of the places are free it
goes up again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from otaro.errors import PrecisionError
from otaro.file.fits import Fit, fit_name, is_fit
from otaro.sefp.precision import PRECISIONS, Precision
from otaro.serve.errors import ApiError, wrong
from otaro.serve.fields import Fields, shown

AUTO = "auto"
_FORMS = (
    'give "E5M4", "auto", {"prefill": "E5M8", "decode": "E5M4"}, or a schedule by numbers of new tokens, '
    '{"0": "E5M8", "100": "E5M4"}; a mapping of modules is not served'
)


@dataclass(frozen=True)
class Plan:
    """The precisions of one answer, from a number of new tokens on each."""

    steps: dict[int, Precision | Fit]
    auto: bool = False

    @property
    def told(self) -> str:
        """For people, in the engine's words."""
        return ", then ".join(str(self.steps[step]) for step in sorted(self.steps))


class Auto:
    """The precision that auto stands for now."""

    def __init__(
        self,
        bounds: Callable[[], tuple[Precision, Precision]],
        interval: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`bounds` gives the coarsest and the finest that it may be; a step takes `interval` seconds at
        least.
        """
        self.bounds, self._interval, self._clock = bounds, interval, clock
        self._now, self._stepped = bounds()[1], clock()
        self.switches = 0

    @property
    def now(self) -> Precision:
        """Within the bounds as they are at present."""
        coarsest, finest = self.bounds()
        return min(max(self._now, coarsest), finest)

    def look(self, waiting: int, running: int, places: int) -> None:
        """Step, if it is time: down while answers wait, up when none does and half of the places are free."""
        if self._clock() - self._stepped < self._interval:
            return
        step = -1 if waiting else 1 if 2 * running <= places else 0
        coarsest, finest = self.bounds()
        allowed = [one for one in sorted(PRECISIONS) if coarsest <= one <= finest]
        at = allowed.index(self.now)
        chosen = allowed[min(max(at + step, 0), len(allowed) - 1)]
        if chosen != self._now:
            self._now, self._stepped, self.switches = chosen, self._clock(), self.switches + 1


class Precisions:
    """Names of the model at its precisions, and what requests mean by them."""

    def __init__(
        self,
        name: str,
        finest: Callable[[], Precision],
        default: str | None,
        auto: Auto,
        fits: Callable[[], Mapping[str, Fit]] = dict,
    ) -> None:
        """`finest` gives the finest there is, `fits` fits by `fit:NAME`; `default` is for other requests."""
        self.name, self._finest, self._default, self.auto, self._fits = name, finest, default, auto, fits

    @property
    def there(self) -> list[Precision]:
        """The finest first."""
        return [one for one in PRECISIONS if one <= self._finest()]

    @property
    def models(self) -> list[str]:
        """Names that a request may give."""
        usable = [name for name, fit in self._fits().items() if fit.finest <= self._finest()]
        return [self.name, f"{self.name}:{AUTO}", *(f"{self.name}:{one}" for one in [*self.there, *usable])]

    def plan(self, model: str | None, field: object) -> Plan:
        """What a request with this model's name and this field `precision` is answered at."""
        named = self._named(model)
        if named is None:
            return self._of(self._default or str(self._finest()) if field is None else field)
        if field is not None and not (isinstance(field, str) and field.casefold() == named.casefold()):
            raise wrong("precision", f"the model's name says {named} already; leave out one of them")
        return self._of(named)

    def one(self, value: object, param: str = "precision", also: str = "") -> Precision | Fit:
        """A precision or a fit that is there; a refusal names what `also` may be given."""
        if isinstance(value, str) and is_fit(value):
            return self._fit(value, param)
        try:
            found = Precision(value if isinstance(value, str) else "")
        except PrecisionError:
            raise wrong(
                param, f"give one of {', '.join(map(str, PRECISIONS))}{also}, not {shown(value)}"
            ) from None
        if found > self._finest():
            raise wrong(
                param, f"{found} is not there; this model goes up to {self._finest()}", "precision_not_found"
            )
        return found

    def _fit(self, value: str, param: str) -> Fit:
        fits = self._fits()
        try:
            fit = fits.get(fit_name(value))
        except PrecisionError:
            fit = None
        if fit is None:
            there = f"there are {', '.join(fits)}" if fits else "there is none; `otaro fit` makes them"
            raise wrong(param, f"there is no fit {shown(value)}; {there}", "precision_not_found")
        if fit.finest > self._finest():
            told = f"{fit} needs planes up to {fit.finest}; this model goes up to {self._finest()}"
            raise wrong(param, told, "precision_not_found")
        return fit

    def _named(self, model: str | None) -> str | None:
        if model is None or model == self.name:
            return None
        if model.startswith(f"{self.name}:"):
            rest = model[len(self.name) + 1 :]
            if rest.casefold() == AUTO or rest.upper() in map(str, PRECISIONS) or self._is_known_fit(rest):
                return rest
        message = f"model: there is no {shown(model)}; there are {', '.join(self.models)}"
        raise ApiError(404, message, param="model", code="model_not_found")

    def _is_known_fit(self, value: str) -> bool:
        try:
            return is_fit(value) and fit_name(value) in self._fits()
        except PrecisionError:
            return False

    def _of(self, value: Any) -> Plan:
        if isinstance(value, str) and value.casefold() == AUTO:
            return Plan({0: self.auto.now}, auto=True)
        if not isinstance(value, dict):
            return Plan({0: self.one(value, also=", auto, a schedule, or prefill and decode")})
        numbers = [key.isascii() and key.isdigit() and len(key) < 10 for key in value]
        if any(numbers) and not all(numbers):
            raise wrong("precision", "give numbers of new tokens alone, or prefill and decode")
        if any(numbers):
            steps = {int(key): self.one(one, f"precision.{key}") for key, one in value.items()}
            if len(steps) < len(value):
                raise wrong("precision", "the schedule names a number of tokens twice")
            if 0 not in steps:
                raise wrong(
                    "precision", 'the schedule does not say what reads the prompt; give one for "0" too'
                )
            return Plan(steps)
        if value.keys().isdisjoint(("prefill", "decode")):
            raise wrong("precision", _FORMS)
        fields = Fields(value, "precision")
        prefill, decode = fields.required("prefill"), fields.required("decode")
        fields.end()
        return Plan({0: self.one(prefill, "precision.prefill"), 1: self.one(decode, "precision.decode")})
