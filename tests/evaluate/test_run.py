"""An evaluation as a whole: what it measures, what it remembers, what it does when it is stopped."""

import json
import math
import re
import shutil
import weakref

import pytest
import torch

import otaro
from otaro.builtin import MODEL_DIR, heldout_text
from otaro.evaluate import run
from otaro.evaluate.decoded import DecodedModel
from otaro.evaluate.quality import Record, read_quality
from otaro.evaluate.run import Evaluation, Wanted
from otaro.evaluate.subject import Subject
from otaro.evaluate.text import Text
from otaro.evaluate.windows import KvReader, choose_window, parse_kv
from otaro.file.coding import Coding
from otaro.runtime.decode import Decoder
from tests.evaluate.reading import perplexity

TEXT = Text("held", heldout_text()[:600], "held.txt")
VERSIONS = {"otaro": "0.1.0"}


def evaluation(model, precisions="E5M8,E5M3", **wanted):
    return Evaluation(Subject(str(model), precisions), Wanted(**{"text": TEXT, "window": 64, **wanted}))


def without_speed(entries):
    return [{key: value for key, value in entry.items() if key != "tokens_per_second"} for entry in entries]


def test_perplexities_are_those_of_the_model_at_each_precision(tiny, tmp_path):
    entries = evaluation(tiny, "E5M8,E5M6,E5M3", stride=32).run(Record("a" * 64, tmp_path), VERSIONS)
    model = DecodedModel(otaro.load(tiny))
    ids = TEXT.ids(Subject(str(tiny)).tokenizer)
    for entry, precision in zip(entries, ["E5M8", "E5M6", "E5M3"], strict=True):
        assert entry["value"] == perplexity(model.at(precision), ids, window=64, stride=32)
        assert (entry["precision"], entry["tokens"], entry["device"]) == (precision, len(ids), "cpu")
        assert entry["command"] == (
            f"otaro eval {tiny} --precision {precision} --text held.txt --window 64 --stride 32"
        )
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


@pytest.fixture(scope="module")
def with_bos(tiny, tmp_path_factory):
    """The built-in model with a tokenizer that begins texts with token 0."""
    directory = shutil.copytree(tiny, tmp_path_factory.mktemp("bos") / "model")
    stated = json.loads((directory / "tokenizer.json").read_text())
    bos = next(token for token, number in stated["model"]["vocab"].items() if number == 0)
    first = {"SpecialToken": {"id": bos, "type_id": 0}}
    single = [first, {"Sequence": {"id": "A", "type_id": 0}}]
    stated["post_processor"] = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {bos: {"id": bos, "ids": [0], "tokens": [bos]}},
    }  # fmt: skip
    (directory / "tokenizer.json").write_text(json.dumps(stated))
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**config, "bos_token": bos}))
    return directory


def test_every_window_begins_as_the_tokenizer_begins_texts_unless_told_otherwise(with_bos, tiny, tmp_path):
    record = Record("a" * 64, tmp_path)
    (begun,) = evaluation(with_bos, "E5M8").run(record, VERSIONS)
    (bare,) = evaluation(with_bos, "E5M8", bos=False).run(record, VERSIONS)
    (never,) = evaluation(tiny, "E5M8").run(Record("a" * 64, None), VERSIONS)
    assert [entry["bos"] for entry in (begun, bare, never)] == [True, False, False]
    assert begun["tokens"] == bare["tokens"] == never["tokens"]  # of the text
    model, ids = DecodedModel(otaro.load(tiny)).at("E5M8"), TEXT.ids(Subject(str(tiny)).tokenizer)
    assert begun["value"] == perplexity(model, ids, window=64, bos=0)
    assert bare["value"] == never["value"] == perplexity(model, ids, window=64)
    assert ("--no-bos" in begun["command"], "--no-bos" in bare["command"]) == (False, True)
    assert read_quality(tmp_path).entries == (begun, bare)  # neither in place of the other


def test_keys_and_values_are_measured_in_the_decoders_cache(tiny, tmp_path):
    entries = evaluation(tiny, "E5M8", kv=("float16", "E5M3"), divergence=True).run(
        Record("a" * 64, tmp_path), VERSIONS
    )
    assert [(e["kind"], e["kv"]) for e in entries] == [
        (k, v) for v in ("float16", "E5M3") for k in ("perplexity", "divergence")
    ]
    assert read_quality(tmp_path).entries == tuple(entries)
    assert entries[0]["command"].endswith("--stride 64 --kv float16")
    model, ids = otaro.load(tiny, "E5M8"), TEXT.ids(Subject(str(tiny)).tokenizer)
    decoder = Decoder.of(model)
    for entry in entries[::2]:
        total = count = 0
        for some in ids.split(64):
            cache = decoder.new_cache(None if entry["kv"] == "float16" else otaro.Precision(entry["kv"]))
            rows = torch.stack([decoder.forward([int(token)], cache) for token in some])[:-1]  # one by one
            total += float(-rows.double().log_softmax(-1).gather(1, some[1:, None]).sum())
            count += len(some) - 1
        assert entry["value"] == pytest.approx(math.exp(total / count), rel=1e-6)
    (plain,) = evaluation(tiny, "E5M8").run(Record("a" * 64, None), VERSIONS)
    assert entries[0]["value"] == pytest.approx(plain["value"], rel=1e-2)
    assert entries[2]["value"] > 1.02 * plain["value"]
    assert entries[1]["kl"] < 0.01 < entries[3]["kl"]


