"""A socket, uvicorn on it, and a graceful end."""

from __future__ import annotations

import asyncio
import socket
from ipaddress import ip_address

import uvicorn

from otaro.errors import OtaroError
from otaro.serve import log
from otaro.serve.app import application
from otaro.serve.http import connection_class
from otaro.serve.service import Service

_SEND_BUFFER = 1 << 17  # bytes that the system keeps for a slow reader, who would get megabytes otherwise
_KEEP_ALIVE = 30  # seconds that a connection may be idle
_HEAD = 1 << 14  # bytes of a request's head
_LAST = 10  # seconds that answers which were cut off may take to end


def listen(host: str, port: int) -> socket.socket:
    """A socket that waits for connections; port 0 is any that is free."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise OtaroError(f"--host {host}: {error.strerror}; give an address of this machine") from None
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        listening.bind(address)
        listening.listen(1024)
    except OSError as error:
        listening.close()
        raise OtaroError(f"{host}:{port}: {error.strerror}; choose another with --host and --port") from None
    return listening


def is_local(listening: socket.socket) -> bool:
    """Whether only this machine can connect."""
    return ip_address(listening.getsockname()[0]).is_loopback


def url(listening: socket.socket) -> str:
    """Where it is to be found."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def make(service: Service, listening: socket.socket) -> uvicorn.Server:
    """A server; `server.run(sockets=[listening])` runs it, `server.should_exit = True` ends it."""
    settings = service.settings
    config = uvicorn.Config(
        application(service, is_local(listening)),
        http=connection_class(settings.read_timeout),
        loop="asyncio",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE,
        timeout_graceful_shutdown=max(1, round(settings.shutdown_timeout)),
        h11_max_incomplete_event_size=_HEAD,
    )
    return _Server(config, service)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more requests, finish those under way as long as there is time, then end."""
        self._service.ending = True
        told = {"answers": self._service.open_answers, "seconds": self._service.settings.shutdown_timeout}
        log.event("ending", **told, hint="answers under way get so long; Ctrl-C again ends them at once")
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn then leaves all running, whose cancelling would be logged as an error
            for connection in list(self.server_state.connections):
                connection.transport.abort()
            await self.lifespan.shutdown()
            if self.server_state.tasks:
                await asyncio.wait(self.server_state.tasks, timeout=_LAST)
        log.event("ended")
