"""otaro.h against the package: a library of the same sources, called as C, gives the same bits.

It is built here without instruction sets, which takes seconds; every backend computes the same.
"""

import ctypes
import json
import shutil

import numpy as np
import pytest
import torch

import otaro
from otaro.errors import OtaroError
from otaro.kernels import cpu
from otaro.runtime.decode import Decoder
from otaro.runtime.decoder_file import write_decoder_file
from otaro.sefp.precision import PRECISIONS

pytestmark = pytest.mark.skipif(bool(cpu.MISSING), reason=cpu.MISSING or "built")

SERVED = ("llama", "llama_tied", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "olmo2", "smollm3",
          "granite", "mixtral", "qwen3_moe", "qwen3_moe_mixed")  # fmt: skip
IDS = [(7 * i + i * i // 3) % 120 for i in range(150)]


class Model:
    """otaro.h as a class; whatever is refused raises."""

    def __init__(self, library, directory=None):
        self.library = library
        self.handle = ctypes.c_void_p(
            library.otaro_new() if directory is None else library.otaro_open(str(directory).encode())
        )
        self.kept = []
        if directory is not None:
            self._check(bool(self.error()))

    def __del__(self):
        self.library.otaro_free(self.handle)

    def error(self):
        return self.library.otaro_error(self.handle).decode()

    def _check(self, failed):
        if failed:
            raise OtaroError(self.error())
        assert not self.error()

    def describe(self, text):
        self._check(self.library.otaro_describe(self.handle, text.encode(), len(text.encode())))

    def add(self, data, check=True):
        self.kept.append(ctypes.create_string_buffer(data, len(data)))
        self._check(
            self.library.otaro_add_shard(self.handle, self.kept[-1], ctypes.c_size_t(len(data)), int(check))
        )

    def at(self, precision):
        self._check(self.library.otaro_set_precision(self.handle, precision.mantissa_bits))

    def forward(self, ids):
        logits = self.library.otaro_forward(
            self.handle, (ctypes.c_int32 * len(ids))(*ids), ctypes.c_size_t(len(ids))
        )
        self._check(not logits)
        return np.ctypeslib.as_array(logits, (self.library.otaro_vocabulary(self.handle),)).copy()

    def truncate(self, length):
        self._check(self.library.otaro_truncate(self.handle, ctypes.c_size_t(length)))

    def __len__(self):
        return self.library.otaro_length(self.handle)


@pytest.fixture(scope="session")
def described(make_nested, tmp_path_factory):
    """described("qwen2") is a copy of a nested directory with its decoder.json."""

    def make(name, reconstruction="midpoint"):
        target = tmp_path_factory.mktemp("native") / name
        shutil.copytree(make_nested(name, reconstruction), target)
        write_decoder_file(target)
        return target

    return make


def expected(directory, ids, precision):
    decoder = Decoder.of(otaro.load(directory, precision))
    return decoder.forward(ids, decoder.new_cache()).numpy()


@pytest.mark.parametrize("name", SERVED)
def test_logits_have_the_bits_of_the_package(library, described, name):
    directory = described(name)
    model = Model(library, directory)
    for precision in PRECISIONS if name == "llama" else PRECISIONS[::5]:
        model.truncate(0)
        model.at(precision)
        assert np.array_equal(model.forward(IDS), expected(directory, IDS, precision))


def test_logits_of_the_built_in_model_have_the_bits_of_the_package(library, tiny, tmp_path):
    directory = shutil.copytree(tiny, tmp_path / "tiny")
    write_decoder_file(directory)
    model = Model(library, directory)
    for precision in PRECISIONS:
        model.truncate(0)
        model.at(precision)
        assert np.array_equal(model.forward(IDS[:30]), expected(directory, IDS[:30], precision))


def test_truncate_reconstruction(library, described):
    directory = described("qwen2", "truncate")
    assert np.array_equal(Model(library, directory).forward(IDS), expected(directory, IDS, PRECISIONS[0]))


def test_planes_arrive_in_the_middle_of_a_sequence(library, described):
    directory = described("llama")
    model = Model(library)
    model.describe((directory / "decoder.json").read_text())
    model.add((directory / "model-m3.safetensors").read_bytes())
    packed = otaro.load(directory, "E5M3")
    decoder = Decoder.of(packed)
    cache = decoder.new_cache()
    for number, precision in enumerate(reversed(PRECISIONS)):
        if number:
            with pytest.raises(
                OtaroError, match=f"{precision} needs the shard of plane {precision.mantissa_bits}"
            ):
                model.at(precision)
            model.add((directory / f"model-m{precision.mantissa_bits}.safetensors").read_bytes())
        model.at(precision)
        otaro.set_precision(packed, precision)
        some = IDS[number * 20 : number * 20 + 20]
        assert np.array_equal(model.forward(some), decoder.forward(some, cache).numpy())
    model.truncate(30)
    cache.crop(30)
    assert np.array_equal(model.forward(IDS[:5]), decoder.forward(IDS[:5], cache).numpy())
    assert len(model) == 35


def test_a_plane_behind_a_missing_one_waits_for_it(library, described):
    directory = described("llama")
    model = Model(library)
    model.describe((directory / "decoder.json").read_text())
    for plane in (3, 5):
        model.add((directory / f"model-m{plane}.safetensors").read_bytes())
    assert library.otaro_finest(model.handle) == 3
    model.add((directory / "model-m4.safetensors").read_bytes())
    assert library.otaro_finest(model.handle) == 5
    model.at(PRECISIONS[3])
    assert np.array_equal(model.forward(IDS), expected(directory, IDS, PRECISIONS[3]))


def test_a_refused_token_leaves_the_sequence_as_it_was(library, described):
    model = Model(library, described("llama"))
    before = model.forward(IDS[:10])
    for ids, words in (
        ([*IDS[:70], 120], "token 120 is not in the vocabulary of 120"),
        ([-1], "token -1"),
        ([], "no tokens"),
    ):
        with pytest.raises(OtaroError, match=words):
            model.forward(ids)
        assert len(model) == 10
    model.truncate(9)
    assert np.array_equal(model.forward(IDS[9:10]), before)
    with pytest.raises(OtaroError, match="not that long"):
        model.truncate(11)


def test_order_and_repetition_are_refused(library, described):
    directory = described("llama")
    shards = {plane: (directory / f"model-m{plane}.safetensors").read_bytes() for plane in (3, 4)}
    model = Model(library)
    with pytest.raises(OtaroError, match="no base shard yet"):
        model.forward([1])
    with pytest.raises(OtaroError, match=r"decoder\.json comes before the shards"):
        model.add(shards[3])
    model.describe((directory / "decoder.json").read_text())
    with pytest.raises(OtaroError, match="it is of plane 4, and the base shard comes first"):
        model.add(shards[4])
    model.add(shards[3])
    with pytest.raises(OtaroError, match="its plane is there already"):
        model.add(shards[3])
    with pytest.raises(OtaroError, match="has its base shard already"):
        model.describe("{}")
    assert torch.isfinite(torch.tensor(model.forward(IDS))).all()


def test_a_directory_without_a_description_says_how_to_get_one(library, described, tmp_path):
    directory = described("llama")
    (directory / "decoder.json").unlink()
    with pytest.raises(OtaroError, match=r"has no decoder.json; `otaro describe .*` writes it"):
        Model(library, directory)
    with pytest.raises(OtaroError, match="is no nested model"):
        Model(library, tmp_path)


def test_decoder_json_names_its_model_and_version(described):
    stated = json.loads((described("gemma3") / "decoder.json").read_text())
    assert stated["version"] == 1
    assert len(stated["ropes"]) == 2
    assert [layer["rope"] for layer in stated["layers"]] == [1, 0]
    assert stated["norm_offset"] == 1.0


def test_a_shard_that_is_refused_leaves_the_precisions_below_it(library, described):
    directory = described("llama")
    base, sound, below, finest = PRECISIONS[5], PRECISIONS[4], PRECISIONS[2], PRECISIONS[0]
    shards = {plane: directory / f"model-m{plane}.safetensors" for plane in range(3, 9)}
    whole = shards[5].read_bytes()

    def opened_up_to_4(words):
        model = Model(library, directory)
        assert library.otaro_finest(model.handle) == library.otaro_precision(model.handle) == 4
        for precision in (below, finest):
            with pytest.raises(
                OtaroError,
                match=rf"{precision} .*model-m5.safetensors.*{words}.*complete "
                r"up to E5M4",
            ):
                model.at(precision)
        for precision in (sound, base):
            model.truncate(0)
            model.at(precision)
            assert np.array_equal(model.forward(IDS), expected(directory, IDS, precision))
        return model

    shards[5].write_bytes(whole[:-1])
    model = opened_up_to_4("is truncated")
    assert "model-m5.safetensors: the shard is refused" in library.otaro_damaged(model.handle).decode()
    assert library.otaro_verify(model.handle)
    assert "model-m5.safetensors: the shard is refused" in model.error()
    model.add(whole)
    assert library.otaro_finest(model.handle) == 5
    assert not library.otaro_damaged(model.handle)
    with pytest.raises(OtaroError, match="needs the shard of plane 6; the model is complete up to E5M5"):
        model.at(finest)
    shards[5].write_bytes(shards[6].read_bytes())
    opened_up_to_4("it holds another plane than its name says")
    shards[5].unlink()
    model = opened_up_to_4("which is missing")
    assert not library.otaro_damaged(model.handle)
    assert not library.otaro_verify(model.handle)
    shards[3].write_bytes(shards[3].read_bytes()[:-1])
    with pytest.raises(OtaroError, match=r"model-m3.safetensors: the shard is refused: .* truncated"):
        Model(library, directory)


def test_the_positions_that_a_model_was_made_for(library, described):
    directory = described("llama")
    assert library.otaro_trained_positions(Model(library, directory).handle) == 64
    stated = json.loads((directory / "decoder.json").read_text())
    del stated["trained_positions"]  # as files of before
    (directory / "decoder.json").write_text(json.dumps(stated))
    assert library.otaro_trained_positions(Model(library, directory).handle) == 0
