"""One request of the scheduler: what was asked for, what was said so far, and when it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, TypedDict

import torch

from otaro.errors import OtaroError
from otaro.runtime.draft import Draft
from otaro.runtime.loop import Row, Slot
from otaro.runtime.phases import Phases, described
from otaro.runtime.pieces import Pieces
from otaro.runtime.precision import PrecisionLike
from otaro.runtime.sample import Sampling
from otaro.runtime.session import chat_tokens
from otaro.runtime.stream import Stream, Token
from otaro.sefp.precision import Precision

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""A text, tokens, or messages for the model's chat template."""


class Options(TypedDict, total=False):
    """What may be asked of `Engine.submit`, which says what each of them means."""

    precision: PrecisionLike | Mapping[int, PrecisionLike] | None
    prefill: PrecisionLike | None
    decode: PrecisionLike | None
    max_new_tokens: int | None
    draft: str | Precision | Draft | None
    sampling: Sampling | None
    stop: str | int | Sequence[str | int] | None
    ignore_eos: bool
    deadline: float | None
    logprobs: int | None
    watched: Sequence[int] | None
    text: bool
    priority: int


@dataclass(eq=False, kw_only=True)
class Request(Row):
    """From its arrival to its end."""

    stream: Stream
    phases: Phases
    pieces: Pieces | None
    """None where nobody wants text."""
    ends: frozenset[int]
    logprobs: int | None
    watched: list[int]
    deadline: float
    priority: int
    arrived: float
    began: float = 0.0
    spoke: float = 0.0
    """When its first token came."""
    passed: int = 0
    """How often others passed it while it waited for memory."""
    told: bytes = b""
    """The mantissa bits that figures tell of."""

    @property
    def needed(self) -> int:
        """Tokens that it may have to be remembered in the end; the last is never read."""
        return self.prompt + int(self.limit) - 1

    def began_in(self, slot: Slot) -> None:
        """It has its memory."""
        self.slot, self.began = slot, time.perf_counter()
        self.stream.figures.queue_seconds = self.began - self.arrived
        self.stream.figures.reused_tokens = len(slot.tokens)

    def choose(self, logits: torch.Tensor, largest: float, argmax: int) -> str | None:
        """The next token, given logits [1, vocabulary] and their largest; says why it is the last, if so."""
        if not abs(largest) < float("inf"):
            raise OtaroError(
                "the model's logits are not finite; its weights are damaged, or too large for float32"
            )
        token = argmax
        if not self.sampler.argmax:
            token = self.sampler.choose(
                torch.tensor([self.ids], device=logits.device), logits, self.proposal
            )[0]
        return self.take(token, *_logprobs(token, logits[0], self.logprobs, self.watched))

    def take(self, token: int, *logprobs: Any) -> str | None:
        """Go on with this token; says why it is the last, if so."""
        now = time.perf_counter()
        self.spoke = self.spoke or now
        if self.ran_at != self.told:
            self.told, told = self.ran_at, self.stream.figures.precisions
            if told[-1:] != [described(self.told)]:
                told.append(described(self.told))
        self.judge(token)
        self.ids.append(token)
        reason, piece = None, ""
        if token in self.ends:
            reason, self.stream.stopped_by = "stop", token
        elif self.pieces:
            piece = self.pieces.add(token)
        if reason is None and self.new >= self.limit:
            reason = "length"
        if reason is None and now >= self.deadline:
            reason = "deadline"
        if self.pieces and reason and self.pieces.stopped_by is None:
            piece += self.pieces.end()
        if self.pieces and self.pieces.stopped_by is not None:
            reason, self.stream.stopped_by = "stop", self.pieces.stopped_by
        self.stream.put(Token(token, piece, *logprobs))
        return reason

    def end(self, reason: str, error: BaseException | None, cache_bytes: int) -> None:
        """There will be no more."""
        now, figures = time.perf_counter(), self.stream.figures
        if not self.began:
            figures.queue_seconds = now - self.arrived
        elif not self.spoke:
            figures.prefill_seconds = now - self.began
        else:
            figures.prefill_seconds, figures.decode_seconds = self.spoke - self.began, now - self.spoke
        figures.new_tokens, figures.cache_bytes = self.new, cache_bytes
        self.stream.finish(reason, error)


