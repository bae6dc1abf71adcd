"""A text cut into the windows that a model reads, and what is asked of its predictions there.

Windows start every `stride` tokens of the text. Where a beginning-of-text token is given, every window begins
with it, since whoever runs the model supplies it too: it takes one position of the window, is context, and is
never scored.

`read` goes through the text once and shows the logits to any number of meters, a slice of positions at a
time. A model is read by transformers (`ModelReader`), or by the decoder (`KvReader`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from otaro.errors import OtaroError, PrecisionError
from otaro.evaluate.logits import SLICE, SlicedModel
from otaro.evaluate.progress import Count
from otaro.runtime.decode import Decoder
from otaro.runtime.gpu import GpuDecoder
from otaro.sefp.precision import PRECISIONS, Precision

LONGEST_WINDOW = 2048  # unless asked for more
FLOAT16 = "float16"
KV_NAMES = (FLOAT16, *map(str, PRECISIONS))


def choose_window(config: Any, wanted: int | None = None) -> int:
    """The window for the model of this config: the one wanted, or all its positions, up to 2048."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if wanted is None:
        return min(positions or LONGEST_WINDOW, LONGEST_WINDOW)
    if positions is not None and wanted > positions:
        raise OtaroError(f"a window of {wanted} tokens is more than the {positions} positions of the model")
    return wanted


def parse_kv(text: str) -> tuple[str, ...]:
    """`float16,E5M7,E5M5` as names; `all` for all of them."""
    names = [name.strip() for name in text.split(",")]
    if names == ["all"]:
        return KV_NAMES
    exact = {name.lower(): name for name in KV_NAMES}
    if odd := [name for name in names if name.lower() not in exact]:
        raise PrecisionError(f"--kv {odd[0]}: give all, or some of {', '.join(KV_NAMES)}")
    return tuple(dict.fromkeys(exact[name.lower()] for name in names))


AtPositions = torch.Tensor | None
"""States or logits at some positions; None of what is not asked for."""


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
            raise OtaroError(f"at least 2 tokens of text are needed, to predict one; got {len(self.ids)}")
        if self.window < 2:
            raise OtaroError(f"a window of {self.window} leaves no token to predict; 2 is the least")
        if self.stride is not None and not 0 < self.stride <= self.window:
            window = f"the window of {self.window} tokens"
            raise OtaroError(f"the stride must be between 1 and {window}, got {self.stride}")

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

    def add(self, window: Window, first: int, states: AtPositions, logits: AtPositions) -> None:
        """States and logits at the positions of the window from `first` on."""


Slices = Iterator[tuple[AtPositions, AtPositions]]
"""States and logits at the positions of a window, some at a time, in order."""


class ModelReader:
    """Reads by a transformers model; a head works best on many positions, but comparing takes much memory."""

    def __init__(self, model: Any, *, comparing: bool = True) -> None:
        self.sliced = SlicedModel(model)
        self._at_once = self.sliced.slice * (1 if comparing else 4)

    def read(self, ids: torch.Tensor, with_logits: bool) -> Slices:
        """Layers for the window as a whole, then the head for a slice at a time."""
        states = self.sliced.states(ids)
        for part in states.split(self._at_once):
            yield part, self.sliced.logits(part) if with_logits else None


class KvReader:
    """Reads by the decoder of a nested model through its own cache, to see what packed keys and values cost.

    The decoder keeps them in float16, or at a precision; transformers, by which everything else is measured,
    in the type of the model. A window is read from an empty cache, in steps: a token's arithmetic does not
    depend on the tokens it is read with, so the logits are those of reading one token after the other, and
    what a token attends to is what the cache holds.
    """

    def __init__(self, model: Any, kv: str) -> None:
        on_gpu = model.device.type == "cuda"
        decoder: Any = GpuDecoder if on_gpu else Decoder
        if why_not := decoder.why_not(model):
            raise OtaroError(f"--kv {kv} needs the decoder, which does not serve this model: {why_not}")
        self._decoder = decoder.of(model)
        self._kv = None if kv == FLOAT16 else Precision(kv)
        self._at_once = max(8, SLICE // int(model.config.vocab_size))

    def read(self, ids: torch.Tensor, with_logits: bool) -> Slices:
        """Logits at the positions of a window, some at a time."""
        cache = self._decoder.new_cache(kv=self._kv)
        for some in ids.split(self._at_once):
            yield None, self._decoder.forward(some.tolist(), cache, all_logits=True)


Reader = ModelReader | KvReader


@torch.inference_mode()
def read(
    reader: Reader, windows: Windows, meters: Sequence[Meter], progress: Count, *, with_logits: bool = True
) -> float:
    """Show every window to every meter; returns seconds of reading, without the meters that stand aside."""
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
