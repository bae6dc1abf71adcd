"""`otaro fit` on the built-in model, and what runs at the fit."""

import json
import re
import shutil
from collections import Counter
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import otaro
from otaro.builtin import heldout_text
from otaro.cli import console
from otaro.cli.main import app
from otaro.evaluate import fit as fitting
from otaro.file.fits import bytes_of, find_fit, read_fits, weights_of
from otaro.file.header import shard_name
from otaro.file.io import NestedDirectory
from otaro.runtime.load import load_tokenizer
from tests.refusals import misuse


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "held.txt"
    path.write_text(heldout_text()[:4000])
    return path


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def run(*arguments):
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result


def refused(*arguments):
    result = invoke(*arguments)
    assert isinstance(result.exception, otaro.OtaroError), result.output + repr(result.exception)
    return str(result.exception)


@pytest.fixture(scope="module")
def fitted(tiny, text, tmp_path_factory):
    """The built-in model with two fits, and what `otaro fit` said of the first; do not write into it."""
    model = shutil.copytree(tiny, tmp_path_factory.mktemp("fitted") / "model")
    told = json.loads(run("fit", model, "--text", text, "--bits", 5.2, "--tokens", 128, "--json").stdout)
    run("fit", model, "--text", text, "--budget", "800kB", "--tokens", 128)
    return model, told


@pytest.fixture
def model(fitted, tmp_path):
    return shutil.copytree(fitted[0], tmp_path / "model")


def test_a_fit_is_within_its_budget_and_better_than_one_precision(fitted):
    model, told = fitted
    nested = NestedDirectory(model)
    fit = find_fit(nested, "fit:5.2bits")
    assert told["fit"]["name"] == "fit:5.2bits"
    assert told["mixed"]
    assert bytes_of(nested, fit) == fit.bytes <= 5.2 * weights_of(nested) / 8
    assert fit.about["uniform"] == "E5M4"
    assert fit.about["measured"] == told["mixed_measured"] < fit.about["uniform_measured"]
    assert told["mixed_predicted"] == pytest.approx(fit.about["predicted"])
    curve = told["curve"]
    assert [point["uniform"] for point in curve][::2] == ["E5M3", "E5M4", "E5M5", "E5M6", "E5M7", "E5M8"]
    assert [point["predicted"] for point in curve] == sorted(
        (point["predicted"] for point in curve), reverse=True
    )
    assert all(p["predicted"] <= p["uniform_predicted"] for p in curve[::2])
    assert bytes_of(nested, find_fit(nested, "fit:800kB")) <= 800_000


def test_a_second_budget_measures_nothing(model, text, monkeypatch):
    monkeypatch.setattr(fitting, "measure", None)
    told = json.loads(run("fit", model, "--text", text, "--bits", 6, "--tokens", 128, "--json").stdout)
    assert told["measured_before"] == len(NestedDirectory(model).schema.packed)
    assert set(read_fits(NestedDirectory(model))) == {"5.2bits", "800kB", "6bits"}


def test_what_is_printed_says_how_good_it_is(model, text, monkeypatch):
    monkeypatch.setattr(console.out, "_width", 200)
    said = run("fit", model, "--text", text, "--bits", 9.134, "--tokens", 128).stdout
    assert "fit:9.134bits takes 1.6 MB, 9.133 bits per weight: of 43 tensors 43 at E5M8" in said
    assert "divergence from E5M8 on" in said
    assert "Expected divergence by size" in said
    shown = run("inspect", model).stdout
    assert "Fits, the largest first" in shown
    assert "fit:5.2bits" in shown
    assert set(json.loads(run("inspect", model, "--json").stdout)["fits"]) == {
        "5.2bits",
        "800kB",
        "9.134bits",
    }


@pytest.mark.parametrize("budget", [["--budget", "100MB"], ["--bits", "9.2"]])
def test_a_budget_for_more_than_all_of_it_is_refused(model, text, budget):
    before = (model / "precisions.json").read_bytes()
    told = refused("fit", model, "--text", text, "--tokens", 128, *budget)
    assert told.startswith(f"{' '.join(budget)}: the whole model takes 1,5")
    assert told.endswith(
        "9.133 bits per weight, at E5M8, the finest that is here: there is nothing to fit; run it "
        "with --precision E5M8"
    )
    assert (model / "precisions.json").read_bytes() == before


