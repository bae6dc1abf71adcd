"""The study: its plan, the other formats it compares with, zero-shot scoring, and a few rows of the demo."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import time
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, TrainingArguments

from otaro.builtin import MODEL_DIR
from otaro.builtin.documentation import documentation_text
from otaro.calibrate.run import pack_calibrated
from otaro.evaluate.harness import Tasks
from otaro.sefp.precision import PRECISIONS
from otaro.tokens import begins_with_bos
from otaro.tune.config import Options
from otaro.tune.data import load_data, split
from otaro.tune.fake_quant import quantize
from runs import convert_llama2c
from runs.study import moe, parts, plan, report, work, zeroshot
from runs.study.__main__ import main
from runs.study.observe import observe
from runs.study.quantizers import NESTED, OTHERS, Nested, Rounding, integers, precisely_for
from runs.study.results import Made, append, chosen_rate, finished, is_done, read
from runs.study.work import Places

ROOT = Path(__file__).parents[2]


def places(tmp_path):
    return Places(tmp_path, None, tmp_path / "study.jsonl", "abc", "cpu")


def results_of(tmp_path, *rows, bench="SmolLM2-135M", **more):
    """Of rows that were made: name, seed, and perplexities on both texts."""
    where = places(tmp_path)
    for name, seed, values in rows:
        line = {"key": f"{name} {seed}", "bench": bench, "name": name, "seed": seed, "lr": 1.5e-4, **more}
        append(where.results, {"heldout": values, "perplexity": values, **line})
    return made_in(where.results, bench)


def made_in(file, bench):
    return Made(plan.BENCHES[bench], finished(read(file)).values())


def add(where, row, **line):
    """As a row's line, with its settings."""
    append(where.results, {"key": row.key, "settings": row.settings(), **line})


def done(where):
    return finished(read(where.results))


def claims_in(tmp_path):
    (tmp_path / "claims").mkdir()
    return tmp_path / "claims"


def shortened(monkeypatch, name="demo", **changes):
    """A bench, for a test alone; of the documentation its beginning."""
    monkeypatch.setattr(work, "documentation_text", lambda part: documentation_text(part)[:60_000])
    short = replace(plan.BENCHES[name], test_tokens=256, sequence_length=64)
    monkeypatch.setitem(plan.BENCHES, name, replace(short, **changes))
    return plan.BENCHES[name]


@pytest.fixture
def weights():
    values = torch.randn(6, 192, generator=torch.Generator().manual_seed(3))
    values[0] *= 2.0 ** -torch.arange(192).div(8)
    values[1, :32] = 0.0
    values[2, 5] = -40.0  # an outlier, negative
    return values


# Other formats ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Q4_0", "Q5_0", "Q8_0"])
def test_formats_of_llama_cpp_hold_what_gguf_makes_of_the_weights(name, weights):
    gguf = pytest.importorskip("gguf", reason="gguf is not installed, whose rounding this is compared with")
    kind = gguf.GGMLQuantizationType[name]
    theirs = gguf.dequantize(gguf.quantize(weights.numpy(), kind), kind)
    assert np.array_equal(OTHERS[name][1](weights).numpy(), theirs)


@pytest.mark.parametrize("bits", [4, 8])
def test_integers_are_the_nearest_of_their_grid(bits, weights):
    rounded, most = integers(weights, bits), 2 ** (bits - 1)
    for row, own in zip(weights.split(64, 1), rounded.split(64, 1), strict=True):
        scale = (row.abs().amax(1, keepdim=True) / (most - 0.5)).half().float().clamp(min=2**-24)
        grid = scale * torch.arange(-most, most)
        nearest = (row.unsqueeze(-1) - grid.unsqueeze(1)).abs().amin(-1)
        assert torch.allclose((row - own).abs(), nearest, rtol=0, atol=float(scale.max()) * 2**-20)


@pytest.mark.parametrize("group_size", [32, 64])
@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
def test_with_our_scales_and_moved_by_half_a_step_of_e5m3_the_grid_is_that_of_midpoint(
    precision, group_size, weights
):
    ours = Nested("E4M3", 16, group_size).rounded(weights, precision)
    assert torch.equal(ours, quantize(weights, precision.mantissa_bits, group_size, "midpoint"))


def test_the_grid_holds_zero_where_its_name_says():
    tiny = torch.tensor([[1.0, 1e-6, *[0.25] * 62]])
    off = {}
    for name in ("E5M2", "zero at E5M4", "zero nowhere", "zero a sixth off"):
        grid = precisely_for(name, 64, "midpoint")
        scale = float(grid._group_scales(tiny, None).abs())
        off[name] = [
            float(grid.rounded(tiny, p)[0, 1].abs() * 2**p.mantissa_bits / scale) for p in PRECISIONS
        ]
    assert off["E5M2"] == [0.5] * 5 + [0]  # in steps
    assert off["zero at E5M4"] == [0.5] * 4 + [0, 0.25]
    assert off["zero nowhere"] == [0.5] * 6
    assert off["zero a sixth off"] == pytest.approx([1 / 6] * 6)


@pytest.mark.parametrize("name", NESTED)
def test_nothing_clips_but_on_powers_of_two(name, weights):
    for m, precision in enumerate(reversed(PRECISIONS), 3):
        grid = precisely_for(name, 32, "midpoint")
        half = grid._group_scales(weights, None).abs().repeat_interleave(32, -1) * 2.0 ** -(m + 1)
        error = (grid.rounded(weights, precision) - weights).abs()
        assert bool((error <= half).all()) == (name != "pow2"), precision


