"""What `otaro bench` counts is right; how fast anything is, no test says."""

import json
from statistics import median

import pytest
import torch

import otaro
from otaro.errors import OtaroError, ShardMissingError
from otaro.evaluate import speed
from otaro.evaluate.speed import Rounds, Settings, bench

QUICK = Settings(prompt_tokens=8, tokens=3, context=4, rounds=2)
# The matrices of the built-in model: six layers, and the embedding, which is the head too.
MATRICES = 6 * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 384 * 128) + 1536 * 128


@pytest.fixture(scope="module")
def small_read():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speed, "READ_BYTES", 1 << 20)
        patch.setattr(speed, "SWITCHES", 3)
        yield


@pytest.fixture(scope="module")
def measured(tiny, small_read):
    said = []
    result = bench(str(tiny), QUICK, with_transformers=True, progress=lambda *now: said.append(now))
    return result, said


def test_every_precision_is_measured_from_fine_to_coarse(measured):
    result, _ = measured
    assert [row.precision for row in result.precisions] == [str(p) for p in otaro.PRECISIONS]
    for row in result.precisions:
        assert len(row.rounds.prefill) == len(row.rounds.decode) == QUICK.rounds
        assert row.prefill == QUICK.prompt_tokens / median(row.rounds.prefill)
        assert row.decode == QUICK.tokens / median(row.rounds.decode)
        assert row.switch > 0


@pytest.mark.parametrize("precision", otaro.PRECISIONS, ids=str)
def test_bytes_per_token_are_those_of_the_matrices(measured, precision):
    result, _ = measured
    row = next(row for row in result.precisions if row.precision == str(precision))
    # a byte of scale for 64
    assert row.weight_bytes == MATRICES * (precision.mantissa_bits + 1) // 8 + MATRICES // 64
    per_token = 6 * 2 * 2 * 32 * 2  # layers, keys and values, heads, their width, float16
    assert row.kv_bytes == per_token * (QUICK.context + 2)  # the second of three tokens is the average
    assert row.kv_cache_bytes == per_token * (QUICK.context + QUICK.tokens)


def test_bandwidth_is_bytes_by_time(measured):
    result, _ = measured
    for row in result.precisions:
        assert row.bandwidth == (row.weight_bytes + row.kv_bytes) * row.decode
        assert row.bandwidth_share == row.bandwidth / result.read_bandwidth
    sizes = [row.weight_bytes for row in result.precisions]
    assert sizes == sorted(set(sizes), reverse=True)


def test_memory_is_told_beside_the_shards(measured, tiny):
    result, _ = measured
    for row in result.precisions:
        planes = range(3, otaro.Precision(row.precision).mantissa_bits + 1)
        assert row.file_bytes == sum(
            (tiny / f"model-m{plane}.safetensors").stat().st_size for plane in planes
        )
        assert row.resident_bytes is None or row.resident_bytes > 0


def test_transformers_is_compared_with_every_precision(measured):
    result, _ = measured
    (other,) = result.others
    assert other.name == "transformers"
    norms = (2 * 6 + 1) * 128
    assert other.weight_bytes == 4 * (MATRICES + norms)
    for ratio, row in zip(result.ratios, result.precisions, strict=True):
        assert (ratio.precision, ratio.against) == (row.precision, other.name)
        assert ratio.decode == median(
            b / a for a, b in zip(row.rounds.decode, other.rounds.decode, strict=True)
        )


def test_progress_ends_where_it_said(measured):
    _, said = measured
    assert said[-1][1] == said[-1][2] == 7 * (1 + QUICK.rounds) + QUICK.rounds  # of a plain read
    assert [done for _, done, _ in said] == sorted(done for _, done, _ in said)


def test_the_result_is_json(measured):
    result, _ = measured
    assert json.loads(json.dumps(result.to_dict()))["settings"]["kv"] is None


def test_keys_and_values_may_be_packed(tiny, small_read):
    settings = Settings(prompt_tokens=8, tokens=3, context=4, rounds=1, kv=otaro.Precision("E5M7"))
    result = bench(str(tiny), settings, [otaro.Precision("E5M3")])
    (row,) = result.precisions
    assert row.kv_bytes < 6 * 2 * 2 * 32 * 2 * (settings.context + 2)
    assert row.switch is None, "there is nothing to switch from"
    assert result.to_dict()["settings"]["kv"] == "E5M7"


