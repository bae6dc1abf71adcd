"""Products of other nested formats beside ours and cuBLAS in float16, on one GPU in one run.

    python benchmarks/bench_peers.py --anybcq DIR --matgptq DIR   # checkouts of their repositories
    python benchmarks/bench_peers.py --anybcq DIR --arch 90   # build alone, for capability 9.0; needs no GPU

Any-Precision's kernel is the one in AnyBCQ's repository. Marlin, which is not nested, joins where vLLM is
installed. Weights are random; copies of each matrix take 200 MB at least, so that they come from memory;
launches are captured into graphs, contenders take turns, and medians count. Activations are float16, ours
integers already, as a decoder has them. AnyBCQ's kernel adds to its output: setting that to zero counts.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import gpu
import peers
import torch
from common import ROOT, arguments, finish
from gpu import alternate, copies, rotating, say
from llama3 import at, matrix_bytes, random_packed
from table2_products import check, half_seconds, multiply_half, multiply_many, print_speedups

from otaro.kernels import cuda
from otaro.sefp.precision import GROUP_SIZE, Precision

SHAPES = ((4096, 4096), (28672, 4096), (4096, 14336))
TOKENS = (1, 8, 16)
OURS = [Precision(name) for name in ("E5M3", "E5M4", "E5M8")]


def main() -> None:
    parser = arguments(__doc__)
    for name, default, what in (
        ("--anybcq", None, "a checkout of AnyBCQ, with Any-Precision's kernel in it"),
        ("--matgptq", None, "a checkout of MatGPTQ"),
        ("--build", ROOT / "build" / "peers", "where libraries are kept"),
    ):
        parser.add_argument(name, type=Path, default=default, metavar="DIR", help=what)
    parser.add_argument("--arch", metavar="90", help="build for this compute capability, and stop")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the last line to a file too")
    asked = parser.parse_args()
    if not asked.arch:
        gpu.require()
    arch = asked.arch or "{}{}".format(*torch.cuda.get_device_capability())
    asked.build.mkdir(parents=True, exist_ok=True)
    found: list[peers.Peer] = []
    for checkout, of in ((asked.anybcq, peers.anybcq), (asked.matgptq, peers.matgptq)):
        if checkout:
            found += of(checkout, asked.build, arch)
    if asked.arch:
        return
    about = gpu.machine()
    try:
        found.append(peers.marlin())
    except (ImportError, AttributeError) as reason:
        say(f"without Marlin: {reason}")
    errors = {peer.name: peer.check() for peer in found}
    for name, error in errors.items():
        say(f"{name}: a small product is off by {error:.1e}{'' if error < peers.TOLERANCE else ', WRONG'}")
    results = {f"{rows}x{length}": one_shape(rows, length, found, asked.rounds) for rows, length in SHAPES}
    for tokens in TOKENS:
        title = f"{tokens} token{'s' if tokens > 1 else ''}, us (times cuBLAS in float16)"
        print_speedups(title, {shape: result["seconds"][str(tokens)] for shape, result in results.items()})
    wrong = [name for name, error in errors.items() if error >= peers.TOLERANCE]
    for shape, result in results.items():
        wrong += [f"{shape} {name}" for name, one in result["checks"].items() if one["wrong"]]
    finish({**about, "benchmark": "peers", "rounds": asked.rounds, "errors": errors, **results}, asked.json)
    if wrong:
        raise SystemExit(f"wrong: {', '.join(wrong)}")


def one_shape(rows: int, length: int, found: list[peers.Peer], rounds: int) -> dict[str, Any]:
    size = matrix_bytes(rows, length, None)
    halves = copies(size, lambda: gpu.halves(rows, length))
    packed = copies(matrix_bytes(rows, length, OURS[0]), lambda: random_packed(rows, length))
    weights = {}
    for peer in found:
        first = peer.weights(rows, length)
        bytes_of_one = sum(part.nbytes for part in first)
        weights[peer.name] = [first, *copies(bytes_of_one, partial(peer.weights, rows, length))[1:]]
    seconds, scratch = {}, cuda.Scratch(torch.device(gpu.DEVICE))
    for tokens in TOKENS:
        x = torch.randn(tokens, length, device=gpu.DEVICE).half()
        out = torch.empty(tokens, rows, device=gpu.DEVICE)
        digits, about = cuda.to_digits(x, GROUP_SIZE), half_seconds(size)
        graphs = {"float16": rotating(halves, about, multiply_half, x)}
        for precision in OURS:
            seen = [[at(one, precision)] for one in packed]
            graphs[str(precision)] = rotating(seen, about / 2, multiply_many, digits, x, [out], scratch)
        for peer in found:
            if tokens in peer.tokens:
                theirs = torch.empty_like(out, dtype=torch.float16)
                graphs[peer.name] = rotating(weights[peer.name], about / 2, peer.multiply, x, theirs)
        seconds[str(tokens)] = alternate(graphs, rounds)
    return {"seconds": seconds, "checks": {str(one): check([at(packed[0], one)]) for one in OURS}}


if __name__ == "__main__":
    main()