def test_the_least_that_a_refusal_names_is_taken(model, text):
    bits, size = re.search(
        r"give --bits (\S+) or --budget (\S+) at least", refused("fit", model, "--text", text, "--bits", 3)
    ).groups()
    for option in (["--bits", bits], ["--budget", size]):
        told = json.loads(run("fit", model, "--text", text, "--tokens", 128, "--json", *option).stdout)
        assert set(told["fit"]["precisions"].values()) == {"E5M3"}
    assert "the smallest there is" in refused(
        "fit", model, "--text", text, "--budget", f"{int(size[:-1]) - 1}B"
    )


def test_where_finer_shards_are_missing_it_is_said(fitted, text, copy_of, monkeypatch):
    monkeypatch.setattr(console.out, "_width", 200)
    model = copy_of(fitted[0], planes=(3, 4, 5))
    (model / "precisions.json").unlink()
    said = refused("fit", model, "--text", text, "--bits", 8, "--tokens", 128)
    assert (
        "at E5M5, the finest that is here: there is nothing to fit without finer shards; bring them" in said
    )
    assert said.endswith(f" with: otaro fetch SOURCE {model} --precision E5M8")
    run("fit", model, "--text", text, "--bits", 6, "--tokens", 128)
    assert "KL is from" not in run("inspect", model).stdout
    for bits in (6, 7, 8):
        shutil.copy(fitted[0] / shard_name(bits), model)
    assert (
        "fit:6bits: KL is from E5M5, the finest that was there when it was made, not E5M8"
        in run("inspect", model).stdout
    )
    assert json.loads(run("inspect", model, "--json").stdout)["fits"]["6bits"]["reference"] == "E5M5"


def test_a_fit_that_is_replaced_by_one_of_another_measurement_is_named(model, text, tmp_path):
    def notes(text, tokens):
        return json.loads(
            run("fit", model, "--text", text, "--bits", 5.2, "--tokens", tokens, "--json").stdout
        )["notes"]

    assert notes(text, 128) == []
    [note] = notes(text, 256)
    assert note.startswith("this takes the place of the fit:5.2bits of 20")
    assert note.endswith(
        "measured on held.txt, 128 tokens, from E5M8; now on held.txt, 256 tokens, from E5M8"
    )
    other = tmp_path / "other.txt"
    other.write_text(heldout_text()[4000:8000])
    [note] = notes(other, 256)
    assert note.endswith(
        "measured on held.txt, 256 tokens, from E5M8; now on other.txt, 256 tokens, from E5M8"
    )


def test_names_of_fits_are_never_cut(model, text, monkeypatch):
    name = "fit:1234567.123456B"
    run("fit", model, "--text", text, "--budget", name[4:], "--tokens", 128)
    for width in (80, 40):
        monkeypatch.setattr(console.out, "_width", width)
        shown = run("inspect", model).stdout
        assert name in shown
        assert "fit:5.2bits" in shown
    monkeypatch.setattr(console.out, "_width", 60)
    said = run("eval", model, "--text", text, "--window", 64, "--divergence", "-p", f"E5M8,{name}").stdout
    cells = [line.split("│")[1].strip() for line in said.splitlines() if line.startswith("│")]
    assert "".join(cells) == f"E5M8{name}"  # over several lines, and whole


def test_one_precision_that_does_better_is_the_fit(model, text, monkeypatch):
    """The sum of losses may mislead: then measuring tells."""
    worst = {name: [0.0] * 6 for name in NestedDirectory(model).schema.packed}
    # nothing is said to lose anything
    monkeypatch.setattr(fitting.Sensitivity, "losses", lambda self, name: worst[name])
    monkeypatch.setattr(console.out, "_width", 200)
    said = run("fit", model, "--text", text, "--bits", 5.5, "--tokens", 128).stdout
    assert "E5M4 for all of them does better there, so that is the fit" in said
    fit = find_fit(NestedDirectory(model), "fit:5.5bits")
    assert set(map(str, fit.precisions.values())) == {"E5M4"}
    assert fit.about["measured"] == fit.about["uniform_measured"]


