"""What may be asked at each endpoint, as OpenAI's API has it.

A field is understood, or it is refused by its name: nobody's `tools` are dropped in silence. Where a field
would make no difference here, the value that says so is accepted. Beyond OpenAI's there are `precision`, and
`top_k`, `min_p`, `repetition_penalty` and `ignore_eos` under the names that other servers have given them,
and `draft`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from otaro.errors import OtaroError
from otaro.runtime.draft import Draft
from otaro.runtime.request import Prompt
from otaro.runtime.sample import Sampling
from otaro.serve.errors import wrong
from otaro.serve.fields import Fields, checked_text, shown

MAX_CHOICES = 32  # answers to one request
OFF = "off"
_MAX_STOPS = 16
_MAX_LOGPROBS = 20
# as templates know them
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


@dataclass(frozen=True)
class Ask:
    """What was asked for, whatever the endpoint."""

    model: str | None
    prompts: Sequence[Prompt]
    prompt_field: str
    limit_field: str
    sampling: Sampling
    precision: object = None
    draft: Draft | None = None
    """None: the server's own; `Draft()`: none at all."""
    max_tokens: int | None = None
    usual_tokens: int = 256
    """Where nobody said; the engine keeps room for so many."""
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    """So many of the likeliest tokens beside each; 0: of the tokens alone."""
    n: int = 1
    ignore_eos: bool = False
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    """In every event, not in the last alone."""
    instructions: str | None = None
    """Of a response, which repeats them."""

    @property
    def choices(self) -> int:
        """Answers in all."""
        return len(self.prompts) * self.n

    def sampling_of(self, number: int) -> Sampling:
        """Of one of `n` answers: they differ, and each is had again with the same seed."""
        seed = self.sampling.seed
        return self.sampling if seed is None else replace(self.sampling, seed=(seed + number) % 2**64)


def chat_ask(body: dict[str, Any]) -> Ask:
    """POST /v1/chat/completions."""
    fields = Fields(body)
    messages = _messages(fields.required("messages"), "messages")
    limits = {name: fields.whole(name, 1, 2**31) for name in ("max_completion_tokens", "max_tokens")}
    given = {name: limit for name, limit in limits.items() if limit is not None}
    if len(set(given.values())) > 1:
        raise wrong("max_tokens", "it is the old name of max_completion_tokens; give one of them")
    logprobs = fields.flag("logprobs")
    top = fields.whole("top_logprobs", 0, _MAX_LOGPROBS)
    if top is not None and not logprobs:
        raise wrong("top_logprobs", "it needs logprobs: true")
    ask = _ask(
        fields,
        prompts=[messages],
        prompt_field="messages",
        limit_field=next(iter(given), "max_completion_tokens"),
        max_tokens=next(iter(given.values()), None),
        logprobs=(top or 0) if logprobs else None,
    )
    fields.only("response_format", {"type": "text"})
    fields.only("modalities", ["text"])
    fields.only("tools", [])
    fields.only("tool_choice", "none", "auto")  # of no tools
    for name in ("functions", "function_call", "parallel_tool_calls", "audio", "prediction"):
        fields.only(name)
    for name in ("reasoning_effort", "web_search_options", "verbosity"):
        fields.only(name)
    fields.end()
    return ask


def completion_ask(body: dict[str, Any]) -> Ask:
    """POST /v1/completions."""
    fields = Fields(body)
    ask = _ask(
        fields,
        prompts=_prompts(fields.required("prompt")),
        prompt_field="prompt",
        limit_field="max_tokens",
        max_tokens=fields.whole("max_tokens", 1, 2**31),
        usual_tokens=16,  # of this endpoint
        logprobs=fields.whole("logprobs", 0, _MAX_LOGPROBS),
    )
    fields.only("best_of", ask.n)
    fields.only("echo", False)
    fields.only("suffix", "")
    fields.end()
    return ask


def response_ask(body: dict[str, Any]) -> Ask:
    """POST /v1/responses."""
    fields = Fields(body)
    given, instructions = fields.required("input"), fields.text("instructions")
    if isinstance(given, str):
        messages = [{"role": "user", "content": checked_text(given, "input")}]
    else:
        messages = _messages(given, "input")
    if instructions is not None:
        messages = [{"role": "system", "content": instructions}, *messages]
    ask = _ask(
        fields,
        prompts=[messages],
        prompt_field="input",
        limit_field="max_output_tokens",
        max_tokens=fields.whole("max_output_tokens", 1, 2**31),
        instructions=instructions,
    )
    if ask.n != 1:
        raise wrong("n", "a response is one answer")
    text = fields.take("text")
    if text is not None:
        inner = Fields(text, "text")
        inner.only("format", {"type": "text"})
        inner.only("verbosity")
        inner.end()
    fields.only("tools", [])
    fields.only("tool_choice", "none", "auto")
    fields.only("include", [])
    fields.only("truncation", "disabled")
    fields.only("background", False)
    for name in (
        "previous_response_id",
        "conversation",
        "reasoning",
        "prompt",
        "parallel_tool_calls",
        "max_tool_calls",
    ):
        fields.only(name)
    fields.only("top_logprobs", 0)
    fields.end()
    return ask


