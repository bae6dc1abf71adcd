"""The report page: what it says, what it refuses, and what a browser makes of it."""

import base64
import errno
import hashlib
import html
import json
import math
import re
import shutil
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from importlib import resources
from itertools import pairwise
from pathlib import Path

import pytest

import otaro
from otaro.builtin import MODEL_DIR
from otaro.errors import OtaroError
from otaro.evaluate.charts import shown
from otaro.evaluate.comparable import held_out, measured
from otaro.evaluate.page import _library
from otaro.evaluate.report import write_report
from otaro.evaluate.run_folder import BEFORE, NAMES, read_runs
from otaro.file.io import NestedDirectory
from otaro.file.summary import summarize

PRECISIONS = NAMES[1:]
BEFORE_TUNING = dict(zip(NAMES, (7.94, 7.95, 7.96, 7.99, 8.06, 8.35, 9.87), strict=True))
TUNED = dict(zip(NAMES, (7.90, 7.91, 7.91, 7.92, 7.97, 8.10, 8.52), strict=True))
STEPS = 90
EVAL = "otaro eval run/nested --precision all"
EVIL = (
    "</script><script>document.title='owned'</script><img src=x "
    "onerror=\"document.title='owned'\">'&{{script}}"
)


def quality_entries(scale: float) -> list[dict]:
    made = {
        "command": f"{EVAL} --text wiki.txt",
        "date": "2026-11-15",
        "versions": {"otaro": "0.1.0"},
        "device": "cpu",
    }
    text = {"text": "wiki.txt", "text_sha256": "ab" * 32, "window": 512, "tokens": 9000, "bos": True}
    entries = []
    for number, name in enumerate(NAMES):
        at = {"precision": name} | ({} if name == "fp" else {"group_size": 64, "reconstruction": "midpoint"})
        value = 20 * scale * 1.5 ** max(0, number - 3)
        speed = 900.0 + 50 * number
        entries.append(
            {
                "kind": "perplexity",
                **at,
                **text,
                "stride": 256,
                "value": value,
                "tokens_per_second": speed,
                **made,
            }
        )
        for task in ("arc_easy", "piqa"):
            score = {
                "metric": "acc_norm",
                "value": 0.6 / scale - 0.02 * number,
                "stderr": 0.01,
                "samples": 500,
                "limit": None,
            }
            score |= {"data_sha256": None, "truncated": 0}
            entries.append(
                {"kind": "task", **at, "task": task, **score, **made, "command": f"{EVAL} --tasks {task}"}
            )
        if name != "fp":
            figures = {"kl": 0.001 * 3**number, "agreement": 1 - 0.03 * number, "reference": "fp"}
            entries.append({"kind": "divergence", **at, **text, **figures, **made})
    return entries


def write_entries(directory: Path, entries: list[dict]) -> None:
    nested = (directory / "model-m3.safetensors").is_file()
    model = NestedDirectory(directory).base.header.model if nested else "0" * 64
    (directory / "quality.json").write_text(json.dumps({"schema": 1, "model": model, "entries": entries}))


def gradients() -> dict:
    def matrix(slope: float) -> list[list[float]]:
        return [[1 - slope * abs(i - j) for j in range(6)] for i in range(6)]

    projections = ("q_proj", "k_proj", "down_proj")
    modules = [
        {
            "module": f"model.layers.{i}.{p}",
            "layer": i,
            "projection": p,
            "matrix": matrix(0.02 * (i + 1) + 0.01 * len(p)),
        }
        for i in range(4)
        for p in projections
    ]
    modules.append({"module": "lm_head", "layer": None, "projection": "lm_head", "matrix": matrix(0.05)})
    # without a gradient
    modules.append({"module": "idle", "layer": None, "projection": "idle", "matrix": [[None] * 6] * 6})
    return {
        "precisions": list(PRECISIONS),
        "overall": matrix(0.06),
        "modules": modules,
        "command": "otaro analyze gradients run/model --text wiki.txt",
    }


def timed() -> dict:
    """What `otaro bench --json` prints, of what a report reads."""
    rows = [
        {"precision": name, "decode": 100.0 + i, "prefill": 500.0, "weight_bytes": 512_000}
        for i, name in enumerate(PRECISIONS)
    ]
    settings = {"prompt_tokens": 64, "tokens": 32, "context": 16, "rounds": 3, "threads": None, "kv": None}
    place = {"machine": "a Xeon", "kernels": "cpu:avx2", "threads": 2, "device": "cpu"}
    return {**place, "settings": settings, "precisions": [*rows, {**rows[0], "precision": "fit:90MB"}]}


