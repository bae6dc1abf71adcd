"""The rows of one call of `generate`: a sequence of the loop each, without the padding that makes a rectangle
of them.

They go on in step, as transformers has it: processors and criteria see all rows, and what is drawn is drawn
row by row.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, GenerateDecoderOnlyOutput, MaxLengthCriteria

from otaro.errors import OtaroError, PrecisionError
from otaro.runtime.architectures import packed_modules, positions_of
from otaro.runtime.caches import DecoderCache
from otaro.runtime.draft import Draft, Drafter
from otaro.runtime.gpu import GpuDecoder
from otaro.runtime.loop import Chunks, Loop, Row, Slot
from otaro.runtime.modules import bits_of
from otaro.runtime.obstacles import Obstacle, warn_of_positions
from otaro.runtime.phases import Phases, described
from otaro.runtime.precision import PrecisionLike, attachment
from otaro.runtime.report import Generation
from otaro.runtime.sample import Sampler, argmax
from otaro.runtime.serving import decoder_of
from otaro.sefp.precision import Precision

# tokens that there is memory for from the start: a cache that grows has its graphs captured again
_NEW = 1024


class Rows:
    """Rows of tokens that grow without being copied each time; `ids` updates them where they are kept."""

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
    """Stopping criteria; the two that are nearly always there cost no tensor. Rows end one by one, and are
    padded then.
    """

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


@dataclass
class Call:
    """What was asked of `generate` besides what transformers knows."""

    phases: Phases
    kv: Precision | None
    rows: Sequence[PrecisionLike] | None
    """A precision for each row."""
    report: Generation
    draft: Draft | None = None
    obstacle: Obstacle | None = None
    """In the arguments."""


class Batch(Loop):
    """Continues rows until a criterion holds, as `_sample` of transformers does, whose arguments it takes."""

    def __init__(
        self,
        model: Any,
        ids: torch.Tensor,
        mask: torch.Tensor | None,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: Any,
        streamer: Any,
        given: DecoderCache | None,
        call: Call,
    ) -> None:
        decoder, attached = decoder_of(model), attachment(model)
        # without the padding on their left
        widths = [ids.shape[1]] * len(ids) if mask is None else mask.sum(1).tolist()
        prompts: list[list[int]] = [
            row[len(row) - width :] for row, width in zip(ids.tolist(), widths, strict=True)
        ]
        self._stop, self._tokens = Stop(criteria, len(ids), config._pad_token_tensor), Rows(ids)
        new = self._stop.limit - self._tokens.length  # at most
        capacity = max(map(len, prompts)) + int(min(new, _NEW))
        cache: Any = given or decoder.new_cache(call.kv, len(prompts), capacity)
        if cache.pooled != decoder.pooled or len(cache.lengths) != len(prompts):
            raise OtaroError(
                "this cache was made by the decoder of another model, or for another number of rows"
            )
        super().__init__(decoder, cache, Chunks(sys.maxsize, exact=True))
        self._phases, self._nested, self._modules = call.phases, attached.nested, packed_modules(model)
        self._phases.modules = self._modules
        self._row_bits: list[bytes] | None = None
        if call.rows is not None:
            if len(call.rows) != len(prompts):
                raise PrecisionError(f"{len(call.rows)} precisions were given for {len(prompts)} rows")
            self._row_bits = [
                Phases(attached, {0: precision}, self._modules).bits(0) for precision in call.rows
            ]
        self._whole = bool(config.return_dict_in_generate)
        self._scores: list[torch.Tensor] | None = [] if self._whole and config.output_scores else None
        self._logits: list[torch.Tensor] | None = [] if self._whole and config.output_logits else None
        self._sampler = Sampler(processors, bool(config.do_sample), exact_scores=self._scores is not None)
        device_chooses = self._sampler.argmax and self._logits is None
        # Where nobody sees what follows the end of a row, it leaves; not on a GPU, which has a graph for each
        # number of rows.
        self._may_leave = device_chooses and self._stop.pad is not None and not decoder.ahead
        for number, (prompt, length) in enumerate(zip(prompts, cache.lengths, strict=True)):
            if length >= len(prompt):
                raise OtaroError(
                    f"the cache holds {length} tokens and the prompt {len(prompt)}: pass all tokens, those "
                    "in the cache "
                    "included, and one more at least"
                )
            row = Row(ids=prompt, prompt=len(prompt), limit=new, argmax=device_chooses, sampler=self._sampler)
            row.slot = Slot(number, prompt[:length])
            self._running.append(row)
        if call.draft is not None:
            if len(prompts) > 1:
                raise OtaroError(
                    "a draft serves one row; an otaro.Engine has one for each of several requests"
                )
            judges = self._row_bits or call.phases.writing_bits(bits_of(self._modules, self._nested))
            row.drafter = Drafter(call.draft, judges, call.report)
        if isinstance(decoder, GpuDecoder):
            decoder.reserve(cache, capacity)
        self._rows: list[Any] = self._running
        self._model, self._streamer, self._positions = model, streamer, positions_of(model) or sys.maxsize
        self._ran_at: list[bytes] = []
        self._spoke = 0.0
        self._report = model.generation = call.report
        self._report.served_by, self._report.prompt_tokens = "decoder", ids.shape[1]
        self._report.reused_tokens = cache.length

    def run(self) -> Any:
        """Until all rows have ended. If that is refused, or interrupted, the cache is as it was before."""
        report, before, started = self._report, list(self.cache.lengths), time.perf_counter()
        try:
            while self.step():
                pass
        except BaseException:
            self._drop()
            for number, length in enumerate(before):
                self.cache.crop(length, number)
            raise
        report.prefill_seconds, report.decode_seconds = (
            self._spoke - started,
            time.perf_counter() - self._spoke,
        )
        report.new_tokens, report.cache_bytes = self._tokens.new, self.cache.nbytes
        # Of the new tokens all but the last were read; what else was read is forgotten.
        for row, new in zip(self._rows, self._stop.lasted(self._tokens.new), strict=True):
            self.cache.crop(row.prompt + new - 1, row.slot.number)
        if self._streamer is not None:
            self._streamer.end()
        ids = self._tokens.ids.clone()
        if not self._whole:
            return ids
        scores, logits = (None if some is None else tuple(some) for some in (self._scores, self._logits))
        return GenerateDecoderOnlyOutput(
            sequences=ids, scores=scores, logits=logits, past_key_values=self.cache
        )

    def bits(self, some: list[Any], later: int = 0) -> list[bytes]:
        """All rows' alike, or each row's own."""
        if self._row_bits is not None:
            return [self._row_bits[row.slot.number] for row in some]
        return [self._phases.bits(self._tokens.new + later) or bits_of(self._modules, self._nested)] * len(
            some
        )

    def choose(self, some: list[Any], logits: torch.Tensor) -> None:
        """All rows at once."""
        tokens = (
            argmax(logits)
            if self._sampler.argmax
            else self._sampler.choose(self._tokens.ids, logits, some[0].proposal)
        )
        if self._scores is not None:
            self._scores.append(self._sampler.scores)
        if self._logits is not None:
            self._logits.append(logits)
        self.take(some, tokens)

    def take(self, some: list[Any], tokens: list[int]) -> None:
        """One more token of each row."""
        self._spoke = self._spoke or time.perf_counter()
        ran_at = self._row_bits or [some[0].ran_at]
        if ran_at != self._ran_at:  # a phase, or somebody else, has switched
            self._ran_at = ran_at
            self._report.precisions.append(" / ".join(described(bits) for bits in ran_at))
        if self._tokens.length > self._positions:
            warn_of_positions(self._model, self._positions)
        if self._may_leave:
            every = [0] * len(self._rows)
            for row, token in zip(some, tokens, strict=True):
                every[row.slot.number] = token
            tokens = every
        self._tokens.append(self._stop.padded(tokens))
        for row in some:
            row.judge(tokens[row.slot.number])
            row.ids.append(tokens[row.slot.number])
        if self._streamer is not None:
            self._streamer.put(torch.tensor(self._tokens.last))
        if self._stop(self._tokens, None if self._scores is None else tuple(self._scores)):
            self._running = []
            self._drop()
        elif self._may_leave:
            self._running = [row for row in self._running if self._stop.goes_on(row.slot.number)]

    def failed(self, some: list[Any], error: Exception, alone: bool) -> None:
        """All rows stand and fall together."""
        raise error
