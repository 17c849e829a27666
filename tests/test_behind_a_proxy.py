"""The reverse proxies that the docs show, for real: nginx and Caddy run on loopback with the configuration of the page.

One that isn't installed is left out, which pytest says (``-rs``).
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from io import BytesIO
from pathlib import Path
from ssl import SSLContext, create_default_context
from typing import Any, NamedTuple

import aiohttp
import orjson
import pytest
from structlog.testing import capture_logs

from plugins.chat_completions import ChatCompletions
from proxy.settings import Server
from proxy.testing import Reply, ScriptedUpstream, running_gateway, stream_reply, text_events
from tests.contract_plugins import BOTH_ROUTES, FOREVER, PATHS, PATIENCE, PLAIN_AND_STREAMED, request_of

PAGE = Path(__file__).parents[1] / "docs" / "behind-a-proxy.md"
BASE = "/llm"
ROUTES = pytest.mark.parametrize("format", BOTH_ROUTES)
MODES = pytest.mark.parametrize("stream", PLAIN_AND_STREAMED.values(), ids=PLAIN_AND_STREAMED)
SECONDS = {"s": 1, "m": 60, "h": 3600}


def shown(language: str) -> str:
    """The one block of the page in this language."""
    [text] = re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return str(text)


class Site(NamedTuple):
    """Where a reverse proxy is to run: a folder of its own with a certificate in it, and both ports."""

    folder: Path
    port: int
    gateway_port: int

    def with_ports(self, text: str) -> str:
        return text.replace("127.0.0.1:8787", f"127.0.0.1:{self.gateway_port}")


def nginx(site: Site) -> Sequence[str]:
    """Its arguments, after its configuration has been written."""
    server = site.with_ports(shown("nginx"))
    server = server.replace("listen 443 ssl", f"listen 127.0.0.1:{site.port} ssl")
    server = server.replace("/etc/ssl/llm", str(site.folder / "server"))
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    places = " ".join(f"{kind}_temp_path {site.folder / kind};" for kind in kinds)
    first = "daemon off; master_process off; error_log stderr;"
    config = site.folder / "nginx.conf"
    config.write_text(f"{first} pid {site.folder}/pid; events {{}}\nhttp {{ access_log off; {places}\n{server} }}\n")
    return ["-e", "stderr", "-p", str(site.folder), "-c", str(config)]


def caddy(site: Site) -> Sequence[str]:
    """Its arguments, after its configuration has been written."""
    certificate = f"tls {site.folder}/server.pem {site.folder}/server.key"
    own = site.with_ports(shown("caddy"))
    own = own.replace("llm.example.org {", f"https://127.0.0.1:{site.port} {{\n{certificate}")
    config = site.folder / "Caddyfile"
    config.write_text("{\nadmin off\nauto_https off\n}\n" + own)
    return ["run", "--config", str(config), "--adapter", "caddyfile"]


PROXIES: Mapping[str, Callable[[Site], Sequence[str]]] = {"nginx": nginx, "caddy": caddy}


class Running(NamedTuple):
    """A reverse proxy in front of a gateway."""

    url: str
    """Of the proxy, with the base path."""
    trust: SSLContext
    upstream: ScriptedUpstream
    lines: list[Any]
    """What the gateway has logged."""

    @asynccontextmanager
    async def post(
        self, format: str, body: Any, address: str = "127.0.0.1", **headers: str
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The answer to a client of this address."""
        connector = aiohttp.TCPConnector(local_addr=(address, 0), ssl=self.trust)
        timeout = aiohttp.ClientTimeout(total=3 * PATIENCE)
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
            session.post(self.url + PATHS[format], data=BytesIO(orjson.dumps(body)), headers=headers) as answer,
        ):
            yield answer


class Start(NamedTuple):
    """Starts a reverse proxy in front of a gateway whose upstream plays these replies."""

    program: str
    arguments: Callable[[Site], Sequence[str]]
    folder: Path

    @asynccontextmanager
    async def __call__(self, *replies: Reply) -> AsyncIterator[Running]:
        server = {"base_path": BASE, "trusted_proxies": ["127.0.0.1/32"]}
        certify(self.folder)
        with capture_logs() as lines:
            async with (
                ScriptedUpstream(*replies) as upstream,
                running_gateway([ChatCompletions], upstream=upstream.url, server=server) as url,
            ):
                site = Site(self.folder, free_port(), int(url.rpartition(":")[2]))
                with started([self.program, *self.arguments(site)], self.folder) as process:
                    await listens(site, process)
                    trust = create_default_context(cafile=self.folder / "server.pem")
                    yield Running(f"https://127.0.0.1:{site.port}{BASE}", trust, upstream, lines)


