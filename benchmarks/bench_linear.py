"""One matrix times one to eight tokens, at every precision, beside float32: time, bandwidth, share of a plain read.

    python benchmarks/bench_linear.py [--shape 4096x14336] [--tokens 1 8] [--rounds 15] [--threads 2]

Each contender goes through copies of its matrix that take more than 150 MB together, so that weights come from memory and not
from a cache, and contenders alternate in one run. Ours run with every vector instruction set of this CPU (`--instructions
portable` adds the plain C++, which is some hundred times slower).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from common import alternate, finish

import otaro
from otaro.evaluate.machine import plain_read
from otaro.evaluate.speed import READ_BYTES
from otaro.file.planes import pack_codes
from otaro.kernels import cpu
from otaro.sefp.codec import encode
from otaro.sefp.precision import COARSEST, GROUP_SIZE

LARGE = "4096x14336"
SMOLLM2 = ("576x576", "192x576", "1536x576", "576x1536", "49152x576")
ROTATED = 150_000_000  # bytes

Contender = tuple[str, float, int, Callable[[], Any]]  # name, bytes of a matrix, copies, a pass over all copies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", nargs="+", default=[LARGE, *SMOLLM2], help="rows x length of the matrix")
    parser.add_argument("--tokens", nargs="+", type=int, help="by default 1, 2, 4 and 8 for the first shape and 1 for others")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--instructions", nargs="+", default=cpu.available()[:-1], help="of " + ", ".join(cpu.available()))
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    results = []
    for shape in asked.shape:
        rows, length = map(int, shape.split("x"))
        for tokens in asked.tokens or ((1, 2, 4, 8) if shape == asked.shape[0] else (1,)):
            results.append(measure(rows, length, tokens, asked))
    finish({"benchmark": "linear", "rounds": asked.rounds, "products": results})


def measure(rows: int, length: int, tokens: int, asked: argparse.Namespace) -> dict[str, Any]:
    """Time all contenders on one shape, and print them."""
    torch.manual_seed(0)
    weight, x = torch.randn(rows, length) * 0.02, torch.randn(tokens, length)
    plain = [weight.clone() for _ in range(copies_of(weight.nbytes))]
    contenders: list[Contender] = [
        ("plain read", READ_BYTES, 1, plain_read(READ_BYTES)),
        *ours(weight, x, asked.instructions),
        ("float32 torch", weight.nbytes, len(plain), lambda: [x @ matrix.T for matrix in plain]),
    ]
    passes = alternate({name: run for name, _, _, run in contenders}, asked.rounds)
    seconds = {name: passes[name] / copies for name, _, copies, _ in contenders}
    rates = {name: size / seconds[name] for name, size, _, _ in contenders}
    print(f"{rows} x {length}; tokens: {tokens}, threads: {asked.threads}, rounds: {asked.rounds}")
    print(f"{'':24}{'MB':>9}{'ms':>9}{'GB/s':>8}{'of plain read':>15}")
    for name, size, _, _ in contenders:
        share = rates[name] / rates["plain read"]
        print(f"{name:24}{size / 1e6:9.2f}{seconds[name] * 1e3:9.3f}{rates[name] / 1e9:8.1f}{share:15.0%}")
    print()
    return {"shape": [rows, length], "tokens": tokens, "seconds": seconds, "bytes_per_s": rates}


def ours(weight: torch.Tensor, x: torch.Tensor, instructions: list[str]) -> Iterator[Contender]:
    """Our kernels: every instruction set at every precision, on the same copies."""
    if cpu.MISSING:
        print(f"without our kernels: {cpu.MISSING}")
        return
    encoded = encode(weight)
    base, planes = pack_codes(encoded.finest_codes)
    copies = copies_of(base.nbytes + encoded.scale_bytes.nbytes)
    stored = [[tensor.clone().numpy() for tensor in (base, encoded.scale_bytes, *planes)] for _ in range(copies)]
    out = torch.empty(len(x), len(weight))
    for name in instructions:
        for precision in otaro.PRECISIONS:
            count = precision.mantissa_bits - COARSEST
            size = sum(array.nbytes for array in stored[0][: 2 + count])
            yield f"{precision} {name}", size, copies, partial(multiply, name, x, stored, count, encoded.scale_exponent, out)


def multiply(
    instructions: str, x: torch.Tensor, stored: list[list[Any]], planes: int, scale_exponent: int, out: torch.Tensor
) -> None:
    """Each copy times x."""
    from otaro.kernels import _cpu  # past the checks of ops, as the decode path calls them

    cpu.choose(instructions)
    given, taken, length = x.numpy(), out.numpy(), x.shape[1]
    for base, scales, *rest in stored:
        _cpu.linear(given, base, scales, rest[:planes], length, GROUP_SIZE, False, scale_exponent, taken)


def copies_of(size: int) -> int:
    return ROTATED // size + 1


if __name__ == "__main__":
    main()
