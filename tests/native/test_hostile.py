"""Files from strangers: what is wrong is refused in words, nothing reads out of bounds (`make sanitize`)."""

import copy
import hashlib
import json
import random
import shutil

import pytest

from otaro.errors import OtaroError
from otaro.runtime.decoder_file import write_decoder_file
from tests.native.test_api import IDS, Model


@pytest.fixture(scope="module")
def files(make_nested, tmp_path_factory):
    """The bytes of a small nested model, {3: ..., 4: ...}, and its description."""
    directory = shutil.copytree(make_nested("qwen2"), tmp_path_factory.mktemp("hostile") / "model")
    write_decoder_file(directory)
    shards = {plane: (directory / f"model-m{plane}.safetensors").read_bytes() for plane in (3, 4)}
    return shards, json.loads((directory / "decoder.json").read_text())


def opened(library, shards, description):
    model = Model(library)
    model.describe(json.dumps(description))
    for shard in shards:
        model.add(shard, check=False)
    return model


def resealed(shard, change):
    """The shard with its header changed and sealed again: what a forger would do."""
    end = 8 + int.from_bytes(shard[:8], "little")
    header = json.loads(shard[8:end])
    header = change(header) or header
    header["__metadata__"]["seal"] = "0" * 64
    text = json.dumps(header, separators=(",", ":")).encode()
    seal = hashlib.sha256(text).hexdigest().encode()
    text = text.replace(b'"seal":"' + b"0" * 64, b'"seal":"' + seal, 1)
    return len(text).to_bytes(8, "little") + text + shard[end:]


NORM = "model.norm.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight"


def stated(name, **changes):
    return lambda header: header[name].update(changes)


def metadata(**changes):
    return lambda header: header["__metadata__"].update(changes)


def sefp(**changes):
    def change(header):
        about = json.loads(header["__metadata__"]["sefp"])
        for name, value in changes.items():
            about[name] = value(about[name]) if callable(value) else value
        header["__metadata__"]["sefp"] = json.dumps(about)

    return change


HEADERS = {
    "another version": (metadata(otaro="3"), "another format version"),
    "no version": (lambda header: header["__metadata__"].pop("otaro") and None, "not an OTARo shard"),
    "an overlap": (stated(NORM, data_offsets=[0, 192]), "overlap or leave gaps"),
    "an end behind the file": (stated(NORM, data_offsets=[1 << 50, (1 << 50) + 192]), "is truncated"),
    "offsets the wrong way": (stated(NORM, data_offsets=[192, 0]), "claims another number of bytes"),
    "a negative offset": (stated(NORM, data_offsets=[-192, 0]), "is malformed"),
    "a huge shape": (stated(NORM, shape=[1 << 40, 1 << 40]), "claims another number of bytes"),
    "a shape that overflows to nothing": (
        stated(NORM, shape=[1 << 32, 1 << 32], data_offsets=[0, 0]),
        "claims another number",
    ),
    "a fraction": (stated(NORM, shape=[96.0]), "is malformed"),
    "a type": (stated(NORM, dtype="I4"), "unknown dtype"),
    "another type": (stated(QUERY, dtype="I8"), "where the model's base shard implies"),
    "no digests": (metadata(digests="{}"), "does not give a SHA-256 for every tensor"),
    "digests that are none": (metadata(digests='{"a":'), "'digests' is not valid JSON"),
    "no model": (metadata(model="x"), "'model' is not a SHA-256"),
    "no plane": (metadata(plane="9"), "of no plane"),
    "another plane": (metadata(plane="4"), "the base shard comes first"),
    "a group size": (sefp(group_size=33), "not a positive multiple of 32"),
    "another group size": (sefp(group_size=32), "where the model's base shard implies"),
    "a reconstruction": (sefp(reconstruction="nearest"), "reconstruction is unknown"),
    "a shape of nothing": (sefp(shapes=lambda shapes: {**shapes, QUERY: [0, 96]}), "impossible shape"),
    "a larger shape": (
        sefp(shapes=lambda shapes: {**shapes, QUERY: [1 << 30, 96]}),
        "where the model's base shard implies",
    ),
    "a shape without end": (
        sefp(shapes=lambda shapes: {**shapes, QUERY: [1 << 30, 1 << 30]}),
        "impossible shape",
    ),
    "an exponent": (sefp(scale_exponents=lambda them: {**them, QUERY: 100}), "scale exponent of .* is none"),
    "no exponent": (sefp(scale_exponents={}), "one scale exponent for every"),
    "no metadata": (lambda header: {"__metadata__": {}}, "not an OTARo shard"),
}


@pytest.mark.parametrize("what", HEADERS)
def test_a_forged_header_is_refused(library, files, what):
    shards, description = files
    change, words = HEADERS[what]
    with pytest.raises(OtaroError, match=words):
        opened(library, [resealed(shards[3], change)], description)


