"""otaro-run against the package: the same words, switched by options, typed commands and signals."""

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import torch

import otaro
from otaro.runtime.decoder_file import write_decoder_file
from otaro.runtime.load import load_tokenizer
from tests.native.conftest import INCLUDES, ROOT

PROMPT = "The list methods make it easy"


@pytest.fixture(scope="module")
def otaro_run(compiler, library_path, tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("run") / "otaro-run"
    source = ROOT / "native" / "run.cpp"
    flags = ["-std=c++17", "-O1", "-pthread", f"-Wl,-rpath,{library_path.parent}"]
    subprocess.run([compiler, *flags, *INCLUDES, source, library_path, "-o", target], check=True)
    return target


@pytest.fixture(scope="module")
def model_dir(tiny, tmp_path_factory) -> Path:
    """The built-in model, which never ends a text by itself."""
    directory = shutil.copytree(tiny, tmp_path_factory.mktemp("run") / "tiny")
    write_decoder_file(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)
    config = json.loads((directory / "config.json").read_text())
    config.pop("eos_token_id", None)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def ran(*command, text=None):
    return subprocess.run(
        [str(word) for word in command], capture_output=True, encoding="utf-8", input=text, timeout=300
    )


@pytest.mark.parametrize("precision", ["E5M8", "E5M4"])
def test_a_text_goes_on_as_in_the_package(otaro_run, model_dir, precision):
    model, tokenizer = otaro.load(model_dir), load_tokenizer(model_dir)
    ids = torch.tensor([tokenizer(PROMPT)["input_ids"]])
    expected = model.generate(ids, max_new_tokens=24, do_sample=False, precision=precision)
    said = ran(
        otaro_run, model_dir, "--prompt", PROMPT, "--tokens", 24, "--precision", precision, "--threads", 1
    )
    assert said.returncode == 0, said.stderr
    assert said.stdout == tokenizer.decode(expected[0]) + "\n"
    assert said.stderr.startswith(f"[{precision}: {ids.shape[1]} tokens read")


def test_typed_commands_switch_in_mid_conversation(otaro_run, model_dir):
    def typed(lines):
        return ran(otaro_run, model_dir, "--tokens", 8, "--threads", 1, text=lines)

    once, coarse = typed("The list\n"), typed("/precision E5M3\nThe list\n/quit\nnot read\n")
    again = typed("The list\n/precision E5M3\nand\n/precision E5M9\n/reset\n/precision E5M8\nThe list\n")
    assert again.stdout.startswith(once.stdout)
    assert again.stdout.endswith(once.stdout)
    assert [part[:4] for part in again.stderr.split("[")[1:]] == ["E5M8", "E5M3", "E5M8"]
    alone = ran(
        otaro_run, model_dir, "--prompt", "The list", "--tokens", 8, "--precision", "E5M3", "--threads", 1
    )
    assert alone.stdout == "The list" + coarse.stdout


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/precision E5M9", "/precision takes E5M8, E5M7, E5M6, E5M5, E5M4 or E5M3, not E5M9"),
        ("/precision", "/precision takes E5M8, E5M7, E5M6, E5M5, E5M4 or E5M3\n"),
        ("/tokens 5abc", "/tokens takes a whole number from 1 to 1000000000, not 5abc"),
        ("/tokens 0", "/tokens takes a whole number from 1 to 1000000000, not 0"),
        ("/tokens 2.5", "not 2.5"),
        ("/speed 9", "there is no command /speed; /help lists them"),
        ("/reset now", "/reset takes no value"),
        ("/quit now", "/quit takes no value"),
    ],
)
def test_a_command_that_makes_no_sense_is_told_and_changes_nothing(otaro_run, model_dir, line, words):
    plain, said = (
        ran(otaro_run, model_dir, "--tokens", 4, "--threads", 1, text=f"{first}The list\n")
        for first in ("", f"{line}\n")
    )
    assert words in said.stderr
    assert "[E5M8: " in said.stderr
    assert said.stdout == plain.stdout


def test_commands_may_have_spaces_and_small_letters(otaro_run, model_dir):
    asked = ran(otaro_run, model_dir, "--precision", "e5m3", "--tokens=3", "--threads=1", text="The list\r\n")
    typed = ran(
        otaro_run,
        model_dir,
        "--threads",
        1,
        text="\n  \n  /precision \t e5m3 \r\n/tokens  3 \nThe list\n /exit \nno\n",
    )
    assert "[E5M3: " in asked.stderr
    assert typed.stderr.count("[") == 1
    assert "; 3 made" in typed.stderr
    assert typed.stdout == asked.stdout
    assert "/quit, /exit" in ran(otaro_run, model_dir, text="/help\n").stderr


@pytest.fixture
def typing():
    """typing(*command) has a terminal for its standard input, which is `process.terminal`."""
    started = []

    def begin(*command):
        ours, theirs = os.openpty()
        process = subprocess.Popen([str(word) for word in command], stdin=theirs, stdout=-1, stderr=-1)
        os.close(theirs)
        process.terminal = ours
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()
        os.close(process.terminal)


