"""The page a report is written on: text made safe, tables, figures, and everything joined into one HTML file.

The page is complete in itself and fetches nothing: style sheet, script and the charting library (Vega, from vl-convert) are
embedded, and a content security policy names the hashes of exactly these, so that nothing else on the page can run, whatever
stands in the files it was made from. The policy forbids `eval` too: Vega's interpreter evaluates the charts' expressions.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from otaro.evaluate.charts import CONFIG, altair

_STACKED_FROM = 7  # columns, from which on notes stand below their figures


def escape(text: object) -> str:
    """Text from anywhere, safe in HTML and in its attributes."""
    return html.escape(_encodable(str(text)), quote=True)


@dataclass(frozen=True)
class Cell:
    """A cell of a table."""

    text: str
    value: float | None = None
    """What a number is sorted by."""
    note: str = ""
    """A smaller figure beside it."""
    is_number: bool = True


def word(text: str) -> Cell:
    """A cell that is not a number."""
    return Cell(text, is_number=False)


@dataclass
class Page:
    """Collects the charts and the commands that its parts refer to."""

    charts: dict[str, dict[str, Any]] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)

    def made_by(self, commands: Iterable[str]) -> str:
        """References to commands, by their numbers in the list at the end; neighbours together, `4–9`."""
        wanted = dict.fromkeys(commands)
        self.commands += [command for command in wanted if command not in self.commands]
        spans: list[list[int]] = []
        for number in sorted(self.commands.index(command) + 1 for command in wanted):
            if spans and spans[-1][-1] == number - 1:
                spans[-1].append(number)
            else:
                spans.append([number])
        return f"<span class=made>{' '.join(map(self._reference, spans))}</span>" if spans else ""

    def _reference(self, span: Sequence[int]) -> str:
        first, last = span[0], span[-1]
        several = first != last
        told = "\n".join(self.commands[number - 1] for number in span)
        spoken = f"made by commands {first} to {last}" if several else f"made by command {first}"
        text = f"{first}–{last}" if several else str(first)
        return f'<a href="#command-{first}" title="{escape(told)}" aria-label="{spoken}">{text}</a>'

    def figure(
        self, title: str, note: str, commands: Iterable[str], chart: dict[str, Any], on: str = "", details: str = ""
    ) -> str:
        """A chart with its caption; title and `on` also describe it to those who do not see it. `details` are under a fold."""
        key = f"chart-{len(self.charts) + 1}"
        self.charts[key] = {**chart, "description": f"{title}, {on}" if on else title}
        told = f"On {on}. {note}" if on else note
        caption = f"<strong>{escape(title)}</strong> {escape(told)} {self.made_by(commands)}{_fold(details)}"
        return f'<figure><figcaption>{caption}</figcaption><div class=chart id="{key}"></div></figure>'

    def table(
        self, caption: str, headings: Sequence[str], rows: Sequence[Sequence[Cell]], commands: Iterable[str], note: str = ""
    ) -> str:
        """A table that sorts by a click on a heading."""
        columns = range(len(headings))
        numeric = [any(row[i].is_number for row in rows) for i in columns]
        noted = [any(row[i].note for row in rows) for i in columns]
        head = "".join(
            f"<th scope=col aria-sort=none{' class=number' * is_number}><button type=button>{escape(heading)}</button></th>"
            for heading, is_number in zip(headings, numeric, strict=True)
        )
        body = "".join(f"<tr>{''.join(_cell(row[i], i == 0, noted[i]) for i in columns)}</tr>" for row in rows)
        stacked = " stacked" * (len(headings) >= _STACKED_FROM)
        told = f"<caption><div><strong>{escape(caption)}</strong> {escape(note)} {self.made_by(commands)}</div></caption>"
        return (
            f'<div class=scroll><table class="sortable{stacked}">{told}'
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        )

    def list_of_commands(self) -> str:
        """What the references refer to."""
        items = (f'<li id="command-{number}"><code>{escape(one)}</code></li>' for number, one in enumerate(self.commands, 1))
        return f"<ol class=commands>{''.join(items)}</ol>"

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
                f'<section id="{key}" aria-labelledby="{key}-h"><h2 id="{key}-h">{heading}</h2>{content}</section>'
                for key, heading, content in sections
            ),
            "charts": _embedded_json({"config": CONFIG, "figures": self.charts}),
            "library": library,
            "script": script,
        }
        # In one pass: what is put in is not looked at again.
        return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _asset("report.html"))


def _fold(details: str) -> str:
    """What a machine compares, and people seldom read."""
    return f" <details><summary>exactly</summary><code>{escape(details)}</code></details>" if details else ""


def _cell(cell: Cell, is_head: bool, noted: bool) -> str:
    """In a column with notes every number leaves room for one, so that numbers stay aligned."""
    tag, scope = ("th", " scope=row") if is_head else ("td", "")
    if not cell.is_number:
        return f"<{tag}{scope}>{escape(cell.text)}</{tag}>"
    value = "" if cell.value is None or not math.isfinite(cell.value) else f' data-value="{float(cell.value)!r}"'
    note = f" <small>{escape(cell.note)}</small>" if noted else ""
    return f"<{tag}{scope} class=number{value}>{escape(cell.text)}{note}</{tag}>"


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
    return bundle.replace("</script", "<\\/script").replace("<!--", "<\\!--")  # the same in strings, and no end to the element
