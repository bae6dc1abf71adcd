"""Code blocks of the documents, and a place to run them in."""

import os
import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOGS = {"log.md", "tables.md", "tables-1.md"}
"""What was done and found: it is history, and names what was there then."""
PAGES = sorted(
    [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "FORMAT.md", "CHANGELOG.md")),
        *(ROOT / "docs").glob("*.md"),
    ]
)
NEEDS = "# needs "
"""A block that begins so is read, and not run."""


@dataclass(frozen=True)
class Block:
    """A fenced block, or an indented one, which has no language."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def runs(self) -> bool:
        return self.language in ("sh", "console", "python") and not self.text.startswith(NEEDS)

    def __str__(self) -> str:
        where = self.page.relative_to(ROOT) if self.page.is_relative_to(ROOT) else self.page.name
        return f"{where}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """Those of a page, in order."""
    found, lines, at = [], page.read_text().splitlines(), 0
    while at < len(lines):
        fence = re.match(r"( *)```(\w*)", lines[at])
        start = at
        if fence:
            at += 1
            while not lines[at].strip().startswith("```"):
                at += 1
            found.append(Block(page, start + 1, fence[2], "\n".join(lines[start + 1 : at])))
            at += 1
        elif lines[at].startswith("    ") and (at == 0 or not lines[at - 1].strip()):
            while at < len(lines) and (lines[at].startswith("    ") or not lines[at].strip()):
                at += 1
            found.append(Block(page, start + 1, "", textwrap.dedent("\n".join(lines[start:at])).rstrip()))
        else:
            at += 1
    return found


def prose(page: Path) -> str:
    """A page without its blocks."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"^    .*$", "", text, flags=re.MULTILINE)


def commands(block: Block) -> list[tuple[str, list[str]]]:
    """Commands of a block, each with the lines of output shown below it; comments are left out."""
    found: list[tuple[str, list[str]]] = []
    begun = ""  # of a command whose quotation goes on in the next line
    for line in block.text.replace("\\\n", " ").splitlines():
        if block.language == "console" and not line.startswith("$ ") and not begun:
            found[-1][1].append(line)
        elif without := begun + re.sub(r"(^|\s)#.*", "", line.removeprefix("$ ")).strip():
            begun = without + "\n" if block.language and without.count("'") % 2 else ""
            if not begun:
                found.append((without, []))
    return found


def signature(line: str) -> str:
    """What output says, but for its numbers and the lines that tables are drawn with; all in one line."""
    line = re.sub(r"[─━┏┓┗┛┃│┡┩╇┳┻└┘┴┌┐├┤╭╮╰╯]", " ", line)
    line = re.sub(r"[-+]?\d[\d.,]*", "0", line)
    return re.sub(r"\b0 (kB|MB|GB|B)\b", "0 B", " ".join(line.split()))


class Workplace:
    """An empty folder in which the blocks of a page run one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = "127.0.0.1:8000"  # of a server that the page has started
        self._servers: list[subprocess.Popen[str]] = []
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        # One thread: threads that wait for each other crawl where other tests use the cores too.
        self.environment = os.environ | {
            "PATH": path,
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "100",
        }

    def run(self, command: str, timeout: int = 1200) -> str:
        """What a command prints, to either stream; it must succeed."""
        command = command.replace("127.0.0.1:8000", self.address).replace(
            "curl ", "curl --silent --fail-with-body "
        )
        if command.startswith("otaro serve"):
            return self._serve(command)
        done = subprocess.run(
            ["bash", "-c", command], cwd=self.folder, env=self.environment, timeout=timeout, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout}"
        return done.stdout

    def python(self, code: str) -> str:
        (self.folder / "block.py").write_text(code.replace("127.0.0.1:8000", self.address))
        return self.run(f"{sys.executable} block.py")

    def _serve(self, command: str) -> str:
        """Until the page ends, at a port that is free."""
        command = re.sub(r" --port \d+", "", command)
        server = subprocess.Popen(
            [*command.split(), "--port", "0"], cwd=self.folder, env=self.environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self._servers.append(server)
        assert server.stdout is not None
        line = server.stdout.readline()
        self.address = re.search(r"http://([^/\s]+)", line)[1]
        return line

    def close(self) -> None:
        for server in self._servers:
            server.terminate()
        for server in self._servers:
            server.wait(60)
