"""The page at / in a real browser, against real servers."""

import json
import os
import subprocess
import sys
import time
import zipfile
from importlib import resources
from pathlib import Path

import httpx2
import pytest
from transformers import AutoTokenizer

import otaro
from tests.serve.browser import PROGRAM, Browser

ROOT = Path(__file__).parents[2]
IDLE = "!document.getElementById('send').hidden"
HOSTILE = "<img src=x onerror=\"document.title='run'\"><script>document.title='run'</script>\u202e&amp;"


@pytest.fixture(scope="module")
def any_browser(tmp_path_factory):
    if PROGRAM is None:
        pytest.skip("no browser on this machine: none of chromium, chromium-browser, google-chrome is found")
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def browser(any_browser):
    """On a wide screen; whatever is wrong with the page's script fails the test."""
    any_browser.look(1200, 800)
    yield any_browser
    assert any_browser.complaints == []


@pytest.fixture(scope="module")
def slow_server(start):
    running = start(engine={"max_sequences": 2}, max_queue=0)
    scheduler = running.service.engine.scheduler
    step = scheduler.step

    def late():
        time.sleep(running.pause)
        return step()

    running.pause, scheduler.step = 0, late
    return running


@pytest.fixture
def slow(slow_server):
    """A server that writes twenty tokens a second at most: time enough to do something meanwhile."""
    slow_server.pause = 0.05
    yield slow_server
    slow_server.pause = 0
    slow_server.eventually(lambda: slow_server.service.engine.running == 0)


def enter(browser, running):
    browser.open(running.url + "/")
    browser.wait("document.getElementById('planes').rows.length")


def ask(browser, text):
    browser.click("#prompt")
    browser.type(text)
    browser.press("Enter")


def set_precision(browser, side, bits):
    browser.evaluate(f"document.getElementById('precision-{side}').focus()")
    for _ in range(5):
        browser.press("ArrowLeft")
    for _ in range(bits - 3):
        browser.press("ArrowRight")


def slide(browser, side, bits):
    """In one move: in mid-answer, every precision at which a slow hand rests for a moment counts."""
    browser.evaluate(f"""(() => {{
        const slider = document.getElementById("precision-{side}");
        slider.value = {bits};
        slider.dispatchEvent(new Event("input"));
    }})()""")


def answer_of(running, text, precision, **more):
    """What the server says to it by itself."""
    body = {"messages": [{"role": "user", "content": text}], "precision": precision, "temperature": 0, **more}
    return running.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]


def said(browser, number=0):
    """The text of an answer without the marks of its precisions."""
    return browser.evaluate(f"""(() => {{
        const copy = document.querySelectorAll(".answer .said")[{number}].cloneNode(true);
        copy.querySelectorAll(".precision").forEach((one) => one.remove());
        return copy.textContent;
    }})()""")


def size(count):
    """As the page words bytes, below 100 MB."""
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.{int(count < 1e5)}f} kB"


def answer_with(browser, body, status=200):
    """Let the page hear this in place of an answer."""
    browser.evaluate(f"""void (window.fetched ??= fetch, fetch = async (path, options) =>
        path.endsWith("completions")
            ? new Response({json.dumps(body)}, {{ status: {status} }}) : fetched(path, options))""")


def event(text, tokens=1):
    usage = {"completion_tokens": tokens, "total_tokens": tokens + 1}
    body = {"id": "../x", "precision": "E5M8", "usage": usage, "choices": [{"delta": {"content": text}}]}
    return f"data: {json.dumps(body)}\n\n"


# Chat


