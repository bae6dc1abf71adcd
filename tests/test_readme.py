"""What the README tells people to type is typed here."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from otaro.builtin.documentation import documentation_text

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
COMMANDS = [line.split("#")[0].strip() for line in re.search(r"```sh\n(.*?)```", README, re.DOTALL).group(1).splitlines()]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    return tmp_path_factory.mktemp("readme")


def run(command: str, workplace: Path, timeout: int = 120) -> str:
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    environment["OMP_NUM_THREADS"] = "1"  # threads that wait for each other crawl where other tests use the cores too
    done = subprocess.run(
        ["bash", "-c", command], cwd=workplace, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
def test_the_commands_of_the_readme_run_one_after_the_other(workplace):
    assert len(COMMANDS) >= 6
    # A demo measures three models at six precisions; on all of its text that would take as long as everything else.
    (workplace / "short.txt").write_text(documentation_text("heldout")[:1500])
    shorter = {"demo": "--text short.txt"}
    outputs = {}
    for command in COMMANDS:
        name = shlex.split(command)[1]
        if name == "serve":  # it runs until it is told to end
            command = f'coproc {command} --port 0; read line <&"${{COPROC[0]}}"; kill $COPROC_PID; wait; echo "$line"'
        outputs[name] = run(f"{command} {shorter.get(name, '')}", workplace)
    assert "for all six precisions" in outputs["pack"]
    assert "E5M3" in outputs["inspect"]
    assert "is sound" in outputs["verify"]
    assert outputs["generate"].startswith("The statement")
    assert outputs["serve"].startswith("tiny at http://127.0.0.1:")
    assert "a plain read of memory runs at" in outputs["bench"]
    assert "Perplexity on unseen text" in outputs["demo"]
    assert (workplace / "demo" / "story" / "report.html").is_file()


def test_the_python_of_the_readme_runs(workplace):
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL).group(1)
    script = workplace / "readme.py"
    script.write_text(code + "\nassert str(otaro.precisions_of(model)['lm_head']) == 'E5M8'\n")
    run(f"{shlex.quote(sys.executable)} readme.py", workplace)


def test_every_command_of_the_tool_is_in_the_readme():
    shown = {shlex.split(command.split("|")[-1])[1] for command in COMMANDS}
    listed = run("otaro --help", ROOT)
    commands = re.findall(r"^│ ([a-z]+) ", listed.split("Commands")[1], re.MULTILINE)
    assert commands
    assert shown == set(commands)


def test_the_make_targets_of_the_readme_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z]+)", README)) <= targets


def test_links_of_the_documents_lead_somewhere():
    for page in ("README.md", "FORMAT.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/data.md", "docs/log.md", "docs/serve.md"):
        prose = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
        for link in re.findall(r"\]\(([^)#]+)\)", prose):
            if not link.startswith("http"):
                assert ((ROOT / page).parent / link).exists(), f"{page}: {link}"
