"""`otaro analyze gradients|weights`: the paper's observations on any model: tables, figures, JSON."""

from __future__ import annotations

import datetime
import json as json_module
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from otaro.cli import console
from otaro.cli.generate import DeviceOption
from otaro.cli.help import App, page
from otaro.sefp.precision import GROUP_SIZE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from otaro.file.checkpoint import Checkpoint
    from otaro.file.hub import Hub

app = App(no_args_is_help=True)


@app.callback()
@page(
    examples="""
    otaro analyze gradients MODEL --text builtin --batches 4   # figures 4 and 5 of the paper
    otaro analyze weights MODEL                                # what sharing a scale costs
    """
)
def analyze() -> None:
    """Repeat the paper's observations: gradients and weights of a model."""


ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="A Hugging Face directory, a Hub id, or `builtin`.")
]
OutOption = Annotated[
    Path | None, typer.Option(help="Where figures and JSON go; MODEL/analysis if MODEL is a directory.")
]

NO_BOS_HELP = (
    "Do not begin every sequence of text with the beginning-of-text token, where the tokenizer writes one."
)


@app.command()
@page(
    {
        "Batches": "batches batch_size sequence_length no_bos",
        "Numbers": "modules reconstruction group_size device",
    },
    examples="otaro analyze gradients MODEL --text builtin --batches 4",
)
def gradients(
    model: ModelArgument,
    text: Annotated[
        str,
        typer.Option(help="The text to read, as --data of `otaro tune`: a .txt file, ..., or `builtin`."),
    ],
    out: OutOption = None,
    batches: Annotated[int, typer.Option(help="Batches to compare over.", min=1)] = 16,
    batch_size: Annotated[int, typer.Option(help="Sequences in a batch.", min=1)] = 4,
    sequence_length: Annotated[int, typer.Option(help="Tokens in a sequence.")] = 256,
    no_bos: Annotated[bool, typer.Option("--no-bos", help=NO_BOS_HELP)] = False,
    modules: Annotated[
        str, typer.Option(help="Look only at modules of such names: '*.layers.15.*'; all are quantized.")
    ] = "*",
    reconstruction: console.ReconstructionOption = None,
    group_size: console.GroupSizeOption = None,
    device: DeviceOption = "cpu",
    revision: console.RevisionOption = None,
    token: console.TokenOption = None,
    cache_dir: console.CacheDirOption = None,
    json: console.JsonOption = False,
) -> None:
    """Compare the gradients at all precisions, in every layer and projection, as the paper's figures 4 and 5
    do.

    A batch takes seven backward passes. Memory is 10 bytes per weight and 60 more per weight that --modules
    looks at.
    """
    from otaro.evaluate.charts import altair, gradient_files
    from otaro.evaluate.gradients import analyze_gradients
    from otaro.file.coding import choose_coding
    from otaro.file.hub import Hub

    altair()  # is refused now if it is missing, not after the work
    out = _out(model, out)
    with console.err.status("loading model and text ..."):
        checkpoint = _checkpoint(model, Hub(revision, token, cache_dir))
        coding = choose_coding(checkpoint.directory, group_size, reconstruction)
        loaded, data, begun = _load(
            checkpoint, text, batches, batch_size, sequence_length, not no_bos, device
        )
    with console.progress_bar("gradients (backward passes)") as progress:
        result = analyze_gradients(
            loaded,
            list(checkpoint.packed),
            data,
            group_size=coding.group_size,
            reconstruction=coding.reconstruction,
            modules=modules,
            progress=progress,
        )
    options = {
        "text": text, "out": out, "batches": batches, "batch-size": batch_size,
        "sequence-length": sequence_length, "modules": modules, "reconstruction": coding.reconstruction,
        "group-size": coding.group_size, "device": device, "revision": revision, "cache-dir": cache_dir,
        "no-bos": no_bos,
    }  # fmt: skip
    facts = {"text": text, "batch_size": batch_size, "sequence_length": sequence_length, "bos": begun}
    result = {**_provenance("gradients", model, options), **facts, **result}
    _finish(out, "gradients", result, gradient_files(result), json, _show_gradients)


@app.command()
@page(examples="otaro analyze weights MODEL")
def weights(
    model: ModelArgument,
    out: OutOption = None,
    reconstruction: console.ReconstructionOption = None,
    revision: console.RevisionOption = None,
    token: console.TokenOption = None,
    cache_dir: console.CacheDirOption = None,
    json: console.JsonOption = False,
) -> None:
    """Count what sharing a scale costs the weights, for groups of 16 to 256: outliers, losses, errors.

    Reads the checkpoint a few thousand rows at a time.
    """
    from otaro.evaluate.weights import analyze_weights
    from otaro.file.coding import choose_coding
    from otaro.file.hub import Hub

    out = _out(model, out)
    checkpoint = _checkpoint(model, Hub(revision, token, cache_dir))
    # it looks at sizes of its own
    kind = choose_coding(checkpoint.directory, GROUP_SIZE, reconstruction).reconstruction
    with console.progress_bar("weights (million)", 1_000_000) as progress:
        result = analyze_weights(checkpoint, reconstruction=kind, progress=progress)
    options = {"out": out, "reconstruction": kind, "revision": revision, "cache-dir": cache_dir}
    result = {**_provenance("weights", model, options), **result}
    _finish(out, "weights", result, {}, json, _show_weights)


