"""Carry the study's models and data to a machine without a network, in parts of a limited size, without loss.

    python -m runs.study.parts cut models/parts --models models --data DIR --mib 52
    python -m runs.study.parts join models/parts --models models --data data          # again after each part that comes

A part is a zip file in a folder of its own. What is small comes first, so that work can begin before the last part is
there. Weights that were dequantized from blocks of 32 (as SmolLM2's) are found out as such and carried as the codes they
come from, checked to the bit; others by byte planes, compressed.
"""

from __future__ import annotations

import argparse
import json
import math
import zipfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from runs.study.plan import BIG

WEIGHTS = "model.safetensors"
DATA = ("wikitext-2/valid.txt", "wikitext-2/test.txt", "alpaca/alpaca_5000.json")
Entry = tuple[str, bytes, bool]  # name, content, whether compressing it is of use


def as_blocks(weight: torch.Tensor) -> tuple[int, bytes] | None:
    """Levels and bytes of float16 weights d * code + low of blocks of 32, where all are of that kind (Q4_1, Q8_0)."""
    if weight.dtype != torch.float16 or weight.numel() % 32:
        return None
    blocks = weight.reshape(-1, 32)
    for levels in (15, 127):
        low = blocks.amin(1, keepdim=True) if levels == 15 else torch.zeros(len(blocks), 1, dtype=torch.float16)
        guess = ((blocks.float() - low.float()).abs().amax(1, keepdim=True) / levels).half()
        scale, matched = guess.clone(), torch.zeros(len(blocks), 1, dtype=torch.bool)
        for ulps in (0, 1, -1, 2, -2):  # the guess comes from rounded weights
            tried = (guess.view(torch.int16) + ulps).clamp(min=0).view(torch.float16)
            made = from_codes(codes_of(blocks, low, tried), low, tried)
            right = (made.view(torch.int16) == blocks.view(torch.int16)).all(1, keepdim=True) & ~matched
            scale, matched = scale.where(~right, tried), matched | right
        if bool(matched.all()):
            codes = codes_of(blocks, low, scale).to(torch.int8)
            packed = codes[:, :16] | codes[:, 16:] << 4 if levels == 15 else codes
            parts = [packed, scale.view(torch.int8)] + ([low.view(torch.int8)] if levels == 15 else [])
            return levels, torch.cat(parts, 1).numpy().tobytes()
    return None


