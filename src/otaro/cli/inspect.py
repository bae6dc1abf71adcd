"""`otaro inspect DIR`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from otaro.cli import console
from otaro.cli.help import page
from otaro.cli.quality import show_quality

if TYPE_CHECKING:
    from otaro.evaluate.quality import Quality
    from otaro.file.coding import CalibratedOn
    from otaro.file.fits import Fit, Stored
    from otaro.file.hub import Hub
    from otaro.file.summary import PrecisionSummary, Summary

    _Found = tuple[Summary, CalibratedOn | None, Quality | None, dict[str, Fit]]


@page(examples="otaro inspect DIR")
def inspect(
    directory: Annotated[
        str,
        typer.Argument(
            metavar="DIR", help="A nested directory, or the Hub id or http(s)://HOST/PATH of one."
        ),
    ],
    revision: console.RevisionOption = None,
    token: console.TokenOption = None,
    cache_dir: console.CacheDirOption = None,
    json: console.JsonOption = False,
) -> None:
    """Show what a nested directory holds: sizes per precision, numbers per kind of module, and what `otaro
    eval` measured.

    Of a model that is not on this machine the headers alone are read; they have all but the numbers per kind
    of module.
    """
    from otaro.file.hub import Hub

    hub = Hub(revision, token, cache_dir)
    summary, calibrated, quality, fits = (
        _of_headers(directory, hub) if _elsewhere(directory) else _of_files(directory, hub)
    )
    if json:
        told = {name: fit.to_dict() for name, fit in fits.items()}
        more = {
            "calibrated": calibrated and asdict(calibrated),
            "quality": quality and quality.to_dict(),
            "fits": told,
        }
        console.print_json({**summary.to_dict(), **more})
    else:
        show(summary, calibrated)
        if fits:
            show_fits(fits, max(row.precision for row in summary.precisions if not row.missing))
        if quality is not None:
            show_quality(quality.entries)


def _elsewhere(directory: str) -> bool:
    """Whether this is a URL or a Hub id; offline, the Hub is what its cache has, and that lies here."""
    from huggingface_hub.constants import HF_HUB_OFFLINE

    from otaro.file.checkpoint import BUILTIN

    return "://" in directory or not (HF_HUB_OFFLINE or Path(directory).exists() or directory == BUILTIN)


def _of_files(directory: str, hub: Hub) -> _Found:
    from otaro.file.checkpoint import resolve_nested
    from otaro.file.io import NestedDirectory
    from otaro.file.summary import summarize

    nested = NestedDirectory(resolve_nested(directory, hub=hub))
    with console.progress_bar("reading (million weights)", 1_000_000) as progress:
        summary = summarize(nested, lambda done, total: progress("", done, total))
    return (
        summary,
        _calibrated(nested.path),
        _quality(nested.path, summary),
        _fits(nested.path, summary.model, nested),
    )


def _of_headers(model: str, hub: Hub) -> _Found:
    from otaro.file.coding import CODING_FILE
    from otaro.file.remote import RemoteModel, read_small
    from otaro.file.replace import FITS_FILE, QUALITY_FILE
    from otaro.file.source import find_source
    from otaro.file.summary import summarize_headers

    source = find_source(model, hub)
    remote = RemoteModel(source)
    summary = summarize_headers(remote, model)
    with TemporaryDirectory() as folder:
        place = Path(folder)
        for name in (CODING_FILE, QUALITY_FILE, FITS_FILE):
            if not read_small(source, name, place / name):
                (place / name).unlink(missing_ok=True)
        fits = _fits(place, summary.model, remote, str(source))
        return summary, _calibrated(place), _quality(place, summary), fits


def _calibrated(directory: Path) -> CalibratedOn | None:
    """What a model was calibrated on, where a file says so that can be read."""
    from otaro.errors import CheckpointError
    from otaro.file.coding import read_calibrated

    try:
        return read_calibrated(directory)
    except CheckpointError as error:
        console.err.print(f"note: not shown: {console.escape(str(error))}", highlight=False)
        return None


def _quality(directory: Path, summary: Summary) -> Quality | None:
    """What was measured of a model, where a record says so that can be read."""
    from otaro.evaluate.quality import QualityError, read_quality

    try:
        return read_quality(directory, summary.model)
    except QualityError as error:
        console.err.print(f"note: not shown: {console.escape(str(error))}", highlight=False)
        return None


def _fits(directory: Path, model: str, stored: Stored, source: str = "") -> dict[str, Fit]:
    """What `otaro fit` found for a model, where a file says so that can be read."""
    from otaro.errors import FormatError
    from otaro.file.fits import read_fits_in

    try:
        return read_fits_in(directory, model, stored, source)
    except FormatError as error:
        console.err.print(f"note: not shown: {console.escape(str(error))}", highlight=False)
        return {}


def show_fits(fits: dict[str, Fit], finest: str) -> None:
    """Print what fits take, and what they lose beside the best single precision of no more bytes."""
    from rich.table import Table

    table = Table(title="Fits, the largest first", title_justify="left")
    for heading in ("precision", "size", "bits", "up to", "KL", "instead of", "KL"):
        table.add_column(
            heading,
            no_wrap=True,
            justify="left" if heading in ("precision", "up to", "instead of") else "right",
        )
    for fit in sorted(fits.values(), key=lambda fit: -fit.bytes):
        about = fit.about
        taken = (console.size(fit.bytes), f"{about['bits_per_weight']:.3f}", str(fit.finest))
        lost = (f"{about['measured']:.4f}", about["uniform"], f"{about['uniform_measured']:.4f}")
        table.add_row(str(fit), *taken, *lost)
    anywhere = console.out.options.update(width=1000)
    table.width = console.out.measure(table, options=anywhere).maximum  # a name that is cut off is none
    console.out.print(table, crop=False)
    for fit in fits.values():
        if (reference := fit.about.get("reference", finest)) != finest:
            line = f"{fit}: KL is from {reference}, the finest that was there when it was made, not {finest}"
            console.out.print(line, highlight=False)


def show(summary: Summary, calibrated: CalibratedOn | None = None) -> None:
    """Print the tables."""
    console.out.print(f"[bold]{console.escape(summary.path)}[/]  model {summary.model[:12]}", highlight=False)
    console.out.print(
        f"{summary.packed_weights:,} packed weights and {summary.other_parameters:,} others, "
        f"{summary.reconstruction}, groups of {summary.group_size}, {summary.exact_zeros:.1%} exact zeros",
        highlight=False,
    )
    if calibrated is not None:
        on = f"{calibrated.tokens:,} tokens of {console.escape(calibrated.text)}"
        console.out.print(f"calibrated on {on}", highlight=False)
    sizes = console.table(
        "By precision", "precision", "shards model-...", "size", "bits per weight", "of FP16", words=2
    )
    for row in summary.precisions:
        sizes.add_row(
            row.precision,
            _shards(row),
            console.size(row.bytes) if row.bytes is not None else "-",
            f"{row.bits_per_weight:.3f}",
            f"{row.ratio_to_fp16:.1%}" if row.ratio_to_fp16 is not None else "-",
        )
    console.out.print(sizes)
    modules = console.table("By kind of module", "module", "tensors", "weights", "scales", "zero at E5M3")
    for module in summary.modules:
        modules.add_row(
            module.type,
            str(module.tensors),
            f"{module.weights:,}",
            f"{module.min_scale:.2g} to {module.max_scale:.2g}",
            f"{module.zero_share:.1%}",
        )
    if summary.modules:
        console.out.print(modules)
    else:
        console.remark(
            "note: scales and zeros per kind of module are not in the headers; `otaro fetch` the "
            "model to see them"
        )
    left = console.table(
        "Not packed, the same at every precision", "tensor", "tensors", "weights", "type", "size"
    )
    for group in summary.unpacked:
        left.add_row(
            group.name, str(group.tensors), f"{group.weights:,}", group.dtype, console.size(group.bytes)
        )
    if summary.unpacked:
        console.out.print(left)


def _shards(row: PrecisionSummary) -> str:
    """The shards in short, `m3 ... m8`; of an incomplete set, those to fetch."""
    short = [name.removeprefix("model-").removesuffix(".safetensors") for name in row.missing or row.shards]
    listed = short[0] if len(short) == 1 else f"{short[0]} ... {short[-1]}"
    return f"[red]lacks {listed}[/]" if row.missing else listed
