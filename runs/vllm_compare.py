"""vLLM beside our own runtime on one nested directory: the same tokens and probabilities at all six precisions.

Run it twice, as runs/vllm_test.sh does, since the two live with different versions of transformers:

    python runs/vllm_compare.py ours DIR FILE                     # where OTARo is at home: writes FILE
    python runs/vllm_compare.py vllm DIR FILE [--processes 2]     # where vLLM is: reads it, and compares

Both compute in float32. `ours` continues prompts greedily and keeps the log-probabilities of the likeliest tokens at every
position of the whole text. vLLM, one engine that switches, has to give the same ones, and to continue the prompts alike.
Its directory is a copy that lacks the last plane at first: asking for it must be refused, and work once it is there.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from otaro.errors import OtaroError
from otaro.file.header import shard_name
from otaro.sefp.precision import FINEST, PRECISIONS, Precision, of_mantissa_bits

PROMPTS = ["The", "Once upon a time there was a", "def main():\n    return", "In the year 1815 the city of Vienna was"]
TOKENS = 12
LIKELIEST = 3

SUMS = 1e-3
"""Of a log-probability over a whole text: both multiply more than eight tokens with decoded weights, so only the order of
float32 sums differs. Some 2^-24 * sqrt(600) = 1e-6 for each, over 200 products in a row 2e-5, times logits of 20: 4e-4."""

ROUNDING = 3e-2
"""Of one at the end of a text: vLLM adds single tokens, whose activations are rounded to 16 bits, 2^-16 of the largest of a
unit, four times as much of a typical one. Over 200 products in a row 1e-3, times logits of 20: 2e-2."""


def ours(directory: Path, file: Path) -> None:
    import torch

    import otaro
    from otaro.runtime.load import load_tokenizer

    tokenizer, model = load_tokenizer(directory), otaro.load(directory)
    expected: dict[str, list[Any]] = {}
    for precision in PRECISIONS:
        otaro.set_precision(model, precision)
        expected[str(precision)] = answers = []
        for prompt in PROMPTS:
            start: list[int] = tokenizer(prompt)["input_ids"]
            ids = list(start)
            with torch.no_grad():
                while len(ids) < len(start) + TOKENS:
                    ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
                top = model(torch.tensor([ids])).logits[0].log_softmax(-1).topk(LIKELIEST)
            answers.append({"prompt": start, "ids": ids, "likeliest": top.indices.tolist(), "logprobs": top.values.tolist()})
    file.write_text(json.dumps(expected))


def with_vllm(directory: Path, file: Path, processes: int) -> None:
    expected = json.loads(file.read_text())
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / directory.name
        last = shard_name(FINEST)
        shutil.copytree(directory, copy, ignore=shutil.ignore_patterns(last))
        llm = _started(copy, processes)
        _check_refused(llm, of_mantissa_bits(FINEST), last)
        shutil.copyfile(directory / last, copy / last)
        for precision in PRECISIONS:
            _compare(llm, precision, expected)


def _started(directory: Path, processes: int) -> Any:
    from vllm import LLM

    return LLM(
        str(directory),
        quantization="sefp",
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=8,
        tensor_parallel_size=processes,
        disable_log_stats=True,
    )


def _check_refused(llm: Any, precision: Precision, missing: str) -> None:
    import otaro.vllm

    try:
        otaro.vllm.set_precision(llm, precision)
    except OtaroError as error:
        if missing not in str(error):
            raise
        print(f"{precision} without {missing}: refused", flush=True)
    else:
        raise SystemExit(f"{precision} was not refused, though {missing} is missing")


def _compare(llm: Any, precision: Precision, expected: dict[str, list[Any]]) -> None:
    from vllm import SamplingParams

    import otaro.vllm

    otaro.vllm.set_precision(llm, precision)
    answers = expected[str(precision)]
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=LIKELIEST + 1)
    texts = [llm.generate({"prompt_token_ids": one["ids"]}, scored, use_tqdm=False)[0].prompt_logprobs for one in answers]
    furthest = max(_distance(one, text, len(one["ids"]) - 1) for one, text in zip(answers, texts, strict=True))
    neighbour = str(of_mantissa_bits(precision.mantissa_bits + (-1 if precision.mantissa_bits == FINEST else 1)))
    # Beyond the prompt its text may be another. That they are apart shows that the switch was one.
    apart = max(_distance(one, text, len(one["prompt"])) for one, text in zip(expected[neighbour], texts, strict=True))
    if furthest > SUMS or apart < 2 * SUMS:
        raise SystemExit(f"{precision}: log-probabilities are {furthest:.1e} from ours, and {apart:.1e} from {neighbour}'s")
    greedy = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": one["prompt"]} for one in answers], greedy, use_tqdm=False)
    same = sum(_same(precision, one, list(out.outputs[0].token_ids)) for one, out in zip(answers, outputs, strict=True))
    print(
        f"{precision}: log-probabilities within {furthest:.1e} of ours ({apart:.1e} from {neighbour}'s), "
        f"{same} of {len(answers) * TOKENS} tokens the same",
        flush=True,
    )


def _distance(one: dict[str, Any], seen: Any, positions: int) -> float:
    """How far vLLM's log-probabilities are from ours at the first positions of a text, of tokens that both name."""
    furthest = 0.0
    for position in range(positions):
        there = seen[position + 1]
        pairs = zip(one["likeliest"][position], one["logprobs"][position], strict=True)
        differences = [abs(there[token].logprob - value) for token, value in pairs if token in there]
        furthest = max([furthest, *differences]) if differences else float("inf")
    return furthest


def _same(precision: Precision, one: dict[str, Any], chosen: list[int]) -> int:
    """How many tokens vLLM continued as we did; another one is right only where two are as likely as can be told."""
    first = len(one["prompt"])
    for number, token in enumerate(chosen):
        position = first + number
        if token != one["ids"][position]:
            likely = dict(zip(one["likeliest"][position - 1], one["logprobs"][position - 1], strict=True))
            if likely[one["ids"][position]] - likely.get(token, float("-inf")) > ROUNDING:
                raise SystemExit(f"{precision}: vLLM chose token {token}, we choose {one['ids'][position]}")
            return number
    return len(chosen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("who", choices=["ours", "vllm"])
    parser.add_argument("directory", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--processes", type=int, default=1)
    args = parser.parse_args()
    if args.who == "ours":
        ours(args.directory, args.file)
    else:
        with_vllm(args.directory, args.file, args.processes)


if __name__ == "__main__":
    main()
