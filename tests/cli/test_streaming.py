"""Text that is printed as it is produced."""

import io
import sys

import torch

from otaro.cli.streaming import Printer


class Letters:
    """A token is a byte of UTF-8."""

    def decode(self, ids, **options):
        return bytes(ids).decode(errors="replace")


def printed(monkeypatch, encoding, prompt, answer, skip_prompt=False):
    """Standard output after each token, and in the end."""
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding=encoding))
    printer, seen = Printer(Letters(), skip_prompt), []
    for tokens in ([list(prompt.encode())], *([one] for one in answer.encode())):
        printer.put(torch.tensor(tokens))
        seen.append(out.getvalue().decode(encoding))
    printer.end()
    return [*seen, out.getvalue().decode(encoding)]


def test_every_token_is_printed_at_once_without_a_space_to_wait_for(monkeypatch):
    assert printed(monkeypatch, "utf-8", "ab", "xyz") == ["ab", "abx", "abxy", "abxyz", "abxyz\n"]
    assert printed(monkeypatch, "utf-8", "ab", "xy", skip_prompt=True) == ["", "x", "xy", "xy\n"]


def test_a_character_waits_for_its_bytes_and_is_marked_where_the_output_lacks_it(monkeypatch):
    assert printed(monkeypatch, "utf-8", "a", "é.") == ["a", "a", "aé", "aé.", "aé.\n"]
    assert printed(monkeypatch, "ascii", "é", "é.")[-1] == "??.\n"
