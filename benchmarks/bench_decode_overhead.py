"""What a token costs besides the products with weights: `python benchmarks/bench_decode_overhead.py [DIR]`.

Prints the time of a token by the decoder and by transformers' loop over the same packed modules, the time Python takes to ask
all modules for their precision, and that of choosing a token. Ends with one line of JSON.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import DynamicCache
from transformers.generation import TemperatureLogitsWarper, TopPLogitsWarper

import otaro
from otaro.runtime.decode import Decoder
from otaro.runtime.modules import bits_of
from otaro.runtime.sample import Sampler


def best(run: Callable[[], object], times: int = 50) -> float:
    """The shortest of some runs, in microseconds."""
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        run()
        taken.append(time.perf_counter() - started)
    return 1e6 * min(taken)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        if len(sys.argv) > 1:
            nested = Path(sys.argv[1])
        else:
            nested = Path(folder) / "tiny"
            otaro.pack("builtin", nested)
        model = otaro.load(nested, "E5M4")
        decoder = Decoder.of(model)
        cache, theirs = decoder.new_cache(), DynamicCache(config=model.config)
        logits = decoder.forward(list(range(3, 40)), cache)
        token = torch.tensor([[5]])
        with torch.no_grad():
            model(torch.arange(3, 40)[None], past_key_values=theirs)
            figures = {
                "decoder, a token": best(lambda: decoder.forward([5], cache)),
                "transformers, a token": best(lambda: model(token, past_key_values=theirs)),
            }
        warpers = [TemperatureLogitsWarper(0.8), TopPLogitsWarper(0.9)]
        figures["precisions of all modules"] = best(lambda: bits_of(decoder.description.modules, model.sefp.nested))
        figures["likeliest token"] = best(lambda: Sampler([], False).choose(token, logits[None]))
        figures["token by top-p"] = best(lambda: Sampler(warpers, True).choose(token, logits[None]))
        figures["token by transformers' top-p"] = best(
            lambda: torch.multinomial(warpers[1](token, warpers[0](token, logits[None].clone())).softmax(-1), 1)
        )
    for name, microseconds in figures.items():
        print(f"{name:30} {microseconds:10.1f} us")
    print(json.dumps({"modules": len(model.sefp.modules), "threads": torch.get_num_threads(), "microseconds": figures}))


if __name__ == "__main__":
    main()
