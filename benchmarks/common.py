"""What the benchmarks share: shapes of models, and the line that names machine and versions."""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import torch

from otaro.evaluate.machine import cpu_name

ROOT = Path(__file__).resolve().parent.parent
SMOLLM2 = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
}  # fmt: skip
LLAMA_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip
TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512,
}  # fmt: skip
"""Shapes, in the words of transformers."""


def arguments(about: str | None) -> argparse.ArgumentParser:
    """A parser whose --help is the head of a script."""
    return argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)


def machine() -> dict[str, Any]:
    """Where the figures come from."""
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    return {"machine": cpu_name(), "threads": torch.get_num_threads(), **versions}


def finish(result: dict[str, Any], file: Path | None = None) -> None:
    """The last line of every benchmark: one JSON object; in a file too where one is given."""
    line = json.dumps({**machine(), **result})
    print(line)
    if file:
        file.write_text(line + "\n")
