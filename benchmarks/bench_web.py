"""Tokens a second in a browser: `python benchmarks/bench_web.py DIR [--rounds 12] [--wllama FOLDER] ...`.

The decoder in WebAssembly on one thread, in headless chromium, beside the native one on one thread, by AVX-512 (where the CPU
has it) and by AVX2, in turn: a noisy machine is noisy for all. A round is sixteen tokens of each, after sixteen; what
counts is the shortest time of a token in all rounds. Prompts have 64 tokens. `--wllama` is what `npm pack @wllama/wllama`
unpacks to, `--gguf` a file for it to run beside a precision, made by `otaro export --to gguf`; its time is the one it tells
itself, the mean of a round, of which the best counts, beside ours taken likewise. Also prints how long a page takes to its
first token, from nothing and from its storage. Ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from common import ROOT, finish

import otaro
from otaro.kernels import cpu
from otaro.runtime.decode import Decoder
from otaro.web.server import server
from otaro.web.site import write_site

TOKENS, PROMPT, LONG_PROMPT = 16, list(range(100, 116)), list(range(100, 164))
COLUMNS = ("wasm", "avx512", "avx2", "/avx512", "/avx2", "prompt", "wasm, mean", "wllama", "/wllama")
WORKER = Path(__file__).with_name("web_worker.js")
START = """
    window.worker = new Worker("./web_worker.js", { type: "module" });
    window.ask = (what) => new Promise((resolve, reject) => {
        worker.onmessage = ({ data }) => ("error" in data ? reject(new Error(data.error)) : resolve(data));
        worker.postMessage(what);
    });
"""
WLLAMA = """
    (async () => {
        const { Wllama } = await import("./wllama/esm/index.js");
        const quiet = { debug() {}, log() {}, warn() {}, error() {} };
        const one = new Wllama({ default: "./wllama/esm/wasm/wllama.wasm" }, { suppressNativeLog: true, logger: quiet });
        await one.loadModel([await (await fetch(FILE)).blob()], { n_threads: 1, n_ctx: 256, n_gpu_layers: 0 });
        (window.theirs ??= {})[NAME] = one;
        return one.isMultithread();
    })()
"""
THEIR_TOKENS = """
    (async () => {
        const { timings } = await theirs[NAME].createCompletion({
            prompt: "The statement of the day is that", max_tokens: COUNT, temperature: 0, ignore_eos: true,
        });
        return timings.predicted_per_token_ms / 1e3;
    })()
"""


def main() -> None:
    options = parsed()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder) / "site"
        write_site(options.directory, site, name="bench")
        shutil.copyfile(WORKER, site / WORKER.name)
        (site / "empty.html").write_text("<!doctype html>\n")
        ggufs = dict(one.split("=", 1) for one in options.gguf)
        if options.wllama:
            shutil.copytree(options.wllama, site / "wllama")
            for precision, path in ggufs.items():
                shutil.copyfile(path, site / f"{precision}.gguf")
        running = server(site)
        threading.Thread(target=running.serve_forever, daemon=True).start()
        sys.path.insert(0, str(ROOT))
        browser = importlib.import_module("tests.serve.browser").Browser(Path(folder) / "profile")
        try:
            measure(options, browser, f"http://localhost:{running.server_port}/", ggufs if options.wllama else {})
        finally:
            browser.close()
            running.shutdown()


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--wllama", type=Path)
    parser.add_argument("--gguf", action="append", default=[], metavar="PRECISION=FILE")
    return parser.parse_args()


def measure(options: argparse.Namespace, browser: Any, url: str, ggufs: dict[str, str]) -> None:
    first = {visit: first_token(browser, url) for visit in ("first", "second")}
    browser.open(url + "empty.html")
    browser.evaluate(START)
    browser.evaluate("ask({ what: 'open' })")
    for precision in ggufs:
        script = WLLAMA.replace("FILE", json.dumps(f"{precision}.gguf")).replace("NAME", json.dumps(precision))
        threads = browser.evaluate(script)
        assert not threads, "wllama took several threads"
    model = otaro.load(options.directory)
    decoder = Decoder.of(model)
    result: dict[str, Any] = {"directory": str(options.directory), "rounds": options.rounds, "first_token_s": first}
    print(f"{'':6}" + "".join(f"{name:>12}" for name in COLUMNS))
    natives = [name for name in ("avx512", "avx2") if name in cpu.available()]
    times: dict[tuple[str, int], float] = {}

    def note(name: str, bits: int, seconds: float) -> None:
        times[name, bits] = min(times.get((name, bits), float("inf")), seconds)

    for _ in range(options.rounds):
        for bits in range(3, 9):
            ours = asked(browser, what="decode", bits=bits, prompt=PROMPT, count=TOKENS)
            note("wasm", bits, ours["shortest"])
            note("wasm, mean", bits, ours["mean"])
            note("prompt", bits, asked(browser, what="read", bits=bits, prompt=LONG_PROMPT)["mean"])
            for name in natives:
                note(name, bits, natively(decoder, name, bits))
            if f"E5M{bits}" in ggufs:
                note("wllama", bits, by_wllama(browser, f"E5M{bits}"))
    for bits in range(3, 9):
        rates = {name: 1 / seconds for (name, at), seconds in times.items() if at == bits}
        rates |= {f"/{name}": rates["wasm"] / rates[name] for name in natives}
        if "wllama" in rates:
            rates["/wllama"] = rates["wasm, mean"] / rates["wllama"]
        cells = [rates.get(name) for name in COLUMNS]
        print(f"E5M{bits:<3}" + "".join(f"{'':12}" if cell is None else f"{cell:12.2f}" for cell in cells))
        result[f"E5M{bits}"] = rates
    print(f"seconds to the first token: {first['first']:.2f}, from storage {first['second']:.2f}")
    finish(result)


def natively(decoder: Decoder, instructions: str, bits: int) -> float:
    cpu.choose(instructions)
    precisions = bytes([bits] * len(decoder.description.precisions()))
    cache = decoder.new_cache()
    logits = decoder.forward(PROMPT, cache, bits=precisions)
    taken = []
    for _ in range(TOKENS):
        started = time.perf_counter()
        logits = decoder.forward([int(logits.argmax())], cache, bits=precisions)
        taken.append(time.perf_counter() - started)
    return min(taken)


def asked(browser: Any, **what: Any) -> dict[str, float]:
    """What the worker measured."""
    found: dict[str, float] = browser.evaluate(f"ask({json.dumps(what)})")
    return found


def by_wllama(browser: Any, precision: str) -> float:
    script = THEIR_TOKENS.replace("NAME", json.dumps(precision)).replace("COUNT", str(TOKENS))
    return float(browser.evaluate(script))


def first_token(browser: Any, url: str) -> float:
    """Seconds from opening the page to its first word of an answer."""
    started = time.perf_counter()
    browser.open(url)
    browser.wait("!document.getElementById('send').disabled", 300)
    browser.click("#prompt")
    browser.type("Once upon a time")
    browser.press("Enter")
    browser.wait("document.querySelector('.answer .said')?.textContent.length", 60)
    seconds = time.perf_counter() - started
    browser.press("Escape")
    browser.wait("document.getElementById('precision').max === '8'", 300)
    return seconds


if __name__ == "__main__":
    main()
