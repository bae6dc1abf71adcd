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
    nested.require(nested.finest)
    shards = [nested.plane(plane) for plane in range(3, nested.finest.mantissa_bits + 1)]
    total = sum(entry.end - entry.start for shard in shards for entry in shard.header.entries.values())
    done = tensors = 0
    with console.progress_bar("verifying (MB)", 1_000_000) as progress:
        for shard, name, length in nested.verify():
            done += length
            tensors += 1
            progress(f"{shard.header.path.name} {name}", done, total)
    if json:
        console.print_json({"ok": True, "shards": len(shards), "tensors": tensors, "bytes": done, "finest": str(nested.finest)})
    else:
        console.out.print(
            f"{directory} is sound and complete up to {nested.finest}: "
            f"{len(shards)} shards, {tensors} tensors, {console.size(done)}",
            highlight=False,
        )
