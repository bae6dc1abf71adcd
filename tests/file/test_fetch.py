"""Fetching against a server that breaks off, lies and serves other bytes: OUT is right, or as it was."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import namedtuple
from pathlib import Path

import pytest
from misbehaving_server import misbehaving
from typer.testing import CliRunner

import otaro
from otaro.cli.main import app
from otaro.errors import (
    CheckpointError,
    DigestError,
    FetchError,
    FormatError,
    PrecisionError,
    ShardMissingError,
    TargetError,
)
from otaro.file import fetch as fetching
from otaro.file import remote
from otaro.file import source as sources
from otaro.file.fetch import FOLDER, fetch
from otaro.file.fits import Fit, bytes_of, weights_of
from otaro.file.header import shard_name
from otaro.file.hub import Hub
from otaro.file.io import NestedDirectory
from otaro.file.pack import pack

E5M3, E5M4, E5M5, E5M8 = map(otaro.Precision, ("E5M3", "E5M4", "E5M5", "E5M8"))
SHARDS = [shard_name(plane) for plane in range(3, 9)]


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """The built-in model, and the same one in another way: a model of its own."""
    folder = tmp_path_factory.mktemp("packed")
    pack("builtin", folder / "model")
    pack("builtin", folder / "other", reconstruction="truncate")
    return folder / "model"


def content(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}


@pytest.fixture
def server(packed):
    with misbehaving(content(packed)) as server:
        yield server


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    for module in (fetching, remote):
        monkeypatch.setattr(module, "PAUSES", (0.01,) * 4)


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


def same(out, packed, finest=8):
    """OUT has the files of the source up to a plane, byte for byte, and nothing else."""
    wanted = {name: data for name, data in content(packed).items() if name not in SHARDS[finest - 2 :]}
    return content(out) == wanted and not (out / FOLDER).exists()


def test_a_finer_precision_brings_what_is_missing_and_no_more(server, packed, tmp_path):
    out = tmp_path / "deep" / "out"
    first = json.loads(run("fetch", server.address, out, "--precision", "e5m4", "--json").stdout)
    assert same(out, packed, 4)
    sizes = {name: len(data) for name, data in server.files.items()}
    assert (first["finest"], first["fetched_bytes"]) == ("E5M4", sum(sizes[name] for name in SHARDS[:2]))
    assert first["more"] == {f"E5M{plane}": sizes[shard_name(plane)] for plane in range(5, 9)}
    server.asked.clear()
    second = fetch(server.address, out, E5M8)
    assert second.names == SHARDS[2:]
    assert not {*SHARDS[:2], "config.json", "tokenizer.json"} & set(server.names())
    assert same(out, packed)
    third = fetch(server.address, out)
    assert (third.names, third.bytes, third.more) == ([], 0, {})
    NestedDirectory(out).verify()


def test_the_command_says_what_is_there_and_what_more_there_is(server, tmp_path):
    lines = run("fetch", server.address, tmp_path / "out", "-p", "E5M3").stdout.splitlines()
    assert lines[0].startswith(f"{tmp_path / 'out'} is complete up to E5M3, 739.3 kB; 739.3 kB came in ")
    assert lines[1:] == [f"`otaro fetch {server.address} {tmp_path / 'out'} --precision E5M8` adds 906.9 kB"]
    assert "nothing was missing" in run("fetch", server.address, tmp_path / "out", "-p", "E5M3").stdout


def fits_of(packed, **finest):
    """precisions.json with fits of such names, each with one tensor at its finest and others at E5M3."""
    nested = NestedDirectory(packed)
    names, stated = list(nested.schema.packed), {}
    for name, precision in finest.items():
        precisions = dict.fromkeys(names, E5M3) | {names[0]: otaro.Precision(precision)}
        size = bytes_of(nested, precisions)
        about = {
            "bytes": size, "bits_per_weight": 8 * size / weights_of(nested), "predicted": 0.1,
            "measured": 0.1, "uniform": "E5M3", "uniform_measured": 0.2, "text": "t",
            "text_sha256": "0" * 64, "command": "otaro fit", "date": "2026-11-16",
        }  # fmt: skip
        stated[name] = Fit(name, precisions, about).to_dict()
    return json.dumps({"version": 1, "model": nested.model, "fits": stated}).encode()


def test_of_a_fit_what_its_finest_precision_needs_comes(server, packed, tmp_path):
    out = tmp_path / "out"
    server.files["precisions.json"] = fits_of(packed, **{"90MB": "E5M5", "4.5bits": "E5M4"})
    run("fetch", server.address, out, "--precision", "FIT:4.50 bits")
    assert NestedDirectory(out).finest == E5M4
    assert set(otaro.precisions_of(otaro.load(out, "fit:4.5bits")).values()) == {E5M3, E5M4}
    server.files["precisions.json"] = b"gone"  # as OUT has the file
    told = json.loads(run("fetch", server.address, out, "--precision", "fit:90MB", "--json").stdout)
    assert (told["finest"], told["fetched"]) == ("E5M5", [SHARDS[2]])
    otaro.load(out, "fit:90MB")


def test_fits_of_elsewhere_that_cannot_be_read_are_named_by_where_they_lie(server):
    server.files["precisions.json"] = b"{}"
    said = run("inspect", server.address).stderr
    assert f"note: not shown: precisions.json at {server.address} cannot be used: " in said


def test_a_fit_that_cannot_be_had_is_refused_and_nothing_is_left(server, packed, tmp_path):
    out = tmp_path / "out"

    def refused(kind, words):
        with pytest.raises(kind, match=words):
            fetch(server.address, out, "fit:90MB")

    make = f"; fetch E5M8 to E5M3, and make it with: otaro fit {out} --text FILE --budget 90MB"
    refused(PrecisionError, f"{server.address} has no fit:90MB, there are no fits{make}")
    server.files["precisions.json"] = fits_of(packed, **{"80MB": "E5M5", "4.5bits": "E5M4"})
    refused(PrecisionError, f"has no fit:90MB, there are fit:80MB, fit:4.5bits{make}")
    server.files["precisions.json"] = fits_of(packed.parent / "other", **{"90MB": "E5M5"})
    refused(FormatError, f"precisions.json at {server.address} cannot be used: it is for another model")
    assert not out.exists()
    with pytest.raises(PrecisionError, match="fit:many: 'many' is no budget"):
        fetch(server.address, out, "fit:many")
    server.files["precisions.json"] = fits_of(packed, **{"80MB": "E5M5"})
    fetch(server.address, out, E5M3)
    server.files["precisions.json"] = fits_of(packed, **{"90MB": "E5M5"})
    kept = out / "precisions.json"
    refused(TargetError, f"{kept} lacks fit:90MB, which {server.address} has; move it away, and theirs comes")
    kept.unlink()
    assert fetch(server.address, out, "fit:90MB").nested.finest == E5M5


@pytest.mark.parametrize("form", ["file://{}", "{}"])
def test_a_directory_is_a_source_too(form, packed, tmp_path):
    fetch(form.format(packed), tmp_path / "out", E5M4)
    assert same(tmp_path / "out", packed, 4)


def test_where_it_breaks_off_it_goes_on(server, packed, tmp_path):
    """Within a call, by ranges: nothing comes twice."""
    server.cuts = [100_000, 50_000, 0]
    assert fetch(server.address, tmp_path / "out", E5M4).bytes == sum(
        len(server.files[name]) for name in SHARDS[:2]
    )
    assert same(tmp_path / "out", packed, 4)
    starts = [
        int(wanted[6:-1]) for name, wanted in server.asked if name == SHARDS[0] and wanted.endswith("-")
    ]
    header = starts[0]
    assert starts == [header, header + 100_000, header + 150_000, header + 150_000]


@pytest.mark.parametrize("tags", [True, False])
def test_after_it_broke_off_for_good_the_next_call_goes_on(tags, server, packed, tmp_path):
    server.cuts, server.always_cut, server.tags = [200_000], 0, tags
    out = tmp_path / "out"
    with pytest.raises(
        FetchError,
        match=r"broke off after 2.* kB of 739.3 kB .* the same command goes on "
        r"from there",
    ):
        fetch(server.address, out)
    assert not (out / SHARDS[0]).exists()
    server.always_cut = None
    whole = sum(len(server.files[name]) for name in SHARDS)
    header = (out / FOLDER / f"{SHARDS[0]}.part").stat().st_size - 200_000
    assert fetch(server.address, out).bytes == whole - 200_000 - header
    assert same(out, packed)


def test_a_server_without_ranges_starts_over(server, packed, tmp_path):
    server.ranges, server.cuts = False, [300_000, 400_000]
    got = fetch(server.address, tmp_path / "out", E5M3)
    assert same(tmp_path / "out", packed, 3)
    assert got.bytes > len(server.files[SHARDS[0]])


def test_a_server_that_states_no_length_is_enough(server, packed, tmp_path):
    """Of shards the header tells it; of a text nobody can tell whether it is whole."""
    server.stated = None
    server.cuts = [1000]
    assert fetch(server.address, tmp_path / "out", E5M4)
    assert same(tmp_path / "out", packed, 4)
    server.files["merges.txt"] = b"a b"
    with pytest.raises(FetchError, match=r"does not say how long merges\.txt is"):
        fetch(server.address, tmp_path / "other")
    assert not (tmp_path / "other" / "merges.txt").exists()


@pytest.mark.parametrize(
    ("stated", "words"), [(-1000, "is truncated"), (1000, "has bytes after its last tensor")]
)
@pytest.mark.parametrize("ranges", [True, False])
def test_a_wrong_length_is_refused_before_anything_comes(stated, words, ranges, server, tmp_path):
    server.stated, server.ranges = stated, ranges
    with pytest.raises(FormatError, match=rf"at {server.address}: {SHARDS[0]} {words}"):
        fetch(server.address, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("stated", [-1000, 1000])
@pytest.mark.parametrize("ranges", [True, False])
def test_a_length_that_becomes_wrong_is_refused(stated, ranges, server, packed, tmp_path):
    out = tmp_path / "out"
    fetch(server.address, out, E5M3)
    server.stated, server.ranges, server.honest_first = stated, ranges, ranges
    with pytest.raises(
        (FetchError, FormatError), match="another length than its header implies" if ranges else "bytes"
    ):
        fetch(server.address, out, E5M4)
    assert content(out).keys() == {name for name in content(packed) if name not in SHARDS[1:]}
    server.stated = 0
    fetch(server.address, out, E5M4)
    assert same(out, packed, 4)


def test_a_byte_that_was_flipped_once_comes_again(server, packed, tmp_path):
    """From the beginning of its tensor, not of the shard."""
    server.flips = [10]
    got = fetch(server.address, tmp_path / "out", E5M3)
    assert same(tmp_path / "out", packed, 3)
    assert len(server.files[SHARDS[0]]) < got.bytes < 1.1 * len(server.files[SHARDS[0]])


def test_flipped_bytes_are_never_put_in_place(server, packed, tmp_path):
    out = tmp_path / "out"
    fetch(server.address, out, E5M3)
    server.always_flip = 10
    with pytest.raises(
        DigestError, match=rf"{server.address} serves a damaged {SHARDS[1]}: three times over"
    ):
        fetch(server.address, out, E5M4)
    assert content(out).keys() == {name for name in content(packed) if name not in SHARDS[1:]}
    NestedDirectory(out).verify()
    server.always_flip = None
    fetch(server.address, out, E5M4)
    assert same(out, packed, 4)


def test_a_flipped_byte_of_a_header_is_refused(server, tmp_path):
    body = bytearray(server.files[SHARDS[1]])
    body[2000] ^= 1
    server.files[SHARDS[1]] = bytes(body)
    with pytest.raises(FormatError, match=rf"at {server.address}: {SHARDS[1]}"):
        fetch(server.address, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    fetch(server.address, tmp_path / "out", E5M3)  # which does not need it


def test_a_header_without_end_is_not_read(server, tmp_path):
    server.endless = SHARDS[0]
    server.files[SHARDS[0]] = (1 << 60).to_bytes(8, "little")
    server.stated = None
    with pytest.raises(FormatError, match="over the limit"):
        fetch(server.address, tmp_path / "out")


def test_a_shard_without_end_ends_where_its_header_says(packed, tmp_path, server):
    server.files[SHARDS[0]] += bytes(1 << 20)
    server.stated = None
    fetch(server.address, tmp_path / "out", E5M3)
    assert same(tmp_path / "out", packed, 3)


def test_a_small_file_without_end_is_given_up(server, tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "_LARGEST_BESIDE", 1_000_000)
    server.endless = "config.json"
    with pytest.raises(FetchError, match=r"config\.json at .* is larger than 1\.0 MB"):
        fetch(server.address, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("where", ["file:///etc/hostname", "ftp://127.0.0.1/x"])
def test_a_redirect_leads_to_http_alone(where, server, tmp_path):
    server.redirects[SHARDS[0]] = where
    with pytest.raises(FetchError, match=r"cannot be fetched: .*HTTP 302"):
        fetch(server.address, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_redirect_does_not_give_up_encryption():
    request = urllib.request.Request("https://host/x")
    with pytest.raises(urllib.error.HTTPError, match="it redirects to http://"):
        sources._Redirects().redirect_request(request, io.BytesIO(), 302, "Found", {}, "http://host/x")


def test_a_redirect_to_another_host_gets_no_token(server, packed):
    """The Hub sends clients elsewhere for large files."""
    with misbehaving(content(packed)) as other:
        server.redirects["config.json"] = f"{other.address}/config.json"
        with sources._get(
            f"{server.address}/config.json", {"Authorization": "Bearer secret"}, 0, 4, None
        ) as piece:
            assert piece.exactly(4) == server.files["config.json"][:4]
        assert server.headers[0]["Authorization"] == "Bearer secret"
        assert "Authorization" not in other.headers[0]
        assert other.headers[0]["Range"] == "bytes=0-3"


def test_what_came_of_another_file_is_not_gone_on_with(server, packed, tmp_path):
    out = tmp_path / "out"
    server.files.update(content(packed.parent / "other"))
    server.cuts, server.always_cut = [200_000], 0
    with pytest.raises(FetchError):
        fetch(server.address, out, E5M3)
    server.files.update(content(packed))
    server.always_cut = None
    assert content(out) == {}
    assert fetch(server.address, out, E5M3).bytes == len(server.files[SHARDS[0]])
    assert same(out, packed, 3)


def test_a_file_that_is_exchanged_on_the_way_is_noticed(server, packed, tmp_path):
    """By its tag: the answer to a range is then the whole new file."""
    server.exchanged[SHARDS[1]] = content(packed.parent / "other")[SHARDS[1]]
    with pytest.raises(FormatError, match="belongs to another model"):
        fetch(server.address, tmp_path / "out", E5M5)
    assert NestedDirectory(tmp_path / "out").finest == E5M3


def test_planes_of_another_model_are_refused(server, packed, tmp_path):
    out = tmp_path / "out"
    fetch(server.address, out, E5M3)
    server.files.update(content(packed.parent / "other"))
    with pytest.raises(FormatError, match=rf"at {server.address}: {SHARDS[1]} belongs to another model"):
        fetch(server.address, out)
    assert same(out, packed, 3)


def test_another_model_is_refused_where_nothing_is_missing_too(packed, tmp_path):
    out = tmp_path / "out"
    fetch(packed, out)
    before = content(out)
    other = packed.parent / "other"
    (other / "precisions.json").write_text("{}")
    try:
        with pytest.raises(TargetError, match="holds another model"):
            fetch(other, out)
    finally:
        (other / "precisions.json").unlink()
    assert content(out) == before


def test_busy_servers_are_asked_again_and_refusals_are_not(server, packed, tmp_path):
    server.statuses = {SHARDS[0]: [503, 200, 200, 429], "config.json": [500]}
    fetch(server.address, tmp_path / "out", E5M3)
    assert same(tmp_path / "out", packed, 3)
    server.statuses, server.asked = {SHARDS[1]: [403]}, []
    with pytest.raises(FetchError, match=r"it does not let you \(HTTP 403\)"):
        fetch(server.address, tmp_path / "out")
    assert server.names() == [SHARDS[1]]


def test_what_the_source_lacks(server, packed, tmp_path):
    del server.files[SHARDS[3]]
    with pytest.raises(
        ShardMissingError,
        match=rf"E5M8 needs {SHARDS[3]}, which .* lacks; ask for E5M5 or "
        r"a lower one",
    ):
        fetch(server.address, tmp_path / "out", E5M8)
    assert not (tmp_path / "out").exists()
    assert fetch(server.address, tmp_path / "out").nested.finest == E5M5
    del server.files["config.json"]
    with pytest.raises(FormatError, match=r"has no config\.json"):
        fetch(server.address, tmp_path / "bare")
    server.files["config.json"] = b'{"model_type": "llama"}'
    with pytest.raises(FormatError, match=r"config\.json at .* does not describe a nested model"):
        fetch(server.address, tmp_path / "plain")
    assert not (tmp_path / "plain").exists()
    del server.files[SHARDS[0]]
    with pytest.raises(FormatError, match="is not a nested model"):
        fetch(server.address, tmp_path / "none")


def test_nobody_there(tmp_path):
    with pytest.raises(FetchError, match=r"the header of .* could not be fetched: .*; try again later"):
        fetch("http://127.0.0.1:9/model", tmp_path / "out")


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("http://me:secret@host/x", "without password"),
        ("http://host/x?key=1", "without password, query"),
        ("http:///x", "is given as http://HOST/PATH"),
        ("ftp://host/x", "nothing is fetched by ftp://"),
        ("file://host/x", "file:// is for this machine"),
        ("file:///nowhere/at/all", "is not a directory"),
    ],
)
def test_addresses_that_are_none(model, words, tmp_path):
    with pytest.raises(FetchError, match=words) as refusal:
        fetch(model, tmp_path / "out")
    assert "secret" not in str(refusal.value)


def test_a_revision_is_the_hubs(packed, server, tmp_path):
    for model in (packed, server.address):
        with pytest.raises(CheckpointError, match="leave the revision out"):
            fetch(model, tmp_path / "out", hub=Hub(revision="main"))


def test_places_that_are_none(packed, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(TargetError, match="is not a directory"):
        fetch(packed, tmp_path / "file")
    with pytest.raises(TargetError, match="is not empty and holds no nested model"):
        fetch(packed, tmp_path)
    with pytest.raises(TargetError, match="is where the model comes from"):
        fetch(packed, packed)
    assert content(tmp_path) == {"file": b"mine"}


def test_a_disk_without_room_is_noticed_before(packed, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(fetching.shutil, "disk_usage", lambda path: usage(10**6, 10**5, 900_000))
    with pytest.raises(TargetError, match=r"920\.7 kB are to come, and .* has room for 900\.0 kB"):
        fetch(packed, tmp_path / "out", E5M4)
    assert not (tmp_path / "out").exists()
    fetch(packed, tmp_path / "out", E5M3)


def test_names_cannot_leave_the_directory():
    hostile = [
        "../tokenizer.json",
        "/tokenizer.json",
        "tokenizer/../../x.json",
        "..\\tokenizer.json",
        "C:tokenizer.json",
    ]
    hostile += [".tokenizer.json", "tokenizer\x00.json", "model.py", "tokenizer.json\n", ""]
    assert sources._wanted([*hostile, "tokenizer.json", "LICENSE"]) == ["LICENSE", "tokenizer.json"]


def test_files_that_are_there_stay(server, tmp_path):
    out = tmp_path / "out"
    fetch(server.address, out, E5M3)
    (out / "config.json").write_text((out / "config.json").read_text() + "\n")
    (out / "notes").write_text("mine")
    before = content(out)
    fetch(server.address, out, E5M4)
    assert {name: data for name, data in content(out).items() if name in before} == before


def test_a_base_shard_that_was_deleted_comes_again(server, packed, tmp_path):
    """As the refusal of a damaged one tells people to delete it."""
    out = tmp_path / "out"
    fetch(server.address, out)
    (out / "notes").write_text("mine")
    for name in (SHARDS[0], SHARDS[3]):
        (out / name).unlink()
    assert fetch(server.address, out).names == [SHARDS[0], SHARDS[3]]
    assert (out / "notes").read_text() == "mine"
    (out / "notes").unlink()
    assert same(out, packed)


def test_planes_without_a_base_shard_are_not_joined_to_another_models(packed, tmp_path):
    out = tmp_path / "out"
    fetch(packed, out)
    (out / SHARDS[0]).unlink()
    before = content(out)
    with pytest.raises(FormatError, match=f"{SHARDS[1]} belongs to another model"):
        fetch(packed.parent / "other", out)
    assert content(out) == before
    assert not (out / FOLDER).exists()


CHILD = "import sys; from otaro.file.fetch import fetch; fetch(sys.argv[1], sys.argv[2])"


def test_killed_and_called_again(server, packed, tmp_path):
    server.gate, out = threading.Event(), tmp_path / "out"
    child = subprocess.Popen([sys.executable, "-c", CHILD, server.address, str(out)])
    try:
        assert server.waiting.wait(120)
        with pytest.raises(TargetError, match="another process is writing"):
            fetch(server.address, out)
        part = out / FOLDER / f"{SHARDS[0]}.part"
        while part.stat().st_size < 200_000:
            assert child.poll() is None
            time.sleep(0.01)
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    assert not (out / SHARDS[0]).exists()
    have = part.stat().st_size
    server.gate.set()
    server.gate = None
    assert fetch(server.address, out).bytes == sum(len(server.files[name]) for name in SHARDS) - have
    assert same(out, packed)


def test_inspect_reads_headers_alone(server, packed):
    shown = json.loads(run("inspect", server.address, "--json").stdout)
    here = json.loads(run("inspect", packed, "--json").stdout)
    assert here.pop("modules")
    assert shown.pop("modules") == []
    assert (shown.pop("path"), here.pop("path")) == (server.address, str(packed))
    assert shown == here
    headers = sum(NestedDirectory(packed).plane(plane).header.data_start for plane in range(3, 9))
    assert server.sent == headers
    assert "not in the headers" in run("inspect", server.address).output


def test_progress_counts_bytes_of_all_shards_also_after_a_cut(server, tmp_path):
    server.cuts, seen = [300_000, 0], []
    fetch(server.address, tmp_path / "out", E5M4, progress=lambda *at: seen.append(at))
    whole = sum(len(server.files[name]) for name in SHARDS[:2])
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert seen[-1] == (SHARDS[1], whole, whole)
    assert {name for name, *_ in seen} == set(SHARDS[:2])


def test_an_interrupted_command_says_that_it_can_go_on(server, packed, tmp_path, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fetching, "_sound", interrupted)
        ended = run("fetch", server.address, tmp_path / "out")
    assert ended.exit_code == 130
    assert "the same command goes on from there" in ended.output
    first = len(server.files[SHARDS[0]])
    # all of it had come, and was not checked yet
    assert fetch(server.address, tmp_path / "out", E5M3).bytes == 0
    assert (tmp_path / "out" / SHARDS[0]).stat().st_size == first
    assert same(tmp_path / "out", packed, 3)
