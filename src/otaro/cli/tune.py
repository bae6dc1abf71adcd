"""`otaro tune MODEL --data FILE --out DIR`: from options to a tuned checkpoint, its nested file and a run folder."""

from __future__ import annotations

import json as json_module
import platform
import time
from collections.abc import Collection
from dataclasses import asdict, replace
from math import exp
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from otaro.cli import console

if TYPE_CHECKING:
    from otaro.file.hub import Hub
    from otaro.sefp.precision import Precision
    from otaro.tune.config import Options, Training
    from otaro.tune.data import TokenDataset

EVALUATED_TOKENS = 16_384
BATCH_TOKENS = 4_096  # in a batch of an evaluation
METHOD_HELP = (
    "otaro (the paper's Algorithm 1), bps, uniform, fixed:E5M4 (or another precision), fp. Any but `uniform`, which is that of "
    "--recipe best, comes plain: what this recipe adds is off, and the rate 5e-5, unless a flag asks for it."
)
RECIPE_HELP = (
    "Where options not given come from. best: --method uniform --weights 1,1,1,1,1.25,2.6 --distill 0.5 --pull 23 "
    "--average 0.7 --rates size --lr 1e-4; paper: --method otaro --reconstruction truncate --optimizer sgd --lr 1e-5 "
    "--schedule constant --clip 0."
)
PULL_HELP = "Take weights back toward their start, by lr * PULL of the way a step; 0 for none. Keeps a copy of all weights."
DATA_HELP = ".txt, .json, .jsonl (each also as .gz), .parquet, owner/name (/config, :split) on the Hub, or `builtin`."
NO_BOS_HELP = "Do not begin every block of text with the beginning-of-text token, where the tokenizer writes one."
TEMPLATE_HELP = "How to word chats, for a model without a chat template: alpaca, chatml, vicuna, or a Jinja file."
AVERAGE_HELP = "End with the mean weights of this share of the steps, the last ones; 0 for none. Keeps a copy of all weights."


def _option(help_text: str, *names: str) -> Any:
    return typer.Option(*names, help=help_text, show_default=False)


