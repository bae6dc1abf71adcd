"""What drafts gain on a GPU: LLaMA-3-8B's shapes, E5M8 as the judge, acceptance measured on a real model.

    python benchmarks/bench_draft.py --record DIR --text FILE --trace FILE    # on a CPU: minutes
    python benchmarks/bench_draft.py --trace FILE                             # on a GPU: a minute

Weights are random, so drafts would never be right. So a nested model DIR goes on with passages of a text
first, and with the same passages to be said again, as in `otaro bench DIR --draft`, by the choices that a GPU
makes. What its loop did is written down, pass by pass: who drafted, how many tokens, and how many of them
were right. On the GPU the same passes are made: steps of the draft that go on by themselves, one pass over
all that was drafted, and the tokens that were wrong forgotten. Beside it E5M8 alone, a step ahead of the
host. Contenders take turns, and medians of rounds count.
"""

from __future__ import annotations

import json
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gpu
import torch
from common import arguments, finish
from llama3 import fill, packed_model

from otaro.evaluate import drafts as bench
from otaro.runtime import draft as drafting
from otaro.runtime.decode import Decoder
from otaro.runtime.draft import PROMPT, Draft
from otaro.runtime.gpu import GpuDecoder
from otaro.runtime.load import load, load_tokenizer
from otaro.runtime.loop import Loop
from otaro.sefp.precision import Precision

CONTEXT = 2000
NEEDED = {"E5M3": 1.25, "prompt": 1.5}
"""Times E5M8 alone: on prose, and on a text that repeats itself."""
DRAFTS = ("E5M3", "prompt", "prompt+E5M3")
JUDGE = Precision("E5M8")
ALONE = "alone"


class Pass(NamedTuple):
    """Of the judge, after what was drafted for it."""

    draft: str
    """A precision or "prompt"; empty where nothing was drafted."""
    drafted: int
    right: int


def record(directory: Path, text: str, settings: bench.Settings) -> dict[str, list[Pass]]:
    """By kind of text and draft, the passes that a GPU would make."""
    model, tokenizer = load(str(directory), JUDGE), load_tokenizer(directory)
    found: dict[str, list[Pass]] = {}
    accept, decode = Loop._accept, Loop._decode

    def accepted(loop: Any, one: Any, bits: bytes, ids: list[int], draft: list[Any], *rest: Any) -> None:
        before = one.new
        accept(loop, one, bits, ids, draft, *rest)
        who = "" if not draft else PROMPT if one.drafter._kind == PROMPT else str(one.drafter.draft.precision)
        passes.append(Pass(who, len(draft), one.new - before - 1))

    def decoded(loop: Any, some: list[Any], **options: Any) -> None:
        decode(loop, some, **options)
        passes.append(Pass("", 0, 0))

    Loop._accept, Loop._decode = accepted, decoded  # type: ignore[method-assign,assignment]
    Decoder.costs = GpuDecoder.costs
    drafting._SURE = 0.0  # a GPU that goes on by itself is not asked
    for kind, prompts in bench._texts(tokenizer, text, settings).items():
        for name in DRAFTS:
            passes = found[f"{name}, {kind}"] = []
            for ids in prompts:
                bench._continued(model, ids, JUDGE, Draft.of(name), settings)
    return found


def plain(decoder: Any, cache: Any, tokens: int) -> None:
    """Tokens by the judge alone, a step ahead of the host."""
    begun = decoder.begin([1], cache, [0], [decoder.description.all_at(JUDGE)])
    steps = [decoder.advance()]
    for _ in range(tokens - 1):
        steps.append(decoder.advance())
        decoder.chosen(steps.pop(0))
    decoder.chosen(steps.pop())
    decoder.end(begun)


def drafted(decoder: Any, cache: Any, passes: list[Pass]) -> None:
    """What the loop does in these passes."""
    judge = decoder.description.all_at(JUDGE)
    for one in passes:
        start, tokens = cache.lengths[0], [2] * one.drafted
        if one.draft not in ("", PROMPT):
            begun = decoder.begin([1], cache, [0], [decoder.description.all_at(Precision(one.draft))])
            steps = [decoder.advance() for _ in range(one.drafted)]
            tokens = [decoder.chosen(step)[0] for step in steps]
            decoder.end(begun)
            cache.check()
            cache.crop(start, 0)
        count = 1 + one.drafted
        decoder.likeliest([1, *tokens], cache, [0] * count, [judge] * count)
        cache.crop(start + one.right + 1, 0)