def test_it_streams_what_the_server_says(browser, slow, tiny):
    enter(browser, slow)
    assert browser.text("#model") == "tiny"
    browser.click("#most")
    browser.type("100")
    browser.click("#prompt")
    browser.type("The")
    browser.press("Enter", shift=True)
    browser.type("statement")
    browser.press("Enter")
    length = browser.wait("document.querySelector('.answer .said')?.textContent.length")
    browser.wait(f"document.querySelector('.answer .said').textContent.length > {length}")
    assert browser.evaluate("document.querySelector('.answer').getAttribute('aria-busy')") == "true"
    slow.pause = 0
    browser.wait(IDLE)
    assert browser.text(".question") == "The\nstatement"
    assert said(browser) == answer_of(tiny, "The\nstatement", "E5M8", max_tokens=100)
    assert browser.evaluate("document.querySelector('.answer').hasAttribute('aria-busy')") is False
    figures = dict(zip(("tokens", "rate", "read", "end"), browser.text(".figures").split(" · "), strict=True))
    assert (figures["tokens"], figures["end"]) == ("100 tokens", "cut at the limit")
    assert float(figures["rate"].removesuffix(" tokens/s")) > 0
    assert browser.evaluate("document.activeElement.id") == "prompt"
    # It goes on with the conversation, and begins a new one.
    first, slow.pause = said(browser), 0.05
    ask(browser, "Go on")
    browser.wait("document.querySelectorAll('.answer .said')[1]?.textContent.length > 5")
    browser.press("Escape")
    browser.wait(IDLE)
    history = [{"role": "user", "content": "The\nstatement"}, {"role": "assistant", "content": first}]
    body = {"messages": [*history, {"role": "user", "content": "Go on"}], "temperature": 0}
    assert (
        tiny.post("/v1/chat/completions", body)
        .json()["choices"][0]["message"]["content"]
        .startswith(said(browser, 1))
    )
    browser.click("#new")
    assert browser.evaluate("document.querySelectorAll('.turn').length") == 0


def test_the_slider_works_in_the_middle_of_an_answer_and_escape_stops(browser, slow):
    enter(browser, slow)
    ask(browser, "The statement")
    browser.wait("document.querySelector('.answer .said')?.textContent.length > 10")
    before = browser.text(".figures")
    slide(browser, 0, 3)
    assert browser.wait("document.querySelector('.said .precision')?.textContent") == "E5M3"
    assert browser.text(".answer > .precision") == "E5M8"
    switched = said(browser)
    slide(browser, 0, 6)
    browser.wait("document.querySelectorAll('.said .precision')[1]?.textContent === 'E5M6'")
    browser.wait(f"document.querySelector('.answer .said').textContent.length > {len(switched) + 20}")
    after = browser.text(".figures")
    browser.press("Escape")
    browser.wait(IDLE)
    assert browser.text(".figures").endswith("stopped")
    slow.eventually(lambda: slow.service.engine.running == 0)
    told = slow.http.get("/v1/resident").json()
    weights = {row["precision"]: row["weight_bytes_per_token"] for row in told["precisions"]}
    prompt = len(slow.service.tokenizer("user: The statement\nassistant:")["input_ids"])
    for text, precision in ((before, "E5M8"), (after, "E5M6")):
        context = prompt + int(text.partition(" tokens")[0])
        read = weights[precision] + told["cache_bytes_per_token"] * context
        assert text.endswith(f" · {size(read)} read per token")
    assert browser.evaluate("document.getElementById('precision-0').ariaValueText") == "E5M6, 7 bits a weight"


def test_tokens_a_second_are_counted_from_the_first_one(browser, tiny):
    enter(browser, tiny)
    answer_with(browser, "".join(event("word ", tokens) for tokens in (3, 8, 13, 13)) + "data: [DONE]\n\n")
    # a second an event
    browser.evaluate("void (performance.now = () => (window.clock = (window.clock ?? 0) + 1000))")
    ask(browser, "The statement")
    browser.wait(f"{IDLE} && document.querySelector('.figures')?.textContent.startsWith('13 tokens')")
    assert browser.text(".figures").split(" · ")[1] == "5.0 tokens/s"


