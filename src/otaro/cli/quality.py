"""Measurements as a table: precisions downwards, what was measured across, or the tasks downwards where they
are too many.

What was measured with packed keys and values has a table of its own, with what they were kept in downwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from otaro.cli import console

if TYPE_CHECKING:
    from rich.table import Table

    from otaro.file.coding import Coding

Entry = dict[str, Any]
TITLE = "Quality by precision"


@dataclass(frozen=True)
class _Column:
    heading: str
    cells: dict[str, str]
    """By precision."""


def show_quality(entries: Iterable[Entry]) -> None:
    """Print entries of a quality record, those of one measurement in a column."""
    everything = list(entries)
    entries = [entry for entry in everything if not entry.get("kv")]
    on_text, tasks = [entry for entry in entries if "text" in entry], list(_task_columns(entries))
    whole = _table(TITLE, entries, [*_text_columns(entries), *tasks, *_speed_columns(entries)])
    if _width(whole) > console.out.width:
        for table in _tables_on_text(on_text):
            console.out.print(table)
        if tasks:
            console.out.print(_turned("Quality by task", entries, tasks))
    elif entries:
        console.out.print(whole)
    for table in _tables_by_kv([entry for entry in everything if entry.get("kv")]):
        console.out.print(table)
    for note in _legend(everything):
        console.out.print(f"[dim]{console.escape(note)}[/]", highlight=False)


def _tables_on_text(entries: list[Entry]) -> Iterator[Table]:
    """One table for all texts, or where that is too wide one for each."""
    texts = list(dict.fromkeys(entry["text"] for entry in entries))
    whole = _table(TITLE, entries, [*_text_columns(entries), *_speed_columns(entries)])
    if texts and _width(whole) <= console.out.width:
        yield whole
        return
    for text in texts:
        some = [entry for entry in entries if entry["text"] == text]
        yield _table(f"{TITLE}, {console.escape(text)}", some, [*_text_columns(some), *_speed_columns(some)])


def _table(title: str, entries: list[Entry], columns: list[_Column]) -> Table:
    table = console.table(title, "precision", *(console.escape(column.heading) for column in columns))
    for precision in _precisions(entries):
        table.add_row(precision, *(column.cells.get(precision, "-") for column in columns))
    return table


def _turned(title: str, entries: list[Entry], columns: list[_Column]) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column("task", no_wrap=True)
    precisions = _precisions(entries)
    for precision in precisions:
        table.add_column(precision, justify="right")
    for column in columns:
        heading = console.escape(column.heading.replace("\nfirst", ", first").replace("\non ", ", on "))
        table.add_row(
            heading, *(column.cells.get(precision, "-").replace(" ±", "\n±") for precision in precisions)
        )
    return table


def _width(table: Table) -> int:
    """How wide the table is if nothing in it is broken or cut."""
    return console.out.measure(table, options=console.out.options.update(max_width=10_000)).maximum


def _precisions(entries: list[Entry]) -> list[str]:
    from otaro.evaluate.quality import in_order

    return in_order(entry["precision"] for entry in entries)


def _grouped(entries: list[Entry], kind: str) -> list[dict[str, Entry]]:
    """The entries of a kind that differ in nothing but precision, by precision, fine to coarse."""
    from otaro.evaluate.quality import series

    return series(entry for entry in entries if entry["kind"] == kind)


def _cells(group: dict[str, Entry], write: Callable[[Entry], str]) -> dict[str, str]:
    return {precision: write(entry) for precision, entry in group.items()}


def _apart(entries: list[Entry], device: str, coding: Coding | None) -> str:
    """The lines of a heading that name device and coding, where there is more than one."""
    from otaro.evaluate.quality import coding_of
    from otaro.evaluate.records import FULL

    devices = {entry["device"] for entry in entries}
    codings = {coding_of(entry) for entry in entries if entry["precision"] != FULL}
    on = f"\non {device}" if len(devices) > 1 else ""
    return on + (f"\n{coding}".replace(", ", "\n") if len(codings) > 1 else "")


def _apart_of(entries: list[Entry], group: dict[str, Entry]) -> str:
    """The same of a group on a text: also what its windows begin with."""
    from otaro.evaluate.quality import coding_of

    last = list(group.values())[-1]  # the first may be full precision, which has no coding
    told = ""
    if len({entry["bos"] for entry in entries if "text" in entry}) > 1:
        told += "\nwith BOS" if last["bos"] else "\nwithout BOS"
    return told + _apart(entries, last["device"], coding_of(last))


def _text_columns(entries: list[Entry]) -> Iterator[_Column]:
    for group in _grouped(entries, "perplexity"):
        best, first = next(iter(group.items()))
        full = first["value"]
        settings = f"{first['text']}\n{first['window']}/{first['stride']}" + _apart_of(entries, group)
        yield _Column(f"perplexity\n{settings}", _cells(group, lambda entry: _number(entry["value"])))
        if len(group) > 1:
            costs = {precision: f"{entry['value'] / full - 1:+.1%}" for precision, entry in group.items()}
            yield _Column(f"cost\nvs {best}", {**costs, best: ""})
    for group in _grouped(entries, "divergence"):
        first = next(iter(group.values()))
        reference, on = first["reference"], _apart_of(entries, group)
        yield _Column(f"KL\nvs {reference}{on}", _cells(group, lambda entry: f"{entry['kl']:.4f}"))
        yield _Column(
            f"same token\nas {reference}{on}", _cells(group, lambda entry: f"{entry['agreement']:.1%}")
        )


def _tables_by_kv(entries: list[Entry]) -> Iterator[Table]:
    """What keys and values were kept in downwards; weights' precisions across, with what packing costs."""
    from otaro.evaluate.quality import identity
    from otaro.evaluate.records import PRECISION_NAMES

    tables: dict[tuple[Any, ...], dict[str, dict[str, dict[str, Entry]]]] = {}
    for entry in entries:
        free = {"precision": None, "kv": None, "reference": None, "stride": None, "kind": "perplexity"}
        of_table = tables.setdefault(identity({**entry, **free}), {})
        of_table.setdefault(entry["precision"], {}).setdefault(entry["kv"], {})[entry["kind"]] = entry
    for by_precision in tables.values():
        some = [
            entry for by_kv in by_precision.values() for kinds in by_kv.values() for entry in kinds.values()
        ]
        first, apart = some[0], _apart_of(entries, {"": some[0]}).replace("\n", ", ")
        title = (
            f"Quality by what keys and values are kept in, {first['text']}, window {first['window']}{apart}"
        )
        headings = ["kv"]
        rows: dict[str, list[str]] = {
            kv: [] for kv in ("float16", *PRECISION_NAMES) if any(kv == e["kv"] for e in some)
        }
        for precision, by_kv in by_precision.items():
            plain = by_kv.get("float16", {}).get("perplexity")
            has_kl = any("divergence" in kinds for kinds in by_kv.values())
            headings += [
                f"perplexity\nat {precision}",
                "cost",
                *(["KL", "same token"] if has_kl else []),
                "tokens/s",
            ]
            for kv, cells in rows.items():
                ppl, moved = by_kv.get(kv, {}).get("perplexity"), by_kv.get(kv, {}).get("divergence")
                cells.append(_number(ppl["value"]) if ppl else "-")
                cells.append(
                    f"{ppl['value'] / plain['value'] - 1:+.1%}" if ppl and plain and kv != "float16" else ""
                )
                if has_kl:
                    cells += [f"{moved['kl']:.4f}", f"{moved['agreement']:.1%}"] if moved else ["", ""]
                cells.append(f"{ppl['tokens_per_second']:,.0f}" if ppl else "-")
        table = console.table(console.escape(title), *headings)
        for kv, cells in rows.items():
            table.add_row(kv, *cells)
        yield table