def _checkpoint(model: str, hub: Hub) -> Checkpoint:
    """The checkpoint to be looked at; of a nested model the one it was packed from has to be given."""
    from otaro.errors import CheckpointError
    from otaro.file.checkpoint import Checkpoint, resolve_model
    from otaro.file.header import BASE, shard_name

    console.quiet_transformers()
    directory = resolve_model(model, hub=hub)
    if (directory / shard_name(BASE)).is_file():
        raise CheckpointError(
            f"{model} is a nested model, whose weights are codes already; analyse the checkpoint that it "
            "was packed from"
        )
    return Checkpoint(directory)


def _load(
    checkpoint: Checkpoint,
    text: str,
    batches: int,
    batch_size: int,
    sequence_length: int,
    bos: bool,
    device: str,
) -> tuple[Any, list[Any], bool]:
    """The model in float32, the batches, whether each sequence begins with the beginning-of-text token."""
    import torch
    from transformers import AutoModelForCausalLM

    from otaro.errors import OtaroError
    from otaro.runtime.load import check_device, load_tokenizer
    from otaro.tune.data import DataError, collate, load_data, padding_id

    check_device(device)
    tokenizer = load_tokenizer(checkpoint.directory)
    positions = getattr(checkpoint.config, "max_position_embeddings", None)
    try:
        data = load_data(text, tokenizer, sequence_length, max_positions=positions, bos=bos)
    except DataError as error:
        raise OtaroError(str(error).replace("--data takes", "--text takes")) from error
    console.remark(*data.remarks)
    if len(data) < batches * batch_size:
        raise OtaroError(
            f"--text {text} makes {len(data)} sequences, and --batches {batches} of --batch-size "
            f"{batch_size} need "
            f"{batches * batch_size}; give more text, or lower one of these or --sequence-length "
            f"{sequence_length}"
        )
    join = collate(padding_id(tokenizer))
    joined = [join([data[number * batch_size + i] for i in range(batch_size)]) for number in range(batches)]
    loaded = AutoModelForCausalLM.from_pretrained(
        checkpoint.directory, dtype=torch.float32, trust_remote_code=False
    )
    return loaded.to(device), joined, data.bos


def _out(model: str, out: Path | None) -> Path:
    """The folder to write to: as asked for, or inside the model's directory if it is the user's own."""
    from otaro.errors import TargetError

    if out is None and not Path(model).is_dir():
        raise TargetError(f"{model} is no directory to write the analysis into; say where with --out DIR")
    return out or Path(model) / "analysis"


def _provenance(subcommand: str, subject: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """What it takes to repeat an analysis; the command spells out the defaults."""
    words = ["otaro", "analyze", subcommand, subject]
    for name, value in options.items():
        if value is not None and value is not False:
            words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return {
        "model": subject,
        "command": shlex.join(words),
        "date": datetime.date.today().isoformat(),
        "versions": console.versions(),
    }


def _finish(
    out: Path, name: str, result: dict[str, Any], figures: Mapping[str, str], json: bool, show: Any
) -> None:
    """Write the files, then report."""
    from otaro.file.atomic import write_text

    for file, drawing in figures.items():
        write_text(out / file, drawing)
    write_text(out / f"{name}.json", json_module.dumps(result, allow_nan=False) + "\n")
    files = [str(out / file) for file in (f"{name}.json", *figures)]
    if json:
        console.print_json(
            {**{key: value for key, value in result.items() if key != "modules"}, "files": files}
        )
    else:
        show(result)
        console.out.print(
            f"in {console.escape(str(out))}: {', '.join(Path(file).name for file in files)}", highlight=False
        )


def _show_gradients(result: dict[str, Any]) -> None:
    batches = result["batches"]
    table = console.table(
        f"Gradients beside those in full precision: {batches} batches, {len(result['modules'])} modules",
        "precision", "cosine", "lowest", "norm error", "X", "|Y|/|∇|", "bias", "summed",
    )  # fmt: skip
    for index, name in enumerate(result["precisions"]):
        fit, noise, errors = result["fit"][name], result["noise"][name], result["norm_error"][name]
        cosines = [
            module["to_fp"][index] for module in result["modules"] if module["to_fp"][index] is not None
        ]
        table.add_row(
            name,
            f"{result['to_fp'][index]:.3f}",
            f"{min(cosines):.3f}",
            f"{sum(map(abs, errors)) / len(errors):.1%}",
            f"{fit['x']:.3f}",
            f"{fit['y_share']:.3f}",
            "-" if fit["y_bias"] is None else f"{fit['y_bias']:.2f}",
            "-" if noise["exponent"] is None else f"N^{noise['exponent']:.2f}",
        )
    console.out.print(table)
    console.out.print(
        f"lowest: cosine of the worst module. bias of Y: {batches**-0.5:.2f} for noise around zero, 1 if Y "
        "is always the same. "
        "summed: how |ΣY|/|Σ∇| goes with the number N of batches; the paper expects N^-0.50.",
        highlight=False,
    )


def _show_weights(result: dict[str, Any]) -> None:
    shown = ("E5M4", "E5M3")
    table = console.table(
        f"{result['weights']:,} weights in {len(result['modules'])} tensors, {result['reconstruction']}",
        "groups of", "outlier groups",
        *(f"{kind} {name}" for kind in ("lost", "error") for name in shown),
    )  # fmt: skip
    for size, found in result["overall"].items():
        table.add_row(
            size,
            f"{found['outlier_groups']:.3%}",
            *(f"{found[kind][name] or 0.0:.1%}" for kind in ("lost", "error") for name in shown),
        )
    console.out.print(table)
    console.out.print(
        "outlier group: its largest weight is at least 4 times the second. "
        "lost: zero would be as close. error: root mean square, relative to the weights'.",
        highlight=False,
    )