def test_two_answers_side_by_side_have_their_differences_marked(browser, tiny):
    enter(browser, tiny)
    browser.click("#compare")
    set_precision(browser, 0, 8)
    ask(browser, "The statement")
    browser.wait(f"{IDLE} && !!document.querySelector('.answer mark')")
    expected = [answer_of(tiny, "The statement", precision) for precision in ("E5M8", "E5M3")]
    assert [said(browser, 0), said(browser, 1)] == expected
    marked = """[...document.querySelectorAll(".answer .said")].map((said) =>
        [...said.childNodes].map((one) => [one.nodeName === "MARK", one.textContent]))"""
    same, differ = [], []
    for pieces in browser.evaluate(marked):
        same.append([word for inside, text in pieces if not inside for word in text.split()])
        differ.append([word for inside, text in pieces if inside for word in text.split()])
    assert same[0] == same[1], "what is not marked is the same on both sides"
    assert all(differ)
    for number, text in enumerate(expected):
        assert browser.text(f".answer:nth-child({number + 1}) .figures").endswith(
            f"{len(differ[number])} of {len(text.split())} words differ"
        )
    # The next question goes on with each side's own answer; one precision twice is the same.
    browser.click("#new")
    set_precision(browser, 1, 8)
    ask(browser, "The statement")
    browser.wait(f"{IDLE} && document.querySelector('.figures')?.textContent.endsWith('the same words')")
    assert browser.evaluate("document.querySelectorAll('mark').length") == 0


def test_a_model_without_a_template_goes_on_with_a_text(browser, start, chat_dir):
    tokenizer = AutoTokenizer.from_pretrained(chat_dir)
    tokenizer.chat_template = None
    plain = start(engine={"tokenizer": tokenizer}, name="plain")
    enter(browser, plain)
    assert browser.evaluate("document.getElementById('prompt').placeholder").startswith("Begin a text")
    ask(browser, "The statement")
    browser.wait(f"{IDLE} && document.querySelector('.answer .said')?.textContent")
    body = {"prompt": "The statement", "max_tokens": 256, "temperature": 0}
    assert said(browser) == plain.post("/v1/completions", body).json()["choices"][0]["text"]


def test_it_shows_what_is_in_memory(browser, tiny):
    enter(browser, tiny)
    cells = (
        "[...document.getElementById('planes').rows].map((row) => [...row.cells].map((one) => "
        "one.textContent))"
    )
    rows = browser.evaluate(cells)
    told = tiny.http.get("/v1/resident").json()["precisions"]
    assert [row[0] for row in rows] == [one["precision"] for one in told]
    assert [row[2] for row in rows] == [size(one["weight_bytes_per_token"]) for one in told]
    if sys.platform == "linux":
        assert browser.text("#memory").endswith("of keys and values.")
        assert "of planes" in browser.text("#memory")
    set_precision(browser, 0, 5)
    read = "[...document.querySelectorAll('#planes .read th')].map((one) => one.textContent)"
    assert browser.evaluate(read) == ["E5M3", "E5M4", "E5M5"]


def test_it_says_where_the_system_does_not_tell_and_offers_what_is_there(browser, start, monkeypatch):
    partial = start()
    monkeypatch.setattr("otaro.serve.planes.resident_planes", lambda model: None)
    monkeypatch.setattr(partial.service.planes, "finest", otaro.Precision("E5M5"))
    enter(browser, partial)
    assert (
        browser.evaluate("[...document.getElementById('planes').rows].map((row) => row.cells[1].textContent)")
        == ["not known here"] * 3
    )
    assert "of planes" not in browser.text("#memory")
    assert browser.wait("document.getElementById('precision-0').ariaValueText") == "E5M5, 6 bits a weight"
    browser.evaluate("document.getElementById('precision-0').focus()")
    browser.press("ArrowRight")
    assert browser.evaluate("document.getElementById('precision-0').value") == "5"


# What goes wrong is told in words


def alert(browser, words):
    browser.wait(f"document.getElementById('alert').textContent.includes({json.dumps(words)})")


def test_a_key_is_asked_for_and_kept_in_this_tab_alone(browser, start):
    locked = start(keys=("right-key",))
    browser.open(locked.url + "/")
    alert(browser, "wants an API key")
    assert browser.evaluate("document.activeElement.id") == "key"
    for key, words in (
        ("wrong-key", "does not know this API key"),
        ("schlüssel", "No API key looks like that"),
    ):
        browser.evaluate("document.getElementById('key').select()")
        browser.type(key)
        browser.press("Tab")
        alert(browser, words)
    browser.evaluate("document.getElementById('key').select()")
    browser.type("right-key")
    browser.press("Tab")
    browser.wait(
        "document.getElementById('planes').rows.length && !document.getElementById('alert').textContent"
    )
    ask(browser, "The statement")
    browser.wait(f"{IDLE} && document.querySelector('.answer .said')?.textContent")
    assert browser.evaluate("[sessionStorage.getItem('key'), localStorage.length, document.cookie]") == [
        "right-key",
        0,
        "",
    ]
    refused = [one for one in browser.complaints if "401" in one]
    assert refused == browser.complaints != []
    browser.complaints.clear()