def told(process, end):
    """What it says up to these words."""
    said = b""
    while not said.endswith(end):
        some = process.stderr.read(1)
        assert some, said
        said += some
    return said


def test_a_prompt_is_shown_on_terminals_alone(otaro_run, model_dir, typing):
    assert ran(otaro_run, model_dir, text="/reset\n").stderr == ""
    process = typing(otaro_run, model_dir, "--precision", "E5M5")
    assert told(process, b"> ") == f"{model_dir} at E5M5; /help for commands\nE5M5> ".encode()
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=300) == (b"", b"\n")
    assert process.returncode == 0


def test_signals_are_obeyed_while_a_line_is_waited_for(otaro_run, model_dir, typing):
    """At once, however soon after the prompt they come; a Ctrl-C that ended an answer is spent then."""
    process = typing(otaro_run, model_dir, "--tokens", "1000000", "--threads", "1")
    told(process, b"E5M8> ")
    for switch, name in ((signal.SIGUSR1, b"E5M7"), (signal.SIGUSR1, b"E5M6"), (signal.SIGUSR2, b"E5M7")):
        os.write(process.terminal, b"The")  # the beginning of a line, which stays
        process.send_signal(switch)
        assert told(process, b"> ") == name + b"> "
    os.write(process.terminal, b" list\n")
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    assert b"[E5M7: " in told(process, b"> ")
    process.send_signal(signal.SIGUSR1)
    assert told(process, b"> ") == b"E5M6> "
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=300)[1] == b"\n"
    assert process.returncode == 0


def test_a_signal_amid_a_line_of_a_pipe_does_not_cut_it(otaro_run, model_dir):
    command = [otaro_run, model_dir, "--tokens", "4", "--threads", "1"]
    whole = ran(*command, "--precision", "E5M7", text="The list\n")
    with subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-1) as process:
        os.write(process.stdin.fileno(), b"/help\nThe li")
        told(process, b"/quit, /exit\n")  # so that it handles signals
        process.send_signal(signal.SIGUSR1)
        said = process.communicate(b"st\n", timeout=300)
    assert (process.returncode, said[0].decode()) == (0, whole.stdout)
    assert said[1].startswith(b"[E5M7: ")


def test_signals_switch_in_the_middle_of_an_answer_and_end_it(otaro_run, model_dir):
    command = [otaro_run, model_dir, "--tokens", "1000000", "--threads", "1"]
    with subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-1, bufsize=0) as process:
        process.stdin.write(PROMPT.encode() + b"\n")
        for switch in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGUSR2):
            assert process.stdout.read(1)
            process.send_signal(switch)
            os.set_blocking(process.stdout.fileno(), False)
            while process.stdout.read(4096):
                pass  # made before
            os.set_blocking(process.stdout.fileno(), True)
            made = 0
            while made < 100:  # tokens, none of them as long, that follow the switch
                made += len(process.stdout.read(100))
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=300)
    assert process.returncode == 0
    assert b"[E5M8, then E5M7, then E5M6, then E5M7: " in said[1]


def test_ctrl_c_ends_the_answer_to_a_prompt(otaro_run, model_dir):
    command = [otaro_run, model_dir, "--prompt", PROMPT, "--tokens", "1000000", "--threads", "1"]
    with subprocess.Popen(command, stdout=-1, stderr=-1) as process:
        assert process.stdout.read(len(PROMPT) + 1)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=300)
    assert process.returncode == 130
    assert said[0].endswith(b"\n")
    assert b"[E5M8: " in said[1]


def test_a_text_past_the_trained_positions_is_told_once(otaro_run, model_dir, tmp_path):
    copy = shutil.copytree(model_dir, tmp_path / "copy")
    described = json.loads((copy / "decoder.json").read_text())
    note = (
        "note: this text goes past the 12 positions that the model was made for; what it says there may "
        "be poor\n"
    )
    told = {}
    for trained in (12, None):
        described["trained_positions"] = trained
        (copy / "decoder.json").write_text(
            json.dumps({name: value for name, value in described.items() if value is not None})
        )
        told[trained] = ran(
            otaro_run, copy, "--tokens", 8, "--threads", 1, text="The list\nThe list\nThe list\n"
        )
    assert told[12].stderr.count(note) == 1
    assert "note" not in told[None].stderr
    assert told[12].stdout == told[None].stdout


def test_a_text_ends_where_the_model_knows_no_position(otaro_run, model_dir, tmp_path):
    copy = shutil.copytree(model_dir, tmp_path / "copy")
    tokens = len(load_tokenizer(model_dir)(PROMPT)["input_ids"])
    for known in (tokens - 1, tokens + 1):
        described = json.loads((model_dir / "decoder.json").read_text()) | {"positions": known}
        (copy / "decoder.json").write_text(json.dumps(described))
        said = ran(otaro_run, copy, "--prompt", PROMPT, "--threads", 1)
        assert said.returncode == 1
        assert f"{known} positions" in said.stderr
        # two more tokens are made, the last of them not read
        assert said.stdout.startswith(PROMPT) == (known > tokens)
        assert ("2 made" in said.stderr) == (known > tokens)


