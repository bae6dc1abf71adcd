"""An evaluation as a whole: what it measures, what it remembers, what it does when it is stopped."""

import json
import shutil
import weakref

import pytest

import otaro
from otaro.builtin import MODEL_DIR, heldout_text
from otaro.evaluate import run
from otaro.evaluate.perplexity import choose_window, perplexity
from otaro.evaluate.quality import Record, read_quality
from otaro.evaluate.run import Evaluation, Wanted
from otaro.evaluate.subject import Subject
from otaro.evaluate.text import Text
from otaro.file.coding import Coding

TEXT = Text("held", heldout_text()[:600], "held.txt")
VERSIONS = {"otaro": "0.1.0"}


def evaluation(model, precisions="E5M8,E5M3", **wanted):
    return Evaluation(Subject(str(model), precisions), Wanted(**{"text": TEXT, "window": 64, **wanted}))


def without_speed(entries):
    return [{key: value for key, value in entry.items() if key != "tokens_per_second"} for entry in entries]


def test_perplexities_are_those_of_the_model_at_each_precision(tiny, tmp_path):
    entries = evaluation(tiny, "E5M8,E5M6,E5M3", stride=32).run(Record("a" * 64, tmp_path), VERSIONS)
    model = otaro.load(tiny)
    ids = TEXT.ids(Subject(str(tiny)).tokenizer)
    for entry, precision in zip(entries, ["E5M8", "E5M6", "E5M3"], strict=True):
        with otaro.at_precision(model, precision):
            assert entry["value"] == perplexity(model, ids, window=64, stride=32)
        assert (entry["precision"], entry["tokens"], entry["device"]) == (precision, len(ids), "cpu")
        assert entry["command"] == (f"otaro eval {tiny} --precision {precision} --text held.txt --window 64 --stride 32")
    assert read_quality(tmp_path, "a" * 64).entries == tuple(entries)


def test_divergence_is_from_full_precision_or_the_finest_there_is(tiny, tmp_path):
    from_full = evaluation("builtin", "fp,E5M8,E5M3", divergence=True).run(Record("a" * 64, None), VERSIONS)
    kinds = [(entry["precision"], entry["kind"], entry.get("reference")) for entry in from_full]
    assert kinds == [
        ("fp", "perplexity", None),
        *(("E5M8", "perplexity", None), ("E5M8", "divergence", "fp")),
        *(("E5M3", "perplexity", None), ("E5M3", "divergence", "fp")),
    ]
    fine, coarse = from_full[2], from_full[4]
    assert 0 < fine["kl"] < 1e-3 < coarse["kl"]
    assert coarse["agreement"] < fine["agreement"] <= 1
    from_finest = evaluation(tiny, "E5M3", divergence=True).run(Record("a" * 64, None), VERSIONS)
    assert from_finest[1]["reference"] == "E5M8"
    assert from_finest[1]["kl"] == pytest.approx(coarse["kl"], rel=0.05)


def test_a_nested_model_is_compared_with_the_checkpoint_it_came_from(tiny, tmp_path):
    assert Subject(str(tiny), original="builtin").precisions == ["fp", *map(str, otaro.PRECISIONS)]
    subject = Subject(str(tiny), "fp,E5M3", original="builtin")
    entries = Evaluation(subject, Wanted(TEXT, 64, divergence=True)).run(Record("a" * 64, tmp_path), VERSIONS)
    from_full = evaluation("builtin", "fp,E5M3", divergence=True).run(Record("b" * 64, None), VERSIONS)
    outcomes = [[(e["kind"], e["precision"], e.get("value"), e.get("kl")) for e in some] for some in (entries, from_full)]
    assert outcomes[0] == outcomes[1]
    whose = Subject("builtin").identity
    assert [entry.get("reference_model") for entry in entries] == [whose, None, whose]
    assert ["--reference builtin" in entry["command"] for entry in entries] == [True, False, True]
    assert read_quality(tmp_path).entries == tuple(entries)
    other = evaluation(tiny, "E5M3", divergence=True).plan[1]
    assert read_quality(tmp_path).find(other) is None  # from the finest is another thing


