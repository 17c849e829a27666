"""What differs from upstream to upstream: how it is reached, and with which key. Over real sockets."""

from __future__ import annotations

import asyncio
import base64
import re
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from ssl import PROTOCOL_TLS_SERVER, SSLContext
from typing import Any, NamedTuple

import pytest
from structlog.testing import capture_logs

from proxy.settings import UpstreamSettings
from proxy.testing import Received, Reply, ScriptedUpstream, stream_reply
from tests.configured import config_for, configured_gateway
from tests.contract_plugins import BOTH_ROUTES, ask_for, ending_of

KEY = "provider-key-4711"
ROUTES = pytest.mark.parametrize("format", BOTH_ROUTES)


async def received_with(
    settings: Mapping[str, Any], folder: Path, format: str = "messages", path: str = "", **headers: str
) -> Received:
    """What reaches an upstream that has these settings, ``path`` behind its address."""
    async with ScriptedUpstream() as upstream:
        config = config_for({"own": {"base_url": upstream.url + path, **settings}})
        async with configured_gateway(config, folder) as url:
            answer = await ask_for(url, format, headers=headers)
    assert "whole" == ending_of(answer, format)
    [received] = upstream.received
    return received


# How an upstream is reached

# its settings; the headers that it gets, None for one that isn't there
SENT: dict[str, tuple[dict[str, Any], dict[str, str | None]]] = {
    "a key": ({"api_key": KEY}, {"x-api-key": KEY, "authorization": None}),
    "a bearer token": ({"api_key": KEY, "auth": "bearer"}, {"authorization": f"Bearer {KEY}", "x-api-key": None}),
    "no key": ({}, {"x-api-key": None, "authorization": None}),
    "no bearer token": ({"auth": "bearer"}, {"x-api-key": None, "authorization": None}),
    "a key in a file": ({"api_key_file": "key.txt"}, {"x-api-key": KEY}),
    "a bearer token in a file": (
        {"api_key_file": "key.txt", "auth": "bearer"},
        {"authorization": f"Bearer {KEY}", "x-api-key": None},
    ),
    "the usual version": ({}, {"anthropic-version": "2023-06-01"}),
    "another version": ({"version": "2024-02-29"}, {"anthropic-version": "2024-02-29"}),
    "further headers": (
        {"headers": {"X-Team": "research", "x-trace": "a b"}},
        {"x-team": "research", "x-trace": "a b"},
    ),
    "a user agent": ({"headers": {"User-Agent": "mine/1"}}, {"user-agent": "mine/1"}),
    "a beta of the operator's": ({"headers": {"anthropic-beta": "a-2026"}}, {"anthropic-beta": "a-2026"}),
}


@pytest.mark.parametrize(("settings", "expected"), SENT.values(), ids=SENT)
@ROUTES
async def test_a_setting_is_in_the_request(
    tmp_path: Path, format: str, settings: dict[str, Any], expected: dict[str, str | None]
) -> None:
    """Key, version and further headers reach the upstream as its settings say, in whichever format was asked."""
    (tmp_path / "key.txt").write_text(f"{KEY}\n")

    received = await received_with(settings, tmp_path, format)

    assert expected == {name: received.headers.get(name) for name in expected}


PATHS_OF_BASE_URLS = {
    "": "/v1/messages",
    "/": "/v1/messages",
    "/anthropic": "/anthropic/v1/messages",
    "/a/b/": "/a/b/v1/messages",
    "/api%2Fx": "/api%2Fx/v1/messages",
}


@pytest.mark.parametrize(
    ("path", "expected"), PATHS_OF_BASE_URLS.items(), ids=[f"path {p}" for p in PATHS_OF_BASE_URLS]
)
async def test_a_path_in_the_base_url_is_kept(tmp_path: Path, path: str, expected: str) -> None:
    """The endpoint's path stands behind that of the base URL."""
    received = await received_with({}, tmp_path, path=path)

    assert expected == received.path


