"""otaro-run against the package on real models: greedy text at all six precisions.

python runs/native_check.py build/native/otaro-run DIR...     # nested directories with decoder.json; after `make native`

Log: benchmarks/results/native-check.txt.
"""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

import torch

import otaro
from otaro.runtime.load import load_tokenizer

PROMPTS = ("The capital of France is", "def fib(n):\n    ", "Once upon a time", "1, 2, 3, 日本 🐻")
TOKENS = 64


def same_text(program: Path, directory: Path) -> tuple[int, int]:
    """How many continuations were compared, and how many are the same."""
    model, tokenizer, alike = otaro.load(directory), load_tokenizer(directory), 0
    for precision in otaro.PRECISIONS:
        for prompt in PROMPTS:
            ids = torch.tensor([tokenizer(prompt)["input_ids"]])
            made = model.generate(ids, max_new_tokens=TOKENS, do_sample=False, precision=str(precision))
            command = [str(program), str(directory), "--prompt", prompt, "--tokens", str(TOKENS), "--precision", str(precision)]
            said = subprocess.run(command, capture_output=True, check=True).stdout.decode()
            # Some tokenizers decode a text without the space that it begins with.
            alike += said.strip() == tokenizer.decode(made[0], skip_special_tokens=True).strip()
    return len(PROMPTS) * len(otaro.PRECISIONS), alike


def main() -> None:
    """Print a line for each directory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", type=Path)
    parser.add_argument("directories", type=Path, nargs="+")
    options = parser.parse_args()
    wrong = 0
    for directory in options.directories:
        compared, alike = same_text(options.program, directory)
        print(f"{directory.name}: {alike} of {compared} texts of {TOKENS} tokens are the same")
        wrong += compared - alike
    raise SystemExit(wrong > 0)


if __name__ == "__main__":
    main()
