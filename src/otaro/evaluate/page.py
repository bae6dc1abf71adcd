"""The page a report is written on: text made safe, tables, figures, and everything joined into one HTML file.

The page is complete in itself and fetches nothing: style sheet, script and the charting library (Vega, from
vl-convert) are embedded, and a content security policy names the hashes of exactly these, so that nothing
else on the page can run, whatever stands in the files it was made from. The policy forbids `eval` too: Vega's
interpreter evaluates the charts' expressions.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import resources
from typing import Any

from otaro.evaluate.charts import CONFIG, Spec, altair

_MEASURED = re.compile(r"(otaro eval .*? --precision )(E5M\d|fp)( .*)?")
_STACKED_FROM = 7  # columns, from which on notes stand below their figures

Cell = str | tuple[str, str]
"""What stands in a cell of a table, perhaps with a smaller figure beside it."""
Rows = Iterable[Sequence[Cell]]


def escape(text: object) -> str:
    """Text from anywhere, safe in HTML and in its attributes."""
    return html.escape(_encodable(str(text)), quote=True)


def made_by(commands: Iterable[str], digest: str = "") -> str:
    """A fold with the commands that made something, and what a machine knows its data by."""
    lines = [*_joined(commands), *([digest] if digest else [])]
    if not lines:
        return ""
    items = "".join(f"<li><code>{escape(line)}</code></li>" for line in lines)
    return f"<details><summary>how it was made</summary><ul>{items}</ul></details>"


def _joined(commands: Iterable[str]) -> list[str]:
    """The commands, one in place of those that differ in their precision alone: it makes what they made."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for command in dict.fromkeys(commands):
        found = _MEASURED.fullmatch(command)
        before, name, after = found.groups("") if found else (command, "", "")
        alike.setdefault((before, after), []).append(name)
    return [",".join(names).join(around) for around, names in alike.items()]


def table(
    caption: str, headings: Sequence[str], rows: Rows, commands: Iterable[str], note: str = "", words: int = 1
) -> str:
    """A table whose first columns, as many as `words`, are words, and the others numbers."""
    numbered = enumerate(headings)
    head = "".join(f"<th scope=col{_number(i, words)}>{escape(heading)}</th>" for i, heading in numbered)
    body = "".join(f"<tr>{''.join(_cell(cell, i, words) for i, cell in enumerate(row))}</tr>" for row in rows)
    stacked = " class=stacked" * (len(headings) >= _STACKED_FROM)
    parts = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    whole = f'<div class=scroll><table{stacked} aria-label="{escape(caption)}">{parts}</table></div>'
    return _captioned(caption, note, made_by(commands), whole)


def _captioned(title: str, note: str, made: str, content: str) -> str:
    caption = f"<strong>{escape(title)}</strong> {escape(note)} {made}"
    return f"<figure><figcaption>{caption}</figcaption>{content}</figure>"


def _cell(cell: Cell, column: int, words: int) -> str:
    tag, scope = ("th", " scope=row") if column == 0 else ("td", "")
    text, note = (cell, "") if isinstance(cell, str) else cell
    beside = f" <small>{escape(note)}</small>" if not isinstance(cell, str) else ""
    return f"<{tag}{scope}{_number(column, words)}>{escape(text)}{beside}</{tag}>"


def _number(column: int, words: int) -> str:
    return " class=number" if column >= words else ""


class Page:
    """Collects the charts of its figures."""

    def __init__(self) -> None:
        self.charts: dict[str, Spec] = {}

    def figure(
        self, title: str, note: str, commands: Iterable[str], chart: Spec, on: str = "", digest: str = ""
    ) -> str:
        """A chart with its caption; title and `on` also describe it to those who do not see it."""
        key = f"chart-{len(self.charts) + 1}"
        self.charts[key] = {**chart, "description": f"{title}, {on}" if on else title}
        told = f"On {on}. {note}" if on else note
        return _captioned(title, told, made_by(commands, digest), f'<div class=chart id="{key}"></div>')

    def render(self, title: str, opening: str, sections: Sequence[tuple[str, str, str]]) -> str:
        """The whole file; sections are (name in the address, heading, content)."""
        style, script, library = _asset("report.css"), _asset("report.js"), _library()
        policy = (
            f"default-src 'none'; script-src {_hash(library)} {_hash(script)}; style-src {_hash(style)}; "
            "base-uri 'none'; form-action 'none'"
        )
        parts = {
            "policy": policy,
            "style": style,
            "title": escape(title),
            "nav": "".join(f'<a href="#{key}">{heading}</a>' for key, heading, _ in sections),
            "opening": opening,
            "sections": "".join(
                f'<section id="{key}" aria-labelledby="{key}-h">'
                f'<h2 id="{key}-h">{heading}</h2>{content}</section>'
                for key, heading, content in sections
            ),
            "charts": _embedded_json({"config": CONFIG, "figures": self.charts}),
            "library": library,
            "script": script,
        }
        # In one pass: what is put in is not looked at again.
        return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _asset("report.html"))


def _embedded_json(value: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    text = _encodable(json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":")))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _encodable(text: str) -> str:
    """The text without halves of surrogate pairs, which JSON can hold and UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _hash(text: str) -> str:
    """How a content security policy names a script or a style sheet."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@cache
def _asset(name: str) -> str:
    return resources.files("otaro.evaluate").joinpath("assets", name).read_text(encoding="utf-8")


@cache
def _library() -> str:
    """Vega, Vega-Lite and vega-embed in one script."""
    altair()  # refuses where it is missing
    import vl_convert

    bundle = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    # the same in strings, and no end to the element
    return bundle.replace("</script", "<\\/script").replace("<!--", "<\\!--")
