"""Who joins the loop when: many requests, for `otaro.Engine`.

What a request says depends on the request alone, to the last bit: `loop` sees to that, each request draws
from a generator of its own, and what others left in the cache serves it only where it makes no difference
(`slots`).

Who waits is served by priority, then in the order of arrival. Where memory does not suffice for the first but
for a later one, that one may pass, a limited number of times.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from numbers import Integral, Real
from typing import Any

import torch

from otaro.errors import OtaroError, PrecisionError
from otaro.runtime.architectures import packed_modules, positions_of, rope_limit
from otaro.runtime.draft import Draft, Drafter
from otaro.runtime.load import load_tokenizer
from otaro.runtime.loop import Chunks, Loop
from otaro.runtime.modules import bits_of
from otaro.runtime.phases import Phases, steps_and_rows
from otaro.runtime.pieces import Pieces
from otaro.runtime.precision import PrecisionLike, attachment
from otaro.runtime.request import Prompt, Request, stops_of, tokens_of
from otaro.runtime.sample import Sampling, argmax
from otaro.runtime.serving import decoder_of, why_not
from otaro.runtime.slots import Slots
from otaro.runtime.stream import Stream
from otaro.sefp.precision import Precision

_CHUNK = {"cpu": 64, "cuda": 512}  # as long as a step or two of the others take
_NEW = 256  # tokens at most where nobody said
_PASSED = 16  # times that others may pass who waits for memory


class Scheduler(Loop):
    """Runs requests step by step. Any thread may call `submit` and `cancel_all`, one at a time `step`."""

    def __init__(
        self,
        model: Any,
        *,
        max_sequences: int = 16,
        cache_bytes: int | None = None,
        kv: str | Precision | None = None,
        chunk: int | None = None,
        tokenizer: Any = None,
    ) -> None:
        """As `Engine`."""
        if chunk is not None and chunk < 1:
            raise OtaroError(f"chunk={chunk}: prompts are read one token at a time, or more")
        self.model, self._attached = model, attachment(model)
        if reason := why_not(model):
            raise OtaroError(f"the engine needs a decoder, and none serves this model: {reason}")
        self._modules = packed_modules(model)
        decoder = decoder_of(model)
        self.max_sequences, most = max_sequences, decoder.max_sequences
        if not 0 < max_sequences <= most:
            raise OtaroError(
                f"max_sequences={max_sequences}: 1 to {most} sequences can run at once, others wait"
            )
        chunks = Chunks(chunk or _CHUNK.get(model.device.type, _CHUNK["cpu"]), decoder.exact_prompts)
        with torch.inference_mode(False):  # what is kept must stay writable when the caller's mode ends
            kept = None if kv is None else Precision(kv)
            self._slots = Slots(decoder, kept, max_sequences, cache_bytes, chunks)
        super().__init__(decoder, self._slots.cache, chunks, together=True)
        limits = (self._slots.most, positions_of(model), rope_limit(model))
        self.context = min(limit for limit in limits if limit is not None)
        """Tokens of a prompt and its answer that can be read."""
        self.wake: Callable[[], None] = lambda: None
        """Called when there is something to do."""
        self._given_tokenizer = tokenizer
        self._arrived: deque[Request] = deque()  # by other threads
        self._waiting: list[Request] = []

    @cached_property
    def tokenizer(self) -> Any:
        """The one given, or the model's own; loaded when it is first needed."""
        try:
            return self._given_tokenizer or load_tokenizer(self._attached.nested.path)
        except OtaroError as error:
            raise OtaroError(f"{error}, or give tokens with text=False") from error

    @property
    def waiting(self) -> int:
        """Requests that have not begun."""
        return len(self._waiting) + len(self._arrived)

    @property
    def running(self) -> int:
        """Requests that are being answered."""
        return len(self._running)

    @property
    def cache_bytes(self) -> int:
        """Memory of keys and values now."""
        return int(self.cache.nbytes)

    @property
    def cache_token_bytes(self) -> float:
        """Of that, the keys and values of one token."""
        return self._slots.token_bytes

    def submit(
        self,
        prompt: Prompt,
        *,
        precision: PrecisionLike | Mapping[int, PrecisionLike] | None = None,
        prefill: PrecisionLike | None = None,
        decode: PrecisionLike | None = None,
        max_new_tokens: int | None = None,
        draft: str | Precision | Draft | None = None,
        sampling: Sampling | None = None,
        stop: str | int | Sequence[str | int] | None = (),
        ignore_eos: bool = False,
        deadline: float | None = None,
        logprobs: int | None = None,
        watched: Sequence[int] | None = (),
        text: bool = True,
        priority: int = 0,
        by_thread: bool = False,
    ) -> Stream:
        """As `Engine.submit`; `by_thread` tells that reading the stream need not make the steps."""
        ids = tokens_of(prompt, lambda: self.tokenizer, self.decoder.vocabulary)
        limit = self._limit(len(ids), max_new_tokens)
        texts, ends = stops_of(stop, lambda: self.tokenizer)
        if texts and not text:
            raise OtaroError("stop: texts are looked for in text; give tokens, or leave out text=False")
        if logprobs is not None and not (
            isinstance(logprobs, Integral) and 0 <= logprobs <= self.decoder.vocabulary
        ):
            raise OtaroError(f"logprobs={logprobs!r}: give a number from 0 to {self.decoder.vocabulary}")
        watched = () if watched is None else watched
        if isinstance(watched, str) or not isinstance(watched, Iterable):
            raise OtaroError(f"watched={watched!r}: give tokens by their numbers, in a list")
        watched = list(watched)
        for token in watched:
            if not isinstance(token, Integral):
                raise OtaroError(f"watched: {token!r} is no token; give them by their numbers")
            if not 0 <= token < self.decoder.vocabulary:
                raise OtaroError(
                    f"watched: token {token} is not in the vocabulary of {self.decoder.vocabulary}"
                )
        if deadline is not None and not (isinstance(deadline, Real) and deadline > 0):
            raise OtaroError(f"deadline={deadline!r}: give seconds from now, more than 0")
        if not isinstance(priority, int):
            raise OtaroError(f"priority={priority!r}: give a whole number, larger for who goes first")
        if not isinstance(sampling, Sampling | None):
            raise OtaroError(
                f"sampling={sampling!r}: give an otaro.Sampling, such as Sampling(temperature=0.7)"
            )
        steps, rows = steps_and_rows(prefill, decode, None, precision)
        if rows is not None:
            raise PrecisionError("a request has one precision, or a schedule of them; make others for others")
        phases = Phases(self._attached, steps, self._modules)
        stream, now = Stream(phases.switch, self.wake, None if by_thread else self.step), time.perf_counter()
        stream.figures.prompt_tokens = len(ids)
        sampler, wanted, drafter = (sampling or Sampling()).sampler(), Draft.of(draft), None
        if wanted is not None:
            judges = phases.writing_bits(bits_of(self._modules, self._attached.nested))
            drafter = Drafter(wanted, judges, stream.figures)
        request = Request(
            stream=stream,
            ids=ids,
            prompt=len(ids),
            limit=limit,
            phases=phases,
            argmax=logprobs is None and not watched and sampler.argmax,
            sampler=sampler,
            drafter=drafter,
            pieces=Pieces(self.tokenizer, ids, texts) if text else None,
            ends=frozenset(ends if ignore_eos else ends | self._end_of_text),
            logprobs=logprobs,
            watched=watched,
            deadline=float("inf") if deadline is None else now + deadline,
            priority=priority,
            arrived=now,
        )
        self._arrived.append(request)
        self.wake()
        return stream

    def cancel_all(self) -> None:
        """Cancel every request."""
        for request in [*self._arrived, *self._waiting, *self._running]:
            request.stream.cancelled = True

    def abandon(self, error: BaseException) -> None:
        """No step will follow: tell every request why."""
        for request in [*self._arrived, *self._waiting, *self._running]:
            request.end("error", error, 0)

    @torch.inference_mode(False)
    @torch.no_grad()
    def step(self) -> bool:
        """Read prompts, a chunk at most, and a token of each that goes on; False where nothing is left."""
        while self._arrived:
            self._waiting.append(self._arrived.popleft())
            self._waiting.sort(key=lambda request: -request.priority)
        self._dismiss()
        self._admit()
        return super().step() or bool(self._arrived or self._waiting)

    # Who comes and goes

    def _dismiss(self) -> None:
        """Those who were cancelled, or whose time was up before they said a word."""
        now = time.perf_counter()
        for request in [*self._waiting, *self._running]:
            if request.stream.cancelled:
                self._finish(request, "cancelled")
            elif now >= request.deadline and not request.new:
                self._finish(request, "deadline")

    def _finish(self, request: Request, reason: str, error: BaseException | None = None) -> None:
        if request.slot is None:
            self._waiting.remove(request)
        else:
            self._leave(request)
            self._slots.leave(request.slot)
        request.end(reason, error, self.cache_bytes)

    def _admit(self) -> None:
        index = 0
        while index < len(self._waiting):
            request, reserved = self._waiting[index], [one.needed for one in self._running]
            if self._slots.has_memory(request.needed, reserved):
                (bits,) = self.bits([request])
                request.began_in(self._slots.take(request.ids, bits, request.needed, reserved))
                self._running.append(self._waiting.pop(index))
                for earlier in self._waiting[:index]:
                    earlier.passed += 1
            elif request.passed >= _PASSED or len(self._running) == self.max_sequences:
                return
            else:
                index += 1

    # What they say

    def choose(self, some: list[Request], logits: torch.Tensor) -> None:
        """Each by itself."""
        largest = argmax(logits)
        values = logits[range(len(some)), largest].tolist()
        for number, request in enumerate(some):
            self._say(request, request.choose, logits[number : number + 1], values[number], largest[number])

    def take(self, some: list[Request], tokens: list[int]) -> None:
        """Each by itself."""
        for request, token in zip(some, tokens, strict=True):
            self._say(request, request.take, token)

    def _say(self, request: Request, say: Callable[..., str | None], *what: Any) -> None:
        try:
            reason = say(*what)
        except Exception as error:
            self._finish(request, "error", error)
        else:
            if reason:
                self._finish(request, reason)

    def failed(self, some: list[Request], error: Exception, alone: bool) -> None:
        """Where they are refused together, each is read by itself: it is one's error alone."""
        if alone:
            self._finish(some[0], "error", error)
        else:
            for request in some:
                self._decode([request], ahead=False)

    def bits(self, some: list[Request], later: int = 0) -> list[bytes]:
        """Those of each request, or those that are set."""
        now, found = b"", []
        for request in some:
            if not (bits := request.phases.bits(request.new + later)):
                bits = now = now or bits_of(self._modules, self._attached.nested)
            found.append(bits)
        return found

    # What is asked for

    @cached_property
    def _end_of_text(self) -> set[int]:
        found = self.model.generation_config.eos_token_id
        found = self.model.config.get_text_config().eos_token_id if found is None else found
        return set() if found is None else set(found) if isinstance(found, list) else {found}

    def _limit(self, prompt: int, asked: int | None) -> int:
        """New tokens at most."""
        if asked is not None and (not isinstance(asked, Integral) or asked < 1):
            raise OtaroError(f"max_new_tokens={asked!r}: give a whole number, one at least")
        left = self.context + 1 - prompt  # the last one is not read
        if left >= (asked or 1):
            return asked or min(left, _NEW)
        told = f"the prompt has {prompt} tokens" + (f" and {asked} new ones are asked for" if asked else "")
        if self.context < self._slots.most:
            raise OtaroError(f"{told}: this model has positions for {self.context}")
        raise OtaroError(
            f"{told}: cache_bytes={self._slots.nbytes} holds {self.context} of a sequence; "
            "give the engine more, or fewer max_sequences"
        )
