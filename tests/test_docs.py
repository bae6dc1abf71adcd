"""What the documents tell people to type is typed here, and prints what they say; what they name exists."""

import ast
import importlib
import json
import re
import shlex

import pytest
import typer
import yaml

import otaro
from otaro.builtin.documentation import documentation_text
from otaro.cli.main import app
from tests.pages import LOGS, NEEDS, PAGES, ROOT, Workplace, blocks, commands, prose, signature

OURS = [page for page in PAGES if page.name not in LOGS and page.name != "CHANGELOG.md"]
ALL = [block for page in OURS for block in blocks(page)]
# whose reader has its own test
RUN = sorted({block.page for block in ALL if block.runs} - {ROOT / "FORMAT.md"})
FILES = [
    path for folder in ("benchmarks", "runs", ".ci", "native") for path in sorted((ROOT / folder).rglob("*"))
]
SCRIPTS = "\n".join(
    path.read_text() for path in FILES if path.is_file() and path.suffix in ("", ".py", ".sh", ".cpp")
)
LAID_OUT = sorted(
    path
    for pattern in (
        "Makefile", "CMakeLists.txt", "CITATION.cff", "constraints.txt", "*.toml", ".ci/*",
        ".github/workflows/*",
        *(
            f"{folder}/**/*.{kind}"
            for folder in ("src", "native", "runs", "benchmarks", "tests")
            for kind in ("sh", "js", "css", "html", "jinja", "cpp", "h", "cu", "cuh")
        ),
    )
    for path in ROOT.glob(pattern)
)  # fmt: skip
LONG = {
    "src/otaro/tune/templates/alpaca.jinja",  # models are stored with its text
}
"""Files that may have longer lines."""
OTHERS = {"vllm", "torchrun", "accelerate", "pip", "git", "curl"}
"""Programs whose options are not ours to check."""


def name(page):
    return str(page.relative_to(ROOT))


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in RUN if page.name != "README.md"], ids=name)
def test_the_blocks_of_a_page_run_one_after_the_other(page, tmp_path):
    run_all(page, tmp_path)


def test_the_python_of_the_readme_runs(tmp_path):
    workplace = Workplace(tmp_path)
    found = [block for block in blocks(ROOT / "README.md") if block.language == "python"]
    assert found
    for block in found:
        workplace.python(block.text)


@pytest.mark.slow
def test_the_demo_prints_what_the_readme_shows(tmp_path):
    (shown,) = [block for block in blocks(ROOT / "README.md") if block.language == "text"]
    # All of its text would take as long as everything else.
    (tmp_path / "short.txt").write_text(documentation_text("heldout")[:1500])
    printed = signature(Workplace(tmp_path).run("otaro demo --steps 3 --text short.txt"))
    for line in filter(None, map(signature, shown.text.splitlines())):
        assert line in printed, f"{line!r} is not in {printed}"
    assert (tmp_path / "demo" / "report.html").is_file()


def run_all(page, folder):
    workplace = Workplace(folder)
    try:
        for block in blocks(page):
            if not block.runs:
                continue
            if block.language == "python":
                workplace.python(block.text)
                continue
            for command, shown in commands(block):
                # a page may break a line where the command does not
                printed = signature(workplace.run(command))
                at = 0
                for line in filter(None, (signature(one).removesuffix("...").rstrip() for one in shown)):
                    assert line in printed[at:], (
                        f"{block}: `{command}` does not print {line!r}, but {printed}"
                    )
                    at = printed.index(line, at) + len(line)
    finally:
        workplace.close()


def options_of(command):
    return {
        option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)
    } | {
        "-h",
        "--help",
    }


TOOL = typer.main.get_command(app)


