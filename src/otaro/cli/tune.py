"""`otaro tune MODEL --data FILE --out DIR`: options to a tuned checkpoint, its nested file, a run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from otaro.cli import console
from otaro.cli.tune_heldout import FEW_TOKENS
from otaro.cli.tune_options import chosen, from_configuration, paper_as_flags, refuse_idle
from otaro.cli.tune_run import TuningRun
from otaro.tune import config, processes

OUT_HELP = (
    "The run folder: model/, nested/, config.json, log.jsonl, result.json, checkpoints/. What a run left in "
    "it that failed "
    "before its first checkpoint is replaced."
)
DATA_HELP = (
    ".txt, .json, .jsonl (each also as .gz), .parquet, owner/name or owner/name/config:split on the "
    "Hub, or `builtin`."
)
RECIPE_HELP = f"Where options not given come from. best: what is shown here; paper: {paper_as_flags()}."
RESUME_HELP = (
    "Go on from the last complete checkpoint in --out; needs no other option. --steps or --epochs may be "
    "raised: the learning "
    "rate then follows the schedule of the longer run, and a mean of the last steps starts anew."
)


@from_configuration(
    examples="""
    otaro tune HuggingFaceTB/SmolLM2-135M --data chats.jsonl --out run
    otaro tune MODEL --data notes.txt --out run --lora 16 --bf16    # a large model on one GPU
    otaro tune MODEL --data chats.jsonl --out usual --method fp     # tuning as usual, to compare with
    otaro tune --resume --out run                                   # go on after a stop
    torchrun --nproc_per_node 8 -m otaro tune MODEL --data FILE --out run --fsdp
    """
)
def tune(
    out: Annotated[Path, typer.Option(help=OUT_HELP, metavar="DIR")],
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="A Hugging Face model: a directory, a Hub id, or `builtin`."),
    ] = None,
    data: Annotated[str | None, typer.Option(help=DATA_HELP, metavar="FILE")] = None,
    recipe: Annotated[Literal["best", "paper"] | None, typer.Option(help=RECIPE_HELP)] = None,
    resume: Annotated[bool, typer.Option("--resume", help=RESUME_HELP)] = False,
    revision: console.RevisionOption = None,
    token: console.TokenOption = None,
    cache_dir: console.CacheDirOption = None,
    json: console.JsonOption = False,
    **flags: Any,
) -> None:
    """Fine-tune once so that one set of weights is good at every precision.

    Prints perplexity on held-out data at every precision, before and after. Rows of --data have `messages`,
    or `conversations` as ShareGPT, or `prompt` and `completion`, or `instruction`, perhaps `input`, and
    `output`, or `question` and `answer`, or `text`; only answers are learnt, and all of a text. docs/data.md
    shows a row of each.
    """
    from otaro.cli.tune_folder import RunFolder
    from otaro.file.hub import Hub

    given = {name: value for name, value in flags.items() if value is not None}
    around = config.Around()
    if resume:
        before = RunFolder(out).stated()
        options, training = (
            config.Options.from_dict(before["options"]),
            config.Training.from_dict(before["training"]),
        )
        around = config.Around.from_dict(before["training"])
        recipe, model, data = (
            recipe or before.get("recipe", "best"),
            model or before["model"],
            data or before["data"],
        )
        revision = revision or before.get("revision")
    with console.usage():
        if model is None or data is None:
            raise config.ConfigError(
                f"{'MODEL' if model is None else '--data'} is missing; only --resume needs no more than --out"
            )
        if "epochs" in given and "steps" in given:
            raise config.ConfigError("--epochs and --steps contradict each other; give one")
        if not resume:
            options, training = config.recipe(recipe or "best", given.get("method"))
        if "precisions" in given:
            names = given["precisions"]
            console.check_precisions("--precisions", names, *names.split(","))
            options = config.with_precisions(options, names.split(","))
        options, training = chosen(options, given), chosen(training, given)
        around = chosen(around, given)
        options.check_rate(training.lr)
        if not resume:  # which must be told what the run has, if anything
            refuse_idle(given, recipe, options, training, around)
    result = TuningRun(
        model,
        data,
        out,
        options,
        training,
        around,
        recipe=recipe or "best",
        resume=resume,
        hub=Hub(revision, token, cache_dir),
    ).go()
    if not processes.is_first():
        return
    if json:
        console.print_json(result)
    else:
        _show(result)


def _show(result: dict[str, Any]) -> None:
    table = console.table("Perplexity on data not trained on", "precision", "before", "after", "change")
    for name, before in result["before"].items():
        after = result["after"][name]
        table.add_row(
            "full" if name == "fp" else name, f"{before:.2f}", f"{after:.2f}", f"{after / before - 1:+.1%}"
        )
    if result["before"]:
        console.out.print(table)
        few = "; too few to tell precisions apart" if result["tokens"] < FEW_TOKENS else ""
        where = f"{result['tokens']:,} tokens, in sequences of up to {result['longest']}"
        console.out.print(f"measured on {where}{few}", highlight=False)
    else:
        console.out.print(
            "nothing was held out, so nothing was measured; --eval-data FILE would", highlight=False
        )
    out = result["out"]
    if judged := result.get("average"):
        mean, last = f"{judged['average']:.4f}", f"{judged['last']:.4f}"
        kept = f"their mean is kept, as its held-out loss is {mean} and that of the last weights {last}"
        if judged["kept"] == "last":
            kept = f"the last weights are kept, as their held-out loss is {last} and that of the mean {mean}"
        console.out.print(
            f"weights of the last {judged['averaged']} steps were averaged: {kept}", highlight=False
        )
    if judged := result.get("packing"):
        chosen, plain = f"{judged['calibrated']:.4f}", f"{judged['plain']:.4f}"
        kept = (
            f"codes chosen on the data are kept, as their held-out loss is {chosen} and that of plain "
            f"rounding {plain}"
        )
        if judged["kept"] == "plain":
            kept = (
                f"plain rounding is kept, as its held-out loss is {plain} and that of codes chosen on "
                f"the data {chosen}"
            )
        console.out.print(f"packed twice: {kept} (mean over the precisions tuned for)", highlight=False)
    console.out.print(
        f"{result['steps']} steps, trained for {result['seconds']:.0f} s by this call", highlight=False
    )
    console.out.print(f"tuned checkpoint: {out}/model\nnested model:     {out}/nested", highlight=False)