def test_a_busy_server_and_a_long_question_are_told_and_the_question_is_not_lost(browser, slow):
    enter(browser, slow)
    busy = {"prompt": "The", "max_tokens": 400, "ignore_eos": True, "stream": True, "n": 2}
    with slow.http.stream("POST", "/v1/completions", json=busy):
        ask(browser, "The statement")
        alert(browser, "The server is busy. Ask again in 1 second.")
    slow.pause = 0
    assert browser.evaluate("document.getElementById('prompt').value") == "The statement"
    slow.eventually(lambda: slow.service.engine.running == 0)
    ask(browser, " of the" * 600)
    alert(browser, "That is too long for this model (1")
    assert browser.evaluate("document.querySelectorAll('.turn').length") == 0
    assert all("429" in one or "400" in one for one in browser.complaints)
    browser.complaints.clear()


EARLY = """new MutationObserver((_, watch) => {
    const one = document.getElementById("compare");
    if (one) one.focus(), watch.disconnect();
}).observe(document, { childList: true, subtree: true })"""


def test_the_prompt_has_the_focus_unless_somebody_was_faster(browser, tiny):
    enter(browser, tiny)
    assert browser.evaluate("document.activeElement.id") == "prompt"
    added = browser.call("Page.addScriptToEvaluateOnNewDocument", source=EARLY)  # before anything is drawn
    enter(browser, tiny)
    browser.call("Page.removeScriptToEvaluateOnNewDocument", **added)
    assert browser.evaluate("document.activeElement.id") == "compare"


def test_a_wrong_setting_is_told(browser, tiny):
    enter(browser, tiny)
    browser.evaluate("document.getElementById('temperature').value = '7'")
    ask(browser, "The statement")
    alert(browser, "Temperature: ")
    assert browser.evaluate("document.querySelectorAll('.turn').length") == 0


def test_a_server_that_is_gone_is_told_and_what_was_written_stays(browser, start):
    ending = start()
    enter(browser, ending)
    answer_with(browser, event("Half a"))  # and then the connection ends
    ask(browser, "The statement")
    browser.wait(IDLE)
    assert said(browser) == "Half a"
    assert browser.text(".answer .error") == "The connection broke off before the answer ended."
    browser.evaluate("void (fetch = fetched)")
    ending.server.should_exit = True
    ending.eventually(lambda: not answers(ending))
    ask(browser, "Go on")
    alert(browser, "The server does not answer")
    assert browser.evaluate("document.getElementById('prompt').value") == "Go on"
    assert all("ERR_" in one for one in browser.complaints)
    browser.complaints.clear()


def answers(running):
    try:
        return running.http.get("/health").status_code == 200
    except httpx2.TransportError:
        return False


# Whoever it is for, and whoever it is against


def test_nothing_that_a_model_or_a_server_says_is_run(browser, start):
    hostile = start(name=HOSTILE)
    enter(browser, hostile)
    assert browser.evaluate("document.getElementById('model').textContent") == HOSTILE
    answer_with(browser, 2 * event(HOSTILE) + "data: [DONE]\n\n")
    browser.click("#compare")
    ask(browser, HOSTILE)
    browser.wait(f"{IDLE} && document.querySelectorAll('.answer .said').length === 2")
    assert said(browser) == said(browser, 1) == 2 * HOSTILE
    answer_with(browser, json.dumps({"error": {"message": HOSTILE}}), 418)
    ask(browser, "And now?")
    alert(browser, HOSTILE)
    assert browser.evaluate("[document.querySelectorAll('img, main script').length, document.title]") == [
        0,
        "OTARo",
    ]
    inserted = browser.evaluate("""(() => { const script = document.createElement("script");
        script.textContent = "document.title = 'run'"; document.body.append(script);
        return document.title; })()""")
    assert inserted == "OTARo", "the policy forbids what is not in a file of the page"
    assert all("Content Security Policy" in one for one in browser.complaints)
    browser.complaints.clear()