def test_a_reference_that_cannot_be_compared_with_is_refused(tiny, tmp_path, make_checkpoint):
    with pytest.raises(otaro.OtaroError, match="--reference is for nested models; builtin is a checkpoint"):
        Subject("builtin", original="builtin")
    with pytest.raises(otaro.OtaroError, match="is a nested model; give an ordinary checkpoint"):
        Subject(str(tiny), original=str(tiny))
    stranger = shutil.copytree(make_checkpoint("llama"), tmp_path / "stranger")
    for file in MODEL_DIR.glob("tokenizer*"):
        shutil.copy(file, stranger)
    swapped = shutil.copytree(MODEL_DIR, tmp_path / "swapped")
    tokenizer = json.loads((swapped / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    one, two = list(vocabulary)[-2:]
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    (swapped / "tokenizer.json").write_text(json.dumps(tokenizer))
    for other in (stranger, swapped):
        with pytest.raises(otaro.OtaroError, match="has another vocabulary or tokenizer than"):
            Subject(str(tiny), original=str(other))


def test_how_a_nested_model_is_packed_cannot_be_asked_for(tiny):
    assert Subject(str(tiny), group_size=64, reconstruction="midpoint").coding == Coding(64, "midpoint")
    for asked in ({"group_size": 32}, {"reconstruction": "truncate"}):
        with pytest.raises(otaro.OtaroError, match="is packed in groups of 64, midpoint; pack its checkpoint anew"):
            Subject(str(tiny), **asked)


def test_the_unquantised_model_is_gone_before_the_packed_one_comes(monkeypatch):
    subject = Subject("builtin", "fp,E5M3")
    seen = {}

    def watched(model, *arguments, **options):
        if not seen:
            seen["full"] = weakref.ref(model)
        else:
            seen["alive"] = seen["full"]() is not None
        return perplexity(model, *arguments, **options)

    monkeypatch.setattr(run, "perplexity", watched)
    Evaluation(subject, Wanted(text=TEXT, window=64)).run(Record("a" * 64, None), VERSIONS)
    assert seen["alive"] is False


def test_what_is_recorded_is_not_measured_again_unless_asked_for(tiny, tmp_path, monkeypatch, task_files):
    wanted = {"tasks": ("boolq",), "data_dir": task_files, "limit": 2}
    first = evaluation(tiny, **wanted).run(Record("a" * 64, tmp_path), VERSIONS)
    with monkeypatch.context() as patched:
        patched.setattr(Subject, "at", lambda *_: pytest.fail("the model was opened"))
        assert evaluation(tiny, **wanted).run(Record("a" * 64, tmp_path), VERSIONS) == first
        assert evaluation(tiny, "E5M3", **wanted).run(Record("a" * 64, tmp_path), VERSIONS) == first[2:]
    again = evaluation(tiny, **wanted).run(Record("a" * 64, tmp_path), {"otaro": "0.2.0"}, again=True)
    assert without_speed(again) == without_speed([{**entry, "versions": {"otaro": "0.2.0"}} for entry in first])
    assert len(read_quality(tmp_path).entries) == len(first) == 4


@pytest.mark.parametrize("stopped_at", [0, 2])
def test_an_interrupted_evaluation_goes_on_and_ends_as_if_nothing_had_been(tiny, tmp_path, monkeypatch, stopped_at):
    whole = evaluation(tiny, "E5M8,E5M5,E5M3").run(Record("a" * 64, tmp_path / "whole"), VERSIONS)
    measured = []

    def until_stopped(*arguments, **options):
        if len(measured) == stopped_at:
            raise KeyboardInterrupt
        measured.append(1)
        return perplexity(*arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(run, "perplexity", until_stopped)
        with pytest.raises(KeyboardInterrupt):
            evaluation(tiny, "E5M8,E5M5,E5M3").run(Record("a" * 64, tmp_path / "halves"), VERSIONS)
    kept = read_quality(tmp_path / "halves")
    assert len(kept.entries if kept else ()) == stopped_at
    halves = evaluation(tiny, "E5M8,E5M5,E5M3").run(Record("a" * 64, tmp_path / "halves"), VERSIONS)
    assert without_speed(halves) == without_speed(whole)
    stored = [without_speed(read_quality(tmp_path / name).entries) for name in ("whole", "halves")]
    assert stored[0] == stored[1]


def test_a_killed_evaluation_keeps_what_was_finished(tiny, tmp_path, in_child):
    done = in_child(f"""
        import os, otaro
        from otaro.evaluate import run
        from otaro.evaluate.quality import Record
        from otaro.evaluate.subject import Subject
        from otaro.evaluate.text import Text
        real, count = run.perplexity, []
        def perplexity(*arguments, **options):
            count.append(1)
            return real(*arguments, **options) if len(count) < 3 else os.kill(os.getpid(), 9)
        run.perplexity = perplexity
        wanted = run.Wanted(Text("held", {TEXT.content!r}, "held.txt"), 64)
        run.Evaluation(Subject({str(tiny)!r}), wanted).run(Record("a" * 64, run.Path({str(tmp_path)!r})), {VERSIONS!r})
    """)
    assert done.returncode == -9, done.stderr
    assert [entry["precision"] for entry in read_quality(tmp_path).entries] == ["E5M8", "E5M7"]


def test_a_text_shorter_than_the_window_is_one_short_window(tiny):
    few = Evaluation(Subject(str(tiny), "E5M8"), Wanted(text=Text("few", TEXT.content[:100], "few")))
    assert (few.window, few.stride) == (512, 512)
    entry = few.run(Record("a" * 64, None), VERSIONS)[0]
    assert entry["tokens"] < entry["window"] == 512
    model, ids = otaro.load(tiny), Text("few", TEXT.content[:100], "few").ids(few.subject.tokenizer)
    assert entry["value"] == pytest.approx(float(model(ids[None], labels=ids[None]).loss.detach().exp()), rel=1e-6)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"window": 513}, "a window of 513 tokens is more than the 512 positions"),
        ({"window": 64, "stride": 65}, "the stride must be between 1 and the window of 64"),
    ],
)
def test_windows_that_make_no_sense_are_refused(tiny, options, words):
    with pytest.raises(otaro.OtaroError, match=words):
        evaluation(tiny, **options)


