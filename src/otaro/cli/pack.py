"""`otaro pack MODEL OUT`."""

from __future__ import annotations

import time
import warnings
from math import prod
from pathlib import Path
from typing import Annotated

import typer

from otaro.cli import console


def pack(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A Hugging Face model: a directory, a Hub id, or `builtin`.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The nested directory to write.")],
    reconstruction: console.ReconstructionOption = None,
    group_size: console.GroupSizeOption = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace OUT if it is a nested model; other files in it stay.")
    ] = False,
    revision: console.RevisionOption = None,
    token: console.TokenOption = None,
    cache_dir: console.CacheDirOption = None,
    json: console.JsonOption = False,
) -> None:
    """Turn a model into a nested directory that holds every precision.

    Reads safetensors only, a few thousand rows at a time. OUT appears when it is complete, or not at all.
    """
    started = time.perf_counter()
    try:
        from otaro.file.pack import pack as pack_model

        console.quiet_transformers()
        with (
            warnings.catch_warnings(record=True) as notes,
            console.progress_bar("packing (million weights)", 1_000_000) as progress,
        ):
            nested = pack_model(
                model,
                out,
                group_size=group_size,
                reconstruction=reconstruction,
                overwrite=overwrite,
                revision=revision,
                token=token,
                cache_dir=cache_dir,
                progress=progress,
            )
    except KeyboardInterrupt:
        console.remark(f"interrupted: {f'{out} is as it was' if out.exists() else 'nothing is left behind'}")
        raise typer.Exit(130) from None
    seconds = time.perf_counter() - started
    for note in notes:
        console.err.print(f"note: {console.escape(str(note.message))}", highlight=False)
    total = sum(path.stat().st_size for path in out.glob("model-m*.safetensors"))
    if json:
        coding = {"group_size": nested.schema.group_size, "reconstruction": nested.schema.reconstruction}
        result = {"out": str(out), "bytes": total, "seconds": seconds, "model": nested.base.header.model}
        console.print_json({**result, **coding})
    else:
        console.out.print(
            f"packed {model} into {out}: {console.size(total)} for all six precisions, {seconds:.1f} s "
            f"(groups of {nested.schema.group_size}, {nested.schema.reconstruction})",
            highlight=False,
        )
        packed = sum(prod(shape) for shape in nested.schema.packed.values())
        others = {name: prod(entry.shape) for name, entry in nested.unpacked.items()}
        if (left := sum(others.values())) > 0.05 * packed:
            largest = max(others, key=lambda name: others[name])
            console.out.print(
                f"{left / (packed + left):.0%} of the weights stay as they are, at every precision: {largest} and others "
                "are of modules that cannot be packed",
                highlight=False,
            )
        console.out.print(f"see it with:  otaro inspect {out}", highlight=False)