def test_it_asks_nobody_else(browser, tiny):
    enter(browser, tiny)
    names = browser.evaluate("performance.getEntriesByType('resource').map((one) => one.name)")
    assert names
    assert all(name.startswith(tiny.url) for name in names)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read_on_a_phone_in_light_and_dark(browser, tiny, scheme):
    browser.look(375, 740, scheme, phone=True)
    enter(browser, tiny)
    assert browser.evaluate("document.getElementById('panel').open") is False
    browser.click("#compare")
    ask(browser, "W" * 300)
    browser.wait(f"{IDLE} && document.querySelectorAll('.figures').length === 2")
    wide = """[document.documentElement, ...document.querySelectorAll("body *")]
        .filter((one) => one.getBoundingClientRect().right > 375.5
            || (one.id === "talk" && one.scrollWidth > one.clientWidth))
        .map((one) => one.outerHTML)"""
    assert browser.evaluate(wide) == []
    boxes = browser.evaluate(
        "[...document.querySelectorAll('.answer')].map((one) => one.getBoundingClientRect().left)"
    )
    assert boxes[0] == boxes[1], "one below the other"
    browser.click("summary")
    assert browser.evaluate(wide) == []
    assert browser.evaluate("document.getElementById('prompt').getBoundingClientRect().bottom") <= 740
    texts = browser.evaluate("""Object.fromEntries(
        ["body", ".note", "#send", "mark", ".question", ".precision"].map((name) => {
            const one = document.querySelector(name) ?? document.body;
            return [name, [getComputedStyle(one).color, getComputedStyle(one).backgroundColor]];
        }))""")
    ground = texts["body"][1]
    assert (luminance(ground) > 0.5) == (scheme == "light")
    for name, (colour, behind) in texts.items():
        lights = sorted((luminance(colour), luminance(ground if behind == "rgba(0, 0, 0, 0)" else behind)))
        assert (lights[1] + 0.05) / (lights[0] + 0.05) >= 4.5, f"WCAG AA of {name}"


def luminance(colour):
    """As WCAG has it, of rgb(...)."""
    values = [int(value) / 255 for value in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    red, green, blue = (
        value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in values
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_the_keyboard_reaches_everything_and_sees_where_it_is(browser, tiny):
    enter(browser, tiny)
    browser.click("#compare")
    shown = "[...document.querySelectorAll('button, input, textarea')].filter((one) => one.checkVisibility())"
    wanted = browser.evaluate(f"{shown}.map((one) => one.id)")
    assert {
        "prompt",
        "send",
        "precision-0",
        "precision-1",
        "compare",
        "temperature",
        "most",
        "key",
        "new",
    } == set(wanted)
    names = browser.evaluate(
        f"{shown}.map((one) => one.labels?.[0]?.textContent.trim() || one.textContent.trim())"
    )
    assert all(names)
    browser.evaluate("document.activeElement.blur()")
    reached = {}
    for _ in range(20):
        browser.press("Tab")
        at, outline = browser.evaluate(
            "[document.activeElement.id, getComputedStyle(document.activeElement).outlineStyle]"
        )
        reached[at] = outline
    assert set(wanted) <= set(reached)
    assert all(reached[one] == "solid" for one in wanted)


# The package


def test_the_page_is_small_and_in_the_wheel(tmp_path):
    files = {one.name: one.read_bytes() for one in resources.files("otaro.serve").joinpath("page").iterdir()}
    assert sorted(files) == ["icon.svg", "index.html", "page.css", "page.js"]
    assert sum(map(len, files.values())) < 40_000
    pytest.importorskip(
        "scikit_build_core", reason="scikit-build-core is not installed, so that no wheel can be made here"
    )
    script = (
        "import sys; from scikit_build_core.build import build_wheel; build_wheel(sys.argv[1], "
        "{'wheel.cmake': 'false'})"
    )
    environment = {**os.environ, "PYTHONPATH": ""}
    subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        cwd=ROOT,
        env=environment,
        check=True,
        capture_output=True,
    )
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        for name, content in files.items():
            assert wheel.read(f"otaro/serve/page/{name}") == content