@pytest.fixture(params=PROXIES)
def behind(request: pytest.FixtureRequest, tmp_path: Path) -> Start:
    program = shutil.which(request.param, path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
    if program is None:
        pytest.skip(f"{request.param} is not installed")
    return Start(program, PROXIES[request.param], tmp_path)


@contextmanager
def started(command: Sequence[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process whose home is the folder, where what it writes stands in ``written``."""
    homes = dict.fromkeys(("HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME"), str(folder))
    with (folder / "written").open("wb") as written:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=written, stderr=written, env={**os.environ, **homes}
        )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(PATIENCE)


def certify(folder: Path) -> None:
    """A certificate for 127.0.0.1 that vouches for itself, and its key."""
    made = "req -x509 -newkey rsa:2048 -nodes -keyout server.key -out server.pem -days 2 -subj /CN=edge"
    names = ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(["openssl", *made.split(), *names], cwd=folder, check=True, capture_output=True)


def free_port() -> int:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return int(unused.getsockname()[1])


async def listens(site: Site, process: subprocess.Popen[bytes]) -> None:
    async with asyncio.timeout(PATIENCE):
        while True:
            assert process.poll() is None, (site.folder / "written").read_text()
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", site.port)
            except ConnectionRefusedError:
                await asyncio.sleep(0.02)
                continue
            writer.close()
            return


@pytest.mark.slow
@ROUTES
@MODES
async def test_answers_come_through_a_reverse_proxy(behind: Start, format: str, stream: bool) -> None:
    """With the shown configuration both formats work, plain and streamed, over TLS and below the base path."""
    replies = [stream_reply(text_events("Hel", "lo."))] if stream else []
    async with behind(*replies) as running, running.post(format, request_of(stream)) as answer:
        text = (await answer.read()).decode()

    assert 200 == answer.status
    assert "Hel" in text
    assert answer.headers["request-id"]
    if stream:
        assert text.endswith("data: [DONE]\n\n" if format == "openai" else 'data: {"type":"message_stop"}\n\n')


@pytest.mark.slow
@ROUTES
async def test_events_are_not_held_back_by_a_reverse_proxy(behind: Start, format: str) -> None:
    """The first words arrive while the rest is still to come, and a client that leaves ends the upstream's work."""
    async with behind(stream_reply([*text_events("Hel", stop_reason=None), FOREVER])) as running:
        async with running.post(format, request_of(True)) as answer:
            text = ""
            while "Hel" not in text:
                text += (await answer.content.readany()).decode()
            still_open = running.upstream.open
            assert answer.connection is not None
            assert answer.connection.transport is not None
            answer.connection.transport.abort()  # as a client that is ended; asyncio's close waits for nginx's goodbye
        async with asyncio.timeout(PATIENCE):
            await running.upstream.left.wait()

    assert 1 == still_open


@pytest.mark.slow
async def test_the_client_s_address_comes_through_a_reverse_proxy(behind: Start) -> None:
    """The log has the address of whoever spoke to the proxy, not one that he made up."""
    made_up = {"x-forwarded-for": "203.0.113.7"}
    async with (
        behind() as running,
        running.post("messages", request_of(False), address="127.0.0.2", **made_up) as answer,
    ):
        await answer.read()

    assert ["127.0.0.2"] == [line["client"] for line in running.lines if line["event"] == "request"]


@pytest.mark.slow
@pytest.mark.parametrize(("megabytes", "status"), [(31, 200), (33, 413)])
async def test_large_bodies_come_through_a_reverse_proxy(behind: Start, megabytes: int, status: int) -> None:
    """What the gateway takes the proxy takes, too; what is too large the gateway refuses in the client's envelope."""
    body = request_of(False, messages=[{"role": "user", "content": "x" * (megabytes * 2**20)}])
    async with behind() as running, running.post("messages", body) as answer:
        data = orjson.loads(await answer.read())

    assert status == answer.status
    assert ("message" if status == 200 else "error") == data["type"]


def seconds(text: str) -> int:
    return int(text[:-1]) * SECONDS[text[-1]]


def test_the_shown_nginx_waits_longer_than_the_gateway() -> None:
    """No time-out of the shown configuration ends what the gateway would still answer."""
    [wait] = re.findall(r"proxy_read_timeout (\w+);", shown("nginx"))
    [body] = re.findall(r"client_max_body_size (\d+)m;", shown("nginx"))

    assert seconds(wait) > Server().request_timeout > Server().ping_interval
    assert int(body) > 32
