"""Instructions retired: for a weight of a one-token product, and for a token of a whole decoder beside llama.cpp's.

    python benchmarks/bench_instructions.py [--skip-decoder] [--backends avx512 avx2] [--contenders E5M4 Q5_0 transformers]

A time on a busy machine says little; a count is the same on every run. Virtual machines often have no counters for `perf stat`
to read, and valgrind and qemu know no AVX-512, so instructions are stepped through one by one (the trap flag, `Stepper`), on
one thread. That takes 1 to 30 microseconds each, so what is counted is small, and grows by the differences of two sizes:

- a product of 80 rows less one of 16 (in plain C++ of three less one), of 576 and of 4096 weights each, for every backend
  and precision;
- a token of models of SmolLM2-135M's shapes (random weights, nine tokens before it) with one and two layers and 64 and 576 rows
  of vocabulary. A token is linear in both, so 30 layers and 49,152 rows follow. Four models take some minutes a contender.

llama.cpp needs llama-cpp-python (`pip install '.[llama]'`) and is left out without it.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import os
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from common import SMOLLM2, finish

import otaro
from otaro.evaluate.engines import DecodePath, Engine, Forward, plain_model
from otaro.evaluate.llama_cpp import KINDS, LlamaCpp, gguf_file
from otaro.file.io import NestedDirectory
from otaro.file.planes import pack_codes
from otaro.kernels import cpu
from otaro.sefp.codec import encode
from otaro.sefp.precision import COARSEST, GROUP_SIZE, PRECISIONS

LENGTHS = (576, 4096)
LAYERS, VOCABULARY = SMOLLM2["num_hidden_layers"], SMOLLM2["vocab_size"]
CONTEXT = 8

STEPPER = """
#include <signal.h>
static volatile unsigned long steps;
static void trap(int number) { (void)number; ++steps; }
void begin(void) {
  struct sigaction action = {0};
  action.sa_handler = trap;
  sigaction(SIGTRAP, &action, 0);
  steps = 0;
  __asm__ volatile("pushf; orq $0x100, (%%rsp); popf" ::: "memory", "cc");
}
unsigned long end(void) {
  __asm__ volatile("pushf; andq $-0x101, (%%rsp); popf" ::: "memory", "cc");
  return steps;
}
"""


class Stepper:
    """Counts the instructions of a call on this thread: a signal after each of them."""

    def __init__(self, folder: Path) -> None:
        source, library = folder / "stepper.c", folder / "stepper.so"
        source.write_text(STEPPER)
        compiler = os.environ.get("CC", "cc")
        # no red zone: what is pushed must not overwrite a leaf function's variables
        subprocess.run([compiler, "-O1", "-mno-red-zone", "-shared", "-fPIC", "-o", library, source], check=True)
        self._library = ctypes.CDLL(str(library))
        self._library.end.restype = ctypes.c_ulong
        self._nothing = 0
        self._nothing = self(lambda: None)

    def __call__(self, run: Callable[[], Any]) -> int:
        """So many, less those of the call itself."""
        begin, end = self._library.begin, self._library.end
        run()  # what is made or linked at first use is not counted
        begin()
        run()
        return int(end()) - self._nothing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backends", nargs="+", default=cpu.available(), help="of " + ", ".join(cpu.available()))
    names = [*map(str, reversed(PRECISIONS)), *KINDS.values(), "transformers"]
    parser.add_argument("--contenders", nargs="+", default=names, choices=names, help="of the decoder's part")
    parser.add_argument("--skip-products", action="store_true")
    parser.add_argument("--skip-decoder", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"benchmark": "instructions"}
    with tempfile.TemporaryDirectory() as folder:
        count = Stepper(Path(folder))
        if not asked.skip_products:
            result["per_weight"] = products(count, asked.backends)
        if not asked.skip_decoder:
            cpu.choose(asked.backends[0])
            result["per_token"] = tokens(count, asked.contenders, Path(folder))
    finish(result)


def products(count: Stepper, backends: list[str]) -> dict[str, dict[str, float]]:
    """Print and return instructions per weight, by backend and length, then precision."""
    found: dict[str, dict[str, float]] = {}
    print(f"{'instructions per weight':26}" + "".join(f"{p!s:>9}" for p in PRECISIONS))
    for length in LENGTHS:
        for backend in backends:
            cpu.choose(backend)
            name, multiply = f"{backend}, rows of {length}", product(length)
            few, more = (1, 3) if backend == "portable" else (16, 80)
            some = {
                bits: count(multiply(more, bits)) - count(multiply(few, bits))
                for bits in (precision.mantissa_bits for precision in PRECISIONS)
            }
            found[name] = {f"E5M{bits}": counted / ((more - few) * length) for bits, counted in some.items()}
            print(f"{name:26}" + "".join(f"{value:9.3f}" for value in found[name].values()), flush=True)
    print()
    return found


def product(length: int) -> Callable[[int, int], Callable[[], None]]:
    """Makes products of one token with so many rows of a matrix, at so many mantissa bits."""
    kernels = importlib.import_module("otaro.kernels._cpu")  # past the checks of ops, as the decode path calls them
    torch.manual_seed(0)
    x, out = torch.randn(1, length).numpy(), torch.empty(1, 80).numpy()
    encoded = encode(torch.randn(80, length) * 0.02)
    base, planes = pack_codes(encoded.finest_codes)
    stored = [tensor.numpy() for tensor in (base, encoded.scale_bytes, *planes)]

    def multiply(rows: int, bits: int) -> Callable[[], None]:
        base, scales, *some = (array[:rows] for array in stored[: 2 + bits - COARSEST])
        settings = (length, GROUP_SIZE, False, encoded.scale_exponent)
        return partial(kernels.linear, x, base, scales, some, *settings, out[:, :rows])

    return multiply


def tokens(count: Stepper, contenders: list[str], folder: Path) -> dict[str, float]:
    """Print and return instructions per token of each contender at SmolLM2-135M's size."""
    if find_spec("llama_cpp") is None:
        print("llama-cpp-python is not installed: without llama.cpp")
        contenders = [name for name in contenders if name not in KINDS.values()]
    models = {(layers, rows): nested_model(folder, layers, rows) for layers, rows in ((1, 64), (2, 64), (1, 576))}
    found: dict[str, float] = {}
    print(f"{'millions of instructions':26}{'a layer':>9}{'head':>9}{'rest':>9}{'a token':>9}")
    for name in contenders:
        counts = {size: one_token(count, engine(name, models[size], folder)) for size in models}
        layer = counts[2, 64] - counts[1, 64]
        row = (counts[1, 576] - counts[1, 64]) / 512
        rest = counts[1, 64] - layer - 64 * row
        found[name] = rest + LAYERS * layer + VOCABULARY * row
        parts = (layer, VOCABULARY * row, rest, found[name])
        print(f"{name:26}" + "".join(f"{part / 1e6:9.3f}" for part in parts), flush=True)
    print()
    return found


def nested_model(folder: Path, layers: int, vocabulary: int) -> Path:
    """A packed model of SmolLM2-135M's shapes, with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    size = {"num_hidden_layers": layers, "vocab_size": vocabulary, "max_position_embeddings": 4 * CONTEXT}
    config = LlamaConfig(**{**SMOLLM2, **size})
    plain, packed = folder / f"plain-{layers}-{vocabulary}", folder / f"packed-{layers}-{vocabulary}"
    LlamaForCausalLM(config).save_pretrained(plain)
    otaro.pack(plain, packed)
    return packed


def engine(name: str, directory: Path, folder: Path) -> Engine:
    """What reads tokens by that name."""
    if name in KINDS.values():
        path = gguf_file(NestedDirectory(directory), name, folder)
        return LlamaCpp(path, threads=1, positions=4 * CONTEXT)
    model = otaro.load(directory, PRECISIONS[-1] if name == "transformers" else name)
    return Forward(plain_model(model)) if name == "transformers" else DecodePath(model)


def one_token(count: Stepper, reader: Engine) -> int:
    """Instructions of one token after some others."""
    for token in range(CONTEXT):
        reader.feed([token])
    return count(lambda: reader.feed([1]))


if __name__ == "__main__":
    main()
