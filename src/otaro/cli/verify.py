"""`otaro verify DIR`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from otaro.cli import console


def verify(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A nested directory.")],
    json: console.JsonOption = False,
) -> None:
    """Read every shard and check every digest; stops at the first damaged tensor and names it."""
    from otaro.file.io import NestedDirectory

    nested = NestedDirectory(directory)
    with console.progress_bar("verifying (MB)", 1_000_000) as progress:
        nested.verify(progress)
    shards = nested.shards()
    tensors = sum(len(shard.header.entries) for shard in shards)
    size = sum(shard.size for shard in shards)
    if json:
        console.print_json({"ok": True, "shards": len(shards), "tensors": tensors, "bytes": size, "finest": str(nested.finest)})
    else:
        console.out.print(
            f"{directory} is sound and complete up to {nested.finest}: "
            f"{len(shards)} shards, {tensors} tensors, {console.size(size)}",
            highlight=False,
        )
