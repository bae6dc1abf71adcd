"""`otaro export DIR OUT --precision P --to TARGET`."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from otaro.cli import console
from otaro.cli.help import page

if TYPE_CHECKING:
    from otaro.export.report import Report, TypeReport


@page(
    examples="""
    otaro export DIR model.gguf --precision E5M3 --to gguf   # llama.cpp, Ollama
    otaro export DIR out --precision E5M4 --to hf            # an ordinary checkpoint
    """
)
def export(
    directory: Annotated[
        str, typer.Argument(metavar="DIR", help="A nested directory, or the Hub id of one.")
    ],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="What to write: a file for gguf, else a directory.")
    ],
    precision: Annotated[
        str,
        console.precision_option("E5M8 to E5M3; for gguf and hf also a fit: fit:90MB.", "--precision", "-p"),
    ],
    to: Annotated[
        Literal["gguf", "compressed-tensors", "mlx", "hf"],
        typer.Option(
            help="For llama.cpp and Ollama (gguf), for vLLM (compressed-tensors), for MLX (mlx), "
            "or as an ordinary checkpoint (hf)."
        ),
    ],
    type: Annotated[
        str | None,
        typer.Option(
            help="Store weights in this type, rounded where it cannot hold them: Q4_0, Q5_0, Q5_1, Q8_0, "
            "F16, BF16 or F32 for "
            "gguf, float16, bfloat16 or float32 for the others (of scales, where weights are integers). "
            "By default the smallest that is exact, for gguf up to F16.",
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace OUT if it is an earlier export.")
    ] = False,
    revision: console.RevisionOption = None,
    token: console.TokenOption = None,
    cache_dir: console.CacheDirOption = None,
    json: console.JsonOption = False,
) -> None:
    """Write one precision in the format of another program.

    Weights are stored exactly where the format has a type for them, and everything is read back and compared:
    the last line says whether every value is the nested model's bit for bit, or which are not and by how
    much.
    """
    from otaro.export.run import export as export_model

    console.check_precisions("--precision", precision, fits=True)
    console.quiet_transformers()
    started = time.perf_counter()
    try:
        with console.progress_bar("exporting (million weights)", 1_000_000) as progress:
            report = export_model(
                directory,
                out,
                precision=precision,
                to=to,
                type=type,
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
    if json:
        types = [asdict(one) for one in report.types.values()]
        told = {
            "out": str(out),
            "target": to,
            "precision": report.precision,
            "bytes": report.bytes,
            "seconds": seconds,
        }
        console.print_json({**told, "exact": report.exact, "types": types, "notes": report.notes})
        return
    kinds = ", ".join(f"{one.tensors} in {one.type}" for one in report.types.values())
    console.out.print(
        f"exported {directory} at {report.precision} to {out} ({to}): {console.size(report.bytes)}, "
        f"{seconds:.1f} s; "
        f"tensors: {kinds}",
        highlight=False,
    )
    for note in report.notes:
        console.out.print(console.escape(note), highlight=False)
    console.out.print(console.escape(_verdict(report)), highlight=False)


def _verdict(report: Report) -> str:
    if report.exact:
        return f"read back: all {report.tensors} tensors equal {report.precision} bit for bit"
    rounded = [one for one in report.types.values() if one.rounded_tensors]
    exact = report.tensors - sum(one.rounded_tensors for one in rounded)
    return (
        f"read back: {exact} of {report.tensors} tensors equal {report.precision} bit for bit; "
        + "; ".join(map(_rounding, rounded))
    )


def _rounding(one: TypeReport) -> str:
    share = one.rounded_weights / one.weights
    return (
        f"in {one.type} {one.rounded_tensors} are rounded, {share:.2%} of its weights, by at most "
        f"{one.largest_error:.2g} "
        f"({one.worst})"
    )
