"""Every way a nested directory can be wrong is refused with a message of its own, and none is half-loaded."""

import hashlib
import json
import os
import re
import struct

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import otaro
from otaro.errors import DigestError, FormatError, OtaroError, ShardMissingError
from otaro.file.checkpoint import resolve_nested
from otaro.file.header import MAX_HEADER, render_header, shard_name
from otaro.file.io import NestedDirectory

LAYER = "model.layers.0.self_attn.q_proj.weight"  # [96, 96]: 48 bytes a row in the base, 12 in a plane
NORM = "model.norm.weight"


@pytest.fixture
def victim(nested_dir, copy_of):
    """A nested directory to damage."""
    return copy_of(nested_dir)


def shard(directory, plane):
    return directory / f"model-m{plane}.safetensors"


def read_shard(path):
    """Header as a dict, and the data."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def write_sealed(path, header, data):
    """Write a shard whose seal is right, whatever else is wrong; `header` is a dict or its text."""
    text = header if isinstance(header, bytes) else render_header(header)[8:]
    blank = re.sub(rb'"seal":"\w*"', b'"seal":"%s"' % (b"0" * 64), text)
    seal = hashlib.sha256(blank).hexdigest().encode()
    text = blank.replace(b'"seal":"%s"' % (b"0" * 64), b'"seal":"%s"' % seal)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def edit_json(metadata, key, **changes):
    """Change a value that is JSON in a string; None removes."""
    value = json.loads(metadata[key]) | changes
    metadata[key] = json.dumps({name: v for name, v in value.items() if v is not None})


def open_all(directory):
    nested = NestedDirectory(directory)
    nested.require(otaro.Precision("E5M8"))
    return nested


def test_an_untouched_copy_is_good(victim):
    """Or nothing below would mean anything."""
    open_all(victim).verify()
    for plane in range(3, 9):
        header, data = read_shard(shard(victim, plane))
        before = shard(victim, plane).read_bytes()
        write_sealed(shard(victim, plane), header, data)
        assert shard(victim, plane).read_bytes() == before


# Files that are not what they should be


@pytest.mark.parametrize("plane", [3, 4, 8])
@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (0, r"is truncated inside its header \(0 bytes\)"),
        (7, r"is truncated inside its header \(7 bytes\)"),
        (500, r"is truncated inside its header \(500 bytes\)"),
        (-5000, r"is truncated: \d+ bytes of data promised, \d+ found; delete it and fetch it again"),
        (-1, r"is truncated: \d+ bytes of data promised, \d+ found; delete it and fetch it again"),
    ],
)
def test_a_truncated_shard_is_refused(victim, plane, keep, message):
    path = shard(victim, plane)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(FormatError, match=f"model-m{plane}.safetensors {message}"):
        open_all(victim)
    with pytest.raises(FormatError, match=message):
        otaro.load(victim)
    with pytest.raises(FormatError, match=message):
        AutoModelForCausalLM.from_pretrained(victim)


@pytest.mark.parametrize(
    ("plane", "name"), [(3, LAYER), (3, f"{LAYER}.scales"), (3, NORM), (4, LAYER), (8, LAYER)]
)
def test_a_flipped_byte_of_data_is_found_and_its_tensor_named(victim, plane, name):
    header, data = read_shard(shard(victim, plane))
    start, end = header[name]["data_offsets"]
    for at in (start, (start + end) // 2, end - 1):
        damaged = bytearray(data)
        damaged[at] ^= 0x10
        write_sealed(shard(victim, plane), header, bytes(damaged))
        message = f"model-m{plane}.safetensors: the bytes of {re.escape(name)} are damaged; delete the file"
        with pytest.raises(DigestError, match=message):
            open_all(victim).verify()


@pytest.mark.parametrize("plane", [3, 4])
def test_a_flipped_byte_anywhere_in_a_header_is_refused(victim, plane):
    path = shard(victim, plane)
    raw = path.read_bytes()
    nested, loaded = NestedDirectory(victim), []
    with open(path, "r+b", buffering=0) as file:
        for at in range(8 + int.from_bytes(raw[:8], "little")):
            for flip in (0x01, 0x20, 0x80):
                os.pwrite(file.fileno(), bytes([raw[at] ^ flip]), at)
                try:
                    NestedDirectory(victim) if plane == 3 else nested.plane(plane)
                except OtaroError:
                    continue
                loaded.append((at, flip))
            os.pwrite(file.fileno(), raw[at : at + 1], at)
    assert loaded == []
    open_all(victim)


@pytest.mark.parametrize("plane", [3, 4])
def test_a_changed_header_that_still_reads_well_breaks_the_seal(victim, plane):
    header, data = read_shard(shard(victim, plane))
    digests = json.loads(header["__metadata__"]["digests"])
    edit_json(header["__metadata__"], "digests", **{LAYER: digests[LAYER][::-1]})
    shard(victim, plane).write_bytes(render_header(header) + data)
    with pytest.raises(
        DigestError,
        match=f"model-m{plane}.safetensors: the header does not match its seal; the file is damaged",
    ):
        open_all(victim)


def test_a_shard_of_another_model_is_refused(victim, make_nested):
    shard(victim, 5).write_bytes(shard(make_nested("llama", "truncate"), 5).read_bytes())
    with pytest.raises(FormatError, match=r"model-m5.safetensors belongs to another model \(identity \w{12}"):
        open_all(victim)


def test_a_base_shard_of_another_model_is_refused(victim, make_nested):
    shard(victim, 3).write_bytes(shard(make_nested("llama", "truncate"), 3).read_bytes())
    with pytest.raises(FormatError, match=r"model-m4.safetensors belongs to another model"):
        open_all(victim)


def test_swapped_planes_are_refused(victim):
    shard(victim, 4).rename(victim / "aside")
    shard(victim, 5).rename(shard(victim, 4))
    (victim / "aside").rename(shard(victim, 5))
    with pytest.raises(
        FormatError,
        match=r"model-m4.safetensors holds plane '5' but its name says plane 4.*renamed or "
        r"swapped",
    ):
        open_all(victim)


def test_a_plane_in_place_of_the_base_shard_is_refused(victim):
    shard(victim, 3).write_bytes(shard(victim, 4).read_bytes())
    with pytest.raises(FormatError, match=r"model-m3.safetensors holds plane '4' but its name says plane 3"):
        NestedDirectory(victim)


@pytest.mark.parametrize("plane", [3, 6])
def test_an_ordinary_safetensors_file_is_refused(victim, plane):
    save_file({LAYER: torch.zeros(4)}, shard(victim, plane))
    with pytest.raises(
        FormatError,
        match=f"model-m{plane}.safetensors is not an OTARo shard: its header has no format version",
    ):
        open_all(victim)


def test_a_directory_without_the_base_shard_is_refused(victim):
    shard(victim, 3).unlink()
    with pytest.raises(
        ShardMissingError,
        match=r"has model-m4.safetensors, .* but not "
        r"model-m3.safetensors, which every",
    ):
        otaro.load(victim)


def test_a_directory_without_any_shard_is_refused(tmp_path):
    for open_it in (NestedDirectory, otaro.load):
        with pytest.raises(
            FormatError,
            match=rf"{tmp_path} is not a nested model \(no "
            r"model-m3.safetensors\).*otaro pack",
        ):
            open_it(tmp_path)


def test_the_folder_of_a_tuning_run_is_told_from_the_model_in_it(victim):
    run = victim.rename(victim.parent / "nested").parent
    with pytest.raises(FormatError, match=rf"{run} is not a nested model .*; give {run}/nested$"):
        NestedDirectory(run)


def test_a_file_or_nothing_in_place_of_the_directory_is_refused(victim):
    for path, way in (
        (victim / "config.json", f"is a file; give the nested directory it lies in, {victim}$"),
        (victim / "nothing", "is not a directory; give one that `otaro pack` wrote"),
    ):
        with pytest.raises(FormatError, match=f"{path} {way}"):
            NestedDirectory(path)
    elsewhere = victim.parent / "alone.safetensors"
    elsewhere.touch()
    with pytest.raises(FormatError, match="is a file; give a nested directory, as `otaro pack` writes it"):
        resolve_nested(elsewhere)


def test_a_directory_without_its_base_shard_is_refused_with_what_brings_it(victim):
    (victim / shard_name(3)).unlink()
    with pytest.raises(ShardMissingError, match=r"model-m3\.safetensors, .*with `otaro fetch SOURCE OUT` or"):
        NestedDirectory(victim)


def test_a_missing_plane_limits_the_directory_and_is_named_when_asked_for(victim):
    shard(victim, 4).unlink()
    assert str(NestedDirectory(victim).finest) == "E5M3"  # model-m5 is there, and no use without model-m4
    for precision in ("E5M4", "E5M5", "E5M8"):
        message = (
            rf"{precision} needs model-m4.safetensors, which .* lacks \(it is complete up to E5M3\); "
            r"fetch"
        )
        with pytest.raises(ShardMissingError, match=message):
            otaro.load(victim, precision)
    assert set(map(str, otaro.precisions_of(otaro.load(victim)).values())) == {"E5M3"}


# Headers that lie. All are sealed correctly: a stranger can do that.


def test_a_header_longer_than_the_limit_is_refused(victim):
    with open(shard(victim, 4), "wb") as file:
        file.write(struct.pack("<Q", MAX_HEADER + 1))
        file.truncate(MAX_HEADER + 100)  # sparse: takes no room
    with pytest.raises(
        FormatError, match=f"a header of {MAX_HEADER + 1} bytes is over the limit of {MAX_HEADER}"
    ):
        open_all(victim)


@pytest.mark.parametrize("length", [2**63 - 1, 2**63, 2**64 - 1])
def test_a_header_length_beyond_the_file_is_refused(victim, length):
    path = shard(victim, 4)
    path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])
    with pytest.raises(FormatError, match="is truncated inside its header"):
        open_all(victim)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"__metadata__":' * 100_000, "is not valid JSON"),
        (b"[" * 100_000 + b"]" * 100_000, "is not valid JSON"),
        (b"[]", "is not a JSON object"),
        (b"null", "is not a JSON object"),
        (b'{"a": \xff}', "the header is not text; the file is damaged; delete it and fetch it again"),
        (b"", "is not valid JSON"),
        (b"{}", "is not an OTARo shard"),
        (b'{"__metadata__": "otaro"}', "is not an OTARo shard"),
        (b'{"__metadata__": {"otaro": "2"}}', "the header has no seal"),
        (b'{"__metadata__": {"otaro": "2", "seal": 5}}', "the header has no seal"),
        (
            b'{"__metadata__": {"otaro": "1"}}',
            "has format version '1', this program reads version '2'; pack the checkpoint anew",
        ),
        (b'{"__metadata__": {"otaro": 2}}', "has format version 2, this program reads version '2'"),
        (b'{"a": {"dtype": 1%s}}' % (b"0" * 5000), "is not valid JSON"),
    ],
    ids=[
        *(
            "deep-objects",
            "deep-arrays",
            "array",
            "null",
            "not-utf8",
            "empty",
            "no-metadata",
            "text-metadata",
            "no-seal",
        ),
        *("number-seal", "version-1", "number-version", "huge-number"),
    ],
)
def test_a_header_that_is_no_header_is_refused(victim, text, message):
    for plane in (4, 3):
        shard(victim, plane).write_bytes(struct.pack("<Q", len(text)) + text)
        with pytest.raises(FormatError, match=f"model-m{plane}.safetensors.*{message}"):
            open_all(victim)


@pytest.mark.parametrize("plane", [3, 4])
@pytest.mark.parametrize("key", [b"__metadata__", LAYER.encode(), b"dtype", b"plane"])
def test_a_key_that_occurs_twice_is_refused(victim, plane, key):
    header, data = read_shard(shard(victim, plane))
    text = render_header(header)[8:]
    twice = text.replace(b'"%s":' % key, b'"%s":0,"%s":' % (key, key), 1)
    write_sealed(shard(victim, plane), twice, data)
    with pytest.raises(FormatError, match=r"the header is not valid JSON \(a key occurs twice\)"):
        open_all(victim)


def test_a_digest_that_is_given_twice_is_refused(victim):
    header, data = read_shard(shard(victim, 4))
    digests = header["__metadata__"]["digests"]
    header["__metadata__"]["digests"] = digests.replace("{", '{"%s":"%s",' % (LAYER, "0" * 64), 1)  # noqa: UP031 (braces)
    write_sealed(shard(victim, 4), header, data)
    with pytest.raises(FormatError, match=r"'digests' is not valid JSON \(a key occurs twice\)"):
        open_all(victim)


@pytest.mark.parametrize("plane", [3, 4])
@pytest.mark.parametrize(
    "entry",
    [
        {"shape": [-96, -12]},
        {"shape": [96.0, 12.0]},
        {"shape": [True, 1152]},
        {"shape": ["96", "12"]},
        {"shape": "96"},
        {"shape": 1152},
        {"shape": None},
        {"shape": {"96": 12}},
        {"shape": [[96, 12]]},
        {"data_offsets": [-1152, 0]},
        {"data_offsets": [0.0, 1152.0]},
        {"data_offsets": [False, 1152]},
        {"data_offsets": [0]},
        {"data_offsets": [0, 1152, 1152]},
        {"data_offsets": [0, float("nan")]},
        {"data_offsets": 1152},
        {"data_offsets": None},
    ],
    ids=lambda entry: json.dumps(entry).replace('"', ""),
)
def test_a_shape_or_offset_that_is_no_count_is_refused(victim, plane, entry):
    header, data = read_shard(shard(victim, plane))
    header[LAYER] |= entry
    write_sealed(shard(victim, plane), header, data)
    with pytest.raises(
        FormatError, match=f"model-m{plane}.safetensors: the header entry of {LAYER} is malformed"
    ):
        open_all(victim)


@pytest.mark.parametrize("entry", [None, 5, "U8", [], {}, {"dtype": "U8"}])
def test_an_entry_that_is_no_entry_is_refused(victim, entry):
    header, data = read_shard(shard(victim, 4))
    write_sealed(shard(victim, 4), header | {LAYER: entry}, data)
    with pytest.raises(FormatError, match=f"the header entry of {LAYER} is malformed"):
        open_all(victim)


@pytest.mark.parametrize("dtype", ["F8", "u8", "", None, 8, ["U8"], {"U8": 1}], ids=repr)
def test_an_unknown_dtype_is_refused(victim, dtype):
    header, data = read_shard(shard(victim, 4))
    header[LAYER]["dtype"] = dtype
    write_sealed(shard(victim, 4), header, data)
    with pytest.raises(
        FormatError, match=f"{LAYER} (has the unknown dtype|is malformed)|entry of {LAYER} is malformed"
    ):
        open_all(victim)


HUGE = 10**4000


def shift(header, name, by):
    header[name]["data_offsets"] = [offset + by for offset in header[name]["data_offsets"]]


def last_of(header):
    return max(header.keys() - {"__metadata__"}, key=lambda name: header[name]["data_offsets"])


def drop_last(header):
    last = last_of(header)
    edit_json(header["__metadata__"], "digests", **{last: None})
    return header.pop(last)["data_offsets"][0]


def add_tensor(header, name, dtype="U8", shape=(4,), size=4):
    end = header[last_of(header)]["data_offsets"][1]
    header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
    edit_json(header["__metadata__"], "digests", **{name: hashlib.sha256(bytes(size)).hexdigest()})


LIES = {
    "overlap": (lambda h: shift(h, last_of(h), -12), 0, "overlaps the tensor before it"),
    "gap": (lambda h: shift(h, last_of(h), 12), 12, "leaves a gap before it"),
    "trailing bytes": (lambda h: None, 1, "has bytes after its last tensor"),
    "beyond the file": (
        lambda h: add_tensor(h, "z"),
        0,
        r"is truncated: \d+ bytes of data promised, \d+ "
        r"found",
    ),
    "huge offsets": (
        lambda h: h[LAYER].update(data_offsets=[0, HUGE]),
        0,
        r"claims 10+ bytes, U8 \[96, "
        r"\d\d\] takes another",
    ),
    "huge shape": (
        lambda h: h[LAYER].update(shape=[HUGE, HUGE]),
        0,
        r"claims \d{4} bytes, U8 \[10+, 10+\] "
        r"takes another",
    ),
    "end before start": (
        lambda h: h[LAYER]["data_offsets"].reverse(),
        0,
        r"claims -?\d+ bytes, U8 \[96, "
        r"\d\d\] takes another",
    ),
    "other dtype": (
        lambda h: h[LAYER].update(dtype="I8"),
        0,
        rf"{LAYER} is I8 \[96, \d\d\] where .* "
        r"implies U8 \[96, \d\d\]",
    ),
    "other shape": (
        lambda h: h[LAYER]["shape"].reverse(),
        0,
        rf"{LAYER} is U8 \[\d\d, 96\] where .* "
        r"implies U8 \[96, \d\d\]",
    ),
    "missing tensor": (drop_last, None, "lacks the tensor "),
    "model no digest": (lambda h: h["__metadata__"].update(model="x"), 0, "'model' is not a SHA-256"),
    "plane missing": (
        lambda h: h["__metadata__"].pop("plane"),
        0,
        "holds plane None but its name says plane",
    ),
    "digests missing": (lambda h: h["__metadata__"].pop("digests"), 0, "'digests' is not valid JSON"),
    "digests no object": (
        lambda h: h["__metadata__"].update(digests="[]"),
        0,
        "'digests' is not a JSON object",
    ),
    "digests no text": (lambda h: h["__metadata__"].update(digests={}), 0, "'digests' is not valid JSON"),
    "a digest missing": (
        lambda h: edit_json(h["__metadata__"], "digests", **{LAYER: None}),
        0,
        "does not give one SHA-256 for",
    ),
    "a digest too many": (
        lambda h: edit_json(h["__metadata__"], "digests", z="0" * 64),
        0,
        "does not give one SHA-256 for",
    ),
    "a digest too short": (
        lambda h: edit_json(h["__metadata__"], "digests", **{LAYER: "0" * 63}),
        0,
        "one SHA-256 for every",
    ),
    "a digest no text": (
        lambda h: edit_json(h["__metadata__"], "digests", **{LAYER: 5}),
        0,
        "does not give one SHA-256 for",
    ),
    "metadata no text": (lambda h: h["__metadata__"].update(extra=5), 0, ""),
}


@pytest.mark.parametrize("plane", [3, 4])
@pytest.mark.parametrize("lie", LIES)
def test_a_sealed_header_that_lies_is_refused(victim, plane, lie):
    edit, appended, message = LIES[lie]
    header, data = read_shard(shard(victim, plane))
    kept = edit(header)
    write_sealed(shard(victim, plane), header, data[:kept] if appended is None else data + bytes(appended))
    with pytest.raises(FormatError, match=f"model-m{plane}.safetensors.*{message}"):
        open_all(victim)


def test_a_tensor_too_many_in_a_plane_is_refused(victim):
    header, data = read_shard(shard(victim, 4))
    add_tensor(header, "z")
    write_sealed(shard(victim, 4), header, data + bytes(4))
    with pytest.raises(
        FormatError, match=r"model-m4.safetensors holds z, which the base shard does not know"
    ):
        open_all(victim)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_size": 48}, "the group size is 48, not a positive multiple of 32"),
        ({"group_size": 0}, "the group size is 0, not"),
        ({"group_size": -64}, "the group size is -64, not"),
        ({"group_size": 64.0}, "the group size is 64.0, not"),
        ({"group_size": True}, "the group size is True, not"),
        ({"group_size": None}, "the group size is None, not"),
        (
            {"group_size": 32},
            r"embed_tokens.weight.scales is F8_E4M3 \[120, 2\] .* implies F8_E4M3 \[120, "
            r"3\]",
        ),
        ({"reconstruction": "round"}, "unknown reconstruction 'round'"),
        ({"reconstruction": ["midpoint"]}, r"unknown reconstruction \['midpoint'\]"),
        ({"reconstruction": None}, "unknown reconstruction None"),
        ({"shapes": None}, "'sefp' gives no shapes"),
        ({"shapes": [LAYER]}, "'sefp' gives no shapes"),
        ({"shapes": {LAYER: [96]}}, rf"{LAYER} has the impossible shape \[96\]"),
        ({"shapes": {LAYER: [96, 0]}}, rf"{LAYER} has the impossible shape \[96, 0\]"),
        ({"shapes": {LAYER: [96, -96]}}, rf"{LAYER} has the impossible shape \[96, -96\]"),
        ({"shapes": {LAYER: [96, 96.0]}}, rf"{LAYER} has the impossible shape \[96, 96.0\]"),
        ({"shapes": {LAYER: [True, 96]}}, rf"{LAYER} has the impossible shape \[True, 96\]"),
        ({"shapes": {LAYER: "96"}}, rf"{LAYER} has the impossible shape '96'"),
        ({"shapes": {LAYER: [96, 96], f"{LAYER}.scales": [96, 96]}}, f"{LAYER} has the impossible shape"),
        ({"scale_exponents": None}, "'sefp' does not give one scale exponent for every packed tensor"),
        ({"scale_exponents": {}}, "'sefp' does not give one scale exponent for every packed tensor"),
        ({"scale_exponents": [LAYER]}, "'sefp' does not give one scale exponent for every packed tensor"),
        ({"zeros": -1}, "'sefp' says that -1 weights are zero"),
        ({"zeros": 10**12}, "'sefp' says that 1000000000000 weights are zero"),
        ({"zeros": None}, "'sefp' says that None weights are zero"),
        ({"shapes": {LAYER: [96, 128]}}, rf"{LAYER} is U8 \[96, 48\] where .* implies U8 \[96, 64\]"),
        ({"shapes": {LAYER: [96, HUGE]}}, rf"{LAYER} is U8 \[96, 48\] where .* implies"),
        ({"shapes": {"z": [96, 96]}}, "lacks the tensor z"),
    ],
    ids=lambda value: json.dumps(value)[:40].replace('"', "") if isinstance(value, dict) else "",
)
def test_a_base_shard_that_describes_the_model_wrongly_is_refused(victim, changes, message):
    header, data = read_shard(shard(victim, 3))
    if isinstance(changes.get("shapes"), dict):
        changes = changes | {"scale_exponents": dict.fromkeys(changes["shapes"], 0), "zeros": 0}
    edit_json(header["__metadata__"], "sefp", **changes)
    write_sealed(shard(victim, 3), header, data)
    with pytest.raises(
        FormatError, match=f"model-m3.safetensors: .*{message}|model-m3.safetensors {message}"
    ):
        NestedDirectory(victim)


@pytest.mark.parametrize("exponent", [-14, 8, 0.0, True, "0", None, 10**9], ids=repr)
def test_a_scale_exponent_that_no_writer_gives_is_refused(victim, exponent):
    header, data = read_shard(shard(victim, 3))
    stated = json.loads(header["__metadata__"]["sefp"])
    edit_json(header["__metadata__"], "sefp", scale_exponents=stated["scale_exponents"] | {LAYER: exponent})
    write_sealed(shard(victim, 3), header, data)
    message = rf"the scale exponent of {LAYER} is {exponent!r}, not a number from -13 to 7"
    with pytest.raises(FormatError, match=f"model-m3.safetensors: {message}"):
        NestedDirectory(victim)


def test_an_empty_tensor_of_a_shape_beyond_any_machine_is_refused(victim):
    header, data = read_shard(shard(victim, 3))
    add_tensor(header, "z", shape=(0, 2**64), size=0)
    write_sealed(shard(victim, 3), header, data)
    with pytest.raises(FormatError, match=r"model-m3.safetensors: "):
        NestedDirectory(victim)


def test_a_tensor_that_the_model_does_not_have_is_named(victim):
    header, data = read_shard(shard(victim, 3))
    add_tensor(header, "model.norm.other")
    write_sealed(shard(victim, 3), header, data + bytes(4))
    with pytest.raises(
        FormatError,
        match=r"model-m3.safetensors holds model.norm.other, which LlamaForCausalLM by "
        r"config.json lacks",
    ):
        otaro.load(victim)
