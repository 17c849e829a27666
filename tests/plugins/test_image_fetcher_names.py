"""How the image fetcher looks up names: its real resolver, asked against a DNS server on loopback."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from ipaddress import ip_address
from typing import cast

import aiohttp
import pytest
from aiohttp.abc import AbstractResolver

from plugins.chat_completions import ChatCompletions
from plugins.image_fetcher import ImageFetcher
from plugins.image_fetcher.guard import AddressRefused, Guard, GuardedResolver, own_resolver
from proxy.testing import ScriptedUpstream, running_gateway
from tests.process import eventually

A, AAAA = 1, 28
NO_SUCH_NAME = 3


class DnsServer(asyncio.DatagramProtocol):
    """Answers A and AAAA from a table, not at all for names that begin with ``never``. Keeps what it was asked."""

    def __init__(self) -> None:
        self.names: dict[str, list[str]] = {}
        self.asked: list[str] = []
        self.address = ""
        self._closed = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)
        self.address = "{}:{}".format(*transport.get_extra_info("sockname"))

    def datagram_received(self, data: bytes, sender: tuple[str, int]) -> None:
        labels, at = [], 12
        while length := data[at]:
            labels.append(data[at + 1 : at + 1 + length].decode())
            at += length + 1
        (kind,) = struct.unpack_from("!H", data, at + 1)
        name = ".".join(labels).lower()
        self.asked.append(name)
        if name.startswith("never"):
            return
        addresses = [ip_address(each) for each in self.names.get(name, ())]
        packed = [each.packed for each in addresses if each.version == (4 if kind == A else 6)]
        failed = 0 if name in self.names else NO_SUCH_NAME
        answer = struct.pack("!2s5H", data[:2], 0x8180 | failed, 1, len(packed), 0, 0) + data[12 : at + 5]
        for each in packed:
            answer += struct.pack("!3HIH", 0xC00C, kind, 1, 0, len(each)) + each
        self._transport.sendto(answer, sender)

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed.set()

    async def close(self) -> None:
        self._transport.close()
        await self._closed.wait()


@pytest.fixture
async def dns() -> AsyncIterator[DnsServer]:
    _, server = await asyncio.get_running_loop().create_datagram_endpoint(DnsServer, local_addr=("127.0.0.1", 0))
    yield server
    await server.close()


Resolve = Callable[[str], Awaitable[list[str]]]


@pytest.fixture
async def resolve(dns: DnsServer) -> AsyncIterator[Resolve]:
    """The addresses of a name that may be visited."""
    resolver = GuardedResolver(Guard([]), own_resolver([dns.address]))

    async def addresses(name: str) -> list[str]:
        return [each["host"] for each in await resolver.resolve(name, 80)]

    yield addresses
    await resolver.close()


async def test_a_name_is_looked_up(dns: DnsServer, resolve: Resolve) -> None:
    """A public name gives its public addresses."""
    dns.names["public.example"] = ["93.184.216.34"]

    assert ["93.184.216.34"] == await resolve("public.example")


ANSWERS = {
    "private": ["10.0.0.1"],
    "loopback": ["127.0.0.1"],
    "metadata": ["169.254.169.254"],
    "several": ["127.0.0.1", "192.168.0.1"],
}


@pytest.mark.parametrize("addresses", ANSWERS.values(), ids=ANSWERS)
async def test_a_private_answer_is_as_good_as_none(dns: DnsServer, resolve: Resolve, addresses: list[str]) -> None:
    """What the DNS says of a name is judged before it is used."""
    dns.names["inside.example"] = addresses

    with pytest.raises(AddressRefused):
        await resolve("inside.example")


async def test_no_answer_is_kept_for_longer_than_it_says(dns: DnsServer, resolve: Resolve) -> None:
    """A name is looked up, and its addresses are judged, for each download; these answers may not be kept at all."""
    dns.names["changing.example"] = ["93.184.216.34"]
    first = await resolve("changing.example")
    dns.names["changing.example"] = ["127.0.0.1"]

    assert ["93.184.216.34"] == first
    with pytest.raises(AddressRefused):
        await resolve("changing.example")


async def test_the_search_domain_is_not_applied(dns: DnsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bare name means itself, never a host of the gateway's own domain."""
    monkeypatch.setenv("LOCALDOMAIN", "corp.example")
    dns.names["intranet.corp.example"] = ["93.184.216.34"]
    resolver = own_resolver([dns.address])

    with pytest.raises(OSError):  # noqa: PT011 - that it fails is all
        await resolver.resolve("intranet", 80)
    await resolver.close()

    assert {"intranet"} == {*dns.asked}


async def test_names_that_never_answer_delay_nobody_else(dns: DnsServer) -> None:
    """While twenty look-ups of image hosts hang, a request whose upstream has a name is answered."""

    class Fetcher(ImageFetcher):
        def resolver(self) -> AbstractResolver:
            return own_resolver([dns.address])

    parts = [{"type": "image_url", "image_url": {"url": f"http://never{number}.example/"}} for number in range(20)]
    hanging = {"model": "model", "messages": [{"role": "user", "content": parts}]}
    plain = {"model": "model", "messages": [{"role": "user", "content": "Hello"}]}
    async with ScriptedUpstream() as upstream, aiohttp.ClientSession() as client:
        by_name = upstream.url.replace("127.0.0.1", "localhost")
        settings = {"parallel": 20, "timeout": 30}
        async with running_gateway([ChatCompletions, (Fetcher, settings)], upstream=by_name) as url:
            path = f"{url}/openai/v1/chat/completions"
            with_images = asyncio.create_task(client.post(path, json=hanging))
            await eventually(lambda: len({*dns.asked}) == 20)

            async with asyncio.timeout(2), client.post(path, json=plain) as answer:
                status = answer.status

            is_hanging = not with_images.done()
            with_images.cancel()
            await asyncio.gather(with_images, return_exceptions=True)
    assert (200, True, 1) == (status, is_hanging, len(upstream.received))
