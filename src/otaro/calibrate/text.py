"""Windows of tokens of a text, or of examples, as a model reads them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from otaro.errors import OtaroError, brief
from otaro.tokens import begins_with_bos

LENGTH = 512
"""Tokens in a window, if the model has so many positions."""


def load_tokenizer(directory: Path) -> Any:
    """The tokenizer that lies beside the weights."""
    from transformers import AutoTokenizer

    advice = "copy the files of the original model's tokenizer there"
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:
        # a missing file, a damaged one, a class that is not known: each has exceptions of its own
        raise OtaroError(
            f"{directory} has no tokenizer that opens, and --calibrate needs one to read the text: "
            f"{brief(error)}; {advice}"
        ) from error
    # made up by transformers, without files
    if not tokenizer.get_vocab().keys() - tokenizer.get_added_vocab().keys():
        raise OtaroError(
            f"{directory} has no tokenizer, and --calibrate needs one to read the text; {advice}"
        )
    return tokenizer


def windows(content: str, tokenizer: Any, samples: int, length: int) -> torch.Tensor:
    """Token ids [windows, length]: at most `samples` windows side by side, spread evenly over the text.

    Where the tokenizer begins texts with a special token, so does every window.
    """
    ids: torch.Tensor = tokenizer(content, return_tensors="pt", verbose=False)["input_ids"][0]
    begin = begins_with_bos(tokenizer)
    if begin is not None:
        ids, length = ids[1:], length - 1
    if len(ids) < length:
        raise OtaroError(
            f"the text to calibrate on has {len(ids)} tokens, less than one window of "
            f"{length}; give a longer one"
        )
    count = min(samples, len(ids) // length)
    starts = (
        torch.linspace(0, len(ids) - length, count).long() if count > 1 else torch.zeros(1, dtype=torch.long)
    )
    found = ids[starts.unsqueeze(1) + torch.arange(length)]
    return found if begin is None else torch.cat([torch.full((count, 1), begin), found], 1)


def windows_of_examples(
    examples: Iterable[Sequence[int]], samples: int, length: int = LENGTH
) -> torch.Tensor:
    """Likewise of tokens that are cut into examples: each window begins with one, and goes on after it."""
    each = [torch.tensor(example) for example in examples]
    lengths = torch.tensor([len(example) for example in each], dtype=torch.long)
    ids, starts = torch.cat([torch.zeros(0, dtype=torch.long), *each]).long(), lengths.cumsum(0) - lengths
    starts = starts[starts <= len(ids) - length]
    if not len(starts):
        raise OtaroError(
            f"the examples to calibrate on have {len(ids)} tokens, less than one window of {length}"
        )
    count = min(samples, len(starts), len(ids) // length)
    some = starts[torch.linspace(0, len(starts) - 1, count).long()]
    return ids[some.unsqueeze(1) + torch.arange(length)]
