"""The routes, and what every request passes before it gets to one.

Observed    gives a request its id, its line in the log, its place in the metrics; cuts off who does not read
CORS        only with --cors
Guard       who may come in, and how many at once
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from importlib import resources
from ipaddress import ip_address
from typing import Any
from uuid import uuid4

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import otaro
from otaro.errors import OtaroError
from otaro.serve import shapes
from otaro.serve.decisions import answered, decisions_ask
from otaro.serve.errors import ApiError
from otaro.serve.fields import Fields, parsed
from otaro.serve.http import Gone, impatient, read_body, unless_gone
from otaro.serve.log import event, log
from otaro.serve.protocol import Ask, chat_ask, completion_ask, response_ask
from otaro.serve.service import Answers, Service
from otaro.serve.settings import Settings

PRECISION_HEADER = "x-otaro-precision"
_OPEN = {"/", "/health"}  # without a key
_GONE = 499  # as other servers log it; nobody reads it
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


def application(service: Service, local: bool) -> ASGIApp:
    """The server's application; `local` where only this machine can connect."""
    settings = service.settings
    middleware = [Middleware(Observed, service=service)]
    if settings.origins:
        exposed = [PRECISION_HEADER, "x-request-id", "retry-after"]
        headers = ["authorization", "content-type"]
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=settings.origins,
                allow_methods=["GET", "POST"],
                allow_headers=headers,
                expose_headers=exposed,
            )
        )
    middleware.append(Middleware(Guard, settings=settings, local=local))

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with service.running():
            yield

    handlers: dict[Any, Any] = {ApiError: _refused, HTTPException: _http_error, Exception: _broken}
    routes = [*Endpoints(service).routes(), *_page()]
    return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers, lifespan=lifespan)


