"""`otaro`: the table of commands."""

from __future__ import annotations

import os
import sys
import traceback
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
from otaro.tune import processes

app = console.App(
    help="One model file, every precision: pack a model once, run it from E5M8 (9 bits a weight) down to E5M3 (4 bits).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("pack")(pack.pack)
app.command("fetch")(fetch.fetch)
app.command("inspect")(inspect.inspect)
app.command("verify")(verify.verify)
app.command("describe")(describe.describe)
app.command("fit")(fit.fit)
app.command("export")(export.export)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("serve")(serve.serve)
app.command("web")(web.web)
app.command("bench")(bench.bench)
app.command("tune")(tune.tune)
app.command("eval")(eval_command.evaluate)
app.add_typer(analyze.app, name="analyze")
app.command("report")(report.report)
app.command("demo")(demo.demo)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"otaro {otaro.__version__}")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options before the command."""
    context.with_resource(console.warnings_in_a_line())
    if processes.size() > 1 and context.invoked_subcommand != "tune":
        command = f"otaro {context.invoked_subcommand}"
        raise otaro.OtaroError(f"`{command}` is one process's work; start it without torchrun or accelerate launch")


def wait_asleep() -> None:
    """Have OpenMP's threads wait for each other asleep; libraries read this when torch is first imported.

    Of themselves they spin. Where another process has a core, the thread that all wait for is not running, and they spin
    its time away: a `pack` of 2 s was seen to take 52 (it has threads of its own since). benchmarks/bench_busy.py measures
    it. Whoever has set one of these variables has chosen.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & os.environ.keys():
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


def main() -> None:
    """Run the command line; a refusal becomes one clear line and exit status 1, also where several processes meet it."""
    processes.mute_others()
    wait_asleep()
    try:
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
