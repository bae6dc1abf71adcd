"""The pages of `--help`: what a command does, the options most people give, the others in panels, examples.

A command says beside its function which options go together, and how it is called:

    @page({"Sampling": "temperature top_p"}, examples="otaro generate DIR --prompt 'Once upon a time'")

Options that no panel names come first. Those of every command have a panel of their own: how to reach the
Hub, and output.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console, Group
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from typer._click.exceptions import (
    BadOptionUsage,
    MissingParameter,
    NoArgsIsHelpError,
    NoSuchOption,
    UsageError,
)
from typer.core import TyperCommand, TyperGroup

from otaro.cli.console import Misuse, err, escape

WIDEST = 110
LEFT = 27  # columns at most for an option and its value, which go on in the next line
OF_ALL = {"Hub": "revision token cache_dir", "Output": "json help"}
VALUES = {"int": "N", "float": "X", "path": "PATH", "str": "TEXT"}


def page(panels: Mapping[str, str] | None = None, *, examples: str) -> Callable[[Any], Any]:
    """Panels by title, with the names of their options; a line for every example, `# why` behind it."""

    def describe(command: Any) -> Any:
        command.panels, command.examples = (
            panels or {},
            [line.strip() for line in examples.strip().splitlines()],
        )
        return command

    return describe


class App(typer.Typer):
    """Commands with such pages."""

    def __init__(self, **options: Any) -> None:
        super().__init__(cls=_Group, rich_markup_mode=None, **options)  # which lets _Usage show itself

    def command(self, name: str | None = None, **options: Any) -> Callable[[Any], Any]:
        """As typer's."""
        return super().command(name, cls=_Command, **options)


class _Usage(UsageError):
    """What is wrong with a command line, told as all refusals are: option, value, what it must be."""

    def show(self, file: Any = None) -> None:
        if self.ctx is not None:
            err.print("Usage: " + escape(_usage(self.ctx.command, self.ctx)), highlight=False)
        err.print(f"[bold red]error:[/] {escape(self.message)}", highlight=False)
        if self.ctx is not None:
            err.print(f"`{self.ctx.command_path} --help` lists the options", highlight=False)


@contextmanager
def _told_alike(ctx: Any) -> Iterator[None]:
    try:
        yield
    except (_Usage, NoArgsIsHelpError):
        raise
    except UsageError as error:
        raise _Usage(_complaint(error), error.ctx or ctx) from error


def _complaint(error: Any) -> str:
    """`--steps 0: must be at least 1`, whoever found it: click, typer or pydantic."""
    if isinstance(error, Misuse):
        return error.message
    if isinstance(error, NoSuchOption):
        near = f"; did you mean {' or '.join(error.possibilities)}?" if error.possibilities else ""
        return f"there is no option {error.option_name}{near}"
    if isinstance(error, MissingParameter) and error.param is not None:
        option = error.param.param_type_name == "option"
        what = f"{error.param.opts[-1]} {_value(error.param, error.ctx)}" if option else _metavar(error.param)
        return f"{what} is missing"
    if isinstance(error, BadOptionUsage):
        return f"{error.option_name}: a value must follow"
    if not isinstance(error, typer.BadParameter):
        told = str(error.message).removesuffix(".").replace(". Did you mean", "; did you mean")
        return told[:1].lower() + told[1:]
    if error.param is None or error.param_hint is not None:
        return f"{error.param_hint}: {error.message}"
    option = error.param.param_type_name == "option"
    name = max(error.param.opts, key=len) if option else _metavar(error.param)
    found: list[dict[str, Any]] = getattr(error.__cause__, "errors", list)()
    if not found:
        return f"{name}: {error.message}"
    given, bound = str(found[0]["input"]), found[0].get("ctx", {})
    words = {
        "greater_than_equal": f"must be at least {_shortest(bound.get('ge', 0))}",
        "less_than_equal": f"must be at most {_shortest(bound.get('le', 0))}",
        "int_parsing": "must be a whole number",
        "float_parsing": "must be a number",
    }
    _, choices, listed = error.message.partition(" is not one of ")
    told = words.get(found[0]["type"], error.message)
    told = f"choose from {listed.removesuffix('.').replace(chr(39), '')}" if choices else told
    return f"{name} {given if given.isprintable() else ascii(given)}: {told}"


def _shortest(bound: float) -> str:
    return str(int(bound) if bound == int(bound) else bound)


def _metavar(argument: Any) -> str:
    return str(argument.display_name_raw)


