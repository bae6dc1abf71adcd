"""What `otaro web` writes and refuses, and the server beside it: no browser, no compiler."""

import base64
import hashlib
import http.client
import io
import json
import shutil
import tarfile
import threading
from dataclasses import replace

import pytest
from typer.testing import CliRunner

import otaro
from otaro.builtin import MODEL_DIR
from otaro.cli.main import app
from otaro.errors import OtaroError
from otaro.web import build, libraries, server, site


@pytest.fixture(scope="module")
def nested(tmp_path_factory):
    out = tmp_path_factory.mktemp("nested") / "tiny"
    otaro.pack(MODEL_DIR, out)
    return out


@pytest.fixture
def without_tools(tmp_path, monkeypatch):
    """As if both had been built and fetched before."""
    made = tmp_path / "made"
    made.mkdir()
    (made / "library.js").write_text("export {};")
    for name in (build.ONE, build.MANY):
        (tmp_path / name).write_bytes(b"\0asm")
    monkeypatch.setattr(build, "build", lambda name: tmp_path / name)
    monkeypatch.setattr(libraries, "bring", lambda library: made)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def refused(*arguments):
    done = CliRunner().invoke(app, ["web", *map(str, arguments)])
    assert done.exit_code
    assert isinstance(done.exception, OtaroError), done.exception
    return str(done.exception)


def test_a_folder_has_everything_a_page_needs(nested, tmp_path, without_tools):
    out = tmp_path / "out"
    done = CliRunner().invoke(app, ["web", str(nested), str(out), "--name", "Tiny", "--json"])
    assert done.exit_code == 0, done.output
    page = json.loads((out / "page.json").read_text())
    assert page["name"] == "Tiny"
    assert [one["bits"] for one in page["shards"]] == [3, 4, 5, 6, 7, 8]
    for one in page["shards"]:
        assert (out / "model" / one["name"]).read_bytes() == (nested / one["name"]).read_bytes()
        assert one["bytes"] == (nested / one["name"]).stat().st_size
    assert page["stop"] == [json.loads((MODEL_DIR / "config.json").read_text())["eos_token_id"]]
    assert json.loads((out / "model" / "decoder.json").read_text())["model"] == page["model"]
    told = json.loads(done.output.splitlines()[-1])
    assert told["bytes"] == sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    html = (out / "index.html").read_text()
    for name in ("page.css", "planes.css", "page.js", "icon.svg"):
        assert f'"{name}"' in html
        assert (out / name).is_file()


def test_shards_may_lie_elsewhere(nested, tmp_path, without_tools):
    site.write_site(nested, tmp_path / "out", files="https://example.org/tiny")
    assert json.loads((tmp_path / "out" / "page.json").read_text())["from"] == "https://example.org/tiny/"
    assert not list((tmp_path / "out").rglob("*.safetensors"))
    assert "not a place that a page can fetch from" in refused(
        nested, tmp_path / "other", "--files", "ftp://example.org/x"
    )


