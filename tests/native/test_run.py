"""otaro-run against the package: the same words, switched by options, typed commands and signals."""

import json
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
    return subprocess.run([str(word) for word in command], capture_output=True, encoding="utf-8", input=text, timeout=300)


@pytest.mark.parametrize("precision", ["E5M8", "E5M4"])
def test_a_text_goes_on_as_in_the_package(otaro_run, model_dir, precision):
    model, tokenizer = otaro.load(model_dir), load_tokenizer(model_dir)
    ids = torch.tensor([tokenizer(PROMPT)["input_ids"]])
    expected = model.generate(ids, max_new_tokens=24, do_sample=False, precision=precision)
    said = ran(otaro_run, model_dir, "--prompt", PROMPT, "--tokens", 24, "--precision", precision, "--threads", 1)
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
    assert "/precision E5M3 ... E5M8" in again.stderr  # what E5M9 was answered with
    alone = ran(otaro_run, model_dir, "--prompt", "The list", "--tokens", 8, "--precision", "E5M3", "--threads", 1)
    assert alone.stdout == "The list" + coarse.stdout


def test_signals_switch_in_the_middle_of_an_answer_and_end_it(otaro_run, model_dir):
    command = [otaro_run, model_dir, "--tokens", "1000000", "--threads", "1"]
    with subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-1) as process:
        process.stdin.write(PROMPT.encode() + b"\n")
        process.stdin.flush()
        for switch in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGUSR2):
            assert process.stdout.read(3)  # it goes on
            process.send_signal(switch)
        assert process.stdout.read(3)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=300)
    assert process.returncode == 0
    assert b"[E5M7: " in said[1]


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
        (["--precision", "E5M2"], "--precision takes E5M3 to E5M8, not E5M2"),
        (["--tokens", "x"], "--tokens takes a number, not x"),
        (["--fast", "1"], "there is no option --fast"),
        (["other"], "one directory, please"),
        (["--template", "x"], "must say by {}"),
        (["--prompt", ""], "the text holds no token"),
    ],
)
def test_options_that_make_no_sense_are_refused(otaro_run, model_dir, options, words):
    said = ran(otaro_run, model_dir, *options)
    assert said.returncode == 1
    assert words in said.stderr


def test_a_damaged_byte_is_found_by_verify(otaro_run, model_dir, tmp_path):
    copy = shutil.copytree(model_dir, tmp_path / "copy")
    assert ran(otaro_run, copy, "--prompt", PROMPT, "--tokens", 1, "--verify").returncode == 0
    shard = bytearray((copy / "model-m5.safetensors").read_bytes())
    shard[-1] ^= 1
    (copy / "model-m5.safetensors").write_bytes(shard)
    said = ran(otaro_run, copy, "--prompt", PROMPT, "--verify")
    assert said.returncode == 1
    assert "the shard of plane 5: the bytes of" in said.stderr
