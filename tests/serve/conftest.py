"""Real servers on free ports: in a thread, where the test looks inside, or in a process of their own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event, Thread

import httpx2
import openai
import pytest

import otaro
from otaro.kernels import cpu
from otaro.serve import server
from otaro.serve.service import Service
from otaro.serve.settings import Settings

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


@pytest.fixture(scope="session", autouse=True)
def _decoder():
    if cpu.MISSING:
        pytest.skip(cpu.MISSING)


@pytest.fixture(scope="session")
def chat_dir(tmp_path_factory) -> Path:
    """The built-in model with a chat template; do not write into it."""
    directory = tmp_path_factory.mktemp("serve") / "tiny"
    otaro.pack("builtin", directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


class Running:
    """A server and its clients."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.http = httpx2.Client(base_url=url, timeout=60)
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)

    def post(self, path: str, body: object, **more: object) -> httpx2.Response:
        headers = {"content-type": "application/json", **more.pop("headers", {})}
        return self.http.post(path, content=json.dumps(body), headers=headers, **more)

    def metric(self, name: str) -> float:
        """The sum over all labels."""
        lines = self.http.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if re.match(rf"{name}[ {{]", line))

    @contextmanager
    def held(self) -> Iterator[None]:
        """Answers that have begun go no further meanwhile: a load that lasts, however fast the machine."""
        scheduler, free = self.service.engine.scheduler, Event()
        step = scheduler.step

        def held_step() -> bool:
            if scheduler.running:
                free.wait()
            return step()

        scheduler.step = held_step
        try:
            yield
        finally:
            scheduler.step = step
            free.set()

    def eventually(self, holds: Callable[[], bool], seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, "it did not come to hold"
            time.sleep(0.02)


@pytest.fixture(scope="module")
def model(chat_dir):
    return otaro.load(chat_dir)


@pytest.fixture(scope="module")
def start(model) -> Iterator[Callable[..., Running]]:
    """start(max_queue=0, engine={"max_sequences": 1}) is a server in a thread, until the module ends."""
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(_in_thread(model, **options))


@pytest.fixture
def start_on() -> Iterator[Callable[..., Running]]:
    """start_on(directory, max_queue=0) is the same with a model of its own, until the test ends."""
    with ExitStack() as stack:
        yield lambda directory, **options: stack.enter_context(_in_thread(otaro.load(directory), **options))


@contextmanager
def _in_thread(model, engine=None, name="tiny", **settings):
    service = Service(model, otaro.Engine(model, **(engine or {})), name, Settings(**settings))
    listening = server.listen("127.0.0.1", 0)
    running = Running(server.url(listening))
    running.service, running.server = service, server.make(service, listening)
    thread = Thread(target=running.server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        running.eventually(lambda: running.server.started)
        yield running
    finally:
        running.server.should_exit = True
        running.server.force_exit = True
        thread.join()
        service.engine.close(wait=False)


@pytest.fixture(scope="module")
def tiny(start) -> Running:
    """One with every setting at its default."""
    return start()


class Process(Running):
    """A server in a process of its own."""

    def __init__(self, directory: Path, *options: str, program: Sequence[str] = ("-m", "otaro")) -> None:
        command = [sys.executable, *program, "serve", str(directory), "--port", "0", *options]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(command, stdout=-1, stderr=-1, text=True, env=environment)
        first = self.process.stdout.readline()
        assert first, self.process.stderr.read()
        self.first, self.curl = first, self.process.stdout.readline()
        super().__init__(re.search(r"http://[0-9.:]+", first)[0])
        self.eventually(self.answers)

    def answers(self) -> bool:
        try:
            return self.http.get("/health").status_code == 200
        except httpx2.TransportError:
            return False

    def end(self, number: int) -> list[dict]:
        """Send it a signal; the lines of its log when it has ended."""
        self.process.send_signal(number)
        _, log = self.process.communicate(timeout=300)
        return [json.loads(line) for line in log.splitlines()]


@pytest.fixture
def process() -> Iterator[Callable[..., Process]]:
    """process(directory, "--max-queue", "3") is a server in a process of its own, until the test ends."""
    started = []

    def begin(*arguments: object, **options: object) -> Process:
        started.append(Process(*arguments, **options))
        return started[-1]

    yield begin
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
        one.process.communicate()
