"""`otaro tune MODEL --data FILE --out DIR`: from options to a tuned checkpoint, its nested file and a run folder."""

from __future__ import annotations

import json as json_module
import os
import platform
import re
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from math import exp
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from otaro.cli import console
from otaro.errors import OtaroError, brief
from otaro.tune import processes

if TYPE_CHECKING:
    from otaro.file.hub import Hub
    from otaro.sefp.precision import Precision
    from otaro.tune.config import Options, Training
    from otaro.tune.data import TokenDataset

EVALUATED_TOKENS, SAVE_EVERY, HELD_OUT = 16_384, 100, 0.05
AROUND = ("hold_out", "eval_data", "eval_tokens", "skip_bad_rows", "save_every")  # what config.json states beside `Training`
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
DATA_HELP = ".txt, .json, .jsonl (each also as .gz), .parquet, owner/name or owner/name/config:split on the Hub, or `builtin`."
NO_BOS_HELP = "Do not begin every block of text with the beginning-of-text token, where the tokenizer writes one."
TEMPLATE_HELP = "How to word chats, for a model without a chat template: alpaca, chatml, vicuna, or a Jinja file."
AVERAGE_HELP = "End with the mean weights of this share of the steps, the last ones; 0 for none. Keeps a copy of all weights."
OPTIMIZER_HELP = "adamw, sgd, or adamw8bit: AdamW with 2 bytes of state a weight instead of 8, by bitsandbytes."
OUT_HELP = (
    "The run folder: model/, nested/, config.json, log.jsonl, checkpoints/. What a run left in it that failed before its first "
    "checkpoint is replaced."
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
LESS_MEMORY = (
    "try a smaller --batch-size with more --grad-accum, --gradient-checkpointing, --optimizer adamw8bit, --lora 16, "
    "or several GPUs: torchrun --nproc_per_node N -m otaro tune ... --fsdp"
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
    weights: Annotated[str | None, _option("How often `uniform` draws each precision, such as 1,1,1,1,1.25,2.6.")] = None,
    distill: Annotated[float | None, _option("Share of self-distillation in the loss, 0 to 1.")] = None,
    distill_at: Annotated[str | None, _option("The precisions to distil at (E5M5,E5M4,E5M3).")] = None,
    pull: Annotated[float | None, _option(PULL_HELP)] = None,
    average: Annotated[float | None, _option(AVERAGE_HELP)] = None,
    rates: Annotated[Literal["same", "size"] | None, _option("One rate for all matrices, or by each one's size.")] = None,
    reconstruction: Annotated[Literal["midpoint", "truncate"] | None, _option("midpoint, or truncate as in the paper.")] = None,
    group_size: Annotated[int | None, _option("Weights that share an exponent (64).")] = None,
    optimizer: Annotated[Literal["adamw", "adamw8bit", "sgd"] | None, _option(OPTIMIZER_HELP)] = None,
    lr: Annotated[float | None, _option("Peak learning rate.")] = None,
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
        "pull": pull, "average": average, "rates": rates, "reconstruction": reconstruction,
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
        save_every: int = SAVE_EVERY,
        skip_bad_rows: bool = False,
        hold_out: float = HELD_OUT,
        eval_data: str | None = None,
        recipe: str = "best",
        resume: bool = False,
        allowed: Collection[str] = (),
        hub: Hub | None = None,
    ) -> None:
        """`allowed` are names that --out may hold before the run; `hub` is how to reach a model on the Hub."""
        from otaro.cli.tune_folder import RunFolder, refuse_changes
        from otaro.file.checkpoint import HUB
        from otaro.tune.config import ConfigError

        options.check_rate(training.lr)
        if not 0 <= hold_out < 1:
            raise ConfigError(f"--hold-out {hold_out}: must be 0 or more, and less than 1")
        if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
            training = replace(training, fsdp=True)
        if training.fsdp and processes.size() == 1:
            raise ConfigError("--fsdp shares weights out over several processes; start them with torchrun --nproc_per_node N")
        self.source, self.data, self.out, self.options, self.training = model, data, out, options, training
        self.eval_tokens, self.save_every, self.skip_bad_rows, self.resume = eval_tokens, save_every, skip_bad_rows, resume
        self.hold_out, self.eval_data, self.hub = hold_out, eval_data, hub or HUB
        self.folder = RunFolder(out, allowed)
        stated: dict[str, Any] = {"model": model, "revision": self.hub.revision, "data": data, "recipe": recipe}
        stated |= {"options": options.to_dict(), "training": asdict(training), "processes": processes.size()}
        stated["training"] |= {name: getattr(self, name) for name in AROUND}
        self.stated: dict[str, Any] = json_module.loads(json_module.dumps(stated))
        self.before: dict[str, Any] | None = self.folder.stated() if resume else None
        if self.before is not None:
            refuse_changes(out, self.before, self.stated)

    def go(self) -> dict[str, Any]:
        """Load, measure, train, measure, save, pack; with several processes, the first writes and the others wait."""
        from otaro.file.atomic import alone

        processes.join()
        console.quiet_transformers()
        with _interruptible(self), _explained(self), ExitStack() as held:
            if processes.is_first():
                self.out.parent.mkdir(parents=True, exist_ok=True)
                held.enter_context(alone(self.out))
                if not self.resume:
                    self.folder.check_free()
            result = self._go()
        processes.leave()
        return result

    def _go(self) -> dict[str, Any]:
        from otaro.file.pack import pack
        from otaro.tune.trainer import forget_steps_after, last_good_checkpoint

        with console.err.status("loading model and data ..."):
            model, tokenizer, training, held_out = self._load()
            arguments = self._arguments()  # refuses before a folder is made, and so does
            self._tell_memory(model)
        with self._begun():
            found = processes.from_first(lambda: last_good_checkpoint(self.folder.checkpoints) if self.resume else None)
            if processes.is_first():
                forget_steps_after(self.folder.log, int(found.name.rpartition("-")[2]) if found else 0)
            trainer = self._trainer(model, tokenizer, training, arguments)
            measured = self._measured_before(found)
            seconds = self._train(trainer, found, lambda: self._measure(trainer, held_out, measured, "before"))
        self._measure(trainer, held_out, measured, "after")
        with console.err.status("saving and packing ..."):
            tuned = self._tuned(trainer)
            if processes.is_first():
                _save(tuned, tokenizer, self.options, self.out / "model")
                kind, size = self.options.reconstruction, self.options.group_size
                pack(self.out / "model", self.out / "nested", group_size=size, reconstruction=kind, overwrite=True)
        processes.wait()
        perplexities = {"before": measured.get("before", {}), "after": measured.get("after", {})}
        return {"out": str(self.out), "seconds": seconds, "steps": trainer.state.global_step, **perplexities}

    @contextmanager
    def _begun(self) -> Iterator[None]:
        """The folder, with config.json in it; one that comes to nothing before its first step is removed again."""
        import torch
        import transformers

        import otaro

        versions = {"otaro": otaro.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
        if processes.is_first():
            if not self.resume:
                self.folder.clear()  # of what a failed run left
            self.folder.write({**self.stated, "versions": {**versions, "python": platform.python_version()}})
        processes.wait()
        if not self.out.is_dir():
            raise OtaroError(f"--out {self.out} is not seen by all processes; it must lie where all of their machines write")
        try:
            yield
        except BaseException:
            if processes.is_first() and not self.resume and not self.folder.log.exists():
                self.folder.clear()
            raise

    def _load(self) -> tuple[Any, Any, TokenDataset, TokenDataset | None]:
        """Model, tokenizer, the data to train on and to measure on; the same as before, if resumed."""
        from otaro.cli.tune_folder import digest_of_examples, digest_of_model, refuse_other_content
        from otaro.file.checkpoint import resolve_model

        # The first downloads it, where that is to be done.
        path = processes.from_first(lambda: str(resolve_model(self.source, hub=self.hub)))
        with ThreadPoolExecutor(1) as beside:  # the digest, while the weights are loaded
            digest = beside.submit(digest_of_model, Path(path)) if processes.is_first() else None
            model, tokenizer = self._load_model()
            training, held_out = processes.from_first(lambda: self._load_data(model, tokenizer))
            if digest is not None:
                sums = {"data": digest_of_examples(training), "held_out": digest_of_examples(held_out)}
                self.stated["bos"] = training.bos
                self.stated["sha256"] = {"model": digest.result(), **sums}
                if self.before is not None:
                    refuse_other_content(self.out, self.before, self.stated)
        processes.wait()
        return model, tokenizer, training, held_out

    def _load_model(self) -> tuple[Any, Any]:
        from transformers import AutoTokenizer

        from otaro.cli.tune_model import load_model
        from otaro.file.checkpoint import resolve_model

        path = resolve_model(self.source, hub=self.hub)
        return load_model(path, self.training), AutoTokenizer.from_pretrained(path)

    def _load_data(self, model: Any, tokenizer: Any) -> tuple[TokenDataset, TokenDataset | None]:
        from otaro.tune.chat_templates import use_template
        from otaro.tune.data import load_data, split

        if self.training.chat_template is not None:
            console.remark(*use_template(self.training.chat_template, tokenizer, model.generation_config))
        length, bos = self._sequence_length(model), not self.training.no_bos
        if length < (asked := self.training.sequence_length):
            console.remark(f"--sequence-length {asked} is shortened to the {length} positions of this model")
        read = partial(load_data, tokenizer=tokenizer, sequence_length=length, skip_bad_rows=self.skip_bad_rows, bos=bos)
        dataset = read(self.data)
        console.remark(*dataset.remarks)
        if self.eval_data is not None:
            return dataset, read(self.eval_data)
        if self.hold_out == 0:
            return dataset, None
        return split(dataset, self.hold_out, self.training.seed)

    def _tell_memory(self, model: Any) -> None:
        """Before the weights go to their device: what the run will take there, or that it cannot work."""
        import torch

        from otaro.tune.memory import Batch, Run

        t = self.training
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        batch = Batch(t.batch_size, self._sequence_length(model), t.bf16, t.gradient_checkpointing)
        shards = processes.size() if t.fsdp else 1
        plan = Run(model, self.options, t.optimizer, batch, shards).plan(device)
        plan.check()
        console.remark(str(plan))

    def _sequence_length(self, model: Any) -> int:
        """As long as was asked for, or as the model can take."""
        positions = getattr(model.config, "max_position_embeddings", None)
        return min(self.training.sequence_length, self.training.sequence_length if positions is None else int(positions))

    def _arguments(self) -> Any:
        import torch
        from transformers import TrainingArguments

        from otaro.cli.tune_model import OPTIMIZERS

        t = self.training
        settings: dict[str, Any] = {}
        if t.fsdp and os.environ.get("ACCELERATE_USE_FSDP", "false").lower() != "true":  # else its launcher has told it all
            settings = {"fsdp": True, "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}}
        mixed = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        if mixed != "no" and not (mixed == "bf16" and t.bf16):
            raise OtaroError(f"accelerate was told to compute in {mixed}; leave that to --bf16, and tell accelerate `no`")
        if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
            raise OtaroError("DeepSpeed is not supported; to share weights out over processes use --fsdp")
        with _worded():
            return TrainingArguments(
                output_dir=str(self.folder.checkpoints),
                per_device_train_batch_size=t.batch_size,
                gradient_accumulation_steps=t.grad_accum,
                num_train_epochs=t.epochs,
                max_steps=t.steps or -1,
                learning_rate=t.lr,
                lr_scheduler_type=t.schedule,
                optim=OPTIMIZERS[t.optimizer],
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
                use_cpu=processes.on_cpu(),  # or accelerate would leave processes on a CPU to themselves
                **settings,
            )

    def _trainer(self, model: Any, tokenizer: Any, dataset: TokenDataset, arguments: Any) -> Any:
        from transformers import PrinterCallback

        from otaro.tune.data import collate, padding_id
        from otaro.tune.trainer import OtaroTrainer

        with _worded():
            trainer = OtaroTrainer(
                model=model,
                args=arguments,
                train_dataset=dataset,
                data_collator=collate(padding_id(tokenizer)),
                otaro=self.options,
                otaro_log=self.folder.log,
            )
        if trainer.accelerator.num_processes != processes.size():
            seen = trainer.accelerator.num_processes
            raise OtaroError(f"accelerate sees {seen} of {processes.size()} processes; start them with torchrun")
        if self.training.compile:
            trainer.compile_steps()
        trainer.remove_callback(PrinterCallback)  # we have a bar
        return trainer

    def _train(self, trainer: Any, checkpoint: Path | None, begin: Callable[[], None]) -> float:
        """Returns how many seconds it took after `begin`."""
        with ExitStack() as stack:  # closes the bar, however it ends
            trainer.add_callback(watcher := _watcher(trainer, stack, begin))
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        return time.perf_counter() - float(watcher.started)

    def _tuned(self, trainer: Any) -> Any:
        """The tuned model as it is to be saved, adapters merged; in the first process."""
        from otaro.tune.fake_quant import merge_lora, restore

        model = trainer.model
        if trainer.is_fsdp_enabled:
            weights = _gathered(model)  # by all of them
            if not processes.is_first():
                return None
            model, _ = self._load_model()  # one that is not sharded
            model.load_state_dict(weights)
            model.generation_config = trainer.model.generation_config
        restore(model)
        return merge_lora(model) if self.training.lora else model

    def _measured_before(self, checkpoint: Path | None) -> dict[str, Any]:
        """What a resumed run has measured already."""
        if checkpoint is None or not self.folder.perplexity.is_file():
            return {}
        stored: dict[str, Any] = json_module.loads(self.folder.perplexity.read_text())
        return {key: stored[key] for key in ("tokens", "before") if key in stored}

    def _measure(self, trainer: Any, held_out: TokenDataset | None, measured: dict[str, Any], when: str) -> None:
        """Perplexity at every precision, put into `measured` and perplexity.json; each process takes a part of the data."""
        import torch

        from otaro.file.atomic import write_text
        from otaro.sefp.precision import PRECISIONS
        from otaro.tune.trainer import losses_by_precision, reshard

        if held_out is None or when in measured:
            return
        examples = self._examples_to_measure(held_out)
        longest = max(len(example["input_ids"]) for example in examples)
        size = max(1, BATCH_TOKENS // longest)
        batches = [trainer.data_collator(examples[i : i + size]) for i in range(0, len(examples), size)]
        ours = batches[processes.rank() :: processes.size()]
        if len(ours) * processes.size() < len(batches):  # FSDP wants as many passes of all: one that counts nothing
            ours.append({**batches[0], "labels": batches[0]["labels"].new_full(batches[0]["labels"].shape, -100)})
        counted = sum(int((batch["labels"][..., 1:] != -100).sum()) for batch in ours)
        wanted: list[Precision | None] = [None, *PRECISIONS]
        dtype = torch.bfloat16 if self.training.bf16 else None
        perplexities = {}
        with console.progress_bar(f"perplexity {when} (precisions)") as progress:
            for number, precision in enumerate(wanted):
                progress(str(precision or "full precision"), number, len(wanted))
                loss = losses_by_precision(trainer.model, trainer.precisely, [precision], ours, dtype)[0]
                parts = processes.together((loss * counted, counted))
                mean = sum(total for total, _ in parts) / max(sum(tokens for _, tokens in parts), 1)
                perplexities[str(precision) if precision else "fp"] = exp(mean)
        reshard(trainer.model)
        measured |= {"tokens": sum(len(example["input_ids"]) for example in examples), when: perplexities}
        if processes.is_first():
            write_text(self.folder.perplexity, json_module.dumps(measured) + "\n")

    def _examples_to_measure(self, held_out: TokenDataset) -> list[dict[str, list[int]]]:
        """The first examples, as many as --eval-tokens allows, one at least."""
        examples: list[dict[str, list[int]]] = []
        tokens = 0
        for example in (held_out[i] for i in range(len(held_out))):
            tokens += len(example["input_ids"])
            if examples and tokens > self.eval_tokens:
                break
            examples.append(example)
        return examples

    def kept(self) -> str:
        """What a run that ended early leaves behind, and how to go on."""
        from otaro.tune.trainer import last_good_checkpoint

        count = processes.size()
        command = "otaro" if count == 1 else f"torchrun --nproc_per_node {count} -m otaro"
        if last := last_good_checkpoint(self.folder.checkpoints):
            return f"kept is {last}; go on with: {command} tune --resume --out {self.out}"
        return f"nothing is kept, as the first checkpoint comes after {self.save_every} steps (--save-every)"


class _Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a run as Ctrl-C does."""


@contextmanager
def _interruptible(run: TuningRun) -> Iterator[None]:
    """Have Ctrl-C and SIGTERM say what is kept; of several processes the first does."""
    if not processes.is_first():
        yield  # the launcher ends them
        return

    def terminate(*_: Any) -> None:
        raise _Terminated

    catching = threading.current_thread() is threading.main_thread()  # no other may
    usual = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)} if catching else {}
    try:
        if catching:
            signal.signal(signal.SIGTERM, terminate)
        yield
    except KeyboardInterrupt as end:
        for number in usual:
            signal.signal(number, signal.SIG_IGN)  # a second one must not cut the word short
        console.err.print(f"[bold]interrupted:[/] {console.escape(run.kept())}", soft_wrap=True, highlight=False)
        raise typer.Exit(128 + (signal.SIGTERM if isinstance(end, _Terminated) else signal.SIGINT)) from None
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)


@contextmanager
def _explained(run: TuningRun) -> Iterator[None]:
    """End in one sentence where memory ran out, or another process of the run was killed."""
    import torch

    try:
        yield
    except (MemoryError, RuntimeError) as error:
        said = str(error)
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or "DefaultCPUAllocator" in said:
            raise OtaroError(f"out of memory; {LESS_MEMORY}; {run.kept()}") from error
        if processes.size() > 1 and re.search("Connection (closed|reset) by peer|NCCL|gloo", said):
            why = f"the processes of this run lost each other ({brief(error)}); one was ended perhaps, for lack of memory"
            raise OtaroError(f"{why}; {run.kept()}") from error
        raise


@contextmanager
def _worded() -> Iterator[None]:
    """Other libraries' refusals of a setting, in one line."""
    try:
        yield
    except (ValueError, ImportError, NotImplementedError) as error:
        if isinstance(error, OtaroError):
            raise
        raise OtaroError(f"this run cannot be set up: {brief(error)}") from error


def _gathered(model: Any) -> dict[str, Any]:
    """All weights of a sharded model in whole, in the first process; by all processes together."""
    whole = {}
    for name, part in model.state_dict().items():
        tensor = part.full_tensor() if hasattr(part, "full_tensor") else part
        if processes.is_first():
            whole[name] = tensor.cpu()
    return whole


def _watcher(trainer: Any, stack: ExitStack, begin: Callable[[], None]) -> Any:
    """Calls `begin` when model and optimizer are in place, then draws a bar with the loss and precision of each step."""
    from transformers import TrainerCallback

    class Watcher(TrainerCallback):  # type: ignore[misc] # transformers is not typed
        started = 0.0

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            begin()
            self.started = time.perf_counter()
            self.progress = stack.enter_context(console.progress_bar("tuning (steps)"))

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            last = trainer.last_record
            held = "" if last["applied"] else f", held back {last['accumulated']}"
            self.progress(f"loss {last['loss']:.3f} at {last['precision']}{held}", state.global_step, state.max_steps)

    return Watcher()


def _save(model: Any, tokenizer: Any, options: Options, target: Path) -> None:
    """The tuned checkpoint: weights as tuned, and a config.json that names their type, or opening it would round them."""
    from otaro.file.atomic import new_directory
    from otaro.file.coding import Coding, write_coding

    with new_directory(target, overwrite=True) as directory:
        write_coding(directory, Coding(options.group_size, options.reconstruction))
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        config = json_module.loads((directory / "config.json").read_text())
        types = {tensor.dtype for tensor in model.parameters()}
        config["dtype"] = "float32" if len(types) > 1 else str(types.pop()).removeprefix("torch.")
        (directory / "config.json").write_text(json_module.dumps(config, indent=2, sort_keys=True) + "\n")


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
    out = result["out"]
    console.out.print(f"{result['steps']} steps in {result['seconds']:.0f} s", highlight=False)
    console.out.print(f"tuned checkpoint: {out}/model\nnested model:     {out}/nested", highlight=False)
