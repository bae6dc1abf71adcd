"""`otaro bench --device cuda`: its whole way on the CPU, with a GPU that is pretended; on a GPU, what it
counts.
"""

import pytest
import torch

import otaro
from otaro.errors import OtaroError
from otaro.evaluate import machine, speed
from otaro.evaluate.speed import Settings, bench

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
pytestmark = pytest.mark.usefixtures("swift_products")
QUICK = Settings(prompt_tokens=20, tokens=3, context=4, rounds=2)
LAYERS, KV_WIDTH = 6, 64  # of the built-in model


class Pretended(machine.Gpu):
    """A GPU's bookkeeping; the work is done here."""

    def __init__(self):
        super().__init__("cpu")
        self.waits = self.looks = 0

    name = "a pretended GPU"

    def finish(self):
        self.waits += 1

    def held_bytes(self):
        self.looks += 1
        return 1000 * self.looks

    def plain_access(self, size):
        return lambda: None, 1 << 20


@pytest.fixture
def pretended(monkeypatch):
    gpu = Pretended()
    monkeypatch.setattr(speed, "processor", lambda device: gpu)
    monkeypatch.setattr(speed, "SWITCHES", 3)
    return gpu


def test_every_precision_goes_through_the_decoder_of_a_gpu(tiny, pretended):
    result = bench(str(tiny), QUICK, device="cuda", with_transformers=True)
    assert (result.device, result.machine, result.path) == ("cuda", "a pretended GPU", "decode path")
    assert [row.precision for row in result.precisions] == [str(p) for p in otaro.PRECISIONS]
    for row in result.precisions:
        assert len(row.rounds.prefill) == len(row.rounds.decode) == QUICK.rounds
        assert row.kv_cache_bytes == 256 * LAYERS * 2 * KV_WIDTH * 2, "room for 256 positions in float16"
    # Looked at before, then after each warm-up, from coarse to fine.
    assert [row.resident_bytes for row in result.precisions] == [6000, 5000, 4000, 3000, 2000, 1000]
    turns = 7 * (1 + QUICK.rounds)
    assert pretended.waits == 2 * (2 * turns + QUICK.rounds), (
        "before and after each prefill, each decode, each plain copy"
    )
    assert result.kv_type == "float16"
    assert result.graph_bytes == 0


def bench_on_cpu(tiny, precision):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speed, "processor", machine.processor)
        patch.setattr(speed, "READ_BYTES", 1 << 20)
        return bench(str(tiny), QUICK, [precision], with_transformers=True)


def test_transformers_is_float16_there(tiny, pretended):
    precision = otaro.Precision("E5M3")
    on_gpu = bench(str(tiny), QUICK, [precision], device="cuda", with_transformers=True)
    on_cpu = bench_on_cpu(tiny, precision)
    assert on_gpu.others[0].weight_bytes == on_cpu.others[0].weight_bytes // 2
    assert [ratio.against for ratio in on_gpu.ratios] == ["transformers"]


def test_the_cache_may_be_packed(tiny, pretended):
    settings = Settings(prompt_tokens=5, tokens=2, context=4, rounds=1, kv=otaro.Precision("E5M4"))
    result = bench(str(tiny), settings, [otaro.Precision("E5M3")], device="cuda")
    (row,) = result.precisions
    # Heads of 32: five bits each, and a byte of exponent for a head.
    assert row.kv_cache_bytes == 256 * LAYERS * 2 * (KV_WIDTH * 5 // 8 + 2)
    assert result.kv_type == "E5M4"


def test_what_the_decoder_does_not_serve_is_said(make_nested, pretended):
    quick = Settings(prompt_tokens=4, tokens=2, context=3, rounds=1)
    result = bench(str(make_nested("gemma")), quick, [otaro.Precision("E5M3")], device="cuda")
    assert result.path.startswith("transformers: its architecture is gemma")
    assert result.kv_type == "float32"
    assert result.graph_bytes is None


def test_llama_cpp_is_for_the_cpu(tiny, pretended):
    with pytest.raises(
        OtaroError,
        match=r"--against llama.cpp is built for this CPU, and compares with "
        r"--device cpu alone",
    ):
        bench(str(tiny), QUICK, device="cuda", with_llama=True)


def test_the_tables_speak_of_a_gpu(tiny, pretended):
    runner = pytest.importorskip("typer.testing", reason="the command line needs typer").CliRunner()
    from otaro.cli.main import app

    flags = [
        "--prompt-tokens",
        "6",
        "--tokens",
        "2",
        "--context",
        "3",
        "--rounds",
        "1",
        "--precision",
        "E5M4,E5M3",
    ]
    done = runner.invoke(
        app, ["bench", str(tiny), "--device", "cuda", *flags], catch_exceptions=False, env={"COLUMNS": "80"}
    )
    head, rest = done.stdout.split("Speed", 1)
    assert "a pretended GPU; kernels" in head
    assert "thread" not in head
    assert "a plain copy of memory runs at" in rest
    assert "allocated" in rest
    assert "resident" not in rest
    assert "graphs captured for all precisions together take another 0 B" in rest


def test_the_clock_is_looked_at_when_all_is_done(monkeypatch):
    events = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: events.append("finish"))
    monkeypatch.setattr(machine.time, "perf_counter", lambda: events.append("clock") or len(events))
    seconds = machine.Gpu("cuda").seconds(lambda: events.append("call"))
    assert events == ["finish", "clock", "call", "finish", "clock"]
    assert seconds == 3


@needs_gpu
def test_a_gpu_holds_what_a_precision_needs(tiny):
    result = bench(str(tiny), QUICK, device="cuda", with_transformers=True)
    assert result.kernels == "cuda"
    assert result.path == "decode path"
    held = [row.resident_bytes for row in result.precisions]
    assert held == sorted(set(held), reverse=True)
    for finer, coarser in zip(result.precisions, result.precisions[1:], strict=False):
        plane = finer.weight_bytes - coarser.weight_bytes
        assert finer.resident_bytes - coarser.resident_bytes < 2 * plane, (
            "one plane more, and no copy of the weights"
        )
    assert result.graph_bytes >= 0
    assert result.read_bandwidth > 1e10


@needs_gpu
def test_a_plain_copy_moves_what_it_says():
    gpu = machine.processor("cuda")
    before = gpu.held_bytes()
    copy, moved = gpu.plain_access(1)
    assert gpu.held_bytes() - before == moved
    assert gpu.seconds(copy) > 0
