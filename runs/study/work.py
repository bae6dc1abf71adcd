"""What a worker does: takes rows that nobody else has taken, tunes, measures, writes a line.

Loading a model, moving it to the GPU and compiling its steps takes longer than tuning it, so a worker holds
on to each model it has met, with its first weights beside it, and sets them back before a row.
"""

from __future__ import annotations

import gc
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainingArguments
from transformers.utils import logging

from otaro.builtin import MODEL_DIR
from otaro.builtin.documentation import documentation_text
from otaro.calibrate.run import SAMPLES, pack_calibrated
from otaro.calibrate.text import LENGTH, windows_of_examples
from otaro.evaluate.machine import cpu_name
from otaro.export.run import export
from otaro.export.source import Source
from otaro.sefp.precision import Precision
from otaro.tune.data import TokenDataset, collate, load_data, padding_id, split
from otaro.tune.fake_quant import Precisely, TuneEmbedding, TuneLinear, prepare
from otaro.tune.trainer import JUDGED, OtaroTrainer, TrainingError, losses_by_precision
from runs.study import moe, zeroshot
from runs.study.observe import observe
from runs.study.plan import BENCHES, FULL, NAMES, Bench, Job, Observation, Row, cost
from runs.study.quantizers import OTHERS, precisely_for
from runs.study.results import MOST_LOSS, Result, append, chosen_rate, finished, is_done, read

Batch = dict[str, torch.Tensor]
HELD_OUT = 0.1  # of the tuning text, its end: rates and recipes are chosen there
MOST_FAILURES = 4
MEASURED_TOGETHER = {"cuda": 16_384, "cpu": 4_096}  # tokens
LONGEST_WAIT = 120  # seconds, for rows that others wait for; after that they have failed
WORKERS = 14  # that costs are told for


@dataclass(frozen=True)
class Places:
    """Where things are."""

    models: Path
    data: Path | None
    results: Path
    commit: str
    device: str

    @property
    def moe(self) -> Path:
        """The folder of the mixture of experts."""
        return self.models / "study-moe"

    def calibrated(self, bench: Bench) -> Path:
        """The folder of the bench's model as calibration made it."""
        return self.models / f"study-calibrated-{bench.model}"

    def checkpoint(self, bench: Bench) -> Path:
        """The folder of the bench's model; of a mixture of experts its tokenizer's."""
        return MODEL_DIR if bench.model in ("builtin", "moe") else self.models / bench.model

    def texts(self, bench: Bench, scratch: Path) -> tuple[Path, Path]:
        """What is tuned on and what is measured by."""
        if bench.data == "wikitext":
            return self.file("wikitext-2/valid.txt"), self.file("wikitext-2/test.txt")
        tuning, measuring = scratch / "tuning.txt", scratch / "measuring.txt"
        tuning.write_text(documentation_text("tuning"))
        measuring.write_text(documentation_text("heldout"))
        return tuning, measuring

    def file(self, name: str) -> Path:
        """A file of the data folder."""
        if self.data is None:
            raise SystemExit("error: all but the demo need --data DIR, with wikitext-2, alpaca, zeroshot")
        return self.data / name

    def questions(self, model: str) -> Path:
        """The exported zero-shot requests."""
        return self.models / f"zeroshot-{model}.json.gz"


@dataclass
class Held:
    """A model in memory, and what is needed to tune it again from its start."""

    model: Any
    tokenizer: Any
    starts: dict[str, list[torch.Tensor]]
    compiled_divergence: Any = None
    benches: dict[str, Material] = field(default_factory=dict)

    @torch.no_grad()
    def reset(self, start: str) -> None:
        """Back to the first weights."""
        torch._foreach_copy_(list(self.model.parameters()), self.starts[start])


@dataclass
class Material:
    """What a bench tunes on and measures by."""

    training: TokenDataset
    heldout: list[Batch]
    judged: list[Batch]
    """Of the held-out text, as much as the trainer itself would judge an average by."""
    test: list[Batch]


