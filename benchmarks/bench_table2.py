"""The paper's Table 2 on a GPU: memory and speed of LLaMA-3-8B at every precision, and what makes them up.

    python benchmarks/bench_table2.py                         # everything, a few minutes
    python benchmarks/bench_table2.py --only layer,decode     # some parts
    python benchmarks/bench_table2.py --quick                 # fewer rounds

Weights are random: only their shapes matter here. Parts:

    layer         every product of a layer with 1 to 128 tokens, the head's with one, beside cuBLAS in float16
    batch         one large matrix times 1 to 128 tokens: where integers, then halves of planes stop paying
    prompts       500 and 4,000 tokens read by our own decoder, in float16 and packed
    transformers  float16 through transformers, compiled with a static cache, behind 2,000 tokens
    decode        float16 and every precision through our own decoder, keys and values in float16 and packed
    api           E5M4 by `generate`, beside the decoder alone

Matrices are copied until they take 200 MB, so that they come from memory; launches are captured into graphs,
contenders replayed in turn, and medians count. Results are checked by the reference before they are timed.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gpu
import table2_decode
import table2_products
import torch
from common import arguments, finish
from gpu import say

SECTIONS: dict[str, Callable[[int], dict[str, Any]]] = {
    "layer": table2_products.layer,
    "batch": table2_products.batch,
    "prompts": table2_decode.prompts,
    "transformers": table2_decode.through_transformers,
    "decode": table2_decode.decode,
    "api": table2_decode.api,
}
E5M4 = table2_decode.E5M4
SUMMED = {"E5M4": 2.6, "E5M3": 3.0, "E5M8": 1.4}
"""How many times as fast as cuBLAS in float16 the products of one token must be, all together."""
TIMES_HALF = {"E5M4": {4: 2.3, 8: 2.2, 16: 2.0, 32: 1.6, 64: 1.2}, "E5M8": {8: 1.3, 16: 1.1}}
"""The same of a layer's products of so many tokens."""
PROMPTS = {500: 1.4, 4000: 1.15}
"""How many times as long as through our own decoder in float16 a prompt of so many tokens may take."""
AGAINST_TRANSFORMERS, AGAINST_OWN_HALF = 2.45, 2.0
"""How many times as fast as float16 a token at E5M4 must be."""
MEMORY_GIB = 4.88  # of weights and cache, both at E5M4
TOKENS_PER_S = 530
"""Of E5M4 behind 2,000 tokens in float16."""
BY_GENERATE = 1 - (1 - 437 / 505) / 2
"""Its share by `generate`: half of what was once lost comes back."""


class Bar(NamedTuple):
    """Something that was asked for."""

    what: str
    found: float
    asked: float
    at_least: bool = True

    @property
    def holds(self) -> bool:
        """Whether it was reached."""
        return self.found >= self.asked if self.at_least else self.found <= self.asked


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", default=",".join(SECTIONS), help="parts to run, with commas between them")
    parser.add_argument("--quick", action="store_true", help="5 rounds of each comparison in place of 15")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the last line to a file too")
    asked = parser.parse_args()
    parts = asked.only.split(",")
    if unknown := [part for part in parts if part not in SECTIONS]:
        parser.error(f"--only: {', '.join(unknown)} is none of {', '.join(SECTIONS)}")
    if asked.json and not asked.json.parent.is_dir():
        parser.error(f"--json {asked.json}: there is no folder {asked.json.parent}")
    gpu.require()
    torch.manual_seed(torch.seed() % 2**32)  # fresh numbers every time; checks must hold for any
    rounds = 5 if asked.quick else 15
    about = gpu.machine()
    results: dict[str, Any] = {}
    for part in parts:
        try:
            results[part] = SECTIONS[part](rounds)
        except Exception as error:  # a GPU's time is dear: other parts still run, and the failure is told
            traceback.print_exc(file=sys.stdout)
            results[part] = {"failed": f"{type(error).__name__}: {error}"}
        gpu.release()
    table2_decode.print_table(results)
    bars = list(judged(results))
    print_bars(bars)
    outcome = {**about, "benchmark": "table2", "rounds": rounds, **results}
    finish({**outcome, "bars": [{**bar._asdict(), "holds": bar.holds} for bar in bars]}, asked.json)
    if failures := [part for part in parts if "failed" in results[part]] + list(wrong(results)):
        sys.exit(f"failed or wrong: {', '.join(failures)}")