class _Command(TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with _told_alike(ctx):
            return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _console().print(Group(*_opening(self, ctx), *_panels(self, ctx), *_examples(self)))


class _Group(TyperGroup):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with _told_alike(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:  # what commands themselves refuse, too
        with _told_alike(ctx):
            return super().invoke(ctx)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        found: list[tuple[str, Any]] = [(name, self.commands[name]) for name in self.list_commands(ctx)]
        titles = list(dict.fromkeys(command.rich_help_panel or "Commands" for _, command in found))
        panels = {
            title: [
                (Text(name, "bold cyan"), Text(_in_short(command.help or "")))
                for name, command in found
                if (command.rich_help_panel or "Commands") == title
            ]
            for title in titles
        }
        _console().print(Group(*_opening(self, ctx), *_drawn(panels), *_panels(self, ctx), *_examples(self)))


def _console() -> Console:
    found = Console(emoji=False, highlight=False)
    found.width = min(found.width, WIDEST)
    return found


def _usage(command: Any, ctx: Any) -> str:
    """The command with what must be given, for the page of --help and where a line is refused."""
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    words = [one.display_name_raw if one.required else f"[{one.display_name_raw}]" for one in arguments]
    words += [
        f"{one.opts[-1]} {_value(one, ctx)}"
        for one in command.params
        if one.required and one not in arguments
    ]
    words += ["COMMAND"] if hasattr(command, "commands") else []
    return " ".join([ctx.command_path, *words, "[OPTIONS]"])


def _opening(command: Any, ctx: Any) -> Iterator[Any]:
    yield Text.assemble(("Usage: ", "bold"), _usage(command, ctx))
    for paragraph in (command.help or "").strip().split("\n\n"):
        yield Padding(Text(" ".join(paragraph.split())), (1, 0, 0, 0))
    yield Text()


def _panels(command: Any, ctx: Any) -> Iterator[Any]:
    """Arguments and unnamed options, then the panels in their order; those of all commands last."""
    asked = getattr(command.callback, "panels", {})
    home = {
        name: title for panels in (OF_ALL, asked) for title, names in panels.items() for name in names.split()
    }
    titles = ["Arguments", "Options", *(title for title in asked if title not in OF_ALL), *OF_ALL]
    members: dict[str, list[Any]] = {title: [] for title in titles}
    for parameter in command.get_params(ctx):
        if not parameter.hidden:
            first = "Arguments" if parameter.param_type_name == "argument" else "Options"
            members[home.get(parameter.name, first)].append(parameter)
    rows = {
        title: [(_name(one, ctx), _told(one)) for one in found] for title, found in members.items() if found
    }
    yield from _drawn(rows)


def _drawn(panels: Mapping[str, Sequence[tuple[Text, Text]]]) -> Iterator[Panel]:
    left = min(LEFT, max(len(name) for rows in panels.values() for name, _ in rows))
    for title, rows in panels.items():
        table = Table.grid(padding=(0, 2, 0, 0), expand=True)
        table.add_column(width=left)
        table.add_column(ratio=1)
        for name, told in rows:
            table.add_row(name, told)
        yield Panel(table, title=title, title_align="left", border_style="dim")


def _name(parameter: Any, ctx: Any) -> Text:
    if parameter.param_type_name == "argument":
        return Text(parameter.display_name_raw, "bold cyan")
    names = sorted([*parameter.opts, *parameter.secondary_opts], key=lambda name: name.startswith("--"))
    value = "" if parameter.is_flag else _value(parameter, ctx)
    return Text.assemble((", ".join(names), "bold cyan"), (f" {value}" if value else "", "yellow"))


def _value(parameter: Any, ctx: Any) -> str:
    """What is to be typed behind an option."""
    kind = parameter.display_type(ctx)[1:-1].removesuffix(" range").removeprefix("list[").removesuffix("]")
    return str(parameter.metavar or VALUES.get(kind, kind))


def _told(parameter: Any) -> Text:
    """The help of a parameter, and its default."""
    told = Text(" ".join((parameter.help or "").split()))
    default = parameter.show_default if isinstance(parameter.show_default, str) else parameter.default
    is_option = parameter.param_type_name == "option"
    if parameter.required and is_option:
        told.append(" (required)", "red")
    elif default is not None and parameter.show_default and not (is_option and parameter.is_flag):
        told.append(f" [{f'{default:g}' if isinstance(default, float) else default}]", "dim")
    if parameter.envvar:
        told.append(f" [environment: {parameter.envvar}]", "dim")
    return told


def _examples(command: Any) -> Iterator[Any]:
    examples = getattr(command.callback, "examples", [])
    if examples:
        yield Text("\nExamples", "bold")
    for line in examples:
        words, _, why = line.partition("  # ")
        if why:  # above: behind it a narrow terminal would break it, and the rest look like a command
            yield Padding(Text(f"# {why}", "dim"), (0, 0, 0, 2), expand=False)
        yield Padding(Text(words.rstrip()), (0, 0, 0, 2), expand=False)


def _in_short(text: str) -> str:
    """The first clause."""
    return re.split(r"[.:;]\s|\.$", " ".join(text.split()))[0]