class Worker:
    """Tunes and measures."""

    def __init__(self, places: Places) -> None:
        self.places, self.held = places, {}  # type: Places, dict[str, Held]
        logging.disable_progress_bar()
        logging.set_verbosity_error()
        self.half = torch.float16 if places.device == "cuda" else None
        """What is measured in: of at most 14 bits that values of SEFP have it keeps 11; attention is fast."""

    def run(self, row: Row, lr: float) -> Result:
        """The row's line for the results."""
        bench = BENCHES[row.bench]
        held, material = self._prepared(bench, row.start)
        started = time.perf_counter()
        held.reset(row.start)
        line: Result = {"key": row.key, "bench": row.bench, "name": row.name, "seed": row.seed}
        line |= {"lr": lr if row.options else None, "settings": row.settings()}
        try:
            precisely, told = self._tuned(row, bench, held, material, lr)
        except TrainingError as error:
            return line | {"error": str(error).partition(";")[0]} | self.provenance(started)
        finally:
            # Trainer leaves its autocast around the model; measuring has another, the next trainer its own.
            for left in ("forward", "_original_forward", "_is_accelerate_prepared"):
                held.model.__dict__.pop(left, None)
            gc.collect()  # trainers hold themselves, and with them the optimizer's states
            if self.places.device == "cuda":
                torch.cuda.empty_cache()
        tuned_in = time.perf_counter() - started
        line |= {name: value for name, value in told.items() if value}
        texts = {"heldout": material.heldout, "perplexity": material.test}
        for text, batches in texts.items():
            line[text] = self._perplexities(held, precisely, row.measured, batches)

        def perplexity(batches: list[Batch]) -> float | None:
            return self._perplexities(held, precisely, [FULL], batches)[FULL]

        if "others" in row.measures:
            line["others"] = {name: perplexity(material.test) for name in self._rounded(held.model)}
        if "zeroshot" in row.measures:
            questions = zeroshot.load(self.places.questions(bench.model))
            line["zeroshot"] = self._accuracies(held.model, precisely, row.measured, questions)
        if row.packing == "calibrated":
            line["plain"] = {text: dict(line[text]) for text in texts}
            with tempfile.TemporaryDirectory() as scratch:
                line["calibrated_in"] = self._pack_calibrated(row, held, material, Path(scratch))
                for name in NAMES:
                    Source(Path(scratch) / "packed", name).load_into(held.model)
                    for text, batches in texts.items():
                        line[text][name] = perplexity(batches)
        return line | {"tuning_seconds": round(tuned_in, 1)} | self.provenance(started)

    def provenance(self, started: float) -> Result:
        """Where and with what a line was made."""
        cuda = self.places.device == "cuda"
        return {
            "seconds": round(time.perf_counter() - started, 1),
            "commit": self.places.commit,
            "machine": torch.cuda.get_device_name() if cuda else cpu_name(),
            "torch": torch.__version__,
        }

    # Tuning -------------------------------------------------------------------------------------------------

    def _tuned(
        self, row: Row, bench: Bench, held: Held, material: Material, lr: float
    ) -> tuple[Precisely, Result]:
        """Tune in place; what to measure with, how often each precision was taken, and what was kept."""
        if row.options is None:
            precisely = precisely_for(row.quantizer, 64, "midpoint")
            prepare(held.model, precisely)
            return precisely, {}
        cuda, padding = self.places.device == "cuda", padding_id(held.tokenizer)
        join = collate(padding)
        with tempfile.TemporaryDirectory() as scratch:
            arguments = TrainingArguments(
                scratch, per_device_train_batch_size=bench.batch_size, max_steps=row.steps or bench.steps,
                learning_rate=lr, lr_scheduler_type=row.schedule, max_grad_norm=row.clip,
                optim="sgd" if row.optimizer == "sgd" else "adamw_torch_fused" if cuda else "adamw_torch",
                bf16=cuda, use_cpu=not cuda, seed=row.seed, report_to=[], save_strategy="no",
                logging_strategy="no", disable_tqdm=True, remove_unused_columns=False,
                logging_nan_inf_filter=False, dataloader_drop_last=True,
            )  # fmt: skip
            trainer = OtaroTrainer(
                model=held.model, args=arguments, train_dataset=material.training, otaro=row.options,
                data_collator=lambda examples: _padded(join(examples), bench.sequence_length, padding),
            )  # fmt: skip
            if row.quantizer != "sefp":
                options = row.options
                trainer.precisely = precisely_for(row.quantizer, options.group_size, options.reconstruction)
                prepare(held.model, trainer.precisely)
            if cuda and bench.compiled:
                self._compile(trainer, held)
            trainer.remove_callback(PrinterCallback)
            trainer.judge = self._judge(row, trainer, material)
            trainer.train()
        told = {"path": trainer.search.state_dict().get("counts"), "average": trainer.judgement}
        return trainer.precisely, told

    def _judge(self, row: Row, trainer: OtaroTrainer, material: Material) -> Callable[[], float]:
        """Held-out text; where the average is to be kept whatever it is, a judge that prefers it."""
        if not row.judged:
            return iter((1.0, 0.0)).__next__  # the last weights are judged first
        assert row.options is not None
        half = torch.bfloat16 if trainer.args.bf16 else None  # as the steps compute
        asked = trainer.model, trainer.precisely, row.options.tuned_for, material.judged, half
        return lambda: statistics.fmean(losses_by_precision(*asked))

    @staticmethod
    def _compile(trainer: OtaroTrainer, held: Held) -> None:
        """Compile the model's steps once; another trainer of the same model takes them over."""
        if held.compiled_divergence is None:
            settings = torch._dynamo.config
            settings.recompile_limit = 64  # else a worker that has met many rows silently stops compiling
            settings.automatic_dynamic_shapes = False  # a bench has one shape, and benches are few
            trainer.compile_steps()
            held.compiled_divergence = trainer._divergence
        trainer._divergence = held.compiled_divergence

    # Measuring ----------------------------------------------------------------------------------------------

    def _perplexities(
        self, held: Held, precisely: Precisely, names: Sequence[str], batches: list[Batch]
    ) -> dict[str, float | None]:
        """By precision."""
        asked = [_precision(name) for name in names]
        losses = losses_by_precision(held.model, precisely, asked, batches, self.half)
        found = [round(math.exp(min(loss, MOST_LOSS)), 4) if math.isfinite(loss) else None for loss in losses]
        return dict(zip(names, found, strict=True))

    @torch.no_grad()
    def _rounded(self, model: Any) -> Iterator[str]:
        """The names of other formats, each while the weights are rounded to it."""
        tuned = (module for module in model.modules() if isinstance(module, TuneLinear | TuneEmbedding))
        weights = list(dict.fromkeys(module.weight for module in tuned))  # a tied one once
        before = [weight.detach().clone() for weight in weights]
        for name, (_, rounding) in OTHERS.items():
            for weight, exact in zip(weights, before, strict=True):
                weight.copy_(rounding(exact))
            yield name
        torch._foreach_copy_(weights, before)

    def _pack_calibrated(self, row: Row, held: Held, material: Material, folder: Path) -> float:
        """Pack the tuned model on what it was tuned on, into `packed` of the folder; seconds that it took."""
        assert row.options is not None
        checkpoint = folder / "tuned"
        held.model.config.save_pretrained(checkpoint)
        tied = set(held.model.all_tied_weights_keys)
        every = held.model.state_dict().items()
        state = {name: tensor.contiguous().cpu() for name, tensor in every if name not in tied}
        save_file(state, checkpoint / "model.safetensors", {"format": "pt"})
        length = min(LENGTH, held.model.config.max_position_embeddings)
        windows = windows_of_examples((ids for ids, _ in material.training.examples), SAMPLES, length)
        started, size = time.perf_counter(), row.options.group_size
        pack_calibrated(checkpoint, folder / "packed", windows, device=self.places.device, group_size=size)
        return round(time.perf_counter() - started, 1)

    @torch.inference_mode()
    def _accuracies(
        self, model: Any, precisely: Precisely, measured: Sequence[str], questions: zeroshot.Questions
    ) -> dict[str, Any]:
        """Of every task at every precision."""
        found, half = {}, torch.autocast(self.places.device, self.half, enabled=self.half is not None)
        model.eval()
        for name in measured:
            with precisely.at(_precision(name), self.half), torch.compiler.set_stance("force_eager"), half:
                found[name] = zeroshot.evaluate(model, questions, model.config.max_position_embeddings)
        return found

    # Loading ------------------------------------------------------------------------------------------------

    def _prepared(self, bench: Bench, start: str) -> tuple[Held, Material]:
        if bench.model not in self.held:
            directory, is_moe = self.places.checkpoint(bench), bench.model == "moe"
            model = moe.load(self.places.moe, self.places.device) if is_moe else self._model(directory)
            tokenizer = AutoTokenizer.from_pretrained(directory)
            self.held[bench.model] = Held(model, tokenizer, {"plain": _weights(model)})
        held = self.held[bench.model]
        if bench.name not in held.benches:
            held.benches[bench.name] = self._material(bench, held.tokenizer)
        if start not in held.starts:
            held.starts[start] = _weights(self._model(self.places.calibrated(bench)))
        return held, held.benches[bench.name]

    def _model(self, directory: Path) -> Any:
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).to(self.places.device)

    def _material(self, bench: Bench, tokenizer: Any) -> Material:
        join, length = collate(padding_id(tokenizer)), bench.sequence_length
        together = MEASURED_TOGETHER[self.places.device]

        def batches(dataset: TokenDataset, count: int, length: int) -> list[Batch]:
            size, found = max(1, together // length), [dataset[i] for i in range(min(count, len(dataset)))]
            return [join(found[at : at + size]) for at in range(0, len(found), size)]

        if bench.data == "alpaca":
            # Two have no answer.
            rows = load_data(self.places.file("alpaca/alpaca_5000.json"), tokenizer, length)
            rows, test = split(rows, bench.held_out, 0)
            training, heldout = split(rows, bench.held_out, 1)
        else:
            with tempfile.TemporaryDirectory() as scratch:
                tuning, measuring = self.places.texts(bench, Path(scratch))
                # The published rows were made before blocks began with the beginning-of-text token, which
                # only stories15M's tokenizer writes here: with it, new rows would not compare with old ones.
                training, heldout = split(load_data(tuning, tokenizer, length, bos=False), HELD_OUT, 0)
                test = load_data(measuring, tokenizer, bench.window, bos=False)
        judged, tested = batches(heldout, JUDGED, length), bench.test_tokens // bench.window
        # The demo, which is made on CPUs, has much held out, and itself looks at as much as this.
        unseen = judged if bench.data == "documentation" else batches(heldout, len(heldout), length)
        return Material(training, unseen, judged, batches(test, tested, bench.window))


def _weights(model: Any) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def _padded(batch: Batch, length: int, padding: int) -> Batch:
    """All batches equally long: each length would be compiled anew."""
    short = length - batch["input_ids"].shape[1]
    fills = {"input_ids": padding, "labels": -100, "attention_mask": 0}
    pad = torch.nn.functional.pad
    return {name: pad(tensor, (0, short), value=fills[name]) for name, tensor in batch.items()}


def _precision(name: str) -> Precision | None:
    return None if name == FULL else Precision(name)


# The loop ---------------------------------------------------------------------------------------------------


def claim(claims: Path, name: str) -> Path:
    """Who does what: a file per job, in a folder that workers share."""
    return claims / name.replace("/", "-")


def take(claims: Path, name: str) -> bool:
    """True for the first to ask."""
    try:
        claim(claims, name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def work(jobs: Sequence[Job], places: Places, claims: Path, deadline: float, label: str) -> None:
    """Take jobs in their order until none is left, or none that would end in time."""
    worker, took = Worker(places), {}  # type: Worker, dict[str, float]
    left, idle_since, failures = list(jobs), time.time(), 0
    while left:
        done = finished(read(places.results))
        left = [job for job in left if not is_done(job, done)]
        job = next((job for job in left if _ready(job, done, places, claims)), None)
        if job is None:
            waiting = [job for job in left if isinstance(job, Row) and not claim(claims, job.key).exists()]
            if not waiting or time.time() > min(deadline, idle_since + LONGEST_WAIT):
                return
            time.sleep(0.5)
            continue
        bench = _bench(job)
        if time.time() + took.get(bench, WORKERS * cost(job)) > deadline:
            left = [other for other in left if _bench(other) != bench]
            claim(claims, job.key).unlink()
            continue
        started = time.time()
        try:
            told = _do(worker, job, done, places)
            failures = 0
        except Exception as error:  # one row that fails must not take the others with it; it stays missing
            told = f"FAILED: {type(error).__name__}: {error}"
            failures += 1
        idle_since = time.time()
        took[bench] = idle_since - started
        print(f"{label} {job.key}: {told} ({took[bench]:.0f} s)", flush=True)
        if failures == MOST_FAILURES:
            raise SystemExit(f"{label} {failures} jobs failed one after the other; giving up")


def _bench(job: Job) -> str:
    return job.bench if isinstance(job, Row) else "observe"


def _ready(job: Job, done: dict[str, Result], places: Places, claims: Path) -> bool:
    """Whether it can be done now, and is ours to do."""
    if isinstance(job, Row):
        bench = BENCHES[job.bench]
        if chosen_rate(job, done) is None:
            return False
        if bench.model == "moe" and not _made(places.moe / moe.WEIGHTS, claims, partial(_train_moe, places)):
            return False
        made, make = places.calibrated(bench), partial(calibrate, bench, places)
        if job.start == "calibrated" and not _made(made, claims, make):
            return False
    return take(claims, job.key)


def _made(path: Path, claims: Path, make: Callable[[], str]) -> bool:
    """Whether what rows start from is there; the first to ask makes it."""
    if path.exists():
        return True
    if not take(claims, f"make {path.parent.name} {path.name}"):
        return False
    try:
        print(make(), flush=True)
    except Exception as error:  # as with rows: what needs it stays missing
        print(f"{path}: FAILED: {type(error).__name__}: {error}", flush=True)
        return False
    return True


def _train_moe(places: Places) -> str:
    loss = moe.make(places.moe, places.file("alpaca/alpaca_5000.json"), places.device)
    return f"trained {places.moe.name}, loss {loss:.2f}"


def calibrate(bench: Bench, places: Places) -> str:
    """`otaro pack --calibrate` on the text that is tuned on, and `otaro export --to hf` of its E5M8."""
    with tempfile.TemporaryDirectory() as scratch:
        tuning, _ = places.texts(bench, Path(scratch))
        content = tuning.read_text()
        content = content[: round((1 - 2 * HELD_OUT) * len(content))]  # as many tokens are held out, roughly
        packed = Path(scratch) / "packed"
        made = pack_calibrated(places.checkpoint(bench), packed, content, device=places.device)
        export(packed, places.calibrated(bench), precision=NAMES[0], to="hf")
    return f"calibrated {places.calibrated(bench).name} on {made.tokens} tokens"


def _do(worker: Worker, job: Job, done: dict[str, Result], places: Places) -> str:
    if isinstance(job, Observation):
        started = time.perf_counter()
        line = observe(job, places.models, places.file("wikitext-2/valid.txt"), places.device)
        line |= worker.provenance(started)
        append(places.results, line)
        return " ".join(f"{name} {cosine:.3f}" for name, cosine in zip(NAMES, line["to_fp"], strict=True))
    lr = chosen_rate(job, done)
    assert lr is not None
    named = replace(job, lr=lr)  # it may have been made at that rate already
    if job.lr is None and job.options is not None and is_done(named, done):
        line = done[named.key] | {"key": job.key, "settings": job.settings()}
    else:
        line = worker.run(job, lr)
    append(places.results, line)
    if "error" in line:
        return str(line["error"])
    return " ".join(f"{name} {value:.2f}" for name, value in line["perplexity"].items() if value)
