"""The folder of a tuning run: whether a run may start in it or go on, and what it must then be given again.

config.json states every option as it was resolved, how many processes there were, and SHA-256 digests of the
model and the examples. A run that goes on must agree with all of it, by content: a file that was moved is the
same, one that was edited under the same name is not. Only the end may be moved further away.

result.json is there when the run has ended, and says what it ended with; it is removed when one goes on to
more steps.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from otaro.file.atomic import explained, write_text
from otaro.file.run import command_to_resume, read_run
from otaro.idle import flag
from otaro.tune.config import ConfigError, renamed

if TYPE_CHECKING:
    from otaro.tune.data import TokenDataset

OURS = {"config.json", "log.jsonl", "log.jsonl.new", "perplexity.json", "checkpoints"}  # before a run is over
RAISED = {"steps", "epochs"}  # may be more than when the run was started
FREE = {"save_every"}  # changes nothing that is learnt
HASHED_AT_ONCE = 4  # files


class RunFolder:
    """`--out` of a run; `allowed` are names that it may hold before."""

    def __init__(self, path: Path, allowed: Collection[str] = ()) -> None:
        self.path, self.allowed = path, allowed
        self.config, self.log, self.perplexity = (
            path / "config.json",
            path / "log.jsonl",
            path / "perplexity.json",
        )
        self.checkpoints, self.result = path / "checkpoints", path / "result.json"

    def stated(self) -> dict[str, Any]:
        """What the run in this folder was started with."""
        if not self.config.is_file():
            raise ConfigError(f"--resume: {self.path} holds no run; leave the flag out to start one")
        stated = read_run(self.path)
        if stated is None:
            raise ConfigError(f"--resume: {self.config} is not that of a tuning run")
        return stated

    def check_free(self) -> None:
        """Refuse a folder with something in it, but what a run left that failed before a checkpoint."""
        if not self.path.exists() or not (names := self._names()) or self._left_by_a_failure(names):
            return
        if (stated := read_run(self.path)) is not None:
            advice = f"go on with `{command_to_resume(self.path, stated)}`, or choose another folder"
            raise ConfigError(f"--out {self.path} holds a run already; {advice}")
        raise ConfigError(f"--out {self.path} exists and is not empty; choose another folder")

    def clear(self) -> None:
        """Remove what a run wrote that came to nothing, and the folder if that was all."""
        if self.path.is_dir() and self._left_by_a_failure(self._names()):
            for name in OURS:
                path = self.path / name
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            if not any(self.path.iterdir()):
                self.path.rmdir()

    def write(self, stated: dict[str, Any]) -> None:
        """Make the folder, and config.json in it; whatever a run has ended with is no longer its end."""
        with explained(self.result):
            self.result.unlink(missing_ok=True)
        write_text(self.config, json.dumps(stated, indent=2) + "\n")

    def finish(self, result: dict[str, Any]) -> None:
        """State that all there is to a run is in its folder."""
        write_text(self.result, json.dumps(result) + "\n")

    def ended_with(self) -> dict[str, Any] | None:
        """What a run gave that has ended, if its models are still there."""
        models = (self.path / "model" / "config.json", self.path / "nested" / "config.json")
        if not self.result.is_file() or not all(file.is_file() for file in models):
            return None
        try:
            result = json.loads(self.result.read_text())
        except ValueError:
            return None
        return result if isinstance(result, dict) else None

    def _names(self) -> set[str]:
        return {
            path.name
            for path in self.path.iterdir()
            if path.name not in self.allowed and not _passing(path.name)
        }

    def _left_by_a_failure(self, names: set[str]) -> bool:
        if not names <= OURS or (self.config.exists() and read_run(self.path) is None):
            return False
        if not self.config.exists():  # it is the first to be written; whatever else is there is not ours
            return names <= {"checkpoints"} and not any(self.checkpoints.iterdir()) if names else True
        from otaro.tune.checkpoints import last_complete_checkpoint

        return last_complete_checkpoint(self.checkpoints) is None


def refuse_changes(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Name each option that differs from that of the run, with both values."""
    changed = []
    if now["recipe"] != before.get("recipe", now["recipe"]):
        changed.append(f"--recipe is {now['recipe']}, the run has {before['recipe']}")
    for section, stated in (("options", renamed(before["options"])), ("training", before["training"])):
        for name, value in now[section].items():
            if name not in stated or value == (old := stated[name]) or name in FREE:
                continue
            if name == "epochs" and now["training"]["steps"] is not None:
                changed.append(f"--epochs is {value}, but the run counts --steps")
            elif name in RAISED and value is not None and old is not None:
                if value > old:
                    continue
                changed.append(f"{flag(name)} is {value}, the run has {old}: it may be raised, not lowered")
            else:
                changed.append(f"{flag(name)} is {shown(value)}, the run has {shown(old)}")
    if changed:
        raise ConfigError(
            f"--resume: {'; '.join(changed)}. Leave out what is to stay as it was when {folder} was started"
        )
    then, count = before.get("processes", 1), now["processes"]
    if then != count:
        way = command_to_resume(folder, before)
        raise ConfigError(
            f"--resume: the run in {folder} has {then} process(es), this is {count}; go on with: {way}"
        )


