"""A server under load: many clients at once, every request at its own precision.

    python benchmarks/bench_serve.py DIR [--clients 16] [--seconds 120] [--against llama.cpp]

Starts `otaro serve DIR` and asks it, by one client and by many at once in turns, for streamed answers to a
fixed set of requests: prompts of different lengths, all precisions in turns, half of them sampled with a
seed. Every answer is compared with the one that the same request got alone. Prints tokens a second, which
count until a round's time is up, the share of the prompts' tokens that the server had in its cache, the time
until the first token by precision, and memory of the server after a tenth of the time, when all have begun, a
half, and at the end. Clients share the cores with the server: they send plain requests and read little of the
answers.

Requests come again, so that a server which keeps prompts need not read them. `--fresh` begins each prompt
with a number of its own, for one client and for many alike: then all of it is read, every time. 48 of these
requests are asked again alone.

`--against llama.cpp` gives the same prompts and numbers of tokens to llama.cpp's server (`pip install
'llama-cpp-python[server]'`, `--llama-python` where it is installed elsewhere) on a GGUF file at Q5_0 of the
same weights; if it cannot be started, it is left out, and why is said. Exits with 1 if an answer of ours
failed or differed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
from common import arguments, finish

from otaro.builtin.documentation import documentation_text
from otaro.export.run import export
from otaro.sefp.precision import PRECISIONS

ROUNDS = 4  # of one client, then many
WORDS = (5, 20, 60, 120)  # of prompts, in turns
AGAIN = 48  # answers to prompts of their own that are asked for again
PATIENCE = 60  # seconds for answers that are under way when the time is up
Body = dict[str, Any]


@dataclass(frozen=True)
class Contender:
    """A server: how it is started, and what each request says besides prompt and length."""

    name: str
    command: list[str]
    body: Body
    precisions: list[str]
    """Asked for in turns; one that is empty for a server that has no choice."""


@dataclass
class Result:
    """What became of one request."""

    case: int
    asked: Body = field(default_factory=dict)
    text: str = ""
    timely: int = 0
    """Tokens that came before the round was over."""
    prompt: int = 0
    cached: int = 0
    """Of the prompt's tokens, those that the server says it had."""
    first: float = 0.0
    """Seconds until the first piece of text."""
    error: str = ""


@dataclass
class Load:
    """A number of clients, in all rounds."""

    clients: int
    seconds: float
    """Of a round."""
    results: list[Result] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    """Tokens a second of each round, of all clients together."""
    memory: list[int] = field(default_factory=list)
    """Resident bytes of the server, as time went on."""

    @property
    def cached(self) -> float:
        """The share of the prompts' tokens that need not be read."""
        whole = sum(result.prompt for result in self.results)
        return sum(result.cached for result in self.results) / max(1, whole)

    def first_tokens(self, number: int, of: int) -> list[float]:
        """Seconds until the first token, of requests at one of so many precisions."""
        return [one.first for one in self.results if not one.error and one.case % of == number]


class DidNotStart(Exception):
    """A server; says what it said."""


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--clients", type=int, default=16)
    seconds = "of the load, in all; one client gets a quarter"
    parser.add_argument("--seconds", type=float, default=120.0, help=seconds)
    parser.add_argument("--cases", type=int, default=48, help="different requests")
    parser.add_argument("--tokens", type=int, default=48, help="of an answer")
    parser.add_argument("--fresh", action="store_true", help="no prompt comes twice")
    parser.add_argument("--against", choices=["llama.cpp"])
    parser.add_argument("--llama-python", default=sys.executable)
    args = parser.parse_args()
    cases = make_cases(args.cases, args.tokens)
    summaries = []
    with tempfile.TemporaryDirectory() as scratch:
        for contender in contenders(args, Path(scratch)):
            try:
                with started(contender) as (port, process):
                    summaries.append(asyncio.run(measured(contender, cases, port, process, args)))
                    print_summary(summaries[-1])
            except DidNotStart as error:
                if not summaries:
                    sys.exit(str(error))
                print(f"\n{contender.name}: left out. {error}")
    finish({"benchmark": "serve", "model": args.directory.name, "fresh": args.fresh, "servers": summaries})
    if summaries[0]["errors"] or summaries[0]["different"]:
        sys.exit(1)


