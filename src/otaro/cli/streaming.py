"""Text on standard output as it is produced."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from otaro.runtime.pieces import Pieces


class Printer:
    """A streamer for `generate`: prints each token's text at once, where words would wait for a space."""

    def __init__(self, tokenizer: Any, skip_prompt: bool) -> None:
        self._tokenizer, self._skip_prompt = tokenizer, skip_prompt
        self._pieces: Pieces | None = None
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="replace")  # where it has not every character

    def put(self, value: torch.Tensor) -> None:
        """The tokens of the prompt, then each new one."""
        from otaro.runtime.pieces import Pieces

        ids = value.flatten().tolist()
        if self._pieces is not None:
            text = "".join(map(self._pieces.add, ids))
        else:
            self._pieces = Pieces(self._tokenizer, ids)
            text = "" if self._skip_prompt else self._tokenizer.decode(ids, skip_special_tokens=True)
        print(text, end="", flush=True)

    def end(self) -> None:
        """What was held back, and the end of the line."""
        print(self._pieces.end() if self._pieces is not None else "", flush=True)
        self._pieces = None
