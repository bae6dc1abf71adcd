"""`otaro describe DIR`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from otaro.cli import console
from otaro.cli.help import page


@page(examples="otaro describe DIR")
def describe(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A nested directory.")],
    json: console.JsonOption = False,
) -> None:
    """Write decoder.json into a nested directory: what otaro-run, otaro.h and browsers need to know of its
    model.

    `otaro pack` and `otaro tune` do so by themselves; this is for directories that were packed before there
    was such a file.
    """
    from otaro.file.replace import DECODER_FILE
    from otaro.runtime.decoder_file import write_decoder_file

    console.quiet_transformers()
    write_decoder_file(directory)
    written = directory / DECODER_FILE
    if json:
        console.print_json({"out": str(written), "bytes": written.stat().st_size})
    else:
        console.out.print(f"wrote {console.escape(str(written))}", highlight=False)