async def test_tokens_are_counted_below_the_same_path(tmp_path: Path) -> None:
    """The endpoint that counts tokens is found below the base URL, too."""
    async with ScriptedUpstream(Reply([b'{"input_tokens":7}'])) as upstream:
        config = config_for({"own": {"base_url": f"{upstream.url}/anthropic"}})
        async with configured_gateway(config, tmp_path) as url:
            counted = await ask_for(f"{url}/v1/messages/count_tokens?", "messages")  # the path goes into the query

    assert ({"input_tokens": 7}, "/anthropic/v1/messages/count_tokens") == (counted.data, upstream.received[0].path)


@pytest.mark.parametrize("auth", ["x-api-key", "bearer"])
async def test_a_client_cannot_choose_what_is_sent(tmp_path: Path, auth: str) -> None:
    """Key, version and further headers of a client don't stand in for the upstream's."""
    settings = {"api_key": KEY, "auth": auth, "headers": {"x-team": "research"}}
    mine = {
        "x-api-key": "mine",
        "authorization": "Bearer mine",
        "anthropic-version": "2020-01-01",
        "x-team": "mine",
        "proxy-authorization": "mine",
    }

    received = await received_with(settings, tmp_path, **mine)

    assert [] == [name for name, value in received.headers.items() if "mine" in value or "2020" in value]
    assert "research" == received.headers["x-team"]


async def test_a_client_s_beta_stands_instead_of_the_operator_s(tmp_path: Path) -> None:
    """What a client of the Messages format asks for reaches the upstream unchanged, with nothing added."""
    settings = {"headers": {"Anthropic-Beta": "a-2026"}}

    received = await received_with(settings, tmp_path, **{"anthropic-beta": "b-2026"})

    assert "b-2026" == received.headers["anthropic-beta"]


# Where the upstream's own error quotes its key
TELL_TALES = {
    "an error": lambda key: Reply([b'{"error":{"message":"no such key: %b"}}' % key], 401),
    "an error of the request": lambda key: Reply([b'{"error":{"message":"%b: is odd","type":"x"}}' % key], 400),
    "escaped": lambda key: Reply([b'{"error":{"message":"\\u0070%b: is odd"}}' % key[1:]], 400),
    "as a field": lambda key: Reply([b'{"error":{"message":"odd","%b":["%b"]}}' % (key, key)], 400),
    "a header": lambda key: Reply([b"{}"], 400, headers={"x-key": key.decode(), "www-authenticate": key.decode()}),
    "an event": lambda key: stream_reply([{"type": "error", "error": {"type": "api_error", "message": key.decode()}}]),
    "HTML": lambda key: Reply([b"<html>%b</html>" % key], 502, "text/html"),
}


@pytest.mark.parametrize("reply", TELL_TALES.values(), ids=TELL_TALES)
@pytest.mark.parametrize("auth", ["x-api-key", "bearer"])
@ROUTES
async def test_the_key_stands_nowhere_else(
    tmp_path: Path, format: str, auth: str, reply: Callable[[bytes], Reply]
) -> None:
    """The upstream's key goes into one header of the request to it, never into its body, an answer or the log, though
    the upstream itself quotes it."""
    async with ScriptedUpstream(*(reply(KEY.encode()) for _ in range(2))) as upstream:
        config = config_for({"own": {"base_url": upstream.url, "api_key": KEY, "auth": auth}})
        with capture_logs() as lines:
            async with configured_gateway(config, tmp_path) as url:
                answers = [await ask_for(url, format, stream) for stream in (False, True)]

    header = "authorization" if auth == "bearer" else "x-api-key"
    assert [[header]] * 2 == [
        [name for name, value in received.headers.items() if KEY in value] for received in upstream.received
    ]
    assert [] == [each for each in upstream.received if KEY.encode() in each.body or KEY in each.path]
    assert KEY not in str([(answer.headers, answer.body) for answer in answers])
    assert lines
    assert KEY not in str(lines)


# TLS


class Authority(NamedTuple):
    """A certificate authority of the test's own, and a certificate by it for 127.0.0.1."""

    certificate: Path
    context: SSLContext


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    folder = tmp_path_factory.mktemp("authority")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1")
    key = "-newkey rsa:2048 -nodes"
    openssl(folder, f"req -x509 {key} -keyout ca.key -out ca.pem -days 2 -subj /CN=own-authority")
    openssl(folder, f"req {key} -keyout server.key -out server.csr -subj /CN=upstream")
    openssl(
        folder, "x509 -req -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial -extfile names -days 2 -out s.pem"
    )
    context = SSLContext(PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "s.pem", folder / "server.key")
    return Authority(folder / "ca.pem", context)