def refuse_other_content(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Name what was put in the place of the model or the data that the run was started with."""
    whose = {
        "model": f"the weights or the config of {now['model']}",
        "data": f"the examples made of {now['data']}",
        "held_out": f"the examples made of {now['training']['eval_data'] or now['data']} to measure on",
    }
    was, is_now = before.get("sha256", {}), now["sha256"]
    if changed := [
        f"{what} (SHA-256 {is_now[key]}, then {was[key]})"
        for key, what in whose.items()
        if _differ(key, was, is_now)
    ]:
        raise ConfigError(
            f"--resume: {' and '.join(changed)} changed since the run in {folder} was started; "
            "put back what was there, or start a run in another folder"
        )


def _differ(key: str, was: dict[str, Any], is_now: dict[str, Any]) -> bool:
    return key in was and was[key] != is_now[key]


def shown(value: Any) -> str:
    """A value as it would be given."""
    if isinstance(value, list):
        return ",".join(map(shown, value))
    if value is None or isinstance(value, bool):
        return {None: "not given", True: "on", False: "off"}[value]
    return str(value)


def digest_of_model(directory: Path) -> str:
    """SHA-256 of the config and the weights of a checkpoint, file by file.

    Of a model in the Hub's cache nothing is read: large files are stored there under this very digest.
    """
    index = directory / "model.safetensors.index.json"
    if (directory / "model.safetensors").is_file() or not index.is_file():
        names: Iterable[str] = ["model.safetensors"]
    else:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    files = [directory / name for name in ("config.json", *names)]
    with ThreadPoolExecutor(HASHED_AT_ONCE) as pool:
        digests = dict(zip((file.name for file in files), pool.map(_digest_of_file, files), strict=True))
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest()


def _digest_of_file(path: Path) -> str:
    stored = Path(os.path.realpath(path))
    if stored.parent.name == "blobs" and re.fullmatch("[0-9a-f]{64}", stored.name):
        return stored.name
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of_examples(dataset: TokenDataset | None) -> str | None:
    """SHA-256 of all tokens and labels, as they will be learnt."""
    if dataset is None:
        return None
    digest = hashlib.sha256(dataset.kind.encode())
    for ids, labels in dataset.examples:
        digest.update(len(ids).to_bytes(8, "little"))
        digest.update(ids.tobytes())
        digest.update(labels.tobytes())
    return digest.hexdigest()


def _passing(name: str) -> bool:
    """Locks, and what a killed writer left, which the next sweeps away."""
    return name.startswith(".") and name.endswith((".partial", ".lock"))
