"""Tasks of lm-evaluation-harness, on questions of our own."""

import gzip
import json
import sys

import pytest
from transformers import AutoTokenizer

import otaro
from otaro.evaluate import harness
from otaro.evaluate.harness import PAPER_TASKS, TaskError, Tasks, _score

pytest.importorskip(
    "lm_eval", reason="lm-evaluation-harness is not installed (pip install 'otaro-llm[eval]')"
)


@pytest.fixture(scope="module")
def model(tiny):
    return otaro.load(tiny, "E5M4")


@pytest.fixture(scope="module")
def tokenizer(tiny):
    return AutoTokenizer.from_pretrained(tiny)


@pytest.fixture
def few_tasks(monkeypatch):
    """The harness as if the paper's eight were all it had: reading all fourteen thousand takes seconds."""
    eight = harness._manager_of(frozenset(PAPER_TASKS.values()))
    monkeypatch.setattr(harness, "_manager_of", lambda folders: eight)


def likelihood(model, tokenizer, context, answer):
    """log P(answer | context), token by token."""
    import torch

    ids = tokenizer(context + answer, return_tensors="pt")["input_ids"]
    start = len(tokenizer(context)["input_ids"])
    with torch.no_grad():
        steps = model(ids).logits[0].log_softmax(-1)
    return float(sum(steps[t - 1, ids[0, t]] for t in range(start, ids.shape[1])))


def measured(names, data_dir, model, tokenizer, **how):
    tasks = Tasks(names, data_dir)
    return {name: tasks.measure(name, model, tokenizer, **how) for name in tasks.names}


def test_accuracy_is_that_of_the_likeliest_answers(model, tokenizer, task_files):
    results = measured(["arc_easy", "boolq"], task_files, model, tokenizer, batch_size=4)
    rows = list(
        map(json.loads, gzip.decompress((task_files / "arc_easy.jsonl.gz").read_bytes()).splitlines())
    )
    right = 0
    for row in rows:
        context, answers = f"Question: {row['question']}\nAnswer:", row["choices"]["text"]
        scores = [likelihood(model, tokenizer, context, f" {answer}") / len(answer) for answer in answers]
        right += "ABCD"[scores.index(max(scores))] == row["answerKey"]
    assert (results["arc_easy"].metric, results["arc_easy"].samples) == ("acc_norm", 6)
    assert results["arc_easy"].value == pytest.approx(right / 6)
    share = results["arc_easy"].value
    assert results["arc_easy"].stderr == pytest.approx((share * (1 - share) / 5) ** 0.5)
    assert results["boolq"].metric == "acc"
    assert results["arc_easy"].truncated == results["boolq"].truncated == 0


def test_nothing_is_printed_and_progress_is_told(model, tokenizer, task_files, capfd):
    seen = []
    tasks = Tasks(["boolq"], task_files)
    first = tasks.measure(
        "boolq", model, tokenizer, limit=3, progress=lambda done, total: seen.append((done, total))
    )
    assert seen[-1] == (6, 6)
    assert capfd.readouterr() == ("", "")
    assert (first.samples, tasks.measure("boolq", model, tokenizer, limit=3)) == (3, first)
    from lm_eval.api import task

    assert task.tqdm.__name__ == "tqdm"  # theirs again


def test_requests_that_do_not_fit_are_counted(model, tokenizer, tmp_path):
    row = {"question": "is it", "passage": "word " * 600, "idx": 0, "label": 1}
    (tmp_path / "boolq.json").write_text(json.dumps([row]))
    result = Tasks(["boolq"], tmp_path).measure("boolq", model, tokenizer)
    assert (result.truncated, result.stderr) == (2, None)


def test_zeroshot8_is_the_eight_of_the_paper(task_files):
    assert len(Tasks(["zeroshot8"]).names) == 8
    assert Tasks(["boolq", "zeroshot8"]).names[0] == "boolq"
    with pytest.raises(
        TaskError,
        match=r"has no arc_challenge.jsonl.gz \(nor .jsonl or .json\) for the "
        r"task arc_challenge",
    ):
        Tasks(["zeroshot8"], task_files)


def test_a_tag_stands_for_its_tasks(few_tasks):
    assert Tasks(["ai2_arc"]).names == ["arc_challenge", "arc_easy"]


@pytest.mark.parametrize(
    ("name", "meant"),
    [("arc_eazy", "arc_easy"), ("zero-shot8", "zeroshot8"), ("helaswag", "hellaswag"), ("boolQ", "boolq")],
)
def test_an_unknown_task_is_refused_with_near_ones(few_tasks, name, meant):
    with pytest.raises(TaskError, match=f"has no task '{name}'; did you mean {meant}"):
        Tasks(["piqa", name])


def test_a_word_that_is_near_to_no_task_is_refused_with_what_lists_them():
    with pytest.raises(TaskError, match=r"has no task 'nope'; `lm_eval ls tasks` lists those it has$"):
        Tasks(["nope"])


def test_data_that_cannot_be_fetched_is_named(tmp_path):
    with pytest.raises(
        TaskError,
        match=r"the data set allenai/ai2_arc is not to be had .*serve arc_easy.jsonl.gz "
        r".*--data-dir",
    ):
        Tasks(["arc_easy"]).prepare("arc_easy")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "at least one"),
        ("[1]", "one JSON object per sample"),
        ("{", "cannot be read"),
        ('{"question": "is it"}', "does not serve the task boolq, which needs the fields"),
    ],
)
def test_files_that_do_not_serve_are_refused(tmp_path, content, words):
    (tmp_path / "boolq.jsonl").write_text(content)
    with pytest.raises(TaskError, match=words):
        Tasks(["boolq"], tmp_path).prepare("boolq")


def test_a_file_is_known_by_its_digest(task_files):
    assert len(Tasks(["boolq"], task_files).data_sha256("boolq")) == 64
    assert Tasks(["boolq"]).data_sha256("boolq") is None


def test_without_the_package_the_extra_to_install_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setattr(harness, "find_spec", lambda name: None)
    with pytest.raises(TaskError, match=r"pip install 'otaro-llm\[eval\]'"):
        Tasks(["boolq"])


@pytest.mark.parametrize(
    ("reported", "score"),
    [
        (
            {"alias": "x", "sample_len": 5, "acc,none": 0.5, "acc_stderr,none": 0.1, "acc_norm,none": 0.6},
            ("acc_norm", 0.6, None),
        ),
        ({"acc,none": 1, "acc_stderr,none": 0.1}, ("acc", 1.0, 0.1)),
        ({"acc,none": 0.5, "acc_stderr,none": "N/A"}, ("acc", 0.5, None)),
        ({"acc,none": 0.5, "acc_stderr,none": float("nan")}, ("acc", 0.5, None)),
        (
            {"exact_match,strict-match": 0.2, "exact_match,flexible": 0.3},
            ("exact_match (strict-match)", 0.2, None),
        ),
    ],
)
def test_one_metric_is_kept(reported, score):
    assert _score("task", {"task": reported}) == score


def test_a_group_without_a_score_is_refused():
    with pytest.raises(TaskError, match="without a score of its own; name its tasks: glue, cola"):
        _score("glue", {"glue": {"alias": "glue"}, "cola": {"acc,none": 0.5}})


def test_the_papers_tasks_run_on_their_real_data(model, tokenizer, shared_data):
    results = measured(["winogrande", "piqa"], shared_data / "zeroshot", model, tokenizer, limit=4)
    assert {name: (result.metric, result.samples) for name, result in results.items()} == {
        "winogrande": ("acc", 4),
        "piqa": ("acc_norm", 4),
    }
