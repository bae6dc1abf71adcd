"""One tuning run: load, measure, train, measure, save, pack; by one process or several, in one go or more.

What it tunes and leaves is tune_model.py, what trains it tune_trainer.py, what it is measured on
tune_heldout.py, how it is packed tune_pack.py, how it ends early tune_ends.py, its folder tune_folder.py.
"""

from __future__ import annotations

import json as json_module
import platform
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from otaro.cli import console
from otaro.cli.tune_ends import explained, interruptible
from otaro.cli.tune_trainer import arguments, launcher_says, make_trainer, train
from otaro.errors import OtaroError, TargetError
from otaro.tune import processes

if TYPE_CHECKING:
    import torch

    from otaro.cli.tune_heldout import HeldOut
    from otaro.file.hub import Hub
    from otaro.tune.config import Around, Options, Training
    from otaro.tune.data import TokenDataset


class TuningRun:
    """One tuning run, from its options to its folder; `otaro demo` makes two."""

    def __init__(
        self,
        model: str,
        data: str,
        out: Path,
        options: Options,
        training: Training,
        around: Around | None = None,
        recipe: str = "best",
        resume: bool = False,
        allowed: Collection[str] = (),
        hub: Hub | None = None,
    ) -> None:
        """`allowed` are names that --out may hold already; `hub` is how to reach a model on the Hub."""
        from otaro.cli.tune_folder import RunFolder, refuse_changes
        from otaro.file.checkpoint import HUB
        from otaro.tune.config import Around, ConfigError

        if launcher_says("ACCELERATE_USE_FSDP"):
            training = replace(training, fsdp=True)
        if training.fsdp and processes.size() == 1:
            how = "start them with torchrun --nproc_per_node N"
            raise ConfigError(f"--fsdp shares weights out over several processes; {how}")
        self.source, self.data, self.out, self.options, self.training = model, data, out, options, training
        self.around, self.resume, self.hub = around or Around(), resume, hub or HUB
        self.folder = RunFolder(out, allowed)
        self._packed = False
        stated: dict[str, Any] = {"model": model, "revision": self.hub.revision, "data": data}
        stated |= {"recipe": recipe, "options": options.to_dict()}
        stated |= {"training": asdict(training) | asdict(self.around)}
        stated |= {"processes": processes.size(), "launcher": processes.launcher()}
        self.stated: dict[str, Any] = json_module.loads(json_module.dumps(stated))
        self.before: dict[str, Any] | None = self.folder.stated() if resume else None
        if self.before is not None:
            refuse_changes(out, self.before, self.stated)

    def go(self) -> dict[str, Any]:
        """Load, measure, train, measure, save, pack; of several processes the first writes, others wait."""
        from otaro.file.atomic import alone

        processes.join()
        console.quiet_transformers()
        with interruptible(self), explained(self), ExitStack() as held:
            if processes.is_first():
                held.enter_context(alone(self.out))
                if not self.resume:
                    self.folder.check_free()
            result = self._go()
        processes.leave()
        return result

    def _go(self) -> dict[str, Any]:
        from otaro.cli.tune_model import save
        from otaro.cli.tune_pack import pack_plainly
        from otaro.tune.checkpoints import forget_steps_after

        if (ended := processes.from_first(self._ended)) is not None:
            more = "--epochs" if self.training.steps is None else "--steps"
            console.remark(f"--resume: this run is complete: nothing to do; a larger {more} would go on")
            return ended
        with console.err.status("loading model and data ..."):
            model, tokenizer, training, held_out = self._load()
            windows = self._as_can_be_judged(training, _positions(model))
            settings = arguments(self.training, self.around.save_every, self.folder.checkpoints)
            self._tell_memory(model)  # refuses before a folder is made, as the line before does
        found = processes.from_first(self._checkpoint)
        with self._begun():
            if self.resume:
                way = f"goes on from {found}" if found else "no checkpoint yet: starts from the beginning"
                console.remark(f"--resume: {way}")
            if processes.is_first():
                forget_steps_after(self.folder.log, int(found.name.rpartition("-")[2]) if found else 0)
            trainer = make_trainer(model, tokenizer, training, settings, self.options, self.folder.log)
            if self.training.compile:
                trainer.compile_steps()
            unseen = self._held_out(held_out, trainer) if held_out is not None else None
            trainer.judge = partial(self._judge, trainer, unseen) if unseen is not None else None
            measured = self._measured_before(found)
            seconds = train(trainer, found, partial(self._begin, trainer, unseen, measured))
        self._measure(trainer, unseen, measured, "after")
        with console.err.status("saving ..."):
            tuned = self._tuned(trainer)
            if processes.is_first():
                save(tuned, tokenizer, self.options, self.out / "model")
        if processes.is_first():
            pack_plainly(self.out, self.options)
            self._packed = True
        result = {"out": str(self.out), "seconds": seconds, "steps": trainer.state.global_step}
        result |= {"full": trainer.full_share, "tokens": measured.get("tokens", 0)}
        result["longest"] = unseen.longest if unseen is not None else None
        result["average"] = {key: value for key, value in trainer.judgement.items() if key != "step"} or None
        result["packing"] = processes.from_first(lambda: self._calibrate(tuned, windows, unseen, measured))
        result |= {when: measured.get(when, {}) for when in ("before", "after")}
        if processes.is_first():
            self.folder.finish(result)
        processes.wait()
        return result

    def _checkpoint(self) -> Path | None:
        """The one to go on from; refused where there is none, and a tuned model would be lost."""
        from otaro.tune.checkpoints import last_complete_checkpoint, last_good_checkpoint

        if not self.resume:
            return None
        found = last_good_checkpoint(self.folder.checkpoints)
        if (newest := last_complete_checkpoint(self.folder.checkpoints)) != found:
            console.remark(f"--resume: {newest} is passed over: it is damaged, or its weights are not finite")
        if found is None and (tuned := self.out / "model").is_dir():
            raise TargetError(
                f"--resume: {self.out} has no checkpoint left to go on from, and starting over would replace "
                f"its tuned model; tune that in a run of its own: otaro tune {tuned} --out NEW"
            )
        return found

    def _as_can_be_judged(self, training: TokenDataset, positions: int | None) -> torch.Tensor | None:
        """Windows to calibrate on; without what this run cannot do, or could not judge, which is said."""
        from otaro.calibrate.run import SAMPLES
        from otaro.calibrate.text import LENGTH, windows_of_examples
        from otaro.idle import idle
        from otaro.tune.trainer import UNJUDGED

        unread = idle({**self.stated["options"], **self.stated["training"]})
        if self.options.average and "average" in unread:
            console.remark(UNJUDGED)
            self.options = replace(self.options, average=0.0)
        if not self.options.calibrate:
            return None
        try:
            if "calibrate" in unread:
                raise OtaroError(unread["calibrate"].why)
            examples = (ids for ids, _ in training.examples)
            return windows_of_examples(examples, SAMPLES, min(LENGTH, positions or LENGTH))
        except OtaroError as why:
            console.remark(f"--calibrate: left out, each weight will be rounded by itself: {why}")
            return None

    def _calibrate(
        self, tuned: Any, windows: torch.Tensor | None, unseen: HeldOut | None, measured: dict[str, Any]
    ) -> dict[str, Any] | None:
        """What was decided between two ways to pack; perplexities after the run are those of the one kept."""
        from otaro.cli.tune_heldout import FEW_TOKENS
        from otaro.cli.tune_pack import calibrate

        if windows is None or unseen is None:
            return None
        if unseen.tokens < FEW_TOKENS:
            few = f"{unseen.tokens} held-out tokens are too few to judge it by"
            console.remark(f"--calibrate: left out, {few}")
            return None
        plain = {name: log(perplexity) for name, perplexity in measured["after"].items()}
        if (judged := calibrate(self.out, tuned, self.options, windows, self.data, unseen, plain)) is None:
            return None
        decision, losses = judged
        if decision["kept"] == "calibrated":
            measured["after"] |= {name: exp(loss) for name, loss in losses.items()}
            self._keep(measured)
        return decision

    def _ended(self) -> dict[str, Any] | None:
        """What the run gave, if it has ended and is asked for as it was: of the same model and data."""

        def asked(stated: dict[str, Any]) -> dict[str, Any]:
            """What decides what a run gives."""
            kept = {key: stated.get(key) for key in self.stated if key != "launcher"}
            kept["training"] = {**(kept["training"] or {}), "save_every": None}
            return kept

        same = self.before is not None and asked(self.before) == asked(self.stated)
        ended = self.folder.ended_with() if same else None
        return None if ended is None else {**ended, "out": str(self.out)}

    @contextmanager
    def _begun(self) -> Iterator[None]:
        """The folder, with config.json in it; one that fails before its first step is removed again."""
        if processes.is_first():
            if not self.resume:
                self.folder.clear()  # of what a failed run left
            versions = {**console.versions(), "python": platform.python_version()}
            self.folder.write({**self.stated, "versions": versions})
        processes.wait()
        if not self.out.is_dir():
            advice = "it must lie where all of their machines write"
            raise OtaroError(f"--out {self.out} is not seen by all processes; {advice}")
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
        from otaro.tune.data import DataError, load_data, split

        if self.training.chat_template is not None:
            console.remark(*use_template(self.training.chat_template, tokenizer, model.generation_config))
        length, bos = self._sequence_length(model), not self.training.no_bos
        if length < (asked := self.training.sequence_length):
            console.remark(f"--sequence-length {asked} is shortened to the {length} positions of this model")
        read = partial(
            load_data,
            tokenizer=tokenizer,
            sequence_length=length,
            max_positions=_positions(model),
            skip_bad_rows=self.around.skip_bad_rows,
            bos=bos,
        )
        dataset = read(self.data)
        console.remark(*dataset.remarks)
        if self.around.eval_data is not None:
            try:
                return dataset, read(self.around.eval_data)
            except DataError as error:
                raise DataError(str(error).replace("--data takes", "--eval-data takes")) from error
        if self.around.hold_out == 0:
            return dataset, None
        return split(dataset, self.around.hold_out, self.training.seed)

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
        asked, positions = self.training.sequence_length, _positions(model)
        return asked if positions is None else min(asked, positions)

    def _tuned(self, trainer: Any) -> Any:
        """The tuned model as it is to be saved, adapters merged; in the first process."""
        from otaro.cli.tune_model import gathered
        from otaro.tune.fake_quant import merge_lora, restore

        model = trainer.model
        if trainer.is_fsdp_enabled:
            weights = gathered(model)  # by all of them
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

    def _held_out(self, dataset: TokenDataset, trainer: Any) -> HeldOut:
        import torch

        from otaro.cli.tune_heldout import HeldOut

        dtype = torch.bfloat16 if self.training.bf16 else None
        return HeldOut(dataset, self.around.eval_tokens, trainer.data_collator, dtype)

    def _begin(self, trainer: Any, unseen: HeldOut | None, measured: dict[str, Any]) -> None:
        """When model and optimizer are in place."""
        if self.options.full is None:
            passes = trainer.state.num_train_epochs
            seen = "once" if passes == 1 else f"up to {passes} times"
            share = f"{trainer.full_share:.0%} of every step's loss is in full precision"
            console.remark(f"{share}, as the data are seen {seen} (--full)")
        self._measure(trainer, unseen, measured, "before")

    def _measure(self, trainer: Any, unseen: HeldOut | None, measured: dict[str, Any], when: str) -> None:
        """Perplexity at every precision, put into `measured` and perplexity.json."""
        from otaro.sefp.precision import PRECISIONS

        if unseen is None or when in measured:
            return
        names = ["fp", *map(str, PRECISIONS)]
        losses = unseen.losses(trainer, [None, *PRECISIONS], f"perplexity {when} (precisions)")
        measured |= {"tokens": unseen.tokens, when: dict(zip(names, map(exp, losses), strict=True))}
        self._keep(measured)

    def _keep(self, measured: dict[str, Any]) -> None:
        from otaro.file.atomic import write_text

        if processes.is_first():
            write_text(self.folder.perplexity, json_module.dumps(measured) + "\n")

    def _judge(self, trainer: Any, unseen: HeldOut) -> float:
        """What decides whether averaged weights are kept."""
        return fmean(unseen.losses(trainer, self.options.tuned_for, "judging the average (precisions)"))

    def kept(self) -> str:
        """What a run that ended early leaves behind, and how to go on."""
        from otaro.file.run import command_to_resume
        from otaro.tune.checkpoints import last_good_checkpoint

        if last := last_good_checkpoint(self.folder.checkpoints):
            there = f"{self.out / 'nested'} is there, packed plainly, and " if self._packed else ""
            return f"{there}kept is {last}; go on with: {command_to_resume(self.out, self.stated)}"
        after = f"after {self.around.save_every} steps (--save-every)"
        return f"nothing is kept, as the first checkpoint comes {after}"


def _positions(model: Any) -> int | None:
    """How many tokens a model was made for, if it says so."""
    positions = getattr(model.config, "max_position_embeddings", None)
    return None if positions is None else int(positions)
