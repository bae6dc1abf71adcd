"""The same prompts continued at every precision, kept beside the run as samples.json.

The likeliest token is taken at each step, as `otaro generate` does by default, so its command says the same.
"""

from __future__ import annotations

import json
import shlex
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from otaro.errors import OtaroError, OtaroWarning, TargetError
from otaro.evaluate import records
from otaro.evaluate.progress import Progress
from otaro.evaluate.run_folder import check_record, read_json
from otaro.file.atomic import write_text
from otaro.file.io import NestedDirectory
from otaro.runtime.load import load, load_tokenizer
from otaro.runtime.precision import set_precision
from otaro.runtime.session import padding_token
from otaro.sefp.precision import PRECISIONS


@dataclass(frozen=True)
class Samples:
    """Continuations by prompt and precision."""

    nested: Path
    max_new_tokens: int
    texts: dict[str, dict[str, str]]
    """By prompt, then by precision; without the prompt."""

    def command(self, prompt: str, precision: str) -> str:
        """The command that says the same."""
        words = ["otaro", "generate", str(self.nested), "--prompt", prompt, "--precision", precision]
        return shlex.join([*words, "--max-new-tokens", str(self.max_new_tokens)])


def sample(
    nested: Path,
    keep: Path,
    prompts: Sequence[str],
    max_new_tokens: int,
    progress: Progress = lambda what, done, total: None,
) -> Samples:
    """Continue every prompt at every precision present; what the file `keep` already holds of them is not made again."""
    directory = NestedDirectory(nested)
    precisions = [str(p) for p in PRECISIONS if p <= directory.finest]
    made_from = {"schema": 1, "model": directory.base.header.model, "max_new_tokens": max_new_tokens}
    texts = _kept(keep, made_from)
    wanted = [(prompt, name) for name in precisions for prompt in prompts if name not in texts.get(prompt, {})]
    if wanted:
        try:
            tokenizer = load_tokenizer(nested)
        except OtaroError as error:
            raise OtaroError(f"{error}; --no-samples leaves samples out") from error
        model = load(nested)
        for number, (prompt, name) in enumerate(wanted):
            progress(name, number, len(wanted))
            texts.setdefault(prompt, {})[name] = _continue(model, tokenizer, prompt, name, max_new_tokens)
        try:
            write_text(keep, json.dumps({**made_from, "texts": texts}, indent=1) + "\n")
        except TargetError as error:  # they can be made again
            warnings.warn(f"samples are not kept for the next report: {error}", OtaroWarning, stacklevel=2)
    return Samples(nested, max_new_tokens, {prompt: {name: texts[prompt][name] for name in precisions} for prompt in prompts})


def _kept(path: Path, made_from: dict[str, Any]) -> dict[str, dict[str, str]]:
    stored = read_json(path) or {}
    if any(stored.get(key) != value for key, value in made_from.items()):
        return {}  # of another model, or of another length
    return dict(check_record(path, records.Samples, stored)["texts"])


def _continue(model: Any, tokenizer: Any, prompt: str, precision: str, max_new_tokens: int) -> str:
    set_precision(model, precision)
    ids = tokenizer(prompt, return_tensors="pt")
    if not ids["input_ids"].numel():
        raise OtaroError(f"the prompt {prompt!r} holds no token")
    greedy = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    output = model.generate(**ids, max_new_tokens=max_new_tokens, pad_token_id=padding_token(tokenizer), **greedy)
    text: str = tokenizer.decode(output[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    return text