def test_models_load_switch_and_generate_at_a_fit(fitted):
    directory, _ = fitted
    fit = find_fit(NestedDirectory(directory), "fit:5.2bits")
    model = otaro.load(directory, precision="fit:5.2bits")
    modules = model.sefp.modules
    wanted = {name: fit.precisions[module.packed.name] for name, module in modules.items()}
    assert otaro.precisions_of(model) == wanted
    assert model.lm_head.packed is model.model.embed_tokens.packed  # one set of planes, so one precision
    otaro.set_precision(model, "E5M8")
    otaro.set_precision(model, "FIT:5.20 bits")
    assert otaro.precisions_of(model) == wanted
    otaro.set_precision(model, {"*": fit, "*.mlp.*": "E5M3"})
    assert otaro.precisions_of(model) == {
        n: otaro.Precision("E5M3") if ".mlp." in n else p for n, p in wanted.items()
    }
    otaro.set_precision(model, "E5M8")
    prompt = load_tokenizer(directory)("The file")["input_ids"]
    with otaro.Engine(model) as engine:
        by_fit = engine.submit(prompt, precision="fit:5.2bits", max_new_tokens=12)
        by_module = engine.submit(prompt, precision=dict(wanted.items()), max_new_tokens=12)
        assert by_fit.text() == by_module.text()
        with pytest.raises(otaro.OtaroError, match="has no fit:9MB"):
            engine.submit(prompt, precision="fit:9MB")
    assert set(otaro.precisions_of(model).values()) == {otaro.Precision("E5M8")}
    told = json.loads(
        run(
            "generate",
            directory,
            "--prompt",
            "The file",
            "-p",
            "fit:5.2bits",
            "--max-new-tokens",
            12,
            "--json",
        ).stdout
    )
    assert told["text"] == by_fit.text()


def test_a_fit_loads_without_the_planes_it_does_not_need(fitted, copy_of):
    fit = find_fit(NestedDirectory(fitted[0]), "fit:800kB")
    bits = fit.finest.mantissa_bits
    assert bits < 8
    model = otaro.load(copy_of(fitted[0], planes=tuple(range(3, bits + 1))), precision="fit:800kB")
    assert max(otaro.precisions_of(model).values()) == fit.finest
    fewer = copy_of(fitted[0], planes=tuple(range(3, bits)))
    with pytest.raises(otaro.OtaroError, match=f"needs shards up to {shard_name(bits)}.*otaro fetch SOURCE"):
        otaro.load(fewer, precision="fit:800kB")


def test_eval_and_bench_take_fits_among_precisions(model, text):
    told = json.loads(
        run(
            "eval", model, "--text", text, "-p", "E5M4,fit:800kB", "--window", 64, "--divergence", "--json"
        ).stdout
    )
    assert told["precisions"] == ["E5M4", "fit:800kB"]
    entries = [entry for entry in told["entries"] if entry["kind"] == "divergence"]
    assert [entry["precision"] for entry in entries] == ["E5M4", "fit:800kB"]
    digest = find_fit(NestedDirectory(model), "fit:800kB").sha256
    assert "fit_sha256" not in entries[0]
    assert entries[1]["fit_sha256"] == digest
    assert "fit:800kB" in run("inspect", model).stdout
    short = ("--prompt-tokens", 4, "--tokens", 2, "--context", 4, "--rounds", 1, "--json")
    rows = json.loads(run("bench", model, "-p", "E5M3,fit:800kB,E5M8", *short).stdout)["precisions"]
    assert [row["precision"] for row in rows] == ["E5M8", "fit:800kB", "E5M3"]
    assert rows[0]["weight_bytes"] > rows[1]["weight_bytes"] > rows[2]["weight_bytes"]