def test_scales_are_the_least_of_their_kind(weights):
    """Two or three fraction bits, the largest weight in the last cell; powers of two as in version 1."""
    weights = weights[1:]  # the first row gets too small for a full choice of scales
    powers = 2.0 ** weights.view(5, 3, 64).abs().amax(-1).log2().floor().add(1)
    assert torch.equal(precisely_for("pow2", 64, "midpoint")._group_scales(weights, None), powers)
    for name, bits in (("E5M2", 2), ("zero nowhere", 3)):
        grid = precisely_for(name, 64, "midpoint")
        scales, needs = grid._group_scales(weights, None).abs(), grid._needs(weights).abs()
        spacing = 2.0 ** (scales.log2().floor() - bits)
        assert torch.equal((scales / spacing).round() * spacing, scales)
        assert bool(((scales >= needs) & (scales - spacing < needs)).all())


def test_parts_are_rounded_as_in_the_whole():
    whole = torch.randn(40, 64, generator=torch.Generator().manual_seed(0)) * 2.0 ** -torch.arange(
        40
    ).unsqueeze(-1)
    grid = precisely_for("zero at E5M4", 64, "midpoint")
    with grid.at(PRECISIONS[0]):
        parts = [grid(part, None, grid.scale_exponent(whole)) for part in whole.split(7)]
        assert torch.equal(torch.cat(parts), grid(whole))
        assert not torch.equal(grid(whole[20:]), grid(whole)[20:])


@pytest.mark.parametrize("name", ["int4", "Q4_K", *NESTED])
def test_many_weights_at_once_are_rounded_as_one_by_one(name, weights):
    grid, several = (
        precisely_for(name, 64, "midpoint"),
        [weights * 0.7**i for i in range(20)] + [weights[:, :100]],
    )
    together = grid.values_of_all(several, PRECISIONS[-1], None)
    for weight, found in zip(several, together, strict=True):
        assert torch.equal(found, grid.values(weight, PRECISIONS[-1], torch.float32))


def test_a_block_of_q4_k_has_sixteen_levels_and_a_smaller_error_than_q4_0():
    weights = torch.randn(64, 576, generator=torch.Generator().manual_seed(0))
    weights[0] = 0.0
    found = OTHERS["Q4_K"][1](weights)
    for block in found.reshape(-1, 32):
        assert len(block.unique()) <= 16
    assert torch.equal(found[0], weights[0])
    errors = {
        name: float((OTHERS[name][1](weights) - weights).square().mean()) for name in ("Q4_K", "Q4_0", "Q5_0")
    }
    assert errors["Q5_0"] < errors["Q4_K"] < errors["Q4_0"]
    # superblocks do not know of each other
    assert torch.equal(OTHERS["Q4_K"][1](weights[:, :512]), found[:, :512])


