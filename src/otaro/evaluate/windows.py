"""A text cut into the windows that a model reads, and what is asked of its predictions there.

Windows start every `stride` tokens of the text. Where a beginning-of-text token is given, every window begins with it, since
whoever runs the model supplies it too: it takes one position of the window, is context, and is never scored.

`read` goes through the text once and shows the logits to any number of meters, a slice of positions at a time. A model is
read by a `SlicedModel`, or by anything else that has its way of making logits (`Reader`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from otaro.errors import OtaroError
from otaro.evaluate.logits import SlicedModel
from otaro.evaluate.progress import Count

LONGEST_WINDOW = 2048  # unless asked for more


def choose_window(config: Any, wanted: int | None = None) -> int:
    """The window to use with the model of this config: the one wanted, or as many positions as it has, up to 2048."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if wanted is None:
        return min(positions or LONGEST_WINDOW, LONGEST_WINDOW)
    if positions is not None and wanted > positions:
        raise OtaroError(f"a window of {wanted} tokens is more than the {positions} positions that this model has")
    return wanted


class Window(NamedTuple):
    """A part of the text, as the model reads it."""

    ids: torch.Tensor
    """Token ids [positions], that of the beginning included."""
    known: int
    """So many of them are context: the beginning, and what an earlier window has scored."""
    position: int
    """How many positions the windows before it have, together."""
    end: int
    """Where it ends in the text."""


@dataclass(frozen=True)
class Windows:
    """Token ids [tokens] in windows of `window` positions, by default such as do not overlap."""

    ids: torch.Tensor
    window: int
    stride: int | None = None
    bos: int | None = None

    def __post_init__(self) -> None:
        """Refuse what leaves nothing to predict."""
        if len(self.ids) < 1 or (len(self.ids) < 2 and self.bos is None):
            raise OtaroError(f"at least 2 tokens of text are needed, one to predict and one before it; got {len(self.ids)}")
        if self.window < 2:
            raise OtaroError(f"a window of {self.window} leaves no token to predict from another; 2 is the least")
        if self.stride is not None and not 0 < self.stride <= self.window:
            raise OtaroError(f"the stride must be between 1 and the window of {self.window} tokens, got {self.stride}")

    @property
    def room(self) -> int:
        """Tokens of the text in a window."""
        return self.window - (self.bos is not None)

    @property
    def step(self) -> int:
        """Tokens from the start of a window to that of the next."""
        return min(self.stride or self.window, self.room)

    @property
    def overlap(self) -> bool:
        """Whether windows repeat tokens of those before."""
        return self.step < self.room

    def __iter__(self) -> Iterator[Window]:
        begin = torch.tensor([] if self.bos is None else [self.bos], dtype=self.ids.dtype)
        scored_to = position = 0
        for start in range(0, len(self.ids), self.step):
            end = min(start + self.room, len(self.ids))
            ids = torch.cat([begin, self.ids[start:end]])
            yield Window(ids, len(begin) + scored_to - start, position, end)
            scored_to, position = end, position + len(ids)
            if end == len(self.ids):
                break


class Meter(Protocol):
    """Looks at predictions."""

    aside: bool
    """Whether its time is not part of reading the text."""

    def add(self, window: Window, first: int, states: torch.Tensor | None, logits: torch.Tensor | None) -> None:
        """States and logits at the positions of the window from `first` on."""


class Reader(Protocol):
    """Makes logits of token ids."""

    def read(self, ids: torch.Tensor, with_logits: bool) -> Iterator[tuple[torch.Tensor | None, torch.Tensor | None]]:
        """States and logits at the positions of a window, some at a time, in order."""


class ModelReader:
    """Reads by a transformers model; a head works best on many positions, and comparing takes the memory of several."""

    def __init__(self, model: Any, *, comparing: bool = True) -> None:
        self.sliced = SlicedModel(model)
        self._at_once = self.sliced.slice * (1 if comparing else 4)

    def read(self, ids: torch.Tensor, with_logits: bool) -> Iterator[tuple[torch.Tensor | None, torch.Tensor | None]]:
        """Layers for the window as a whole, then the head for a slice at a time."""
        states = self.sliced.states(ids)
        for part in states.split(self._at_once):
            yield part, self.sliced.logits(part) if with_logits else None


@torch.inference_mode()
def read(reader: Reader, windows: Windows, meters: Sequence[Meter], progress: Count, *, with_logits: bool = True) -> float:
    """Show every window to every meter; returns the seconds that reading took, without the meters that stand aside."""
    started, aside = time.perf_counter(), 0.0
    for window in windows:
        first = 0
        for states, logits in reader.read(window.ids, with_logits):
            for meter in meters:
                before = time.perf_counter()
                meter.add(window, first, states, logits)
                aside += (time.perf_counter() - before) * meter.aside
            shown = states if logits is None else logits
            assert shown is not None
            first += len(shown)
        progress(window.end, len(windows.ids))
    return time.perf_counter() - started - aside
