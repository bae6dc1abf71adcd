"""What a server on a real network needs: keys, limits, patience that ends, and an orderly end."""

import json
import logging
import socket
import subprocess
import sys
import time
from uuid import UUID

import openai
import pytest
from typer.testing import CliRunner

import otaro
from otaro.cli.main import app
from otaro.errors import OtaroError
from otaro.serve import server
from otaro.serve.log import JsonLines
from otaro.serve.settings import Settings
from tests.refusals import misuse

LONG = {"prompt": "The", "max_tokens": 500, "ignore_eos": True}  # the built-in model has 512 positions
SHORT = {"prompt": "The", "max_tokens": 2}


def raw(running, *parts, receive_buffer=None):
    """A socket that has sent these bytes."""
    host, port = running.url.removeprefix("http://").split(":")
    client = socket.socket()
    if receive_buffer:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.connect((host, int(port)))
    client.settimeout(20)
    client.sendall(b"".join(parts))
    return client


def request(body, path="/v1/completions"):
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


# Who may come in


@pytest.fixture(scope="module")
def locked(start):
    return start(keys=("first-key", "second-key"))


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (None, 401),
        ("Bearer first-key", 200),
        ("bearer second-key", 200),
        ("Bearer first-ke", 401),
        ("Bearer first-key2", 401),
        ("Basic first-key", 401),
        ("Bearer", 401),
        ("Bearer Ã¼".encode("latin-1"), 401),
    ],
)
def test_a_key_opens(locked, header, status):
    headers = {} if header is None else {"authorization": header}
    response = locked.http.get("/v1/models", headers=headers)
    assert response.status_code == status
    if status == 401:
        assert response.json()["error"]["code"] == "invalid_api_key"


def test_without_a_key_only_health_and_the_page_answer(locked):
    assert {
        path: locked.http.get(path).status_code
        for path in ("/health", "/", "/metrics", "/version", "/v1/nothing")
    } == {
        "/health": 200,
        "/": 200,
        "/metrics": 401,
        "/version": 401,
        "/v1/nothing": 401,
    }
    with pytest.raises(openai.AuthenticationError):
        locked.client.models.list()
    assert (
        locked.post("/v1/completions", SHORT, headers={"authorization": "Bearer first-key"}).status_code
        == 200
    )


def test_a_precision_is_changed_by_who_has_a_key_and_the_id(locked):
    """The id is 128 bits from the system's randomness but for six, so that nobody finds another's answer."""
    key = {"authorization": "Bearer first-key"}
    ids = set()
    with locked.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}, headers=key) as stream:
        for line in stream.iter_lines():
            if line:
                ids.add(json.loads(line.removeprefix("data: "))["id"])
                break
        (name,) = ids
        path, coarse = f"/v1/answers/{name}/precision", {"precision": "E5M3"}
        assert UUID(name.removeprefix("cmpl-")).version == 4
        assert locked.post(path, coarse).status_code == 401
        for body in (
            {},
            {"precision": "E5M9"},
            {"precision": 3},
            {"precision": "auto"},
            {**coarse, "more": 1},
        ):
            assert locked.post(path, body, headers=key).status_code == 400
        guess = locked.post("/v1/answers/cmpl-0/precision", coarse, headers=key)
        assert (guess.status_code, guess.json()["error"]["code"]) == (404, "answer_not_found")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("localhost:8000", 200),
        ("127.0.0.1:1", 200),
        ("[::1]:8000", 200),
        ("evil.example", 403),
        ("", 403),
    ],
)
def test_a_local_server_answers_to_local_names(tiny, host, status):
    """A page whose name was made to point here could read answers otherwise."""
    assert tiny.http.get("/v1/models", headers={"host": host}).status_code == status