def test_another_rounding_reaches_linears_and_embedding_and_passes_gradients_on():
    from otaro.tune.fake_quant import prepare

    config = LlamaConfig(
        vocab_size=40, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    model, ids = LlamaForCausalLM(config), torch.arange(8)[None]
    plain = model(ids).logits
    rounding = Rounding(lambda weight, precision: integers(weight, 4))
    prepare(model, rounding)
    with rounding.at(PRECISIONS[-1]):
        rounded = model(ids, labels=ids)
    rounded.loss.backward()
    assert all(weight.grad is not None for weight in model.parameters())
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                weight.copy_(integers(weight, 4))
            assert weight.grad.abs().sum() > 0, name
    assert torch.equal(model(ids).logits, rounded.logits)
    assert not torch.equal(plain, rounded.logits)


# Zero-shot --------------------------------------------------------------------------------------------------


def test_exported_questions_get_the_scores_of_the_harness(task_files, tmp_path):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed, whose metrics these are compared with")
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    names = ["arc_easy", "boolq"]
    tasks = Tasks(names, task_files)
    theirs = {name: tasks.measure(name, model, tokenizer) for name in names}
    zeroshot.save(zeroshot.export(names, task_files, tokenizer, model), tmp_path / "questions.json.gz")
    ours = zeroshot.evaluate(
        model, zeroshot.load(tmp_path / "questions.json.gz"), model.config.max_position_embeddings
    )
    for name in names:
        assert ours[name] == [round(theirs[name].value, 5), round(theirs[name].stderr, 5)]


def test_likelihoods_are_those_of_one_request_at_a_time():
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
    draw = torch.Generator().manual_seed(0)

    def some(count):
        return torch.randint(3, 1000, (count,), generator=draw).tolist()

    two = zeroshot.Question([(some(5), some(2)), (some(30), some(4))], 0, [1.0, 1.0])
    questions = [two, zeroshot.Question([(some(70), some(3))], 0, [1.0])]  # the last is cut
    found = zeroshot.log_likelihoods(model, questions, positions=64)
    for question, scores in zip(questions, found, strict=True):
        for (context, answer), score in zip(question.choices, scores, strict=True):
            ids = torch.tensor([(context + answer)[-65:]])
            logits = model(ids[:, :-1]).logits[0].detach().log_softmax(-1)
            alone = sum(float(logits[-len(answer) + i, token]) for i, token in enumerate(answer))
            assert score == pytest.approx(alone, abs=1e-3)


# The plan and the results -----------------------------------------------------------------------------------


def test_every_row_has_a_name_and_settings_of_its_own():
    keys = [job.key for jobs in plan.blocks().values() for job in jobs]
    assert len(set(keys)) == len(keys)
    rows = [row for row in plan.planned_rows() if row.options]
    settings = [json.dumps([row.bench, row.seed, row.settings()], sort_keys=True) for row in rows]
    assert len(set(settings)) == len(settings)


def test_the_plan_has_all_that_the_study_asks_for():
    names = {row.name for row in plan.planned_rows()}
    for method in ("none", "fp", *(f"fixed:{p}" for p in plan.NAMES), "uniform", "bps", "otaro"):
        assert {method, f"{method}, truncate"} <= names
    for rows in (
        ("bps", "lambda", (3, 4, 6, 7)),
        ("otaro", "lambda", (3, 4, 6, 7)),
        ("otaro", "N", (1, 5, 20)),
    ):
        assert {f"{rows[0]}, {rows[1]} {value}" for value in rows[2]} <= names


def test_the_recipe_is_tried_in_every_regime_over_three_seeds():
    """With what it must hold against: tuning as usual, plain sampling, dedicated models, and int4 QAT held as
    it is.
    """
    asked = {(row.bench, row.name, row.seed) for row in plan.planned_rows()}
    for bench in plan.REGIMES:
        for name in (
            "best",
            "fp",
            "uniform",
            "int4 QAT",
            "int4 QAT, held as best",
            "fixed:E5M4",
            "fixed:E5M3",
        ):
            assert {(bench, name, seed) for seed in plan.SEEDS} <= asked
        assert (bench, plan.HALF, 0) in asked
    assert plan.BENCHES[plan.LONG].steps >= 2000
    assert max(plan.BENCHES["MoE"].rates) > 2e-3  # at which its rows of two rates were best
    first = [row.name for row in next(iter(plan.blocks().values()))]
    assert set(first) == {"none", "best", "fp", "uniform", "int4 QAT", "int4 QAT, held as best", plan.HALF}


def test_the_paper_is_run_as_it_is_written():
    """Truncation, lambda 5, N 10, plain SGD at 1e-5, no clipping or schedule; LAA for dedicated ones too."""
    rows = [row for row in plan.planned_rows() if row.bench in plan.PAPER and row.options]
    for row in rows:
        assert (row.options.reconstruction, row.options.exploration, row.options.delay) == (
            "truncate",
            5.0,
            10,
        )
        assert (row.optimizer, row.schedule, row.clip, row.options.leftover) == (
            "sgd",
            "constant",
            0.0,
            "drop",
        )
    for bench in plan.PAPER:
        stated = {(row.name, row.seed) for row in rows if row.bench == bench and row.lr == 1e-5}
        alone = [*plan.NAMES, "E5M4, LAA", "E5M3, LAA"]
        for name in ("fp", "uniform", "bps", "otaro", *(f"fixed:{p}" for p in alone)):
            assert {(name, seed) for seed in plan.SEEDS} <= stated
        assert {row.lr for row in rows if row.bench == bench and row.name == "otaro"} == {
            1e-5,
            1e-3,
            0.01,
            0.03,
            None,
        }
    alone = next(row.options for row in rows if row.name == "fixed:E5M3, LAA")
    assert alone.search(0).choose() == PRECISIONS[-1]
    assert alone.gradient_accumulator().delay == 10


def test_plain_sgd_without_clipping_or_schedule_reaches_torch(monkeypatch, tmp_path):
    """Every step takes the rate times the gradient from each weight, to the bit, however large the gradient
    is.
    """
    steps = []

    class Watched(work.OtaroTrainer):
        def create_optimizer(self, *args, **kwargs):
            optimizer = super().create_optimizer(*args, **kwargs)
            kept = {}

            def before(*_):
                kept.update(
                    {p: p.detach().clone() for group in optimizer.param_groups for p in group["params"]}
                )

            def after(*_):
                steps.append((type(optimizer), [group["lr"] for group in optimizer.param_groups]))
                for parameter, was in kept.items():
                    assert torch.equal(parameter, was.sub(parameter.grad, alpha=10.0))
                    steps[-1] += (float(parameter.grad.norm()),)

            optimizer.register_step_pre_hook(before)
            optimizer.register_step_post_hook(after)
            return optimizer

    monkeypatch.setattr(work, "OtaroTrainer", Watched)
    bench = shortened(monkeypatch, steps=3)
    row = next(row for row in plan.paper_rows(bench, 0) if row.name == "fixed:E5M8")
    work.Worker(places(tmp_path)).run(row, 10.0)  # a rate that makes gradients explode
    assert [(kind, set(rates)) for kind, rates, *_ in steps] == [(torch.optim.SGD, {10.0})] * len(steps)
    assert max(norm for _, _, *norms in steps for norm in norms) > 1.0  # what clipping would have shortened


def test_a_rate_that_is_chosen_and_was_made_already_is_not_made_again(monkeypatch, tmp_path):
    where, bench = places(tmp_path), plan.BENCHES["stories15M, paper"]
    method = next(method for method in plan.paper_methods() if method.name == "fp")
    for row, loss in zip(plan.swept(bench, method, 0), (3.0, 4.0, 5.0, 6.0), strict=True):
        add(where, row, heldout={"full": loss})
    (stated,) = (row for row in plan.paper_rows(bench, 1) if row.name == "fp")
    add(where, stated, heldout={}, perplexity={"full": 5.0}, lr=stated.lr)
    worker = work.Worker(where)
    monkeypatch.setattr(worker, "run", lambda *_: pytest.fail("it was made"))
    (chosen,) = plan.swept(bench, method, 1)
    work._do(worker, chosen, done(where), where)
    assert is_done(chosen, done(where))
    assert done(where)[chosen.key]["perplexity"] == {"full": 5.0}


def test_no_row_is_begun_that_would_end_after_the_deadline(monkeypatch, tmp_path):
    monkeypatch.setattr(work, "_do", lambda worker, job, *_: add(worker.places, job))
    rows = [
        plan.Row("stories15M, paper", "fp", Options(method="fp"), lr=1e-5),
        plan.Row("demo", "none", None),
    ]
    claims = claims_in(tmp_path)
    work.work(rows, places(tmp_path), claims, time.time() + 30, "[0]")
    assert [line["key"] for line in read(tmp_path / "study.jsonl")] == [rows[1].key]
    assert not work.claim(claims, rows[0].key).exists()


def test_an_average_is_judged_by_held_out_text_or_always_kept(monkeypatch, tmp_path):
    shortened(monkeypatch, steps=4)
    worker, row = (
        work.Worker(places(tmp_path)),
        plan.Row("demo", "best", plan.BEST, lr=1e-3, measured=("E5M8",)),
    )
    lines = [worker.run(replace(row, judged=judged), 1e-3)["average"] for judged in (True, False)]
    assert [line["averaged"] for line in lines] == [2, 2]
    assert lines[0]["kept"] == ("average" if lines[0]["average"] < lines[0]["last"] else "last")
    assert 1.0 < lines[0]["last"] < 10.0  # a loss
    assert (lines[1]["last"], lines[1]["average"], lines[1]["kept"]) == (1.0, 0.0, "average")


def test_rows_from_calibrated_weights_start_from_their_e5m8_and_others_do_not(monkeypatch, tmp_path):
    texts = []

    def pack(model, out, content, *, device):
        texts.append(content)
        return pack_calibrated(model, out, content, samples=2, device=device)

    monkeypatch.setattr(work, "pack_calibrated", pack)
    bench = shortened(monkeypatch)
    where, claims = places(tmp_path), claims_in(tmp_path)
    plain = plan.Row("demo", "none", None, measured=("full", "E5M8"))
    calibrated = replace(plain, name="none, calibrated", start="calibrated")
    assert work._ready(calibrated, {}, where, claims)  # whoever asks first makes them
    assert work._ready(replace(calibrated, seed=1), {}, where, claims)
    worker = work.Worker(where)
    before, after, again = (worker.run(row, 0.0)["perplexity"] for row in (plain, calibrated, plain))
    assert before == again
    assert after["full"] not in before.values()
    tuning, _ = where.texts(bench, tmp_path)
    heldout = split(
        load_data(tuning, worker.held["builtin"].tokenizer, bench.sequence_length), work.HELD_OUT, 0
    )[1]
    (content,) = texts
    end = worker.held["builtin"].tokenizer.decode(heldout[0]["input_ids"])
    assert tuning.read_text().startswith(content)
    assert end not in content


def test_rows_of_format_1_are_kept_and_shown_apart(tmp_path):
    # rows of then have no format
    results_of(tmp_path, ("uniform", 0, {"E5M3": 5.0}), settings={"rate_of": ""})
    results = results_of(tmp_path, ("uniform", 0, {"E5M3": 4.0}), settings={"rate_of": "", "format": 2})
    former = Made(results.bench, finished(read(places(tmp_path).results), 1).values())
    assert results.values("uniform", "E5M3") == [4.0]
    assert former.values("uniform", "E5M3") == [5.0]
    shown = report.powers_of_two(results, former)
    assert "| `uniform` |  |  |  |  |  |  | 5.000 |" in shown
    assert "| `uniform` |  |  |  |  |  | -20.00% |" in shown


def test_a_cell_says_what_is_not_run_yet(tmp_path):
    assert report.regime(results_of(tmp_path)).count(report.MISSING) == 2  # for each of its two tables
    shown = report.regime(results_of(tmp_path, ("best", 0, dict.fromkeys(plan.NAMES, 12.0))))
    assert (
        f"| `best, judged` | {report.MISSING} | 12.000 | 12.000 | 12.000 | 12.000 | 12.000 | 12.000 |"
        in shown
    )
    assert f"| `fp` | {report.MISSING} |  |  |  |  |  |  |" in shown
    assert f"| `fixed:`, 6 models |  | {report.MISSING} |  |  |  |  |  |" in shown


def test_the_papers_recipe_is_told_as_written_and_at_the_rate_of_a_whole_search(tmp_path, monkeypatch):
    bench = shortened(monkeypatch, "stories15M, paper", rates=(1e-5, 0.01))
    made = [("fp", 0, 1e-5, 9.0), ("fp", 0, 0.01, 5.0), ("fp", 1, 1e-5, 8.0), ("uniform", 0, 1e-5, 7.0)]
    for name, seed, rate, value in made:
        settings = {"rate_of": name, "format": 2, "lr": rate}
        more = {"key": f"{name} {seed} {rate}", "lr": rate, "settings": settings, "bench": bench.name}
        results = results_of(tmp_path, (name, seed, {"full": value}), **more)
    stated, chosen = report.as_written(results).split("At the best of 1e-05, 0.01")
    assert "| `fp` | 8.500 ± 0.707 |" in stated
    assert "| `uniform` | 7.000 |" in stated
    assert "| `fp` | 5.000 |" in chosen  # of seed 1 no rate was chosen yet
    assert "| `uniform` | *not run yet* |" in chosen  # nor of this one


def test_bars_compare_with_tuning_as_usual_and_at_e5m3_with_int4_qat(tmp_path):
    best = {"E5M8": 10.05, "E5M5": 10.2, "E5M4": 10.3, "E5M3": 11.4}
    rows = [("fp", 0, {"full": 10.0, "E5M8": 20.0}), ("best", 0, best)]
    rows.append(("int4 QAT, held as best", 0, {"E5M3": 12.0}))
    results = results_of(tmp_path, *rows, bench="stories15M", perplexity={})
    shown = report.bars([results], "held-out")
    missing = report.MISSING
    best = "stories15M: 1/3 in full precision, `best`"
    assert f"| {best} | +0.50% | {missing} | {missing} | **+2.00%** | +3.00% | -5.00% |" in shown


def test_a_run_ends_with_the_packing_that_held_out_text_prefers(tmp_path):
    where, bench = places(tmp_path), plan.BENCHES["demo"]
    name = plan.recipe_of(bench)
    assert name == "best, full 2/3, judged"
    line = {"bench": "demo", "name": "best, full 2/3", "seed": 2, "lr": 4e-4}
    append(
        where.results,
        {"key": "plain", **line, "heldout": dict.fromkeys(plan.NAMES, 9.0), "perplexity": {"E5M3": 9.0}},
    )
    for seed, chosen in enumerate((9.0, 11.0)):
        line = {"bench": "demo", "name": "best, full 2/3, calibrated", "seed": seed, "lr": 4e-4}
        plain = {"heldout": dict.fromkeys(plan.NAMES, 10.0), "perplexity": {"E5M3": 20.0}}
        own = {"heldout": dict.fromkeys(plan.NAMES, chosen), "perplexity": {"E5M3": 30.0}}
        append(where.results, {"key": str(seed), **line, **own, "plain": plain})
    # the last one was packed in one way alone
    assert made_in(where.results, "demo").values(name, "E5M3") == [30.0, 20.0, 9.0]
    append(
        where.results,
        {"key": "u", "bench": "demo", "name": "uniform", "seed": 0, "lr": 4e-4, "perplexity": {"E5M3": 25.0}},
    )
    shown = report.rivals([made_in(where.results, "demo")], "test")
    assert "| demo: against `uniform` |  |  |  |  |  | **+20.00%** |" in shown
    assert "best, full 2/3, judged" in report.regime(made_in(where.results, "demo"))


def test_the_rate_is_the_one_that_held_out_text_prefers(monkeypatch, tmp_path):
    bench, method = shortened(monkeypatch, rates=(1e-4, 1e-3)), plan.DEDICATED["E5M3"]
    (later,) = plan.swept(bench, method, seed=1)
    where = places(tmp_path)
    for row in plan.swept(bench, method, seed=0):  # of another format: they decide nothing
        add(where, row, settings={**row.settings(), "format": 1}, heldout={"E5M3": 1.0})
    # The second rate is better at full precision and on the test text, which must not count.
    for row, own, full, test in zip(
        plan.swept(bench, method, seed=0), (5.0, 6.0), (4.0, 3.0), (9.0, 8.0), strict=True
    ):
        assert chosen_rate(later, done(where)) is None
        add(where, row, heldout={"full": full, "E5M3": own}, perplexity={"E5M3": test})
        assert is_done(row, done(where))
    assert chosen_rate(later, done(where)) == 1e-4


def test_a_row_made_with_other_settings_does_not_count(tmp_path):
    where, row = places(tmp_path), plan.Row("demo", "best", plan.BEST, lr=1e-3)
    add(where, row, settings={**row.settings(), "steps": 3})
    assert not is_done(row, done(where))


def test_a_row_counts_where_more_was_measured_than_is_asked_and_not_where_less_was(tmp_path):
    where, row = places(tmp_path), plan.Row("demo", "best", plan.BEST, lr=1e-3, measured=("E5M4", "E5M3"))
    for measured, counts in ((["full", "E5M4", "E5M3"], True), (["full", "E5M4"], False)):
        add(where, row, settings={**row.settings(), "measured": measured})
        assert is_done(row, done(where)) is counts


def test_a_chosen_rate_counts_while_it_is_the_one_that_is_chosen(monkeypatch, tmp_path):
    where = places(tmp_path)
    shortened(monkeypatch, rates=(1e-3,))
    named = plan.Row("demo", "best", plan.BEST, lr=1e-3)
    rows = [named, replace(named, lr=None, rate_of="best")]

    def counts():
        return [is_done(row, done(where)) for row in rows]

    def made(row, lr, loss):
        add(where, row, lr=lr, heldout=dict.fromkeys(plan.NAMES, loss))
        return counts()

    for row in rows:
        made(row, 1e-3, 4.0)
    assert counts() == [True, True]
    shortened(monkeypatch, rates=(1e-4, 1e-3))
    assert counts() == [True, False]  # who knows
    assert made(replace(named, lr=1e-4), 1e-4, 5.0) == [True, True]
    assert made(replace(named, lr=1e-4), 1e-4, 3.0) == [True, False]


def test_means_spread_and_gaps_are_told(tmp_path):
    made = [("best", 0, 10.0), ("fixed:E5M4", 0, 12.0), ("best", 1, 11.0), ("fixed:E5M4", 1, 10.0)]
    rows = [(name, seed, {"E5M4": value}) for name, seed, value in made]
    results = results_of(tmp_path, *rows, commit="abc", machine="m")
    shown = report.regime(results)
    no = report.MISSING
    assert f"| `best, judged` | {no} | {no} | {no} | {no} | {no} | 10.500 ± 0.707 | {no} |" in shown
    assert f"| `fixed:`, 6 models |  | {no} | {no} | {no} | {no} | 11.000 ± 1.414 | {no} |" in shown
    assert "commit abc; m" in shown
    assert "seeds 0, 1." in shown
    gap, spread = -3.3333, 18.8562  # of -16.67 and +10
    assert f"| `best` |  |  |  |  | {gap:+.2f} ± {spread:.2f}% |  |" in report.against_fixed(results, "test")


def test_what_search_and_delay_add_is_told_at_the_seeds_that_both_have(tmp_path):
    for name, seed, value in (("uniform", 0, 10.0), ("bps", 0, 11.0), ("bps", 1, 20.0), ("otaro", 1, 15.0)):
        told = {"bench": "stories15M", "heldout": {}, "settings": {"rate_of": name, "format": 2}}
        results_of(tmp_path, (name, seed, {"E5M3": value}), **told)
        former = {"lr": 0.5, "heldout": dict.fromkeys(plan.NAMES, 1.0), "key": f"{name} {seed}, former rate"}
        results = results_of(tmp_path, (name, seed, {"E5M3": 1.0}), **told | former)
    shown = report.strategies([results])
    assert "| stories15M, test | `bps` against `uniform` |  |  |  |  |  | **+10.00%** |" in shown
    assert "| stories15M, test | `otaro` against `bps` |  |  |  |  |  | -25.00% |" in shown
    assert "held-out" not in shown


def test_at_equal_compute_rows_are_compared_at_the_seeds_that_both_have(tmp_path):
    ours, dedicated = "best, equal compute", "fixed:E5M3"
    made = [(ours, 0, 9.0), (ours, 1, 12.0), (dedicated, 0, 10.0), (dedicated, 1, 10.0)]
    made += [("best", 0, 8.0), ("best", 1, 7.0), (f"{dedicated}, a sixth", 0, 12.0)]
    rows = [(name, seed, {"E5M3": value}) for name, seed, value in made]
    shown = report.equal_compute(results_of(tmp_path, *rows))
    assert "| `best, equal compute` against `fixed:`, 6 models |  |  |  |  |  | **+5.00 ± 21.21%** |" in shown
    assert "| `fixed:`, 6 models, a sixth against `best` |  |  |  |  |  | **+50.00%** |" in shown


def test_what_calibrated_weights_are_worth_as_a_start_is_told_at_the_seeds_that_both_have(tmp_path):
    made = [("none", 0, 20.0), ("none, calibrated", 0, 15.0), ("best", 0, 10.0), ("best", 1, 12.0)]
    made.append(("best, calibrated start", 1, 11.4))
    rows = [(name, seed, {"E5M3": value}) for name, seed, value in made]
    shown = report.calibrated(results_of(tmp_path, *rows, bench="stories15M"))
    assert "| before, calibrated, test |  |  |  |  |  | -25.00% |" in shown
    assert "| `best, calibrated start`, held-out |  |  |  |  |  | -5.00% |" in shown


def test_prose_outside_the_marks_stays():
    page = "before\n<!-- study: one -->\nold\n<!-- /study -->\nafter\n"
    assert report.fill(page, {"one": "new"}) == "before\n<!-- study: one -->\nnew\n<!-- /study -->\nafter\n"
    with pytest.raises(SystemExit, match="two"):
        report.fill(page.replace("one", "two"), {"one": ""})


@pytest.mark.slow
def test_a_row_is_run_listed_shown_and_not_run_again(tmp_path, monkeypatch, capsys):
    results = tmp_path / "study.jsonl"
    rows = ["demo: int4 QAT, lr*"]  # measured at one precision
    told = ["--results", str(results), "--models", str(tmp_path), "--only", *rows]
    environment = {**os.environ, "PYTHON": sys.executable}
    command = [ROOT / "runs" / "study.sh", *told]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.count("done    ") == 1
    assert "1 done, 0 missing" in done.stdout
    lines = results.read_text()

    def again(*how):
        monkeypatch.setattr(sys, "argv", ["study", *told, *how])
        main()
        return capsys.readouterr().out

    jobs = [row for row in plan.planned_rows() if any(fnmatchcase(row.key, pattern) for pattern in rows)]
    work.work(jobs, replace(places(tmp_path), results=results), claims_in(tmp_path), float("inf"), "[0]")
    assert capsys.readouterr().out == ""  # a worker says what it makes
    assert "1 done, 0 missing" in again("--list")
    assert results.read_text() == lines
    made = json.loads(lines)
    assert (made["seed"], made["lr"]) == (0, 4e-4)
    monkeypatch.setattr("runs.study.__main__.DOCS", tmp_path)
    for page in ("results.md", "tables.md"):
        shutil.copyfile(ROOT / "docs" / page, tmp_path / page)
    printed = again("--report")
    assert f"| `int4 QAT` | {made['perplexity']['E5M3']:.3f} |" in (tmp_path / "tables.md").read_text()
    for figure in ("bits.svg", "bits-dark.svg"):
        assert str(tmp_path / "figures" / figure) in printed
        assert (tmp_path / "figures" / figure).stat().st_size > 1000


def test_a_row_is_measured_by_all_that_it_asks_for(monkeypatch, tmp_path):
    """In other formats, by tasks, and packed on its text with plain packing beside it."""
    shortened(monkeypatch, steps=1)
    monkeypatch.setattr(work, "SAMPLES", 4)
    zeroshot.save(
        {"one": [zeroshot.Question([([5, 6, 7], [8]), ([5, 6, 7], [9])], 0, [1.0, 1.0])] * 2},
        tmp_path / "q.gz",
    )
    (tmp_path / "q.gz").rename(places(tmp_path).questions("builtin"))
    measures = {"measured": ("full", "E5M3"), "measures": ("perplexity", "others", "zeroshot")}
    row = plan.Row("demo", "fp, calibrated", Options(method="fp"), lr=1e-4, packing="calibrated", **measures)
    line = work.Worker(places(tmp_path)).run(row, 1e-4)
    assert set(line["others"]) == set(OTHERS)
    assert line["others"]["Q8_0"] == pytest.approx(line["perplexity"]["full"], rel=0.01)
    assert line["zeroshot"]["E5M3"]["one"] in ([0.0, 0.0], [1.0, 0.0])
    assert list(line["perplexity"]) == ["full", "E5M3", *plan.NAMES[:-1]]
    assert line["plain"]["perplexity"]["full"] == line["perplexity"]["full"]
    assert line["plain"]["perplexity"]["E5M3"] != line["perplexity"]["E5M3"]


def test_a_mixture_of_experts_is_trained_and_loaded_again(monkeypatch, tmp_path):
    for size, short in (("STEPS", 2), ("BATCH", 2), ("LENGTH", 32)):
        monkeypatch.setattr(moe, size, short)
    words = {
        "instruction": "Name a colour.",
        "input": "",
        "output": "Red is a colour, and so is blue. " * 100,
    }
    (tmp_path / "alpaca.json").write_text(json.dumps([words]))
    loss = moe.make(tmp_path / "moe", tmp_path / "alpaca.json", "cpu")
    assert 0 < loss < 8  # before any step it is log(1536) = 7.3
    model = moe.load(tmp_path / "moe", "cpu")
    assert torch.equal(
        model.lm_head.weight, load_file(tmp_path / "moe" / moe.WEIGHTS)["model.embed_tokens.weight"]
    )


def test_sequences_are_cut_as_they_were_for_the_published_rows(tmp_path, monkeypatch):
    """Without a beginning-of-text token in front of each, though stories15M's tokenizer writes one before a
    text.
    """
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    beginning = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)])
    tokenizer.backend_tokenizer.post_processor = beginning
    assert begins_with_bos(tokenizer) == tokenizer.bos_token_id
    material = work.Worker(places(tmp_path))._material(shortened(monkeypatch, test_tokens=2048), tokenizer)
    starts = [block["input_ids"][0] for block in material.training]
    starts += torch.cat([batch["input_ids"][:, 0] for batch in (*material.heldout, *material.test)]).tolist()
    assert starts.count(tokenizer.bos_token_id) == 2  # where the two texts begin

    def refuse(command, **_):
        commands.append(command)
        return subprocess.CompletedProcess(command, int("gradients" in command), stderr="enough")

    commands = []
    monkeypatch.setattr(subprocess, "run", refuse)
    with pytest.raises(RuntimeError, match="enough"):
        observe(plan.Observation("stories15M", "midpoint"), tmp_path, tmp_path / "valid.txt", "cpu")
    assert "--no-bos" in commands[-1]


