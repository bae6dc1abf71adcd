"""`otaro export`: a nested model at one precision, written in another program's format and read back."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path

from otaro.errors import OtaroError, PrecisionError, TargetError
from otaro.export.report import Report
from otaro.export.source import Progress, Source
from otaro.file.atomic import new_directory, new_file
from otaro.file.fits import is_fit
from otaro.file.header import BASE
from otaro.file.hub import Hub
from otaro.sefp.precision import Precision

TARGETS = ("gguf", "compressed-tensors", "mlx", "hf")
MIXED = ("gguf", "hf")
"""Whose tensors may be of different precisions."""
MARK = "otaro-export.json"
"""Beside an exported directory: what it was made from, and which files are of the export."""


def export(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    precision: str | Precision,
    to: str,
    type: str | None = None,
    overwrite: bool = False,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: Progress = lambda name, done, total: None,
) -> Report:
    """Write a nested directory (or the Hub id of one) at `precision` as `out`: a file for gguf, else a
    directory.

    Weights go where they fit exactly; `type` asks for one of the target's types instead (docs/export.md).
    Everything is read back and compared with what the codec decodes; the report says where they differ. `out`
    appears when that is done, or not at all. An earlier export there gives way if `overwrite`. `progress`
    gets the tensor at hand and the weights done and in total.
    """
    if to not in TARGETS:
        raise OtaroError(f"unknown target {to!r}; choose from {', '.join(TARGETS)}")
    if is_fit(precision) and to not in MIXED:
        raise PrecisionError(
            f"{precision} has several precisions, and --to {to} one for all tensors; export it to "
            f"{' or '.join(MIXED)}, "
            "or a single precision"
        )
    target = Path(os.path.realpath(out))
    _check_target(target, to, overwrite)
    source = Source(model, precision, Hub(revision, token, cache_dir))
    for shard in source.nested.shards()[: source.grid.mantissa_bits - BASE + 1]:
        shard.verify()  # or damage would be copied, and called exact
    report = Report(to, str(source.precision))
    write = import_module(f"otaro.export.{to.replace('-', '_')}").write
    place: Callable[..., AbstractContextManager[Path]] = new_file if to == "gguf" else new_directory
    with place(target, overwrite) as partial:
        write(source, partial, report, type, progress)
        if to != "gguf":
            _mark(partial, source, report)
    report.path = Path(out)
    report.bytes = (
        target.stat().st_size if target.is_file() else sum(path.stat().st_size for path in target.iterdir())
    )
    return report


def _mark(directory: Path, source: Source, report: Report) -> None:
    files = sorted(path.name for path in directory.iterdir())
    about = {"model": source.nested.base.header.model, "precision": report.precision, "target": report.target}
    (directory / MARK).write_text(
        json.dumps({**about, "exact": report.exact, "files": [*files, MARK]}, indent=2) + "\n"
    )


def _check_target(target: Path, to: str, overwrite: bool) -> None:
    """Only an earlier export is ever replaced, and only if it has nothing else beside it."""
    if not target.exists() or (target.is_dir() and to != "gguf" and not any(target.iterdir())):
        return
    if to == "gguf" and target.is_dir():
        raise TargetError(f"{target} is a directory; name the file to write, such as {target / 'model.gguf'}")
    if not overwrite:
        raise TargetError(
            f"{target} exists; choose another place, or replace an earlier export with --overwrite"
        )
    if to == "gguf":
        with target.open("rb") as file:
            start = file.read(1 << 16)
        if not (start.startswith(b"GGUF") and b"otaro.model" in start):
            raise TargetError(f"{target} is no earlier export and is not overwritten; choose another place")
        return
    try:
        own = set(json.loads((target / MARK).read_text())["files"])
    except (OSError, ValueError, KeyError, TypeError):
        raise TargetError(
            f"{target} is no earlier export and is not overwritten; choose another place"
        ) from None
    if other := sorted({path.name for path in target.iterdir()} - own):
        raise TargetError(
            f"{target} also holds {other[0]}, which is not of the export; move it away or "
            "choose another place"
        )
