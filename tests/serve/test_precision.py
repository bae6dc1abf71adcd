"""Precision auto steps down while answers wait, and up again when nobody does."""

import pytest

from otaro.sefp.precision import Precision
from otaro.serve.precision import Auto

E5M3, E5M4, E5M8 = Precision("E5M3"), Precision("E5M4"), Precision("E5M8")


@pytest.fixture
def clock():
    class Clock:
        now = 0.0

        def __call__(self):
            return self.now

    return Clock()


def test_it_goes_down_a_step_at_a_time_and_up_again(clock):
    auto = Auto(lambda: (E5M4, E5M8), 1.0, clock)

    def look(waiting, running=16):
        clock.now += 1.0
        auto.look(waiting, running, places=16)
        return str(auto.now)

    assert str(auto.now) == "E5M8"
    assert [look(waiting=3) for _ in range(6)] == ["E5M7", "E5M6", "E5M5", "E5M4", "E5M4", "E5M4"]
    assert [look(waiting=0) for _ in range(2)] == ["E5M4", "E5M4"]  # all places are taken
    assert [look(waiting=0, running=8) for _ in range(5)] == ["E5M5", "E5M6", "E5M7", "E5M8", "E5M8"]
    assert auto.switches == 8


def test_it_steps_no_faster_than_its_interval(clock):
    auto = Auto(lambda: (E5M3, E5M8), 1.0, clock)
    for _ in range(60):
        clock.now += 1 / 16
        auto.look(waiting=1, running=1, places=1)
    assert str(auto.now) == "E5M5"  # three steps in less than four seconds


def test_it_keeps_to_its_bounds_when_they_move(clock):
    bounds = [E5M3, E5M4]
    auto = Auto(lambda: (bounds[0], bounds[1]), 1.0, clock)
    assert auto.now == E5M4
    bounds[1] = E5M8  # planes have arrived
    clock.now += 1
    auto.look(waiting=0, running=0, places=4)
    assert str(auto.now) == "E5M5"
    bounds[0] = E5M8
    assert auto.now == E5M8


def test_a_server_under_load_answers_coarser_and_recovers(start, clock, monkeypatch):
    """One place, a queue that does not empty: later answers are coarser, each says at which precision."""
    monkeypatch.setattr("otaro.serve.service._UPKEEP", 3600.0)  # load is looked at when somebody asks
    busy = start(auto_coarsest="E5M5", engine={"max_sequences": 1})
    busy.service.precisions.auto = Auto(busy.service.precisions.auto.bounds, 1.0, clock)
    engine = busy.service.engine

    def ask():
        """An interval later."""
        clock.now += 1.0
        with busy.client.completions.with_streaming_response.create(
            model="tiny:auto", prompt="The", max_tokens=2, stream=True
        ) as response:
            return response.headers["x-otaro-precision"]

    with busy.held():
        long = {"model": "tiny:auto", "prompt": "The", "max_tokens": 400, "stream": True}
        streams = [busy.client.completions.create(**long) for _ in range(2)]
        busy.eventually(lambda: (engine.running, engine.waiting) == (1, 1))
        assert [ask() for _ in range(5)] == ["E5M7", "E5M6", "E5M5", "E5M5", "E5M5"]
        assert busy.metric("otaro_auto_mantissa_bits") == 5
        for stream in streams:
            stream.close()
        busy.eventually(lambda: busy.service.open_answers == 0)  # so that none of them is written after all
    for expected in ("E5M6", "E5M7", "E5M8", "E5M8"):
        busy.eventually(lambda: (engine.running, engine.waiting) == (0, 0))
        assert ask() == expected
    assert busy.metric("otaro_auto_switches") == 6


def test_a_server_looks_at_its_load_where_nobody_asks(start, monkeypatch):
    monkeypatch.setattr("otaro.serve.service._UPKEEP", 0.05)
    busy = start(auto_interval=0.01, auto_coarsest="E5M7", engine={"max_sequences": 1})
    with busy.held():
        long = {"model": "tiny:auto", "prompt": "The", "max_tokens": 400, "stream": True}
        streams = [busy.client.completions.create(**long) for _ in range(2)]
        busy.eventually(lambda: busy.metric("otaro_auto_mantissa_bits") == 7)
        for stream in streams:
            stream.close()
    busy.eventually(lambda: busy.metric("otaro_auto_mantissa_bits") == 8)