def _logprobs(
    token: int, logits: torch.Tensor, wanted: int | None, watched: list[int]
) -> tuple[float | None, tuple[tuple[int, float], ...], tuple[float, ...]]:
    if wanted is None and not watched:
        return None, (), ()
    every = logits.log_softmax(0)
    values, tokens = every.topk(wanted or 0)
    top = tuple(zip(tokens.tolist(), values.tolist(), strict=True))
    return (
        None if wanted is None else float(every[token]),
        top,
        tuple(every[watched].tolist()) if watched else (),
    )


def tokens_of(prompt: Prompt, tokenizer: Callable[[], Any], vocabulary: int) -> list[int]:
    """The tokens of a prompt; refused where a model of this vocabulary cannot read them."""
    if isinstance(prompt, str):
        text = whole_text("the prompt", prompt)
        ids = list(tokenizer()(text)["input_ids"])
    elif isinstance(prompt, Iterable) and any(isinstance(one, Mapping) for one in prompt):
        messages = [_message(number, one) for number, one in enumerate(prompt)]
        if not getattr(tokenizer(), "chat_template", None):
            raise OtaroError(
                "this model has no chat template, so it takes no messages; give a text to go on with"
            )
        ids = chat_tokens(tokenizer(), messages)
    else:
        try:
            if isinstance(prompt, bytes | bytearray):  # which would be taken for tokens
                raise TypeError
            ids = [index(one) for one in prompt]  # type: ignore[arg-type]
        except TypeError:
            raise OtaroError(
                "a prompt is a text, a flat list of tokens, or messages with role and content"
            ) from None
    if not ids:
        raise OtaroError("the prompt holds no token")
    for token in ids:
        if not 0 <= token < vocabulary:
            raise OtaroError(f"token {token} is not in the vocabulary of {vocabulary}")
    return ids


def _message(number: int, message: Any) -> dict[str, Any]:
    """A message that a chat template can be asked about."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise OtaroError(f'message {number} has no role; give {{"role": "user", "content": "..."}}')
    content = message.get("content")
    if isinstance(content, str):
        whole_text(f"the content of message {number}", content)
    elif not isinstance(content, list) and not (content is None and message.get("tool_calls")):
        raise OtaroError(
            f'message {number} has no text as its content; give {{"role": ..., "content": "..."}}'
        )
    return dict(message)


def whole_text(what: str, text: str) -> str:
    """The text; refused where it has halves of surrogate pairs, which tokenizers cannot read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        wrong = f"character {error.start} is half of a surrogate pair"
        raise OtaroError(f"{what} is no Unicode text: {wrong}") from None
    return text


def stops_of(
    stop: str | int | Iterable[str | int] | None, tokenizer: Callable[[], Any]
) -> tuple[list[str], set[int]]:
    """Texts and tokens that end an answer. A special token's name is that token: text has no such names."""
    texts: list[str] = []
    ends: set[int] = set()
    if stop is None:
        return texts, ends
    several = isinstance(stop, Iterable) and not isinstance(stop, str | bytes)
    given: Iterable[Any] = stop if several else [stop]  # type: ignore[assignment]
    for one in given:
        if one == "":
            raise OtaroError("stop: an empty text stops nothing")
        if isinstance(one, str) and one in tokenizer().all_special_tokens:
            ends.add(int(tokenizer().convert_tokens_to_ids(one)))
        elif isinstance(one, str):
            texts.append(whole_text("stop", one))
        else:
            try:
                ends.add(index(one))
            except TypeError:
                raise OtaroError(f"stop={one!r}: give texts, or tokens by their numbers") from None
    return texts, ends
