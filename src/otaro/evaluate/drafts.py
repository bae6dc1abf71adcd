"""Whether a draft pays: `otaro bench DIR --draft E5M3`.

Texts are continued by the likeliest tokens, with the draft and without, in turns. Two kinds: *prose*,
passages of a text that the model goes on with, and *copy*, the same passages, to be said again: what editing
a file or quoting from a text asks of a model. Both ways must say the same, or the run is refused. A first
round warms up; of the others the shortest counts, for each text by itself, as a busy machine can only be
slower than it is. Only decoding is timed.

The acceptance at a position is the share of the drafts long enough to have a token there that were right up
to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count, zip_longest
from typing import Any

import torch

from otaro.errors import OtaroError
from otaro.evaluate.machine import Measured, about, in_turns
from otaro.evaluate.progress import Progress
from otaro.evaluate.speed import open_at, threads_for_a_while
from otaro.file.checkpoint import HUB
from otaro.file.fits import Fit
from otaro.file.hub import Hub
from otaro.runtime.architectures import positions_of
from otaro.runtime.draft import Draft
from otaro.runtime.load import load, load_tokenizer
from otaro.runtime.report import Generation
from otaro.sefp.precision import Precision

Judge = Precision | Fit
Texts = dict[str, list[list[int]]]
"""Tokens of the texts of each kind."""

PLAIN = "none"
_AGAIN = "\n\nThe same text again:\n\n"


@dataclass(frozen=True)
class Settings:
    """What is timed."""

    tokens: int = 96
    context: int = 128
    """Tokens of a passage."""
    texts: int = 4
    rounds: int = 3
    threads: int | None = None
    kv: Precision | None = None


@dataclass(frozen=True)
class Drafted:
    """One draft on texts of one kind; speeds in tokens per second."""

    texts: str
    draft: str
    rate: float
    plain: float
    gain: float
    """Times the tokens without a draft."""
    acceptance: list[float]
    """By position."""
    tokens_per_pass: float
    """Of the judge."""

    @property
    def verdict(self) -> str:
        """In a sentence."""
        paid = "does not pay" if self.gain < 1 else "makes no difference" if self.gain < 1.05 else "pays"
        return f"--draft {self.draft} on {self.texts}: {self.gain:.2f} times the tokens; it {paid}"


@dataclass(frozen=True)
class Drafts(Measured):
    """Everything `otaro bench --draft` shows."""

    precision: str
    settings: Settings
    rows: list[Drafted]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**super().to_dict(), "rows": [{**asdict(row), "verdict": row.verdict} for row in self.rows]}


def bench(
    directory: str,
    drafts: Sequence[str | Draft],
    settings: Settings,
    text: str,
    precision: str | Precision | None = None,
    *,
    device: str = "cpu",
    hub: Hub = HUB,
    progress: Progress = lambda what, done, total: None,
) -> Drafts:
    """Measure drafts on passages of a text, beside a precision or a fit, by default the finest there."""
    wanted = [draft for draft in map(Draft.of, drafts) if draft is not None]
    place, nested, (judge, *_) = open_at(directory, None if precision is None else [precision], device, hub)
    with threads_for_a_while(settings.threads) as threads:
        model, tokenizer = load(nested.path, judge, device=place.device), load_tokenizer(nested.path)
        texts = _texts(tokenizer, text, settings)
        needed = max(len(ids) for some in texts.values() for ids in some) + settings.tokens
        if (limit := positions_of(model)) is not None and needed > limit:
            taken = f"texts and --tokens {settings.tokens} take {needed}"
            raise OtaroError(f"the model has {limit} positions, but {taken}")
        found = _take_turns(model, judge, wanted, texts, settings, progress)
    return Drafts(
        **about(nested, place, threads),
        precision=str(judge),
        settings=settings,
        rows=[_row(kind, draft, found[kind]) for draft in wanted for kind in texts],
    )


def _texts(tokenizer: Any, text: str, settings: Settings) -> Texts:
    """Tokens of passages, evenly from all of the text; and the same with a beginning of their repetition."""
    step, size = len(text) // settings.texts, 8 * settings.context
    if step < size:
        passages = f"{settings.texts} passages of {settings.context} tokens"
        raise OtaroError(f"--text: {passages} take more text than that")
    prose, copy = [], []
    for number in range(settings.texts):
        passage = text[number * step :][:size].split(maxsplit=1)[1]
        ids = tokenizer(passage)["input_ids"][: settings.context]
        if len(ids) < settings.context:
            fewer = f"fewer than {settings.context} tokens"
            raise OtaroError(f"--text: {size} characters have {fewer}; give other text")
        said = tokenizer.decode(ids, skip_special_tokens=True)
        prose.append(ids)
        copy.append(tokenizer(said + _AGAIN + said[: len(said) // 8])["input_ids"])
    return {"prose": prose, "copy": copy}


Found = dict[str, list[Generation]]
"""By draft: the report of the shortest turn of every text."""


def _take_turns(
    model: Any, judge: Judge, drafts: list[Draft], texts: Texts, settings: Settings, progress: Progress
) -> dict[str, Found]:
    contenders: dict[str, Draft | None] = {PLAIN: None, **{str(draft): draft for draft in drafts}}
    total, done = (1 + settings.rounds) * len(contenders) * sum(map(len, texts.values())), count()
    found: dict[str, Found] = {kind: {name: [] for name in contenders} for kind in texts}
    for kind, ids in ((kind, ids) for kind, prompts in texts.items() for ids in prompts):

        def say(name: str, kind: str = kind) -> None:
            progress(f"{kind}, draft {name}", next(done), total)

        turns = {
            name: partial(_continued, model, ids, judge, draft, settings)
            for name, draft in contenders.items()
        }
        timed = in_turns(turns, settings.rounds, say)
        for name, made in timed.items():
            if any(tokens != timed[PLAIN][0][0] for tokens, _ in made):
                raise OtaroError(f"--draft {name}: {judge} alone says otherwise; this must not be: tell us")
            reports = (report for _, report in made)
            found[kind][name].append(min(reports, key=lambda report: report.decode_seconds))
    progress("", total, total)
    return found


def _continued(
    model: Any, ids: list[int], judge: Judge, draft: Draft | None, settings: Settings
) -> tuple[list[int], Generation]:
    inputs, report = torch.tensor([ids], device=model.device), Generation()
    output = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=settings.tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        precision=judge,
        kv=settings.kv,
        draft=draft,
        report=report,
    )
    return output[0].tolist(), report


def _row(kind: str, draft: Draft, found: Found) -> Drafted:
    def rate(name: str) -> float:
        return sum(one.new_tokens - 1 for one in found[name]) / sum(one.decode_seconds for one in found[name])

    reports = found[str(draft)]
    drafted = [sum(some) for some in zip_longest(*(one.drafted for one in reports), fillvalue=0)]
    right = [sum(some) for some in zip_longest(*(one.accepted for one in reports), fillvalue=0)]
    acceptance = [one / tried for one, tried in zip(right, drafted, strict=True)]
    new, mine, plain = sum(report.new_tokens - 1 for report in reports), rate(str(draft)), rate(PLAIN)
    per_pass = new / max(1, new - sum(right))
    return Drafted(kind, str(draft), mine, plain, mine / plain, acceptance, per_pass)
