"""Which weights lie exactly on a border between two cells.

    python runs/boundaries.py models/SmolLM2-135M models/stories15M --results benchmarks/results/study.jsonl

A weight on a border belongs to the cell above or below it by its place in the group, and reads as the middle of that cell,
half a step away. Any change to the other side, however small, takes it to the middle there. Weights that come from a coarser
grid (float16, or another quantized file) are there by the million.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

import otaro
from otaro.evaluate.machine import cpu_name
from otaro.sefp.codec import MIDPOINT_SHIFT
from otaro.sefp.precision import FINEST, GROUP_SIZE, PRECISIONS, Precision

ROOT = Path(__file__).parents[1]


def on_borders(weight: torch.Tensor, group_size: int = GROUP_SIZE) -> dict[Precision, torch.Tensor]:
    """Of each weight whether it lies on a border of a precision; zeros are counted for themselves."""
    scales = otaro.encode(weight, group_size=group_size).scales.repeat_interleave(group_size, -1)[..., : weight.shape[-1]]
    steps, values = scales.double() * 2.0**-FINEST, weight.double()
    nearest = (values / steps.where(steps != 0, 1.0)).round()
    on = (nearest * steps == values) & (values != 0)  # exact: few bits times few bits
    cells = nearest.to(torch.int16) - MIDPOINT_SHIFT
    sizes = {precision: 1 << (FINEST - precision.mantissa_bits) for precision in PRECISIONS}
    return {precision: on & (cells % size == 0) for precision, size in sizes.items()}


def counted(folder: Path) -> dict[str, Any]:
    """Shares of all weights that are packed."""
    found, zeros, total = dict.fromkeys(PRECISIONS, 0), 0, 0
    with safe_open(folder / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 # a file, not a mapping
            weight = file.get_tensor(name).float()
            if weight.ndim < 2:
                continue
            zeros, total = zeros + int((weight == 0).sum()), total + weight.numel()
            for precision, on in on_borders(weight).items():
                found[precision] += int(on.sum())
    shares = {str(precision): count / total for precision, count in found.items()}
    return {"on_border": shares, "zeros": zeros / total, "weights": total}


def main() -> None:
    parser = argparse.ArgumentParser(description="Count weights that lie on borders between cells.")
    parser.add_argument("models", type=Path, nargs="+", help="model directories")
    parser.add_argument("--results", type=Path, help="a .jsonl file that the counts are added to")
    a = parser.parse_args()
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    for folder in a.models:
        line = counted(folder)
        shown = ", ".join(f"{name} {share:.4%}" for name, share in line["on_border"].items())
        print(f"{folder.name}: {shown}; zeros {line['zeros']:.4%} of {line['weights']:,} weights", flush=True)
        if a.results:
            stated = {"key": f"boundaries {folder.name}", "bench": "boundaries", "name": folder.name, "seed": 0}
            stated |= {"command": f"python runs/boundaries.py models/{folder.name}", "commit": commit, "machine": cpu_name()}
            with a.results.open("a") as file:
                file.write(json.dumps({**stated, **line}) + "\n")


if __name__ == "__main__":
    main()
