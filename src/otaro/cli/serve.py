"""`otaro serve DIR`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from otaro.cli import console
from otaro.cli.generate import DeviceOption, DirectoryArgument, KvOption
from otaro.cli.help import page
from otaro.errors import OtaroError, install


@page(
    {
        "Access": "host api_key api_key_file cors",
        "Limits": "max_sequences cache_bytes max_queue max_connections max_body_bytes max_prompt_tokens "
        "max_tokens timeout read_timeout write_timeout shutdown_timeout",
        "Precision auto": "auto_finest auto_coarsest auto_interval auto_margin",
        "Memory": "kv release_after",
        "Output": "log_prompts",
    },
    examples="""
    otaro serve DIR
    otaro serve DIR --precision auto --host 0.0.0.0 --api-key-file keys.txt
    """,
)
def serve(
    directory: DirectoryArgument,
    host: Annotated[
        str, typer.Option(help="Address to listen at; 0.0.0.0 is every address of this machine.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port to listen at; 0 takes any that is free.", min=0, max=65535)
    ] = 8000,
    name: Annotated[
        str | None, typer.Option(help="What clients call the model; by default the name of its directory.")
    ] = None,
    precision: Annotated[
        str | None,
        console.precision_option(
            "Precision of requests that name none: E5M4, fit:90MB or auto; by default the finest there is.",
            "--precision",
            "-p",
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            help="A key that clients have to send. Others can see it in lists of processes.",
            envvar="OTARO_API_KEY",
        ),
    ] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="A file of such keys, one in each line.")] = None,
    cors: Annotated[
        list[str] | None, typer.Option(help="The origin of a web page that may call, or *; may be repeated.")
    ] = None,
    max_sequences: Annotated[int, typer.Option(help="Answers that are written at once.", min=1)] = 16,
    cache_bytes: Annotated[
        int | None,
        typer.Option(
            help="Bytes of memory for keys and values; by default 2,048 tokens for each of --max-sequences.",
            min=1,
        ),
    ] = None,
    kv: KvOption = None,
    draft: Annotated[
        str | None,
        typer.Option(
            help="Who drafts for requests that name none: E5M3, prompt or prompt+E5M3; by default nobody."
        ),
    ] = None,
    max_queue: Annotated[
        int, typer.Option(help="Answers that may wait for a place; further ones get 429.", min=0)
    ] = 64,
    max_connections: Annotated[
        int, typer.Option(help="Requests that may be open at once; further ones get 429.", min=1)
    ] = 256,
    max_body_bytes: Annotated[int, typer.Option(help="Bytes of a request; a larger one gets 413.", min=1)] = 1
    << 20,
    max_prompt_tokens: Annotated[
        int | None, typer.Option(help="Tokens of a prompt; by default what the cache holds.", min=1)
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Tokens of an answer; by default what the cache holds.", min=1)
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds that an answer may take, waiting included.")
    ] = 600.0,
    read_timeout: Annotated[float, typer.Option(help="Seconds that a request may take to arrive.")] = 30.0,
    write_timeout: Annotated[
        float, typer.Option(help="Seconds that a client may leave its answer unread.")
    ] = 30.0,
    shutdown_timeout: Annotated[
        float, typer.Option(help="Seconds that answers may still take after SIGTERM.")
    ] = 30.0,
    auto_finest: Annotated[
        str | None,
        typer.Option(help="The finest precision that auto chooses; by default the finest there is."),
    ] = None,
    auto_coarsest: Annotated[str, typer.Option(help="The coarsest precision that auto chooses.")] = "E5M3",
    auto_interval: Annotated[
        float, typer.Option(help="Seconds from one change of precision by auto to the next.")
    ] = 1.0,
    auto_margin: Annotated[
        float,
        typer.Option(
            help="Decisions by a smaller margin of probability are made again at the finest precision.",
            min=0.0,
            max=1.0,
        ),
    ] = 0.2,
    release_after: Annotated[
        float, typer.Option(help="Seconds after which planes that nobody used give their memory back.")
    ] = 300.0,
    log_prompts: Annotated[
        bool, typer.Option("--log-prompts", help="Write prompts into the log, too.")
    ] = False,
    device: DeviceOption = "cpu",
    revision: console.RevisionOption = None,
    token: console.TokenOption = None,
    cache_dir: console.CacheDirOption = None,
) -> None:
    """Answer OpenAI's clients, each request at its own precision, with one model in memory."""
    try:
        from otaro.serve import log, server
    except ModuleNotFoundError as error:
        raise OtaroError(f"otaro serve needs {error.name}; {install('serve')}") from None
    import otaro
    from otaro.serve.service import Service
    from otaro.serve.settings import Settings, check_origins

    console.check_precisions("--precision", precision, fits=True, others=("auto",))
    console.check_precisions("--auto-finest", auto_finest)
    console.check_precisions("--auto-coarsest", auto_coarsest)
    console.check_precisions("--kv", kv)
    if name is not None and not name.strip():
        raise console.Misuse("--name '': give a name, or leave it out for that of the directory")
    keys = _keys(api_key, api_key_file)
    with console.usage(), console.named_as_options():
        check_origins(cors or (), "--cors")
        settings = Settings(
            precision=precision,
            draft=draft,
            keys=keys,
            origins=tuple(cors or ()),
            max_body_bytes=max_body_bytes,
            max_prompt_tokens=max_prompt_tokens,
            max_tokens=max_tokens,
            max_queue=max_queue,
            max_connections=max_connections,
            timeout=timeout,
            read_timeout=read_timeout,
            write_timeout=write_timeout,
            shutdown_timeout=shutdown_timeout,
            log_prompts=log_prompts,
            auto_finest=auto_finest,
            auto_coarsest=auto_coarsest,
            auto_interval=auto_interval,
            auto_margin=auto_margin,
            release_after=release_after,
        )
    listening = server.listen(host, port)  # before minutes are spent on a model
    console.quiet_transformers()
    with console.named_as_options(), console.err.status("opening ..."):
        model = otaro.load(directory, device=device, revision=revision, token=token, cache_dir=cache_dir)
        engine = otaro.Engine(model, max_sequences=max_sequences, cache_bytes=cache_bytes, kv=kv)
    called = name or (Path(directory).resolve().name if Path(directory).is_dir() else directory)
    service = Service(model, engine, called, settings)
    log.start()
    at, key = server.url(listening), " -H 'Authorization: Bearer KEY'" if settings.keys else ""
    console.out.print(
        f"{called} at {at}/v1, {service.precisions.there[-1]} to {service.precisions.there[0]}; try",
        markup=False,
    )
    body = '{"prompt": "The", "precision": "E5M4"}'
    typer.echo(f"curl {at}/v1/completions{key} -H 'Content-Type: application/json' -d '{body}'")
    if not server.is_local(listening) and not settings.keys:
        console.remark("note: whoever can reach this machine can use it; --api-key-file asks for a key")
    server.make(service, listening).run(sockets=[listening])


def _keys(key: str | None, file: Path | None) -> tuple[str, ...]:
    found = [] if key is None else [key]
    if file is not None:
        try:
            lines = [line.strip() for line in file.read_text("utf-8").splitlines()]
        except UnicodeDecodeError:
            told = f"--api-key-file {file}: it is not UTF-8; write one key into every line"
            raise OtaroError(told) from None  # which would quote what is in it
        if not any(lines):
            raise OtaroError(f"--api-key-file {file}: there is no key in it; write one into every line")
        found += [line for line in lines if line]
    return tuple(found)
