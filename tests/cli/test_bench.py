"""`otaro bench`."""

import importlib.util
import json
import sys

import pytest
import torch
from typer.testing import CliRunner

from otaro.cli.main import app
from otaro.errors import OtaroError
from otaro.evaluate import llama_cpp, machine, speed
from otaro.kernels import cpu
from tests.refusals import misuse

QUICK = ["--prompt-tokens", "6", "--tokens", "2", "--context", "3", "--rounds", "1"]


@pytest.fixture(autouse=True)
def small_read(monkeypatch):
    monkeypatch.setattr(speed, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(speed, "SWITCHES", 3)


def bench(*arguments, **settings):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)], catch_exceptions=False, **settings)


def test_the_tables_name_machine_kernels_and_precisions(tiny):
    shown = bench(tiny, *QUICK, "--transformers", env={"COLUMNS": "80"}).stdout
    assert machine.cpu_name() in shown
    assert "kernels cpu:" in shown or "kernels reference" in shown
    assert "prefill of 6 tokens; decode of 2 after 3; median of 1 round" in shown
    assert shown.count("E5M8") == shown.count("E5M3") == 3, "speed, memory, against transformers"
    assert "a plain read of memory runs at" in shown
    tables = [line for line in shown.splitlines() if " E5M" in line]
    assert all(len(line) <= 80 and "…" not in line for line in tables)


