"""An ordinary checkpoint, in one floating-point type."""

from __future__ import annotations

from pathlib import Path

from otaro.export.checkpoint import parse_dtype, write_checkpoint
from otaro.export.report import Report
from otaro.export.source import Progress, Source, chosen_dtype


def write(source: Source, out: Path, report: Report, dtype: str | None, progress: Progress) -> None:
    """Fill the directory `out`; by default in the smallest type that is exact."""
    write_checkpoint(
        source, out, report, chosen_dtype(source) if dtype is None else parse_dtype(dtype), progress
    )