def test_the_number_of_threads_is_as_before(tiny, small_read):
    # the context goes beyond the prompt
    settings = Settings(prompt_tokens=2, tokens=1, context=5, rounds=1, threads=2)
    assert bench(str(tiny), settings, [otaro.Precision("E5M3")]).threads == 2
    assert torch.get_num_threads() == 1


def test_a_model_without_a_decode_path_goes_through_transformers(make_nested, small_read):
    quick = Settings(prompt_tokens=4, tokens=2, context=3, rounds=1)
    result = bench(str(make_nested("gemma")), quick, [otaro.Precision("E5M3")])
    assert result.path.startswith("transformers: ")
    assert result.precisions[0].kv_bytes == round(2 * 2 * 2 * 24 * 4 * 4.5)  # float32
    with pytest.raises(OtaroError, match="keys and values at E5M7 need the decode path, but"):
        bench(
            str(make_nested("gemma")),
            Settings(kv=otaro.Precision("E5M7"), prompt_tokens=4, tokens=2, context=3),
        )


def test_more_tokens_than_positions_are_refused(tiny):
    with pytest.raises(OtaroError, match="512 positions, but --context 500 and --tokens 64 take 564"):
        bench(str(tiny), Settings(context=500))


def test_a_missing_shard_is_refused_and_the_others_are_measured(tiny, copy_of, small_read):
    partial = copy_of(tiny, planes=(3, 4))
    with pytest.raises(ShardMissingError, match="E5M8 needs model-m5"):
        bench(str(partial), QUICK, [otaro.Precision("E5M8")])
    assert [row.precision for row in bench(str(partial), QUICK).precisions] == ["E5M4", "E5M3"]


def test_ratios_are_taken_within_rounds():
    rounds = {"E5M3": Rounds([1, 2, 1], [1, 1, 4]), "llama.cpp Q4_0": Rounds([2, 8, 3], [2, 3, 4])}
    (ratio,) = speed._ratios(rounds, ["E5M5", "E5M3"])
    assert (ratio.precision, ratio.prefill, ratio.decode) == ("E5M3", 3, 2)


def test_what_would_take_too_long_is_cut_rounds_first_then_tokens():
    asked = Settings(prompt_tokens=500, tokens=64, context=256, rounds=5)
    turn = asked.seconds(0.01, 0.1)
    assert turn == pytest.approx(500 * 0.01 + 64 * 0.1)
    assert asked.within(6 * 6 * turn, 0.01, 0.1, 6) == asked
    fewer = asked.within(4.5 * 6 * turn, 0.01, 0.1, 6)
    assert (fewer.rounds, fewer.tokens, fewer.prompt_tokens) == (3, 64, 500)
    short = asked.within(6 * turn, 0.01, 0.1, 6)
    assert (short.rounds, short.tokens, short.context, short.prompt_tokens) == (1, 32, 128, 250)
    assert 2 * 6 * short.seconds(0.01, 0.1) <= 6 * turn
    least = asked.within(1e-3, 1.0, 10.0, 6)
    assert (least.rounds, least.tokens, least.context, least.prompt_tokens) == (1, 1, 0, 1)


def test_a_model_outside_the_decode_path_ends_in_time_and_says_what_was_left_out(
    make_nested, small_read, monkeypatch
):
    from otaro.cli import bench as command
    from otaro.cli import console

    monkeypatch.setattr(speed, "BUDGET", 1e-3)
    asked = Settings(prompt_tokens=8, tokens=3, context=4, rounds=2)
    result = bench(str(make_nested("gemma")), asked, [otaro.Precision("E5M3")])
    assert (result.cut_from, result.settings.rounds, result.settings.tokens) == (asked, 1, 1)
    assert json.loads(json.dumps(result.to_dict()))["cut_from"]["rounds"] == 2
    with console.out.capture() as shown:
        command.show(result)
    assert (
        "cut to end within minutes: asked for were 8 tokens of prefill, decode of 3 after 4, 2 rounds"
        in shown.get()
    )
    monkeypatch.setattr(speed, "BUDGET", 1e6)
    assert bench(str(make_nested("gemma")), asked, [otaro.Precision("E5M3")]).cut_from is None


def test_what_the_decode_path_serves_is_never_cut(tiny, small_read, monkeypatch):
    monkeypatch.setattr(speed, "BUDGET", 1e-9)
    assert bench(str(tiny), QUICK, [otaro.Precision("E5M3")]).cut_from is None