def _ask(fields: Fields, **known: Any) -> Ask:
    """What the endpoints have in common."""
    model, n = fields.text("model"), fields.whole("n", 1, MAX_CHOICES) or 1
    stop = fields.texts("stop", _MAX_STOPS)
    if "" in stop:
        raise wrong("stop", "an empty text stops nothing")
    if len(known["prompts"]) * n > MAX_CHOICES:
        raise wrong("n", f"{len(known['prompts'])} prompts times n={n} are more than {MAX_CHOICES} answers")
    temperature, top_p = fields.number("temperature", 0, 2), fields.number("top_p", 0, 1)
    if top_p == 0:
        raise wrong("top_p", "give more than 0; for the likeliest tokens give temperature 0")
    seed = fields.whole("seed", -(2**63), 2**63 - 1)
    sampling = Sampling(
        temperature=1.0 if temperature is None else temperature,
        top_p=1.0 if top_p is None else top_p,
        top_k=fields.whole("top_k", 0, 2**31) or 0,
        min_p=fields.number("min_p", 0, 1) or 0.0,
        repetition_penalty=fields.number("repetition_penalty", 0.01, 100) or 1.0,
        seed=None if seed is None else seed % 2**64,
    )
    stream = fields.flag("stream")
    options = fields.take("stream_options")
    include_usage = continuous_usage = False
    if options is not None:
        if not stream:
            raise wrong("stream_options", "it needs stream: true")
        inner = Fields(options, "stream_options")
        include_usage = inner.flag("include_usage")
        continuous_usage = inner.flag("continuous_usage_stats")  # as vLLM calls it
        inner.only("include_obfuscation", False)
        inner.end()
    for name in ("presence_penalty", "frequency_penalty"):
        fields.only(name, 0)
    fields.only("logit_bias", {})
    fields.only("store", False)
    fields.only("service_tier", "auto", "default")
    for name in ("user", "safety_identifier", "prompt_cache_key"):
        fields.text(name)  # whoever it is gets the same answer
    _check_metadata(fields.take("metadata"))
    return Ask(
        model=model,
        n=n,
        stop=tuple(stop),
        sampling=sampling,
        stream=stream,
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        precision=fields.take("precision"),
        draft=_draft(fields.text("draft")),
        ignore_eos=fields.flag("ignore_eos"),
        **known,
    )


def _draft(name: str | None) -> Draft | None:
    if name == OFF:
        return Draft()
    try:
        return Draft.of(name)
    except OtaroError as error:
        raise wrong("draft", f"{error}; {OFF} for none") from None


def _check_metadata(value: object) -> None:
    if value is None:
        return
    inner = Fields(value, "metadata")
    for name in list(value if isinstance(value, dict) else ()):
        inner.text(name)


def _prompts(value: object) -> list[Prompt]:
    """A text, tokens, or a list of either."""
    if isinstance(value, str):
        return [checked_text(value, "prompt")]
    if not isinstance(value, list) or not value:
        raise wrong("prompt", "give a text, a list of tokens, or a list of either, and not an empty one")
    if _are_tokens(value):
        return [value]
    if any(_are_tokens([one]) for one in value):
        number, odd = next((at, one) for at, one in enumerate(value) if not _are_tokens([one]))
        raise wrong(f"prompt[{number}]", f"give a token, a whole number as beside it, not {shown(odd)}")
    if len(value) > MAX_CHOICES:
        raise wrong("prompt", f"give {MAX_CHOICES} prompts at most, not {len(value)}")
    for number, one in enumerate(value):
        at = f"prompt[{number}]"
        if isinstance(one, str):
            checked_text(one, at)
        elif isinstance(one, list) and one:
            for place, token in enumerate(one):
                if not _are_tokens([token]):
                    raise wrong(f"{at}[{place}]", f"give a token, a whole number, not {shown(token)}")
        elif isinstance(one, list):
            raise wrong(at, "give a text, or a list of tokens, and not an empty one")
        else:
            raise wrong(at, f"give a text, or tokens as whole numbers, not {shown(one)}")
    return value


def _are_tokens(value: list[Any]) -> bool:
    return all(isinstance(one, int) and not isinstance(one, bool) for one in value)


def _messages(value: object, at: str) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise wrong(at, "give a list of messages, one at least")
    messages = []
    for number, one in enumerate(value):
        fields = Fields(one, f"{at}[{number}]")
        role = fields.required("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise wrong(fields.path("role"), f"give one of {', '.join(_ROLES)}, not {shown(role)}")
        messages.append(
            {"role": _ROLES[role], "content": _content(fields.required("content"), fields.path("content"))}
        )
        fields.only("type", "message")
        fields.only("status", "completed", "incomplete")
        fields.only("tool_calls", [])
        fields.text("id")
        for name in ("name", "refusal", "audio", "function_call"):
            fields.only(name)
        fields.end()
    return messages


def _content(value: object, at: str) -> str:
    """A text, or parts that are texts."""
    if isinstance(value, str):
        return checked_text(value, at)
    if not isinstance(value, list):
        raise wrong(at, "give a text, or a list of parts")
    texts = []
    for number, one in enumerate(value):
        fields = Fields(one, f"{at}[{number}]")
        kind = fields.required("type")
        if kind not in ("text", "input_text", "output_text"):
            raise wrong(
                fields.path("type"), f"this model reads text, not {shown(kind)}", "unsupported_parameter"
            )
        texts.append(checked_text(fields.required("text"), fields.path("text")))
        fields.only("annotations", [])
        fields.only("logprobs", [])
        fields.end()
    return "".join(texts)
