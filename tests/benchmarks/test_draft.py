"""bench_draft.py without a GPU: a toy of the same form, by the steps in torch."""

import json

import bench_draft
import gpu
import llama3
import pytest
import torch
from common import TINY
from transformers import LlamaConfig

pytestmark = pytest.mark.usefixtures("swift_products")


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    monkeypatch.setattr(gpu, "require", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a toy")
    monkeypatch.setattr(
        llama3, "SHAPE", LlamaConfig(**TINY | {"num_attention_heads": 2, "num_key_value_heads": 1})
    )
    monkeypatch.setattr(bench_draft, "CONTEXT", 20)
    monkeypatch.setattr(bench_draft, "TOKENS", 9)
    return bench_draft


def test_every_length_of_a_draft_is_timed_beside_the_judge_alone(bench, capsys):
    bench.main(["--rounds", "1", "--accept", "1,0.5"])
    *rows, verdict, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    assert list(result["rows"]) == ["alone", "1", "2", "3", "4", "5", "6"]
    assert result["rows"]["alone"]["gain"] == 1
    assert len(rows) == 8
    assert verdict.split(":")[0] in ("holds", "missed")


def test_a_draft_is_right_as_often_as_was_asked(bench):
    made = []

    class Cache:
        lengths = (20,)

        def check(self):
            pass

        def crop(self, length, sequence):
            made.append(length)

    class Decoder:
        def begin(self, ids, cache, sequences, bits):
            assert bits == [b"draft"]

        def end(self, begun):
            pass

        def advance(self):
            return 0

        def chosen(self, number):
            return [3]

        def step(self, ids, cache, sequences, bits):
            assert (ids, sequences, bits) == ([1, 3, 3], [0] * 3, [b"judge"] * 3)
            return torch.zeros(3, 5)

    assert bench.drafted(Decoder(), Cache(), b"judge", b"draft", 2, [1.0, 0.0]) == 10
    assert made == [20, 22] * 5