def test_web_pages_from_elsewhere_may_not_call_unless_told(tiny, start):
    asked = {"origin": "https://a.example", "access-control-request-method": "POST"}
    refused = tiny.http.options("/v1/chat/completions", headers=asked)
    assert refused.status_code == 405
    assert "access-control-allow-origin" not in refused.headers
    assert "access-control-allow-origin" not in tiny.http.get("/v1/models", headers=asked).headers
    allowing = start(origins=("https://a.example",), keys=("key",))
    assert (
        allowing.http.options("/v1/chat/completions", headers=asked).headers["access-control-allow-origin"]
        == asked["origin"]
    )
    other = allowing.http.options("/v1/chat/completions", headers={**asked, "origin": "https://b.example"})
    assert "access-control-allow-origin" not in other.headers
    assert allowing.http.get("/v1/models", headers=asked).status_code == 401


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", None])
def test_what_a_form_of_a_web_page_can_send_is_refused(tiny, kind):
    response = tiny.http.post(
        "/v1/completions", content=json.dumps(SHORT), headers={"content-type": kind} if kind else {}
    )
    assert response.status_code == 415
    assert "application/json" in response.json()["error"]["message"]


def test_no_file_can_be_reached_and_the_page_has_a_strict_policy(tiny):
    paths = [
        "/page/../app.py",
        "/page/..%2fapp.py",
        "/page/%2e%2e/app.py",
        "/page//etc/passwd",
        "/..%2f..%2fetc%2fpasswd",
    ]
    for path in [
        *paths,
        "/page/",
        "/page/app.py",
        "/v1/models/../../etc/passwd",
        "/page/..\\app.py",
        "/page/index.html%00",
    ]:
        client = raw(tiny, f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        answer = b"".join(iter(lambda c=client: c.recv(65536), b""))
        assert answer.startswith((b"HTTP/1.1 404", b"HTTP/1.1 400")), path
    policy = tiny.http.get("/").headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_wrong_paths_and_methods_get_the_error_shape(tiny):
    assert tiny.http.get("/v1/nothing").json()["error"]["type"] == "invalid_request_error"
    wrong = tiny.http.get("/v1/completions")
    assert (wrong.status_code, wrong.json()["error"]["message"]) == (405, "GET is not for this path")


# Limits


def test_bodies_have_a_largest_size(start):
    small = start(max_body_bytes=1000)
    assert small.post("/v1/completions", {**SHORT, "stop": "x" * 1000}).status_code == 413
    chunked = (b'{"prompt": "' for _ in range(100))
    response = small.http.post(
        "/v1/completions", content=chunked, headers={"content-type": "application/json"}
    )
    assert response.status_code == 413
    assert small.post("/v1/completions", SHORT).status_code == 200


def test_prompts_and_answers_have_a_largest_length(start):
    small = start(max_prompt_tokens=5, max_tokens=3)
    for field, body in (("prompt", {"prompt": [1] * 6}), ("max_tokens", {"prompt": [1], "max_tokens": 4})):
        error = small.post("/v1/completions", {**body}).json()["error"]
        assert error["param"] == field
        assert "too many" in error["message"]
    assert (
        small.post("/v1/completions", {"prompt": [1] * 5, "max_tokens": 3}).json()["usage"][
            "completion_tokens"
        ]
        <= 3
    )
    assert (
        small.post("/v1/responses", {"input": "A", "max_output_tokens": 4}).json()["error"]["param"]
        == "max_output_tokens"
    )
    assert (
        small.post("/v1/chat/completions", {"messages": [{"role": "user", "content": ""}]}).status_code == 400
    )  # 5 tokens and more


def test_a_full_queue_says_when_to_come_back(start):
    small = start(max_queue=1, engine={"max_sequences": 1})
    with small.held():
        streams = [
            small.client.completions.create(
                model="tiny", stream=True, extra_body={"ignore_eos": True}, prompt="The", max_tokens=500
            )
            for _ in range(2)
        ]
        refused = small.post("/v1/completions", SHORT)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"
        with pytest.raises(openai.RateLimitError):
            small.client.completions.create(model="tiny", prompt="A")
        assert small.post("/v1/completions", {**SHORT, "n": 3}).status_code == 400  # there will never be room
        for stream in streams:
            stream.close()
    small.eventually(lambda: small.post("/v1/completions", SHORT).status_code == 200)


def test_requests_at_one_time_are_limited(start):
    small = start(max_connections=1)
    waiting = raw(small, request(LONG)[:-5])  # it holds a place while it does not finish its request
    small.eventually(lambda: small.http.get("/version").status_code == 429)
    assert small.http.get("/version").headers["retry-after"] == "1"
    waiting.close()
    small.eventually(lambda: small.http.get("/version").status_code == 200)


# Patience that ends


def closed(client):
    try:
        return client.recv(65536) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"])
def test_a_silent_client_is_cut_off(start, sent):
    hasty = start(read_timeout=0.3)
    client, started = raw(hasty, sent), time.monotonic()
    if b"\r\n\r\n" in sent:
        answer = b""
        while not answer.endswith(b"}"):
            some = client.recv(65536)
            assert some
            answer += some
        client.sendall(b"GET /hea")  # and no more of it
    assert closed(client)
    assert time.monotonic() - started < 10  # and not after the 30 s of an idle connection


def test_a_body_that_does_not_arrive_is_not_waited_for(start):
    hasty = start(read_timeout=0.3)
    client = raw(hasty, request(SHORT)[:-3])
    answer = b"".join(iter(lambda: client.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"connection: close" in answer


def test_an_answer_has_a_time_limit(start, monkeypatch):
    hasty = start(timeout=0.5, engine={"max_sequences": 1})
    step = hasty.service.engine.scheduler.step
    monkeypatch.setattr(hasty.service.engine.scheduler, "step", lambda: (step(), time.sleep(2.0))[0])
    first = hasty.client.completions.create(
        model="tiny", stream=True, prompt="The", max_tokens=9, extra_body={"ignore_eos": True}
    )
    waited = hasty.post("/v1/completions", SHORT)
    assert waited.status_code == 504
    assert "0.5 seconds" in waited.json()["error"]["message"]
    chunks = list(first)
    assert len(chunks) <= 4
    assert chunks[-1].choices[0].finish_reason == "length"


def test_a_client_that_does_not_read_is_cut_off_and_holds_up_nobody(start):
    hasty = start(write_timeout=0.5)
    lazy = {"prompt": "The", "max_tokens": 500, "logprobs": 20, "ignore_eos": True, "stream": True, "n": 3}
    client = raw(hasty, request(lazy), receive_buffer=4096)
    assert hasty.post("/v1/completions", SHORT).status_code == 200
    hasty.eventually(
        lambda: hasty.metric('otaro_requests_total{endpoint="/v1/completions",status="499"}') == 1
    )
    assert hasty.service.open_answers == 0
    hasty.eventually(lambda: hasty.service.engine.running == 0)
    hasty.eventually(lambda: len(hasty.server.server_state.connections) == 1)  # that of the test
    client.close()


@pytest.mark.parametrize("stream", [False, True])
def test_when_a_client_is_gone_its_work_is_stopped(start, stream):
    slow = start(engine={"max_sequences": 1})
    with slow.held():
        client = raw(slow, request({**LONG, "stream": stream}))
        slow.eventually(lambda: slow.service.engine.running == 1)
        client.close()
        slow.eventually(lambda: slow.service.open_answers == 0)
    slow.eventually(lambda: slow.service.engine.running == 0)
    slow.eventually(lambda: slow.metric('otaro_answers_total{reason="cancelled"}') == 1)
    assert slow.metric("otaro_new_tokens_total") < 500
    assert slow.post("/v1/completions", SHORT).status_code == 200


# What it tells


def test_health_version_and_metrics(start):
    fresh = start()
    assert fresh.http.get("/health").json() == {"status": "ok"}
    assert fresh.http.get("/version").json() == {"version": otaro.__version__}
    answer = fresh.client.completions.create(
        model="tiny:E5M4", prompt="The statement", max_tokens=4, extra_body={"ignore_eos": True}
    )
    list(
        fresh.client.completions.create(
            model="tiny:E5M3", prompt="The", max_tokens=3, stream=True, extra_body={"ignore_eos": True}
        )
    )
    assert fresh.metric('otaro_new_tokens_total{precision="E5M4"}') == answer.usage.completion_tokens == 4
    assert fresh.metric('otaro_prompt_tokens_total{precision="E5M4"}') == answer.usage.prompt_tokens
    assert fresh.metric('otaro_first_token_seconds_count{precision="E5M3"}') == 1
    assert fresh.metric('otaro_time_per_token_seconds_count{precision="E5M3"}') == 1
    assert fresh.metric('otaro_requests_total{endpoint="/v1/completions",status="200"}') == 2
    assert fresh.metric("otaro_cache_bytes") > 0
    assert (fresh.metric("otaro_running"), fresh.metric("otaro_waiting")) == (0, 0)
    assert fresh.metric("process_resident_memory_bytes") > 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_broken_engine_is_not_healthy(start, monkeypatch):
    broken = start()
    monkeypatch.setattr(broken.service.engine.scheduler, "step", lambda: 1 / 0)
    response = broken.post("/v1/completions", SHORT)
    assert response.status_code == 500
    assert "its log says where" in response.json()["error"]["message"]
    assert broken.http.get("/health").status_code == 503
    assert broken.metric('otaro_requests_total{endpoint="/v1/completions",status="500"}') == 1
    assert broken.post("/v1/completions", SHORT).status_code == 503


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []
        self.setFormatter(JsonLines())

    def emit(self, record):
        self.lines.append(self.format(record))


@pytest.fixture
def lines():
    handler, logger = Lines(), logging.getLogger("otaro.serve")
    logger.addHandler(handler)
    before = logger.level
    logger.setLevel(logging.INFO)
    yield handler.lines
    logger.removeHandler(handler)
    logger.setLevel(before)


def test_the_log_has_a_line_a_request_without_what_was_asked(tiny, start, lines):
    secret = "the secret of the statement"
    wanted = {"prompt": secret, "max_tokens": 3, "precision": "E5M4", "ignore_eos": True}
    answers = [tiny.post("/v1/completions", wanted), tiny.post("/v1/completions", {"prompt": [secret] * 33})]
    answers.append(tiny.http.get(f"/v1/{secret}?q={secret}"))

    def logged():  # other servers of these tests log too
        by_id = {line["id"]: line for line in map(json.loads, lines) if "id" in line}
        return [
            by_id[answer.headers["x-request-id"]]
            for answer in answers
            if answer.headers["x-request-id"] in by_id
        ]

    tiny.eventually(lambda: len(logged()) == 3)
    first, second, third = logged()
    assert (first["status"], first["path"], first["precision"]) == (200, "/v1/completions", "E5M4")
    assert (first["new_tokens"], first["finish"], first["stream"]) == (3, ["length"], False)
    assert (second["status"], third["status"]) == (400, 404)
    assert secret not in "".join(lines)
    telling = start(log_prompts=True)
    telling.post("/v1/completions", {"prompt": secret, "max_tokens": 1})
    telling.eventually(lambda: any(secret in line for line in lines))


def test_an_error_is_logged_by_where_it_happened_and_not_by_what_it_says():
    try:
        raise ValueError("the secret")
    except ValueError:
        record = logging.LogRecord("otaro.serve", logging.ERROR, "", 1, "it failed", (), sys.exc_info())
    line = json.loads(JsonLines().format(record))
    assert line["error"] == "ValueError"
    assert "the secret" not in json.dumps(line)
    assert "test_an_error_is_logged" in line["at"][-1]


# Beginning


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"timeout": 0}, "timeout=0"),
        ({"max_queue": -1}, "max_queue=-1"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"keys": ("",)}, "API key"),
        ({"keys": ("a b",)}, "API key"),
        ({"precision": "E5M9"}, "unknown precision"),
        ({"auto_margin": 2.0}, "auto_margin=2.0"),
        ({"auto_finest": "E5M3", "auto_coarsest": "E5M4"}, "is coarser"),
        ({"draft": "e5m8"}, "draft='e5m8': a draft is coarser than what it serves, and E5M8 is the finest"),
        ({"draft": "prompt+E5M8"}, "a draft is coarser"),
        ({"origins": ("https://a.example", "foo")}, "origins 'foo': it is no origin"),
        ({"origins": ("https://",)}, "it is no origin"),
        ({"origins": ("https://a.example\n",)}, "it is no origin"),
        ({"origins": ("https://a.example/",)}, "no path"),
        ({"origins": ("https://A.example",)}, "no capitals"),
    ],
)
def test_wrong_settings_are_refused(settings, words):
    with pytest.raises(OtaroError, match=words):
        Settings(**settings)


