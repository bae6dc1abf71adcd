"""Speed of the plain-torch codec: encode, decode and bit packing in GB/s of float16 weights, beside a plain copy; and packing.

    python benchmarks/bench_codec.py

All contenders alternate in one run and are given as ratios to the copy, which goes into memory that is already there, while the
others write to new memory. Packing is timed on SmolLM2-135M where
`runs/get_smollm2.sh` has fetched it, and on the built-in model always.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import SMOLLM2, alternate, finish

from otaro.builtin import MODEL_DIR
from otaro.file.pack import pack
from otaro.file.planes import pack_codes
from otaro.kernels.packed import Packed
from otaro.kernels.reference import decode
from otaro.sefp.codec import RECONSTRUCTIONS, encode

SHAPE = (4096, 4096)
ROUNDS = 15


def main() -> None:
    torch.manual_seed(0)
    weight = (torch.randn(SHAPE) * 0.02).half()
    target = torch.empty_like(weight)
    gigabytes = weight.numel() * weight.element_size() / 1e9

    contenders: dict[str, Any] = {"copy": lambda: target.copy_(weight)}
    for kind in RECONSTRUCTIONS:
        t = encode(weight, reconstruction=kind)
        contenders[f"encode {kind}"] = lambda kind=kind: encode(weight, reconstruction=kind)
        contenders[f"decode {kind} E5M8"] = lambda t=t: t.decode("E5M8")
    t = encode(weight)
    base, planes = pack_codes(t.finest_codes)
    contenders["pack planes"] = lambda: [pack_codes(rows) for rows in t.finest_codes.split(128)]  # as `otaro pack` does
    for count, name in ((5, "E5M8"), (1, "E5M4"), (0, "E5M3")):
        contenders[f"planes to float32 {name}"] = lambda count=count: decode(
            Packed(base, t.scale_bytes, planes[:count], SHAPE[1], 64, False, t.scale_exponent)
        )
    seconds = alternate(contenders, ROUNDS)
    print(f"{SHAPE[0]} x {SHAPE[1]} float16, median of {ROUNDS} alternating rounds")
    print(f"{'':26}{'GB/s of float16':>16}{'of copy speed':>16}")
    for name, taken in seconds.items():
        print(f"{name:26}{gigabytes / taken:16.2f}{seconds['copy'] / taken:16.2f}")

    packing = {}
    for label, model in (("builtin", MODEL_DIR), ("SmolLM2-135M", SMOLLM2)):
        if not model.is_dir():
            print(f"pack {label}: skipped, run runs/get_smollm2.sh first")
            continue
        packing[label] = time_pack(model)
        print(f"pack {label}: {packing[label]:.2f} s (loading its config and building its skeleton included)")
    of_copy = {name: seconds["copy"] / taken for name, taken in seconds.items()}
    rates = {name: gigabytes / taken for name, taken in seconds.items()}
    finish({"benchmark": "codec", "gb_per_s": rates, "of_copy": of_copy, "pack_seconds": packing})


def time_pack(model: Path) -> float:
    out = Path(tempfile.mkdtemp())
    try:
        started = time.perf_counter()
        pack(model, out / "nested")
        return time.perf_counter() - started
    finally:
        shutil.rmtree(out)


if __name__ == "__main__":
    main()
