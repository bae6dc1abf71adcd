"""`otaro generate DIR --prompt TEXT`, and what it shares with `otaro chat`."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from otaro.cli import console
from otaro.cli.help import page
from otaro.cli.streaming import Printer

if TYPE_CHECKING:
    from otaro.file.hub import Hub
    from otaro.runtime.draft import Draft

DirectoryArgument = Annotated[
    str, typer.Argument(metavar="DIR", help="A nested directory, or the Hub id of one.")
]
MaxNewTokensOption = Annotated[int, typer.Option(help="Stop after this many tokens.", min=1)]
TemperatureOption = Annotated[
    float, typer.Option(help="0 takes the likeliest token; higher values vary more.", min=0.0)
]
TopPOption = Annotated[
    float, typer.Option(help="Sample from the likeliest tokens that make up this share.", min=0.0, max=1.0)
]
TopKOption = Annotated[
    int, typer.Option(help="Sample from this many of the likeliest tokens; 0 samples from all.", min=0)
]
RepetitionPenaltyOption = Annotated[
    float, typer.Option(help="Above 1 makes tokens that were there before less likely.", min=0.01, max=100.0)
]
SystemOption = Annotated[
    str | None, typer.Option(help="A system message, which the model's chat template puts before the text.")
]
SeedOption = Annotated[
    int, typer.Option(help="Seed of the sampling: the same one gives the same text.", min=0)
]
PrefillOption = Annotated[str | None, console.precision_option("Read the prompt at this precision.")]
DecodeOption = Annotated[str | None, console.precision_option("Write new tokens at this precision.")]
ScheduleOption = Annotated[
    str | None,
    typer.Option(
        help="Precisions by number of new tokens: 0:E5M8,100:E5M4. Before the first number --precision "
        "holds.",
        metavar="N:PRECISION,...",
    ),
]
KvOption = Annotated[
    str | None, console.precision_option("Keep keys and values at this precision; in float16 by default.")
]
DraftOption = Annotated[
    str | None,
    typer.Option(
        help="Speculative decoding: who drafts what --precision checks: a coarser precision, prompt "
        "(the text itself), or prompt+E5M3. Changes the speed, and at a temperature which tokens a seed "
        "draws.",
    ),
]
StopOption = Annotated[list[str] | None, typer.Option(help="Stop after this text; may be repeated.")]
DeviceOption = Annotated[str, typer.Option(help="Where to compute: cpu, cuda, cuda:1, ...")]


@page(
    {
        "Precisions by phase": "prefill decode schedule kv draft",
        "Sampling": "temperature top_p top_k repetition_penalty seed stop",
    },
    examples="""
    otaro generate DIR --prompt "Once upon a time" --precision E5M4
    otaro generate DIR --prompt - --prefill E5M8 --decode E5M4 < question.txt
    otaro generate DIR --prompt Hello --schedule 0:E5M8,100:E5M4   # change between tokens
    """,
)
def generate(
    directory: DirectoryArgument,
    prompt: Annotated[str, typer.Option(help="The text to continue; - reads it from standard input.")],
    precision: console.PrecisionOption = None,
    max_new_tokens: MaxNewTokensOption = 100,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    top_k: TopKOption = 0,
    repetition_penalty: RepetitionPenaltyOption = 1.0,
    seed: SeedOption = 0,
    stop: StopOption = None,
    system: SystemOption = None,
    prefill: PrefillOption = None,
    decode: DecodeOption = None,
    schedule: ScheduleOption = None,
    kv: KvOption = None,
    draft: DraftOption = None,
    device: DeviceOption = "cpu",
    revision: console.RevisionOption = None,
    token: console.TokenOption = None,
    cache_dir: console.CacheDirOption = None,
    json: console.JsonOption = False,
) -> None:
    """Continue a text, at any precision, as it is produced."""
    import torch

    from otaro.file.hub import Hub
    from otaro.runtime.session import chat_tokens, padding_token

    chosen = {
        **phases(precision, prefill, decode, schedule, kv),
        **sampling(temperature, top_p, top_k, repetition_penalty, seed),
    }
    check_draft(draft)
    if prompt == "-":
        prompt = read_text(sys.stdin)
    model, tokenizer = open_model(directory, precision, device, Hub(revision, token, cache_dir))
    if system is None:
        ids = torch.tensor([tokenizer(prompt)["input_ids"]], dtype=torch.long, device=model.device)
    else:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
        ids = torch.tensor([chat_tokens(tokenizer, messages)], device=model.device)
    if not ids.numel():
        raise typer.BadParameter("the prompt holds no token", param_hint="--prompt")
    streamer = None if json else Printer(tokenizer, skip_prompt=system is not None)
    with console.named_as_options():
        check_coarser(model, draft, chosen)
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            streamer=streamer,
            pad_token_id=padding_token(tokenizer),
            draft=draft,
            **stopping(stop, tokenizer),
            **chosen,
        )
    how = model.generation
    if json:
        text = tokenizer.decode(output[0, how.prompt_tokens :], skip_special_tokens=True)
        console.print_json({"prompt": prompt, "text": text, **told(how)})
    else:
        remark(how)


def open_model(directory: str, precision: str | None, device: str, hub: Hub) -> tuple[Any, Any]:
    """Model and tokenizer of a nested directory."""
    import otaro
    from otaro.runtime.load import load_tokenizer

    wanted = None if precision is None else console.parse_precision(precision)
    console.quiet_transformers()
    with console.err.status("opening ..."):
        model = otaro.load(
            directory,
            wanted,
            device=device,
            revision=hub.revision,
            token=hub.token,
            cache_dir=hub.cache_dir,
        )
        return model, load_tokenizer(model.sefp.nested.path)


def check_draft(draft: str | None) -> None:
    """Refuse a draft that there is none of, before a model is opened."""
    from otaro.runtime.draft import Draft

    with console.usage(), console.named_as_options():
        Draft.of(draft)


def check_coarser(model: Any, draft: str | Draft | None, chosen: Mapping[str, Any]) -> None:
    """Refuse a draft that could never serve these precisions, before anything is said."""
    from otaro.runtime.architectures import packed_modules
    from otaro.runtime.draft import Draft, Drafter
    from otaro.runtime.modules import bits_of
    from otaro.runtime.phases import Phases, steps_and_rows
    from otaro.runtime.precision import attachment
    from otaro.runtime.report import Generation
    from otaro.runtime.serving import why_not

    wanted = Draft.of(draft)
    if wanted is None or why_not(model):  # which `generate` refuses
        return
    prefill, decode, schedule = (chosen.get(name) for name in ("prefill", "decode", "schedule"))
    steps, _ = steps_and_rows(prefill, decode, schedule, None)
    attached, modules = attachment(model), packed_modules(model)
    judges = Phases(attached, steps, modules).writing_bits(bits_of(modules, attached.nested))
    Drafter(wanted, judges, Generation())


def read_text(file: Any, line: bool = False) -> str:
    """All of standard input, or a line of it, which must be UTF-8 whatever the locale says."""
    from otaro.errors import OtaroError

    if (file.encoding, file.errors) != ("utf-8", "strict") and hasattr(file, "reconfigure"):
        file.reconfigure(encoding="utf-8", errors="strict")
    try:
        text: str = file.readline() if line else file.read()
    except UnicodeDecodeError as error:
        raise OtaroError(
            f"standard input is not UTF-8 (byte 0x{error.object[error.start]:02x}); convert it, with iconv "
            "-t UTF-8 say"
        ) from None
    return text


def sampling(
    temperature: float, top_p: float, top_k: int, repetition_penalty: float, seed: int
) -> dict[str, Any]:
    """Arguments for `model.generate`; seeds the sampler."""
    import torch

    if seed >= 2**64:
        raise typer.BadParameter("must be below 2^64", param_hint=f"--seed {seed}")
    if not math.isfinite(temperature):
        raise typer.BadParameter("must be a finite number", param_hint=f"--temperature {temperature}")
    torch.manual_seed(seed)
    penalty = {} if repetition_penalty == 1.0 else {"repetition_penalty": repetition_penalty}
    if temperature == 0.0:
        for option, given in (("--top-k", top_k != 0), ("--top-p", top_p != 1.0)):
            if given:
                raise typer.BadParameter("to sample, give --temperature too", param_hint=option)
        return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None, **penalty}
    return {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": top_k, **penalty}


def stopping(stop: list[str] | None, tokenizer: Any) -> dict[str, Any]:
    """Arguments for `model.generate` that stop at texts."""
    if any(not text for text in stop or ()):
        raise typer.BadParameter("an empty text stops nothing", param_hint="--stop")
    return {"stop_strings": stop, "tokenizer": tokenizer} if stop else {}


def phases(
    precision: str | None, prefill: str | None, decode: str | None, schedule: str | None, kv: str | None
) -> dict[str, Any]:
    """Arguments for `model.generate` that say which precision reads, writes, and keeps keys and values."""
    if precision is not None and prefill is not None and decode is not None:
        told = "--prefill and --decode say all there is to say; leave it or one of them out"
        raise typer.BadParameter(told, param_hint="--precision")
    if schedule is not None and (prefill is not None or decode is not None):
        other = "--decode" if prefill is None else "--prefill"
        raise typer.BadParameter(f"it says all there is to say; leave out {other}", param_hint="--schedule")
    chosen: dict[str, Any] = {}
    if prefill is not None:
        chosen["prefill"] = console.parse_precision(prefill, "--prefill")
    if decode is not None:
        chosen["decode"] = console.parse_precision(decode, "--decode")
    if schedule is not None:
        steps = [part.split(":", 1) for part in schedule.split(",")]
        if any(len(step) != 2 or not step[0].strip().isdecimal() for step in steps):
            raise typer.BadParameter(
                "must be of the form 0:E5M8,100:E5M4", param_hint=f"--schedule {schedule}"
            )
        if len({int(at) for at, _ in steps}) < len(steps):
            raise typer.BadParameter(
                "must not name a number of tokens twice", param_hint=f"--schedule {schedule}"
            )
        chosen["schedule"] = {int(at): name.strip() for at, name in steps}
        if precision is not None and 0 in chosen["schedule"]:
            told = f"--schedule {schedule} says all there is to say from 0 on; leave one of them out"
            raise typer.BadParameter(told, param_hint="--precision")
        console.check_precisions("--schedule", schedule, *chosen["schedule"].values(), fits=True)
    if kv is not None:
        console.check_precisions("--kv", kv)
        chosen["kv"] = kv
    return chosen


def told(how: Any) -> dict[str, Any]:
    """How a generation went, for JSON."""
    return {
        "precision": ", then ".join(how.precisions),
        "tokens": how.new_tokens,
        "seconds": how.prefill_seconds + how.decode_seconds,
        "prompt_tokens": how.prompt_tokens,
        "reused_tokens": how.reused_tokens,
        "prefill_tokens_per_second": how.prefill_rate,
        "decode_tokens_per_second": how.decode_rate,
        "cache_bytes": how.cache_bytes,
        "draft": how.draft or None,
        "drafted": how.drafted,
        "accepted": how.accepted,
        "served_by": how.served_by,
        "reason": how.reason,
    }


def remark(how: Any) -> None:
    """How a generation went, for people, on standard error."""
    parts = [f"{', then '.join(how.precisions)}: {how.new_tokens} tokens, {how.decode_rate:.1f} per second"]
    parts.append(f"prompt of {how.prompt_tokens - how.reused_tokens} at {how.prefill_rate:.1f} per second")
    if how.reused_tokens:
        parts.append(f"{how.reused_tokens} tokens reused")
    if how.draft:
        said = (
            f"{sum(how.accepted)} of {sum(how.drafted)} drafted tokens were right"
            if how.drafted
            else "nothing was drafted"
        )
        parts.append(said)
    if how.cache_bytes is not None:
        parts.append(f"cache {console.size(how.cache_bytes)}")
    if how.reason:
        parts.append(f"by {how.served_by}: {console.escape(how.reason)}")
    console.err.print(f"[dim]{', '.join(parts)}[/]", highlight=False)
