"""Clients that misbehave or die, and servers that are killed: it answers on, and none has another's."""

import json
import random
import signal
import socket
import struct
import threading
import time

import httpx2
import openai
import psutil
import pytest

PROMPT = {"prompt": "The statement", "max_tokens": 12, "temperature": 0, "precision": "E5M4"}
HEAD = "POST {} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"


def request(body, path="/v1/completions"):
    content = json.dumps(body).encode()
    return HEAD.format(path, len(content)).encode() + content


def connect(running):
    host, port = running.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def torn(client):
    """Close with a reset, as a killed process's machine does."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def said(running):
    return running.post("/v1/completions", PROMPT).json()["choices"][0]["text"]


def at_rest(running):
    engine = running.service.engine
    running.eventually(lambda: (engine.running, engine.waiting, running.service.open_answers) == (0, 0, 0))
    running.eventually(lambda: running.service._taken == 0)


def test_clients_killed_mid_stream_leave_nothing_behind(start):
    running = start(engine={"max_sequences": 4})
    expected, draw = said(running), random.Random(1)
    for number in range(30):
        body = {
            "prompt": "A" * (1 + number),
            "max_tokens": 400,
            "ignore_eos": True,
            "stream": number % 3 != 0,
            "n": 1 + number % 2,
        }
        client = connect(running)
        client.sendall(request(body, draw.choice(["/v1/completions", "/v1/completions", "/v1/responses"])))
        if draw.random() < 0.7 and body["stream"]:
            client.recv(draw.choice([1, 100, 5000]))
        (torn if draw.random() < 0.5 else socket.socket.close)(client)
        if number % 10 == 0:
            assert said(running) == expected
    at_rest(running)
    assert said(running) == expected
    running.eventually(lambda: len(running.server.server_state.connections) <= 1)


def test_half_sent_requests_hold_up_nobody(start):
    running = start(read_timeout=0.5)
    expected, whole = said(running), request(PROMPT)
    clients = [connect(running) for _ in range(40)]
    for number, client in enumerate(clients):
        client.sendall(whole[: number * len(whole) // 41])
    assert said(running) == expected
    running.eventually(lambda: len(running.server.server_state.connections) <= 1)
    at_rest(running)
    for client in clients:
        client.close()


# A thousand bad bodies

GOOD = {
    "/v1/completions": {
        "prompt": ["A", "B"], "max_tokens": 2, "stop": ["x"], "logprobs": 1, "n": 1, "seed": 1, "top_p": 0.9,
    },
    "/v1/chat/completions": {
        "model": "tiny", "messages": [{"role": "user", "content": [{"type": "text", "text": "A"}]}],
        "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True},
        "precision": {"prefill": "E5M8", "decode": "E5M3"},
    },
    "/v1/responses": {
        "input": [{"role": "user", "content": "A"}], "max_output_tokens": 2, "metadata": {"a": "b"},
    },
    "/v1/systemone": {
        "state": {"a": [1]}, "questions": {"q": {"type": "choice", "criteria": {"a": "b", "c": None}}},
    },
    "/v1/answers/x/precision": {"precision": "E5M4"},
}  # fmt: skip
ODD = [
    None, True, False, 0, -1, 2, 2**31, 2**63, 2**70, -(2**70), 1.5, 1e308, "", "x", "\x00", "\ud800",
    "é" * 99, "auto", [], {}, [[]], {"": ""}, {"0": "E5M4"}, {"type": "text"}, [1, 2, 3], [-1], [10**9],
    ["a", 1], [None], [{}], {"a": {"b": {"c": []}}},
]  # fmt: skip


def changed(value, draw):
    """The same with something odd somewhere in it."""
    if isinstance(value, dict | list) and value and draw.random() < 0.8:
        at = draw.choice(list(value) if isinstance(value, dict) else range(len(value)))
        copy = dict(value) if isinstance(value, dict) else list(value)
        if draw.random() < 0.2:
            del copy[at]
        else:
            copy[at] = changed(copy[at], draw)
        return copy
    if isinstance(value, dict) and draw.random() < 0.5:
        return {**value, draw.choice(["tools", "extra", "model", "type", "n", "precision"]): draw.choice(ODD)}
    return draw.choice(ODD)


def bad_body(draw, good):
    """Fields with odd values; some of them with damaged bytes too."""
    body = changed(good, draw)
    text = json.dumps(body if isinstance(body, dict) or draw.random() < 0.1 else good).encode()
    if draw.random() < 0.3:
        damaged = bytearray(text)
        for _ in range(draw.randrange(1, 4)):
            at = draw.randrange(len(damaged) + 1)
            damaged[at : at + draw.randrange(2)] = draw.randbytes(draw.randrange(3))
        return bytes(damaged)
    return text


def test_a_thousand_bad_bodies_get_an_answer_in_the_error_shape(start):
    running = start()
    expected, draw, statuses = said(running), random.Random(19), set()
    for number in range(1000):
        path = draw.choice(list(GOOD))
        body = bad_body(draw, GOOD[path])
        response = running.http.post(path, content=body, headers={"content-type": "application/json"})
        statuses.add(response.status_code)
        assert response.status_code in (200, 400, 404), (path, body, response.text)
        if response.status_code != 200:
            error = response.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["message"]
        if number % 250 == 0:
            assert said(running) == expected
    assert statuses == {200, 400, 404}  # some odd bodies are fine
    at_rest(running)


def test_bad_http_is_refused(start):
    running, draw = start(read_timeout=0.5), random.Random(3)
    expected = said(running)
    for _ in range(100):
        client = connect(running)
        data = bytearray(request(PROMPT))
        for _ in range(draw.randrange(1, 6)):
            data[draw.randrange(80)] = draw.randrange(256)
        client.sendall(data)
        client.settimeout(20)
        answer = client.recv(65536)
        assert answer == b"" or answer.split()[1] in {
            b"200",
            b"400",
            b"403",
            b"404",
            b"405",
            b"408",
            b"413",
            b"415",
        }, bytes(data)
        client.close()
    assert said(running) == expected
    at_rest(running)


# The end, and a new beginning


# `python -m otaro` with two hundred tokens a second at most: its load lasts until a busy test has seen it.
SLOW = """
import time
from otaro.cli.main import main
from otaro.runtime.scheduler import Scheduler
step = Scheduler.step
Scheduler.step = lambda self: time.sleep(0.005) or step(self)
main()
"""


@pytest.fixture
def loaded(process, chat_dir):
    """A server in a process, and clients that ask for long answers; what became of each is in `ends`."""
    running = process(chat_dir, "--max-sequences", "2", "--shutdown-timeout", "60", program=("-c", SLOW))
    running.ends = []

    def ask(number):
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
        try:
            options = {
                "model": "tiny",
                "prompt": "The",
                "max_tokens": 300,
                "seed": number,
                "extra_body": {"ignore_eos": True},
            }
            chunks = list(
                client.completions.create(stream=True, stream_options={"include_usage": True}, **options)
            )
            running.ends.append(chunks[-1].usage.completion_tokens)
        except (openai.APIError, httpx2.TransportError) as error:
            running.ends.append(type(error).__name__)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()

    def taken():
        """Requests that were let in; in this order none counts twice."""
        return len(running.ends) + running.metric("otaro_running") + running.metric("otaro_waiting")

    running.eventually(lambda: taken() == 4)
    yield running
    for thread in threads:
        thread.join()


def test_sigterm_under_load_ends_when_the_answers_have(loaded):
    log = loaded.end(signal.SIGTERM)
    assert loaded.process.returncode in (0, -signal.SIGTERM)
    loaded.eventually(lambda: len(loaded.ends) == 4)
    assert loaded.ends == [300] * 4
    assert [line["event"] for line in log if line["event"] != "request"] == ["ending", "ended"]
    assert all(line["finish"] == ["length"] for line in log if line.get("path") == "/v1/completions")


def test_a_second_ctrl_c_ends_answers_at_once_and_quietly(loaded):
    loaded.process.send_signal(signal.SIGINT)
    while json.loads(loaded.process.stderr.readline())["event"] != "ending":
        pass
    began = time.monotonic()
    log = loaded.end(signal.SIGINT)
    assert time.monotonic() - began < 40  # of the 60 seconds that answers would have had
    assert [line["event"] for line in log if line["event"] != "request"] == ["ended"]
    assert all("at" not in line for line in log)
    loaded.eventually(lambda: len(loaded.ends) == 4)
    assert loaded.ends != [300] * 4


def test_an_answer_that_is_not_done_in_time_does_not_hold_up_the_end(start, monkeypatch):
    running = start(shutdown_timeout=1.0)
    step = running.service.engine.scheduler.step
    # a slow machine
    monkeypatch.setattr(running.service.engine.scheduler, "step", lambda: time.sleep(0.1) or step())
    body = {"prompt": "The", "max_tokens": 500, "ignore_eos": True, "stream": True}
    client = connect(running)
    client.sendall(request(body))
    assert client.recv(15) == b"HTTP/1.1 200 OK"
    running.server.should_exit = True
    began = time.monotonic()
    received = b"".join(iter(lambda: client.recv(65536), b""))
    assert time.monotonic() - began < 15
    assert b"[DONE]" not in received
    running.eventually(lambda: not running.service.engine.alive)


@pytest.mark.slow
def test_sigkill_under_load_and_it_starts_again(loaded, process, chat_dir):
    expected, port = said(loaded), loaded.url.rpartition(":")[2]
    loaded.end(signal.SIGKILL)
    loaded.eventually(lambda: len(loaded.ends) == 4)
    again = process(chat_dir, "--port", port)
    assert again.url == loaded.url
    assert said(again) == expected
    assert again.client.completions.create(model="tiny:E5M8", prompt="The", max_tokens=2).precision == "E5M8"


def test_memory_stays_where_it_was(start):
    """Requests of every kind over and over: nothing is kept of them."""
    running = start(engine={"max_sequences": 4})
    process = psutil.Process()

    def some():
        for number in range(60):
            body = {
                **PROMPT,
                "prompt": f"The statement {number}",
                "stream": number % 2 == 0,
                "logprobs": 5,
                "n": 2,
            }
            running.post("/v1/completions", body)
            running.post("/v1/completions", {**PROMPT, "nonsense": 1})

    some()
    at_rest(running)
    threads, files = process.num_threads(), process.num_fds()
    some()
    at_rest(running)
    # One kept for every stream would be 30 more. Pools may grow by a worker or two still: they do when all
    # are busy.
    assert process.num_threads() < threads + 30
    assert process.num_fds() < files + 30
