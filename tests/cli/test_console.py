"""What the commands share: a long one without a terminal says a line a minute."""

import io
import itertools
import re

import pytest
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from otaro.cli import console


@pytest.fixture
def clock():
    class Clock:
        now = 1000.0

        def __call__(self):
            return self.now

    return Clock()


def test_without_a_terminal_a_line_a_minute_tells_how_far_it_is(clock, capsys):
    with console.progress_bar("packing (million weights)", 1_000_000, clock) as progress:
        for second in range(600):
            clock.now = 1000.0 + second
            progress("lm_head", second * 1_000_000, 1_200_000_000)
    said = capsys.readouterr()
    lines = said.err.splitlines()
    assert len(lines) == 9
    assert lines[0] == "packing (million weights): 60 of 1200 (lm_head), 1 min so far, about 19 min left"
    assert lines[-1] == "packing (million weights): 540 of 1200 (lm_head), 9 min so far, about 11 min left"
    assert said.out == ""


def test_words_between_colons_stay_words(capsys):
    for one in (console.out, console.err):
        one.print(console.escape("fit:abc: no budget"))
    assert [*capsys.readouterr()] == ["fit:abc: no budget\n"] * 2


def sentences(terminal, monkeypatch):
    """A sentence and a table as `otaro ... | cat` has them, or a terminal of 80 columns."""
    monkeypatch.delenv("COLUMNS", raising=False)
    written = io.StringIO()
    drawn = console._Console(
        file=written, force_terminal=terminal, color_system=None, width=80 if terminal else None
    )
    drawn.print("one word after another " * 10)
    table = Table(title="A title", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("heading")
    table.add_row("a long cell " * 10)
    drawn.print(table)
    return written.getvalue().splitlines()


def test_without_a_terminal_nothing_is_wrapped_and_no_line_ends_in_blanks(monkeypatch):
    sentence, title, *lines = sentences(False, monkeypatch)
    assert sentence == "one word after another " * 10
    assert title == "A title"
    assert ("  " + "a long cell " * 10).rstrip() in lines
    assert not any(line.endswith(" ") for line in lines)


def test_a_terminal_has_lines_of_its_width_that_end_with_a_word(monkeypatch):
    lines = sentences(True, monkeypatch)
    assert max(map(len, lines)) <= 80
    assert {line.split()[-1] for line in lines[:3]} <= {"one", "word", "after", "another"}


def test_tables_keep_to_columns_that_were_asked_for(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    table = Table()
    table.add_column("heading")
    table.add_row("a long cell " * 10)
    console.out.print(table)
    assert max(map(len, capsys.readouterr().out.splitlines())) == 60


def test_what_is_done_within_a_minute_says_nothing(clock, capsys):
    with console.progress_bar("verifying (MB)", 1, clock) as progress:
        for done in range(50):
            clock.now += 1
            progress("", done, 50)
    assert capsys.readouterr().err == ""


def test_before_anything_is_done_and_for_hours(clock, capsys):
    with console.progress_bar("evaluating", 1, clock) as progress:
        clock.now += 61
        progress("E5M8", 0, 10)
        clock.now += 4 * 3600
        progress("E5M8", 5, 10)
    assert capsys.readouterr().err.splitlines() == [
        "evaluating: 0 of 10 (E5M8), 1 min so far",
        "evaluating: 5 of 10 (E5M8), 4 h so far, about 4 h left",
    ]


def test_on_a_terminal_a_bar_has_the_time_that_is_left(monkeypatch):
    written = io.StringIO()
    times = itertools.count()
    # a second a look
    seen = Console(file=written, force_terminal=True, width=120, get_time=lambda: float(next(times)))
    monkeypatch.setattr(console, "err", seen)
    with console.progress_bar("tuning (steps)") as progress:
        for step in range(1, 6):
            progress("loss 2.1", step, 100)
    drawn = Text.from_ansi(written.getvalue()).plain
    assert "tuning (steps)" in drawn
    assert "5/100" in drawn
    assert re.search(r"5/100 \d:\d\d:\d\d \d:\d\d:\d\d loss 2.1", drawn)