class Endpoints:
    """What the routes lead to."""

    def __init__(self, service: Service) -> None:
        self.service, self._settings = service, service.settings

    def routes(self) -> list[Route]:
        """All of them but the page."""
        return [
            Route("/health", self.health),
            Route("/version", self.version),
            Route("/metrics", self.metrics),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/v1/chat/completions", self._writing(chat_ask, shapes.Chat), methods=["POST"]),
            Route("/v1/completions", self._writing(completion_ask, shapes.Completion), methods=["POST"]),
            Route("/v1/responses", self._writing(response_ask, shapes.Response), methods=["POST"]),
            Route("/v1/systemone", self.decide, methods=["POST"]),
            Route("/v1/answers/{id}/precision", self.switch, methods=["POST"]),
            Route("/v1/resident", self.resident),
        ]

    async def health(self, request: Request) -> Response:
        """Whether requests are answered."""
        well = self.service.engine.alive and not self.service.ending
        return JSONResponse({"status": "ok" if well else "ending"}, 200 if well else 503)

    async def version(self, request: Request) -> Response:
        """Ours."""
        return JSONResponse({"version": otaro.__version__})

    async def metrics(self, request: Request) -> Response:
        """For Prometheus."""
        return Response(generate_latest(self.service.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def models(self, request: Request) -> Response:
        """The model, and the model at each precision that is there."""
        return JSONResponse(
            {"object": "list", "data": [self._model(name) for name in self.service.precisions.models]}
        )

    async def model(self, request: Request) -> Response:
        """One of them."""
        name = request.path_params["name"]
        if name not in self.service.precisions.models:
            raise ApiError(404, f"there is no model {name[:200]!r}", param="model", code="model_not_found")
        return JSONResponse(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        context = self.service.engine.context
        return {
            "id": name,
            "object": "model",
            "created": self.service.started,
            "owned_by": "otaro",
            "max_model_len": context,
        }

    async def switch(self, request: Request) -> Response:
        """Another precision in the middle of an answer."""
        fields = Fields(await self._body(request))
        value = fields.required("precision")
        fields.end()
        name = request.path_params["id"].rpartition("-")[2].rpartition("_")[2]
        return JSONResponse({"precision": str(self.service.switch(name, value))})

    async def resident(self, request: Request) -> Response:
        """What is in memory, and what a token reads of it."""
        service = self.service
        told = {
            "model": service.precisions.name,
            "chat": bool(service.tokenizer.chat_template),
            "max_model_len": service.engine.context,
            "precision": service.precisions.plan(None, None).told,
            "cache_bytes": service.engine.cache_bytes,
            "cache_bytes_per_token": service.engine.cache_token_bytes,
        }
        return JSONResponse({**told, "precisions": await asyncio.to_thread(service.planes.tell)})

    async def decide(self, request: Request) -> Response:
        """Probabilities of allowed answers."""
        asked = decisions_ask(await self._body(request))
        made = await unless_gone(request.receive, self.service.decide(asked))
        told, tokens = (
            ", ".join(sorted({str(one.precision) for one in made})),
            sum(one.tokens for one in made),
        )
        request.scope["note"] |= {
            "model": asked.model,
            "questions": len(made),
            "precision": told,
            "prompt_tokens": tokens,
        }
        answers = {
            one.name: answered(one, decision) for one, decision in zip(asked.questions, made, strict=True)
        }
        usage = {"input_tokens": tokens, "output_tokens": 0}
        body = {"model": asked.model or self.service.precisions.name, "answers": answers, "usage": usage}
        return JSONResponse({**body, "precision": told}, headers={PRECISION_HEADER: told})

    def _writing(
        self, understood: Callable[[dict[str, Any]], Ask], shape: type[shapes.Shape]
    ) -> Callable[..., Any]:
        """An endpoint that writes text."""

        async def endpoint(request: Request) -> Response:
            arrived = time.perf_counter()
            body = await self._body(request)
            ask = understood(body)
            answers = await self.service.begin(ask, arrived)
            note = request.scope["note"]
            note |= {"model": ask.model, "stream": ask.stream}
            if self._settings.log_prompts:
                note["prompts"] = list(ask.prompts)
            shaped = shape(answers, self.service.tokenizer, self.service.precisions.name)
            if ask.stream:
                return Events(shaped, note)
            try:
                await unless_gone(request.receive, _collect(shaped))
                return JSONResponse(shaped.whole(), headers={PRECISION_HEADER: answers.precision})
            finally:
                _noted(note, answers)
                answers.close()

        return endpoint

    async def _body(self, request: Request) -> dict[str, Any]:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # what a form of a strange web page cannot send
            raise ApiError(415, f"content-type: give application/json, not {kind[:100] or 'nothing'}")
        settings = self._settings
        body = await read_body(
            request.headers, request.receive, settings.max_body_bytes, settings.read_timeout
        )
        return parsed(body)


class Events(Response):
    """An answer as it is written."""

    media_type = "text/event-stream"

    def __init__(self, shaped: shapes.Shape, note: dict[str, Any]) -> None:
        headers = {
            "cache-control": "no-store",
            "x-accel-buffering": "no",
            PRECISION_HEADER: shaped.answers.precision,
        }
        super().__init__(headers=headers)
        del self.headers["content-length"]
        self._shaped, self._note = shaped, note

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Until it ends, or the client is gone."""
        try:
            await unless_gone(receive, self._write(send))
        finally:
            _noted(self._note, self._shaped.answers)
            self._shaped.answers.close()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        shaped = self._shaped
        try:
            await _send_some(send, shaped.begin())
            async with aclosing(shaped.answers.tokens()) as tokens:
                async for number, token in tokens:
                    await _send_some(send, shaped.take(number, token))
            last = shaped.end()
        except Gone:
            raise
        except Exception as error:
            self._note["error"] = type(error).__name__
            last = shaped.error(_told(error))
        await send({"type": "http.response.body", "body": last, "more_body": False})


async def _send_some(send: Send, body: bytes) -> None:
    if body:
        await send({"type": "http.response.body", "body": body, "more_body": True})


async def _collect(shaped: shapes.Shape) -> None:
    async with aclosing(shaped.answers.tokens()) as tokens:
        async for number, token in tokens:
            shaped.take(number, token)


def _noted(note: dict[str, Any], answers: Answers) -> None:
    note |= {
        "precision": answers.precision,
        "prompt_tokens": answers.prompt_tokens,
        "new_tokens": answers.new_tokens,
    }
    note["finish"] = [stream.finish_reason or "cancelled" for stream in answers.streams]


class Observed:
    """Outermost: each request's id, its line in the log, no patience with clients that do not read."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status, name = time.perf_counter(), _GONE, uuid4().hex
        note = scope["note"] = {}
        send = impatient(scope, send, self._service.settings.write_timeout)

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = name
                headers["x-content-type-options"] = "nosniff"
                await send(message)
                status = message["status"]
            else:
                await send(message)

        try:
            await self._app(scope, receive, watched)
        except Gone:
            status = _GONE
        except Exception:
            status = 500
            raise
        finally:
            route = scope.get("route")
            endpoint, seconds = getattr(route, "path", "other"), time.perf_counter() - started
            self._service.metrics.requests.labels(endpoint, str(status)).inc()
            self._service.metrics.seconds.labels(endpoint).observe(seconds)
            client = (scope.get("client") or ("",))[0]
            told = {
                "id": name,
                "client": client,
                "method": scope["method"],
                "path": endpoint,
                "status": status,
            }
            event("request", **told, seconds=round(seconds, 4), **note)


class Guard:
    """Who may come in: a key where one is wanted, a local name on a local address, not too many at once."""

    def __init__(self, app: ASGIApp, settings: Settings, local: bool) -> None:
        self._app, self._settings, self._local = app, settings, local
        self._keys = [key.encode() for key in settings.keys]
        self._inside = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if refusal := self._refusal(scope["path"], Headers(scope=scope)):
            await _refused(None, refusal)(scope, receive, send)
            return
        self._inside += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._inside -= 1

    def _refusal(self, path: str, headers: Headers) -> ApiError | None:
        if self._local and not self._keys and not _is_local(headers.get("host", "")):
            # A web page whose name was made to point here could otherwise read answers.
            return ApiError(
                403, "host: this server is for this machine; call it localhost, or start it with --api-key"
            )
        if self._keys and path not in _OPEN and not path.startswith("/page/") and not self._knows(headers):
            message = "give one of the server's API keys: Authorization: Bearer KEY"
            return ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        if self._inside >= self._settings.max_connections:
            return ApiError(429, "too many requests at once; ask again later", headers={"retry-after": "1"})
        return None

    def _knows(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        found = [hmac.compare_digest(key, given.strip().encode("latin-1", "replace")) for key in self._keys]
        return any(found) and scheme.lower() == "bearer"


def _is_local(host: str) -> bool:
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() and host.count(":") else host
    name = name.removeprefix("[").removesuffix("]").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False


def _page() -> list[Route]:
    """The files of the page, each by its name: there is no path to any other."""
    routes = []
    for file in resources.files("otaro.serve").joinpath("page").iterdir():
        kind = _TYPES.get(file.name.rpartition(".")[2])
        if kind is None:
            continue
        at = "/" if file.name == "index.html" else f"/page/{file.name}"
        headers = {"content-security-policy": _POLICY, "referrer-policy": "no-referrer"}
        response = Response(file.read_bytes(), headers=headers, media_type=kind)
        routes.append(Route(at, _constant(response)))
    return routes


def _constant(response: Response) -> Callable[[Request], Response]:
    return lambda request: response


# Errors


def _told(error: Exception) -> ApiError:
    """What a client is told: our refusals in their words, of anything else that it is our fault."""
    if isinstance(error, ApiError):
        return error
    if not isinstance(error, OtaroError):
        log.error("an answer failed", exc_info=error)
        return ApiError(500, "the server failed at this; its log says where")
    return ApiError(500, str(error))


def _refused(request: Request | None, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body, error.status, headers=error.headers)


def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    words = {
        404: "there is nothing here; /v1/models lists the models",
        405: f"{request.method} is not for this path",
    }
    message = words.get(error.status_code, error.detail)
    return JSONResponse(ApiError(error.status_code, message).body, error.status_code, headers=error.headers)


def _broken(request: Request, error: Exception) -> Response:
    response = _refused(request, _told(error))
    # as uvicorn does after an exception: a client must not ask on it again
    response.headers["connection"] = "close"
    return response
