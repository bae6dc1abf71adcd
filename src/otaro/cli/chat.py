"""`otaro chat DIR`."""

from __future__ import annotations

import sys
from typing import Any

from otaro.cli import console
from otaro.cli.generate import (
    DecodeOption,
    DeviceOption,
    DirectoryArgument,
    DraftOption,
    KvOption,
    MaxNewTokensOption,
    PrefillOption,
    RepetitionPenaltyOption,
    ScheduleOption,
    SeedOption,
    StopOption,
    SystemOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
    check_coarser,
    check_draft,
    open_model,
    phases,
    read_text,
    remark,
    sampling,
    stopping,
)
from otaro.cli.help import page
from otaro.cli.streaming import Printer

HELP = """\
/precision E5M3   go on at another precision; the KV cache is kept
/draft E5M3       who drafts from now on; off for none
/reset            forget the conversation
/help             this list
/exit             leave (so does the end of input)"""


@page(
    {
        "Precisions by phase": "prefill decode schedule kv draft",
        "Sampling": "temperature top_p top_k repetition_penalty seed stop",
    },
    examples="otaro chat DIR --precision E5M4   # then /precision E5M8",
)
def chat(
    directory: DirectoryArgument,
    precision: console.PrecisionOption = None,
    max_new_tokens: MaxNewTokensOption = 300,
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
) -> None:
    """Talk to a model; /precision E5M3 switches in mid-conversation and keeps the KV cache."""
    from otaro.file.hub import Hub
    from otaro.runtime.session import ChatSession
    from otaro.sefp.precision import Precision

    chosen = {
        **phases(precision, prefill, decode, schedule, None),
        **sampling(temperature, top_p, top_k, repetition_penalty, seed),
    }
    console.check_precisions("--kv", kv)
    check_draft(draft)
    model, tokenizer = open_model(directory, precision, device, Hub(revision, token, cache_dir))
    with console.named_as_options():
        check_coarser(model, draft, chosen)
        session = ChatSession(model, tokenizer, None if kv is None else Precision(kv), system)
    at = console.describe_precision(model)
    console.err.print(
        f"[bold]{console.escape(directory)}[/] at {at}. /help lists the commands.", highlight=False
    )
    if not session.uses_template:
        console.err.print(
            "This model has no chat template: it continues your text instead of answering it.",
            highlight=False,
        )
    options = {
        "max_new_tokens": max_new_tokens,
        "draft": draft,
        **stopping(stop, tokenizer),
        **chosen,
    }
    while (line := _read_line(f"{console.describe_precision(model)}> ")) is not None:
        if line.startswith("/"):
            if line.split()[0] in ("/exit", "/quit"):
                break
            _command(session, line, options)
        elif line:
            _answer(session, line, _drafted(session, options))


def _read_line(prompt: str) -> str | None:
    """The next line, without its end; None at the end of input."""
    if sys.stdin.isatty():
        try:
            return input(prompt).strip()
        except EOFError:
            return None
    line = read_text(sys.stdin, line=True)
    return line.strip() if line else None


def _command(session: Any, line: str, options: dict[str, Any]) -> None:
    import otaro
    from otaro.runtime.draft import Draft

    command, *arguments = line.split()
    if command == "/precision" and len(arguments) == 1:
        try:
            otaro.set_precision(session.model, console.parse_precision(arguments[0], command))
        except otaro.OtaroError as error:
            _refused(error)
        else:
            at = console.describe_precision(session.model)
            console.err.print(
                f"now at {at}, {session.cached_tokens} tokens kept in the cache", highlight=False
            )
            if _drafted(session, options) is not options:
                console.remark(f"drafts wait: {options['draft']} is not coarser than that")
    elif command == "/draft" and len(arguments) == 1:
        try:
            with console.named_as_options("/"):
                draft = Draft.of(None if arguments[0] == "off" else arguments[0])
                check_coarser(session.model, draft, options)
                options["draft"] = draft
        except otaro.OtaroError as error:
            _refused(error)
        else:
            console.err.print(f"drafts: {console.escape(arguments[0])}", highlight=False)
    elif command == "/reset":
        session.reset()
        console.err.print("conversation forgotten")
    else:
        if command not in ("/help", "/precision", "/draft"):
            console.remark(f"unknown command {command}; there are:")
        console.remark(HELP)


def _drafted(session: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The options, without a draft that is not coarser than what the model runs at by now."""
    from otaro.errors import OtaroError

    try:
        check_coarser(session.model, options["draft"], options)
    except OtaroError:
        return {**options, "draft": None}
    return options


def _refused(error: Exception) -> None:
    console.err.print(f"[bold red]error:[/] {console.escape(str(error))}")


def _answer(session: Any, text: str, options: dict[str, Any]) -> None:
    from otaro.errors import OtaroError

    streamer = Printer(session.tokenizer, skip_prompt=True)
    try:
        with console.named_as_options("/"):
            session.reply(text, streamer=streamer, **options)
    except KeyboardInterrupt:
        console.err.print("\ninterrupted; the conversation goes on without this turn")
        return
    except OtaroError as error:  # a draft that is no longer coarser, say: what was said so far stays
        _refused(error)
        return
    remark(session.generation)