def openssl(folder: Path, arguments: str) -> None:
    subprocess.run(["openssl", *arguments.split()], cwd=folder, check=True, capture_output=True)


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """All bytes of one side to the other, to their end."""
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, port: int, first: bytes) -> None:
    """Connect a client with a server, ``first`` ahead of what it sends."""
    far_reader, far_writer = await asyncio.open_connection(host, port)
    far_writer.write(first)
    await asyncio.gather(copy(reader, far_writer), copy(far_reader, writer))


@asynccontextmanager
async def in_tls(upstream: ScriptedUpstream, context: SSLContext) -> AsyncIterator[str]:
    """The upstream behind a socket that speaks TLS; its base URL."""
    port = int(upstream.url.rpartition(":")[2])

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await join(reader, writer, "127.0.0.1", port, b"")

    async with listening(accept, ssl=context) as own:
        yield f"https://127.0.0.1:{own}"


@asynccontextmanager
async def listening(accept: Callable[[Any, Any], Any], **options: Any) -> AsyncIterator[int]:
    """A server on a free port; whatever still runs at the end is cancelled."""
    tasks: set[asyncio.Task[None]] = set()

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(accept(reader, writer))
        tasks.add(task)
        await asyncio.gather(task, return_exceptions=True)
        writer.close()

    server = await asyncio.start_server(accepted, "127.0.0.1", 0, **options)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@ROUTES
async def test_an_authority_of_the_operator_s_own_is_trusted(tmp_path: Path, authority: Authority, format: str) -> None:
    """With its certificate in ca_file, relative to the configuration, an upstream's own authority is trusted."""
    (tmp_path / "ca.pem").write_bytes(authority.certificate.read_bytes())
    async with ScriptedUpstream() as upstream, in_tls(upstream, authority.context) as base_url:
        config = config_for({"own": {"base_url": base_url, "api_key": KEY, "ca_file": "ca.pem"}})
        async with configured_gateway(config, tmp_path) as url:
            answer = await ask_for(url, format)

    assert "whole" == ending_of(answer, format)
    assert KEY == upstream.received[0].headers["x-api-key"]


@ROUTES
async def test_an_unknown_authority_is_not_trusted(tmp_path: Path, authority: Authority, format: str) -> None:
    """Without ca_file the certificate is refused before a byte of the request is sent, and the log says why."""
    async with ScriptedUpstream() as upstream, in_tls(upstream, authority.context) as base_url:
        config = config_for({"own": {"base_url": base_url, "api_key": KEY}})
        with capture_logs() as lines:
            async with configured_gateway(config, tmp_path) as url:
                answer = await ask_for(url, format)

    assert (500, []) == (answer.status, upstream.received)
    assert any("Certificate" in str(line.get("cause")) for line in lines)


async def test_a_name_that_the_certificate_lacks_is_not_trusted(tmp_path: Path, authority: Authority) -> None:
    """A trusted authority vouches for the names in its certificates alone."""
    (tmp_path / "ca.pem").write_bytes(authority.certificate.read_bytes())
    async with ScriptedUpstream() as upstream, in_tls(upstream, authority.context) as base_url:
        by_name = base_url.replace("127.0.0.1", "localhost")
        config = config_for({"own": {"base_url": by_name, "ca_file": "ca.pem"}})
        async with configured_gateway(config, tmp_path) as url:
            answer = await ask_for(url, "messages")

    assert (500, []) == (answer.status, upstream.received)


# An HTTP proxy on the way


class HttpProxy:
    """A small HTTP proxy: tunnels for CONNECT, absolute targets for all else. ``heads`` is what it was sent."""

    def __init__(self, refuses: bool = False) -> None:
        self.refuses = refuses
        self.heads: list[str] = []

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.heads.append(head)
        method, target, _ = head.split(" ", 2)
        if self.refuses:
            writer.write(b"HTTP/1.1 407 Proxy Authentication Required\r\ncontent-length: 0\r\n\r\n")
            await writer.drain()
            return
        host, _, port = target.removeprefix("http://").partition("/")[0].partition(":")
        if method == "CONNECT":
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            await join(reader, writer, host, int(port), b"")
        else:
            path = "/" + target.removeprefix("http://").partition("/")[2]
            await join(reader, writer, host, int(port), head.replace(target, path, 1).encode())


