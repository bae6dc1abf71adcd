"""`otaro web`'s page in a real browser: what it says, when, and what it does with a bad connection."""

import hashlib
import json
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import otaro
from otaro.runtime.decode import Decoder
from otaro.runtime.decoder_file import write_decoder_file
from tests.web.conftest import changed

pytestmark = pytest.mark.web

PROMPT = "The statement"
READY = "!document.getElementById('send').disabled"
IDLE = "!document.getElementById('send').hidden"
PLANES = [f"model-m{bits}.safetensors" for bits in range(4, 9)]
LONG = 180  # seconds that a busy machine may take


def enter(browser, served, ready=READY, query=""):
    browser.open(served.url + query)
    browser.wait(ready, LONG)


def finest(bits):
    return f"document.getElementById('precision').max === '{bits}'"


def ask(browser, text=PROMPT, most=24):
    browser.evaluate(f"document.getElementById('most').value = {most}")
    browser.click("#prompt")
    browser.type(text)
    browser.press("Enter")


def tokens(browser, answer=None):
    """Of an answer, by default the last one: [token, bits]."""
    script = """(() => {
        const pieces = told.filter((one) => one.kind === "piece");
        return pieces.filter((one) => one.id === ANSWER).map((one) => [one.token, one.bits]);
    })()"""
    return browser.evaluate(script.replace("ANSWER", "pieces.at(-1)?.id" if answer is None else str(answer)))


def said(browser):
    """The text of the last answer, without marks."""
    return browser.evaluate("""(() => {
        const copy = [...document.querySelectorAll(".answer .said")].at(-1).cloneNode(true);
        copy.querySelectorAll(".precision").forEach((one) => one.remove());
        return copy.textContent;
    })()""")


class Native:
    """The package's own decoder."""

    def __init__(self, path):
        self.model = otaro.load(path)
        self.decoder = Decoder.of(self.model)
        self.tokenizer = AutoTokenizer.from_pretrained(path)

    def logits(self, ids, cache, bits):
        return self.decoder.forward(
            ids, cache, bits=bytes([bits] * len(self.decoder.description.precisions()))
        )

    def greedy(self, prompt, schedule):
        """As many tokens as the schedule has precisions: each is of logits at its own."""
        ids = self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
        cache, found = self.decoder.new_cache(), []
        for bits in schedule:
            ids = [int(self.logits(ids, cache, bits).argmax())]
            found += ids
        return found


@pytest.fixture(scope="module")
def native(nested):
    return Native(nested / "plain")


def probe(browser, served, **data):
    browser.open(served.url + "page.json")
    return browser.evaluate(f"""new Promise((resolve) => {{
        const worker = new Worker("probe.js", {{ type: "module" }});
        worker.onmessage = (event) => resolve(event.data);
        worker.onerror = (event) => resolve({{ error: event.message }});
        worker.postMessage({json.dumps(data)});
    }})""")


# Bits


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", ["plain", "truncate", "wide"])
def test_logits_have_the_bits_of_the_native_decoder_at_every_precision(
    browser, serve, site, nested, tmp_path, name, threads
):
    write_decoder_file(nested / name)
    folder = tmp_path / "site"
    shutil.copytree(site, folder)
    shutil.copytree(nested / name, folder / "other")
    rng = np.random.default_rng(3)
    # more than one step, and than one segment of the cache
    prompt = [int(one) for one in rng.integers(0, 1536, 75)]
    found = probe(
        browser,
        serve(folder),
        what="logits",
        **{"from": "other", "prompt": prompt, "next": 7, "threads": threads},
    )
    one = Native(nested / name)
    expected = {}
    for bits in range(3, 9):
        cache = one.decoder.new_cache()
        both = torch.cat([one.logits(prompt, cache, bits), one.logits([7], cache, bits)])
        expected[str(bits)] = hashlib.sha256(both.numpy().astype("<f4").tobytes()).hexdigest()
    assert found == {"digests": expected, "backend": "wasm", "threads": threads}