@pytest.mark.slow
def test_a_row_is_the_same_whatever_its_worker_did_before(monkeypatch, tmp_path):
    # In bfloat16, as on a GPU: Trainer then wraps the model in autocast, which must neither stay nor be left
    # out next time.
    monkeypatch.setattr(
        work, "TrainingArguments", lambda *a, **k: TrainingArguments(*a, **{**k, "bf16": True})
    )
    shortened(monkeypatch, steps=2)
    worker = work.Worker(places(tmp_path))
    plain, best = (
        plan.Row("demo", "fp", Options(method="fp"), measured=("full",)),
        plan.Row("demo", "best", plan.BEST),
    )
    first = worker.run(plain, 1e-3)["perplexity"]
    assert worker.run(best, 1e-3)["perplexity"]["full"] != first["full"]
    assert worker.run(plain, 1e-3)["perplexity"] == first
    (held,) = worker.held.values()
    assert held.model.model(torch.arange(8)[None]).last_hidden_state.dtype == torch.float32


# Parts ------------------------------------------------------------------------------------------------------


def test_models_and_data_come_out_of_parts_as_they_went_in(tmp_path):
    draw = torch.Generator().manual_seed(0)

    def blocks(levels, low):  # as dequantized from Q4_1 and Q8_0
        codes = torch.randint(0, levels + 1, (256, 32), generator=draw).float()
        codes[:, 0], codes[:, 1] = 0.0, levels
        scale = torch.rand(256, 1, generator=draw).mul(0.01).half()
        start = -scale.float() * levels * torch.rand(256, 1, generator=draw) if low else torch.zeros(256, 1)
        return (scale.float() * codes + start.half().float()).half().view(64, 128)

    four, eight, plain = blocks(15, True), blocks(127, False), torch.randn(64, 128, generator=draw)
    assert [int(parts.coded(weight)["codes"].max()) for weight in (four, eight)] == [15, 127]
    assert parts.coded(plain.half()) is None
    kept = {
        "SmolLM2-135M": {"a": four, "b": eight, "c": plain.half(), "d": plain[0].half()},
        "stories15M": {"a": plain},
    }
    before, after = tmp_path / "before", tmp_path / "after"
    for name, tensors in kept.items():
        (before / name).mkdir(parents=True)
        (before / name / "config.json").write_text(name)
        save_file(tensors, before / name / "model.safetensors", {"format": "pt"})
    for name in parts.DATA:
        (before / name).parent.mkdir(parents=True, exist_ok=True)
        (before / name).write_text(name * 50)
    with pytest.raises(SystemExit, match="--export"):
        parts.cut(tmp_path / "parts", before, before, 48 << 10)
    (before / "zeroshot-SmolLM2-135M.json.gz").write_bytes(b"questions")
    made = parts.cut(tmp_path / "parts", before, before, 48 << 10)
    assert len(made) > 1
    assert all(part.stat().st_size <= 48 << 10 for part in made)
    parts.join(tmp_path / "parts", after)
    for name, tensors in kept.items():
        found = load_file(after / "models" / name / "model.safetensors")
        assert all(
            torch.equal(found[key].view(torch.uint8), tensor.view(torch.uint8))
            for key, tensor in tensors.items()
        )
        assert (after / "models" / name / "config.json").read_text() == name
    assert all((after / "data" / name).read_text() == name * 50 for name in parts.DATA)
    assert len(parts.cut(tmp_path / "parts", before, before)) == 1  # those of before are gone
    parts.join(tmp_path / "parts", after)


