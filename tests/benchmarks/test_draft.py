"""bench_draft.py without a GPU: a toy of the same form, by the steps in torch."""

import json

import bench_draft
import gpu
import llama3
import pytest
import torch
from bench_draft import JUDGE, Pass
from common import TINY
from transformers import LlamaConfig

from otaro.evaluate import drafts
from otaro.runtime.decode import Decoder
from otaro.runtime.loop import Loop

pytestmark = pytest.mark.usefixtures("swift_products")


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    monkeypatch.setattr(gpu, "require", lambda: None)
    monkeypatch.setattr(gpu, "machine", dict)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a toy")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(
        llama3, "SHAPE", LlamaConfig(**TINY | {"num_attention_heads": 2, "num_key_value_heads": 1})
    )
    monkeypatch.setattr(bench_draft, "CONTEXT", 20)
    return bench_draft


def test_passes_are_made_again_beside_the_judge_alone(bench, capsys, tmp_path):
    trace = tmp_path / "trace.json"
    passes = [Pass("", 0, 0), Pass("E5M3", 2, 1), Pass("prompt", 3, 3)]
    trace.write_text(json.dumps({"E5M3, prose": passes[:2], "prompt, copy": passes}))
    bench.main(["--trace", str(trace), "--rounds", "1"])
    *_, first, second, last = capsys.readouterr().out.splitlines()
    rows = json.loads(last)["rows"]
    assert rows["E5M3, prose"]["per_pass"] == 1.5
    assert rows["prompt, copy"]["per_pass"] == 7 / 3
    assert rows["prompt, copy"]["right"] == [1, 0.5, 1]
    for line, asked in ((first, "asked for 1.25"), (second, "asked for 1.5")):
        assert line.split()[0] in ("holds", "MISSED")
        assert line.endswith(asked)


def test_a_pass_reads_what_was_drafted_and_forgets_what_was_wrong(bench):
    made = []

    class Cache:
        lengths = (20,)

        def check(self):
            pass

        def crop(self, length, sequence):
            made.append(length)

    class Described:
        def all_at(self, precision):
            return precision

    class Drafting:
        description = Described()

        def begin(self, ids, cache, sequences, bits):
            assert [str(one) for one in bits] == ["E5M3"]

        def end(self, begun):
            pass

        def advance(self):
            return 0

        def chosen(self, number):
            return [3]

        def likeliest(self, ids, cache, sequences, bits):
            made.append(ids)
            assert bits == [JUDGE] * len(ids)

    bench.drafted(Drafting(), Cache(), [Pass("", 0, 0), Pass("E5M3", 2, 1), Pass("prompt", 2, 2)])
    assert made == [[1], 21, 20, [1, 3, 3], 22, [1, 2, 2], 23]


def test_passes_are_written_down_as_the_loop_makes_them(bench, tiny, monkeypatch):
    """As many tokens as there are, and no trace of it is left."""
    for owner, name in ((Loop, "_accept"), (Loop, "_decode"), (Decoder, "costs")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr("otaro.runtime.draft._SURE", 0.5)
    text = "A dictionary is a mapping of keys to values. " * 40
    settings = drafts.Settings(tokens=12, context=16, texts=2)
    found = bench.record(tiny, text, settings)
    assert set(found) == {f"{one}, {kind}" for one in bench.DRAFTS for kind in ("prose", "copy")}
    for passes in found.values():
        assert sum(1 + one.right for one in passes) == 2 * (settings.tokens - 1)
        assert all(one.right <= one.drafted for one in passes)
    assert any(one.draft == "prompt" for one in found["prompt, copy"])