def test_json_is_one_line(tiny):
    done = bench(tiny, *QUICK, "--json", "--precision", "E5M3,E5M8")
    assert done.stdout.count("\n") == 1
    result = json.loads(done.stdout)
    assert [row["precision"] for row in result["precisions"]] == ["E5M8", "E5M3"]
    assert result["settings"] == {
        "prompt_tokens": 6, "tokens": 2, "context": 3, "rounds": 1, "threads": None, "kv": None
    }  # fmt: skip
    assert result["threads"] == 1
    assert result["versions"]["otaro"]
    assert result["others"] == result["ratios"] == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--precision", "E5M9"], "--precision E5M9: choose from E5M8, E5M7"),
        (["--kv", "fp8"], "--kv fp8: choose from E5M8, E5M7"),
        (["--against", "vllm"], "--against vllm: llama.cpp is what there is to compare with"),
        (["--parallel", "1,2", "--transformers"], "--transformers reads one sequence"),
        (["--parallel", "2,2"], "--parallel 2,2: give numbers of sequences, such as 1,2,4,8, none twice"),
        (["--parallel", "1,0"], "--parallel 1,0: give numbers of sequences"),
        (["--text", "x"], "--text is for --draft, which is not given"),
        (
            ["--draft", "E5M3", "--parallel", "2"],
            "--draft is timed beside the model alone: leave out ",
        ),
        (["--draft", "E5M3", "-p", "E5M8,E5M4"], "--draft serves one --precision at a time"),
        (["--draft", "E5M9"], "--draft E5M9: give a precision, prompt, or prompt"),
    ],
)
def test_options_that_make_no_sense_are_refused_below_the_usage(tiny, flags, message):
    assert misuse(bench(tiny, *flags)).startswith(message)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--device", "cuda"], "device 'cuda': this torch sees no NVIDIA GPU; use cpu"),
        (["--device", "meta"], "device 'meta': this torch cannot compute on meta"),
        (["--device", "gpu"], "unknown device 'gpu'; use cpu, cuda, cuda:1, ..."),
        (["--context", "600"], "the model has 512 positions"),
        (["--parallel", "2", "--context", "600"], "a sequence has 512 positions here"),
    ],
)
def test_what_this_machine_and_model_cannot_do_is_refused(tiny, monkeypatch, flags, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(OtaroError, match=message):
        bench(tiny, *flags)


@pytest.mark.parametrize(
    "flags",
    [["--rounds", "0"], ["--tokens", "0"], ["--threads", "0"], ["--context", "-1"], ["--parallel", "x"]],
)
def test_numbers_out_of_range_are_refused(tiny, flags):
    done = bench(tiny, *flags)
    assert done.exit_code == 2
    assert flags[0] in done.stderr


def test_without_llama_cpp_the_comparison_says_how_to_get_it(tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    llama_cpp.library.cache_clear()
    with pytest.raises(OtaroError, match=r"needs llama-cpp-python .* pip install"):
        bench(tiny, *QUICK, "--against", "llama.cpp")


@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed")
def test_against_llama_cpp_four_pairs_are_shown(tiny):
    flags = [*QUICK, "--against", "llama.cpp"]
    result = json.loads(bench(tiny, *flags, "--json").stdout)
    pairs = [(ratio["precision"], ratio["against"].split()[-1]) for ratio in result["ratios"]]
    assert pairs == [("E5M8", "F16"), ("E5M7", "Q8_0"), ("E5M4", "Q5_0"), ("E5M3", "Q4_0")]
    shown = bench(tiny, *flags, "--precision", "E5M3").stdout
    assert "llama.cpp Q4_0" in shown
    assert "E5M7" not in shown


# Several sequences at once

SHORT = ["--tokens", "3", "--context", "4", "--rounds", "1"]


@pytest.mark.skipif(bool(cpu.MISSING), reason=str(cpu.MISSING))
def test_parallel_sequences_in_a_table_and_as_json(tiny):
    result = json.loads(bench(tiny, *SHORT, "--parallel", "1,3", "-p", "E5M4,E5M8", "--json").stdout)
    rows = [(row["what"], row["sequences"]) for row in result["rows"]]
    each = [[(f"decoder alone at {p}", 1), (p, 1), (p, 3)] for p in ("E5M8", "E5M4")]
    assert rows == [*each[0], *each[1], ("mixed", 3)]
    for row in result["rows"]:
        assert row["total"] == pytest.approx(row["sequences"] * row["each"])
        assert len(row["seconds"]) == 1
    assert [row["gain"] for row in result["rows"] if row["sequences"] == 1] == [1.0] * 4
    assert (result["settings"]["tokens"], result["settings"]["context"]) == (3, 4)
    shown = bench(tiny, *SHORT, "--parallel", "1,3", "-p", "E5M4", env={"COLUMNS": "80"}).stdout
    assert "Several sequences at once" in shown
    assert "decode of 3 after 4, keys and values in float16; median of 1 round, contenders in turns" in shown


@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed")
def test_parallel_against_llama_cpp(tiny):
    flags = [*SHORT, "--parallel", "1,2", "-p", "E5M4", "--against", "llama.cpp"]
    rows = [
        (row["what"], row["sequences"]) for row in json.loads(bench(tiny, *flags, "--json").stdout)["rows"]
    ]
    assert rows[-2:] == [("llama.cpp Q5_0", 1), ("llama.cpp Q5_0", 2)]


# Drafts


def test_drafts_are_timed_beside_the_model_alone_and_said_to_pay_or_not(tiny):
    flags = ["--draft", "E5M3,prompt", "--tokens", "12", "--context", "40", "--rounds", "1"]
    result = json.loads(bench(tiny, *flags, "--json").stdout)
    assert [(row["draft"], row["texts"]) for row in result["rows"]] == [
        ("E5M3", "prose"), ("E5M3", "copy"), ("prompt", "prose"), ("prompt", "copy")
    ]  # fmt: skip
    for row in result["rows"]:
        assert row["gain"] == pytest.approx(row["rate"] / row["plain"])
        assert all(0 <= share <= 1 for share in row["acceptance"])
        assert row["tokens_per_pass"] >= 1
        assert f"{row['gain']:.2f} times the tokens" in row["verdict"]
    assert result["precision"] == "E5M8"
    shown = bench(tiny, *flags, "-p", "E5M6", env={"COLUMNS": "110"}).stdout
    assert "E5M6, 12 tokens after each of 4 passages of 40" in shown
    assert shown.count("it pays") + shown.count("it does not pay") + shown.count("makes no difference") == 4


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--draft", "E5M3", "-p", "E5M3"], "a draft is coarser than what it serves"),
        (["--draft", "E5M3", "--context", "900"], "positions, but texts and --tokens 96 take"),
    ],
)
def test_what_cannot_be_drafted_is_refused(tiny, flags, message):
    with pytest.raises(OtaroError, match=message):
        bench(tiny, *flags)


def test_a_text_too_short_for_drafts_is_refused(tiny, tmp_path):
    (tmp_path / "text.txt").write_text("word " * 50)
    with pytest.raises(OtaroError, match="take more text than that"):
        bench(tiny, "--draft", "E5M3", "--text", tmp_path / "text.txt")