def replay(traces: dict[str, list[Pass]], rounds: int) -> dict[str, Any]:
    """Times E5M8 alone, by kind of text and draft."""
    gpu.require()
    decoder = GpuDecoder(packed_model())
    made = {name: sum(1 + one.right for one in passes) for name, passes in traces.items()}
    made[ALONE] = max(made.values())
    cache = decoder.new_cache(None, capacity=CONTEXT + made[ALONE] + 2 * sum(drafting.MOST.values()))
    fill(cache, CONTEXT)
    print(f"{torch.cuda.get_device_name()}, LLaMA-3-8B's shapes behind {CONTEXT} tokens, {JUDGE}")
    contenders = {ALONE: partial(plain, decoder, cache, made[ALONE])}
    contenders |= {name: partial(drafted, decoder, cache, passes) for name, passes in traces.items()}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(1 + rounds):  # graphs are captured in the first
        for name, run in contenders.items():
            cache.crop(CONTEXT)
            torch.cuda.synchronize()
            started = time.perf_counter()
            run()
            torch.cuda.synchronize()
            if number:
                times[name].append((time.perf_counter() - started) / made[name])
    rows: dict[str, Any] = {}
    for name, passes in traces.items():
        gain = statistics.median(a / b for a, b in zip(times[ALONE], times[name], strict=True))
        speeds = {one: 1 / statistics.median(times[one]) for one in (ALONE, name)}
        per_pass = made[name] / len(passes)
        rows[name] = {"tokens_per_s": speeds, "gain": gain, "per_pass": per_pass, "right": right(passes)}
        shares = " ".join(f"{share:.0%}" for share in rows[name]["right"][:4])
        print(
            f"{name:20} {speeds[name]:6.1f} tokens/s, alone {speeds[ALONE]:6.1f}: {gain:.2f}x; "
            f"{per_pass:.1f} tokens a pass; right at position 1, 2, ...: {shares}"
        )
    return rows


def right(passes: list[Pass]) -> list[float]:
    """By position, of the drafts that had a token there the share that was right up to it."""
    most = max(one.drafted for one in passes)
    tried = [[one for one in passes if one.drafted > position] for position in range(most)]
    return [
        sum(one.right > position for one in some) / len(some) for position, some in enumerate(tried) if some
    ]


def main(words: list[str] | None = None) -> None:
    """Write down passes, or print what they gain and one line of JSON."""
    parser = arguments(__doc__)
    parser.add_argument("--trace", type=Path, required=True, help="passes by kind of text and draft, JSON")
    parser.add_argument("--record", type=Path, metavar="DIR", help="write them down: of this nested model")
    parser.add_argument("--text", type=Path, help="that it goes on with")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args(words)
    if asked.record:
        if asked.text is None:
            parser.error("--record goes on with passages of a text: give --text FILE")
        found = record(asked.record, asked.text.read_text(), bench.Settings(texts=8, tokens=96))
        asked.trace.write_text(json.dumps(found) + "\n")
        for name, passes in found.items():
            print(f"{name}: {len(passes)} passes, {sum(1 + one.right for one in passes)} tokens")
        return
    traces = {
        name: [Pass(*one) for one in passes] for name, passes in json.loads(asked.trace.read_text()).items()
    }
    rows = replay(traces, asked.rounds)
    for name, needed in NEEDED.items():
        kind = f"{name}, {'copy' if name == PROMPT else 'prose'}"
        verdict = "holds" if rows[kind]["gain"] >= needed else "MISSED"
        print(f"{verdict:8}{kind}: {rows[kind]['gain']:.2f} times {JUDGE} alone, asked for {needed}")
    finish({**gpu.machine(), "benchmark": "draft", "rows": rows})


if __name__ == "__main__":
    main()
