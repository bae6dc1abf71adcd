"""A page for the built-in model, a server that can be told to misbehave, and a browser that looks at both."""

import importlib.util
import json
import shutil
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

import otaro
from otaro.builtin import MODEL_DIR
from otaro.web.server import ISOLATED, Handler, server
from tests.serve.browser import PROGRAM, Browser

PROBE = Path(__file__).with_name("probe.js")
SPY = """
    window.told = [];
    window.Worker = class extends Worker {
        constructor(...given) {
            super(...given);
            this.addEventListener("message", ({ data }) => window.told.push(data));
        }
    };
"""


@pytest.fixture(scope="session")
def tools():
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip(
            "zig is not installed, which compiles the decoder for browsers: `make web-test` installs it"
        )
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed, which brings the tokenizer for browsers")
    if PROGRAM is None:
        pytest.skip("no browser on this machine: none of chromium, chromium-browser, google-chrome is found")


@pytest.fixture(scope="session")
def nested(tmp_path_factory):
    """The built-in model, packed three ways: what page.json names, and two for the kernels alone."""
    folder = tmp_path_factory.mktemp("nested")
    for name, more in {
        "plain": {},
        "truncate": {"reconstruction": "truncate", "group_size": 32},
        "wide": {"group_size": 128},
    }.items():
        otaro.pack(MODEL_DIR, folder / name, **more)
    return folder


@pytest.fixture(scope="session")
def site(tools, nested, tmp_path_factory):
    from otaro.web.site import write_site

    out = tmp_path_factory.mktemp("site") / "out"
    write_site(nested / "plain", out, name="tiny")
    shutil.copyfile(PROBE, out / "probe.js")
    return out


@pytest.fixture
def slow_site(site, tmp_path):
    """The same with twenty tokens a second at most: time enough to do something meanwhile."""
    folder = shutil.copytree(site, tmp_path / "slow")
    script = (folder / "worker.js").read_text()
    slow = script.replace("await turn();", "await turn(), await new Promise((go) => setTimeout(go, 50));")
    assert slow != script
    (folder / "worker.js").write_text(slow)
    return folder


class Served:
    """A folder behind a server that does as it is told."""

    def __init__(self, folder, headers):
        self.asked = []  # (file, range)
        self.held = {}  # file: an event that lets it go
        self.cut = {}  # file: bytes after which the connection breaks, once,
        self.cuts = threading.Event()  # when this is set
        self.flipped = {}  # file: a byte that is wrong
        self.ranges = True
        served = self

        class Odd(Handler):
            headers_of_all = headers

            def do_GET(self):
                name = self.path.rpartition("/")[2]
                served.asked.append((name, self.headers.get("Range")))
                if name in served.held:
                    served.held[name].wait(120)
                if not served.ranges:
                    del self.headers["Range"]
                super().do_GET()

            def copyfile(self, source, outputfile):
                name = self.path.rpartition("/")[2]
                if name in served.cut:
                    outputfile.write(source.read(served.cut.pop(name)))
                    outputfile.flush()
                    served.cuts.wait(120)
                    served.cuts.clear()
                    self.close_connection = True
                elif name in served.flipped:
                    content = bytearray(source.read())
                    content[served.flipped[name]] ^= 1
                    outputfile.write(content)
                else:
                    super().copyfile(source, outputfile)

        self._server = server(folder, handler=Odd)
        self._server.daemon_threads = True
        self.url = f"http://localhost:{self._server.server_port}/"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def hold(self, *names):
        for name in names:
            self.held[name] = threading.Event()

    def release(self):
        for event in self.held.values():
            event.set()

    def shards_asked(self):
        return [(name, part) for name, part in self.asked if name.endswith(".safetensors")]

    def close(self):
        self.release()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def serve():
    """Serves a folder; every server is an origin of its own, with its own storage."""
    running = []

    def start(folder, headers=ISOLATED):
        running.append(Served(folder, headers))
        return running[-1]

    yield start
    for one in running:
        one.close()


@pytest.fixture(scope="session")
def any_browser(tools, tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    browser.call("Page.addScriptToEvaluateOnNewDocument", source=SPY)
    yield browser
    browser.close()


@pytest.fixture
def browser(any_browser):
    any_browser.look(1200, 800)
    return any_browser


@contextmanager
def changed(path):
    """page.json's content, written back."""
    content = json.loads(path.read_text())
    yield content
    path.write_text(json.dumps(content))