def test_what_the_decoder_does_not_serve_has_no_kv_to_measure(tiny, make_nested):
    with pytest.raises(
        otaro.OtaroError,
        match="--kv E5M5 needs the decoder, which does not serve this model: its architecture",
    ):
        KvReader(otaro.load(make_nested("gemma")), "E5M5")
    with pytest.raises(otaro.OtaroError, match="give another --precision than fp"):
        evaluation("builtin", "fp", kv=("E5M5",))
    assert {entry["precision"] for entry in evaluation("builtin", "all", kv=("E5M5",)).plan} == set(
        map(str, otaro.PRECISIONS)
    )
    with pytest.raises(
        otaro.OtaroError, match="--kv is measured on a text; leave --tasks for another command"
    ):
        evaluation(tiny, kv=("E5M5",), tasks=("boolq",))
    assert parse_kv("e5m5, float16,E5M5") == ("E5M5", "float16")
    assert parse_kv("all") == ("float16", *map(str, otaro.PRECISIONS))
    with pytest.raises(otaro.OtaroError, match="--kv fp: give all, or some of float16, E5M8"):
        parse_kv("fp")


def test_a_nested_model_is_compared_with_the_checkpoint_it_came_from(tiny, tmp_path):
    assert Subject(str(tiny), original="builtin").precisions == ["fp", *map(str, otaro.PRECISIONS)]
    subject = Subject(str(tiny), "fp,E5M3", original="builtin")
    entries = Evaluation(subject, Wanted(TEXT, 64, divergence=True)).run(Record("a" * 64, tmp_path), VERSIONS)
    from_full = evaluation("builtin", "fp,E5M3", divergence=True).run(Record("b" * 64, None), VERSIONS)
    outcomes = [
        [(e["kind"], e["precision"], e.get("value"), e.get("kl")) for e in some]
        for some in (entries, from_full)
    ]
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
        with pytest.raises(
            otaro.OtaroError, match="is packed in groups of 64, midpoint; pack its checkpoint anew"
        ):
            Subject(str(tiny), **asked)


def test_the_unquantized_model_is_gone_before_the_packed_one_comes(monkeypatch):
    subject = Subject("builtin", "fp,E5M3")
    seen = {}

    def watched(reader, *arguments, **options):
        if not seen:
            seen["full"] = weakref.ref(reader.sliced.model)
        else:
            seen["alive"] = seen["full"]() is not None
        return real(reader, *arguments, **options)

    real = run.read
    monkeypatch.setattr(run, "read", watched)
    Evaluation(subject, Wanted(TEXT, 64, divergence=True)).run(Record("a" * 64, None), VERSIONS)
    assert seen["alive"] is False


@pytest.mark.parametrize(
    ("options", "readings"),
    [
        # perplexity and divergence together; fp is kept as it is read
        ({}, [("fp", 2), ("E5M8", 2), ("E5M3", 2)]),
        ({"stride": 32}, [("fp", 1), ("fp", 1), ("E5M8", 1), ("E5M8", 1), ("E5M3", 1), ("E5M3", 1)]),
    ],
    ids=["windows side by side", "overlapping windows"],
)
def test_the_text_is_read_once_for_all_that_has_the_same_windows(monkeypatch, options, readings):
    seen, subject = [], Subject("builtin", "fp,E5M8,E5M3")
    real, at = run.read, Subject.at
    monkeypatch.setattr(Subject, "at", lambda *a: seen.append([a[1]]) or at(*a))
    monkeypatch.setattr(
        run, "read", lambda r, w, meters, *a, **o: seen[-1].append(len(meters)) or real(r, w, meters, *a, **o)
    )
    together = Evaluation(subject, Wanted(TEXT, 64, divergence=True, **options)).run(
        Record("a" * 64, None), VERSIONS
    )
    assert [tuple(one) for one in seen] == readings
    monkeypatch.undo()
    for entry in together:
        wanted = Wanted(TEXT, 64, divergence=entry["kind"] == "divergence", **options)
        alone = Evaluation(Subject("builtin", entry["precision"]), wanted).run(
            Record("a" * 64, None), VERSIONS
        )
        assert without_speed([entry]) == without_speed([one for one in alone if one["kind"] == entry["kind"]])


