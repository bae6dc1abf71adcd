"""The folder of a tuning run, as met by who looks for a model: it is none, but holds one, in two forms."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from otaro.errors import CheckpointError

_FORMS = {"nested": "packed", "model": "the tuned checkpoint"}


def read_run(directory: Path) -> dict[str, Any] | None:
    """config.json of `otaro tune`, where that is what a folder holds."""
    try:
        stated = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError, RecursionError):
        return None
    return (
        stated
        if isinstance(stated, dict) and {"model", "data", "options", "training"} <= stated.keys()
        else None
    )


def command_to_resume(directory: Path, stated: dict[str, Any]) -> str:
    """By what the run was started; runs of before it was stated were started by torchrun, if by anything."""
    count = stated.get("processes", 1)
    started = stated.get("launcher") or (
        "otaro" if count == 1 else f"torchrun --nproc_per_node {count} -m otaro"
    )
    return f"{started} tune --resume --out {shlex.quote(str(directory))}"


def refuse_run(directory: Path) -> None:
    """Say where in a run's folder the model is, or how to get one."""
    if (stated := read_run(directory)) is None:
        return
    what = f"{directory} is the folder of a tuning run, not a model"
    there = [name for name in _FORMS if (directory / name / "config.json").is_file()]
    if not there:
        raise CheckpointError(
            f"{what}, and there is none in it yet; go on with: {command_to_resume(directory, stated)}"
        )
    raise CheckpointError(
        f"{what}; give {' or '.join(f'{directory / name} ({_FORMS[name]})' for name in there)}"
    )