def test_a_damaged_shard_is_refused(library, files):
    shards, description = files
    base, plane = shards[3], shards[4]
    for size in (0, 7, 8, 9, 1000, len(base) - 1):
        with pytest.raises(OtaroError, match=r"truncated|does not match its seal"):
            opened(library, [base[:size]], description)
    for length in (len(base), 1 << 27, 1 << 40, (1 << 64) - 1):
        with pytest.raises(OtaroError, match=r"truncated inside its header|over the limit"):
            opened(library, [length.to_bytes(8, "little") + base[8:]], description)
    with pytest.raises(OtaroError, match="bytes after its last tensor"):
        opened(library, [base + b"\0"], description)
    flipped = bytearray(base)
    flipped[200] ^= 1
    with pytest.raises(OtaroError, match="its header"):
        opened(library, [bytes(flipped)], description)
    with pytest.raises(OtaroError, match="belongs to another model"):
        opened(library, [base, resealed(plane, metadata(model="0" * 64))], description)
    flipped = bytearray(plane)
    flipped[-1] ^= 1
    model = opened(library, [base], description)
    with pytest.raises(OtaroError, match=r"the bytes of .* are damaged"):
        model.add(bytes(flipped))
    assert library.otaro_finest(model.handle) == 3
    model.add(plane)
    assert library.otaro_finest(model.handle) == 4
    assert library.otaro_verify(model.handle) == 0
    model.kept[0][len(base) - 1] = bytes([base[-1] ^ 1])
    assert library.otaro_verify(model.handle) != 0
    assert "the shard of plane 3: the bytes of" in model.error()


def layer(**changes):
    return lambda it: it["layers"][1].update(changes)


DESCRIPTIONS = {
    "another version": ({"version": 2}, "another version than 1"),
    "another model": ({"model": "0" * 64}, "describes another model"),
    "a field": ({"mystery": 1}, "has 'mystery', which this program does not know"),
    "no heads": ({"heads": 0}, "'heads' from 1 to"),
    "many heads": ({"heads": 1 << 62}, "'heads' from 1 to"),
    "heads as text": ({"heads": "4"}, "'heads' from 1 to"),
    "heads that do not share": ({"kv_heads": 3}, "do not share keys evenly"),
    "an odd head": ({"head_dim": 23}, "do not share keys evenly"),
    "a wide head": ({"head_dim": 512}, "'head_dim' from 2 to 256"),
    "other heads": ({"heads": 8}, "layer 0's query has the wrong shape"),
    "an infinite number": ({"eps": 1e300}, "must have a number 'eps'"),
    "an activation": ({"activation": "relu"}, "unknown activation"),
    "no layers": ({"layers": []}, "has no layers"),
    "layers that are none": ({"layers": [1, 2]}, "layer 0 is not there"),
    "no ropes": ({"ropes": []}, "layer 0 must have a whole number 'rope'"),
    "a long rope": ({"ropes": [{"frequencies": [1.0] * 13, "scale": 1}]}, "for a whole head at most"),
    "an absurd frequency": ({"ropes": [{"frequencies": [1e9], "scale": 1}]}, "absurd frequency"),
    "no positions": ({"positions": 0}, "'positions' from 1"),
    "no trained positions": ({"trained_positions": 0}, "'trained_positions' from 1"),
    "trained positions as text": ({"trained_positions": "64"}, "'trained_positions' from 1"),
    "no embedding": ({"embedding": {"tensor": NORM}}, "names no packed embedding"),
    "a norm that is packed": ({"norm": QUERY}, "is no tensor that is not packed"),
    "no norm": ({"norm": "nothing"}, "is no tensor that is not packed"),
    "a head of its own shape": ({"lm_head": {"tensor": QUERY}}, "the head has the wrong shape"),
    "a matrix that is missing": (
        layer(up={"tensor": "nothing"}), "layer 1's up is nothing, which is not packed",
    ),
    "rows beyond the tensor": (
        layer(query={"tensor": QUERY, "first": 1, "rows": 96}), "query has the wrong shape",
    ),
    "rows without end": (layer(gate={"tensor": QUERY, "first": 0, "rows": 1 << 62}), "'rows' from 1 to 96"),
    "a bias of another length": (
        layer(down={"tensor": "model.layers.0.mlp.down_proj.weight", "bias": QUERY}), "not packed",
    ),
    "a rope that is missing": (layer(rope=1), "'rope' from 0 to 0"),
    "a window": (layer(window=-1), "'window' from 0"),
    "a norm of another length": (layer(key_norm=NORM), "wrong length"),
    "experts without a router": (
        layer(experts={"router": NORM, "chosen": 1, "normalize": True}), "have no router",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", DESCRIPTIONS)
def test_a_description_that_lies_is_refused(library, files, what):
    shards, description = files
    change, words = DESCRIPTIONS[what]
    lie = copy.deepcopy(description)
    if callable(change):
        change(lie)
    else:
        lie |= change
    with pytest.raises(OtaroError, match=words):
        opened(library, [shards[3]], lie)


def places(value, at=()):
    """Paths to everything in a document."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, item in items for place in places(item, (*at, key)))]


JUNK = [
    None,
    True,
    0,
    -1,
    1,
    2,
    7,
    96,
    1 << 31,
    1 << 62,
    0.5,
    1e38,
    "",
    "x",
    QUERY,
    NORM,
    [],
    {},
    [0],
    {"tensor": QUERY},
]


def spoilt(value, choose):
    """A document with one value replaced, or left out."""
    value = copy.deepcopy(value)
    *way, last = choose.choice([place for place in places(value) if place])
    inside = value
    for key in way:
        inside = inside[key]
    if choose.random() < 0.2:
        del inside[last]
    else:
        inside[last] = choose.choice(JUNK)
    return value


def test_anything_is_refused_or_runs(library, files):
    shards, description = files
    choose, ran = random.Random(1), 0
    for number in range(300):
        forged, told = shards[3], description
        if number % 2:
            forged = resealed(shards[3], lambda header: spoilt(header, choose))
        else:
            told = spoilt(description, choose)
        try:
            opened(library, [forged, shards[4]], told).forward(IDS[:70])
            ran += 1
        except (OtaroError, TypeError, KeyError):  # the latter two where there is nothing left to seal
            pass
    assert 10 < ran < 200
