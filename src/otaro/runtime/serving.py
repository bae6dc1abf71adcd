"""Which decoder serves a model, and how `generate` reads tokens with it.

On a CPU it is the extension's (`decode`), for up to 64 rows of tokens, on a GPU the one of captured graphs (`gpu`), for up to
16. Each row is a sequence of its own, without the padding that makes a rectangle of them, and may have its own precision.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from otaro.errors import OtaroError
from otaro.runtime.decode import Decoder, DecoderCache
from otaro.runtime.gpu import GpuDecoder
from otaro.runtime.gpu_cache import GpuCache
from otaro.runtime.precision import attachment

_ROOM = 1024  # new tokens for which there is room from the start: a cache that grows has its graphs captured again


def room_for(prompts: list[list[int]], most: float) -> int:
    """Positions to make room for at first, where rows go on for `most` tokens at most."""
    return max(map(len, prompts)) + int(min(most, _ROOM))


def kind_of(model: Any) -> type[Decoder] | type[GpuDecoder]:
    """The decoder for the device that a model is on."""
    return GpuDecoder if model.device.type == "cuda" else Decoder


def why_not(model: Any) -> str | None:
    """Why this model has to go through transformers, in words; None if a decoder serves it."""
    return kind_of(model).why_not(model)


def rows_at_once(model: Any) -> int:
    """How many rows of tokens the decoder of this model's device takes."""
    return kind_of(model).max_sequences


@torch.inference_mode(False)
def decoder_of(model: Any) -> Decoder | GpuDecoder:
    """The decoder of a model, made when it is first needed, and anew when the model was changed."""
    attached, kind = attachment(model), kind_of(model)
    with attached.nested.lock:
        if not isinstance(attached.decoder, kind) or not attached.decoder.serves(model):
            attached.decoder = GpuDecoder.of(model) if kind is GpuDecoder else Decoder.of(model)
        decoder: Decoder | GpuDecoder = attached.decoder
    return decoder


def forget(model: Any) -> None:
    """Let go of a model's decoder: it points into tensors that are about to move, and would keep them."""
    attached = attachment(model)
    with attached.nested.lock:
        attached.decoder = None


class Reader:
    """Reads some rows. `bits(step)` gives the mantissa bits of a step, `rows` those of each row, where they were given."""

    def __init__(
        self,
        decoder: Any,
        cache: DecoderCache,
        prompts: list[list[int]],
        bits: Callable[[int], bytes],
        rows: list[bytes] | None,
        most: float,
    ) -> None:
        if isinstance(cache, GpuCache) != isinstance(decoder, GpuDecoder) or len(cache.lengths) != len(prompts):
            raise OtaroError("this cache was made by the decoder of another model, or for another number of rows")
        self._decoder, self.cache, self._bits, self._rows = decoder, cache, bits, rows
        self._unread = [prompt[length:] for prompt, length in zip(prompts, cache.lengths, strict=True)]
        self._before = list(cache.lengths)
        self._lengths = [len(prompt) for prompt in prompts]
        if isinstance(decoder, GpuDecoder) and isinstance(cache, GpuCache):
            decoder.reserve(cache, room_for(prompts, most))
        self._going: object = None
        self._under_way: deque[tuple[int, bytes]] = deque()
        self.ahead: int = decoder.ahead
        self.ran_at: Sequence[bytes] = rows or ()
        """Mantissa bits of the last step that was waited for; of each row, where they have their own."""

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Nobody else uses the decoder meanwhile; if anything is refused the cache is as before all of it."""
        with self._decoder.lock:
            try:
                yield
            except OtaroError:
                for row, length in enumerate(self._before):
                    self.cache.crop(length, row)
                raise

    def read(self, tokens: Sequence[int] | None, step: int) -> torch.Tensor:
        """Logits [rows, vocabulary] on the device, after these tokens, one of each row; if none, after the prompts."""
        with self.refusing():
            rows = self._rows or [self._bits(step)] * len(self._unread)
            if tokens is None:
                prompts = enumerate(zip(self._unread, rows, strict=True))
                logits = torch.stack(
                    [self._decoder.forward(ids, self.cache, sequence=row, bits=bits) for row, (ids, bits) in prompts]
                )
                if logits.is_cuda:
                    torch.cuda.current_stream(logits.device).synchronize()  # its time is the prompt's
            else:
                logits = self._decoder.step(tokens, self.cache, bits=rows)
            self.ran_at = self._rows or rows[:1]
        return logits

    def likeliest(self, tokens: list[int], step: int, ahead: int) -> list[int]:
        """What follows these tokens, the ones of the step before.

        Up to `ahead` more steps are started before this one is waited for.
        """
        with self.refusing():
            if not self._under_way and not self._decoder.goes_on(self._going):
                self._going = self._decoder.begin(tokens, self.cache, bits=self._rows)
            while len(self._under_way) <= ahead:
                bits = self._bits(step + len(self._under_way))
                self._under_way.append((self._decoder.advance(bits), bits))
            number, bits = self._under_way.popleft()
            self.ran_at = self._rows or [bits]
            chosen = self._decoder.chosen(number)
            if not ahead:
                self.cache.check()
        return list(chosen)

    def finish(self, new: Sequence[int]) -> None:
        """Of so many new tokens of each row all but the last were read; what else was read is forgotten."""
        with self.refusing():
            self.cache.check()
        for row, (length, count) in enumerate(zip(self._lengths, new, strict=True)):
            self.cache.crop(length + count - 1, row)


def unpadded(ids: torch.Tensor, mask: torch.Tensor | None) -> list[list[int]]:
    """Rows of tokens without the padding on their left."""
    rows: list[list[int]] = ids.tolist()
    if mask is None:
        return rows
    return [row[len(row) - count :] for row, count in zip(rows, mask.sum(1).tolist(), strict=True)]


def padded_on_the_left(mask: torch.Tensor) -> bool:
    """Whether what a mask [rows, tokens] hides is at the beginning of each row, and not all of it."""
    seen = mask == 1
    return bool((seen | (mask == 0)).all() and (seen[:, 1:] | ~seen[:, :-1]).all() and seen[:, -1].all())
