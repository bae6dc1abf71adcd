"""The pages of --help, and what the shell completes."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from otaro.cli.main import app
from otaro.tune.config import Around, Options, Training, recipe

GROUP = typer.main.get_command(app)
# Each is in somebody's script.
TUNE = """--accumulate --accumulator --average --batch-size --bf16 --cache-dir --calibrate --chat-template
--clip --compile --data --delay --distill --distill-at --epochs --eval-data --eval-tokens --fsdp --full
--grad-accum --gradient-checkpointing --group-size --hold-out --json --l2-sp --lambda --leftover --lora --lr
--method --no-bf16 --no-bos --no-calibrate --optimizer --out --precisions --recipe --reconstruction --resume
--revision --save-every --schedule --seed --sequence-length --skip-bad-rows --steps --token --ultra-low
--weights model"""


def pages(command=GROUP, path=()):
    yield path, command
    for name, one in getattr(command, "commands", {}).items():
        yield from pages(one, (*path, name))


PAGES = dict(pages())
COMMANDS = {path: command for path, command in PAGES.items() if not hasattr(command, "commands")}


def shown(path, columns):
    result = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": str(columns)})
    assert result.exit_code == 0
    return result.stdout


@pytest.mark.parametrize("path", PAGES, ids=" ".join)
@pytest.mark.parametrize("columns", [72, 100, 250])
def test_a_page_names_every_option_once_and_keeps_within_the_terminal(path, columns):
    page = shown(path, columns)
    assert max(map(len, page.splitlines())) <= min(columns, 110)
    left = re.findall(r"^│ ((?:-\w, )?--[\w-]+|[A-Z]+(?:\.\.\.)?)", page, re.MULTILINE)
    wanted = PAGES[path].get_params(typer.Context(PAGES[path]))
    assert len(left) == len(wanted)
    for parameter in wanted:
        names = parameter.opts if parameter.param_type_name == "option" else [parameter.display_name_raw]
        assert sum(name in names for one in left for name in one.split(", ")) >= 1, parameter.name


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_panels_name_options_that_there_are(path):
    named = [name for names in COMMANDS[path].callback.panels.values() for name in names.split()]
    assert len(named) == len(set(named))
    assert set(named) <= {parameter.name for parameter in COMMANDS[path].params}


@pytest.mark.parametrize("path", PAGES, ids=" ".join)
def test_an_example_is_a_line_of_its_own_below_what_it_is_for(path):
    examples = getattr(PAGES[path].callback, "examples", [])
    wanted = []
    for words, _, why in (example.partition("  # ") for example in examples):
        wanted += [f"  # {why}"] * bool(why) + [f"  {words.rstrip()}"]
    page = shown(path, 80).rstrip("\n").splitlines()
    assert page[page.index("Examples") + 1 :] == wanted if examples else "Examples" not in page


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_examples_can_be_typed(path):
    assert COMMANDS[path].callback.examples
    of_groups = [line for one in PAGES.values() if hasattr(one, "commands") for line in one.callback.examples]
    assert any(line.startswith("otaro analyze weights") for line in of_groups)
    for line in (*COMMANDS[path].callback.examples, *of_groups):
        words = shlex.split(re.sub(r" [<|] .*", "", line), comments=True)
        words = words[words.index("otaro") + 1 :]
        context, command = GROUP.make_context("otaro", list(words), resilient_parsing=True), GROUP
        while hasattr(command, "commands"):
            command, words = command.commands[words[0]], words[1:]
        command.make_context("one", words, parent=context)  # refuses what it does not know, and runs nothing


def test_the_page_of_tune_is_read_at_a_glance():
    page = shown(("tune",), 100)
    assert len(page.splitlines()) < 120
    panels = re.findall(r"^╭─ (.*?) ─", page, re.MULTILINE)
    assert panels[:3] == ["Arguments", "Options", "Training"]
    assert panels[-2:] == ["Hub", "Output"]
    assert re.search("╭─ Training .*--save-every N .*╭─ Memory and speed", page, re.DOTALL)


def test_what_only_old_directories_need_comes_last_of_what_makes_a_model():
    page = shown((), 100)
    assert page.index("│ export") < page.index("│ describe") < page.index("─ To run one ─")


def test_tune_has_the_options_that_it_ever_had():
    assert {name for p in COMMANDS["tune",].params for name in (*p.opts, *p.secondary_opts)} == set(
        TUNE.split()
    )


def test_the_options_of_tune_are_the_fields_of_its_configuration():
    shown_defaults = {p.name: p.show_default for p in COMMANDS["tune",].params}
    for kind, made in zip((Options, Training, Around), (*recipe("best"), Around()), strict=True):
        for field in fields(kind):
            value = getattr(made, field.name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                assert float(shown_defaults[field.name]) == pytest.approx(value, rel=1e-4)
    assert shown_defaults["weights"] is False
    weights = recipe("best")[0].weights, Options(method="uniform").to_dict()["weights"]
    told = [",".join(f"{one:g}" for one in some) for some in weights]
    assert shown_defaults["ultra_low"] == "E5M4,E5M3"
    said = " ".join(shown(("tune",), 110).replace("│", "").split())
    assert "paper: --method otaro --reconstruction truncate --leftover drop" in said
    assert f"By default {told[0]} in --recipe best, and {told[1]} with --method uniform." in said


def test_a_page_needs_no_torch():
    code = "import sys, otaro.cli.main; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def completed(words, shell="bash"):
    """What the shell is told to offer for the last word."""
    tool = Path(sys.executable).parent / "otaro"
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1), "_TYPER_COMPLETE_ARGS": words}
    done = subprocess.run(
        [tool],
        env=os.environ | asked | {"_OTARO_COMPLETE": f"complete_{shell}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("otaro ge", ["generate"]),
        ("otaro analyze g", ["gradients"]),
        ("otaro tune --grad", ["--grad-accum", "--gradient-checkpointing"]),
        ("otaro tune --recipe p", ["paper"]),
        ("otaro generate DIR --precision E5M", ["E5M8", "E5M7", "E5M6", "E5M5", "E5M4", "E5M3"]),
        ("otaro eval DIR --precision E5M8,E5M", [f"E5M8,E5M{bits}" for bits in range(8, 2, -1)]),
        ("otaro tune --ultra-low E5M4,E5M3", ["E5M4,E5M3"]),
    ],
)
def test_the_shell_completes_commands_options_and_precisions(words, offered):
    assert completed(words).split() == offered


def test_other_shells_complete_too():
    assert completed("otaro generate DIR --precision E5M4", "zsh") == "_arguments '*: :((\"E5M4\"))'\n"


def test_completion_is_shown_and_installed(tmp_path):
    tool = Path(sys.executable).parent / "otaro"
    env = os.environ | {"HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    done = subprocess.run(
        [tool, "--install-completion", "bash"], env=env, capture_output=True, text=True, check=True
    )
    assert "completion installed" in done.stdout
    script = (tmp_path / ".bash_completions" / "otaro.sh").read_text()
    assert "_OTARO_COMPLETE=complete_bash" in script
    assert str(tmp_path / ".bash_completions" / "otaro.sh") in (tmp_path / ".bashrc").read_text()
    done = subprocess.run(
        [tool, "--show-completion", "bash"], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == script.strip()


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
def test_bash_completes_by_the_script_that_is_shown():
    folder = Path(sys.executable).parent
    env = os.environ | {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1",
    }
    script = subprocess.run(
        [folder / "otaro", "--show-completion", "bash"], env=env, capture_output=True, text=True, check=True
    ).stdout
    typed = (
        "COMP_WORDS=(otaro chat DIR -p E5M); COMP_CWORD=4; _otaro_completion otaro; echo "
        "${COMPREPLY[@]}; complete -p otaro"
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", script + typed], env=env, capture_output=True, text=True, check=True
    )
    offered, rule = done.stdout.splitlines()
    assert offered == "E5M8 E5M7 E5M6 E5M5 E5M4 E5M3"
    assert "-o default" in rule  # where we offer nothing, bash offers files


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("generate DIR --prompt x --max-new-tokens 0", "--max-new-tokens 0: must be at least 1"),
        ("generate DIR --prompt x --top-p 3", "--top-p 3: must be at most 1"),
        ("generate DIR --prompt x --top-k 1.5", "--top-k 1.5: must be a whole number"),
        ("fit DIR --text x --bits abc", "--bits abc: must be a number"),
        ("export DIR OUT -p E5M3 --to onnx", "--to onnx: choose from gguf, compressed-tensors, mlx, hf"),
        ("bench DIR --parallel x", "--parallel x: must be of the form 1,2,4,8"),
        ("generate DIR", "--prompt TEXT is missing"),
        ("generate --prompt x", "DIR is missing"),
        ("generate DIR --prompt", "--prompt: a value must follow"),
        ("generate DIR --promp x", "there is no option --promp; did you mean --prompt or --stop?"),
        ("analyze weigts", "no such command 'weigts'; did you mean 'weights'?"),
    ],
)
def test_a_wrong_line_is_told_as_all_refusals_are_below_the_usage_of_the_page(words, complaint):
    done = CliRunner().invoke(app, words.split(), prog_name="otaro")
    usage, error, where = done.stderr.splitlines()
    assert (done.exit_code, error) == (2, f"error: {complaint}")
    command = ["analyze"] if words.startswith("analyze") else words.split()[:1]
    page = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "110"}, prog_name="otaro").stdout
    assert usage == page.splitlines()[0]
    assert where == f"`otaro {command[0]} --help` lists the options"