def test_workers_start_once_when_all_parts_have_come(tmp_path):
    """With a program in place of Python that writes down what it is asked."""
    asked, work_folder, stub = tmp_path / "asked", tmp_path / "work", tmp_path / "python"
    stub.write_text(f'#!/bin/bash\necho "$*" >> {asked}\n[ "$3" = join ] || [ ! -e {asked}.fail ]\n')
    stub.chmod(0o755)
    (tmp_path / "parts").mkdir()

    def call():
        command = [ROOT / "runs" / "study_in_parts.sh", tmp_path / "parts", work_folder, "5"]
        return subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "PYTHON": str(stub)}
        )

    def called():
        return [line for line in asked.read_text().splitlines() if line.startswith("-m runs.study --models")]

    assert "no parts here" in call().stderr
    (tmp_path / "parts" / "1-of-2").touch()
    assert "1 of 2 parts have come" in call().stdout
    assert not asked.exists()
    (tmp_path / "parts" / "2-of-2").touch()
    (tmp_path / "asked.fail").touch()
    assert "ended at once" in call().stderr
    assert asked.read_text().startswith(f"-m runs.study.parts join {tmp_path / 'parts'} {work_folder}\n")
    assert len(called()) == 1
    (tmp_path / "asked.fail").unlink()
    for _ in range(2):
        assert call().returncode == 0
        assert len(called()) == 2
    assert called()[1].endswith("--workers 14 --minutes 5")
    assert (work_folder / "study.jsonl").read_text() == (
        ROOT / "benchmarks" / "results" / "study.jsonl"
    ).read_text()