def test_bench_times_drafts_of_a_fit(fitted):
    short = ("--tokens", 4, "--context", 8, "--rounds", 1, "--json")
    told = json.loads(run("bench", fitted[0], "-p", "fit:5.2bits", "--draft", "E5M3", *short).stdout)
    assert told["precision"] == "fit:5.2bits"
    assert [(row["draft"], row["texts"]) for row in told["rows"]] == [("E5M3", "prose"), ("E5M3", "copy")]


@pytest.fixture
def at_speeds(monkeypatch):
    """Have `otaro fit` find these tokens per second, of E5M3 and finer ones in turn."""

    def set_speeds(*speeds):
        def bench(directory, settings, **options):
            found = timed(directory, settings, **options)
            rows = sorted(found.precisions, key=lambda row: row.weight_bytes)
            assert [row.precision for row in rows] == [f"E5M{bits}" for bits in range(3, 3 + len(speeds))]
            told = [replace(row, decode=speed) for row, speed in zip(rows, speeds, strict=True)]
            return replace(found, precisions=told[::-1])

        monkeypatch.setattr(fitting.speed, "bench", bench)

    timed = fitting.speed.bench
    monkeypatch.setattr(fitting.speed, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(fitting, "_TIMED", replace(fitting._TIMED, tokens=4, rounds=1))
    return set_speeds


def test_tokens_per_second_become_bytes_by_a_measurement(model, text, at_speeds):
    at_speeds(100.0, 90.0, 80.0, 70.0, 60.0, 50.0)
    by_speed = ("fit", model, "--text", text, "--tokens", 128, "--json", "--tokens-per-second")
    said = json.loads(run(*by_speed, 85).stdout)
    assert said["fit"]["uniform"] == "E5M4"  # that of 90 tokens a second, and E5M5 has 80
    assert "85tps lets a token read 9" in said["notes"][0]
    assert "rounds of 4 tokens differed by up to" in said["notes"][0]
    assert json.loads(run(*by_speed, 100).stdout)["fit"]["uniform"] == "E5M3"


@pytest.mark.parametrize("wanted", ["100.001", "100000000"])
def test_a_speed_that_no_precision_reaches_is_refused_with_the_fastest(model, text, at_speeds, wanted):
    """Which need not be the coarsest."""
    at_speeds(80.0, 90.0, 100.0, 70.0, 60.0, 50.0)
    before = (model / "precisions.json").read_bytes()
    told = refused("fit", model, "--text", text, "--tokens-per-second", wanted, "--tokens", 128)
    assert told == (
        f"--tokens-per-second {wanted}: this machine makes 100.0 tokens per second at E5M5 "
        "just now, and no precision is faster; ask for fewer"
    )
    assert (model / "precisions.json").read_bytes() == before
    reached = run("fit", model, "--text", text, "--tokens-per-second", 95, "--tokens", 128, "--json").stdout
    assert json.loads(reached)["fit"]["uniform"] == "E5M5"  # though two coarser ones are too slow


def test_a_speed_that_the_finest_has_leaves_nothing_to_fit(fitted, model, text, at_speeds, copy_of):
    at_speeds(100.0, 90.0, 80.0, 70.0, 60.0, 50.0)
    before = (model / "precisions.json").read_bytes()
    told = refused("fit", model, "--text", text, "--tokens-per-second", 50, "--tokens", 128)
    assert told == (
        "--tokens-per-second 50: this machine makes 50.0 tokens per second at E5M8 just now, the finest that "
        "is here: there is nothing to fit; run it with --precision E5M8"
    )
    assert (model / "precisions.json").read_bytes() == before
    coarse = copy_of(fitted[0], planes=(3, 4, 5))
    (coarse / "precisions.json").unlink()
    at_speeds(100.0, 90.0, 80.0)
    told = refused("fit", coarse, "--text", text, "--tokens-per-second", 0.001, "--tokens", 128)
    assert "at E5M5 just now, the finest that is here: there is nothing to fit without finer shards" in told
    assert told.endswith(f"otaro fetch SOURCE {coarse} --precision E5M8")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ([], "give one budget: --budget 90MB, --bits 4.5, or --tokens-per-second 40"),
        (["--bits", "4", "--budget", "1MB"], "give one budget"),
        (["--budget", "many"], "--budget 'many' is no budget; write 90MB"),
        (["--bits", "nan"], "--bits nan: give a number above 0"),
        (["--bits", "-4"], "--bits -4: give a number above 0"),
        (["--tokens-per-second", "1e20"], "--tokens-per-second 1e+20: give a number above 0, with 15 digits"),
    ],
)
def test_a_budget_that_is_none_is_refused_below_the_usage(tmp_path, options, why):
    assert misuse(invoke("fit", tmp_path, "--text", "builtin", *options)).startswith(why)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (
            ["--bits", "3"],
            "--bits 3: E5M3, the smallest there is, takes 713.0 kB, 4.139 bits per weight; give --bits "
            "4.1.. or",
        ),
        (["--budget", "1kB"], "--budget 1kB: E5M3, the smallest there is"),
        (
            ["--bits", "5", "--tokens", "100000"],
            "tokens; .* are the least, half to measure on and half to check on",
        ),
        (["--bits", "5", "--text", "nowhere.txt"], "nowhere.txt does not exist"),
    ],
)
def test_refusals(model, text, options, why):
    given = options if "--text" in options else [*options, "--text", text]
    before = (model / "precisions.json").read_text()
    assert re.search(why, refused("fit", model, *given))
    assert (model / "precisions.json").read_text() == before


