"""A conversation whose KV cache outlives its turns, and changes of precision between them."""

from __future__ import annotations

from typing import Any

import torch


class ChatSession:
    """Keeps messages, the tokens they became, and the keys and values computed for those tokens.

    Each turn renders the whole conversation, keeps what agrees with the tokens already seen, and computes the rest alone.
    Switching precision between turns keeps the cache: earlier tokens stay as they were read.

    Models with a chat template get it; for others a turn is text to be continued.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.uses_template = bool(getattr(tokenizer, "chat_template", None))
        self.reset()

    def reset(self) -> None:
        """Forget the conversation."""
        from transformers import DynamicCache

        self._messages: list[dict[str, str]] = []
        self._ids: list[int] = []
        self._cache = DynamicCache(config=self.model.config)

    @property
    def cached_tokens(self) -> int:
        """Tokens whose keys and values are held."""
        return int(self._cache.get_seq_length())

    def reply(self, text: str, *, streamer: Any = None, **generation: Any) -> str:
        """Answer `text`; `generation` goes to `model.generate`."""
        self._messages.append({"role": "user", "content": text})
        ids = self._render(text)
        self._keep_common_prefix(ids)
        inputs = torch.tensor([ids], device=self.model.device)
        output = self.model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            past_key_values=self._cache,
            streamer=streamer,
            pad_token_id=self.tokenizer.pad_token_id or self.tokenizer.eos_token_id,
            **generation,
        )
        self._ids = output[0].tolist()
        answer: str = self.tokenizer.decode(self._ids[len(ids) :], skip_special_tokens=True)
        self._messages.append({"role": "assistant", "content": answer})
        return answer

    def _render(self, text: str) -> list[int]:
        if self.uses_template:
            return list(self.tokenizer.apply_chat_template(self._messages, add_generation_prompt=True, return_dict=False))
        return [*self._ids, *self.tokenizer(text)["input_ids"]]

    def _keep_common_prefix(self, ids: list[int]) -> None:
        """Cut the cache back to the tokens that `ids` begins with; the last of `ids` must be computed anew in any case."""
        seen = self._ids[: self.cached_tokens]
        common = 0
        for ours, theirs in zip(seen, ids[:-1], strict=False):
            if ours != theirs:
                break
            common += 1
        if common < len(seen):
            self._cache.crop(common - len(seen))  # negative: so many tokens less