def make_cases(number: int, tokens: int) -> list[Body]:
    """Requests: half of the answers are sampled."""
    words = [word for word in documentation_text("heldout").split() if word.strip(".,;:()").isalpha()]
    cases = []
    for case in range(number):
        length = WORDS[case % len(WORDS)]
        start = 131 * case % (len(words) - length)
        sampled = {"temperature": 0.8, "top_p": 0.95} if case % 2 else {"temperature": 0.0}
        prompt = " ".join(words[start : start + length])
        cases.append({"prompt": prompt, "max_tokens": tokens, "seed": case, **sampled})
    return cases


def contenders(args: argparse.Namespace, scratch: Path) -> Iterator[Contender]:
    options = f"--max-sequences {args.clients} --name model --port".split()
    command = [sys.executable, "-m", "otaro", "serve", str(args.directory), *options]
    extra = {"ignore_eos": True, "stream_options": {"include_usage": True}}
    yield Contender("otaro serve", command, extra, [*map(str, PRECISIONS)])
    if args.against:
        gguf = scratch / "model.gguf"
        export(args.directory, gguf, precision="E5M8", to="gguf", type="Q5_0")
        options = f"--n_threads {os.cpu_count()} --n_ctx 2048 --interrupt_requests False --port".split()
        server = [args.llama_python, "-m", "llama_cpp.server", "--model", str(gguf), *options]
        no_end = {"logit_bias": {"2": -100.0}, "logit_bias_type": "input_ids"}
        yield Contender("llama.cpp's server, Q5_0", server, no_end, [""])