def tune(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A Hugging Face model: a directory, a Hub id, or `builtin`.")],
    data: Annotated[str, typer.Option(help=DATA_HELP)],
    out: Annotated[Path, typer.Option(help="The run folder: model/, nested/, config.json, log.jsonl, checkpoints/.")],
    recipe: Annotated[Literal["best", "paper"], typer.Option(help=RECIPE_HELP)] = "best",
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
    weights: Annotated[str | None, _option("How often `uniform` draws each precision, such as 1,1,1,1,1.25,2.6.")] = None,
    distill: Annotated[float | None, _option("Share of self-distillation in the loss, 0 to 1.")] = None,
    distill_at: Annotated[str | None, _option("The precisions to distil at (E5M5,E5M4,E5M3).")] = None,
    pull: Annotated[float | None, _option(PULL_HELP)] = None,
    average: Annotated[float | None, _option(AVERAGE_HELP)] = None,
    rates: Annotated[Literal["same", "size"] | None, _option("One rate for all matrices, or by each one's size.")] = None,
    reconstruction: Annotated[Literal["midpoint", "truncate"] | None, _option("midpoint, or truncate as in the paper.")] = None,
    group_size: Annotated[int | None, _option("Weights that share an exponent (64).")] = None,
    optimizer: Annotated[Literal["adamw", "sgd"] | None, _option("adamw or sgd.")] = None,
    lr: Annotated[float | None, _option("Peak learning rate.")] = None,
    schedule: Annotated[Literal["cosine", "linear", "constant"] | None, _option("cosine, linear or constant.")] = None,
    clip: Annotated[float | None, _option("Largest gradient norm; 0 for none.")] = None,
    epochs: Annotated[float | None, _option("Passes over the data (1).")] = None,
    steps: Annotated[int | None, _option("Optimizer steps, instead of --epochs.")] = None,
    batch_size: Annotated[int | None, _option("Sequences in a batch (8).")] = None,
    grad_accum: Annotated[int | None, _option("Batches to one optimizer step (1).")] = None,
    sequence_length: Annotated[int | None, _option("Tokens in a sequence (512).")] = None,
    no_bos: Annotated[bool | None, _option(NO_BOS_HELP, "--no-bos")] = None,
    chat_template: Annotated[str | None, _option(TEMPLATE_HELP)] = None,
    lora: Annotated[int | None, _option("Tune adapters of this rank instead of all weights.")] = None,
    bf16: Annotated[bool | None, _option("Compute in bfloat16.", "--bf16/--no-bf16")] = None,
    gradient_checkpointing: Annotated[bool | None, _option("Trade time for memory.", "--gradient-checkpointing")] = None,
    compile: Annotated[bool | None, _option("Compile the steps: faster on a GPU, after a minute.", "--compile")] = None,
    seed: Annotated[int | None, _option("Of data order and draws (0).")] = None,
    eval_tokens: Annotated[int, typer.Option(help="Held-out tokens to measure perplexity on.", min=2)] = EVALUATED_TOKENS,
    save_every: Annotated[int, typer.Option(help="Optimizer steps between checkpoints.", min=1)] = 100,
    skip_bad_rows: Annotated[bool, typer.Option("--skip-bad-rows", help="Leave out rows that cannot be used.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last complete checkpoint in --out.")] = False,
    revision: console.RevisionOption = None,
    token: console.TokenOption = None,
    cache_dir: console.CacheDirOption = None,
    json: console.JsonOption = False,
) -> None:
    """Fine-tune once so that one set of weights is good at every precision.

    Holds out 5% of the data and prints perplexity on it at every precision, before and after.

    Rows of --data have `messages`, or `conversations` as ShareGPT, or `prompt` and `completion`,
    or `instruction`, perhaps `input`, and `output`, or `question` and `answer`, or `text`.

    Only answers are learnt, and all of a text. docs/data.md shows a row of each.
    """
    from otaro.file.hub import Hub
    from otaro.sefp.precision import Precision
    from otaro.tune import config

    options, training = config.recipe(recipe, method)
    if epochs is not None and steps is not None:
        raise config.ConfigError("--epochs and --steps contradict each other; give one")
    if precisions is not None:
        options = config.with_precisions(options, precisions.split(","))
    given: dict[str, Any] = {
        "exploration": exploration, "delay": delay, "distill": distill, "group_size": group_size,
        "accumulate": accumulate, "accumulator": accumulator,
        "pull": pull, "average": average, "rates": rates, "reconstruction": reconstruction,
        "weights": tuple(_numbers(weights)) if weights is not None else None,
        "ultra_low": tuple(Precision(name) for name in ultra_low.split(",")) if ultra_low is not None else None,
        "distill_at": tuple(Precision(name) for name in distill_at.split(",")) if distill_at is not None else None,
    }  # fmt: skip
    options = replace(options, **{name: value for name, value in given.items() if value is not None})
    settings: dict[str, Any] = {
        "optimizer": optimizer, "lr": lr, "schedule": schedule, "clip": clip,
        "epochs": epochs, "steps": steps, "batch_size": batch_size, "grad_accum": grad_accum, "lora": lora, "bf16": bf16,
        "sequence_length": sequence_length, "gradient_checkpointing": gradient_checkpointing, "compile": compile,
        "seed": seed, "no_bos": no_bos, "chat_template": chat_template,
    }  # fmt: skip
    training = replace(training, **{name: value for name, value in settings.items() if value is not None})
    hub = Hub(revision, token, cache_dir)
    result = TuningRun(model, data, out, options, training, eval_tokens, save_every, skip_bad_rows, resume, hub=hub).go()
    if json:
        console.print_json(result)
    else:
        _show(result)