@pytest.mark.parametrize(
    "settings", [{"draft": "prompt+E5M7"}, {"draft": "prompt"}, {"origins": ("*", "null")}]
)
def test_what_may_be_of_use_is_taken(settings):
    Settings(**settings)
    Settings(
        origins=("https://a.example", "http://localhost:3000", "http://[::1]:80", "chrome-extension://ab")
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["--draft", "E5M8"],
            "--draft E5M8: a draft is coarser than what it serves, and E5M8 is the finest ",
        ),
        (["--draft", "prompt+E5M8"], "--draft prompt+E5M8: a draft is coarser than what it serves, "),
        (["--cors", "foo"], "--cors 'foo': it is no origin; write it as https://page.example or "),
        (
            ["--cors", "*", "--cors", "https://a.example/x"],
            "--cors 'https://a.example/x': an origin has no path",
        ),
        (["--cors", ""], "--cors '': it is no origin; "),
        (["--name", ""], "--name '': give a name, or leave it out for that of the directory"),
        (["--name", " "], "--name '': give a name"),
    ],
)
def test_an_option_that_could_be_of_no_use_is_refused_as_it_was_given(chat_dir, monkeypatch, words, told):
    monkeypatch.setattr(server, "listen", lambda *_: pytest.fail("it would start"))
    assert misuse(CliRunner().invoke(app, ["serve", str(chat_dir), *words])).startswith(told)