def complaint(line):
    """Why a command of ours cannot be typed so, or None."""
    try:
        words = shlex.split(line.split("|")[-1])
    except ValueError:  # a drawing, or a sentence
        return f"cannot be split: {line}" if line.startswith("otaro ") else None
    while words and re.fullmatch(r"\w+=\S*", words[0]):
        words = words[1:]
    if words[:1] and words[0].endswith("torchrun"):
        words = words[words.index("-m") + 1 :] if "-m" in words else []
    if not words:
        return None
    if words[0].startswith(("python", ".venv/bin/python")) and len(words) > 1:
        target = words[2] if words[1] == "-m" else words[1]
        if words[1] == "-m" and target == "otaro":
            words = words[2:]
        elif words[1] == "-m" and not target.startswith(("runs", "benchmarks")):
            return None
        else:
            path = ROOT / (target.replace(".", "/") if words[1] == "-m" else target)
            if not (path.exists() or path.with_suffix(".py").exists()) and target.startswith(
                ("runs", "benchmarks")
            ):
                return f"there is no {target}"
            return unknown_to_scripts(words)
    if words[0].startswith(("runs/", ".ci/", "benchmarks/")):
        return unknown_to_scripts(words) if (ROOT / words[0]).exists() else f"there is no {words[0]}"
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        missing = [word for word in words[1:] if re.fullmatch("[a-z-]+", word) and word not in targets]
        return f"make has no {missing}" if missing else None
    if words[0] != "otaro" or len(words) == 1:
        return None
    command = TOOL
    rest = words[1:]
    while rest and hasattr(command, "commands") and not rest[0].startswith("-"):
        if rest[0] not in command.commands:
            return f"otaro has no {rest[0]}"
        command, rest = command.commands[rest[0]], rest[1:]
    known = options_of(command)
    unknown = [
        word
        for word in rest
        if re.fullmatch(r"--?[a-z][\w-]*", word.split("=")[0]) and word.split("=")[0] not in known
    ]
    return f"`{' '.join(words[:2])}` has no {unknown}" if unknown else None


def unknown_to_scripts(words):
    unknown = [word for word in words[1:] if word.startswith("--") and word not in SCRIPTS]
    return f"no script takes {unknown}" if unknown else None


@pytest.mark.parametrize(
    "block", [block for block in ALL if block.language in ("sh", "console", "")], ids=str
)
def test_commands_and_options_exist(block):
    for line, _ in commands(block):
        line = re.sub(r"\[(-[^\]]*)\]", r"\1", line)  # as synopses write what may be left out
        assert complaint(re.split(r" \.\.\.|;|>|<", line)[0]) is None, f"{block}: {complaint(line)}"


@pytest.mark.parametrize("page", OURS, ids=name)
def test_what_prose_names_exists(page):
    known = {option for command in every_command(TOOL) for option in options_of(command)}
    for span in re.findall(r"`([^`\n]+)`", prose(page)):
        if span.startswith(("otaro ", "make ", "runs/", "python benchmarks")) and not re.search(
            r"[…|]|\.\.\.", span
        ):
            assert complaint(span) is None, f"{page.name}: {span}: {complaint(span)}"
        for option in re.findall(r"(?:^| )(--[a-z][\w-]*)", span):
            assert option in known or option in SCRIPTS or span.split()[0] in OTHERS or option in THEIRS, (
                f"{page.name}: {span}"
            )


THEIRS = {
    "--quantization",
    "--enforce-eager",
    "--tensor-parallel-size",
    "--node-rank",
    "--load-format",
    "--verbose",
    "--no-deps",
}
"""vLLM's and pip's."""


def every_command(command):
    yield command
    for one in getattr(command, "commands", {}).values():
        yield from every_command(one)


