"""Which precision the next batch is trained at. Pure Python, no torch.

A *path* is the sequence of precisions of a run. Four ways to walk it, all with the same three calls:
`choose()` names the precision of the next batch, `record(precision, loss)` reports what came of it,
`scores()` says how the choice stood.

  bps       the paper's Bit-Width Path Search (eq. 5): the precision with the highest
                score(b) = lambda * sqrt(ln t / t_b) - L_b
            where t counts batches from 1, t_b how often b was chosen before, and L_b is the last loss seen at
            b. A precision never chosen comes first, finest first, and so does the finer one of a tie.
            Exploration fades as ln t / t does, so the precisions with lower loss, the finer ones, come to be
            chosen more often (eqs. 6 to 9).
  uniform   drawn at random, optionally with weights
  fixed     always the same one
  fp        always full precision, written as None

The state of a search is plain JSON, so that a run can be resumed where it stopped.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any, Protocol

from otaro.sefp.precision import Precision


class PathSearch(Protocol):
    """What the trainer asks of a search; None stands for full precision."""

    def choose(self) -> Precision | None:
        """The precision of the next batch."""

    def record(self, precision: Precision | None, loss: float) -> None:
        """The loss of the batch that was trained at `precision`."""

    def scores(self) -> dict[str, float | None]:
        """The standing of each precision before the next choice; None for one never tried."""

    def state_dict(self) -> dict[str, Any]:
        """The state, as JSON."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""


class BitWidthPathSearch:
    """The paper's search.

    >>> search = BitWidthPathSearch([Precision("E5M4"), Precision("E5M8")], exploration=5.0)
    >>> search.choose()
    Precision('E5M8')
    """

    def __init__(self, precisions: Sequence[Precision], exploration: float) -> None:
        # finest first: the order of first visits and of ties
        self.precisions = sorted(set(precisions), reverse=True)
        self.exploration = exploration
        self._counts = dict.fromkeys(self.precisions, 0)
        self._losses = dict.fromkeys(self.precisions, math.nan)

    def choose(self) -> Precision:
        """The first precision never tried, else the one with the highest score."""
        for precision in self.precisions:
            if self._counts[precision] == 0:
                return precision
        return max(self.precisions, key=self._score)  # max keeps the first of equals

    def record(self, precision: Precision | None, loss: float) -> None:
        """Count the visit and remember the loss."""
        assert precision is not None
        self._counts[precision] += 1
        self._losses[precision] = loss

    def scores(self) -> dict[str, float | None]:
        """Equation 5 for the next batch."""
        return {str(p): self._score(p) if self._counts[p] else None for p in self.precisions}

    def state_dict(self) -> dict[str, Any]:
        """Visits and last losses."""
        return {
            "counts": {str(p): count for p, count in self._counts.items()},
            "losses": {str(p): self._losses[p] for p in self.precisions if self._counts[p]},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        for precision in self.precisions:
            self._counts[precision] = state["counts"][str(precision)]
            self._losses[precision] = state["losses"].get(str(precision), math.nan)

    def _score(self, precision: Precision) -> float:
        batch = 1 + sum(self._counts.values())
        exploration = self.exploration * math.sqrt(math.log(batch) / self._counts[precision])
        return exploration - self._losses[precision]


class UniformSearch:
    """Draws a precision at random for each batch, each as likely as its weight says."""

    def __init__(self, precisions: Sequence[Precision], weights: Sequence[float] | None, seed: int) -> None:
        self.precisions = list(precisions)
        self.weights = list(weights) if weights else [1.0] * len(self.precisions)
        self._random = random.Random(seed)

    def choose(self) -> Precision:
        """The next draw."""
        return self._random.choices(self.precisions, self.weights)[0]

    def record(self, precision: Precision | None, loss: float) -> None:
        """Losses do not matter."""

    def scores(self) -> dict[str, float | None]:
        """The probability of each precision."""
        total = sum(self.weights)
        return {str(p): weight / total for p, weight in zip(self.precisions, self.weights, strict=True)}

    def state_dict(self) -> dict[str, Any]:
        """The state of the generator."""
        version, internal, gauss = self._random.getstate()
        return {"random": [version, list(internal), gauss]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        version, internal, gauss = state["random"]
        self._random.setstate((version, tuple(internal), gauss))


class FixedSearch:
    """Always the same precision, or full precision."""

    def __init__(self, precision: Precision | None) -> None:
        self.precision = precision

    def choose(self) -> Precision | None:
        """The one there is."""
        return self.precision

    def record(self, precision: Precision | None, loss: float) -> None:
        """Nothing to learn."""

    def scores(self) -> dict[str, float | None]:
        """No competition."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """None to speak of."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""
