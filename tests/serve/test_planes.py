"""Planes that are copied in while the server runs, and memory of those that nobody uses."""

import shutil

import openai
import psutil
import pytest

import otaro
from otaro.serve.planes import Planes


@pytest.fixture
def coarse(chat_dir, copy_of):
    return copy_of(chat_dir, planes=(3, 4))


def complete(running, name):
    return running.client.completions.create(model=name, prompt="The statement", max_tokens=8, temperature=0)


def test_a_plane_that_arrives_later_is_taken_up(start_on, coarse, chat_dir, tiny):
    running = start_on(coarse)
    names = [one.id for one in running.client.models.list()]
    assert names == ["tiny", "tiny:auto", "tiny:E5M4", "tiny:E5M3"]
    assert complete(running, "tiny").precision == "E5M4"
    with pytest.raises(openai.BadRequestError, match="E5M5 is not there; this model goes up to E5M4"):
        complete(running, "tiny:E5M5")
    whole = (chat_dir / "model-m5.safetensors").read_bytes()
    arriving = coarse / "model-m5.safetensors"
    arriving.write_bytes(whole[:-100])  # half-copied
    running.service.planes.look()
    assert str(running.service.planes.finest) == "E5M4"
    # its size was reserved, its end is still to come
    arriving.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    running.service.planes.look()
    assert str(running.service.planes.finest) == "E5M4"
    shutil.copy(chat_dir / "model-m6.safetensors", coarse)
    shutil.copy(chat_dir / "model-m5.safetensors", coarse / "m5.part")
    (coarse / "m5.part").replace(arriving)
    running.eventually(lambda: "tiny:E5M6" in [one.id for one in running.client.models.list()])
    for name in ("tiny:E5M5", "tiny:E5M6"):
        assert complete(running, name).choices[0].text == complete(tiny, name).choices[0].text
    assert complete(running, "tiny").precision == "E5M6"
    assert complete(running, "tiny:E5M3").choices[0].text == complete(tiny, "tiny:E5M3").choices[0].text


def test_a_plane_of_another_model_is_not_taken_up(start_on, coarse, make_nested):
    running = start_on(coarse)
    shutil.copy(make_nested("llama") / "model-m5.safetensors", coarse)
    running.service.planes.look()
    assert str(running.service.planes.finest) == "E5M4"
    assert complete(running, "tiny").precision == "E5M4"


def in_memory(directory, plane):
    """Whether more than a quarter of a shard is: pages of its header, and between tensors, may stay."""
    path = (directory / f"model-m{plane}.safetensors").resolve()
    resident = sum(region.rss for region in psutil.Process().memory_maps() if region.path == str(path))
    return resident > path.stat().st_size / 4


def test_planes_that_nobody_uses_give_their_memory_back(chat_dir, copy_of):
    directory, now = copy_of(chat_dir), [0.0]
    model = otaro.load(directory)
    planes = Planes(model, 10.0, lambda: now[0])
    with otaro.Engine(model, max_sequences=1) as engine:

        def answer(precision):
            planes.use(otaro.Precision(precision))
            return engine.submit("The statement", precision=precision, max_new_tokens=4).text()

        fine = answer("E5M8")
        assert in_memory(directory, 8)
        now[0] = 9.0
        answer("E5M4")
        assert planes.release() == 0
        now[0] = 11.0
        assert planes.release() > 0
        assert not any(in_memory(directory, plane) for plane in (5, 6, 7, 8))
        assert in_memory(directory, 4)
        assert planes.release() == 0  # only once
        assert answer("E5M8") == fine
        assert in_memory(directory, 8)
        now[0] = 100.0
        assert planes.release() > 0
        assert not any(in_memory(directory, plane) for plane in (4, 8))
        assert in_memory(directory, 3)
