"""`otaro bench DIR`: how fast each precision runs, what bounds it, how llama.cpp does on the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from otaro.cli import console
from otaro.cli.generate import DeviceOption, DirectoryArgument, check_draft
from otaro.cli.help import page

if TYPE_CHECKING:
    from rich.table import Table

    from otaro.evaluate.drafts import Drafts
    from otaro.evaluate.parallel import Parallel
    from otaro.evaluate.speed import Bench

LLAMA = "llama.cpp"


@page(
    {
        "What is timed": "prompt_tokens tokens context rounds threads kv",
        "Other measurements": "parallel draft text",
        "Comparisons": "transformers against",
    },
    examples="""
    otaro bench DIR
    otaro bench DIR --transformers --against llama.cpp
    otaro bench DIR --parallel 1,4,16 -p E5M4   # several sequences at once
    """,
)
def bench(
    directory: DirectoryArgument,
    device: DeviceOption = "cpu",
    precision: Annotated[
        str | None,
        console.precision_option(
            "Some of E5M8,...,E5M3, or fits (fit:90MB); by default all that are there.", "--precision", "-p"
        ),
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens read together: prefill.", min=1)] = 500,
    tokens: Annotated[
        int | None,
        typer.Option(help="Tokens read one by one: decode; by default 64, with --parallel 32.", min=1),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            help="Tokens in the cache when decoding starts; by default 256, with --parallel 64.", min=0
        ),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            help="Rounds that count, after one that warms up; by default 5, with --parallel 3.", min=1
        ),
    ] = None,
    parallel: Annotated[
        str | None,
        typer.Option(
            help="Time so many sequences at once instead, by the engine: 1,2,4,8,16", metavar="N,..."
        ),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(
            help="Time texts with drafts instead, and say whether they pay: E5M3,prompt,prompt+E5M3",
            metavar="DRAFT,...",
        ),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(help="Texts for --draft, as --text of `otaro eval`; by default Python's documentation."),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="Threads to compute with; by default as many as torch takes.", min=1)
    ] = None,
    kv: Annotated[
        str | None,
        console.precision_option("Keep keys and values at E5M8 to E5M3 instead of float16."),
    ] = None,
    transformers: Annotated[
        bool,
        typer.Option(
            "--transformers",
            help="Also time transformers on the decoded weights: in float32, on a GPU in float16.",
        ),
    ] = False,
    against: Annotated[
        str | None, typer.Option(help="llama.cpp: also time it on GGUF files of the same weights.")
    ] = None,
    revision: console.RevisionOption = None,
    token: console.TokenOption = None,
    cache_dir: console.CacheDirOption = None,
    json: console.JsonOption = False,
) -> None:
    """Time prefill and decode at each precision, in turns; says how much of the memory's bandwidth that is.

    Every contender reads the same tokens on the same number of threads, or the same GPU. Figures are medians
    over the rounds.
    """
    import otaro
    from otaro.builtin import heldout_text
    from otaro.cli.eval import open_text
    from otaro.evaluate import drafts as drafting
    from otaro.evaluate import parallel as together
    from otaro.evaluate import speed
    from otaro.file.hub import Hub

    if against not in (None, LLAMA):
        raise console.Misuse(f"--against {against}: {LLAMA} is what there is to compare with")
    if parallel is not None and transformers:
        raise console.Misuse("--transformers reads one sequence, and --parallel several: give either")
    if text is not None and draft is None:
        raise console.Misuse("--text is for --draft, which is not given")
    if draft is not None and (parallel or transformers or against):
        raise console.Misuse(
            "--draft is timed beside the model alone: leave out --parallel, --transformers and --against"
        )
    chosen = None if precision is None else [name.strip() for name in precision.split(",")]
    if draft is not None and chosen is not None and len(chosen) > 1:
        raise console.Misuse("--draft serves one --precision at a time")
    console.check_precisions("--precision", precision, *(chosen or ()), fits=True)
    console.check_precisions("--kv", kv)
    for one in () if draft is None else draft.split(","):
        check_draft(one)
    counts = None if parallel is None else _counts(parallel)
    console.quiet_transformers()
    ours = {
        "prompt_tokens": prompt_tokens,
        "tokens": tokens,
        "context": context,
        "rounds": rounds,
        "threads": threads,
    }
    given: dict[str, Any] = {name: value for name, value in ours.items() if value is not None}
    given["kv"] = None if kv is None else otaro.Precision(kv)
    result: Bench | Parallel | Drafts
    with console.named_as_options(), console.progress_bar("timing") as progress:
        options: dict[str, Any] = {
            "device": device,
            "hub": Hub(revision, token, cache_dir),
            "progress": progress,
        }
        if draft is not None:
            given.pop("prompt_tokens")
            passages = heldout_text() if text is None else open_text(text).content
            alone, drafts = chosen[0] if chosen else None, draft.split(",")
            result = drafting.bench(directory, drafts, drafting.Settings(**given), passages, alone, **options)
        elif counts is not None:
            settings = speed.Settings(**{"tokens": 32, "context": 64, "rounds": 3, **given})
            result = together.bench(
                directory, counts, settings, chosen, with_llama=against == LLAMA, **options
            )
        else:
            settings = speed.Settings(**given)
            result = speed.bench(
                directory,
                settings,
                chosen,
                with_transformers=transformers,
                with_llama=against == LLAMA,
                **options,
            )
    if json:
        console.print_json({**result.to_dict(), "versions": console.versions()})
    elif isinstance(result, drafting.Drafts):
        show_drafts(result)
    elif isinstance(result, together.Parallel):
        show_parallel(result)
    else:
        show(result)


def _counts(parallel: str) -> list[int]:
    parts = [part.strip() for part in parallel.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise typer.BadParameter("must be of the form 1,2,4,8", param_hint=f"--parallel {parallel}")
    counts = [int(part) for part in parts]
    if not all(counts) or len(set(counts)) < len(counts):
        told = "give numbers of sequences, such as 1,2,4,8, none twice"
        raise typer.BadParameter(told, param_hint=f"--parallel {parallel}")
    return counts


def show_parallel(result: Parallel) -> None:
    """Print what several sequences make together."""
    settings = result.settings
    _say(
        *_place(result),
        f"decode of {settings.tokens} after {settings.context}, keys and values in "
        f"{settings.kv or 'float16'}; "
        f"median of {_many(settings.rounds, 'round')}, contenders in turns",
    )
    table = console.table(
        "Several sequences at once",
        "precision",
        "sequences",
        "tokens/s\nin total",
        "of each",
        "times\none",
        simple=True,
    )
    for row, after in zip(result.rows, [*result.rows[1:], None], strict=True):
        last = after is None or after.what != row.what
        gain = "-" if row.gain is None else f"{row.gain:.2f}x"
        table.add_row(row.what, str(row.sequences), _rate(row.total), _rate(row.each), gain, end_section=last)
    console.out.print(table)


def show_drafts(result: Drafts) -> None:
    """Print what drafts gain."""
    settings = result.settings
    _say(
        *_place(result),
        f"{result.precision}, {settings.tokens} tokens after each of {settings.texts} passages of "
        f"{settings.context}, keys and "
        f"values in {settings.kv or 'float16'}; the shortest of {_many(settings.rounds, 'round')}, in turns",
    )
    headings = ["tokens/s", "without", "times", "tokens\na pass", "accepted at position\n1, 2, ..."]
    table = console.table("With a draft, and without", "draft", "text", *headings, words=2, simple=True)
    for row in result.rows:
        accepted = " ".join(f"{one:.0%}" for one in row.acceptance)
        figures = (
            _rate(row.rate),
            _rate(row.plain),
            f"[bold]{row.gain:.2f}x[/]",
            f"{row.tokens_per_pass:.2f}",
        )
        table.add_row(row.draft, row.texts, *figures, accepted)
    console.out.print(table)
    _say(*(row.verdict for row in result.rows))


def show(result: Bench) -> None:
    """Print what was measured."""
    _say(*_head(result))
    console.out.print(_speeds(result))
    _say(f"[dim]a plain {_plain(result)} of memory runs at {result.read_bandwidth / 1e9:.1f} GB/s[/]")
    console.out.print(_memory(result))
    if result.graph_bytes is not None:
        _say(
            "[dim]graphs captured for all precisions together take another "
            f"{console.size(result.graph_bytes)}[/]"
        )
    if result.others:
        console.out.print(_others(result))
        if any(LLAMA in other.name for other in result.others):
            _say("[dim]llama.cpp's embedding and head are of the same type as its matrices, as ours are[/]")


def _place(result: Bench | Parallel | Drafts) -> Iterator[str]:
    """Where it was measured."""
    kernels = f"{result.kernels} ({console.escape(result.kernels_reason)})"
    yield f"[bold]{console.escape(result.model)}[/]"
    threads = "" if _on_gpu(result) else f", {_many(result.threads, 'thread')}"
    yield f"{console.escape(result.machine)}{threads}; kernels {kernels}"
    yield ", ".join(f"{name} {version}" for name, version in console.versions().items())


def _head(result: Bench) -> Iterator[str]:
    """Where and how it was measured."""
    settings = result.settings
    yield from _place(result)
    yield f"{console.escape(result.path)}, keys and values in {result.kv_type}"
    if (asked := result.cut_from) is not None:
        yield (
            f"[yellow]cut to end within minutes[/]: asked for were {_many(asked.prompt_tokens, 'token')} of "
            "prefill, decode of "
            f"{asked.tokens} after {asked.context}, {_many(asked.rounds, 'round')}; fewer precisions (-p) "
            "leave time for more"
        )
    yield (
        f"prefill of {_many(settings.prompt_tokens, 'token')}; decode of {settings.tokens} after "
        f"{settings.context}; "
        f"median of {_many(settings.rounds, 'round')}, contenders in turns"
    )


def _speeds(result: Bench) -> Table:
    headings = [
        "prefill\ntokens/s",
        "decode\ntokens/s",
        "read per\ntoken",
        "GB/s",
        f"of plain\n{_plain(result)}",
    ]
    table = console.table("Speed", "precision", *headings, simple=True)
    for row in result.precisions:
        read = (
            console.size(row.weight_bytes + row.kv_bytes),
            f"{row.bandwidth / 1e9:.1f}",
            f"{row.bandwidth_share:.0%}",
        )
        table.add_row(row.precision, _rate(row.prefill), _rate(row.decode), *read)
    return table


def _memory(result: Bench) -> Table:
    memory = "allocated" if _on_gpu(result) else "resident"
    headings = ["shards", "KV cache", memory, "of shards\nand KV", "switch"]
    table = console.table("Memory, and switching to it", "precision", *headings, simple=True)
    for row in result.precisions:
        held = row.resident_bytes
        table.add_row(
            row.precision,
            console.size(row.file_bytes),
            console.size(row.kv_cache_bytes),
            "-" if held is None else console.size(held),
            "-" if held is None else f"{held / (row.file_bytes + row.kv_cache_bytes):.2f}x",
            "-" if row.switch is None else f"{row.switch * 1e6:.0f} us",
        )
    return table


def _on_gpu(result: Bench | Parallel | Drafts) -> bool:
    return result.device == "cuda"


def _plain(result: Bench) -> str:
    return "copy" if _on_gpu(result) else "read"


def _others(result: Bench) -> Table:
    ours = {row.precision: row for row in result.precisions}
    theirs = {other.name: other for other in result.others}
    headings = ["prefill\ntokens/s", "theirs", "ratio", "decode\ntokens/s", "theirs", "ratio"]
    table = console.table(
        "Against others, on the same weights", "precision", "against", *headings, words=2, simple=True
    )
    for ratio in result.ratios:
        mine, other = ours[ratio.precision], theirs[ratio.against]
        prefill = (_rate(mine.prefill), _rate(other.prefill), f"[bold]{ratio.prefill:.2f}x[/]")
        decode = (_rate(mine.decode), _rate(other.decode), f"[bold]{ratio.decode:.2f}x[/]")
        table.add_row(ratio.precision, ratio.against, *prefill, *decode)
    return table


def _say(*lines: str) -> None:
    for line in lines:
        console.out.print(line, highlight=False)


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
