"""What a draft gains on a GPU: LLaMA-3-8B's shapes, E5M8 drafted at E5M3, acceptance measured elsewhere.

    python benchmarks/bench_draft.py                                     # a minute
    python benchmarks/bench_draft.py --accept 0.8,0.85,0.9 --draft E5M4

Weights are random, so drafts would never be right. How many tokens of a draft are right is drawn instead,
from the shares of `--accept`, which `otaro bench MODEL --draft E5M3` prints (at position i: of the drafts
that were right up to there). All else is what the loop does (`runtime.loop`, `runtime.draft`): k steps that
the GPU makes by itself, one pass over k + 1 tokens with the logits of each, their argmax, and the tokens that
were wrong forgotten. Beside it the same precision alone, which goes on by itself too. Contenders take turns,
and medians of rounds count.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import gpu
import torch
from common import arguments, finish
from llama3 import fill, packed_model

from otaro.runtime.gpu import GpuDecoder
from otaro.runtime.sample import argmax
from otaro.sefp.precision import Precision

CONTEXT, TOKENS, NEEDED = 2000, 96, 1.25
ACCEPTED = "0.74,0.81,0.88,0.88,0.9,0.9"
MOST = 6


def plain(decoder: Any, cache: Any, bits: bytes) -> int:
    """Tokens by the judge alone, a step ahead of the host."""
    begun = decoder.begin([1], cache, [0], [bits])
    steps = [decoder.advance()]
    for _ in range(TOKENS - 1):
        steps.append(decoder.advance())
        decoder.chosen(steps.pop(0))
    decoder.chosen(steps.pop())
    decoder.end(begun)
    return TOKENS


def drafted(decoder: Any, cache: Any, judge: bytes, draft: bytes, count: int, accepted: list[float]) -> int:
    """Tokens by a draft of `count` and its judge."""
    chances, made = random.Random(0), 0
    while made < TOKENS:
        start = cache.lengths[0]
        begun = decoder.begin([1], cache, [0], [draft])
        steps = [decoder.advance() for _ in range(count)]
        tokens = [decoder.chosen(step)[0] for step in steps]
        decoder.end(begun)
        cache.check()
        cache.crop(start, 0)
        argmax(decoder.step([1, *tokens], cache, [0] * (count + 1), [judge] * (count + 1)))
        right = 0
        while right < count and chances.random() < accepted[min(right, len(accepted) - 1)]:
            right += 1
        cache.crop(start + right + 1, 0)
        made += right + 1
    return made


def main(words: list[str] | None = None) -> None:
    """Print a row for each length of a draft, and one line of JSON."""
    parser = arguments(__doc__)
    parser.add_argument("--draft", type=Precision, default=Precision("E5M3"))
    parser.add_argument("--judge", type=Precision, default=Precision("E5M8"))
    parser.add_argument("--accept", default=ACCEPTED)
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args(words)
    accepted = [float(one) for one in asked.accept.split(",")]
    gpu.require()
    name = torch.cuda.get_device_name()
    decoder = GpuDecoder(packed_model())
    cache = decoder.new_cache(None, capacity=CONTEXT + TOKENS + 2 * MOST)
    fill(cache, CONTEXT)
    judge, draft = (decoder.description.all_at(one) for one in (asked.judge, asked.draft))
    contenders: dict[str, Callable[[], int]] = {"alone": partial(plain, decoder, cache, judge)}
    for count in range(1, MOST + 1):
        contenders[str(count)] = partial(drafted, decoder, cache, judge, draft, count, accepted)
    times: dict[str, list[float]] = {one: [] for one in contenders}
    for number in range(2 + asked.rounds):  # graphs are captured the second time
        for one, run in contenders.items():
            cache.crop(CONTEXT)
            started = time.perf_counter()
            made = run()
            if number > 1:
                times[one].append((time.perf_counter() - started) / made)
    rows = {}
    print(f"{name}, {asked.judge} drafted at {asked.draft}, behind {CONTEXT} tokens; accepted {asked.accept}")
    for one, mine in times.items():
        gains = [before / seconds for before, seconds in zip(times["alone"], mine, strict=True)]
        rows[one] = {"tokens_per_s": 1 / statistics.median(mine), "gain": statistics.median(gains)}
        print(f"{one:>6}  {rows[one]['tokens_per_s']:8.1f} tokens/s  {rows[one]['gain']:.2f}x")
    best = max(row["gain"] for row in rows.values())
    verdict = "holds" if best >= NEEDED else "missed"
    print(f"{verdict}: {best:.2f} times {asked.judge} alone, asked for {NEEDED}")
    about = {"gpu": name, "accepted": accepted, "seconds_alone": statistics.median(times["alone"])}
    finish(about | {"rows": rows, "torch_cuda": torch.version.cuda})


if __name__ == "__main__":
    main()