def test_an_address_that_cannot_be_had_is_named(tiny):
    port = int(tiny.url.rpartition(":")[2])
    with pytest.raises(OtaroError, match=f"127.0.0.1:{port}.*--port"):
        server.listen("127.0.0.1", port)
    with pytest.raises(OtaroError, match=r"--host nowhere\.invalid"):
        server.listen("nowhere.invalid", 0)


def test_without_the_extra_the_command_says_what_to_install(tmp_path):
    code = (
        "import sys; sys.modules['starlette'] = None; sys.argv[1:] = ['serve', 'x']; import otaro.cli.main "
        "as cli; cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "otaro-llm[serve]" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"one-secret\n\xff\xfe\n", "it is not UTF-8; write one key into every line"),
        (b"\n \n", "there is no key in it; write one into every line"),
    ],
)
def test_a_file_that_holds_no_keys_is_named_and_not_quoted(chat_dir, tmp_path, content, words):
    keys = tmp_path / "keys"
    keys.write_bytes(content)
    refused = CliRunner().invoke(app, ["serve", str(chat_dir), "--port", "0", "--api-key-file", str(keys)])
    assert isinstance(refused.exception, OtaroError)
    assert str(refused.exception) == f"--api-key-file {keys}: {words}"
    assert refused.exception.__cause__ is None


def test_the_command_takes_a_key_from_a_file(process, chat_dir, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("one-key\n\ntwo-key\n")
    running = process(
        chat_dir, "--api-key-file", keys, "--name", "mine", "--precision", "E5M4", "--max-sequences", "2"
    )
    assert running.first.startswith("mine at http://127.0.0.1:")
    assert running.http.get("/v1/models").status_code == 401
    command = running.curl.replace("KEY", "two-key")
    answer = json.loads(subprocess.run(command, shell=True, capture_output=True, check=True).stdout)
    assert (answer["model"], answer["precision"]) == ("mine", "E5M4")
