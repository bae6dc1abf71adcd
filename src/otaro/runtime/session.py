"""A conversation whose KV cache outlives its turns, and changes of precision between them."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

import torch

from otaro.errors import OtaroError, brief
from otaro.runtime.report import Generation
from otaro.sefp.precision import Precision


class ChatSession:
    """Keeps messages, the tokens they became, and the keys and values computed for those tokens.

    Each turn renders the whole conversation, keeps what agrees with the tokens already seen, and computes the
    rest alone. Switching precision between turns keeps the cache: earlier tokens stay as they were read.

    Models with a chat template get it; for others a turn is text to be continued. `kv` keeps keys and values
    at a precision instead of in float16, where the decoder serves the model. `system` is a system message,
    for models with a template.
    """

    def __init__(
        self, model: Any, tokenizer: Any, kv: Precision | None = None, system: str | None = None
    ) -> None:
        self.model, self.tokenizer, self.kv, self.system = model, tokenizer, kv, system
        self.uses_template = bool(getattr(tokenizer, "chat_template", None))
        self.generation: Generation | None = None
        """How the last answer went."""
        if system is not None:
            _check_template(tokenizer)
        self.reset()

    def reset(self) -> None:
        """Forget the conversation, but not the system message."""
        self._messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        self._ids: list[int] = []
        self.reused, self.produced = 0, 0
        self._cache = self._new_cache()

    @property
    def cached_tokens(self) -> int:
        """Tokens whose keys and values are held."""
        return int(self._cache.get_seq_length())

    def reply(self, text: str, *, streamer: Any = None, **generation: Any) -> str:
        """Answer `text`; `generation` goes to `model.generate`.

        Afterwards `reused` and `produced` tell how many tokens came from the cache and how many are new in
        the answer. If the answer is interrupted, the conversation is as it was before.
        """
        message = {"role": "user", "content": text}
        ids = self._render(message)
        self._keep_common_prefix(ids)
        self.reused = self.cached_tokens
        inputs, report = torch.tensor([ids], device=self.model.device), Generation()
        output = self.model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            past_key_values=self._cache,
            streamer=streamer,
            report=report,
            pad_token_id=padding_token(self.tokenizer),
            **generation,
        )
        self.generation = report
        self._ids = output[0].tolist()
        self.produced = len(self._ids) - len(ids)
        answer: str = self.tokenizer.decode(self._ids[len(ids) :], skip_special_tokens=True)
        self._messages += [message, {"role": "assistant", "content": answer}]
        return answer

    def _render(self, message: dict[str, str]) -> list[int]:
        if self.uses_template:
            return chat_tokens(self.tokenizer, [*self._messages, message])
        return [
            *self._ids,
            *self.tokenizer(message["content"], add_special_tokens=not self._ids)["input_ids"],
        ]

    def _keep_common_prefix(self, ids: list[int]) -> None:
        """Cut the cache back to the tokens that `ids` begins with; the last is computed anew in any case."""
        both = zip(self._ids[: self.cached_tokens], ids[:-1], strict=False)
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))
        if common < self.cached_tokens:
            try:
                self._cache.crop(common - self.cached_tokens)  # negative: so many tokens less
            except (RuntimeError, ValueError):  # a sliding window has forgotten what came before
                self._cache = self._new_cache()

    def _new_cache(self) -> Any:
        from transformers import DynamicCache

        from otaro.runtime.serving import decoder_of, why_not

        reason = why_not(self.model)
        if reason is None:
            with torch.inference_mode(False):  # it may outlive the caller's mode
                return decoder_of(self.model).new_cache(self.kv)
        if self.kv:
            raise OtaroError(f"kv={self.kv} needs the decoder, which does not serve this model: {reason}")
        return DynamicCache(config=self.model.config)


def chat_tokens(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    """The tokens of a conversation by the tokenizer's chat template, an answer to follow."""
    from jinja2.exceptions import TemplateError

    _check_template(tokenizer)
    try:
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
    except (TemplateError, TypeError) as error:  # one without a place for system messages, say
        raise OtaroError(f"the model's chat template refuses these messages: {brief(error)}") from error


def _check_template(tokenizer: Any) -> None:
    if not getattr(tokenizer, "chat_template", None):
        raise OtaroError(
            "a system message needs a chat template, and this model has none; leave it out, or write it "
            "into the prompt"
        )


def padding_token(tokenizer: Any) -> int | None:
    """The id that fills up batches: the padding token, or else the end of text."""
    token: int | None = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return token
