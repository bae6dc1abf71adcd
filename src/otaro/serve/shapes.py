"""Answers as OpenAI's clients read them: whole, and as events of a stream.

A shape belongs to one request. It is told of tokens as they come, `take`, and then has either the whole
answer or the events so far to give. Every answer and every event also says its `precision`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from otaro.runtime.stream import Stream, Token
from otaro.serve.errors import ApiError
from otaro.serve.service import Answers

_REASONS = {"deadline": "length"}  # clients know stop and length


@dataclass
class Choice:
    """One of the answers, so far."""

    stream: Stream
    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    """All but the one that ended it."""
    offsets: list[int] = field(default_factory=list)
    """Where in the text each of them begins."""

    def take(self, token: Token) -> bool:
        """One more; False if it ends the answer and says nothing."""
        if token.id == self.stream.stopped_by and isinstance(self.stream.stopped_by, int):
            self.text += token.text  # what was held back
            return bool(token.text)
        self.tokens.append(token)
        self.offsets.append(len(self.text))
        self.text += token.text
        return bool(token.text)

    @property
    def finish_reason(self) -> str:
        """In the words of clients."""
        reason = self.stream.finish_reason or ""
        return _REASONS.get(reason, reason)


class Shape:
    """What chats and completions have in common."""

    prefix, whole_object, chunk_object = "", "", ""

    def __init__(self, answers: Answers, tokenizer: Any, name: str) -> None:
        self.answers, self._tokenizer = answers, tokenizer
        self.model = answers.ask.model or name
        self.choices = [Choice(stream) for stream in answers.streams]
        self.id = f"{self.prefix}{answers.id}"

    def take(self, number: int, token: Token | None) -> bytes:
        """A token of a choice, or its end; the events that follow from it."""
        choice = self.choices[number]
        if token is None:
            return self.event(self.chunk([self.ending(number)]))
        before = len(choice.tokens)
        if not choice.take(token) and self.answers.ask.logprobs is None:
            return b""
        return self.event(self.chunk([self.piece(number, token, choice.tokens[before:])]))

    def begin(self) -> bytes:
        """The first events."""
        return b""

    def end(self) -> bytes:
        """The last events."""
        usage = {**self.chunk([]), "usage": self.usage()}
        return (self.event(usage) if self.answers.ask.include_usage else b"") + b"data: [DONE]\n\n"

    def error(self, error: ApiError) -> bytes:
        """The last event, where there should have been more."""
        return self.event(error.body)

    def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        choices = [self.complete(number) for number in range(len(self.choices))]
        return {**self.head(self.whole_object), "choices": choices, "usage": self.usage()}

    def head(self, kind: str) -> dict[str, Any]:
        """Of the whole, and of every event."""
        answers = self.answers
        head = {"id": self.id, "object": kind, "created": answers.created, "model": self.model}
        return {**head, "precision": answers.precision}

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """What an event holds."""
        usage = {"usage": self.usage()} if self.answers.ask.continuous_usage else {}
        return {**self.head(self.chunk_object), "choices": choices, **usage}

    def usage(self) -> dict[str, Any]:
        """Tokens read and written."""
        prompt, new = self.answers.prompt_tokens, self.answers.new_tokens
        details = {"cached_tokens": self.answers.reused_tokens}
        counts = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
        right, wrong = self.answers.drafted
        predicted = {"accepted_prediction_tokens": right, "rejected_prediction_tokens": wrong}
        return {**counts, "prompt_tokens_details": details, "completion_tokens_details": predicted}

    def piece(self, number: int, token: Token, logged: list[Token]) -> dict[str, Any]:
        """A token in an event; `logged` holds it, or nothing where it was an end."""
        raise NotImplementedError

    def ending(self, number: int) -> dict[str, Any]:
        """That a choice has ended."""
        raise NotImplementedError

    def complete(self, number: int) -> dict[str, Any]:
        """A choice of the whole answer."""
        raise NotImplementedError

    def token_text(self, token: int) -> str:
        """A token by itself."""
        text: str = self._tokenizer.decode([token], clean_up_tokenization_spaces=False)
        return text

    @staticmethod
    def event(body: dict[str, Any]) -> bytes:
        """One server-sent event."""
        return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"


class Chat(Shape):
    """Of /v1/chat/completions."""

    prefix, whole_object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def begin(self) -> bytes:
        """Who speaks."""
        delta = {"role": "assistant", "content": ""}
        return b"".join(
            self.event(self.chunk([self._delta(number, delta)])) for number in range(len(self.choices))
        )

    def piece(self, number: int, token: Token, logged: list[Token]) -> dict[str, Any]:
        """Its text."""
        return self._delta(number, {"content": token.text}, self._logprobs(logged))

    def ending(self, number: int) -> dict[str, Any]:
        """Why."""
        return {**self._delta(number, {}), "finish_reason": self.choices[number].finish_reason}

    def complete(self, number: int) -> dict[str, Any]:
        """As a message."""
        choice = self.choices[number]
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        rest = {"logprobs": self._logprobs(choice.tokens), "finish_reason": choice.finish_reason}
        return {"index": number, "message": message, **rest}

    def _delta(self, number: int, delta: dict[str, Any], logprobs: Any = None) -> dict[str, Any]:
        return {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def _logprobs(self, tokens: list[Token]) -> dict[str, Any] | None:
        if self.answers.ask.logprobs is None:
            return None
        content = []
        for token in tokens:
            top = [self._logprob(*one) for one in token.top]
            content.append({**self._logprob(token.id, token.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _logprob(self, token: int, value: float | None) -> dict[str, Any]:
        text = self.token_text(token)
        whole = "\ufffd" not in text  # otherwise it is a part of a character
        return {"token": text, "logprob": value, "bytes": list(text.encode()) if whole else None}


class Completion(Shape):
    """Of /v1/completions."""

    prefix, whole_object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def piece(self, number: int, token: Token, logged: list[Token]) -> dict[str, Any]:
        """Its text."""
        offsets = self.choices[number].offsets[-1:] if logged else []
        return self._choice(number, token.text, self._logprobs(logged, offsets), None)

    def ending(self, number: int) -> dict[str, Any]:
        """Why."""
        return self._choice(number, "", None, self.choices[number].finish_reason)

    def complete(self, number: int) -> dict[str, Any]:
        """As a text."""
        choice = self.choices[number]
        return self._choice(
            number, choice.text, self._logprobs(choice.tokens, choice.offsets), choice.finish_reason
        )

    def _choice(self, number: int, text: str, logprobs: Any, reason: str | None) -> dict[str, Any]:
        return {"index": number, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, tokens: list[Token], offsets: list[int]) -> dict[str, Any] | None:
        if self.answers.ask.logprobs is None:
            return None
        return {
            "tokens": [self.token_text(token.id) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [{self.token_text(one): value for one, value in token.top} for token in tokens],
            "text_offset": offsets,
        }


class Response(Shape):
    """Of /v1/responses."""

    prefix = "resp_"

    def __init__(self, answers: Answers, tokenizer: Any, name: str) -> None:
        super().__init__(answers, tokenizer, name)
        self._number = 0
        self._at = {"item_id": f"msg_{answers.id}", "output_index": 0, "content_index": 0}

    def begin(self) -> bytes:
        """A response with a message with a text, all empty."""
        response, item = self._response("in_progress"), self._message("in_progress", [])
        return (
            self._event("response.created", response=response)
            + self._event("response.in_progress", response=response)
            + self._event("response.output_item.added", output_index=0, item=item)
            + self._event("response.content_part.added", **self._at, part=self._part(""))
        )

    def take(self, number: int, token: Token | None) -> bytes:
        """Its text; the end is told by `end`."""
        if token is None or not self.choices[0].take(token):
            return b""
        told = {"delta": token.text, "logprobs": [], "precision": self.answers.precision}
        return self._event("response.output_text.delta", **self._at, **told)

    def end(self) -> bytes:
        """The same again, complete."""
        text, response = self.choices[0].text, self.whole()
        item = self._message("completed", [self._part(text)])
        return (
            self._event("response.output_text.done", **self._at, text=text, logprobs=[])
            + self._event("response.content_part.done", **self._at, part=self._part(text))
            + self._event("response.output_item.done", output_index=0, item=item)
            + self._event(f"response.{response['status']}", response=response)
        )

    def error(self, error: ApiError) -> bytes:
        """What went wrong."""
        told = error.body["error"]
        return self._event(
            "error", code=told["code"] or told["type"], message=told["message"], param=told["param"]
        )

    def whole(self) -> dict[str, Any]:
        """The response."""
        whole = self.choices[0].finish_reason == "stop"
        return self._response("completed" if whole else "incomplete", self.choices[0].text)

    def usage(self) -> dict[str, Any]:
        """Tokens read and written."""
        prompt, new = self.answers.prompt_tokens, self.answers.new_tokens
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": self.answers.reused_tokens},
            "output_tokens": new,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + new,
        }

    def _response(self, status: str, text: str | None = None) -> dict[str, Any]:
        ask, ended = self.answers.ask, text is not None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.answers.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": ask.instructions,
            "max_output_tokens": ask.max_tokens,
            "model": self.model,
            "output": [self._message("completed", [self._part(text)])] if text is not None else [],
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": False,
            "temperature": ask.sampling.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_p": ask.sampling.top_p,
            "truncation": "disabled",
            "usage": self.usage() if ended else None,
            "metadata": {},
            "precision": self.answers.precision,
        }

    def _message(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        item = self._at["item_id"]
        return {"id": item, "type": "message", "role": "assistant", "status": status, "content": content}

    @staticmethod
    def _part(text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": []}

    def _event(self, kind: str, **body: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return f"event: {kind}\n".encode() + self.event({"type": kind, "sequence_number": number, **body})
