"""A directory behind HTTP on 127.0.0.1, whose server misbehaves on demand."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Misbehaving:
    """Files by name, and what is wrong with how they are served; `asked` notes names and ranges."""

    address: str
    files: dict[str, bytes]
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    sent: int = 0
    ranges: bool = True
    tags: bool = True
    cuts: list[int] = field(default_factory=list)
    """Data of a shard breaks off after so many bytes, one by one."""
    always_cut: int | None = None
    flips: list[int] = field(default_factory=list)
    """A byte at this place of the answer, from the end, is wrong; one answer each."""
    always_flip: int | None = None
    stated: int | None = 0
    """Added to every length that is stated of shards; None: no length is stated."""
    honest_first: bool = False
    """Lengths are wrong only when the data is asked for, not the header."""
    endless: str | None = None
    statuses: dict[str, list[int]] = field(default_factory=dict)
    """Answers by name before it behaves."""
    redirects: dict[str, str] = field(default_factory=dict)
    gate: threading.Event | None = None
    """Data of a shard waits in its middle until this is set."""
    waiting: threading.Event = field(default_factory=threading.Event)
    exchanged: dict[str, bytes] = field(default_factory=dict)
    """Takes the place of a file when its data is asked for."""

    def names(self) -> list[str]:
        """Of what was asked for."""
        return [name for name, _ in self.asked]


@contextmanager
def misbehaving(files: dict[str, bytes]) -> Iterator[Misbehaving]:
    """Serve files until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.0"

        def do_GET(self) -> None:
            name, wanted = self.path.rpartition("/")[2], self.headers.get("Range")
            server.asked.append((name, wanted))
            server.headers.append(dict(self.headers))
            if name in server.redirects:
                self.send_response(302)
                self.send_header("Location", server.redirects[name])
                self.end_headers()
                return
            status = (server.statuses.get(name) or [200]).pop(0)
            if status != 200 or name not in server.files:
                self.send_error(404 if status == 200 else status)
                return
            data = name.startswith("model-m") and not re.fullmatch(r"bytes=\d+-\d+", wanted or "")
            if data and name in server.exchanged:
                server.files[name] = server.exchanged.pop(name)
            self.answer(name, server.files[name], wanted, data)

        def answer(self, name: str, body: bytes, wanted: str | None, data: bool) -> None:
            tag, size, added = hashlib.sha1(body).hexdigest(), len(body), server.stated or 0
            if server.honest_first and not data:
                added = 0
            part = re.fullmatch(r"bytes=(\d+)-(\d*)", wanted or "") if server.ranges else None
            if part and self.headers.get("If-Range") in (None, f'"{tag}"'):
                start, end = int(part[1]), min(int(part[2] or size - 1), size - 1)
                body = body[start : end + 1]
                self.send_response(206)
                self.send_header(
                    "Content-Range", f"bytes {start}-{end}/{'*' if server.stated is None else size + added}"
                )
                added = 0
            else:
                self.send_response(200)
            if server.tags:
                self.send_header("ETag", f'"{tag}"')
            if server.stated is not None and name != server.endless:
                self.send_header(
                    "Content-Length", str(len(body) + (added if name.startswith("model-m") else 0))
                )
            self.end_headers()
            self.send(name, body, data)

        def send(self, name: str, body: bytes, data: bool) -> None:
            if data and (flip := server.flips.pop(0) if server.flips else server.always_flip):
                at = len(body) - flip
                body = body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]
            cut = (server.cuts.pop(0) if server.cuts else server.always_cut) if data else None
            body = body if cut is None else body[:cut]
            try:
                while name == server.endless:
                    self.wfile.write(body)
                    body = bytes(1 << 16)
                if data and server.gate is not None:
                    self.wfile.write(body[: len(body) // 2])
                    self.wfile.flush()
                    server.waiting.set()
                    server.gate.wait(120)
                    body = body[len(body) // 2 :]
                self.wfile.write(body)
                server.sent += len(body)
            except OSError:
                self.close_connection = True  # the client has seen enough

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        server = Misbehaving(f"http://127.0.0.1:{http.server_port}/some/model", files)
        thread = threading.Thread(target=http.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            if server.gate is not None:
                server.gate.set()
            http.shutdown()
            thread.join()