def test_what_cannot_be_written_is_refused_before_anything_is(nested, tmp_path, without_tools):
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "mine").write_text("stays")
    assert "exists and is not empty" in refused(nested, taken)
    assert [path.name for path in taken.iterdir()] == ["mine"]
    assert "is not a nested model" in refused(MODEL_DIR, tmp_path / "out")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        bare = tmp_path / f"without-{name}"
        shutil.copytree(nested, bare)
        (bare / name).unlink()
        assert f"has no {name}" in refused(bare, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_model_that_no_decoder_serves_is_refused(nested, tmp_path, without_tools, monkeypatch):
    bare = tmp_path / "bare"
    shutil.copytree(nested, bare)
    (bare / "decoder.json").unlink(missing_ok=True)
    monkeypatch.setattr("otaro.runtime.architectures.why_not", lambda model: "its layers are strange")
    assert refused(bare, tmp_path / "out").endswith(
        "runs in Python only, and not in a page: its layers are strange"
    )


def test_missing_tools_are_told_with_what_brings_them(nested, tmp_path, cache, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'otaro-llm[web]'" in refused(nested, tmp_path / "out")
    monkeypatch.setattr(build, "build", lambda name: tmp_path / name)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "install Node.js" in refused(nested, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def packed(content):
    """What npm would pack, and its integrity."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name in ("package/dist/x.js", "package/LICENSE"):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return out.getvalue(), "sha512-" + base64.b64encode(hashlib.sha512(out.getvalue()).digest()).decode()


def test_a_library_is_taken_only_if_it_is_the_one_that_was_tested(tmp_path, cache, monkeypatch):
    archive, integrity = packed(b"export {};")
    programs = tmp_path / "bin"
    programs.mkdir()
    (tmp_path / "x.tgz").write_bytes(archive)
    (programs / "npm").write_text(f"#!/bin/sh\n/bin/cp {tmp_path / 'x.tgz'} .\n")
    (programs / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", str(programs))
    library = libraries.Library("x", "1.0.0", integrity, "package/dist/x.js", "x.js")
    with pytest.raises(OtaroError, match="npm sent another x"):
        libraries.bring(replace(library, integrity="sha512-other"))
    assert not (cache / "otaro" / "web" / "x-1.0.0").exists()
    found = libraries.bring(library)
    assert (found / "x.js").read_bytes() == (found / "x.js.LICENSE").read_bytes() == b"export {};"
    (programs / "npm").write_text("#!/bin/sh\necho no network >&2\nexit 1\n")
    assert libraries.bring(library) == found  # it is there
    with pytest.raises(OtaroError, match=r"npm could not fetch x@2\.0\.0: no network"):
        libraries.bring(replace(library, version="2.0.0"))


def test_sources_that_zig_refuses_are_told_of(cache, monkeypatch):
    monkeypatch.setattr(build, "_zig_version", lambda: "0.0")
    monkeypatch.setattr(build.sys, "executable", "false")
    with pytest.raises(OtaroError, match=r"zig 0\.0 could not compile"):
        build.build(build.ONE)
    assert not list(cache.rglob("*.wasm"))


def test_every_source_that_is_compiled_is_there():
    assert all(path.is_file() for path in build._read())


# The server


@pytest.fixture
def served(tmp_path):
    (tmp_path / "page.json").write_bytes(bytes(range(100)))
    (tmp_path / "page.js").write_text("")
    running = server.server(tmp_path)
    threading.Thread(target=running.serve_forever, daemon=True).start()

    def get(path, part=None):
        connection = http.client.HTTPConnection("localhost", running.server_port, timeout=30)
        connection.request("GET", path, headers={} if part is None else {"Range": part})
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers

    yield get
    running.shutdown()
    running.server_close()


def test_the_server_knows_ranges_and_isolates_the_page(served):
    status, content, headers = served("/page.json", "bytes=90-")
    assert (status, content, headers["Content-Range"]) == (206, bytes(range(90, 100)), "bytes 90-99/100")
    assert served("/page.json", "bytes=3-5")[:2] == (206, b"\3\4\5")
    assert served("/page.json", "bytes=50-1000")[1] == bytes(range(50, 100))
    status, content, headers = served("/page.json", "bytes=100-")
    assert (status, content, headers["Content-Range"]) == (416, b"", "bytes */100")
    status, content, headers = served("/page.json", "lines=1-2")
    assert (status, len(content)) == (200, 100)
    assert headers["Cross-Origin-Opener-Policy"] == "same-origin"
    assert headers["Cross-Origin-Embedder-Policy"] == "require-corp"
    assert served("/page.js")[2]["Content-Type"] == "text/javascript"
    assert served("/none")[0] == 404


def test_the_server_refuses_what_is_no_page_and_a_port_in_use(tmp_path, capsys):
    with pytest.raises(SystemExit, match="1"):
        server.main([str(tmp_path)])
    assert "is no page; write one with" in capsys.readouterr().err
    (tmp_path / "page.json").write_text("{}")
    first = server.server(tmp_path)
    with pytest.raises(OtaroError, match="choose another"):
        server.server(tmp_path, first.server_port)
    first.server_close()
