"""`otaro tune MODEL --data FILE --out DIR`: from options to a tuned checkpoint, its nested file and a run folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from otaro.cli import console
from otaro.cli.tune_run import AROUND, EVALUATED_TOKENS, SAVE_EVERY, TuningRun
from otaro.tune import processes

FEW_TOKENS = 1000  # on which perplexity is mostly chance
METHOD_HELP = (
    "otaro (the paper's Algorithm 1), bps, uniform, fixed:E5M4 (or another precision), fp. Any but `uniform`, "
    "which is that of --recipe best, comes plain: what this recipe adds is off, unless a flag asks for it."
)
RECIPE_HELP = (
    "Where options not given come from. best: --method uniform --weights 0,0,0,1,1.25,2.6 --full 0.3333 "
    "--distill 0.5 --average 0.5; paper: --method otaro --reconstruction truncate --optimizer sgd --lr 1e-5 "
    "--schedule constant --clip 0."
)
FULL_HELP = "Share of the loss that a pass in full precision takes in every step; 0 for none."
L2_SP_HELP = (
    "L2-SP: after each step weights go back toward their start, by lr times this number of the way; 0 for none. "
    "Keeps a copy of all weights."
)
DATA_HELP = ".txt, .json, .jsonl (each also as .gz), .parquet, owner/name or owner/name/config:split on the Hub, or `builtin`."
NO_BOS_HELP = "Do not begin every block of text with the beginning-of-text token, where the tokenizer writes one."
TEMPLATE_HELP = "How to word chats, for a model without a chat template: alpaca, chatml, vicuna, or a Jinja file."
AVERAGE_HELP = (
    "End with the mean weights of this share of the steps, the last ones, if they are better on held-out data; "
    "0 for none. Keeps a copy of all weights."
)
OPTIMIZER_HELP = "adamw, sgd, or adamw8bit: AdamW with 2 bytes of state a weight instead of 8, by bitsandbytes."
OUT_HELP = (
    "The run folder: model/, nested/, config.json, log.jsonl, result.json, checkpoints/. What a run left in it that failed "
    "before its first checkpoint is replaced."
)
LEFTOVER_HELP = "Apply gradients that still wait at the end, or drop them as the paper's listing does (apply)."
HOLD_OUT_HELP = "Share of the data to measure perplexity on and not to train on (0.05); 0 for none."
EVAL_TOKENS_HELP = f"Tokens to measure perplexity on ({EVALUATED_TOKENS})."
SAVE_HELP = f"Optimizer steps between checkpoints ({SAVE_EVERY})."
FSDP_HELP = "Share weights and optimizer out over the processes that torchrun started (FSDP2)."
RESUME_HELP = (
    "Go on from the last complete checkpoint in --out; needs no other option. --steps or --epochs may be raised: the learning "
    "rate then follows the schedule of the longer run, and a mean of the last steps starts anew."
)


def _option(help_text: str, *names: str) -> Any:
    return typer.Option(*names, help=help_text, show_default=False)


def tune(
    out: Annotated[Path, typer.Option(help=OUT_HELP)],
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="A Hugging Face model: a directory, a Hub id, or `builtin`.")
    ] = None,
    data: Annotated[str | None, _option(DATA_HELP)] = None,
    recipe: Annotated[Literal["best", "paper"] | None, _option(RECIPE_HELP)] = None,
    method: Annotated[str | None, _option(METHOD_HELP)] = None,
    precisions: Annotated[str | None, _option("Those to tune for, such as E5M8,E5M4,E5M3; all six by default.")] = None,
    exploration: Annotated[float | None, _option("Exploration of the path search (5).", "--lambda")] = None,
    delay: Annotated[int | None, _option("Ultra-low batches to one update (10).")] = None,
    ultra_low: Annotated[str | None, _option("Precisions whose updates are delayed (E5M4,E5M3).")] = None,
    accumulate: Annotated[
        Literal["sum", "mean"] | None, _option("Apply the sum or the mean of delayed gradients (sum).")
    ] = None,
    accumulator: Annotated[
        Literal["device", "host"] | None, _option("Keep delayed gradients on the device or the host (device).")
    ] = None,
    leftover: Annotated[Literal["apply", "drop"] | None, _option(LEFTOVER_HELP)] = None,
    weights: Annotated[str | None, _option("How often `uniform` draws each precision, such as 0,0,0,1,1.25,2.6.")] = None,
    full: Annotated[float | None, _option(FULL_HELP)] = None,
    distill: Annotated[float | None, _option("Share of self-distillation in the loss at a precision, 0 to 1.")] = None,
    distill_at: Annotated[str | None, _option("The precisions to distil at (E5M5,E5M4,E5M3).")] = None,
    l2_sp: Annotated[float | None, _option(L2_SP_HELP, "--l2-sp")] = None,
    average: Annotated[float | None, _option(AVERAGE_HELP)] = None,
    reconstruction: Annotated[Literal["midpoint", "truncate"] | None, _option("midpoint, or truncate as in the paper.")] = None,
    group_size: Annotated[int | None, _option("Weights that share a scale (64).")] = None,
    optimizer: Annotated[Literal["adamw", "adamw8bit", "sgd"] | None, _option(OPTIMIZER_HELP)] = None,
    lr: Annotated[float | None, _option("Peak learning rate (5e-5; --recipe paper: 1e-5).")] = None,
    schedule: Annotated[Literal["cosine", "linear", "constant"] | None, _option("cosine, linear or constant.")] = None,
    clip: Annotated[float | None, _option("Largest gradient norm; 0 for none.")] = None,
    epochs: Annotated[float | None, _option("Passes over the data (1).")] = None,
    steps: Annotated[int | None, _option("Optimizer steps, instead of --epochs.")] = None,
    batch_size: Annotated[int | None, _option("Sequences in a batch, of each process (8).")] = None,
    grad_accum: Annotated[int | None, _option("Batches to one optimizer step (1).")] = None,
    sequence_length: Annotated[int | None, _option("Tokens in a sequence (512, or the model's positions if fewer).")] = None,
    no_bos: Annotated[bool | None, _option(NO_BOS_HELP, "--no-bos")] = None,
    chat_template: Annotated[str | None, _option(TEMPLATE_HELP)] = None,
    lora: Annotated[int | None, _option("Tune adapters of this rank instead of all weights.")] = None,
    bf16: Annotated[bool | None, _option("Compute in bfloat16.", "--bf16/--no-bf16")] = None,
    gradient_checkpointing: Annotated[bool | None, _option("Trade time for memory.", "--gradient-checkpointing")] = None,
    compile: Annotated[bool | None, _option("Compile the steps: faster on a GPU, after a minute.", "--compile")] = None,
    fsdp: Annotated[bool | None, _option(FSDP_HELP, "--fsdp")] = None,
    seed: Annotated[int | None, _option("Of data order and draws (0).")] = None,
    hold_out: Annotated[float | None, _option(HOLD_OUT_HELP)] = None,
    eval_data: Annotated[str | None, _option("Data to measure perplexity on, instead of held-out data.")] = None,
    eval_tokens: Annotated[int | None, typer.Option(help=EVAL_TOKENS_HELP, show_default=False, min=2)] = None,
    save_every: Annotated[int | None, typer.Option(help=SAVE_HELP, show_default=False, min=1)] = None,
    skip_bad_rows: Annotated[bool | None, _option("Leave out rows that cannot be used.", "--skip-bad-rows")] = None,
    resume: Annotated[bool, typer.Option("--resume", help=RESUME_HELP)] = False,
    revision: console.RevisionOption = None,
    token: console.TokenOption = None,
    cache_dir: console.CacheDirOption = None,
    json: console.JsonOption = False,
) -> None:
    """Fine-tune once so that one set of weights is good at every precision.

    Prints perplexity on held-out data at every precision, before and after. Several GPUs:
    torchrun --nproc_per_node 8 -m otaro tune ..., or accelerate launch; with --fsdp for models too large for one.

    Rows of --data have `messages`, or `conversations` as ShareGPT, or `prompt` and `completion`,
    or `instruction`, perhaps `input`, and `output`, or `question` and `answer`, or `text`.

    Only answers are learnt, and all of a text. docs/data.md shows a row of each.
    """
    from otaro.cli.tune_folder import RunFolder
    from otaro.file.hub import Hub
    from otaro.sefp.precision import Precision
    from otaro.tune import config

    if epochs is not None and steps is not None:
        raise config.ConfigError("--epochs and --steps contradict each other; give one")
    given: dict[str, Any] = {
        "exploration": exploration, "delay": delay, "distill": distill, "group_size": group_size,
        "accumulate": accumulate, "accumulator": accumulator, "leftover": leftover,
        "full": full, "l2_sp": l2_sp, "average": average, "reconstruction": reconstruction,
        "weights": tuple(_numbers(weights)) if weights is not None else None,
        "ultra_low": tuple(Precision(name) for name in ultra_low.split(",")) if ultra_low is not None else None,
        "distill_at": tuple(Precision(name) for name in distill_at.split(",")) if distill_at is not None else None,
    }  # fmt: skip
    settings: dict[str, Any] = {
        "optimizer": optimizer, "lr": lr, "schedule": schedule, "clip": clip,
        "epochs": epochs, "steps": steps, "batch_size": batch_size, "grad_accum": grad_accum, "lora": lora, "bf16": bf16,
        "sequence_length": sequence_length, "gradient_checkpointing": gradient_checkpointing, "compile": compile,
        "fsdp": fsdp, "seed": seed, "no_bos": no_bos, "chat_template": chat_template,
    }  # fmt: skip
    around = _given({
        "hold_out": hold_out, "eval_data": eval_data, "eval_tokens": eval_tokens, "save_every": save_every,
        "skip_bad_rows": skip_bad_rows,
    })  # fmt: skip
    if resume:
        before = RunFolder(out).stated()
        options, training = config.Options.from_dict(before["options"]), config.Training.from_dict(before["training"])
        if method is not None:
            options = replace(options, method=method)
        recipe, model, data = recipe or before.get("recipe", "best"), model or before["model"], data or before["data"]
        revision = revision or before.get("revision")
        around = {name: before["training"][name] for name in AROUND if name in before["training"]} | around
    else:
        options, training = config.recipe(recipe or "best", method)
    if model is None or data is None:
        raise config.ConfigError(f"{'MODEL' if model is None else '--data'} is missing; only --resume needs no more than --out")
    if precisions is not None:
        options = config.with_precisions(options, precisions.split(","))
    options, training = replace(options, **_given(given)), replace(training, **_given(settings))
    around |= {"recipe": recipe or "best", "resume": resume, "hub": Hub(revision, token, cache_dir)}
    result = TuningRun(model, data, out, options, training, **around).go()
    if not processes.is_first():
        return
    if json:
        console.print_json(result)
    else:
        _show(result)


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _numbers(text: str) -> list[float]:
    from otaro.tune.config import ConfigError

    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--weights {text}: give numbers separated by commas") from None


def _show(result: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(title="Perplexity on data not trained on", title_justify="left")
    table.add_column("precision")
    for heading in ("before", "after", "change"):
        table.add_column(heading, justify="right")
    for name, before in result["before"].items():
        after = result["after"][name]
        table.add_row("full" if name == "fp" else name, f"{before:.2f}", f"{after:.2f}", f"{after / before - 1:+.1%}")
    if result["before"]:
        console.out.print(table)
        few = ", too few to tell precisions apart" if result["tokens"] < FEW_TOKENS else ""
        console.out.print(f"measured on {result['tokens']:,} tokens{few}", highlight=False)
    else:
        console.out.print("nothing was held out, so nothing was measured; --eval-data FILE would", highlight=False)
    out = result["out"]
    if judged := result.get("average"):
        mean, last = f"{judged['average']:.4f}", f"{judged['last']:.4f}"
        kept = f"their mean is kept, as its held-out loss is {mean} and that of the last weights {last}"
        if judged["kept"] == "last":
            kept = f"the last weights are kept, as their held-out loss is {last} and that of the mean {mean}"
        console.out.print(f"weights of the last {judged['averaged']} steps were averaged: {kept}", highlight=False)
    console.out.print(f"{result['steps']} steps in {result['seconds']:.0f} s", highlight=False)
    console.out.print(f"tuned checkpoint: {out}/model\nnested model:     {out}/nested", highlight=False)
