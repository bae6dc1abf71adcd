"""`otaro`: the table of commands."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

import otaro
from otaro.cli import (
    analyze,
    bench,
    chat,
    console,
    demo,
    describe,
    doctor,
    export,
    fetch,
    fit,
    generate,
    inspect,
    pack,
    report,
    serve,
    tune,
    verify,
    web,
)
from otaro.cli import eval as eval_command
from otaro.cli.help import App, page
from otaro.tune import processes

app = App(
    help="One model file, every precision: pack a model once, run it from E5M8 (9 bits a weight) down to "
    "E5M3 (4 bits).",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
MAKE, RUN, MEASURE, START = "Commands to make a model", "To run one", "To measure one", "To begin with"
app.command("pack", rich_help_panel=MAKE)(pack.pack)
app.command("tune", rich_help_panel=MAKE)(tune.tune)
app.command("fit", rich_help_panel=MAKE)(fit.fit)
app.command("fetch", rich_help_panel=MAKE)(fetch.fetch)
app.command("export", rich_help_panel=MAKE)(export.export)
app.command("describe", rich_help_panel=MAKE)(describe.describe)
app.command("generate", rich_help_panel=RUN)(generate.generate)
app.command("chat", rich_help_panel=RUN)(chat.chat)
app.command("serve", rich_help_panel=RUN)(serve.serve)
app.command("web", rich_help_panel=RUN)(web.web)
app.command("eval", rich_help_panel=MEASURE)(eval_command.evaluate)
app.command("bench", rich_help_panel=MEASURE)(bench.bench)
app.command("inspect", rich_help_panel=MEASURE)(inspect.inspect)
app.command("verify", rich_help_panel=MEASURE)(verify.verify)
app.add_typer(analyze.app, name="analyze", rich_help_panel=MEASURE)
app.command("report", rich_help_panel=MEASURE)(report.report)
app.command("demo", rich_help_panel=START)(demo.demo)
app.command("doctor", rich_help_panel=START)(doctor.doctor)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"otaro {otaro.__version__}")
        raise typer.Exit


@app.callback()
@page(
    {"Options": "version install_completion show_completion help"},
    examples="""
    otaro demo                                              # the whole story in two minutes
    otaro pack HuggingFaceTB/SmolLM2-135M smol              # every precision in one directory
    otaro generate smol --prompt "Hello" --precision E5M4
    """,
)
def options(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Options before the command."""
    context.with_resource(console.warnings_in_a_line())
    if processes.size() > 1 and context.invoked_subcommand != "tune":
        command = f"otaro {context.invoked_subcommand}"
        raise otaro.OtaroError(
            f"`{command}` is one process's work; start it without torchrun or accelerate launch"
        )


def wait_asleep() -> None:
    """Have OpenMP's threads wait for each other asleep; libraries read this when torch is first imported.

    Of themselves they spin. Where another process has a core, the thread that all wait for is not running,
    and they spin its time away: a `pack` of 2 s was seen to take 52 (it has threads of its own since); more
    in benchmarks/results/epyc-2cores-busy.txt. Whoever has set one of these variables has chosen.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & os.environ.keys():
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


def check_words(words: Sequence[str]) -> None:
    """Refuse a command line that is not UTF-8, which tokenizers and files of weights could not take."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise otaro.OtaroError(f"{word!a} on the command line is not UTF-8") from None


def main() -> None:
    """Run the command line; a refusal becomes one clear line and exit status 1, of several processes too.

    What is wrong with the command line itself is told below its usage, and ends with 2.
    """
    processes.mute_others()
    wait_asleep()
    try:
        check_words(sys.argv[1:])
        app()
    except otaro.OtaroError as error:
        _end(str(error))
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        _end(f"{error.strerror or error}{where}")
    except Exception:
        if processes.size() == 1:
            raise
        if processes.may_speak():
            traceback.print_exc()
        _leave()
    except SystemExit as end:
        if end.code:
            processes.may_speak()  # the first has said why; the others give it the time to
            _leave(end.code if isinstance(end.code, int) else 1)
        raise


def _end(message: str) -> None:
    if processes.may_speak():
        console.err.print(f"[bold red]error:[/] {console.escape(message)}", soft_wrap=True)
    _leave()


def _leave(status: int = 1) -> None:
    """One of several processes at once, as it might wait for others that are gone."""
    if processes.size() > 1:
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