# stories15M -------------------------------------------------------------------------------------------------


def test_a_llama2c_model_is_read_as_it_was(tmp_path):
    config = LlamaConfig(
        vocab_size=50, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, tie_word_embeddings=True, rms_norm_eps=1e-5,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    state = {name.removeprefix("model."): tensor for name, tensor in model.state_dict().items()}

    # the order of llama2.c: of each head the first rows of its two halves, then the second ones, ...
    def pairs(weight):
        return weight.view(-1, 2, 3, 24).transpose(1, 2).reshape(-1, 24)

    parts = [state["embed_tokens.weight"]]
    names = "input_layernorm self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj"
    names += " post_attention_layernorm mlp.gate_proj mlp.down_proj mlp.up_proj"
    for name in names.split():
        stacked = [state[f"layers.{layer}.{name}.weight"] for layer in range(2)]
        parts += [pairs(weight) if name.endswith(("q_proj", "k_proj")) else weight for weight in stacked]
    parts += [state["norm.weight"], torch.zeros(16, 6)]
    header = struct.pack("<7i", 24, 40, 2, 4, 2, 50, 16)
    content = header + b"".join(part.contiguous().numpy().astype("<f4").tobytes() for part in parts)
    (tmp_path / "model.bin").write_bytes(content)
    found = convert_llama2c.read_model(tmp_path / "model.bin")
    ids = torch.arange(10)[None]
    assert torch.equal(found(ids).logits, model(ids).logits)
    (tmp_path / "model.bin").write_bytes(content[:-4])
    with pytest.raises(SystemExit, match="ends within its weights"):
        convert_llama2c.read_model(tmp_path / "model.bin")


def test_a_llama2c_tokenizer_merges_by_score_and_spells_the_rest_in_bytes(tmp_path):
    special = [(0.0, b"<unk>"), (0.0, b"\n<s>\n"), (0.0, b"\n</s>\n")]
    tokens = special + [(0.0, bytes([value])) for value in range(256)]
    tokens += [(-1.0, b" t"), (-2.0, b"he"), (-3.0, b" the"), (-4.0, b"th")]
    tokens += [(-9.0, letter) for letter in (b" ", b"t", b"h", b"e", b"n")]
    content = b"".join(struct.pack("<fi", score, len(token)) + token for score, token in tokens)
    (tmp_path / "tokenizer.bin").write_bytes(struct.pack("<i", 7) + content)
    convert_llama2c.write_llama_tokenizer(tmp_path / "tokenizer.bin", len(tokens), 256, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    encoded = tokenizer("the then\n")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(encoded) == ["<s>", "▁the", "▁the", "n", "<0x0A>"]
    assert tokenizer.decode(encoded, skip_special_tokens=True) == "the then\n"
    with pytest.raises(SystemExit, match="does not hold 100 different tokens"):
        convert_llama2c.write_llama_tokenizer(tmp_path / "tokenizer.bin", 100, 256, tmp_path)
