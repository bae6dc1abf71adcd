"""What `otaro demo` shows of the nested file: a text that changes precision, an upgrade by a shard, speed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from otaro.cli import console

if TYPE_CHECKING:
    from otaro.evaluate.speed import Bench
    from otaro.file.summary import Summary

EVERY = 8  # tokens between two changes of precision
PATH = ("E5M8", "E5M3", "E5M5", "E5M8")


@dataclass(frozen=True)
class Upgrade:
    """A directory that had the base shard alone, and was given the next."""

    directory: Path
    shard: str
    before: str
    """The precision that it could run at."""
    after: str
    refused: str
    """What a finer one was answered before."""
    bytes: int
    same: bool
    """Whether all logits of a prompt are those of the whole directory, bit for bit."""


def changing(nested: Path, prompt: str, device: str) -> list[tuple[str, str]]:
    """One text, continued by one model whose precision changes between tokens: what each precision wrote."""
    import torch

    import otaro
    from otaro.runtime.load import load_tokenizer
    from otaro.runtime.session import padding_token

    model, tokenizer = otaro.load(nested, device=device), load_tokenizer(nested)
    ids = torch.tensor([tokenizer(prompt)["input_ids"]], device=device)
    schedule = {number * EVERY: name for number, name in enumerate(PATH)}
    settings = {
        "max_new_tokens": EVERY * len(PATH),
        "do_sample": False,
        "pad_token_id": padding_token(tokenizer),
    }
    made = model.generate(ids, attention_mask=torch.ones_like(ids), schedule=schedule, **settings)[
        0, ids.shape[1] :
    ].tolist()
    written, parts = "", []
    for number, name in enumerate(PATH):
        if made[number * EVERY :]:
            now = tokenizer.decode(made[: (number + 1) * EVERY], skip_special_tokens=True)
            parts.append((name, now[len(written) :]))
            written = now
    return parts


def upgrade(nested: Path, target: Path, prompt: str, device: str) -> Upgrade:
    """Copy all but the finer shards, run; copy one more shard, run at the next precision."""
    import torch

    import otaro
    from otaro.errors import ShardMissingError
    from otaro.file.header import BASE, shard_name
    from otaro.runtime.load import load_tokenizer

    base, added = shard_name(BASE), shard_name(BASE + 1)
    before, after = f"E5M{BASE}", f"E5M{BASE + 1}"
    for file in nested.iterdir():
        if (
            file.is_file()
            and (file.suffix != ".safetensors" or file.name == base)
            and file.name != "quality.json"
        ):
            shutil.copy(file, target)
    otaro.load(target, before, device=device)
    refused = ""
    try:
        otaro.load(target, after, device=device)
    except ShardMissingError as error:
        refused = str(error)
    shutil.copy(nested / added, target)
    ids = torch.tensor([load_tokenizer(nested)(prompt)["input_ids"]], device=device)
    with torch.no_grad():
        ours, whole = (otaro.load(place, after, device=device)(ids).logits for place in (target, nested))
    return Upgrade(
        target, added, before, after, refused, (target / added).stat().st_size, bool(torch.equal(ours, whole))
    )


def timed(nested: Path, keep: Path, device: str) -> Bench:
    """A short `otaro bench`, kept where `otaro report` looks for it."""
    from otaro.evaluate.speed import Settings, bench
    from otaro.file.atomic import write_text

    settings = Settings(prompt_tokens=128, tokens=32, context=64, rounds=5)
    with console.progress_bar("timing") as progress:
        result = bench(str(nested), settings, device=device, progress=progress)
    write_text(keep, json.dumps({**result.to_dict(), "versions": console.versions()}) + "\n")
    return result


def show(
    summary: Summary, parts: Sequence[tuple[str, str]], prompt: str, upgraded: Upgrade, bench: Bench
) -> None:
    """All of it, in words."""
    from otaro.evaluate.run_folder import hardly_follows_bits

    _say(f"\n[bold]One text, while the precision changes every {EVERY} tokens[/]")
    _say("  below the prompt, what each precision wrote; the cache stays, no weight moves")
    _say(f"  [dim]prompt[/]  [italic]{console.escape(prompt)}[/]")
    for name, text in parts:
        _say(f"  [bold cyan]{name:6}[/]  {console.escape(' '.join(text.split()))}")

    _say("\n[bold]One file: every prefix of its shards is a model[/]")
    table = _table("", "shards", "on disk", "decode\ntokens/s", "read per\ntoken", "switch\nto it")
    speeds = {row.precision: row for row in bench.precisions}
    for row in summary.precisions:
        assert row.bytes is not None  # just packed, so complete
        speed = speeds[row.precision]
        switch = "-" if speed.switch is None else f"{speed.switch * 1e6:.0f} us"
        shards = f"m3 to {row.shards[-1].split('-')[1].split('.')[0]}" if len(row.shards) > 1 else "m3"
        table.add_row(
            row.precision,
            shards,
            console.size(row.bytes),
            f"{speed.decode:,.0f}",
            console.size(speed.weight_bytes),
            switch,
        )
    console.out.print(table)
    place = "" if bench.device == "cuda" else f", {bench.threads} threads"
    _say(f"  [dim]{console.escape(bench.machine)}{place}, kernels {bench.kernels}[/]")
    rows = bench.precisions
    if hardly_follows_bits((row.weight_bytes for row in rows), (row.bandwidth_share for row in rows)):
        _say("  [dim]this model is so small that other work than reading weights takes the time:[/]")
        _say("  [dim]speed hardly follows the bits here; with SmolLM2-135M on a CPU it does[/]")

    _say("\n[bold]An upgrade is one more shard[/]")
    _say(
        f"  {console.escape(str(upgraded.directory))} has {upgraded.before} alone; asked for "
        f"{upgraded.after} it answers:"
    )
    _say(f"  [dim]{console.escape(upgraded.refused)}[/]")
    same = (
        "with the bits of the whole file"
        if upgraded.same
        else "[bold red]with other bits than the whole file[/]"
    )
    _say(f"  with {upgraded.shard} copied there, {console.size(upgraded.bytes)},")
    _say(f"  it runs at {upgraded.after}, {same}")


def _table(*headings: str) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number > 1 else "left", vertical="bottom")
    return table


def _say(text: str) -> None:
    console.out.print(text, highlight=False)
