"""vLLM beside our own runtime on one nested directory: the same tokens and probabilities, six times.

Run it twice, as runs/vllm_test.sh does, since the two live with different versions of transformers:

    python runs/vllm_compare.py ours DIR FILE                     # where OTARo is at home: writes FILE
    python runs/vllm_compare.py vllm DIR FILE [--processes 2]     # where vLLM is: reads it, and compares
    python runs/vllm_compare.py serve DIR FILE                    # the same for `vllm serve`, over HTTP

Both compute in float32. `ours` continues prompts greedily and keeps the log-probabilities of the likeliest
tokens at every position of the whole text. vLLM, one engine that switches, has to give the same ones, and to
continue the prompts alike. Its directory is a copy that lacks the last plane at first: asking for it must be
refused, and work once it is there.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from otaro.errors import OtaroError
from otaro.file.header import shard_name
from otaro.sefp.precision import FINEST, PRECISIONS, Precision, of_mantissa_bits

PROMPTS = [
    "The",
    "Once upon a time there was a",
    "def main():\n    return",
    "In the year 1815 the city of Vienna was",
]
TOKENS = 12
LIKELIEST = 3

SUMS = 1e-3
"""Of a log-probability over a whole text: both multiply more than eight tokens with decoded weights, so only
the order of float32 sums differs. Some 2^-24 * sqrt(600) = 1e-6 for each, over 200 products in a row 2e-5,
times logits of 20: 4e-4."""

ROUNDING = 3e-2
"""Of one at the end of a text: vLLM adds single tokens, whose activations are rounded to 16 bits, 2^-16 of
the largest of a unit, four times as much of a typical one. Over 200 products in a row 1e-3, times logits of
20: 2e-2."""


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
            likely, logprobs = top.indices.tolist(), top.values.tolist()
            answers.append({"prompt": start, "ids": ids, "likeliest": likely, "logprobs": logprobs})
    file.write_text(json.dumps(expected))


def with_vllm(directory: Path, file: Path, processes: int) -> None:
    from vllm import LLM

    expected = json.loads(file.read_text())
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / directory.name
        last = shard_name(FINEST)
        shutil.copytree(directory, copy, ignore=shutil.ignore_patterns(last))
        llm = LLM(
            str(copy), quantization="sefp", dtype="float32", enforce_eager=True, max_model_len=128,
            max_num_seqs=8, tensor_parallel_size=processes, disable_log_stats=True,
        )  # fmt: skip
        _check_refused(llm, of_mantissa_bits(FINEST), last)
        shutil.copyfile(directory / last, copy / last)
        for precision in PRECISIONS:
            _compare(llm, precision, expected)


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
    asked = [{"prompt_token_ids": one["ids"]} for one in answers]
    texts = [llm.generate(one, scored, use_tqdm=False)[0].prompt_logprobs for one in asked]
    pairs = zip(answers, texts, strict=True)
    furthest = max(_distance(one, seen, len(one["ids"]) - 1) for one, seen in pairs)
    bits = precision.mantissa_bits
    neighbour = str(of_mantissa_bits(bits - 1 if bits == FINEST else bits + 1))
    # Beyond the prompt its text may be another. That they are apart shows that the switch was one.
    others = zip(expected[neighbour], texts, strict=True)
    apart = max(_distance(one, seen, len(one["prompt"])) for one, seen in others)
    told = f"{precision}: log-probabilities within {furthest:.1e} of ours ({apart:.1e} from {neighbour}'s)"
    if furthest > SUMS or apart < 2 * SUMS:
        raise SystemExit(f"{told}: too far, or too near")
    greedy = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": one["prompt"]} for one in answers], greedy, use_tqdm=False)
    chosen = zip(answers, (list(out.outputs[0].token_ids) for out in outputs), strict=True)
    same = sum(_same(precision, one, ids) for one, ids in chosen)
    print(f"{told}, {same} of {len(answers) * TOKENS} tokens the same", flush=True)


def served(directory: Path, file: Path) -> None:
    """Start `vllm serve` at E5M4, ask it, switch it to E5M6 by HTTP as docs/serve.md tells, ask again."""
    expected = json.loads(file.read_text())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # The same server by its module: the command of the package for CPUs asks for the version of one called
    # vllm, and fails.
    options = f"--quantization sefp --enforce-eager --dtype float32 --max-model-len 128 --port {port}"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(directory)]
    command += ["--hf-overrides", '{"sefp": {"precision": "E5M4"}}', "--max-num-seqs", "8", *options.split()]
    environment = os.environ | {"VLLM_SERVER_DEV_MODE": "1"}
    with subprocess.Popen(command, env=environment, stdout=sys.stderr) as server:
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_for(url, server)
            _ask(url, directory, Precision("E5M4"), expected)
            said = _post(f"{url}/collective_rpc", {"method": "set_precision", "args": ["E5M6"]})
            _post(f"{url}/reset_prefix_cache", {})
            if said != {"results": ["E5M6"]}:
                raise SystemExit(f"the switch was answered with {said}")
            _ask(url, directory, Precision("E5M6"), expected)
        finally:
            server.terminate()


def _wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        if server.poll() is not None:
            raise SystemExit(f"vllm serve ended with {server.returncode}")
        try:
            urllib.request.urlopen(f"{url}/health").close()
            return
        except OSError:
            time.sleep(1)
    raise SystemExit("vllm serve did not answer for ten minutes")


def _ask(url: str, directory: Path, precision: Precision, expected: dict[str, list[Any]]) -> None:
    answers, same = expected[str(precision)], 0
    asked = {"model": str(directory), "max_tokens": TOKENS, "temperature": 0}
    asked |= {"ignore_eos": True, "return_token_ids": True}
    for one in answers:
        said = _post(f"{url}/v1/completions", asked | {"prompt": one["prompt"]})
        same += _same(precision, one, said["choices"][0]["token_ids"])
    print(f"{precision}: {same} of {len(answers) * TOKENS} tokens the same", flush=True)


def _post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.loads(answer.read() or "null")


def _distance(one: dict[str, Any], seen: Any, positions: int) -> float:
    """How far vLLM's log-probabilities are from ours at the first positions, where both name a token."""
    furthest = 0.0
    for position in range(positions):
        there = seen[position + 1]
        pairs = zip(one["likeliest"][position], one["logprobs"][position], strict=True)
        differences = [abs(there[token].logprob - value) for token, value in pairs if token in there]
        furthest = max([furthest, *differences]) if differences else float("inf")
    return furthest


def _same(precision: Precision, one: dict[str, Any], chosen: list[int]) -> int:
    """How many tokens vLLM chose as we did; another is right only if none can tell which is likelier."""
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
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("who", choices=["ours", "vllm", "serve"])
    parser.add_argument("directory", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--processes", type=int, default=1)
    args = parser.parse_args()
    if args.who == "ours":
        ours(args.directory, args.file)
    elif args.who == "vllm":
        with_vllm(args.directory, args.file, args.processes)
    else:
        served(args.directory, args.file)


if __name__ == "__main__":
    main()
