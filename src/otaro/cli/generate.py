"""`otaro generate DIR --prompt TEXT`, and what it shares with `otaro chat`."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any

import typer

from otaro.cli import console

DirectoryArgument = Annotated[str, typer.Argument(metavar="DIR", help="A nested directory, or the Hub id of one.")]
MaxNewTokensOption = Annotated[int, typer.Option(help="Stop after this many tokens.", min=1)]
TemperatureOption = Annotated[float, typer.Option(help="0 takes the likeliest token, more is more varied.", min=0.0)]
TopPOption = Annotated[float, typer.Option(help="Sample from the likeliest tokens that make up this share.", min=0.0, max=1.0)]
SeedOption = Annotated[int, typer.Option(help="Sampling with the same seed says the same.", min=0, max=2**63 - 1)]
DeviceOption = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")]


def generate(
    directory: DirectoryArgument,
    prompt: Annotated[str, typer.Option(help="The text to continue; - reads it from standard input.")],
    precision: console.PrecisionOption = None,
    max_new_tokens: MaxNewTokensOption = 100,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    seed: SeedOption = 0,
    device: DeviceOption = "cpu",
    json: console.JsonOption = False,
) -> None:
    """Continue a text, at any precision, as it is produced."""
    from transformers import TextStreamer

    from otaro.runtime.session import padding_token

    if prompt == "-":
        prompt = sys.stdin.read()
    model, tokenizer = open_model(directory, precision, device)
    ids = tokenizer(prompt, return_tensors="pt").to(model.device)
    if not ids["input_ids"].numel():
        raise typer.BadParameter("the prompt holds no token", param_hint="--prompt")
    streamer = None if json else TextStreamer(tokenizer, skip_special_tokens=True)
    started = time.perf_counter()
    output = model.generate(
        **ids,
        max_new_tokens=max_new_tokens,
        streamer=streamer,
        pad_token_id=padding_token(tokenizer),
        **sampling(temperature, top_p, seed),
    )
    seconds = time.perf_counter() - started
    new = output.shape[1] - ids["input_ids"].shape[1]
    used = console.describe_precision(model)
    if json:
        text = tokenizer.decode(output[0, -new:], skip_special_tokens=True)
        console.print_json({"prompt": prompt, "text": text, "precision": used, "tokens": new, "seconds": seconds})
    else:
        console.err.print(f"[dim]{used}: {new} tokens, {new / seconds:.1f} per second[/]", highlight=False)


def open_model(directory: str, precision: str | None, device: str) -> tuple[Any, Any]:
    """Model and tokenizer of a nested directory."""
    import otaro
    from otaro.runtime.load import load_tokenizer

    console.quiet_transformers()
    with console.err.status("opening ..."):
        model = otaro.load(directory, console.parse_precision(precision) if precision else None, device=device)
        return model, load_tokenizer(model.sefp.nested.path)


def sampling(temperature: float, top_p: float, seed: int) -> dict[str, Any]:
    """Arguments for `model.generate`; seeds the sampler."""
    import torch

    torch.manual_seed(seed)
    if temperature == 0.0:
        return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    return {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
