"""Which tokens are read next: many requests, each at its own precision, by one decoder and one cache.

A step reads a chunk of a prompt, then one token of every sequence whose prompt was read. So sequences join and
leave between steps, and a long prompt holds nobody up for longer than a chunk.

What a request says depends on the request alone, to the last bit. A decoder computes the same for a token whatever
else is in the step; each request draws from a generator of its own; chunks end at the same places whoever is
there; and what others left in the cache serves it only where it makes no difference (`slots`).

Who waits is served in the order of arrival. Where memory does not suffice for the first but for a later one, that
one may pass, a limited number of times. Among prompts being read the one that is done soonest goes first; every
fourth chunk is the oldest one's, so that a long prompt comes to its end too.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, cast

import torch

from otaro.errors import OtaroError, PrecisionError
from otaro.runtime.architectures import packed_modules, rope_limit
from otaro.runtime.decoder import Decoder
from otaro.runtime.generate import positions_of
from otaro.runtime.load import load_tokenizer
from otaro.runtime.modules import bits_of
from otaro.runtime.phases import steps_and_rows
from otaro.runtime.pieces import Pieces
from otaro.runtime.precision import PrecisionLike, attachment
from otaro.runtime.request import Precisions, Prompt, Request, stops_of, tokens_of
from otaro.runtime.sample import Sampling
from otaro.runtime.serving import decoder_of, why_not
from otaro.runtime.slots import Slots
from otaro.runtime.stream import Stream
from otaro.sefp.precision import Precision

_CHUNK = {"cpu": 64, "cuda": 512}  # as long as a step or two of the others take
_NEW = 256  # tokens at most where nobody said
_PASSED = 16  # times that others may pass who waits for memory
_OLDEST = 4  # every so many chunks the oldest prompt goes first


class Scheduler:
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
        if reason := why_not(model):
            raise OtaroError(f"the engine needs a decoder, and none serves this model: {reason}")
        self.model, self._attached, self._modules = model, attachment(model), packed_modules(model)
        self.decoder = cast(Decoder, decoder_of(model))
        self.max_sequences, most = max_sequences, self.decoder.max_sequences
        if not 0 < max_sequences <= most:
            raise OtaroError(f"max_sequences={max_sequences}: 1 to {most} sequences can run at once, others wait")
        self._chunk = chunk or _CHUNK.get(model.device.type, _CHUNK["cpu"])
        with torch.inference_mode(False):  # what is kept must stay writable when the caller's mode ends
            kept = None if kv is None else Precision(kv)
            self._slots = Slots(self.decoder, kept, max_sequences, cache_bytes, self._chunk)
        limits = (self._slots.most, positions_of(model), rope_limit(model))
        self.context = min(limit for limit in limits if limit is not None)
        """Tokens of a prompt and its answer that can be read."""
        self.wake: Callable[[], None] = lambda: None
        """Called when there is something to do."""
        self._given_tokenizer = tokenizer
        self._arrived: deque[Request] = deque()  # by other threads
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._chunks = 0

    @cached_property
    def tokenizer(self) -> Any:
        """The one given, or the model's own; loaded when it is first needed."""
        try:
            return self._given_tokenizer or load_tokenizer(self._attached.nested.path)
        except OtaroError as error:
            raise OtaroError(f"{error}, or give tokens with text=False") from error

    @property
    def waiting(self) -> int:
        """Requests that wait for a place."""
        return len(self._waiting) + len(self._arrived)

    @property
    def running(self) -> int:
        """Requests that are being answered."""
        return len(self._running)

    @property
    def cache_bytes(self) -> int:
        """Memory of keys and values now."""
        return self._slots.cache.nbytes

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
        sampling: Sampling | None = None,
        stop: str | int | Sequence[str | int] = (),
        ignore_eos: bool = False,
        deadline: float | None = None,
        logprobs: int | None = None,
        watched: Sequence[int] = (),
        text: bool = True,
        by_thread: bool = False,
    ) -> Stream:
        """As `Engine.submit`; `by_thread` tells that reading the stream need not make the steps."""
        ids = tokens_of(prompt, lambda: self.tokenizer, self.decoder.vocabulary)
        limit = self._limit(len(ids), max_new_tokens)
        texts, ends = stops_of(stop, lambda: self.tokenizer)
        if texts and not text:
            raise OtaroError("stop: texts are looked for in text; give tokens, or leave out text=False")
        if logprobs is not None and not 0 <= logprobs <= self.decoder.vocabulary:
            raise OtaroError(f"logprobs={logprobs}: give a number from 0 to {self.decoder.vocabulary}")
        for token in watched:
            if not 0 <= token < self.decoder.vocabulary:
                raise OtaroError(f"watched: token {token} is not in the vocabulary of {self.decoder.vocabulary}")
        if deadline is not None and not deadline > 0:
            raise OtaroError(f"deadline={deadline}: give seconds from now, more than 0")
        precisions = Precisions(self._attached, self._modules, _steps(precision, prefill, decode), self._bits_set)
        stream, now = Stream(precisions.switch, self.wake, None if by_thread else self.step), time.perf_counter()
        stream.figures.prompt_tokens = len(ids)
        request = Request(
            stream=stream,
            ids=ids,
            prompt=len(ids),
            limit=limit,
            precisions=precisions,
            sampler=(sampling or Sampling()).sampler(),
            pieces=Pieces(self.tokenizer, ids, texts) if text else None,
            ends=frozenset(ends if ignore_eos else ends | self._end_of_text),
            logprobs=logprobs,
            watched=list(watched),
            deadline=float("inf") if deadline is None else now + deadline,
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
        """Read prompts, a chunk at most, then one token of each that goes on; False where nothing is left to do."""
        while self._arrived:
            self._waiting.append(self._arrived.popleft())
        self._dismiss()
        self._admit()
        self._read_prompts()
        self._decode([request for request in self._running if request.new])
        return bool(self._arrived or self._waiting or self._running)

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
            self._running.remove(request)
            self._slots.leave(request.slot)
        request.end(reason, error, self.cache_bytes)

    def _admit(self) -> None:
        place = 0
        while place < len(self._waiting):
            request, reserved = self._waiting[place], [one.needed for one in self._running]
            if self._slots.has_room(request.needed, reserved):
                bits = request.precisions.bits(0)
                request.began_in(self._slots.take(request.ids, bits, request.needed, reserved))
                self._running.append(self._waiting.pop(place))
                for earlier in self._waiting[:place]:
                    earlier.passed += 1
            elif request.passed >= _PASSED or len(self._running) == self.max_sequences:
                return
            else:
                place += 1

    # Reading

    def _read_prompts(self) -> None:
        """A chunk of the prompt that is done soonest, or of the oldest; short prompts share a turn."""
        left = self._chunk
        while prompts := [request for request in self._running if not request.new]:
            oldest = (self._chunks + 1) % _OLDEST == 0
            request = prompts[0] if oldest else min(prompts, key=_unread)
            start = request.prompt - _unread(request)
            end = self._slots.end_of_chunk(start, request.prompt)
            if end - start > left:
                return
            self._chunks, left = self._chunks + 1, left - (end - start)
            try:
                self._read(request, start, end)
            except Exception as error:
                self._finish(request, "error", error)

    def _read(self, request: Request, start: int, end: int) -> None:
        slot, ids, bits = request.slot, request.ids[start:end], request.bits()
        assert slot is not None
        logits = self.decoder.forward(ids, self._slots.cache, sequence=slot.number, bits=bits)
        slot.tokens += ids
        slot.how += [self._slots.how(start, end, bits)] * len(ids)
        if end == request.prompt:
            self._choose([request], logits.unsqueeze(0))

    def _decode(self, requests: list[Request]) -> None:
        """One token of each. Where they are refused together, each is read by itself: it is one's error alone."""
        if not requests:
            return
        try:
            bits = [request.bits() for request in requests]
            slots = [request.slot for request in requests if request.slot is not None]
            tokens = [request.ids[-1] for request in requests]
            logits = self.decoder.step(tokens, self._slots.cache, [slot.number for slot in slots], bits)
        except Exception as error:
            if len(requests) == 1:
                self._finish(requests[0], "error", error)
            else:
                for request in requests:
                    self._decode([request])
            return
        for slot, token, its_bits in zip(slots, tokens, bits, strict=True):
            slot.tokens.append(token)
            slot.how.append(its_bits)
        self._choose(requests, logits)

    def _choose(self, requests: list[Request], logits: torch.Tensor) -> None:
        """The next token of each, given logits [requests, vocabulary]."""
        # numpy finds them in an eighth of the time, and on this thread alone.
        likeliest = (logits.argmax(-1).cpu() if logits.is_cuda else logits.numpy().argmax(-1)).tolist()
        largest = logits[range(len(requests)), likeliest].tolist()
        for number, request in enumerate(requests):
            request.spoke = request.spoke or time.perf_counter()
            try:
                reason = request.choose(logits[number : number + 1], largest[number], likeliest[number])
            except Exception as error:
                self._finish(request, "error", error)
            else:
                if reason:
                    self._finish(request, reason)

    # What is asked for

    def _bits_set(self) -> bytes:
        return bits_of(self._modules, self._attached.nested)

    @cached_property
    def _end_of_text(self) -> set[int]:
        found = self.model.generation_config.eos_token_id
        found = self.model.config.get_text_config().eos_token_id if found is None else found
        return set() if found is None else set(found) if isinstance(found, list) else {found}

    def _limit(self, prompt: int, asked: int | None) -> int:
        """New tokens at most."""
        if asked is not None and asked < 1:
            raise OtaroError(f"max_new_tokens={asked}: one at least")
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


def _unread(request: Request) -> int:
    """Tokens of its prompt that are still to be read."""
    return request.prompt - (len(request.slot.tokens) if request.slot else 0)


def _steps(
    precision: PrecisionLike | Mapping[int, PrecisionLike] | None,
    prefill: PrecisionLike | None,
    decode: PrecisionLike | None,
) -> dict[int, PrecisionLike]:
    schedule: Any = precision if isinstance(precision, Mapping) and all(isinstance(key, int) for key in precision) else None
    rest: Any = None if schedule is not None else precision
    steps, rows = steps_and_rows(prefill, decode, schedule, rest)
    if rows is not None:
        raise PrecisionError("a request has one precision, or a schedule of them; make others for others")
    return steps
