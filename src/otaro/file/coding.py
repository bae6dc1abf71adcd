"""How weights become codes: the group size and the reconstruction, and where a tuned checkpoint says which it
was tuned for.

A checkpoint is an ordinary one, but it was tuned for one way of quantizing, and quantized in another it is
another model. So `otaro tune` leaves `otaro.json` beside the tuned weights,

    {"group_size": 64, "reconstruction": "truncate"}

and whatever quantizes a checkpoint (`otaro pack`, `eval`, `analyze`) asks `choose_coding`: what the user says
counts, then this file, then the default. The file moves with the weights. A run folder of before there was
such a file says the same in its config.json, one level up. Both may come from strangers: they are small, and
checked field by field.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast, get_args

from otaro.errors import CheckpointError, WeightError
from otaro.file.atomic import write_text
from otaro.sefp.codec import RECONSTRUCTIONS, Reconstruction
from otaro.sefp.precision import GROUP_SIZE

CODING_FILE = "otaro.json"
_LARGEST = 1 << 20  # bytes of a file that states a few options
_NAME = 200  # characters of the name of a text


def is_group_size(value: object) -> bool:
    """Whether weights can share scales by so many."""
    return type(value) is int and 0 < value < 1 << 31 and value % 32 == 0


def is_reconstruction(value: object) -> bool:
    """Whether there is such a reconstruction."""
    return isinstance(value, str) and value in get_args(Reconstruction)


@dataclass(frozen=True)
class Coding:
    """How many weights share a scale, and what a code stands for."""

    group_size: int = GROUP_SIZE
    reconstruction: Reconstruction = "midpoint"

    def __post_init__(self) -> None:
        """Refuse what the codec does not have."""
        if not is_group_size(self.group_size):
            raise WeightError(f"group_size must be a positive multiple of 32, got {self.group_size}")
        if not is_reconstruction(self.reconstruction):
            choices = ", ".join(RECONSTRUCTIONS)
            raise WeightError(f"unknown reconstruction {self.reconstruction!r}; choose from {choices}")

    def __str__(self) -> str:
        return f"groups of {self.group_size}, {self.reconstruction}"


DEFAULT_CODING = Coding()


def choose_coding(
    directory: Path, group_size: int | None = None, reconstruction: Reconstruction | None = None
) -> Coding:
    """How to quantize the checkpoint in a directory: as asked for, else as it was tuned, else by default."""
    if group_size is not None and reconstruction is not None:
        return Coding(group_size, reconstruction)  # nobody asks a file that may be damaged
    tuned = read_coding(directory) or DEFAULT_CODING
    return Coding(
        tuned.group_size if group_size is None else group_size,
        tuned.reconstruction if reconstruction is None else reconstruction,
    )


def read_coding(directory: Path) -> Coding | None:
    """How the checkpoint in a directory was tuned, if anything says so; what says it wrongly is refused."""
    own = directory / CODING_FILE
    if own.is_file():
        return _parsed(own, _read(own))
    run = directory.resolve().parent / "config.json"
    if directory.resolve().name == "model" and run.is_file():
        options = _read(run).get("options")
        if isinstance(options, dict) and "group_size" in options:  # or it is not the config of a run
            return _parsed(run, options)
    return None


def write_coding(directory: Path, coding: Coding, about: dict[str, Any] | None = None) -> None:
    """Say beside a checkpoint how it was tuned; beside a packed model how, what GGUF file it came from
    (`source`), and what it was calibrated on (`calibrated`).
    """
    stated = asdict(coding) | (about or {})
    write_text(directory / CODING_FILE, json.dumps(stated) + "\n")


@dataclass(frozen=True)
class CalibratedOn:
    """What a packed model was calibrated on."""

    text: str
    tokens: int


def read_calibrated(directory: Path) -> CalibratedOn | None:
    """What a packed model was calibrated on, if its file says so in the way `otaro pack --calibrate` does."""
    path = directory / CODING_FILE
    stated = _read(path).get("calibrated") if path.is_file() else None
    match stated:
        case {"text": str(text), "windows": [int(windows), int(length)]} if (
            0 < windows < 1 << 31 and 0 < length < 1 << 31
        ):
            return CalibratedOn(text[:_NAME] if text.isprintable() else ascii(text[:_NAME]), windows * length)
    return None


def _read(path: Path) -> dict[str, Any]:
    try:
        stored = json.loads(path.read_text(encoding="utf-8")) if path.stat().st_size <= _LARGEST else None
    except (OSError, ValueError, RecursionError):
        stored = None
    if not isinstance(stored, dict):
        raise _refusal(path, "it is no JSON object")
    return stored


def _parsed(path: Path, stated: dict[str, Any]) -> Coding:
    size, reconstruction = stated.get("group_size"), stated.get("reconstruction")
    if not is_group_size(size):
        raise _refusal(path, f"its group_size is {str(size)[:20]!r}")
    if not is_reconstruction(reconstruction):
        raise _refusal(path, f"its reconstruction is {str(reconstruction)[:20]!r}")
    return Coding(cast(int, size), cast(Reconstruction, reconstruction))


def _refusal(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{path} should say how the checkpoint was tuned, but {why}; mend or remove it, "
        "or give both --group-size and --reconstruction to a command that takes them"
    )
