"""The checkpoints that a run leaves: which it can go on from, and how much of its log is then true."""

from __future__ import annotations

import json
from pathlib import Path
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open

from otaro.errors import OtaroError

COMPLETE_FILE = "otaro_complete"
"""The mark of one that was written to its end."""


class TrainingError(OtaroError):
    """A run that cannot go on."""


def last_complete_checkpoint(directory: Path) -> Path | None:
    """The newest checkpoint that was written to its end."""
    return max(_complete_checkpoints(directory), key=age, default=None)


def last_good_checkpoint(directory: Path) -> Path | None:
    """The newest complete one whose files are whole, and whose weights, as far as they are in safetensors
    files, are all finite.
    """
    newest_first = sorted(_complete_checkpoints(directory), key=age, reverse=True)
    return next((one for one in newest_first if _is_whole(one) and _is_finite(one)), None)


def _complete_checkpoints(directory: Path) -> list[Path]:
    return [path.parent for path in directory.glob(f"checkpoint-*/{COMPLETE_FILE}")]


def _is_whole(checkpoint: Path) -> bool:
    """What torch saved are zip files, whose index is at their end: one that was cut off has none."""
    try:
        for file in checkpoint.glob("*.json"):
            json.loads(file.read_text())
    except ValueError:
        return False
    return all(is_zipfile(file) for kind in ("*.pt", "*.pth") for file in checkpoint.glob(kind))


def _is_finite(checkpoint: Path) -> bool:
    try:
        for file in checkpoint.glob("*.safetensors"):
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 # a file, not a mapping
                    values = tensors.get_tensor(name)
                    if values.numel() and not torch.linalg.vector_norm(values.float(), torch.inf).isfinite():
                        return False
    except SafetensorError:  # it was cut off
        return False
    return True


def age(checkpoint: Path) -> tuple[bool, int]:
    """Sorts incomplete checkpoints before complete ones, and old before new."""
    return (checkpoint / COMPLETE_FILE).exists(), int(checkpoint.name.rpartition("-")[2])


def forget_steps_after(log: Path, step: int) -> None:
    """Drop what a killed run logged after the checkpoint it will resume from."""
    if log.is_file():
        kept = [line for line in log.read_text().splitlines() if _step_of(line) <= step]
        new = log.with_name(log.name + ".new")
        new.write_text("".join(line + "\n" for line in kept))
        new.replace(log)


def _step_of(line: str) -> float:
    try:
        record = json.loads(line)
        after = "leftover" in record or "averaged" in record  # the last checkpoint
        return float("inf") if after else float(record["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")  # cut off by the kill