def test_text_becomes_the_tokens_that_python_makes_of_it(browser, serve, site):
    texts = [
        "The statement",
        " two  spaces\n\n\tand\ttabs ",
        "naïve 🙂 日本語 'quoted' 123,456.7e-8",
        "def f(x):\n    return x**2\n",
        "",
    ]
    template = (
        "{% for one in messages %}{{ one.role }}: {{ one['content'] | trim }}\n{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    conversation = [{"role": "user", "content": " Hi "}, {"role": "assistant", "content": "Ho"}]
    tokenizer = AutoTokenizer.from_pretrained(site / "model")
    found = probe(
        browser, serve(site), what="tokens", texts=texts, conversation=conversation, chat_template=template
    )
    ids = [tokenizer(text)["input_ids"] for text in texts]
    assert found["ids"] == ids
    assert found["back"] == [tokenizer.decode(one, skip_special_tokens=True) for one in ids]
    tokenizer.chat_template = template
    assert found["chat"] == tokenizer.apply_chat_template(
        conversation, add_generation_prompt=True, return_dict=False
    )


def test_greedy_tokens_are_the_native_ones_at_each_precision_and_the_slider_goes_back_down(
    browser, serve, site, native
):
    enter(browser, serve(site), finest(8))
    assert browser.evaluate("document.getElementById('precision').value") == "8"
    for bits in range(8, 2, -1):
        ask(browser)
        browser.wait(f"{IDLE} && document.querySelectorAll('.answer').length === 1", LONG)
        expected = native.greedy(PROMPT, [bits] * 24)
        assert tokens(browser) == [[token, bits] for token in expected]
        assert said(browser) == native.tokenizer.decode(expected, skip_special_tokens=True)
        assert browser.text(".answer > .precision") == f"E5M{bits}"
        browser.click("#new")
        browser.evaluate("document.getElementById('precision').focus()")
        browser.press("ArrowLeft")
    assert browser.evaluate("document.getElementById('precision').value") == "3"
    assert browser.complaints == []


def test_a_chat_goes_on_in_the_words_of_its_template(browser, serve, site, native, tmp_path):
    template = "{% for one in messages %}{{ one.role }}: {{ one.content }}\n{% endfor %}assistant:"
    folder = tmp_path / "site"
    shutil.copytree(site, folder)
    with changed(folder / "page.json") as page:
        page["chat_template"] = template
    enter(browser, serve(folder), finest(8))
    messages = []
    for number, question in enumerate(("The statement", "And then?"), 1):
        messages.append({"role": "user", "content": question})
        ask(browser, question)
        browser.wait(f"{IDLE} && document.querySelectorAll('.answer').length === {number}", LONG)
        prompt = native.tokenizer.apply_chat_template(
            messages, chat_template=template, add_generation_prompt=True, return_dict=False
        )
        assert [token for token, _ in tokens(browser)] == native.greedy(prompt, [8] * 24)
        messages.append({"role": "assistant", "content": said(browser)})


# Planes


def test_it_answers_from_the_base_shard_alone_and_takes_up_planes_in_the_middle_of_an_answer(
    browser, serve, slow_site, native
):
    served = serve(slow_site)
    served.hold(*PLANES)
    enter(browser, served)
    assert finest_of(browser) == 3
    assert browser.text("#arrived").startswith("E5M3 is here, 4 bits a weight")
    ask(browser, most=200)
    browser.wait("told.some((one) => one.kind === 'piece')", LONG)
    assert all(bits == 3 for _, bits in tokens(browser))
    for name in PLANES:
        served.held[name].set()
    browser.wait("told.findLast((one) => one.kind === 'piece').bits === 8", LONG)
    browser.press("Escape")
    browser.wait(IDLE, LONG)
    found = tokens(browser)
    schedule = [bits for _, bits in found]
    assert schedule == sorted(schedule)
    assert (schedule[0], schedule[-1]) == (3, 8)
    assert [token for token, _ in found] == native.greedy(PROMPT, schedule)
    marks = browser.evaluate(
        "[...document.querySelectorAll('.said .precision')].map((one) => one.textContent)"
    )
    assert marks == [f"E5M{bits}" for bits in sorted(set(schedule))[1:]]
    assert browser.text("#arrived").startswith("E5M8 is here, 9 bits a weight")


def finest_of(browser):
    return int(browser.evaluate("document.getElementById('precision').max"))


def test_a_flipped_byte_is_refused_in_words_and_the_plane_comes_again_when_asked_for(browser, serve, site):
    served = serve(site)
    served.flipped["model-m5.safetensors"] = -9
    enter(browser, served, "!document.getElementById('again').hidden")
    words = browser.text("#alert")
    assert words.startswith("The model could not be fetched whole: model-m5.safetensors: the bytes of model.")
    assert "It goes on at E5M4." in words
    ask(browser)
    browser.wait(f"{IDLE} && told.some((one) => one.kind === 'done')", LONG)
    assert {bits for _, bits in tokens(browser)} == {4}
    served.flipped.clear()
    browser.click("#again button")
    browser.wait(finest(8), LONG)
    assert browser.text("#alert") == ""
    assert browser.evaluate("document.getElementById('again').hidden")


def test_a_lost_connection_is_taken_up_where_it_broke_off(browser, serve, site):
    served = serve(site)
    served.cut.update({"model-m3.safetensors": 300_000, "model-m6.safetensors": 50_000})
    for bits in (3, 6):
        come = f"told.findLast((one) => one.kind === 'progress' && one.bits === {bits} && one.have)?.have"
        if bits == 3:
            enter(browser, served, come)
        browser.wait(come, LONG)
        served.cuts.set()
    browser.wait(finest(8), LONG)
    for bits, most in ((3, 300_000), (6, 50_000)):
        first, second = [part for name, part in served.shards_asked() if name == f"model-m{bits}.safetensors"]
        assert first is None
        assert 0 < int(second.removeprefix("bytes=").removesuffix("-")) <= most


def test_shards_may_lie_on_another_host(browser, serve, site, nested, tmp_path):
    from otaro.web.site import write_site

    (tmp_path / "files").mkdir()
    for path in (nested / "plain").glob("*.safetensors"):
        shutil.copyfile(path, tmp_path / "files" / path.name)
    (tmp_path / "files" / "page.json").write_text("{}")
    other = serve(tmp_path / "files", headers={"Access-Control-Allow-Origin": "*"})
    other.cut["model-m3.safetensors"] = 300_000
    write_site(nested / "plain", tmp_path / "out", files=other.url)
    served = serve(tmp_path / "out")
    enter(browser, served, "told.some((one) => one.kind === 'progress' && one.have)")
    other.cuts.set()
    browser.wait(finest(8), LONG)
    assert served.shards_asked() == []
    assert [part is None for name, part in other.shards_asked() if "m3" in name] == [True, False]


def test_a_server_without_ranges_begins_anew(browser, serve, site):
    served = serve(site)
    served.ranges = False
    served.cut["model-m3.safetensors"] = 300_000
    served.cuts.set()
    enter(browser, served, finest(8))
    assert browser.text("#alert") == ""


def test_a_page_that_was_closed_goes_on_from_what_had_come(browser, serve, site):
    served = serve(site)
    served.hold("model-m5.safetensors")
    enter(browser, served, finest(4))
    browser.open("about:blank")
    served.release()
    served.held.clear()
    served.asked.clear()
    enter(browser, served, finest(8))
    assert [name for name, _ in served.shards_asked()] == PLANES[1:]


def test_the_second_visit_needs_no_shard_until_what_is_kept_is_forgotten(browser, serve, site):
    served = serve(site)
    enter(browser, served, finest(8))
    assert "kept for your next visit" in browser.text("#here")
    served.asked.clear()
    enter(browser, served, finest(8))
    assert served.shards_asked() == []
    browser.click("#forget")
    browser.wait("told.some((one) => one.kind === 'forgotten')", LONG)
    served.asked.clear()
    enter(browser, served, finest(8))
    assert len(served.shards_asked()) == 6


def test_wrong_bytes_in_storage_are_refused_and_not_kept(browser, serve, site):
    served = serve(site)
    enter(browser, served, finest(8))
    model = json.loads((site / "page.json").read_text())["model"]
    browser.open(served.url + "page.json")
    browser.evaluate(f"""(async () => {{
        const folder = await (await (await navigator.storage.getDirectory()).getDirectoryHandle("otaro"))
            .getDirectoryHandle("{model}");
        const file = await folder.getFileHandle("model-m7.safetensors");
        const writer = await file.createWritable({{ keepExistingData: true }});
        await writer.seek((await file.getFile()).size - 20);
        await writer.write(new Uint8Array([1, 2, 3, 4, 5, 6, 7, 8]));
        await writer.close();
    }})()""")
    enter(browser, served, "!document.getElementById('again').hidden")
    assert "model-m7.safetensors" in browser.text("#alert")
    browser.click("#again button")
    browser.wait(finest(8), LONG)


def test_planes_of_another_model_are_refused(browser, serve, site, nested, tmp_path):
    folder = tmp_path / "site"
    shutil.copytree(site, folder)
    other = nested / "wide" / "model-m4.safetensors"
    shutil.copyfile(other, folder / "model" / other.name)
    with changed(folder / "page.json") as page:
        page["shards"][1]["bytes"] = other.stat().st_size
    enter(browser, serve(folder), "!document.getElementById('again').hidden")
    assert "model-m4.safetensors" in browser.text("#alert")
    assert finest_of(browser) == 3


def test_a_shard_that_is_not_there_is_told_of(browser, serve, site, tmp_path):
    folder = tmp_path / "site"
    shutil.copytree(site, folder)
    (folder / "model" / "model-m3.safetensors").unlink()
    enter(browser, serve(folder), "!document.getElementById('again').hidden")
    assert "model-m3.safetensors: the server answered 404" in browser.text("#alert")


# The page


def test_escape_stops_and_the_conversation_goes_on(browser, serve, slow_site):
    enter(browser, serve(slow_site))
    ask(browser, most=2000)
    browser.wait("told.filter((one) => one.kind === 'piece').length > 3", LONG)
    browser.press("Escape")
    browser.wait(IDLE, LONG)
    assert browser.text(".figures").endswith("stopped")
    assert browser.evaluate(
        "told.at(-1).reason === 'stopped' || told.some((one) => one.reason === 'stopped')"
    )
    ask(browser, "if", most=5)
    browser.wait(f"{IDLE} && document.querySelectorAll('.answer').length === 2", LONG)
    assert len(tokens(browser)) == 5


def test_it_runs_without_the_headers_on_one_thread_and_with_them_on_all(browser, serve, site):
    enter(browser, serve(site, headers={}), finest(8))
    assert browser.evaluate("crossOriginIsolated") is False
    assert "1 thread;" in browser.text("#here")
    enter(browser, serve(site), finest(8))
    assert browser.evaluate("crossOriginIsolated") is True
    cores = browser.evaluate("navigator.hardwareConcurrency")
    assert f"{cores} thread" in browser.text("#here")


def test_what_a_model_or_a_person_writes_stays_text(browser, serve, site, tmp_path):
    hostile = "<img src=x onerror=\"document.title='run'\"><script>document.title='run'</script>"
    folder = tmp_path / "site"
    shutil.copytree(site, folder)
    with changed(folder / "page.json") as page:
        page["name"] = hostile
    enter(browser, serve(folder))
    ask(browser, hostile, most=2)
    browser.wait(f"{IDLE} && told.some((one) => one.kind === 'done')", LONG)
    assert browser.text(".question") == browser.text("#model") == hostile
    assert browser.evaluate("document.title") != "run"
    policy = browser.evaluate("document.querySelector('meta[http-equiv]').content")
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy


def test_it_fits_a_phone_and_a_dark_room(browser, serve, site):
    browser.look(360, 640, "dark", phone=True)
    enter(browser, serve(site), finest(8))
    ask(browser)
    browser.wait(f"{IDLE} && document.querySelectorAll('.answer').length === 1", LONG)
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(21, 24, 28)"
    box = browser.evaluate(
        "(({ top, bottom }) => [top, bottom])(document.getElementById('prompt').getBoundingClientRect())"
    )
    assert 0 <= box[0] < box[1] <= 640


# Memory


@pytest.fixture(scope="module")
def larger(site, tmp_path_factory):
    """Random weights of 80 million parameters: enough to see their memory beside a browser's own."""
    from otaro.web.site import write_site

    folder = tmp_path_factory.mktemp("larger")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1536, hidden_size=768, intermediate_size=3072, num_hidden_layers=8, num_attention_heads=12,
        max_position_embeddings=512, tie_word_embeddings=True, dtype="float16",
    )  # fmt: skip
    LlamaForCausalLM(config).half().save_pretrained(folder / "checkpoint")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(site / "model" / name, folder / "checkpoint" / name)
    otaro.pack(folder / "checkpoint", folder / "nested")
    write_site(folder / "nested", folder / "site")
    return folder / "site"