@pytest.mark.parametrize("block", [block for block in ALL if block.language == "python"], ids=str)
def test_python_parses_and_names_what_is_there(block):
    tree = ast.parse(block.text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "otaro":
            for alias in node.names:
                assert hasattr(importlib.import_module(node.module), alias.name), (
                    f"{block}: {node.module}.{alias.name}"
                )
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "otaro":
            assert node.attr in ("vllm", "runtime") or hasattr(otaro, node.attr), (
                f"{block}: otaro.{node.attr}"
            )


@pytest.mark.parametrize("block", [block for block in ALL if block.language == "json"], ids=str)
def test_json_is_json(block):
    for line in block.text.splitlines():
        json.loads(line)


def test_blocks_are_of_a_known_kind_and_say_why_they_do_not_run():
    for block in ALL:
        assert block.language in ("", "sh", "console", "python", "json", "text", "c", "cpp", "html", "js"), (
            str(block)
        )
        if block.text.startswith(NEEDS):
            assert len(block.text.splitlines()[0]) > len(NEEDS), str(block)


def test_every_command_of_the_tool_has_a_section():
    page = (ROOT / "docs" / "commands.md").read_text()
    headings = set(re.findall(r"^## (?:otaro )?(\w+)", page, re.MULTILINE))
    assert set(TOOL.commands) <= headings
    shown = {shlex.split(line.split("|")[-1])[1] for block in blocks(ROOT / "docs" / "commands.md")
             for line, _ in commands(block) if "otaro " in line}  # fmt: skip
    assert set(TOOL.commands) <= shown


def anchors(page):
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    links = re.findall(
        r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"|^\[[^\]]+\]: (\S+)$", prose(page), re.MULTILINE
    )
    for link in links:
        path, _, anchor = next(filter(None, link)).partition("#")
        if path.startswith("http"):
            continue
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name}: {path}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {path}#{anchor}"


def test_the_readme_is_short():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 110
    assert max(map(len, lines)) <= 110


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_lines_are_short(page):
    """But for rows of tables, and blocks, whose lines cannot be cut."""
    inside = "\n".join(block.text for block in blocks(page))
    lines = [
        line
        for line in page.read_text().splitlines()
        if not line.startswith("|") and line.strip() not in inside
    ]
    assert page.name in LOGS or not [line for line in lines if len(line) > 110]


@pytest.mark.parametrize("path", LAID_OUT, ids=name)
def test_lines_of_code_are_short(path):
    """Of Python ruff says it."""
    long = [n for n, line in enumerate(path.read_text().splitlines(), 1) if len(line) > 110]
    assert name(path) in LONG or not long


def test_versions_agree():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == otaro.__version__
    assert (
        re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1].rstrip(",")
        == otaro.__version__
    )


def test_install_lines_name_what_is_ours():
    """`otaro` on package registries is a stranger's, and `otaro-llm` is not there: it comes from a clone. By
    its name pip finds it where it is installed, and then adds an extra; one page says so.
    """
    for page in PAGES:
        for what in re.findall(r"pip install ([^`\n#]*)", page.read_text()):
            extra = re.fullmatch(r"'otaro-llm\[\w+\]' *", what) and page.name == "install.md"
            ours = re.search(r"(^| )'?otaro(-llm)?(\[|$| |')", what)
            assert extra or not ours, f"{page.name}: pip install {what}"


def test_extras_that_are_named_exist():
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for page in OURS:
        for named in re.findall(r"'(?:\.|otaro-llm)\[(\w+)\]'|the extra `(\w+)`", page.read_text()):
            assert set(filter(None, named)) <= set(extras), f"{page.name}: {named}"


def test_a_page_that_says_otherwise_is_noticed(tmp_path):
    """The checks above can fail."""
    assert complaint("otaro pack MODEL OUT --calibrate TEXT") is None
    assert "has no" in complaint("otaro pack MODEL OUT --callibrate TEXT")
    assert "has no" in complaint("otaro packs MODEL")
    assert "there is no" in complaint("python benchmarks/bench_nothing.py")
    assert "make has no" in complaint("make nothing")
    page = tmp_path / "page.md"
    page.write_text("```console\n$ echo one 1\none 2\n```\n")
    assert commands(blocks(page)[0]) == [("echo one 1", ["one 2"])]
    run_all(page, tmp_path)
    page.write_text("```console\n$ echo one\ntwo\n```\n")
    with pytest.raises(AssertionError, match="does not print 'two'"):
        run_all(page, tmp_path)