def codes_of(blocks: torch.Tensor, low: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return ((blocks.float() - low.float()) / scale.float().where(scale != 0, 1.0)).round()


def from_codes(codes: torch.Tensor, low: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (scale.float() * codes + low.float()).half()


def packed(weight: torch.Tensor) -> tuple[bytes, bool]:
    """A line that tells what it is, then the weights; and whether compressing them is of use."""
    blocks = as_blocks(weight)
    how = {"dtype": str(weight.dtype).removeprefix("torch."), "shape": list(weight.shape), "levels": blocks and blocks[0]}
    content = blocks[1] if blocks else weight.contiguous().view(-1, 1).view(torch.uint8).T.contiguous().numpy().tobytes()
    return json.dumps(how).encode() + b"\n" + content, blocks is None


def unpacked(content: bytes) -> torch.Tensor:
    line, _, rest = content.partition(b"\n")
    how = json.loads(line)
    raw = torch.frombuffer(bytearray(rest), dtype=torch.uint8)
    if how["levels"] is None:
        dtype = getattr(torch, how["dtype"])
        return raw.view(dtype.itemsize, -1).T.contiguous().view(dtype).view(how["shape"])
    if how["levels"] == 15:
        raw = raw.view(-1, 20)
        codes = torch.cat([raw[:, :16] & 15, raw[:, :16] >> 4], 1).float()
        scale, low = (raw[:, at : at + 2].contiguous().view(torch.float16) for at in (16, 18))
    else:
        raw = raw.view(-1, 34)
        codes, scale = raw[:, :32].view(torch.int8).float(), raw[:, 32:].contiguous().view(torch.float16)
        low = torch.zeros_like(scale)
    return from_codes(codes, low, scale).view(how["shape"])


def entries(models: Path, data: Path) -> Iterator[Entry]:
    """Everything, what is small first."""
    for name in DATA:
        yield f"data/{name}", (data / name).read_bytes(), True
    questions = sorted(models.glob("zeroshot-*.json.gz"))
    if not questions:
        raise SystemExit(f"error: {models} has no zeroshot-*.json.gz, which the study asks; runs/study.sh --export makes it")
    for path in questions:
        yield f"models/{path.name}", path.read_bytes(), False
    for model in reversed(BIG):
        folder = models / model
        for path in sorted(folder.iterdir()):
            if path.name != WEIGHTS:
                yield f"models/{model}/{path.name}", path.read_bytes(), True
        with safe_open(folder / WEIGHTS, "pt") as file:
            names = list(file.keys())
            yield f"models/{model}/tensors.json", json.dumps(names).encode(), True
            for name in names:
                yield f"models/{model}/{WEIGHTS}/{name}", *packed(file.get_tensor(name))


def cut(out: Path, models: Path, data: Path, limit: int) -> list[Path]:
    """Write the parts, none larger than `limit` bytes."""
    parts: list[Path] = []
    size = math.inf
    for name, content, shrinks in entries(models, data):
        if size + len(content) + 4096 > limit:  # before it is compressed, which is on the safe side
            parts.append(out / str(len(parts) + 1) / "part.zip")
            parts[-1].parent.mkdir(parents=True, exist_ok=True)
            parts[-1].unlink(missing_ok=True)
        with zipfile.ZipFile(parts[-1], "a") as file:
            file.writestr(name, content, zipfile.ZIP_LZMA if shrinks else zipfile.ZIP_STORED)
        size = parts[-1].stat().st_size
        if size > limit:
            raise SystemExit(f"error: {name} alone is larger than a part may be")
    return parts


def join(parts: Path, models: Path, data: Path) -> list[str]:
    """Put into place whatever is complete; the names of the models that are."""
    found: dict[str, Path] = {}
    for path in sorted(parts.glob("*/part.zip")):
        with zipfile.ZipFile(path) as file:
            found |= dict.fromkeys(file.namelist(), path)

    def content(name: str) -> bytes:
        with zipfile.ZipFile(found[name]) as file:
            return file.read(name)

    for name in found:
        if f"/{WEIGHTS}/" not in name:
            kind, _, rest = name.partition("/")
            where = {"data": data, "models": models}[kind] / rest
            where.parent.mkdir(parents=True, exist_ok=True)
            where.write_bytes(content(name))
    complete = []
    for model in BIG:
        listed, weights = models / model / "tensors.json", models / model / WEIGHTS
        tensors_of = json.loads(listed.read_text()) if listed.is_file() else []
        names = [f"models/{model}/{WEIGHTS}/{one}" for one in tensors_of]
        if not names or not found.keys() >= set(names):
            continue
        if not weights.is_file():
            tensors = {name.rpartition("/")[2]: unpacked(content(name)) for name in names}
            save_file(tensors, weights.with_name(f".{WEIGHTS}"), {"format": "pt"})
            weights.with_name(f".{WEIGHTS}").replace(weights)
        complete.append(model)
    return complete


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m runs.study.parts", description="Cut models and data into parts, or join.")
    parser.add_argument("do", choices=("cut", "join"))
    parser.add_argument("parts", type=Path, help="the folder of the parts")
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--mib", type=int, default=52, help="size of a part at most (default 52)")
    a = parser.parse_args()
    if a.do == "cut":
        for path in cut(a.parts, a.models, a.data, a.mib << 20):
            print(f"{path}: {path.stat().st_size:,} bytes")
    else:
        print("complete:", *(join(a.parts, a.models, a.data) or ["none yet"]))


if __name__ == "__main__":
    main()