class TuningRun:
    """One tuning run, from its options to its folder; `otaro demo` makes two."""

    def __init__(
        self,
        model: str,
        data: str,
        out: Path,
        options: Options,
        training: Training,
        eval_tokens: int = EVALUATED_TOKENS,
        save_every: int = 100,
        skip_bad_rows: bool = False,
        resume: bool = False,
        allowed: Collection[str] = (),
        hub: Hub | None = None,
    ) -> None:
        """`allowed` are names that --out may hold before the run; `hub` is how to reach a model on the Hub."""
        from otaro.file.checkpoint import HUB
        from otaro.tune.config import ConfigError

        options.check_rate(training.lr)
        self.hub = hub or HUB
        self.source, self.data, self.out, self.options, self.training = model, data, out, options, training
        self.eval_tokens, self.save_every, self.skip_bad_rows, self.resume = eval_tokens, save_every, skip_bad_rows, resume
        stated: dict[str, Any] = {"model": model, "revision": self.hub.revision, "data": data}
        stated |= {"options": options.to_dict(), "training": asdict(training)}
        stated["training"] |= {"eval_tokens": eval_tokens, "skip_bad_rows": skip_bad_rows}
        stated = json_module.loads(json_module.dumps(stated))
        config_path = out / "config.json"
        if resume:
            if not config_path.is_file():
                raise ConfigError(f"--resume: {out} holds no run; leave the flag out to start one")
            before = json_module.loads(config_path.read_text())
            if changed := [key for key in stated if stated[key] != before.get(key)]:
                raise ConfigError(f"--resume: {' and '.join(changed)} differ from those the run in {out} was started with")
        elif out.exists() and any(path.name not in allowed for path in out.iterdir()):
            raise ConfigError(f"--out {out} exists and is not empty; choose another folder, or go on with --resume")
        self.stated = stated

    def go(self) -> dict[str, Any]:
        """Load, measure, train, measure, save, pack."""
        import torch
        import transformers

        import otaro
        from otaro.file.pack import pack
        from otaro.tune.fake_quant import restore
        from otaro.tune.trainer import forget_steps_after, last_complete_checkpoint

        console.quiet_transformers()
        with console.err.status("loading model and data ..."):
            model, tokenizer, dtype = self._load_model()
            training, held_out = self._load_data(model, tokenizer)
        self.out.mkdir(parents=True, exist_ok=True)
        versions = {"otaro": otaro.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
        stated = {**self.stated, "bos": training.bos, "versions": {**versions, "python": platform.python_version()}}
        (self.out / "config.json").write_text(json_module.dumps(stated, indent=2) + "\n")
        checkpoint = last_complete_checkpoint(self.out / "checkpoints") if self.resume else None
        forget_steps_after(self.out / "log.jsonl", int(checkpoint.name.rpartition("-")[2]) if checkpoint else 0)
        trainer = self._trainer(model, tokenizer, training)
        before = self._perplexities(trainer, held_out, "before") if checkpoint is None else self._stored("before")
        measured: dict[str, Any] = {
            "tokens": sum(len(example["input_ids"]) for example in self._measured(held_out)),
            "before": before,
        }
        (self.out / "perplexity.json").write_text(json_module.dumps(measured) + "\n")
        started = time.perf_counter()
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        seconds = time.perf_counter() - started
        after = self._perplexities(trainer, held_out, "after")
        restore(trainer.model)
        tuned = trainer.model.merge_and_unload() if self.training.lora else trainer.model
        with console.err.status("saving and packing ..."):
            _save(tuned, tokenizer, dtype, self.options, self.out / "model")
            kind = self.options.reconstruction
            pack(
                self.out / "model", self.out / "nested", group_size=self.options.group_size, reconstruction=kind, overwrite=True
            )
        result = {
            "out": str(self.out),
            "seconds": seconds,
            "steps": trainer.state.global_step,
            "before": before,
            "after": after,
        }
        (self.out / "perplexity.json").write_text(json_module.dumps({**measured, "after": after}) + "\n")
        return result

    def _load_model(self) -> tuple[Any, Any, Any]:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from otaro.errors import OtaroError, install
        from otaro.file.checkpoint import Checkpoint, resolve_model

        path = resolve_model(self.source, hub=self.hub)
        dtype = Checkpoint(path).dtype  # refuses what cannot be packed afterwards, before hours of tuning
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        if self.training.lora:
            try:
                from peft import LoraConfig, get_peft_model
            except ImportError:
                raise OtaroError(f"--lora needs the package peft; install it with: {install('lora')}") from None
            rank = self.training.lora
            torch.manual_seed(self.training.seed)  # of the adapters
            model = get_peft_model(
                model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", lora_dropout=0.0)
            )
        return model, AutoTokenizer.from_pretrained(path), dtype

    def _load_data(self, model: Any, tokenizer: Any) -> tuple[TokenDataset, TokenDataset]:
        from otaro.tune.chat_templates import use_template
        from otaro.tune.data import load_data, split

        if self.training.chat_template is not None:
            console.remark(*use_template(self.training.chat_template, tokenizer, model.generation_config))
        positions = getattr(model.config, "max_position_embeddings", None)
        dataset = load_data(
            self.data,
            tokenizer,
            self.training.sequence_length,
            max_positions=positions,
            skip_bad_rows=self.skip_bad_rows,
            bos=not self.training.no_bos,
        )
        console.remark(*dataset.remarks)
        return split(dataset, 0.05, self.training.seed)

    def _trainer(self, model: Any, tokenizer: Any, dataset: TokenDataset) -> Any:
        import torch
        from transformers import PrinterCallback, TrainingArguments

        from otaro.tune.data import collate, padding_id
        from otaro.tune.trainer import OtaroTrainer

        t = self.training
        arguments = TrainingArguments(
            output_dir=str(self.out / "checkpoints"),
            per_device_train_batch_size=t.batch_size,
            gradient_accumulation_steps=t.grad_accum,
            num_train_epochs=t.epochs,
            max_steps=t.steps or -1,
            learning_rate=t.lr,
            lr_scheduler_type=t.schedule,
            optim="sgd" if t.optimizer == "sgd" else "adamw_torch_fused",
            max_grad_norm=t.clip,
            bf16=t.bf16,
            gradient_checkpointing=t.gradient_checkpointing,
            seed=t.seed,
            save_steps=self.save_every,
            save_total_limit=2,
            logging_strategy="no",
            logging_nan_inf_filter=False,  # our trainer stops at the first such loss
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
            dataloader_pin_memory=torch.cuda.is_available(),
        )
        trainer = OtaroTrainer(
            model=model,
            args=arguments,
            train_dataset=dataset,
            data_collator=collate(padding_id(tokenizer)),
            otaro=self.options,
            otaro_log=self.out / "log.jsonl",
        )
        if t.compile:
            trainer.compile_steps()
        trainer.remove_callback(PrinterCallback)  # we have a bar
        trainer.add_callback(_progress_callback(trainer))
        return trainer

    def _perplexities(self, trainer: Any, held_out: TokenDataset, when: str) -> dict[str, float]:
        from otaro.sefp.precision import PRECISIONS
        from otaro.tune.trainer import losses_by_precision

        examples = self._measured(held_out)
        size = max(1, BATCH_TOKENS // self.training.sequence_length)
        batches = [trainer.data_collator(examples[i : i + size]) for i in range(0, len(examples), size)]
        measured: list[Precision | None] = [None, *PRECISIONS]
        perplexities = {}
        with console.progress_bar(f"perplexity {when} (precisions)") as progress:
            for number, precision in enumerate(measured):
                progress(str(precision or "full precision"), number, len(measured))
                loss = losses_by_precision(trainer.model, trainer.precisely, [precision], batches)[0]
                perplexities[str(precision) if precision else "fp"] = exp(loss)
        return perplexities

    def _measured(self, held_out: TokenDataset) -> list[dict[str, list[int]]]:
        """The first examples, as many as --eval-tokens allows, one at least."""
        examples: list[dict[str, list[int]]] = []
        tokens = 0
        for example in (held_out[i] for i in range(len(held_out))):
            tokens += len(example["input_ids"])
            if examples and tokens > self.eval_tokens:
                break
            examples.append(example)
        return examples

    def _stored(self, when: str) -> dict[str, float]:
        stored: dict[str, float] = json_module.loads((self.out / "perplexity.json").read_text())[when]
        return stored


def _progress_callback(trainer: Any) -> Any:
    """A bar with the loss and the precision of the step just done."""
    from transformers import TrainerCallback

    class Bar(TrainerCallback):  # type: ignore[misc] # transformers is not typed
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.context = console.progress_bar("tuning (steps)")
            self.progress = self.context.__enter__()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            last = trainer.last_record
            held = "" if last["applied"] else f", held back {last['accumulated']}"
            self.progress(f"loss {last['loss']:.3f} at {last['precision']}{held}", state.global_step, state.max_steps)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.context.__exit__(None, None, None)

    return Bar()


def _save(model: Any, tokenizer: Any, dtype: Any, options: Options, target: Path) -> None:
    """The tuned checkpoint: weights in float32, as tuned; config.json names the type that the model came in."""
    from otaro.file.atomic import new_directory
    from otaro.file.coding import Coding, write_coding

    with new_directory(target, overwrite=True) as directory:
        write_coding(directory, Coding(options.group_size, options.reconstruction))
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        config = json_module.loads((directory / "config.json").read_text())
        config["dtype"] = str(dtype).removeprefix("torch.")
        (directory / "config.json").write_text(json_module.dumps(config, indent=2, sort_keys=True) + "\n")


def _numbers(text: str) -> list[float]:
    from otaro.tune.config import ConfigError

    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--weights {text}: give numbers separated by commas") from None


def _show(result: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(title="Perplexity on held-out data", title_justify="left")
    table.add_column("precision")
    for heading in ("before", "after", "change"):
        table.add_column(heading, justify="right")
    for name, before in result["before"].items():
        after = result["after"][name]
        table.add_row("full" if name == "fp" else name, f"{before:.2f}", f"{after:.2f}", f"{after / before - 1:+.1%}")
    console.out.print(table)
    out = result["out"]
    console.out.print(f"{result['steps']} steps in {result['seconds']:.0f} s", highlight=False)
    console.out.print(f"tuned checkpoint: {out}/model\nnested model:     {out}/nested", highlight=False)
