"""Carry the study's models and data to a machine without a network, in parts of a limited size, without loss.

    python -m runs.study.parts cut PARTS --models models --data DIR   # writes PARTS/1-of-3, ...
    python -m runs.study.parts join PARTS WORK     # when all have come: WORK/models and WORK/data

The parts are pieces of one compressed archive. Weights that were dequantized from blocks of 32 (as SmolLM2's)
are found out as such and carried as the codes they come from, checked to the bit.
"""

from __future__ import annotations

import argparse
import io
import math
import tarfile
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from runs.study.plan import BIG

WEIGHTS = "model.safetensors"
DATA = ("wikitext-2/valid.txt", "wikitext-2/test.txt", "alpaca/alpaca_5000.json")
LIMIT = 52 << 20  # bytes of a part
State = dict[str, torch.Tensor]


def coded(weight: torch.Tensor) -> State | None:
    """Codes of float16 weights scale * code + low in blocks of 32, if all are of that kind (Q4_1, Q8_0)."""
    if weight.dtype != torch.float16 or weight.shape[-1] % 32:
        return None
    blocks = weight.reshape(-1, 32)
    for levels in (15, 127):
        low = blocks.amin(1, keepdim=True)
        if levels == 127:
            low = torch.zeros_like(low)
        offsets = blocks.float() - low.float()
        guess = (offsets.abs().amax(1, keepdim=True) / levels).half()
        scale = guess.clone()
        for ulps in (0, 1, -1, 2, -2):  # the guess comes from rounded weights
            tried = (guess.view(torch.int16) + ulps).clamp(min=0).view(torch.float16)
            codes = (offsets / tried.float().where(tried != 0, 1.0)).round()
            made = decoded({"codes": codes, "scale": tried, "low": low}).view(torch.int16)
            scale = torch.where((made == blocks.view(torch.int16)).all(1, keepdim=True), tried, scale)
        codes = (offsets / scale.float().where(scale != 0, 1.0)).round().to(torch.int8).view(weight.shape)
        found = {"codes": codes, "scale": scale, "low": low}
        if torch.equal(decoded(found).view(torch.int16), weight.view(torch.int16)):
            return found
    return None


def decoded(state: State) -> torch.Tensor:
    blocks = state["codes"].float().view(-1, 32)
    return (state["scale"].float() * blocks + state["low"].float()).half().view(state["codes"].shape)


def cut(out: Path, models: Path, data: Path, limit: int = LIMIT) -> list[Path]:
    """Write the parts, as few as there can be of `limit` bytes at most."""
    questions = sorted(models.glob("zeroshot-*.json.gz"))
    if not questions:
        raise SystemExit(f"error: {models} has no zeroshot-*.json.gz; runs/study.sh --export makes it")
    files = {f"data/{name}": data / name for name in DATA}
    files |= {f"models/{path.name}": path for path in questions}
    archive = io.BytesIO()
    with tempfile.TemporaryDirectory() as scratch, tarfile.open(fileobj=archive, mode="w:xz") as file:
        for model in BIG:
            files |= {f"models/{model}/{path.name}": path for path in (models / model).iterdir()}
            state: State = {}
            for name, weight in load_file(models / model / WEIGHTS).items():
                codes = coded(weight)
                state |= {f"{name}:{part}": codes[part] for part in codes} if codes else {name: weight}
            files[f"models/{model}/{WEIGHTS}"] = Path(scratch) / model
            save_file(state, Path(scratch) / model)
        for name, path in files.items():
            file.add(path.resolve(), name)
    content = archive.getvalue()
    count = math.ceil(len(content) / limit)
    size = math.ceil(len(content) / count)
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("*-of-*"):
        old.unlink()
    parts = [out / f"{number}-of-{count}" for number in range(1, count + 1)]
    for number, part in enumerate(parts):
        part.write_bytes(content[number * size : (number + 1) * size])
    return parts


def join(parts: Path, work: Path) -> None:
    """Put models and data into place; all parts are there."""
    pieces = sorted(parts.glob("*-of-*"), key=lambda part: int(part.name.partition("-")[0]))
    with tarfile.open(fileobj=io.BytesIO(b"".join(piece.read_bytes() for piece in pieces))) as file:
        file.extractall(work, filter="data")
    for model in BIG:
        weights, state = work / "models" / model / WEIGHTS, State()
        carried = load_file(weights)
        for key, tensor in carried.items():
            name, _, part = key.partition(":")
            if not part:
                state[name] = tensor
            elif part == "codes":
                state[name] = decoded({one: carried[f"{name}:{one}"] for one in ("codes", "scale", "low")})
        save_file(state, weights.with_name("decoded"), {"format": "pt"})
        weights.with_name("decoded").replace(weights)


def main() -> None:
    about = "Cut models and data into parts, or join."
    parser = argparse.ArgumentParser(prog="python -m runs.study.parts", description=about)
    do = parser.add_subparsers(dest="do", required=True)
    cutting, joining = do.add_parser("cut"), do.add_parser("join")
    cutting.add_argument("parts", type=Path)
    cutting.add_argument("--models", type=Path, required=True)
    cutting.add_argument("--data", type=Path, required=True)
    joining.add_argument("parts", type=Path)
    joining.add_argument("work", type=Path)
    a = parser.parse_args()
    if a.do == "join":
        join(a.parts, a.work)
        return
    for path in cut(a.parts, a.models, a.data):
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
