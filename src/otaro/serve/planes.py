"""The planes of the model that is served: those that arrive later, and those that nobody uses.

A file that is copied into the directory is offered once all of it is there: its header is checked, and its
bytes are compared with their digests. Planes above whatever was used lately give their memory back; they are
read again from their files when they are wanted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from otaro.errors import FormatError
from otaro.file.fits import Fit, finest_of, read_fits
from otaro.file.header import shard_name
from otaro.file.io import Shard
from otaro.runtime.footprint import resident_planes, weight_bytes_per_token
from otaro.runtime.precision import attachment, set_precision, trim
from otaro.sefp.precision import COARSEST, FINEST, Precision, of_mantissa_bits
from otaro.serve.log import event


class Planes:
    """`look` and `release` are called now and then, by one thread at a time."""

    def __init__(self, model: Any, release_after: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._model, self._nested = model, attachment(model).nested
        self._release_after, self._clock = release_after, clock
        self.finest = self._nested.finest
        """The finest precision that is offered."""
        self._nested.require(self.finest)
        self._used = {self.finest: clock()}
        self._kept = self.finest
        self._complaint = ""
        self._reads: dict[Precision, int] = {}

    def fits(self) -> dict[str, Fit]:
        """The fits that lie beside the model now, by `fit:NAME`; one that cannot be read is told of."""
        try:
            return {str(fit): fit for fit in read_fits(self._nested).values()}
        except FormatError as error:
            self._complain("fits not taken up", str(error))
            return {}

    def use(self, chosen: Precision | Fit) -> None:
        """It is wanted now."""
        precision = finest_of(chosen)
        self._used[precision] = self._clock()
        if precision > self._kept:
            self._kept = precision

    def tell(self) -> list[dict[str, Any]]:
        """Of every precision that is offered: what its plane takes, how much is in memory, and what a token
        reads.

        Bytes all of them; in memory is None where the system does not tell. The coarsest has the base shard.
        """
        resident, told = resident_planes(self._model), []
        for bits in range(COARSEST, self.finest.mantissa_bits + 1):
            precision = of_mantissa_bits(bits)
            if precision not in self._reads:
                self._reads[precision] = weight_bytes_per_token(self._model, precision)
            shard = self._nested.base if bits == COARSEST else self._nested.plane(bits)
            sizes = {
                "plane_bytes": shard.size,
                "resident_bytes": None if resident is None else resident[bits],
            }
            told.append(
                {"precision": str(precision), **sizes, "weight_bytes_per_token": self._reads[precision]}
            )
        return told

    def look(self) -> None:
        """Take up planes that have arrived."""
        for bits in range(self.finest.mantissa_bits + 1, FINEST + 1):
            found = of_mantissa_bits(bits)
            if self._nested.finest < found:
                return
            try:
                Shard.open(self._nested.path / shard_name(bits), bits).verify()
                self._nested.plane(bits)  # whether it is this model's
            except FormatError as error:  # it is still being copied, or it is wrong
                self._complain("plane not taken up", str(error), plane=bits)
                return
            self.finest = found
            event("plane taken up", plane=bits, precision=str(found))

    def _complain(self, what: str, reason: str, **more: Any) -> None:
        if reason != self._complaint:
            self._complaint = reason
            event(what, **more, reason=reason)

    def release(self) -> int:
        """Give back the memory of planes above what was used lately; returns how many bytes they hold."""
        since = self._clock() - self._release_after
        recent = [one for one, when in list(self._used.items()) if when >= since]
        kept = max(recent, default=of_mantissa_bits(COARSEST))
        if kept >= self._kept:
            return 0
        self._kept = kept
        set_precision(self._model, kept)  # of no request: each brings its own
        released = trim(self._model)
        event("planes released", above=str(kept), bytes=released)
        return released
