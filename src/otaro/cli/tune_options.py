"""The flags of `otaro tune` that are fields of its configuration: declared from them, and made into them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, asdict, fields, replace
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer

from otaro.cli.console import check_precisions, complete_precisions
from otaro.cli.help import page
from otaro.idle import flag, idle
from otaro.sefp.precision import Precision
from otaro.tune.config import Around, ConfigError, Options, Training, recipe

_T = TypeVar("_T", Options, Training, Around)


def from_configuration(examples: str) -> Callable[[Any], Any]:
    """Let a command take every field as a flag, by its keyword arguments; None is a flag not given."""

    def declare(command: Any) -> Any:
        own = inspect.signature(command, eval_str=True)
        parameters = [one for one in own.parameters.values() if one.kind is not one.VAR_KEYWORD]
        panels: dict[str, str] = {}
        for kind in (Training, Around, Options):
            for field, hint in _fields(kind):
                parameters.append(_parameter(field, hint))
                title = field.metadata["panel"]
                panels[title] = f"{panels.get(title, '')} {field.name}"
        command.__signature__ = own.replace(parameters=parameters)
        return page(panels, examples=examples)(command)

    return declare


def chosen(start: _T, given: Mapping[str, Any]) -> _T:
    """The configuration with what was given in its place."""
    hints = {field.name: hint for field, hint in _fields(type(start))}
    return replace(
        start, **{name: _read(hints[name], name, value) for name, value in given.items() if name in hints}
    )


def refuse_idle(
    given: Mapping[str, Any], recipe: str | None, options: Options, training: Training, around: Around
) -> None:
    """Refuse what was given and would not be read; 0 asks for nothing, and gets it.

    `recipe` is None where none was given.
    """
    told = []
    beside = {"recipe": recipe if "method" in given else None}
    given = {**given, "recipe": recipe}
    for name, found in idle({**options.to_dict(), **asdict(training), **asdict(around), **beside}).items():
        if given.get(name):
            by = next((one for one in (*found.by, "method") if one != name and one in given), None)
            decides = f"--recipe {recipe or 'best'}" if by is None else _typed(by, given[by])
            told.append(f"{_typed(name, given[name])} has no effect with {decides}: {found.why}")
    if told:
        raise ConfigError(f"{'; '.join(told)}; leave {'it' if len(told) == 1 else 'them'} out")


def _typed(name: str, value: Any) -> str:
    """An option and its value, as they were given."""
    if value is True:
        return flag(name)
    return f"{flag(name)} {value:g}" if isinstance(value, float) else f"{flag(name)} {value}"


def paper_as_flags() -> str:
    """What `--recipe paper` changes."""
    options, training = recipe("paper")
    changed = [f"--method {options.method}"]
    for made, plain in zip((options, training), recipe("best", options.method), strict=True):
        for field, _ in _fields(type(made)):
            if (value := getattr(made, field.name)) != getattr(plain, field.name):
                changed.append(f"{_flag(field)} {_shown(value)}")
    return " ".join(changed)


def _fields(kind: type) -> Iterator[tuple[Field[Any], Any]]:
    """The fields, each with its type; of `X | None` X."""
    hints = get_type_hints(kind)
    for field in fields(kind):
        hint = hints[field.name]
        given = [one for one in get_args(hint) if one is not type(None)]
        yield field, given[0] if type(None) in get_args(hint) else hint


def _parameter(field: Field[Any], hint: Any) -> inspect.Parameter:
    several = get_origin(hint) is tuple  # is given as a list with commas
    of_precisions = several and get_args(hint)[0] is Precision
    default = next(
        (getattr(one, field.name) for one in recipe("best") if hasattr(one, field.name)), field.default
    )
    option = typer.Option(
        _flag(field),
        help=field.metadata["help"],
        # the recipe's method is not one that can be named; the weights' help tells both of theirs
        show_default=(field.name not in ("method", "weights") and _shown(default)) or False,
        autocompletion=complete_precisions if of_precisions else None,
        metavar=("PRECISION,..." if of_precisions else "X,...") if several else None,
    )
    kind = Annotated[(str if several else hint) | None, option]  # type: ignore[valid-type]
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)


def _flag(field: Field[Any]) -> str:
    return str(field.metadata["name"] or f"--{field.name.replace('_', '-')}")


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return ""
    if isinstance(value, tuple):
        return ",".join(map(_shown, value))
    return f"{value:.4g}".replace("e-0", "e-") if isinstance(value, float) else str(value)


def _read(hint: Any, name: str, value: Any) -> Any:
    if get_origin(hint) is not tuple:
        return value
    parts = value.split(",")
    if get_args(hint)[0] is Precision:
        check_precisions(f"--{name.replace('_', '-')}", value, *parts)
        return tuple(map(Precision, parts))
    try:
        return tuple(map(float, parts))
    except ValueError:
        raise ConfigError(f"--{name} {value}: give numbers separated by commas") from None
