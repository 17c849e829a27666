"""An internet on loopback for the image fetcher: names, public addresses, and servers that stand at them.

The product runs unchanged, its guard with real public addresses. Only the event loop's ``sock_connect`` is another: it
keeps every address that is asked for and leads the chosen ones to servers on loopback. No other is ever reached.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
from aiohttp.abc import AbstractResolver, ResolveResult

from plugins.image_fetcher import ImageFetcher

PUBLIC = "93.184.216.34"
OTHER = "151.101.1.69"
PNG = b"\x89PNG\r\n\x1a\n" + b"\0\0\0\rIHDR\0\0\0\1\0\0\0\1\x08\x04\0\0\0" + b"\0" * 16

Addresses = list[str] | Callable[[], list[str]] | Callable[[], Awaitable[list[str]]]
Step = bytes | float | asyncio.Event | None
"""What a server does next: send, pause for seconds, wait, or (None) reset the connection."""


@dataclass(frozen=True, slots=True)
class Visit:
    """A request that reached a server."""

    address: str
    target: str
    headers: Mapping[str, str]
    """By their names in lower case."""


Answer = Callable[[Visit], Iterable[Step]]


def reply(body: bytes = PNG, status: str = "200 OK", *, length: int | None = -1, **headers: str) -> list[Step]:
    """An answer; ``length`` is what is announced: -1 the true one, None nothing. ``content_type="…"`` is a header."""
    lines = [f"HTTP/1.1 {status}"]
    if length is not None:
        lines.append(f"Content-Length: {len(body) if length == -1 else length}")
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return [("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"), body]


def redirect(location: str, status: int = 302, set_cookie: str = "") -> list[Step]:
    """A redirect."""
    return reply(b"", f"{status} Found", location=location, set_cookie=set_cookie)


class FakeInternet:
    """Names, addresses and servers, with a record of who asked for what."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: dict[str, Addresses] = {}
        self.looked_up: list[str] = []
        self.dialled: list[tuple[str, int]] = []
        """Every address that a connection was asked for, except those in ``local``."""
        self.local: set[tuple[str, int]] = set()
        """What is no part of this internet: the gateway and its upstreams."""
        self.own: set[str] = set()
        """Addresses that the kernel calls this machine's own."""
        self.visits: list[Visit] = []
        self.server_names: list[str | None] = []
        """What TLS clients asked for."""
        self.open = self.most_open = 0
        """Connections to servers: now, and the most at a time."""
        self.sent = 0
        """Bytes that servers have handed to the network."""
        self.left = asyncio.Event()
        """Set when somebody left before the end of an answer."""
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._at: dict[tuple[str, int], int] = {}
        self._loop = asyncio.get_running_loop()
        self._connect_really = self._loop.sock_connect
        monkeypatch.setattr(self._loop, "sock_connect", self._connect)
        self._claim_own_addresses(monkeypatch)
        monkeypatch.setenv("SSL_CERT_FILE", os.devnull)  # no authority is trusted but the test's own

    async def serve(
        self, answer: Answer | list[Step], address: str = PUBLIC, port: int = 80, tls: ssl.SSLContext | None = None
    ) -> None:
        """Let a server stand at an address; ``answer`` gives the steps of each answer."""
        answers = answer if callable(answer) else lambda _: answer
        if tls is not None:
            tls.sni_callback = lambda _, name, __: self.server_names.append(name)

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            with suppress(asyncio.CancelledError):  # by ``close``
                await self._handle(reader, writer, address, answers)

        server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=tls)
        self._servers.append(server)
        self._at[address, port] = server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """End all servers."""
        for server in self._servers:
            server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def resolver(self) -> AbstractResolver:
        """A resolver that knows these names."""
        return _FakeResolver(self)

    def fetcher(self) -> type[ImageFetcher]:
        """The plugin, its names looked up here."""

        internet = self

        class Fetcher(ImageFetcher):
            def resolver(self) -> AbstractResolver:
                return internet.resolver()

        return Fetcher

    async def _connect(self, sock: socket.socket, address: Any) -> None:
        host, port = address[:2]
        if (host, port) in self.local:
            return await self._connect_really(sock, address)
        self.dialled.append((host, port))
        at = self._at.get((host, port))
        if at is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"nobody listens at {host} {port}")
        here = ("::ffff:127.0.0.1", at, 0, 0) if sock.family == socket.AF_INET6 else ("127.0.0.1", at)
        return await self._connect_really(sock, here)

    async def _handle(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str, answer: Answer
    ) -> None:
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:-2])}
            visit = Visit(address, lines[0].split(" ")[1], headers)
            self.visits.append(visit)
            playing = asyncio.create_task(self._play(writer, answer(visit)))
            leaving = asyncio.create_task(reader.read())
            try:
                await asyncio.wait({playing, leaving}, return_when=asyncio.FIRST_COMPLETED)
                if not playing.done():
                    self.left.set()
            finally:
                playing.cancel()
                leaving.cancel()
                await asyncio.gather(playing, leaving, return_exceptions=True)
        except (ConnectionError, asyncio.IncompleteReadError):
            self.left.set()
        finally:
            self.open -= 1
            writer.close()

    async def _play(self, writer: asyncio.StreamWriter, steps: Iterable[Step]) -> None:
        for step in steps:
            if step is None:
                writer.transport.abort()
                return
            if isinstance(step, asyncio.Event):
                await step.wait()
            elif isinstance(step, float):
                await asyncio.sleep(step)
            else:
                try:
                    writer.write(step)
                    await writer.drain()
                except ConnectionError:
                    self.left.set()
                    return
                self.sent += len(step)
        if writer.can_write_eof():
            writer.write_eof()

    def _claim_own_addresses(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The kernel answers from an address itself where that is its own; elsewhere nothing is asked."""
        connect, getsockname = socket.socket.connect, socket.socket.getsockname
        asked: dict[int, str] = {}

        def fake_connect(sock: socket.socket, address: Any) -> None:
            if sock.type != socket.SOCK_DGRAM:
                return connect(sock, address)
            asked[sock.fileno()] = address[0]
            return None

        def fake_getsockname(sock: socket.socket) -> Any:
            if sock.type != socket.SOCK_DGRAM or sock.fileno() not in asked:
                return getsockname(sock)
            address = asked.pop(sock.fileno())
            return (address if address in self.own else "192.0.2.77", 1)

        monkeypatch.setattr(socket.socket, "connect", fake_connect)
        monkeypatch.setattr(socket.socket, "getsockname", fake_getsockname)


class _FakeResolver(AbstractResolver):
    def __init__(self, internet: FakeInternet) -> None:
        self._internet = internet

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        self._internet.looked_up.append(host)
        known = self._internet.names.get(host)
        addresses = known() if callable(known) else known
        if isinstance(addresses, Awaitable):
            addresses = await addresses
        if not addresses:
            raise OSError(None, "DNS lookup failed")
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=0,
                flags=0,
            )
            for address in addresses
        ]

    async def close(self) -> None:
        pass