def test_a_window_is_as_long_as_the_model_allows_up_to_2048():
    from transformers import LlamaConfig

    assert choose_window(LlamaConfig(max_position_embeddings=131_072)) == 2048
    assert choose_window(LlamaConfig(max_position_embeddings=100)) == 100
    assert choose_window(LlamaConfig(max_position_embeddings=131_072), 4096) == 4096


def test_outputs_that_overflow_are_not_recorded(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "perplexity", lambda *_, **__: float("nan"))
    with pytest.raises(otaro.OtaroError, match=r"E5M8 perplexity, 1 of 2: comes out as nan; E5M3 .* out as nan\)"):
        evaluation(tiny).run(Record("a" * 64, tmp_path), VERSIONS)
    assert not list(tmp_path.iterdir())


def test_one_that_overflows_does_not_keep_others_from_being_measured(tiny, tmp_path, monkeypatch):
    outcomes = iter([9.0, float("inf"), 11.0])
    monkeypatch.setattr(run, "perplexity", lambda *_, **__: next(outcomes))
    with pytest.raises(otaro.OtaroError, match=r"overflow \(E5M5 perplexity, 2 of 3: comes out as inf\)"):
        evaluation(tiny, "E5M8,E5M5,E5M3").run(Record("a" * 64, tmp_path), VERSIONS)
    kept = read_quality(tmp_path).entries
    assert [(entry["precision"], entry["value"]) for entry in kept] == [("E5M8", 9.0), ("E5M3", 11.0)]


def test_another_device_is_another_measurement_and_in_the_command(tiny, tmp_path, monkeypatch):
    record = Record("a" * 64, tmp_path)
    evaluation(tiny, "E5M3").run(record, VERSIONS)
    elsewhere = evaluation(tiny, "E5M3")
    monkeypatch.setattr(Subject, "device_name", "a GPU")
    elsewhere = Evaluation(elsewhere.subject, elsewhere.wanted)
    elsewhere.subject.device = "cpu:0"
    (entry,) = elsewhere.run(record, VERSIONS)
    assert entry["device"] == "a GPU"
    assert entry["command"].endswith(" --stride 64 --device cpu:0")
    assert [entry["device"] for entry in read_quality(tmp_path).entries] == ["cpu", "a GPU"]


def test_a_command_that_is_too_long_is_cut_and_the_measurement_kept(tiny, tmp_path):
    text = Text("held", TEXT.content, "x" * 5000)
    (entry,) = evaluation(tiny, "E5M3", text=text).run(Record("a" * 64, tmp_path), VERSIONS)
    assert (len(entry["command"]), entry["command"][-1]) == (4096, "…")
    assert read_quality(tmp_path).entries == (entry,)


def test_progress_tells_what_is_measured(tiny):
    seen = []
    evaluation(tiny).run(
        Record("a" * 64, None), VERSIONS, progress=lambda what, done, total: seen.append((what, done == total))
    )
    assert {what for what, finished in seen if finished} == {"E5M8 perplexity, 1 of 2", "E5M3 perplexity, 2 of 2"}


def test_the_record_is_plain_json(tiny, tmp_path):
    evaluation(tiny).run(Record("a" * 64, tmp_path), VERSIONS)
    stored = json.loads((tmp_path / "quality.json").read_text())
    assert (stored["schema"], stored["model"], len(stored["entries"])) == (1, "a" * 64, 2)
