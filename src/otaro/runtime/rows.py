"""The rows of one call of `generate`: a sequence of the loop each, without the padding that makes a rectangle of them.

They go on in step, as transformers has it: processors and criteria see all rows, and what is drawn is drawn row by row.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import StoppingCriteriaList
from transformers.generation import EosTokenCriteria, MaxLengthCriteria

from otaro.errors import OtaroError
from otaro.runtime.loop import Chunks, Loop, Row, Slot
from otaro.runtime.phases import described
from otaro.runtime.report import Generation
from otaro.runtime.sample import Sampler, argmax

_NEW = 1024  # tokens that there is memory for from the start: a cache that grows has its graphs captured again


class Rows:
    """Rows of tokens that grow without being copied each time; `ids` brings them up to date where they are kept."""

    def __init__(self, ids: torch.Tensor) -> None:
        self._prompt = self._written = ids.shape[1]
        self._buffer = torch.nn.functional.pad(ids, (0, self._prompt + 256))
        self._unwritten: list[list[int]] = []
        self.last: list[int] = []

    @property
    def length(self) -> int:
        """Tokens of a row, those of the prompt included."""
        return self._written + len(self._unwritten)

    @property
    def new(self) -> int:
        """Tokens of a row that were not in the prompt."""
        return self.length - self._prompt

    @property
    def ids(self) -> torch.Tensor:
        """[rows, length]."""
        if self._unwritten:
            if self.length > self._buffer.shape[1]:
                self._buffer = torch.nn.functional.pad(self._buffer, (0, self.length))
            columns = torch.tensor(self._unwritten, dtype=self._buffer.dtype).t()
            self._buffer[:, self._written : self.length] = columns.to(self._buffer.device)
            self._written, self._unwritten = self.length, []
        return self._buffer[:, : self._written]

    def append(self, tokens: list[int]) -> None:
        """One more token of each row."""
        self._unwritten.append(tokens)
        self.last = tokens


class Stop:
    """Stopping criteria; the two that are nearly always there cost no tensor. Rows end one by one, and are padded then."""

    def __init__(self, criteria: StoppingCriteriaList, rows: int, pad: torch.Tensor | None) -> None:
        self.limit: float = float("inf")
        self.ends: set[int] = set()
        self.others = StoppingCriteriaList()
        self._ended_at: list[int | None] = [None] * rows
        # As in transformers: without an end of text among the criteria, rows that others have ended go on.
        ends_rows = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        self.pad = int(pad) if ends_rows and rows > 1 and pad is not None else None
        for criterion in criteria:
            if type(criterion) is MaxLengthCriteria:
                self.limit = min(self.limit, criterion.max_length)
            elif type(criterion) is EosTokenCriteria:
                self.ends.update(criterion.eos_token_id.flatten().tolist())
            else:
                self.others.append(criterion)

    def padded(self, tokens: list[int]) -> list[int]:
        """These tokens, but padding in rows that have ended."""
        if self.pad is None:
            return tokens
        return [token if end is None else self.pad for token, end in zip(tokens, self._ended_at, strict=True)]

    def goes_on(self, row: int) -> bool:
        """Whether it has not ended."""
        return self._ended_at[row] is None

    def __call__(self, tokens: Rows, scores: Any) -> bool:
        """Whether all rows have ended."""
        # All are asked in any case: a criterion may count how often it is.
        others = self.others(tokens.ids, scores).tolist() if self.others else [False] * len(tokens.last)
        for row, (token, other) in enumerate(zip(tokens.last, others, strict=True)):
            if self._ended_at[row] is None and (other or token in self.ends or tokens.length >= self.limit):
                self._ended_at[row] = tokens.new
        return None not in self._ended_at

    def lasted(self, new: int) -> list[int]:
        """How many new tokens of each row are not padding."""
        return [new if self.pad is None or end is None else end for end in self._ended_at]


class Batch(Loop):
    """Continues rows until a criterion holds."""

    def __init__(
        self,
        decoder: Any,
        cache: Any,
        prompts: list[list[int]],
        bits: Callable[[int], bytes],
        row_bits: list[bytes] | None,
        sampler: Sampler,
        stop: Stop,
        tokens: Rows,
        report: Generation,
        *,
        keep_scores: bool,
        keep_logits: bool,
        told: Callable[[Rows], None],
    ) -> None:
        """`bits(step)` are the mantissa bits of all rows, `row_bits` those of each; `told` is called with every token."""
        if cache.pooled != decoder.pooled or len(cache.lengths) != len(prompts):
            raise OtaroError("this cache was made by the decoder of another model, or for another number of rows")
        super().__init__(decoder, cache, Chunks(sys.maxsize, exact=True))
        self._bits_of, self._row_bits = bits, row_bits
        self._sampler, self._stop, self.tokens, self._report, self._told = sampler, stop, tokens, report, told
        self.scores: list[torch.Tensor] | None = [] if keep_scores else None
        self.logits: list[torch.Tensor] | None = [] if keep_logits else None
        alone = sampler.argmax and not keep_scores and not keep_logits
        # Where nobody sees what follows the end of a row, it leaves; not on a GPU, which has a graph for each number of rows.
        self._may_leave = alone and stop.pad is not None and not decoder.ahead
        self._ran_at: list[bytes] = []
        self._spoke = 0.0
        most = stop.limit - tokens.length
        for number, (prompt, length) in enumerate(zip(prompts, cache.lengths, strict=True)):
            slot = Slot(number, prompt[:length])
            self._running.append(Row(ids=list(prompt), prompt=len(prompt), limit=most, argmax=alone, slot=slot))
        self._rows: list[Any] = self._running
        if not cache.pooled:
            decoder.reserve(cache, memory_for(prompts, most))

    def run(self) -> None:
        """Until all rows have ended. If that is refused, or interrupted, the cache is as it was before."""
        before, started = list(self.cache.lengths), time.perf_counter()
        try:
            while self.step():
                pass
            self.cache.check()
        except BaseException:
            self._drop()
            for number, length in enumerate(before):
                self.cache.crop(length, number)
            raise
        self._report.prefill_seconds, self._report.decode_seconds = self._spoke - started, time.perf_counter() - self._spoke
        self._report.new_tokens, self._report.cache_bytes = self.tokens.new, self.cache.nbytes
        # Of the new tokens all but the last were read; what else was read is forgotten.
        for row, new in zip(self._rows, self._stop.lasted(self.tokens.new), strict=True):
            self.cache.crop(row.prompt + new - 1, row.slot.number)

    def bits(self, some: list[Any], later: int = 0) -> list[bytes]:
        """All rows' alike, or each row's own."""
        if self._row_bits is None:
            return [self._bits_of(self.tokens.new + later)] * len(some)
        return [self._row_bits[row.slot.number] for row in some]

    def choose(self, some: list[Any], logits: torch.Tensor) -> None:
        """All rows at once."""
        tokens = argmax(logits) if self._sampler.argmax else self._sampler.choose(self.tokens.ids, logits)
        if self.scores is not None:
            self.scores.append(self._sampler.scores)
        if self.logits is not None:
            self.logits.append(logits)
        self.take(some, tokens)

    def take(self, some: list[Any], tokens: list[int]) -> None:
        """One more token of each row."""
        self._spoke = self._spoke or time.perf_counter()
        ran_at = [some[0].ran_at] if self._row_bits is None else self._row_bits
        if ran_at != self._ran_at:  # a phase, or somebody else, has switched
            self._ran_at = ran_at
            self._report.precisions.append(" / ".join(described(bits) for bits in ran_at))
        if self._may_leave:
            every = [self._stop.pad or 0] * len(self._rows)
            for row, token in zip(some, tokens, strict=True):
                every[row.slot.number] = token
            tokens = every
        self.tokens.append(self._stop.padded(tokens))
        for row in some:
            row.ids.append(self.tokens.last[row.slot.number])
        self._told(self.tokens)
        if self._stop(self.tokens, None if self.scores is None else tuple(self.scores)):
            self._running = []
            self._drop()
        elif self._may_leave:
            self._running = [row for row in self._running if self._stop.goes_on(row.slot.number)]

    def failed(self, some: list[Any], error: Exception, alone: bool) -> None:
        """All rows stand and fall together."""
        raise error


def memory_for(prompts: list[list[int]], most: float) -> int:
    """Tokens of a row to have memory for at first, where rows go on for `most` at most."""
    return max(map(len, prompts)) + int(min(most, _NEW))


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