def test_a_truncated_shard_leaves_the_precisions_below_it(otaro_run, model_dir, tmp_path):
    copy = shutil.copytree(model_dir, tmp_path / "copy")
    shard = copy / "model-m4.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    options = ("--prompt", PROMPT, "--tokens", 4, "--threads", 1)
    sound = ran(otaro_run, model_dir, *options, "--precision", "E5M3")
    coarse = ran(otaro_run, copy, *options, "--precision", "E5M3")
    assert (coarse.returncode, coarse.stdout) == (0, sound.stdout)
    assert "note" not in coarse.stderr
    by_default = ran(otaro_run, copy, *options)
    assert by_default.stdout == sound.stdout
    assert by_default.stderr.startswith(f"note: {shard}: the shard is refused: ")
    assert "; so E5M3 is the finest\n" in by_default.stderr
    refused = ran(otaro_run, copy, *options, "--precision", "E5M8")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert f"E5M8 cannot be had: {shard}: " in refused.stderr
    assert ran(otaro_run, copy, *options, "--verify").returncode == 1
    shard.unlink()
    missing = ran(otaro_run, copy, *options, "--precision", "E5M8").stderr
    assert missing == f"otaro-run: E5M8 needs {shard}, which is missing; the model is complete up to E5M3\n"


def test_drawing_is_repeatable(otaro_run, model_dir):
    def draw(*options):
        return ran(otaro_run, model_dir, "--prompt", PROMPT, "--tokens", 12, "--threads", 1, *options).stdout

    hot = ("--temperature", 1)
    assert draw(*hot, "--seed", 1) == draw(*hot, "--seed", 1)
    assert draw(*hot, "--seed", 1) != draw(*hot, "--seed", 2)
    assert draw(*hot, "--top-p", "1e-6") == draw()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--precision", "E5M2"], "--precision takes E5M8, E5M7, E5M6, E5M5, E5M4 or E5M3, not E5M2"),
        (["--tokens", "x"], "--tokens takes a whole number from 1 to 1000000000, not x"),
        (["--tokens", "0"], "--tokens takes a whole number from 1 to 1000000000, not 0"),
        (["--tokens=2.5"], "--tokens takes a whole number from 1 to 1000000000, not 2.5"),
        (["--temperature", "-1"], "--temperature takes a number from 0 to 100, not -1"),
        (["--top-p", "nan"], "--top-p takes a number from 1e-06 to 1, not nan"),
        (["--seed", "-1"], "--seed takes a whole number from 0 to 9007199254740992, not -1"),
        (["--threads", "1025"], "--threads takes a whole number from 1 to 1024, not 1025"),
        (["--tokens"], "--tokens takes a value"),
        (["--verify=1"], "--verify takes no value"),
        (["--fast", "1"], "there is no option --fast"),
        (["-x"], "there is no option -x"),
        (["other"], "one directory, please"),
        (["--template", "x"], "must say by {}"),
    ],
)
def test_options_that_make_no_sense_are_refused(otaro_run, model_dir, options, words):
    said = ran(otaro_run, model_dir, *options)
    assert (said.returncode, said.stdout) == (2, "")
    assert words in said.stderr


def test_usage_and_version(otaro_run, model_dir):
    bare = ran(otaro_run)
    assert bare.returncode == 2
    assert bare.stderr == ran(otaro_run, "--help").stdout
    assert ran(otaro_run, "--version").stdout.startswith(f"otaro-run {otaro.__version__}, ")
    with open("/dev/full", "w") as full:
        lost = subprocess.run(
            [otaro_run, model_dir, "--prompt", PROMPT], stdout=full, stderr=subprocess.PIPE, timeout=300
        )
    assert lost.returncode == 1
    assert b"the text cannot be written: No space left on device" in lost.stderr
    empty = ran(otaro_run, model_dir, "--prompt", "")
    assert empty.returncode == 1
    assert "the text holds no token" in empty.stderr


def test_a_damaged_byte_is_found_by_verify(otaro_run, model_dir, tmp_path):
    copy = shutil.copytree(model_dir, tmp_path / "copy")
    assert ran(otaro_run, copy, "--prompt", PROMPT, "--tokens", 1, "--verify").returncode == 0
    shard = bytearray((copy / "model-m5.safetensors").read_bytes())
    shard[-1] ^= 1
    (copy / "model-m5.safetensors").write_bytes(shard)
    said = ran(otaro_run, copy, "--prompt", PROMPT, "--verify")
    assert said.returncode == 1
    assert "the shard of plane 5: the bytes of" in said.stderr