def test_what_is_recorded_is_not_measured_again_unless_asked_for(tiny, tmp_path, monkeypatch, task_files):
    wanted = {"tasks": ("boolq",), "data_dir": task_files, "limit": 2}
    first = evaluation(tiny, **wanted).run(Record("a" * 64, tmp_path), VERSIONS)
    with monkeypatch.context() as patched:
        patched.setattr(Subject, "at", lambda *_: pytest.fail("the model was opened"))
        assert evaluation(tiny, **wanted).run(Record("a" * 64, tmp_path), VERSIONS) == first
        assert evaluation(tiny, "E5M3", **wanted).run(Record("a" * 64, tmp_path), VERSIONS) == first[2:]
    again = evaluation(tiny, **wanted).run(Record("a" * 64, tmp_path), {"otaro": "0.2.0"}, again=True)
    assert without_speed(again) == without_speed(
        [{**entry, "versions": {"otaro": "0.2.0"}} for entry in first]
    )
    assert len(read_quality(tmp_path).entries) == len(first) == 4


@pytest.mark.parametrize("stopped_at", [0, 2])
def test_an_interrupted_evaluation_goes_on_and_ends_as_if_nothing_had_been(
    tiny, tmp_path, monkeypatch, stopped_at
):
    whole = evaluation(tiny, "E5M8,E5M5,E5M3").run(Record("a" * 64, tmp_path / "whole"), VERSIONS)
    measured = []

    real = run.read

    def until_stopped(*arguments, **options):
        if len(measured) == stopped_at:
            raise KeyboardInterrupt
        measured.append(1)
        return real(*arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(run, "read", until_stopped)
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
        real, count = run.read, []
        def read(*arguments, **options):
            count.append(1)
            return real(*arguments, **options) if len(count) < 3 else os.kill(os.getpid(), 9)
        run.read = read
        wanted = run.Wanted(Text("held", {TEXT.content!r}, "held.txt"), 64)
        record = Record("a" * 64, run.Path({str(tmp_path)!r}))
        run.Evaluation(Subject({str(tiny)!r}), wanted).run(record, {VERSIONS!r})
    """)
    assert done.returncode == -9, done.stderr
    assert [entry["precision"] for entry in read_quality(tmp_path).entries] == ["E5M8", "E5M7"]


def test_a_text_shorter_than_the_window_is_one_short_window(tiny):
    few = Evaluation(Subject(str(tiny), "E5M8"), Wanted(text=Text("few", TEXT.content[:100], "few")))
    assert (few.window, few.stride) == (512, 512)
    entry = few.run(Record("a" * 64, None), VERSIONS)[0]
    assert entry["tokens"] < entry["window"] == 512
    model, ids = otaro.load(tiny), Text("few", TEXT.content[:100], "few").ids(few.subject.tokenizer)
    assert entry["value"] == pytest.approx(
        float(model(ids[None], labels=ids[None]).loss.detach().exp()), rel=1e-6
    )


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
    monkeypatch.setattr(run.Loss, "perplexity", float("nan"))
    with pytest.raises(
        otaro.OtaroError,
        match=r"E5M8 perplexity, 1 of 2: comes out as nan; E5M3 .* out as "
        r"nan\)",
    ):
        evaluation(tiny).run(Record("a" * 64, tmp_path), VERSIONS)
    assert not list(tmp_path.iterdir())


def test_one_that_overflows_does_not_keep_others_from_being_measured(tiny, tmp_path, monkeypatch):
    outcomes = iter([9.0, float("inf"), 11.0])
    monkeypatch.setattr(run.Loss, "perplexity", property(lambda _: next(outcomes)))
    with pytest.raises(otaro.OtaroError, match=r"overflow \(E5M5 perplexity, 2 of 3: comes out as inf\)"):
        evaluation(tiny, "E5M8,E5M5,E5M3").run(Record("a" * 64, tmp_path), VERSIONS)
    kept = read_quality(tmp_path).entries
    assert [(entry["precision"], entry["value"]) for entry in kept] == [("E5M8", 9.0), ("E5M3", 11.0)]


def test_another_device_is_another_measurement_and_in_the_command(tiny, tmp_path, monkeypatch):
    record = Record("a" * 64, tmp_path)
    evaluation(tiny, "E5M3").run(record, VERSIONS)
    elsewhere = evaluation(tiny, "E5M3")
    monkeypatch.setattr("otaro.evaluate.run.device_name", lambda device: "a GPU")
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
        Record("a" * 64, None),
        VERSIONS,
        progress=lambda what, done, total: seen.append((what, done == total)),
    )
    readings = [what for what, _ in seen if "perplexity" in what]
    assert list(dict.fromkeys(what.partition(", about ")[0] for what in readings)) == [
        *("E5M8 perplexity, 1 of 2", "E5M3 perplexity, 2 of 2")
    ]
    assert re.search(r", about \d+ s left$", readings[0])  # from the first window on
    assert [finished for _, finished in seen].index(True) == len(seen) - 1  # of all readings together


def test_the_record_is_plain_json(tiny, tmp_path):
    evaluation(tiny).run(Record("a" * 64, tmp_path), VERSIONS)
    stored = json.loads((tmp_path / "quality.json").read_text())
    assert (stored["schema"], stored["model"], len(stored["entries"])) == (1, "a" * 64, 2)