@contextmanager
def started(contender: Contender) -> Iterator[tuple[int, psutil.Process]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "OMP_NUM_THREADS": str(os.cpu_count()), "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([*contender.command, str(port)], stdout=log, stderr=log, env=environment)
        try:
            end = time.monotonic() + 120
            while True:
                if process.poll() is not None or time.monotonic() > end:
                    log.seek(0)
                    said = log.read().decode(errors="replace")[-2000:]
                    raise DidNotStart(f"{contender.name} did not start:\n{said}")
                try:
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                except OSError:
                    time.sleep(0.2)
            yield port, psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait()


async def measured(
    contender: Contender, cases: list[Body], port: int, process: psutil.Process, args: argparse.Namespace
) -> dict[str, Any]:
    """One client and many in turns."""
    precisions, compared, serial = contender.precisions, contender.precisions != [""], count(1)

    def body(case: int) -> Body:
        asked = cases[case] | contender.body | {"stream": True}
        if precision := precisions[case % len(precisions)]:
            asked["precision"] = precision
        if args.fresh:
            asked["prompt"] = f"{next(serial)}. {asked['prompt']}"
        return asked

    await ask(port, 0, body(0))  # whatever a first request loads
    first = range(len(cases)) if compared and not args.fresh else ()
    alone = {case: (await ask(port, case, body(case))).text for case in first}
    each = args.seconds / ROUNDS
    one, many = Load(1, each / 4), Load(args.clients, each)
    for number in range(ROUNDS):
        for load in (one, many):
            await round_of(load, port, body, len(cases), process, 5 * number)
    errors = [result.error for result in one.results + many.results if result.error]
    said = [result for result in many.results if not result.error] if compared else []
    if args.fresh:
        said = said[:: max(1, len(said) // AGAIN)]
        different = sum([(await ask(port, result.case, result.asked)).text != result.text for result in said])
    else:
        different = sum(result.text != alone[result.case] for result in said)
    table = {}
    for number, precision in enumerate(precisions):
        found, single = (some.first_tokens(number, len(precisions)) for some in (many, one))
        if len(found) > 1:
            row = {"p50": statistics.median(found), "p95": statistics.quantiles(found, n=20)[-1]}
            table[precision or "all"] = row | {"one": statistics.median(single) if single else float("nan")}
    gains = [rate / single for rate, single in zip(many.rates, one.rates, strict=True)]
    resident = [many.memory[at] for at in (len(many.memory) // 10, len(many.memory) // 2, -1)]
    return {
        "name": contender.name, "clients": args.clients, "seconds": args.seconds,
        "answers": len(many.results), "tokens_per_second": statistics.fmean(many.rates),
        "one_client": statistics.fmean(one.rates), "gain": statistics.median(gains), "gains": gains,
        "cached": [many.cached, one.cached],
        "errors": len(errors), "first_error": errors[:1], "different": different, "compared": len(said),
        "memory": [*resident, max(many.memory)], "first_token": table,
    }  # fmt: skip


def print_summary(found: dict[str, Any]) -> None:
    gains = ", ".join(f"{gain:.2f}" for gain in found["gains"])
    load = f"{found['clients']} clients for {found['seconds']:.0f} s"
    print(f"\n{found['name']}: {load}, {found['answers']} answers")
    rates = f"{found['tokens_per_second']:.1f}, one client {found['one_client']:.1f}"
    print(f"  tokens a second      {rates}: {found['gain']:.2f} times ({gains})")
    print("  prompts in the cache {:.0%} of the tokens, one client {:.0%}".format(*found["cached"]))
    print(f"  errors               {found['errors']} {found['first_error'] or ''}")
    if found["compared"]:
        print(f"  other than alone     {found['different']} of {found['compared']}")
    told = "after a tenth {:.0f} MB, a half {:.0f} MB, at the end {:.0f} MB, most {:.0f} MB"
    print(f"  memory               {told.format(*(size / 1e6 for size in found['memory']))}")
    print(f"  first token, ms      {'':>8}{'p50':>8}{'p95':>8}{'one client':>12}")
    for precision, row in found["first_token"].items():
        p50, p95, one = (1e3 * value for value in row.values())
        print(f"{'':23}{precision:>8}{p50:>8.0f}{p95:>8.0f}{one:>12.0f}")


async def round_of(
    load: Load, port: int, body: Callable[[int], Body], cases: int, process: psutil.Process, first: int
) -> None:
    """Clients that ask in turn, each beginning elsewhere; answers under way are waited for a while."""
    start, results = time.perf_counter(), list[Result]()
    load.memory.append(process.memory_info().rss)

    async def client(number: int) -> None:
        case = (first + number * 7) % cases
        while time.perf_counter() - start < load.seconds:
            results.append(await ask(port, case, body(case), start + load.seconds))
            case = (case + 1) % cases

    async def watch() -> None:
        while True:
            await asyncio.sleep(max(load.seconds / 50, 0.1))
            load.memory.append(process.memory_info().rss)

    watching = asyncio.ensure_future(watch())
    asking = [asyncio.ensure_future(client(number)) for number in range(load.clients)]
    _, late = await asyncio.wait(asking, timeout=load.seconds + PATIENCE)
    for task in [watching, *late]:
        task.cancel()
    load.rates.append(sum(result.timely for result in results) / load.seconds)
    load.results += [*results, *[Result(-1, error=f"no answer within {PATIENCE} s of the end")] * len(late)]


async def ask(port: int, case: int, body: Body, until: float = float("inf")) -> Result:
    """One request on a connection of its own; a client this plain takes little of the server's cores."""
    result, started_at = Result(case, body), time.perf_counter()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
        content = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Connection: close\r\nContent-Length: {len(content)}\r\n\r\n"
        writer.write(head.encode() + content)
        status = await reader.readline()
        if b" 200 " not in status:
            said = (await reader.read())[-200:].decode(errors="replace")
            result.error = f"{status.decode().strip()} {said}"
        ended = False
        while line := await reader.readline():
            if not line.startswith(b"data: "):
                continue
            if line.startswith(b"data: [DONE]"):
                ended = True
                break
            event, now = json.loads(line[6:]), time.perf_counter()
            if "error" in event:
                result.error = str(event["error"])
            for choice in event.get("choices", ()):
                ended = ended or choice.get("finish_reason") is not None  # not all say [DONE]
                if choice.get("text"):
                    result.first = result.first or now - started_at
                    result.text += choice["text"]
                    result.timely += now < until
            if usage := event.get("usage"):
                result.prompt = usage.get("prompt_tokens", 0)
                result.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
                if now < until:  # tokens without text of their own count too
                    result.timely = usage["completion_tokens"]
        if not ended and not result.error:
            result.error = "the stream broke off"
        writer.close()
    except (OSError, ValueError) as error:
        result.error = repr(error)
    return result


if __name__ == "__main__":
    main()