@ROUTES
async def test_a_proxy_is_used(tmp_path: Path, format: str) -> None:
    """A request to an http upstream goes through its proxy, which is told the whole address."""
    proxy = HttpProxy()
    async with ScriptedUpstream() as upstream, listening(proxy.accept) as port:
        config = config_for(
            {"own": {"base_url": f"{upstream.url}/x", "api_key": KEY, "proxy": f"http://127.0.0.1:{port}"}}
        )
        async with configured_gateway(config, tmp_path) as url:
            answer = await ask_for(url, format)

    assert "whole" == ending_of(answer, format)
    assert [f"POST {upstream.url}/x/v1/messages HTTP/1.1"] == [head.partition("\r\n")[0] for head in proxy.heads]
    assert KEY == upstream.received[0].headers["x-api-key"]


async def test_a_proxy_tunnels_tls_and_sees_no_key(tmp_path: Path, authority: Authority) -> None:
    """To an https upstream the proxy only opens a tunnel: it gets its own credentials, and never the upstream's key."""
    proxy = HttpProxy()
    (tmp_path / "ca.pem").write_bytes(authority.certificate.read_bytes())
    async with (
        ScriptedUpstream() as upstream,
        in_tls(upstream, authority.context) as base_url,
        listening(proxy.accept) as port,
    ):
        settings = {
            "base_url": base_url,
            "api_key": KEY,
            "ca_file": "ca.pem",
            "proxy": f"http://me:proxy-secret@127.0.0.1:{port}",
        }
        async with configured_gateway(config_for({"own": settings}), tmp_path) as url:
            answer = await ask_for(url, "messages")

    [head] = proxy.heads
    own = base64.b64encode(b"me:proxy-secret").decode()
    assert "whole" == ending_of(answer, "messages")
    assert head.startswith(f"CONNECT {base_url.removeprefix('https://')} HTTP/1.1\r\n")
    assert f"proxy-authorization: basic {own}".lower() in head.lower()
    assert KEY not in head
    assert "proxy-authorization" not in upstream.received[0].headers


@pytest.mark.parametrize("tls", [False, True], ids=["http", "https"])
async def test_a_proxy_that_refuses_is_an_upstream_that_failed(tmp_path: Path, authority: Authority, tls: bool) -> None:
    """Where the proxy asks for credentials, the client gets a 500 that says nothing of them, and nothing goes around
    the proxy."""
    proxy = HttpProxy(refuses=True)
    async with (
        ScriptedUpstream() as upstream,
        in_tls(upstream, authority.context) as in_front,
        listening(proxy.accept) as port,
    ):
        base_url = in_front if tls else upstream.url
        settings = {"base_url": base_url, "proxy": f"http://me:proxy-secret@127.0.0.1:{port}"}
        with capture_logs() as lines:
            async with configured_gateway(config_for({"own": settings}), tmp_path) as url:
                answer = await ask_for(url, "messages")

    assert (500, []) == (answer.status, upstream.received)
    assert [1, "an upstream failed"] == [len(proxy.heads), lines[0]["event"]]
    assert "proxy-secret" not in f"{lines} {answer}"


async def test_a_proxy_of_the_environment_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the upstream's own setting says which way its key goes."""
    proxy = HttpProxy()
    async with listening(proxy.accept) as port:
        for name in ("http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{port}")

        received = await received_with({"api_key": KEY}, tmp_path)

    assert (KEY, []) == (received.headers["x-api-key"], proxy.heads)


def test_every_setting_is_explained() -> None:
    """An operator finds each setting of an upstream on the page about upstreams."""
    page = (Path(__file__).parents[1] / "docs" / "upstreams.md").read_text()
    section = page.partition("## What differs")[2].partition("\n## ")[0]
    named = [re.findall(r"`(\w+)`", line.split(" | ")[0]) for line in section.splitlines() if line.startswith("| `")]

    assert set(UpstreamSettings.model_fields) == {name for names in named for name in names}