def _speed_columns(entries: list[Entry]) -> Iterator[_Column]:
    for group in _grouped(entries, "perplexity"):
        on = _apart_of(entries, group)
        yield _Column(f"tokens/s{on}", _cells(group, lambda entry: f"{entry['tokens_per_second']:,.0f}"))


def _task_columns(entries: list[Entry]) -> Iterator[_Column]:
    from otaro.evaluate.quality import averages, coding_of

    for group in _grouped([*entries, *averages(entries)], "task"):
        last = list(group.values())[-1]  # the first may be full precision, which has no coding
        first = f"\nfirst {last['limit']}" if last["limit"] is not None else ""
        heading = f"{last['task']}\n{last['metric']}{first}{_apart(entries, last['device'], coding_of(last))}"
        yield _Column(
            heading, _cells(group, lambda entry: _score(entry["value"], entry["stderr"], entry["metric"]))
        )


def _legend(entries: list[Entry]) -> Iterator[str]:
    """What a reader of the numbers should know, each thing once."""
    for text, tokens, window in dict.fromkeys(
        (e["text"], e["tokens"], e["window"]) for e in entries if "text" in e
    ):
        short = (
            f", fewer than the window of {window}: measured as one short window" if tokens < window else ""
        )
        yield f"{text}: {tokens:,} tokens{short}"
    if any(entry["kind"] == "perplexity" for entry in entries):
        yield "perplexity: text, and window/stride in tokens"
    if any(entry.get("bos") for entry in entries):
        yield (
            "every window begins with the tokenizer's beginning-of-text token (BOS), which takes one position"
        )
    if any(entry.get("kv") for entry in entries):
        yield (
            "kv: what keys and values are kept in, by the decoder; "
            "without it transformers keeps them as the model computes"
        )
    for reference in dict.fromkeys(e["reference_model"] for e in entries if "reference_model" in e):
        yield f"fp is the reference's, the checkpoint {reference[:12]}"
    if any(entry["kind"] == "divergence" for entry in entries):
        yield "KL in nats per token; same token: how often the likeliest next token agrees"
    if any(entry["kind"] == "task" for entry in entries):
        yield "tasks: zero-shot, ± standard error, accuracies in percent"
    for task, count in dict.fromkeys((e["task"], e["truncated"]) for e in entries if e.get("truncated")):
        yield f"{task}: {count} requests did not fit the model's context and lost their beginning"


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 10_000 else f"{value:.3g}"


def _score(value: float, stderr: float | None, metric: str) -> str:
    from otaro.evaluate.quality import is_share

    scale = 100 if is_share(metric) else 1
    return f"{scale * value:.1f}" + (f" ±{scale * stderr:.1f}" if stderr is not None else "")
