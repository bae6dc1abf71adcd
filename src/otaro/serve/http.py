"""The connection: what to do about clients that say nothing, do not read, or are gone.

uvicorn waits for ever for the rest of a request's head, and for a reader of a full buffer. `Connection` cuts
off the first; `impatient` the second, which holds up nobody else meanwhile: an answer's tokens wait in its
stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import h11
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from otaro.serve.errors import ApiError

T = TypeVar("T")


class Gone(Exception):
    """The client has closed the connection."""


def connection_class(read_timeout: float) -> type[H11Protocol]:
    """A connection of uvicorn's, with a time limit for the head of every request."""

    class Connection(H11Protocol):
        _late: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.app_state = {**self.app_state, "abort": transport.abort}
            self._late = self.loop.call_later(read_timeout, self._give_up)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            waits = self.conn.their_state is h11.IDLE  # for the rest of a head
            if waits and self._late is None and self.timeout_keep_alive_task is None:
                self._late = self.loop.call_later(read_timeout, self._give_up)
            elif not waits:
                self._in_time()

        def connection_lost(self, exc: Exception | None) -> None:
            self._in_time()
            super().connection_lost(exc)

        def _give_up(self) -> None:
            self._late = None
            self.transport.abort()

        def _in_time(self) -> None:
            if self._late is not None:
                self._late.cancel()
                self._late = None

    return Connection


def impatient(scope: Scope, send: Send, seconds: float) -> Send:
    """Sends, but cuts off a client that leaves a full buffer unread for so long."""

    async def sent(message: Message) -> None:
        try:
            async with asyncio.timeout(seconds):
                await send(message)
        except TimeoutError:
            abort: Callable[[], None] | None = scope.get("state", {}).get("abort")
            if abort is not None:
                abort()
                await asyncio.sleep(0)  # uvicorn is told then
            raise Gone("it did not read") from None

    return sent


async def read_body(headers: Any, receive: Receive, most: int, seconds: float) -> bytes:
    """The body of a request, of a size and in a time."""
    too_large = ApiError(413, f"the body is larger than {most} bytes", headers={"connection": "close"})
    if (length := headers.get("content-length", "")).isdigit() and int(length) > most:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Gone
                body += message.get("body", b"")
                if len(body) > most:
                    raise too_large
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        message_text = f"the body did not arrive within {seconds:g} seconds"
        raise ApiError(408, message_text, headers={"connection": "close"}) from None


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What work gives, or `Gone` as soon as the client is."""
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Gone
    finally:
        watch.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
