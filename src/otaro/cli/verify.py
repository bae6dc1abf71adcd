"""`otaro verify DIR`."""

from __future__ import annotations

from typing import Annotated

import typer

from otaro.cli import console
from otaro.cli.help import page


@page(examples="otaro verify DIR")
def verify(
    directory: Annotated[
        str, typer.Argument(metavar="DIR", help="A nested directory, or the Hub id of one.")
    ],
    revision: console.RevisionOption = None,
    token: console.TokenOption = None,
    cache_dir: console.CacheDirOption = None,
    json: console.JsonOption = False,
) -> None:
    """Read every shard and check every digest; stops at the first damaged tensor and names it."""
    from otaro.errors import FormatError
    from otaro.file.checkpoint import resolve_nested
    from otaro.file.header import shard_name
    from otaro.file.hub import Hub
    from otaro.file.io import NestedDirectory

    nested = NestedDirectory(resolve_nested(directory, hub=Hub(revision, token, cache_dir)))
    if not (nested.path / "config.json").is_file():
        raise FormatError(f"{directory} has no config.json; fetch it from where the shards came from")
    with console.progress_bar("verifying (MB)", 1_000_000) as progress:
        nested.verify(progress)
    shards = nested.shards()
    for plane in nested.behind_gap():
        console.err.print(
            f"{shard_name(plane)} is sound but not used: a shard before it is missing", highlight=False
        )
    tensors = sum(len(shard.header.entries) for shard in shards)
    size = sum(shard.header.path.stat().st_size for shard in shards)
    if json:
        console.print_json(
            {
                "ok": True,
                "shards": len(shards),
                "tensors": tensors,
                "bytes": size,
                "finest": str(nested.finest),
            }
        )
    else:
        console.out.print(
            f"{directory} is sound and complete up to {nested.finest}: "
            f"{len(shards)} shards, {tensors} tensors, {console.size(size)}",
            highlight=False,
        )