def test_models_that_cannot_be_fitted_are_refused(fitted, text, copy_of):
    coarse = copy_of(fitted[0], planes=(3,))
    assert "has no more than E5M3: there is nothing to choose" in refused(
        "fit", coarse, "--text", text, "--bits", 5
    )
    damaged = copy_of(fitted[0])
    (damaged / "precisions.json").write_text("{}")
    assert "cannot be used" in refused("fit", damaged, "--text", text, "--bits", 5)
    assert "note: not shown" in run("inspect", damaged).stderr


def test_where_a_fit_makes_no_sense_it_is_refused_in_words(fitted, tmp_path, text):
    out = tmp_path / "out"
    assert "--to mlx one for all tensors; export it to gguf or hf" in refused(
        "export", fitted[0], out, "-p", "fit:800kB", "--to", "mlx"
    )
    assert "is a checkpoint: pack it, then fit" in refused(
        "eval", "builtin", "--text", text, "-p", "fit:800kB"
    )
    assert not out.exists()
    assert "has no fit:9MB, there are fit:5.2bits, fit:800kB" in refused(
        "eval", fitted[0], "--text", text, "-p", "fit:9MB"
    )


def test_an_interruption_says_where_to_go_on(model, text, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(fitting, "measure", interrupted)
    (model / "sensitivity.json").unlink()
    result = invoke("fit", model, "--text", text, "--bits", 5, "--tokens", 128)
    assert result.exit_code == 130
    assert "the same command goes on from there" in result.stderr


def test_a_fit_is_exported_exactly_where_tensors_may_differ(fitted, tmp_path):
    told = json.loads(
        run("export", fitted[0], tmp_path / "hf", "-p", "fit:800kB", "--to", "hf", "--json").stdout
    )
    assert (told["precision"], told["exact"]) == ("fit:800kB", True)
    model, written = (
        otaro.load(fitted[0], "fit:800kB"),
        AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="float32"),
    )
    for name, module in model.sefp.modules.items():
        assert torch.equal(written.get_submodule(name).weight, module.weight), name
    pytest.importorskip("gguf", reason="gguf is not installed")
    told = json.loads(
        run("export", fitted[0], tmp_path / "m.gguf", "-p", "fit:800kB", "--to", "gguf", "--json").stdout
    )
    assert told["exact"]
    wanted = {"E5M3": "Q4_0", "E5M4": "Q5_1", "E5M5": "Q8_0"}  # finer ones in F16
    precisions = find_fit(NestedDirectory(fitted[0]), "fit:800kB").precisions.values()
    kinds = {one["type"]: one["tensors"] for one in told["types"] if one["type"] != "F32"}
    assert kinds == Counter(wanted.get(str(one), "F16") for one in precisions)