def resident(browser):
    """Bytes that only the process of the page has: the largest of those that have pages."""
    sizes = []
    for one in processes(browser.pid):
        if "--type=renderer" in Path(f"/proc/{one}/cmdline").read_text():
            lines = Path(f"/proc/{one}/smaps_rollup").read_text().splitlines()
            sizes.append(
                sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Private_Dirty:"))
            )
    return max(sizes)


def processes(parent):
    found = [parent]
    for task in Path(f"/proc/{parent}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += processes(int(child))
    return found


@pytest.mark.skipif(
    not Path("/proc/self/smaps_rollup").exists(), reason="memory is read from /proc, which only Linux has"
)
def test_memory_stays_within_1_3_times_the_bytes_fetched(browser, serve, site, larger):
    enter(browser, serve(site), finest(8))
    # what any page takes
    bare = resident(browser) - sum(path.stat().st_size for path in (site / "model").iterdir())
    enter(browser, serve(larger), finest(8))
    ask(browser, most=8)
    browser.wait(f"{IDLE} && told.some((one) => one.kind === 'done')", LONG)
    fetched = sum(path.stat().st_size for path in (larger / "model").iterdir())
    assert browser.evaluate("told.findLast((one) => one.kind === 'plane').memory") < 1.3 * fetched
    end = time.monotonic() + 60
    # pieces that came wait to be collected
    while not (fetched / 2 < (taken := resident(browser) - bare) < 1.3 * fetched):
        assert time.monotonic() < end, f"{taken} bytes for {fetched}"
        time.sleep(0.5)
