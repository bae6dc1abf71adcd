"""The command line as a user meets it: output, JSON, and errors of one line."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer
from rich.text import Text
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import otaro
from otaro.builtin import MODEL_DIR
from otaro.cli.chat import HELP
from otaro.cli.console import parse_precision
from otaro.cli.main import app
from otaro.evaluate.subject import parse_precisions
from otaro.readable import size
from tests.refusals import misuse

SHARDS = [f"model-m{plane}.safetensors" for plane in range(3, 9)]


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    out = tmp_path_factory.mktemp("cli") / "tiny"
    otaro.pack(MODEL_DIR, out)
    return out


def run(*arguments, text=None):
    """Output of a command that must succeed, run in this process (importing transformers takes seconds)."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], input=text)
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result


def refused(*arguments):
    """The refusal of a command that must fail."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code != 0
    return result


def test_pack_reports_as_json(tmp_path):
    report = json.loads(run("pack", "builtin", tmp_path / "out", "--json").stdout)
    assert report["bytes"] == sum((tmp_path / "out" / name).stat().st_size for name in SHARDS)
    assert sorted(SHARDS) == sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))


def test_a_model_without_a_tokenizer_is_packed_and_that_is_said(tmp_path):
    bare = shutil.copytree(MODEL_DIR, tmp_path / "bare")
    for path in bare.glob("tokenizer*"):
        path.unlink()
    said = run("pack", bare, tmp_path / "out").stderr
    assert "has no tokenizer: to read and write text, copy its files into" in " ".join(said.split())
    message = f"{tmp_path / 'out'} has no tokenizer; copy the tokenizer files"
    assert message in str(refused("generate", tmp_path / "out", "--prompt", "The").exception)


@pytest.mark.parametrize("before", [False, True], ids=["no target", "old target"])
def test_an_interrupted_pack_leaves_things_as_they_were_and_says_so_in_a_line(
    packed, tmp_path, monkeypatch, before
):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    if before:
        shutil.copytree(packed, tmp_path / "out")
    monkeypatch.setattr("otaro.file.pack._write_sidecars", interrupt)
    result = refused("pack", "builtin", tmp_path / "out", "--overwrite")
    assert result.exit_code == 130
    left = f"{tmp_path}/out is as it was" if before else "nothing is left behind"
    assert result.stderr == f"interrupted: {left}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["out"] * before


@pytest.mark.skipif(
    not Path("/proc/self").is_dir(), reason="there is no /proc here, in which nothing can be made"
)
@pytest.mark.parametrize(
    "command",
    [["pack", "builtin"], ["tune", "builtin", "--data", "builtin", "--out"], ["demo", "--out"]],
    ids=lambda c: c[0],
)
def test_a_place_where_nothing_can_be_written_is_named(command):
    result = refused(*command, "/proc/here")
    assert isinstance(result.exception, otaro.OtaroError)
    words = r"cannot write /proc/here\S*: nothing can be made in /proc; choose another place"
    assert re.fullmatch(words, str(result.exception))


def test_pack_and_inspect_name_what_stays_as_it_is_and_count_it(tmp_path):
    config = AutoConfig.for_model("gpt2", n_embd=128, n_layer=2, n_head=2, vocab_size=64, n_positions=2048)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "gpt2")
    packed = run("pack", tmp_path / "gpt2", tmp_path / "out")
    note, said = (" ".join(text.split()) for text in (packed.stderr, packed.stdout))
    assert (
        "are stored in 16 bits: transformer.wpe.weight in float16; otaro pack --keep-float32 keeps them"
        in note
    )
    assert (
        "not packed: transformer.wpe.weight (1 in F16, 524.3 kB), transformer.h.*.mlp.c_fc.bias (2 in F32, "
        "4.1 kB)" in said
    )
    result = json.loads(run("pack", tmp_path / "gpt2", tmp_path / "wide", "--keep-float32", "--json").stdout)
    shown = json.loads(run("inspect", tmp_path / "wide", "--json").stdout)
    assert result["unpacked"] == shown["unpacked"]
    assert result["bits_per_weight"] == {
        row["precision"]: row["bits_per_weight"] for row in shown["precisions"]
    }
    wpe = {
        "name": "transformer.wpe.weight",
        "tensors": 1,
        "weights": 1 << 18,
        "bytes": 1 << 20,
        "dtype": "F32",
    }
    assert shown["unpacked"][0] == wpe
    assert sum(group["weights"] for group in shown["unpacked"]) == shown["other_parameters"]
    table = run("inspect", tmp_path / "out").stdout
    assert re.search(
        r"Not packed, the same at every precision.*transformer\.wpe\.weight\s*│\s*1 │ 262,144 │\s*F16",
        table,
        re.DOTALL,
    )


def test_pack_takes_the_reconstruction_of_the_paper_and_another_group_size(tmp_path):
    run("pack", "builtin", tmp_path / "out", "--reconstruction", "truncate", "--group-size", 32)
    shown = json.loads(run("inspect", tmp_path / "out", "--json").stdout)
    assert (shown["reconstruction"], shown["group_size"]) == ("truncate", 32)


def test_inspect_counts_what_is_there(packed):
    shown = json.loads(run("inspect", packed, "--json").stdout)
    by_precision = {row["precision"]: row for row in shown["precisions"]}
    assert list(by_precision) == ["E5M8", "E5M7", "E5M6", "E5M5", "E5M4", "E5M3"]
    for number, row in enumerate(reversed(shown["precisions"]), 1):
        assert row["shards"] == SHARDS[:number]
        assert row["bytes"] == sum((packed / name).stat().st_size for name in SHARDS[:number])
        norms = shown["other_parameters"] / (shown["packed_weights"] + shown["other_parameters"])
        assert row["bits_per_weight"] == pytest.approx((1 - norms) * (3 + number + 8 / 64) + norms * 16)
    model = otaro.load(packed, "E5M3")
    weights = {
        name: module.weight for name, module in model.sefp.modules.items() if name.endswith("down_proj")
    }
    row = next(row for row in shown["modules"] if row["type"] == "down_proj")
    assert row["tensors"] == len(weights)
    assert row["weights"] == sum(weight.numel() for weight in weights.values())
    zeros = sum(int((weight == 0).sum()) for weight in weights.values())
    assert row["zero_share"] == zeros / row["weights"]
    stored = load_file(MODEL_DIR / "model.safetensors")
    scales = torch.cat([otaro.encode(stored[f"{name}.weight"]).scales.abs().flatten() for name in weights])
    assert (row["min_scale"], row["max_scale"]) == (float(scales.min()), float(scales.max()))
    zeros = sum(int((weight == 0).sum()) for name, weight in stored.items() if weight.dim() > 1)
    assert shown["exact_zeros"] == zeros / shown["packed_weights"]


def test_inspect_counts_the_zeros_of_truncate_on_both_sides_of_zero(tmp_path):
    run("pack", "builtin", tmp_path / "out", "--reconstruction", "truncate")
    shown = json.loads(run("inspect", tmp_path / "out", "--json").stdout)
    model = otaro.load(tmp_path / "out", "E5M3")
    embedding = model.get_input_embeddings().weight
    row = next(row for row in shown["modules"] if row["type"] == "embed_tokens")
    assert row["zero_share"] == float((embedding == 0).sum()) / embedding.numel()


def test_inspect_of_an_incomplete_directory_says_what_to_fetch(packed, tmp_path):
    for name in ("config.json", *SHARDS[:2]):
        (tmp_path / name).write_bytes((packed / name).read_bytes())
    shown = json.loads(run("inspect", tmp_path, "--json").stdout)
    assert [row["missing"] for row in shown["precisions"]] == [
        SHARDS[2:],
        SHARDS[2:5],
        SHARDS[2:4],
        SHARDS[2:3],
        [],
        [],
    ]
    assert "lacks m5 ... m8" in run("inspect", tmp_path).stdout


def test_verify_is_content_with_a_sound_directory_and_counts_its_bytes_as_pack_does(packed):
    report = json.loads(run("verify", packed, "--json").stdout)
    assert (report["shards"], report["bytes"]) == (6, sum((packed / name).stat().st_size for name in SHARDS))


def test_verify_names_the_damaged_tensor(packed, tmp_path):
    for path in packed.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    data = bytearray((tmp_path / SHARDS[3]).read_bytes())
    data[-1] ^= 1
    (tmp_path / SHARDS[3]).write_bytes(data)
    result = refused("verify", tmp_path)
    assert isinstance(result.exception, otaro.OtaroError)
    assert SHARDS[3] in str(result.exception)
    assert "down_proj" in str(result.exception)


def test_verify_checks_shards_behind_a_gap_too(packed, tmp_path):
    for path in packed.iterdir():
        if path.name != SHARDS[2]:
            (tmp_path / path.name).write_bytes(path.read_bytes())
    result = run("verify", tmp_path)
    assert "complete up to E5M4" in result.stdout.replace("\n", " ")
    assert f"{SHARDS[3]} is sound but not used" in result.stderr
    data = bytearray((tmp_path / SHARDS[3]).read_bytes())
    data[-1] ^= 1
    (tmp_path / SHARDS[3]).write_bytes(data)
    assert SHARDS[3] in str(refused("verify", tmp_path).exception)


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("blah", "unknown device 'blah'"),
        ("cuda:77", "sees no NVIDIA GPU"),
        ("meta", "cannot compute on meta"),
    ],
)
def test_a_device_that_is_not_there_is_refused(packed, device, words):
    import torch

    if device.startswith("cuda") and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    assert words in str(refused("generate", packed, "--prompt", "x", "--device", device).exception)


def test_generate_continues_the_prompt_at_each_precision(packed):
    texts = {}
    for precision in ("E5M8", "E5M3"):
        words = (
            "generate",
            packed,
            "--prompt",
            "The statement",
            "--precision",
            precision,
            "--max-new-tokens",
            12,
            "--json",
        )
        report = json.loads(run(*words).stdout)
        assert (report["precision"], report["tokens"]) == (precision, 12)
        texts[precision] = report["text"]
    assert texts["E5M8"] != texts["E5M3"]


def test_generate_streams_the_same_text_it_reports(packed):
    words = ("generate", packed, "--prompt", "The statement", "--max-new-tokens", 12)
    assert (
        run(*words).stdout.strip()
        == "The statement" + json.loads(run(*words, "--json").stdout)["text"].rstrip()
    )


def test_generate_says_the_same_with_a_draft_and_tells_what_was_right(packed):
    words = ("generate", packed, "--prompt", "The statement", "--max-new-tokens", 12)
    alone, drafted = (
        json.loads(run(*words, *more, "--json").stdout) for more in ((), ("--draft", "prompt+E5M3"))
    )
    assert drafted["text"] == alone["text"]
    assert alone["drafted"] == []
    assert sum(drafted["drafted"]) >= sum(drafted["accepted"]) > 0
    assert (alone["draft"], drafted["draft"]) == (None, "prompt+E5M3")
    assert "drafted tokens were right" in run(*words, "--draft", "E5M3").stderr
    assert "nothing was drafted" in run(*words[:-1], 1, "--draft", "E5M3").stderr


def test_generate_samples_by_seed(packed):
    words = ("generate", packed, "--prompt", "The", "--max-new-tokens", 12, "--temperature", 1.0, "--json")
    said = [json.loads(run(*words, "--seed", seed).stdout)["text"] for seed in (1, 1, 2)]
    assert said[0] == said[1] != said[2]


def test_generate_takes_precisions_by_module(packed):
    words = (
        "generate",
        packed,
        "--prompt",
        "The",
        "--max-new-tokens",
        2,
        "--json",
        "--precision",
        "E5M3,lm_head=E5M5",
    )
    assert json.loads(run(*words).stdout)["precision"] == "E5M3 to E5M5"


def test_generate_takes_precisions_by_phase(packed):
    words = ("generate", packed, "--prompt", "The", "--max-new-tokens", 6, "--json")
    report = json.loads(run(*words, "--prefill", "E5M8", "--decode", "E5M4").stdout)
    assert report["precision"] == "E5M8, then E5M4"
    report = json.loads(run(*words, "--schedule", "0:E5M6, 3:E5M3", "--kv", "E5M7").stdout)
    assert report["precision"] == "E5M6, then E5M3"
    assert (report["served_by"], report["reason"]) == ("decoder", "")
    assert report["cache_bytes"] > 0
    assert report["decode_tokens_per_second"] > 0


def test_precisions_may_be_written_small(packed):
    words = ("generate", packed, "--prompt", "The", "--max-new-tokens", 3, "--json")
    assert json.loads(run(*words, "-p", "e5m4").stdout)["precision"] == "E5M4"
    said = json.loads(run(*words, "--prefill", "e5m8", "--decode", "e5m3", "--kv", "e5m7").stdout)
    assert said["precision"] == "E5M8, then E5M3"
    assert parse_precisions("e5m3, E5m8,FP") == ["fp", "E5M8", "E5M3"]  # of otaro eval


def test_generate_samples_from_the_likeliest_and_penalises_repetition(packed):
    words = ("generate", packed, "--prompt", "The", "--max-new-tokens", 24, "--json")
    likeliest = json.loads(run(*words).stdout)["text"]
    assert json.loads(run(*words, "--temperature", 1.5, "--top-k", 1).stdout)["text"] == likeliest
    assert json.loads(run(*words, "--temperature", 1.5, "--top-k", 40).stdout)["text"] != likeliest
    assert json.loads(run(*words, "--repetition-penalty", 5.0).stdout)["text"] != likeliest
    for option, value in (("--top-k", 5), ("--top-p", 0.5)):
        said = refused(*words, option, value).stderr
        assert option in said
        assert "to sample, give --temperature too" in said


@pytest.fixture
def with_template(packed, tmp_path):
    """The built-in model with a chat template that puts roles before contents."""
    copied = shutil.copytree(packed, tmp_path / "chatty")
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    settings = json.loads((copied / "tokenizer_config.json").read_text())
    (copied / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    return copied


def test_a_system_message_goes_through_the_chat_template(packed, with_template):
    words = ("--prompt", "The list", "--max-new-tokens", 6, "--json")
    plain = json.loads(
        run("generate", with_template, "--prompt", "system: Be brief\nuser: The list\n", *words[2:]).stdout
    )
    said = json.loads(run("generate", with_template, *words, "--system", "Be brief").stdout)
    assert (said["text"], said["prompt_tokens"]) == (plain["text"], plain["prompt_tokens"])
    turns = ("--max-new-tokens", 6, "--system", "Be brief")
    assert run("chat", with_template, *turns, text="The list\n").stdout.strip() == plain["text"].strip()
    for command in (("generate", packed, *words), ("chat", packed)):
        result = refused(*command, "--system", "Be brief")
        assert "a system message needs a chat template, and this model has none" in str(result.exception)


def test_a_prompt_that_is_not_text_is_refused(packed):
    for command in (("generate", packed, "--prompt", "-"), ("chat", packed)):
        result = CliRunner().invoke(app, [str(word) for word in command], input=b"The caf\xe9 module\n")
        assert isinstance(result.exception, otaro.OtaroError)
        assert "standard input is not UTF-8 (byte 0xe9)" in str(result.exception)
    words = ("generate", packed, "--prompt", "-", "--max-new-tokens", 2, "--json")
    assert json.loads(run(*words, text="The café module").stdout)["prompt"] == "The café module"


def test_past_its_positions_a_model_is_told_of_in_one_line(packed, tmp_path):
    """The built-in model was made for so many; a GPT-2 has no more, and stops."""
    config = json.loads((packed / "config.json").read_text())
    few = {**config, "max_position_embeddings": 16}
    copied = shutil.copytree(packed, tmp_path / "few")
    (copied / "config.json").write_text(json.dumps(few))
    said = run("generate", copied, "--prompt", "The statement", "--max-new-tokens", 30)
    assert said.stderr.count("note: this text goes past the 16 positions that the model was made for") == 1
    assert "Warning" not in said.stderr
    tokenizer = AutoTokenizer.from_pretrained(packed)
    sizes = {"vocab_size": len(tokenizer), "n_embd": 64, "n_layer": 1, "n_head": 2, "n_positions": 24}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("gpt2", **sizes, bos_token_id=None, eos_token_id=None)
    )
    model.save_pretrained(tmp_path / "gpt2")
    tokenizer.save_pretrained(tmp_path / "gpt2")
    run("pack", tmp_path / "gpt2", tmp_path / "nested")
    said = run("generate", tmp_path / "nested", "--prompt", "The statement", "--max-new-tokens", 600)
    assert "note: stopped after" in said.stderr
    assert "this model has positions for 24 tokens" in said.stderr
    assert (
        said.stderr.count("generates through transformers, slower than the decoder: its architecture is gpt2")
        == 1
    )
    assert "Warning" not in said.stderr


def test_generate_stops_at_a_text(packed):
    words = ("generate", packed, "--prompt", "The statement", "--max-new-tokens", 30, "--json")
    full = json.loads(run(*words).stdout)["text"]
    first, second = full[8:11], full[20:24]
    cut = json.loads(run(*words, "--stop", second, "--stop", first).stdout)["text"]
    assert first in cut
    assert full.startswith(cut)
    assert len(cut) < len(full)


def test_generate_says_who_served_and_why(packed, monkeypatch):
    words = ("generate", packed, "--prompt", "The", "--max-new-tokens", 3)
    said = run(*words).stderr
    assert "per second, prompt of" in said
    assert "cache " in said
    assert "transformers" not in said
    monkeypatch.setenv("OTARO_KERNELS", "reference")
    assert "by transformers: OTARO_KERNELS=reference" in run(*words).stderr
    report = json.loads(run(*words, "--json").stdout)
    assert (report["served_by"], report["reason"], report["cache_bytes"]) == (
        "transformers",
        "OTARO_KERNELS=reference",
        None,
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--schedule", "0:E5M8", "--prefill", "E5M8"], ["--schedule", "leave out --prefill"]),
        (["--schedule", "0:E5M8", "--decode", "E5M8"], ["--schedule", "leave out --decode"]),
        (
            ["--precision", "E5M8", "--prefill", "E5M8", "--decode", "E5M4"],
            ["--precision", "--prefill and --decode say all"],
        ),
        (["--precision", "E5M8", "--schedule", "0:E5M4"], ["--precision", "from 0 on"]),
        (["--schedule", "E5M8"], ["--schedule E5M8: must be of the form 0:E5M8,100:E5M4"]),
        (["--schedule", "0:E5M8,0:E5M4"], ["--schedule", "twice"]),
        (["--stop", ""], ["--stop", "stops nothing"]),
        (["--seed", str(2**64)], [f"--seed {2**64}: must be below 2^64"]),
        (["--temperature", "inf"], ["--temperature inf: must be a finite number"]),
        (["--repetition-penalty", "0"], ["--repetition-penalty 0: must be at least 0.01"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_contradictory_flags_are_refused_in_their_own_spelling(packed, arguments, words):
    for command in (["generate", packed, "--prompt", "x"], ["chat", packed]):
        said = " ".join(refused(*command, *arguments).stderr.replace("│", " ").split())
        assert all(word in said for word in words)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("generate DIR --prompt x -p E5M9", "--precision E5M9: choose from E5M8, "),
        (
            "generate DIR --prompt x -p E5M3,lm_head=E9",
            "--precision E5M3,lm_head=E9: E9 is no precision; choose ",
        ),
        ("generate DIR --prompt x --prefill E5M9", "--prefill E5M9: choose from E5M8, "),
        (
            "generate DIR --prompt x --schedule 0:E5M9",
            "--schedule 0:E5M9: E5M9 is no precision; choose from E5M8",
        ),
        ("generate DIR --prompt x --decode E5M9", "--decode E5M9: choose from E5M8, "),
        ("generate DIR --prompt x -p fit:many", "--precision fit:many: 'many' is no budget; write 90MB, "),
        ("generate DIR --prompt x -p E5M3,E5M4", "--precision E5M3,E5M4: one of the modules has two preci"),
        ("generate DIR --prompt x --schedule E5M8", "--schedule E5M8: must be of the form 0:E5M8,100:E5M4"),
        ("generate DIR --prompt x --schedule ²:E5M8", "--schedule ²:E5M8: must be of the form 0:E5M8,100"),
        ("generate DIR --prompt x --kv E5M9", "--kv E5M9: choose from E5M8, E5M7, E5M6, E5M5, E5M4, E5M3"),
        ("generate DIR --prompt x --draft E5M9", "--draft E5M9: give a precision, prompt, or prompt+E5M3; "),
        ("chat DIR --kv E5M9", "--kv E5M9: choose from E5M8, "),
        ("chat DIR --precision E5M9", "--precision E5M9: choose from E5M8, "),
        ("chat DIR --draft prompt+prompt", "--draft prompt+prompt: give a precision, prompt, or both: "),
        ("bench DIR -p E5M8,E5M9", "--precision E5M8,E5M9: E5M9 is no precision; choose from E5M8, "),
        ("bench DIR --draft E5M9", "--draft E5M9: give a precision, prompt, or prompt+E5M3; "),
        ("serve DIR -p E5M9", "--precision E5M9: choose from auto, E5M8, "),
        ("serve DIR --auto-coarsest E5M9", "--auto-coarsest E5M9: choose from E5M8, "),
        (
            "serve DIR --auto-finest E5M3 --auto-coarsest E5M4",
            "--auto-finest E5M3: is coarser than E5M4, the ",
        ),
        ("serve DIR --timeout 0", "--timeout 0.0: give more than 0"),
        ("serve DIR --draft E5M9", "--draft E5M9: give a precision, prompt, or prompt+E5M3; "),
        ("eval DIR --text builtin --kv E5M9", "--kv E5M9: give all, or some of float16, E5M8, "),
        ("eval DIR --text builtin -p all,E5M8", "--precision all,E5M8: give all, or some of fp, E5M8, "),
        ("fetch DIR OUT -p E5M9", "--precision E5M9: choose from E5M8, "),
        ("export DIR OUT --to hf -p E5M9", "--precision E5M9: choose from E5M8, "),
        (
            "tune builtin --data builtin --out OUT --precisions E5M8,E5M9",
            "--precisions E5M8,E5M9: E5M9 is no ",
        ),
        ("tune builtin --data builtin --out OUT --ultra-low E5M9", "--ultra-low E5M9: choose from E5M8, "),
        ("tune builtin --data builtin --out OUT --method fixed:E5M9", "--method fixed:E5M9: unknown precis"),
    ],
)
def test_a_precision_that_there_is_none_of_is_refused_with_the_option_it_was_given_to(
    packed, tmp_path, monkeypatch, words, told
):
    monkeypatch.chdir(tmp_path)
    assert misuse(refused(*words.replace("DIR", str(packed)).split())).startswith(told)


@pytest.mark.parametrize("option", ["--precision", "--prefill", "--decode", "--kv", "--draft", "--schedule"])
def test_a_precision_without_a_name_is_not_taken_for_none(packed, option):
    """As where a variable of a script is empty."""
    assert misuse(refused("generate", packed, "--prompt", "x", option, "")).startswith(f"{option} ")


def test_before_its_first_number_a_schedule_leaves_the_precision_as_it_is(packed):
    words = ("generate", packed, "--prompt", "The", "--max-new-tokens", 6, "-p", "E5M4")
    assert "E5M4, then E5M8: 6 tokens" in run(*words, "--schedule", "3:E5M8").stderr


def test_a_chat_goes_on_without_a_draft_that_is_no_longer_coarser(packed):
    lines = "The list\n/precision E5M3\nThe list\n/draft E5M3\n/draft off\nThe list\n/draft nobody\n"
    result = run("chat", packed, "--draft", "E5M4", "--max-new-tokens", 4, text=lines)
    assert "drafts wait: E5M4 is not coarser than that" in " ".join(result.stderr.split())
    assert "/draft E5M3: a draft is coarser than what it serves" in " ".join(result.stderr.split())
    assert result.stderr.count("4 tokens") == 3
    assert "/draft nobody: give a precision, prompt, or prompt+E5M3" in result.stderr


@pytest.mark.parametrize("command", [("generate", "--prompt", "The list"), ("chat",)])
def test_a_draft_that_could_never_serve_is_refused_before_a_word_is_said(packed, command):
    result = refused(command[0], packed, *command[1:], "-p", "E5M3", "--draft", "E5M3")
    assert "--draft E5M3: a draft is coarser than what it serves" in str(result.exception)
    assert result.stdout == ""


def test_a_command_line_that_is_not_utf8_is_refused(packed):
    words = [sys.executable, "-m", "otaro", "generate", os.fsencode(packed), "--prompt", b"\xff\xfe bad"]
    done = subprocess.run(words, capture_output=True, encoding="utf-8", timeout=120)
    assert done.returncode == 1
    assert "is not UTF-8" in done.stderr
    assert "Traceback" not in done.stderr


def test_chat_takes_phases_and_packed_keys(packed):
    options = ("--prefill", "E5M8", "--decode", "E5M4", "--kv", "E5M7", "--max-new-tokens", 4)
    result = run("chat", packed, *options, text="The statement\n")
    assert "E5M8, then E5M4: 4 tokens" in result.stderr


def test_chat_switches_precision_and_keeps_the_cache(packed):
    result = run(
        "chat",
        packed,
        "--max-new-tokens",
        5,
        text="The statement\n/precision E5M3\n/precision E9\nmore\n/help\n/reset\n/exit\n",
    )
    assert "unknown command" not in result.stderr
    assert "now at E5M3" in result.stderr
    kept = int(result.stderr.split("now at E5M3, ")[1].split()[0])
    assert kept > 5
    assert f" {kept} tokens reused" in result.stderr
    assert "/precision E9: choose from E5M8, E5M7" in result.stderr
    assert "/precision E5M3   go on at" in result.stderr
    assert "conversation forgotten" in result.stderr


def test_chat_does_not_know_every_command(packed):
    said = run("chat", packed, text="/nope now\n").stderr
    assert f"unknown command /nope; there are:\n{HELP}\n" in said


def test_help_shows_all_of_its_words():
    """Brackets would be taken for markup, and vanish."""
    commands = [typer.main.get_command(app)]
    for command in commands:
        commands += getattr(command, "commands", {}).values()
        for text in (command.help, *(getattr(parameter, "help", None) for parameter in command.params)):
            assert text is None or Text.from_markup(text).plain == text
    assert len(commands) > 12


def test_help_shows_no_value_behind_a_flag():
    pages = [((), typer.main.get_command(app))]
    for path, command in pages:
        pages += [((*path, name), one) for name, one in getattr(command, "commands", {}).items()]
        said = run(*path, "--help").stdout
        assert "--help" in said
        assert "<bool>" not in said, path
    assert len(pages) > 16


def assert_one_line(done, words):
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_threads_of_a_command_wait_asleep_unless_told_otherwise(tmp_path):
    """Read back from the OpenMP that torch brings along: what is set after its import would come too late."""
    tool = Path(sys.executable).parent / "otaro"
    ours = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"}
    plain = {name: value for name, value in os.environ.items() if name not in ours} | {
        "OMP_DISPLAY_ENV": "VERBOSE"
    }

    def shown(**variables):
        done = subprocess.run(
            [tool, "inspect", "nowhere"],
            cwd=tmp_path,
            env=plain | variables,
            capture_output=True,
            text=True,
            check=False,
        )
        return dict(re.findall(r"(\w+) = '(.*)'", done.stderr))

    settings = shown()
    assert settings["OMP_WAIT_POLICY"].upper() == "PASSIVE"
    # libgomp calls its default, to spin for a while, passive too
    assert settings.get("GOMP_SPINCOUNT", "0") == "0"
    if "GOMP_SPINCOUNT" in settings:
        assert shown(GOMP_SPINCOUNT="1000")["GOMP_SPINCOUNT"] == "1000"


def test_the_installed_tool_refuses_in_one_line_without_a_traceback(tmp_path):
    otaro_tool = Path(sys.executable).parent / "otaro"
    environment = os.environ | {"COLUMNS": "400"}
    done = subprocess.run(
        [otaro_tool, "inspect", "nowhere"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert_one_line(done, "there is no directory nowhere here. If a model of this name on the Hub is meant: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["verify", str(MODEL_DIR)], "is not a nested model"),
        (["generate", str(MODEL_DIR), "--prompt", "x"], "otaro pack"),
        (["pack", "no such model", "out"], "neither a directory nor a Hub id"),
        (["pack", "no/such.gguf", "out"], "there is no file no/such.gguf"),
        (["pack", "builtin", "out", "--group-size", "48"], "multiple of 32"),
    ],
    ids=[
        "verify a checkpoint",
        "generate from a checkpoint",
        "pack nothing",
        "pack no file",
        "odd group size",
    ],
)
def test_a_refusal_is_one_line_without_a_traceback(arguments, words, tmp_path, in_child):
    folder = tmp_path / "here"
    folder.mkdir()
    done = in_child(f"""
        import os, sys
        os.chdir({str(folder)!r})
        os.environ["COLUMNS"] = "400"
        sys.argv = ["otaro", *{arguments!r}]
        from otaro.cli.main import main
        try:
            main()
        except SystemExit as end:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(end.code)
    """)
    assert_one_line(done, words)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    "command",
    [
        ["pack", "RUN", "out"],
        ["inspect", "RUN"],
        ["verify", "RUN"],
        ["generate", "RUN", "--prompt", "x"],
        ["chat", "RUN"],
        ["bench", "RUN"],
        ["eval", "RUN", "--text", "builtin"],
        ["eval", "RUN/nested", "--text", "builtin", "--reference", "RUN"],
        ["analyze", "weights", "RUN"],
        ["analyze", "gradients", "RUN", "--text", "builtin"],
        ["tune", "RUN", "--data", "builtin", "--out", "out"],
        ["demo", "--model", "RUN", "--out", "out"],
    ],
    ids=" ".join,
)
def test_where_a_model_is_taken_the_folder_of_a_run_is_refused_with_where_its_model_is(
    packed, tmp_path, monkeypatch, command
):
    monkeypatch.chdir(tmp_path)
    (run := Path("RUN")).mkdir()
    stated = {
        "model": "builtin",
        "data": "builtin",
        "options": {},
        "training": {},
        "processes": 1,
        "launcher": "otaro",
    }
    (run / "config.json").write_text(json.dumps(stated))
    if "RUN/nested" not in command:
        way = "not a model, and there is none in it yet; go on with: otaro tune --resume --out RUN"
        assert str(refused(*command).exception) == f"RUN is the folder of a tuning run, {way}"
    for name, model in {"nested": packed, "model": MODEL_DIR}.items():
        (run / name).symlink_to(model)
    result = refused(*command)
    assert isinstance(result.exception, otaro.OtaroError)
    way = "not a model; give RUN/nested (packed) or RUN/model (the tuned checkpoint)"
    assert str(result.exception) == f"RUN is the folder of a tuning run, {way}"
    assert [path.name for path in tmp_path.iterdir()] == ["RUN"]


def test_a_directory_without_tokenizer_is_refused(packed, tmp_path):
    for path in packed.iterdir():
        if not path.name.startswith("tokenizer"):
            (tmp_path / path.name).write_bytes(path.read_bytes())
    result = refused("generate", tmp_path, "--prompt", "x")
    assert "has no tokenizer" in str(result.exception)


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("E5M4", {"*": "E5M4"}),
        ("E5M3,lm_head=E5M4", {"*": "E5M3", "lm_head": "E5M4"}),
        ("*.mlp.*=E5M5", {"*.mlp.*": "E5M5"}),
    ],
)
def test_precisions_are_parsed(text, meaning):
    assert parse_precision(text) == meaning


@pytest.mark.parametrize("text", ["E5M3,E5M4", "lm_head=E5M3,E5M5,lm_head=E5M4"])
def test_two_precisions_for_one_module_are_refused(text):
    with pytest.raises(otaro.OtaroError, match="two precisions"):
        parse_precision(text)


@pytest.mark.parametrize(
    ("count", "text"), [(999, "999 B"), (1000, "1.0 kB"), (910_600, "910.6 kB"), (2.5e12, "2.5 TB")]
)
def test_sizes_are_readable(count, text):
    assert size(count) == text