def make_run(
    directory: Path, tuned: dict, nested: Path | None = None, data: str = "builtin", method: str = "bps"
) -> Path:
    """A run folder as `otaro tune` leaves it, written by hand."""
    directory.mkdir(parents=True)
    training = {"steps": STEPS, "epochs": 1.0, "sequence_length": 128, "seed": 0, "lora": None, "bf16": False}
    options = {"method": method, "exploration": 5.0, "precisions": list(PRECISIONS)}
    versions = {"otaro": "0.1.0", "torch": "2.13.0"}
    config = {
        "model": "builtin",
        "data": data,
        "options": options,
        "training": training,
        "versions": versions,
    }
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "perplexity.json").write_text(json.dumps({"before": BEFORE_TUNING, "after": tuned}))
    lines = []
    for step in range(1, STEPS + 1):
        name = "fp" if method == "fp" else PRECISIONS[(step * 5 + step // 7) % 6]
        loss = 2 + math.exp(-step / 30) + 0.05 * math.sin(step) + 0.1 * (name == "E5M3")
        record = {"step": step, "precision": name, "loss": loss, "applied": name != "E5M3" or step % 2 == 0}
        lines.append(json.dumps(record) + "\n")
    lines.append(json.dumps({"step": STEPS, "leftover": 3, "applied": True}) + "\n")
    (directory / "log.jsonl").write_text("".join(lines))
    if nested:
        shutil.copytree(nested, directory / "nested")
    return directory


def measure(run: Path, scale: float) -> None:
    """Add what `otaro eval` and `otaro analyze` would."""
    write_entries(run / "nested", quality_entries(scale))
    (run / "analysis").mkdir()
    (run / "analysis" / "gradients.json").write_text(json.dumps(gradients()))


@pytest.fixture(scope="module")
def builtin_nested(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("report") / "nested"
    otaro.pack(MODEL_DIR, out)
    return out


@pytest.fixture(scope="module")
def full_report(builtin_nested, tmp_path_factory) -> Path:
    """A report of two runs with everything measured of the first."""
    home = tmp_path_factory.mktemp("full")
    best = make_run(home / "best", TUNED, builtin_nested)
    measure(best, 1.0)
    (best / "bench.json").write_text(json.dumps(timed()))
    plain = make_run(home / "plain", {**BEFORE_TUNING, "E5M3": 9.6}, builtin_nested, method="fp")
    measure(plain, 1.1)
    write_report(read_runs([best, plain]), home / "report.html")
    return home / "report.html"


class Reader(HTMLParser):
    """What of a page a test asks about: its text, and every element with its attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text, self.elements, self._raw = "", [], False
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self._raw = tag in ("script", "style")

    def handle_endtag(self, tag):
        self._raw = False

    def handle_data(self, data):
        self.text += "" if self._raw else data

    def attributes(self, name):
        return [attributes[name] for _, attributes in self.elements if name in attributes]


def perplexities(runs: list) -> dict[str, list]:
    """Series by what was measured, in words."""
    return {
        about.what: series for about, series in {**measured(runs, "perplexity"), **held_out(runs)}.items()
    }


def page_of(*runs: Path) -> str:
    out = runs[0].parent / "page.html"
    write_report(read_runs(runs), out)
    return out.read_text()


def charts_of(page: str) -> dict[str, dict]:
    """Specifications by description."""
    stored = json.loads(
        re.search(r'<script type="application/json" id="charts">(.*?)</script>', page, re.DOTALL)[1]
    )
    return {spec["description"]: spec for spec in stored["figures"].values()}


# What the page says.


def test_the_opening_tells_the_result(full_report):
    text = Reader(full_report.read_text()).text
    assert "One model, six precisions" in text
    assert "best takes 1.6 MB at E5M8, and the first 739.3 kB of it are the model at E5M3." in text
    assert "perplexity changes by +237.5% (plain: +237.5%)" in text
    assert "67.50739.3 kB4.14 bits" in text
    assert (
        "Perplexity of best on wiki.txt (9,000 tokens, windows of 512, stride 256, each begun with BOS), "
        "lower is better" in text
    )


def test_the_first_figure_is_relative_to_the_best_at_each_precision(tmp_path, builtin_nested):
    runs = [
        make_run(tmp_path / name, values, builtin_nested)
        for name, values in (("one", TUNED), ("two", BEFORE_TUNING))
    ]
    first, second = list(charts_of(page_of(*runs)).values())[:2]
    percent = {(row["run"], row["precision"]): row["value"] for row in first["data"]["values"]}
    assert percent == {
        **{("one", shown(name)): pytest.approx(0) for name in NAMES},
        **{
            ("two", shown(name)): pytest.approx(100 * (BEFORE_TUNING[name] / TUNED[name] - 1))
            for name in NAMES
        },
    }
    assert second["description"].startswith(
        "Perplexity on data held out of the built-in tuning text, by size"
    )
    sizes = {row.precision: row.bytes / 1e6 for row in summarize(NestedDirectory(builtin_nested)).precisions}
    curve = {
        row["precision"]: (row["megabytes"], row["value"])
        for row in second["data"]["values"]
        if row["run"] == "one"
    }
    assert curve == {name: (sizes[name], TUNED[name]) for name in PRECISIONS}


def test_names_by_size_stand_above_every_line(tmp_path, builtin_nested):
    crossing = {**TUNED, "E5M8": TUNED["E5M8"] + 1, "E5M3": TUNED["E5M3"] - 1}
    runs = [
        make_run(tmp_path / name, values, builtin_nested)
        for name, values in (("one", TUNED), ("two", crossing))
    ]
    curve = list(charts_of(page_of(*runs)).values())[1]
    named = {row["label"]: row["value"] for row in curve["data"]["values"] if row["label"]}
    assert named == {name: max(TUNED[name], crossing[name]) for name in PRECISIONS}


def test_one_model_alone_is_relative_to_its_finest(tmp_path):
    first = next(iter(charts_of(page_of(make_run(tmp_path / "run", TUNED))).values()))
    percent = {(row["run"], row["precision"]): row["value"] for row in first["data"]["values"]}
    assert percent["run", "E5M3"] == pytest.approx(100 * (TUNED["E5M3"] / TUNED["fp"] - 1))
    assert percent[BEFORE, "E5M3"] == pytest.approx(100 * (BEFORE_TUNING["E5M3"] / BEFORE_TUNING["fp"] - 1))


def test_hashes_are_under_a_fold(full_report):
    page = full_report.read_text()
    assert re.search(
        r"<details><summary>how it was made</summary><ul>.*?<li><code>sha256 "
        r"(ab){32}</code></li></ul></details>",
        page,
    )
    assert "abababab" not in re.sub(r"<details>.*?</details>", "", page)


def test_the_opening_tells_of_held_out_data_where_nothing_else_was_measured(tmp_path, builtin_nested):
    best = make_run(tmp_path / "best", TUNED, builtin_nested)
    text = Reader(page_of(best, make_run(tmp_path / "plain", {**BEFORE_TUNING, "E5M3": 9.6}))).text
    assert "perplexity changes by +7.7% (plain: +20.8%; before tuning: +24.2%)" in text
    assert "8.52739.3 kB4.14 bits9.87 before tuning" in text


def test_cross_entropy_is_drawn_and_not_what_was_trained_on(tmp_path):
    run = make_run(tmp_path / "run", TUNED)
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    mixed = [{**line, "cross_entropy": 2 * line["loss"]} if "loss" in line else line for line in lines]
    (run / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in mixed))
    drawn = charts_of(page_of(run))["Cross-entropy by step, run"]["layer"][1]["data"]["values"]
    assert [row["loss"] for row in drawn] == [2 * line["loss"] for line in lines if "loss" in line]
    stated = json.loads((run / "config.json").read_text())
    stated["options"]["distill"] = 0.5
    (run / "config.json").write_text(json.dumps(stated))
    assert "Do not compare" not in page_of(run)
    (run / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "This log has no cross-entropy" in page_of(run)


def test_a_quality_record_in_a_folder_called_before_is_the_model_before_tuning(tmp_path, builtin_nested):
    run = make_run(tmp_path / "run", TUNED, builtin_nested)
    write_entries(run / "nested", quality_entries(1.0))
    (tmp_path / "before").mkdir()
    write_entries(tmp_path / "before", quality_entries(2.0))
    (several, glance) = perplexities(read_runs([run, tmp_path / "before"])).values()
    assert [(series.label, series.stage, series.values["E5M3"]) for series in several] == [
        ("run", "after", 67.5),
        (BEFORE, "before", 135.0),
    ]
    assert [series.label for series in glance] == ["run", BEFORE]
    page = page_of(run, tmp_path / "before")
    assert "67.50739.3 kB4.14 bits135.00 before tuning" in Reader(page).text
    first = next(iter(charts_of(page).values()))
    assert first["layer"][0]["encoding"]["color"]["scale"] == {
        "domain": ["run", BEFORE],
        "range": ["var(--run-1)", "var(--before)"],
    }
    alone = Reader(page_of(tmp_path / "before")).text
    assert "perplexity changes by +237.5%." in alone
    assert "otaro analyze gradients MODEL" in alone
    (tmp_path / "other").mkdir()
    write_entries(tmp_path / "other", quality_entries(2.0))
    assert [read.name for read in read_runs([tmp_path / "other", run])] == ["other", "run"]


def test_every_heading_of_quality_says_which_text_and_columns_have_one_order(tmp_path, builtin_nested):
    run = make_run(tmp_path / "run", TUNED, builtin_nested)
    write_entries(run / "nested", quality_entries(1.0))
    (tmp_path / "before").mkdir()
    write_entries(tmp_path / "before", quality_entries(2.0))
    page = page_of(run, tmp_path / "before")
    quality = page[page.index('<section id="quality"') : page.index('<section id="size"')]
    titles = re.findall(r"<strong>(.*?)</strong>", quality)
    assert len(titles) == len(set(titles))
    assert sum("data held out of the built-in tuning text" in title for title in titles) == 3
    heads = [re.findall(r"<th [^>]*>(.*?)</th>", head) for head in re.findall(r"<thead>.*?</thead>", quality)]
    by_run = [head for head in heads if head[0] == "precision"]
    assert len(by_run) == 3  # perplexity on both texts, and divergence
    assert all(head == ["precision", "run", "before tuning"] for head in by_run)


def test_bits_are_those_of_the_whole_model_everywhere(tmp_path, builtin_nested):
    page = page_of(make_run(tmp_path / "run", TUNED, builtin_nested))
    bits = {
        row.precision: f"{row.bits_per_weight:.2f}"
        for row in summarize(NestedDirectory(builtin_nested)).precisions
    }
    told = Reader(page).text
    assert all(told.count(f"{count} bits") == 1 for count in bits.values())
    assert all(f"class=number>{count}</td>" in page for count in bits.values())
    assert "4.13" not in page  # of packed weights alone


def steps_table(*runs):
    """Rows of the table of steps, as words."""
    page = page_of(*runs)
    table = page[page.index("Steps at each precision") :]
    rows = re.findall(r"<tr>(.*?)</tr>", table[: table.index("</table>")])
    return Reader(page).text, [re.findall(r"<t[hd][^>]*>([^<]*)", row) for row in rows]


def test_steps_count_the_pass_in_full_precision_and_name_the_recipe(tmp_path):
    best, usual = (
        make_run(tmp_path / "run", TUNED, method="uniform"),
        make_run(tmp_path / "usual", TUNED, method="fp"),
    )
    for run, options in ((best, {"full": 1 / 3}), (usual, {"full": 0.0})):
        stated = json.loads((run / "config.json").read_text())
        stated["options"] |= options
        (run / "config.json").write_text(json.dumps({**stated, "recipe": "best"}))
    told, (headings, ours, theirs) = steps_table(best, usual)
    assert headings[:3] == ["run", "recipe", "full"]
    assert ours[:3] == ["run", "best", str(STEPS)]
    assert sum(map(int, ours[3:])) == STEPS
    assert theirs == ["usual", "fp", str(STEPS), *["0"] * 6]
    assert "Here run was tuned once for all precisions; usual was tuned as usual, then rounded." in told
    assert "need no steps of their own" in told
    told, (headings, alone) = steps_table(usual)
    assert (headings, alone) == (["run", "recipe", "full"], theirs[:3])  # where none has steps, no column
    assert "need no steps of their own" not in told


def test_texts_of_different_tokens_are_not_compared(tmp_path, builtin_nested):
    runs = [make_run(tmp_path / name, TUNED, builtin_nested) for name in ("one", "two")]
    for run, tokens in zip(runs, (9000, 7000), strict=True):
        entries = [
            {**entry, "tokens": tokens} if "tokens" in entry else entry for entry in quality_entries(1.0)
        ]
        write_entries(run / "nested", entries)
        (run / "perplexity.json").write_text(
            json.dumps({"before": BEFORE_TUNING, "after": TUNED, "tokens": tokens})
        )
    assert {
        text: [series.label for series in several] for text, several in perplexities(read_runs(runs)).items()
    } == {
        "wiki.txt (9,000 tokens, windows of 512, stride 256, each begun with BOS)": ["one"],
        "wiki.txt (7,000 tokens, windows of 512, stride 256, each begun with BOS)": ["two"],
        "data held out of the built-in tuning text (sequences of 128, seed 0, 9,000 tokens)": ["one", BEFORE],
        "data held out of the built-in tuning text (sequences of 128, seed 0, 7,000 tokens)": ["two", BEFORE],
    }


def test_runs_whose_sequences_begin_otherwise_are_not_compared(tmp_path, builtin_nested):
    runs = [make_run(tmp_path / name, TUNED, builtin_nested) for name in ("older", "without", "with")]
    for run, bos in zip(runs[1:], (False, True), strict=True):  # the first was tuned before it was recorded
        config = json.loads((run / "config.json").read_text())
        (run / "config.json").write_text(json.dumps({**config, "bos": bos}))
    held = "data held out of the built-in tuning text"
    assert {
        text: [series.label for series in several] for text, several in perplexities(read_runs(runs)).items()
    } == {
        f"{held} (sequences of 128, seed 0)": ["older", "without", BEFORE],
        f"{held} (sequences of 128, each with a beginning-of-text token, seed 0)": ["with", BEFORE],
    }


def test_speed_is_what_bench_timed_and_nothing_else(tmp_path, builtin_nested):
    runs = [make_run(tmp_path / name, TUNED, builtin_nested) for name in ("one", "two", "other", "none")]
    for run in runs:
        write_entries(run / "nested", quality_entries(1.0))  # which have tokens per second of their own
    for run, machine in zip(runs[:3], ("a Xeon", "a Xeon", "a Core"), strict=True):
        (run / "bench.json").write_text(json.dumps({**timed(), "machine": machine}))
    page = page_of(*runs)
    found = {title: spec for title, spec in charts_of(page).items() if "speed" in title.lower()}
    assert {title: {row["run"] for row in spec["data"]["values"]} for title, spec in found.items()} == {
        "Decode speed on a Xeon, kernels cpu:avx2, 2 threads": {"one", "two"},
        "Decode speed on a Core, kernels cpu:avx2, 2 threads": {"other"},
    }
    rows = next(iter(found.values()))["data"]["values"]
    assert {row["precision"]: row["value"] for row in rows} == {
        name: 100.0 + i for i, name in enumerate(PRECISIONS)
    }
    assert "E5M8one10090 kB" not in Reader(page).text
    assert "E5M8one100500512.0 kB" in Reader(page).text
    settings = "--prompt-tokens 64 --tokens 32 --context 16 --rounds 3"
    assert f"otaro bench {runs[0] / 'nested'} {settings} --json" in page


@pytest.mark.parametrize(("share", "size", "said"), [(0.29, 8e7, 2), (0.31, 8e7, 0), (0.31, 4e6, 2)])
def test_speed_that_hardly_follows_the_bits_is_told(tmp_path, share, size, said):
    rows = [{**row, "bandwidth_share": share, "weight_bytes": size} for row in timed()["precisions"]]
    run = make_run(tmp_path / "run", TUNED)
    (run / "bench.json").write_text(json.dumps({**timed(), "precisions": rows}))
    assert page_of(run).count("speed hardly follows the bits here") == said


def test_a_share_of_the_bandwidth_that_is_no_number_is_refused(tmp_path):
    run = make_run(tmp_path / "run", TUNED)
    rows = [{**row, "bandwidth_share": "much"} for row in timed()["precisions"]]
    (run / "bench.json").write_text(json.dumps({**timed(), "precisions": rows}))
    with pytest.raises(
        OtaroError, match=r"precisions\.0\.bandwidth_share: it should be a number, not 'much'"
    ):
        read_runs([run])


def test_means_are_of_several_steps_and_losses_of_runs_on_one_scale(tmp_path):
    runs = [make_run(tmp_path / name, TUNED) for name in ("one", "two")]
    for run, loss in zip(runs, (2.0, 4.0), strict=True):
        names = ["E5M4" if step % 4 == 0 or step > 61 else "E5M3" for step in range(1, 65)]
        lines = [{"step": i, "precision": name, "loss": loss + i / 64} for i, name in enumerate(names, 1)]
        (run / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = charts_of(page_of(*runs))
    figures = [found[f"Cross-entropy by step, {name}"]["layer"] for name in ("one", "two")]
    scales = [layer["encoding"]["y"]["scale"]["domain"] for figure in figures for layer in figure]
    assert scales == [[2 + 1 / 64, 5.0]] * 4
    means = Counter(row["precision"] for row in figures[0][0]["data"]["values"])
    assert means == {"E5M3": 46 // 8, "E5M4": 18 // 8}  # the last three steps have no mean of their own


def test_averages_are_of_shares_at_one_limit(tmp_path):
    (tmp_path / "model").mkdir()
    entries = [
        entry for entry in quality_entries(1.0) if entry["kind"] == "task" and entry["precision"] == "E5M3"
    ]
    few = [{**entry, "limit": 5, "value": 0.25} for entry in entries]
    odd = [
        {**entry, "limit": 7, "metric": metric}
        for entry, metric in zip(entries, ("acc", "perplexity"), strict=True)
    ]
    write_entries(tmp_path / "model", [*entries, *few, *odd])
    found = {
        title: spec
        for title, spec in charts_of(page_of(tmp_path / "model")).items()
        if title.startswith("average")
    }
    assert {title: [row["value"] for row in spec["data"]["values"]] for title, spec in found.items()} == {
        "average of 2 (acc)": [pytest.approx(0.48)],
        "average of 2 (acc, first 5)": [0.25],
    }


def test_divergence_is_from_what_the_command_compares_with(tmp_path, builtin_nested):
    assert "No divergence from its finest precision here." in page_of(
        make_run(tmp_path / "run", TUNED, builtin_nested)
    )
    assert "No divergence from the unquantized model here." in page_of(make_run(tmp_path / "other", TUNED))


def test_half_a_surrogate_pair_does_not_stop_the_page(tmp_path):
    run = make_run(tmp_path / "run", TUNED, data="half \ud800 a pair", method="\udfff")
    page = page_of(run)
    assert "data held out of half ? a pair" in Reader(page).text
    assert any("half ? a pair" in title for title in charts_of(page))


def test_every_figure_and_table_has_the_commands_that_made_it(full_report):
    page = full_report.read_text()
    blocks = re.findall(r"<figcaption>.*?</figcaption>", page, re.DOTALL)
    assert len(blocks) == 16 + 7
    made = [[html.unescape(one) for one in re.findall(r"<li><code>(.*?)</code>", block)] for block in blocks]
    assert all(made)
    commands = {command for some in made for command in some}
    assert {f"{EVAL} --text wiki.txt", "otaro analyze gradients run/model --text wiki.txt"} <= commands


def test_commands_that_differ_in_their_precision_are_one(tmp_path):
    (tmp_path / "model").mkdir()
    entries = [entry for entry in quality_entries(1.0) if entry["kind"] == "perplexity"]
    for entry in entries:
        entry["command"] = f"otaro eval model --precision {entry['precision']} --text wiki.txt"
    entries[-1]["command"] += " --window 512"
    write_entries(tmp_path / "model", entries)
    lists = re.findall(r"how it was made</summary><ul>(.*?)</ul>", page_of(tmp_path / "model"))
    assert all(
        re.findall("<code>(otaro.*?)</code>", one)
        == [
            "otaro eval model --precision fp,E5M8,E5M7,E5M6,E5M5,E5M4 --text wiki.txt",
            "otaro eval model --precision E5M3 --text wiki.txt --window 512",
        ]
        for one in lists
    )
    assert lists


def test_what_is_built_in_has_a_name_for_each_of_its_texts(tmp_path, builtin_nested):
    run = make_run(tmp_path / "run", TUNED, builtin_nested)
    entries = [{**entry, "text": "builtin"} for entry in quality_entries(1.0) if "text" in entry]
    write_entries(run / "nested", entries)
    assert [what.partition(" (")[0] for what in perplexities(read_runs([run]))] == [
        "the built-in test text",
        "data held out of the built-in tuning text",
    ]


def luminance(colour: str) -> float:
    linear = [
        (one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4)
        for one in (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    ]
    return sum(weight * one for weight, one in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_lines_stand_out_from_the_paper_and_precisions_lighten(theme):
    style = resources.files("otaro.evaluate").joinpath("assets", "report.css").read_text()
    colours = {
        name: luminance(both[theme])
        for name, *both in re.findall(r"--([\w-]+): light-dark\((#.*?), (#.*?)\);", style)
    }
    papers = (colours["paper"], colours["raised"])
    lines = {name: one for name, one in colours.items() if re.fullmatch(r"m\d|run-\d|before", name)}
    assert len(lines) == 6 + 6 + 1
    for one in lines.values():
        assert all((max(one, paper) + 0.05) / (min(one, paper) + 0.05) >= 3 for paper in papers)
    scale = [lines[f"m{bits}"] for bits in range(8, 2, -1)]
    assert all((coarser + 0.05) / (finer + 0.05) > 1.15 for finer, coarser in pairwise(scale))


def test_the_command_of_a_run_names_every_option(tmp_path):
    (run,) = read_runs([make_run(tmp_path / "a run", TUNED)])
    options = "--method bps --lambda 5.0 --precisions E5M8,E5M7,E5M6,E5M5,E5M4,E5M3"
    training = f"--steps {STEPS} --sequence-length 128 --seed 0"
    assert run.command == f"otaro tune builtin --data builtin --out '{tmp_path}/a run' {options} {training}"
    stated = json.loads((run.path / "config.json").read_text())
    (run.path / "config.json").write_text(json.dumps({**stated, "processes": 2}))
    (shared,) = read_runs([run.path])
    assert shared.command == f"torchrun --nproc_per_node 2 -m {run.command}"


def test_runs_on_the_same_data_share_their_baseline_and_others_do_not(tmp_path):
    one, two = make_run(tmp_path / "one", TUNED), make_run(tmp_path / "two", TUNED)
    other = make_run(tmp_path / "other", TUNED, data="mine.txt")
    (two / "perplexity.json").write_text(json.dumps({"before": BEFORE_TUNING, "after": TUNED}))
    found = perplexities(read_runs([one, two, other]))
    assert [[series.label for series in several] for several in found.values()] == [
        ["one", "two", BEFORE],
        ["other", BEFORE],
    ]
    (two / "perplexity.json").write_text(json.dumps({"before": {"E5M8": 9.0}, "after": TUNED}))
    labels = [series.label for series in next(iter(perplexities(read_runs([one, two])).values()))]
    assert labels == ["one", "two", "one, before", "two, before"]


def test_what_was_measured_of_both_forms_of_a_model_counts_once(tmp_path, builtin_nested):
    run = make_run(tmp_path / "run", TUNED, builtin_nested)
    entries = quality_entries(1.0)
    for form, value in (("nested", 20.0), ("model", 30.0)):
        changed = [{**entry, "value": value} if entry["kind"] == "perplexity" else entry for entry in entries]
        (run / form).mkdir(exist_ok=True)
        write_entries(run / form, changed)
    (read,) = read_runs([run])
    assert len(read.quality) == len(entries)
    assert {entry["value"] for entry in read.quality if entry["kind"] == "perplexity"} == {20.0}


def test_a_model_stands_for_itself(tmp_path, builtin_nested):
    nested = Path(shutil.copytree(builtin_nested, tmp_path / "nested"))
    write_entries(nested, quality_entries(1.0))
    page = page_of(nested)
    assert "nested takes 1.6 MB at E5M8" in Reader(page).text
    assert "Cross-entropy by step" not in page


def test_a_wide_range_of_perplexities_is_logarithmic(tmp_path, builtin_nested):
    narrow = charts_of(page_of(make_run(tmp_path / "narrow", TUNED, builtin_nested)))
    wide = charts_of(page_of(make_run(tmp_path / "wide", {**TUNED, "E5M3": 605.0}, builtin_nested)))
    curves = [next(spec for title, spec in drawn.items() if ", by size" in title) for drawn in (narrow, wide)]
    kinds = [curve["layer"][0]["encoding"]["y"]["scale"].get("type", "linear") for curve in curves]
    assert kinds == ["linear", "log"]


def test_what_is_absent_is_one_line_with_the_command_that_makes_it(tmp_path):
    run = make_run(tmp_path / "run", TUNED)
    (run / "log.jsonl").unlink()
    page = page_of(run)
    missing = [html.unescape(one) for one in re.findall(r"<p class=missing>No [^<]*<code>(.*?)</code>", page)]
    assert missing == [
        f"otaro eval {run / 'model'} --precision all --tasks zeroshot8",
        f"otaro eval {run / 'model'} --precision all --text FILE --divergence",
        f"otaro pack {run / 'model'} OUT",
        f"otaro bench {run / 'model'} --json > {run}/bench.json",
        "otaro tune MODEL --data FILE --out RUN",
        f"otaro analyze gradients {run / 'model'} --text FILE",
    ]


def test_figures_that_are_not_finite_are_told_and_not_drawn(tmp_path):
    run = make_run(tmp_path / "run", {**TUNED, "E5M3": math.inf})
    log = (run / "log.jsonl").read_text().splitlines()
    (run / "log.jsonl").write_text(
        "\n".join([*log[:5], json.dumps({**json.loads(log[5]), "loss": math.nan}), *log[6:]])
    )
    page = page_of(run)
    assert "not finite" in Reader(page).text
    assert "1 steps without a finite loss are left out" in page
    charts_of(page)  # its JSON has neither NaN nor Infinity, or this would not be sound JSON
    assert not re.search(r"\b(NaN|Infinity)\b", re.search(r'id="charts">(.*?)</script>', page, re.DOTALL)[1])


# What comes from files is hostile.


@pytest.fixture(scope="module")
def hostile_report(builtin_nested, tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("hostile")
    run = make_run(home / '<img src=x onerror=alert(1)>"&', TUNED, builtin_nested, data=EVIL)
    entries = [{**entry, "command": EVIL} for entry in quality_entries(1.0) if entry.get("task") != "piqa"]
    for entry in entries:
        entry.update({key: EVIL for key in ("text", "task", "metric") if key in entry})
    write_entries(run / "nested", entries)
    stored = gradients()
    stored["command"] = EVIL
    stored["modules"][0].update(module=EVIL, projection=EVIL)
    (run / "bench.json").write_text(json.dumps({**timed(), "machine": EVIL, "kernels": EVIL}))
    (run / "analysis").mkdir()
    (run / "analysis" / "gradients.json").write_text(json.dumps(stored))
    config = json.loads((run / "config.json").read_text())
    config["options"]["method"] = EVIL
    config["versions"] = {EVIL: EVIL}
    (run / "config.json").write_text(json.dumps(config))
    write_report(read_runs([run]), home / "report.html")
    return home / "report.html"


def test_hostile_text_stays_text(hostile_report, full_report):
    hostile, plain = Reader(hostile_report.read_text()), Reader(full_report.read_text())
    assert EVIL in hostile.text
    assert {tag for tag, _ in hostile.elements} <= {tag for tag, _ in plain.elements}
    assert sum(tag == "script" for tag, _ in hostile.elements) == 3
    assert not [name for _, attributes in hostile.elements for name in attributes if name.startswith("on")]
    assert EVIL in json.dumps(charts_of(hostile_report.read_text()), ensure_ascii=False).replace('\\"', '"')


def test_the_page_fetches_nothing_and_runs_only_its_own_scripts(full_report):
    page = full_report.read_text()
    reader = Reader(page)
    assert not reader.attributes("src")
    assert all(link.startswith("#") for link in reader.attributes("href"))
    assert not re.search(r"@import|url\(", re.search(r"<style>(.*?)</style>", page, re.DOTALL)[1])
    (policy,) = (
        a["content"] for tag, a in reader.elements if a.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert [f"'sha256-{digest}'" for digest in digests] == re.search(r"script-src (.*?);", policy)[1].split()


# What is wrong is refused by name.


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", "{", "not JSON"),
        ("config.json", "[1]", "not a JSON object"),
        ("config.json", '{"model": "x", "data": 3}', "data: input should be a valid string"),
        ("config.json", None, "is missing"),
        ("perplexity.json", "\xff", "not JSON"),
        ("perplexity.json", '{"before": {"E5M9": 1}}', "before.E5M9: it should be one of fp, E5M8"),
        ("perplexity.json", '{"after": {"E5M8": "low"}}', "after.E5M8: it should be a number, not 'low'"),
        ("log.jsonl", '{"step": 1, "precision": "E5M8", "loss": 1}\n{"step": 2, "pre', "line 2 is not JSON"),
        ("perplexity.json", '{"tokens": "many"}', "tokens: input should be a valid integer"),
        ("log.jsonl", '{"precision": "E5M8"}', "line 1: step: field required"),
        (
            "log.jsonl",
            '{"step": 1, "precision": "E5M9", "loss": 1}',
            "line 1: precision: it should be one of fp, E5M8",
        ),
        (
            "nested/quality.json",
            '{"schema": 2, "model": "", "entries": []}',
            "schema: input should be 1, not '2'",
        ),
        (
            "model/quality.json",
            f'{{"schema": 1, "model": "{"0" * 64}", "entries": [{{}}]}}',
            "entries.0: it should be of a known kind",
        ),
        (
            "analysis/gradients.json",
            json.dumps({**gradients(), "overall": [[1, 2]]}),
            "overall or a module is not a matrix of the precisions",
        ),
        (
            "analysis/gradients.json",
            json.dumps({**gradients(), "modules": [{}]}),
            "modules.0.module: field required",
        ),
        (
            "model/analysis/gradients.json",
            '{"precisions": ["E5M8"], "overall": [[1]]}',
            "modules: field required",
        ),
        (
            "log.jsonl",
            '{"step": 1, "precision": "E5M8", "loss": 1, "cross_entropy": "low"}',
            "line 1: cross_entropy: it should be a number",
        ),
        ("analysis/gradients.json", "{}", "precisions: field required"),
        ("bench.json", "[]", "not a JSON object"),
        (
            "bench.json",
            "{}",
            "make it again or remove it (by `otaro bench DIR --json`, without --parallel or --draft)",
        ),
        (
            "bench.json",
            json.dumps({**timed(), "machine": 3}),
            "machine: input should be a valid string, not '3'",
        ),
        (
            "nested/bench.json",
            json.dumps({**timed(), "settings": {"tokens": 1}}),
            "settings.prompt_tokens: field required",
        ),
        (
            "bench.json",
            json.dumps({**timed(), "precisions": []}),
            "precisions: list should have at least 1 item",
        ),
        (
            "bench.json",
            json.dumps({**timed(), "precisions": [{"precision": "E5M8", "decode": -1}]}),
            "precisions.0.prefill: field required",
        ),
    ],
)
def test_damaged_files_are_refused_by_name(tmp_path, file, content, words):
    run = make_run(tmp_path / "run", TUNED)
    path = run / file
    path.parent.mkdir(parents=True, exist_ok=True)
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content.encode("latin-1"))
    with pytest.raises(OtaroError) as refusal:
        read_runs([run])
    assert str(path) in str(refusal.value)
    assert words in str(refusal.value)


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(OtaroError, match="is not a directory; give a run folder"):
        read_runs([tmp_path / "nowhere"])
    with pytest.raises(
        OtaroError,
        match=r"neither a run folder of `otaro tune` nor a model's directory: no "
        r"config.json",
    ):
        read_runs([tmp_path])
    run = make_run(tmp_path / "run", TUNED)
    with pytest.raises(OtaroError, match="the same run is given twice"):
        read_runs([run, tmp_path / "run" / ".." / "run"])


def test_runs_of_the_same_name_are_told_apart(tmp_path):
    paths = [make_run(tmp_path / place / "run", TUNED) for place in ("a", "b")]
    assert [run.name for run in read_runs(paths)] == list(map(str, paths))


def test_a_failed_write_leaves_the_old_page(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run", TUNED)
    page_of(run)
    before = (tmp_path / "page.html").read_text()
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.raises(OtaroError, match="the disk is full"):
        page_of(run)
    assert (tmp_path / "page.html").read_text() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "run"]


@pytest.mark.parametrize("package", ["altair", "vl_convert"])
def test_a_missing_package_is_named_with_what_to_install(tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    _library.cache_clear()
    with pytest.raises(OtaroError, match=r"pip install 'otaro-llm\[report\]'"):
        page_of(make_run(tmp_path / "run", TUNED))


# A browser.


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """browser(page) is the page's content once its scripts have run, and what they wrote to the console."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("no browser on this machine: none of chromium, chromium-browser, google-chrome is found")
    profile = tmp_path_factory.mktemp("profile")
    flags = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        f"--user-data-dir={profile}",
    ]

    def load(page: Path) -> tuple[str, list[str]]:
        command = [
            program,
            *flags,
            "--window-size=1200,900",
            "--virtual-time-budget=20000",
            "--dump-dom",
            page.as_uri(),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]

    return load


def drawn(content: str) -> dict[str, Counter]:
    """How many marks of each kind every figure has, by description."""
    figures = re.findall(r'<div class="chart[^>]*aria-label="([^"]*)"(.*?)</figure>', content, re.DOTALL)
    kind = re.compile(r'role="graphics-symbol" aria-roledescription="([^"]*)"')
    return {html.unescape(label): Counter(kind.findall(inside)) for label, inside in figures}


def test_a_browser_draws_every_figure_and_no_script_fails(full_report, browser):
    content, console = browser(full_report)
    assert console == []
    opening = re.search(r"<html[^>]*>", content)[0]
    assert "data-failed" not in opening
    figures = drawn(content)
    assert f'data-drawn="{len(figures)}"' in opening
    assert set(figures) == set(charts_of(full_report.read_text()))
    read = "wiki.txt (9,000 tokens, windows of 512, stride 256, each begun with BOS)"
    above = figures[f"Perplexity on wiki.txt, above the best at each precision, {read}"]
    assert (above["point"], above["line mark"]) == (2 * 7, 2)
    assert figures[f"Perplexity on wiki.txt, by size, {read}"]["point"] == 2 * 6
    assert figures["arc_easy (acc_norm)"]["rule mark"] == 2 * 7
    assert (
        figures[
            "Divergence from full precision on wiki.txt (9,000 tokens, windows of 512, each begun with BOS)"
        ]["point"]
        == 2 * 6
    )
    assert figures["Decode speed on a Xeon, kernels cpu:avx2, 2 threads"]["point"] == 6
    assert figures["Cross-entropy by step, best"]["circle"] == STEPS
    assert figures["Cross-entropy by step, plain"]["line mark"] == 1
    assert figures["Precision of each step, best"]["rect mark"] == STEPS
    assert "Precision of each step, plain" not in figures
    assert figures["Similarity of gradients, best"]["rect mark"] == 36
    assert figures["Similarity by layer and projection, best"]["rect mark"] == 13


ACTIONS = """
const wait = setInterval(() => {
  if (document.documentElement.dataset.drawn) { clearInterval(wait); act(); }
}, 50);
function act() {
const told = {};
const ink = () => getComputedStyle(document.querySelector("svg .role-axis-label text")).fill;
const light = ink();
document.getElementById("theme").click();
told.theme = [document.documentElement.dataset.theme, light !== ink()];
const point = document.querySelector("path[aria-roledescription=point]");
const box = point.getBoundingClientRect();
const at = { bubbles: true, clientX: box.x + 3, clientY: box.y + 3 };
point.dispatchEvent(new PointerEvent("pointermove", at));
point.dispatchEvent(new MouseEvent("mousemove", at));
told.tooltip = document.getElementById("vg-tooltip-element")?.innerText;
document.documentElement.dataset.told = JSON.stringify(told);
}
"""


def test_the_theme_switches_and_hovering_shows_values(full_report, browser, tmp_path):
    # or its policy would stop this script
    page = re.sub(r"<meta http-equiv[^>]*>", "", full_report.read_text())
    before, _, after = page.rpartition("</body>")
    (tmp_path / "acting.html").write_text(f"{before}<script>{ACTIONS}</script></body>{after}")
    content, console = browser(tmp_path / "acting.html")
    assert console == []
    told = json.loads(html.unescape(re.search(r'data-told="([^"]*)"', content)[1]))
    assert told["theme"] == ["dark", True]
    assert "% above the best" in told["tooltip"]
    assert "best" in told["tooltip"]


MEASURED = """
addEventListener("load", () => setTimeout(() => {
  const inner = document.querySelector("iframe").contentDocument;
  const tables = [...inner.querySelectorAll(".scroll")].map((one) =>
    [one.previousElementSibling.querySelector("strong").textContent, one.scrollWidth > one.clientWidth]);
  document.documentElement.dataset.told = JSON.stringify(tables);
}, 1000));
"""


def test_tables_fit_a_phone(full_report, browser, tmp_path):
    page = re.sub(r"<meta http-equiv[^>]*>|<script.*?</script>", "", full_report.read_text(), flags=re.DOTALL)
    frame = f'<iframe width="375" height="800" scrolling="no" srcdoc="{html.escape(page)}"></iframe>'
    (tmp_path / "phone.html").write_text(f"<!doctype html>{frame}<script>{MEASURED}</script>")
    content, _ = browser(tmp_path / "phone.html")
    tables = json.loads(html.unescape(re.search(r'data-told="([^"]*)"', content)[1]))
    assert len(tables) == 7
    assert [title for title, wider in tables if wider] == ["Accuracy by task"]


def test_a_browser_runs_nothing_of_hostile_text(hostile_report, browser):
    content, console = browser(hostile_report)
    assert console == []
    assert "<title>OTARo report: " in content
    assert "data-failed" not in re.search(r"<html[^>]*>", content)[0]
    assert not re.search(r"<img\b", re.sub(r"<script.*?</script>", "", content, flags=re.DOTALL))
    assert len(drawn(content)) == len(charts_of(hostile_report.read_text()))