def judged(results: dict[str, Any]) -> Iterator[Bar]:
    """What was asked for, as far as the parts that ran can tell."""
    if total := results.get("layer", {}).get("summed_seconds"):
        one = results["layer"]["model_seconds"]
        for precision, factor in SUMMED.items():
            what = f"products of one token at {precision}, times float16"
            yield Bar(what, one["float16"] / one[precision], factor)
        for precision, by_tokens in TIMES_HALF.items():
            for tokens, factor in by_tokens.items():
                one = total[str(tokens)]
                what = f"a layer's products of {tokens} tokens at {precision}, times float16"
                yield Bar(what, one["float16"] / one[precision], factor)
        slower = max(one["E5M3"] / one["E5M4"] for one in total.values())
        yield Bar("time of E5M3 beside E5M4 with one token or several", slower, 1.0, at_least=False)
    if seconds := results.get("prompts", {}).get("seconds"):
        for tokens, factor in PROMPTS.items():
            one = seconds[str(tokens)]
            for precision in map(str, table2_products.MULTIPLIED):
                what = f"reading {tokens} tokens at {precision}, time beside float16 of our own"
                yield Bar(what, one[precision] / one["float16"], factor, at_least=False)
    if speeds := results.get("api", {}).get("tokens_per_s"):
        for name in ("generate", "generate, streamed"):
            yield Bar(f"{name}: share of the decoder's tokens", speeds[name] / speeds["decoder"], BY_GENERATE)
    rows, theirs = results.get("decode", {}).get("rows"), results.get("transformers", {}).get("tokens_per_s")
    if not rows:
        return
    own = rows[table2_decode.HALF]["tokens_per_s"]
    for cache in table2_decode.CACHES:
        row = rows[table2_decode.row_name(E5M4, cache)]
        speed, title = row["tokens_per_s"], f"a token at E5M4 with the {cache} cache"
        if theirs:
            yield Bar(f"{title}, times transformers compiled", speed / theirs, AGAINST_TRANSFORMERS)
        yield Bar(f"{title}, times float16 of our own", speed / own, AGAINST_OWN_HALF)
    speed = rows[table2_decode.row_name(E5M4, "float16")]["tokens_per_s"]
    yield Bar("tokens a second at E5M4 with the float16 cache", speed, TOKENS_PER_S)
    row = rows[table2_decode.row_name(E5M4, "E5M4")]
    total, held = row["accounted"]["total_gib"], row["allocated_gib"]
    yield Bar("GiB of weights and cache at E5M4, by their sizes", total, MEMORY_GIB, at_least=False)
    yield Bar("GiB of weights and cache at E5M4, as allocated", held, MEMORY_GIB, at_least=False)


def print_bars(bars: list[Bar]) -> None:
    if bars:
        say("\nasked for")
    for bar in bars:
        sign, verdict = ">=" if bar.at_least else "<=", "holds" if bar.holds else "MISSED"
        say(f"{verdict:8}{bar.what}: {bar.found:.5g} {sign if bar.holds else 'not ' + sign} {bar.asked:g}")


def wrong(results: Any, path: str = "") -> Iterator[str]:
    if isinstance(results, dict):
        if results.get("wrong"):
            yield path
        for key, value in results.items():
            yield from wrong(value, f"{path}/{key}" if path else str(key))


if __name__ == "__main__":
    main()
