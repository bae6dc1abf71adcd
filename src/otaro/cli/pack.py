"""`otaro pack MODEL OUT`."""

from __future__ import annotations

import time
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from otaro.cli import console
from otaro.cli.help import page
from otaro.errors import OtaroError
from otaro.sefp.precision import PRECISIONS

if TYPE_CHECKING:
    from otaro.calibrate.run import Calibrated
    from otaro.evaluate.text import Text
    from otaro.file.summary import UnpackedSummary

_NAMED = 3  # groups of tensors


@page(
    {"Numbers": "reconstruction group_size keep_float32", "Calibration": "calibrate samples device"},
    examples="""
    otaro pack HuggingFaceTB/SmolLM2-135M smol
    otaro pack MODEL out --calibrate notes.txt   # better at low precisions, without tuning
    """,
)
def pack(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A Hugging Face model: a directory, a Hub id, or `builtin`; or a GGUF file."
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The nested directory to write.")],
    reconstruction: console.ReconstructionOption = None,
    group_size: console.GroupSizeOption = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace OUT if it is a nested model; other files in it stay.")
    ] = False,
    keep_float32: Annotated[
        bool,
        typer.Option(
            "--keep-float32",
            help="Keeps large unpacked float32 tensors in float32. Without it they are stored in 16 bits.",
        ),
    ] = False,
    calibrate: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="Choose codes that make up for each other's error on this text: a file, a Hub data set, or "
            "`builtin`. "
            "Takes minutes to hours, and goes on where it was after a stop.",
        ),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(help="With --calibrate: windows of 512 tokens to use, 128 by default."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="With --calibrate: where to compute, cpu (the default) or cuda.")
    ] = None,
    revision: console.RevisionOption = None,
    token: console.TokenOption = None,
    cache_dir: console.CacheDirOption = None,
    json: console.JsonOption = False,
) -> None:
    """Turn a model into a nested directory that holds every precision.

    Reads safetensors and GGUF only, a few thousand rows at a time. OUT appears when it is complete, or not at
    all.
    """
    if calibrate is None and (
        given := "--samples" if samples is not None else "--device" if device is not None else None
    ):
        raise console.Misuse(
            f"{given} is for packing with --calibrate TEXT; give a text, or leave {given} out"
        )
    started = time.perf_counter()
    calibrated: Calibrated | None = None
    options: dict[str, Any] = {
        "group_size": group_size,
        "reconstruction": reconstruction,
        "overwrite": overwrite,
        "keep_float32": keep_float32,
        "revision": revision,
        "token": token,
        "cache_dir": cache_dir,
    }
    try:
        console.quiet_transformers()
        title = "packing" if calibrate is None else "calibrating"
        with (
            warnings.catch_warnings(record=True) as notes,
            console.progress_bar(f"{title} (million weights)", 1_000_000) as progress,
        ):
            if calibrate is None:
                from otaro.file.pack import pack as pack_model

                nested = pack_model(model, out, progress=progress, **options)
            else:
                from otaro.calibrate.run import SAMPLES, pack_calibrated

                text = _text(calibrate)
                options |= {"samples": SAMPLES if samples is None else samples, "device": device or "cpu"}
                calibrated = pack_calibrated(
                    model, out, text.content, text_name=text.name, progress=progress, **options
                )
                nested = calibrated.nested
    except KeyboardInterrupt:
        begun = calibrate is not None and out.with_name(f".{out.name}.calibrating").exists()
        kept = "; finished layers are kept beside it, and the same command goes on with them" if begun else ""
        now = (
            f"{out} is as it was"
            if out.exists()
            else f"there is no {out}"
            if kept
            else "nothing is left behind"
        )
        console.remark(f"interrupted: {now}{kept}")
        raise typer.Exit(130) from None
    seconds = time.perf_counter() - started
    undescribed = _describe(out)
    for note in notes:
        console.err.print(f"note: {console.escape(str(note.message))}", highlight=False)
    from otaro.file.summary import precision_summary, unpacked
    from otaro.runtime.load import has_tokenizer

    if not has_tokenizer(out):
        console.remark(f"note: {model} has no tokenizer: to read and write text, copy its files into {out}")

    sizes, left = [precision_summary(nested, precision) for precision in PRECISIONS], unpacked(nested)
    total = sum(path.stat().st_size for path in out.glob("model-m*.safetensors"))
    if json:
        coding = {"group_size": nested.schema.group_size, "reconstruction": nested.schema.reconstruction}
        result = {"out": str(out), "bytes": total, "seconds": seconds, "model": nested.base.header.model}
        bits = {row.precision: row.bits_per_weight for row in sizes}
        more = (
            {}
            if calibrated is None
            else {"calibrated": {"tokens": calibrated.tokens, "plain": calibrated.plain}}
        )
        about = {**result, **coding, "bits_per_weight": bits, "unpacked": [asdict(group) for group in left]}
        about["decoder"] = not undescribed
        console.print_json({**about, **more})
    else:
        console.out.print(
            f"packed {model} into {out}: {console.size(total)} for all six precisions, {seconds:.1f} s "
            f"(groups of {nested.schema.group_size}, {nested.schema.reconstruction})",
            highlight=False,
        )
        finest, coarsest = sizes[0], sizes[-1]
        console.out.print(
            f"bits per weight of the whole model: {finest.bits_per_weight:.2f} at {finest.precision} "
            f"({finest.ratio_to_fp16:.0%} of FP16) to {coarsest.bits_per_weight:.2f} at {coarsest.precision}",
            highlight=False,
        )
        if calibrated is not None:
            console.out.print(
                f"calibrated on {calibrated.tokens} tokens of {console.escape(str(calibrate))}",
                highlight=False,
            )
            for name in calibrated.plain:
                console.out.print(f"packed plainly: {console.escape(name)}", highlight=False)
        if left:
            console.out.print(f"not packed: {console.escape(_named(left))}", highlight=False)
        if undescribed:
            console.out.print(f"no decoder.json: {console.escape(undescribed)}", highlight=False)
        console.out.print(f"see it with:  otaro inspect {out}", highlight=False)


def _describe(out: Path) -> str:
    """Write decoder.json, where a decoder serves the model; or why there is none."""
    from otaro.runtime.decoder_file import write_decoder_file

    try:
        write_decoder_file(out)
    except OtaroError as error:
        return str(error)
    return ""


def _text(source: str) -> Text:
    from otaro.evaluate.text import Text, TextError, read_text

    if source == "builtin":
        from otaro.builtin import topics_training_text

        return Text(source, topics_training_text(), source)
    try:
        return read_text(source)
    except TextError as error:  # which names the option of the commands that measure
        raise TextError(str(error).replace("--text", "--calibrate", 1)) from error


def _named(left: list[UnpackedSummary]) -> str:
    """The largest of what stays as it is, and how much there is besides."""
    words = [
        f"{group.name} ({group.tensors} in {group.dtype}, {console.size(group.bytes)})"
        for group in left[:_NAMED]
    ]
    if others := left[_NAMED:]:
        tensors, size = sum(group.tensors for group in others), sum(group.bytes for group in others)
        words.append(f"{tensors} others ({console.size(size)})")
    return ", ".join(words)
