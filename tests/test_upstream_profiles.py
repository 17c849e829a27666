"""What differs from upstream to upstream: how it is reached, and how servers other than Anthropic's answer.

Over real sockets. The first part is about the settings of an upstream, the second plays what vLLM, Ollama and
llama.cpp's server are known to send, and looks at what becomes of it in both formats, plain and streamed.
"""

from __future__ import annotations

import asyncio
import base64
import re
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from ssl import PROTOCOL_TLS_SERVER, SSLContext
from typing import Any, NamedTuple

import orjson
import pytest
from structlog.testing import capture_logs

from proxy.settings import UpstreamSettings
from proxy.testing import Received, Reply, ScriptedUpstream, stream_reply
from tests.configured import config_for, configured_gateway
from tests.contract_plugins import BOTH_ROUTES, PLAIN_AND_STREAMED, Seen, ask_for, ending_of, request_of

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
    named = [re.findall(r"`(\w+)`", line.split(" | ")[0]) for line in page.splitlines() if line.startswith("| `")]

    assert set(UpstreamSettings.model_fields) == {name for names in named for name in names}


# What other servers answer


class Call(NamedTuple):
    """A tool call, its arguments as they stand in the completion."""

    name: str
    arguments: str


class Completion(NamedTuple):
    """What matters of an answer in OpenAI's format."""

    content: str | None
    calls: tuple[Call, ...]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class Answers(NamedTuple):
    """One answer of a server in both of its forms, and what it is in OpenAI's format."""

    message: dict[str, Any]
    events: Sequence[Mapping[str, Any] | bytes]
    plain: Completion
    streamed: Completion


def message(content: Sequence[Any], stop_reason: str, usage: Mapping[str, int], **more: Any) -> dict[str, Any]:
    return {
        "id": "chatcmpl-xYz",
        "type": "message",
        "role": "assistant",
        "model": "smollm2",
        "content": [*content],
        "stop_reason": stop_reason,
        **more,
        "usage": usage,
    }


def start(usage: Mapping[str, int]) -> dict[str, Any]:
    return {"type": "message_start", "message": {**message([], "", usage), "stop_reason": None, "stop_sequence": None}}


def opened(index: int, **block: Any) -> dict[str, Any]:
    return {"type": "content_block_start", "index": index, "content_block": block}


def said(index: int, text: str) -> dict[str, Any]:
    return delta(index, "text_delta", text=text)


def argued(index: int, text: str) -> dict[str, Any]:
    return delta(index, "input_json_delta", partial_json=text)


def delta(index: int, kind: str, **more: Any) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": {"type": kind, **more}}


def closed(index: int) -> dict[str, Any]:
    return {"type": "content_block_stop", "index": index}


def ended(stop_reason: str, usage: Mapping[str, int], **more: Any) -> list[dict[str, Any]]:
    ending = {"type": "message_delta", "delta": {"stop_reason": stop_reason, **more}, "usage": usage}
    return [ending, {"type": "message_stop"}]


def alike(message: dict[str, Any], events: Sequence[Mapping[str, Any] | bytes], expected: Completion) -> Answers:
    return Answers(message, events, expected, expected)


COMMENTS = b":\n\n:\n\n"
TEXT = {"type": "text", "text": "Hello."}
NOW = {"type": "tool_use", "id": "aB3dE5", "name": "now", "input": {}}
WEATHER = {"type": "tool_use", "id": "fG7hI9", "name": "weather", "input": {"city": "Paris"}}
LLAMA_USAGE = {"input_tokens": 16, "output_tokens": 7, "cache_read_input_tokens": 741}
LLAMA_START = {"input_tokens": 16, "output_tokens": 0, "cache_read_input_tokens": 741}
OUTPUT = {"output_tokens": 7}

ANSWERS = {
    "llama.cpp: comments before the first event, output counted only at the end": alike(
        message([TEXT], "end_turn", LLAMA_USAGE, stop_sequence=None),
        [
            COMMENTS,
            start(LLAMA_START),
            opened(0, type="text", text=""),
            COMMENTS,
            said(0, "Hel"),
            said(0, "lo."),
            closed(0),
            *ended("end_turn", OUTPUT, stop_sequence=None),
        ],
        Completion("Hello.", (), "stop", 757, 7, 741),
    ),
    "llama.cpp: two calls that overlap, opened without input": alike(
        message([NOW, WEATHER], "tool_use", LLAMA_USAGE, stop_sequence=None),
        [
            COMMENTS,
            start(LLAMA_START),
            opened(0, type="tool_use", id="aB3dE5", name="now"),
            argued(0, "{}"),
            opened(1, type="tool_use", id="fG7hI9", name="weather"),
            argued(1, '{"city":'),
            argued(1, '"Paris"}'),
            closed(0),
            closed(1),
            *ended("tool_use", OUTPUT),
        ],
        Completion(None, (Call("now", "{}"), Call("weather", '{"city":"Paris"}')), "tool_calls", 757, 7, 741),
    ),
    "llama.cpp: calls whose pieces alternate": alike(
        message([NOW, WEATHER], "tool_use", LLAMA_USAGE),
        [
            start(LLAMA_START),
            opened(0, type="tool_use", id="aB3dE5", name="now"),
            opened(1, type="tool_use", id="fG7hI9", name="weather"),
            argued(1, '{"city":'),
            argued(0, "{}"),
            argued(1, '"Paris"}'),
            closed(1),
            closed(0),
            *ended("tool_use", OUTPUT),
        ],
        Completion(None, (Call("now", "{}"), Call("weather", '{"city":"Paris"}')), "tool_calls", 757, 7, 741),
    ),
    "llama.cpp: a call without input or arguments": alike(
        message([NOW], "tool_use", LLAMA_USAGE),
        [
            start(LLAMA_START),
            opened(0, type="tool_use", id="aB3dE5", name="now"),
            closed(0),
            *ended("tool_use", OUTPUT),
        ],
        Completion(None, (Call("now", "{}"),), "tool_calls", 757, 7, 741),
    ),
    "llama.cpp: thinking and text that overlap, no signature": alike(
        message([{"type": "thinking", "thinking": "Hm.", "signature": ""}, TEXT], "end_turn", LLAMA_USAGE),
        [
            COMMENTS,
            start(LLAMA_START),
            opened(0, type="thinking", thinking=""),
            delta(0, "thinking_delta", thinking="Hm."),
            opened(1, type="text", text=""),
            said(1, "Hello."),
            delta(0, "signature_delta", signature=""),
            closed(0),
            closed(1),
            *ended("end_turn", OUTPUT),
        ],
        Completion("Hello.", (), "stop", 757, 7, 741),
    ),
    "llama.cpp: a stop sequence that is an end_turn": alike(
        message([TEXT], "end_turn", LLAMA_USAGE, stop_sequence="END"),
        [
            start(LLAMA_START),
            opened(0, type="text", text=""),
            said(0, "Hello."),
            closed(0),
            *ended("end_turn", OUTPUT, stop_sequence="END"),
        ],
        Completion("Hello.", (), "stop", 757, 7, 741),
    ),
    "llama.cpp: a call that max_tokens cut off": Answers(
        message([{**WEATHER, "input": {}}], "max_tokens", LLAMA_USAGE),
        [
            start(LLAMA_START),
            opened(0, type="tool_use", id="fG7hI9", name="weather"),
            argued(0, '{"ci'),
            closed(0),
            *ended("max_tokens", OUTPUT),
        ],
        Completion(None, (Call("weather", "{}"),), "length", 757, 7, 741),
        Completion(None, (Call("weather", '{"ci'),), "length", 757, 7, 741),
    ),
    "vLLM: null fields left out, no pings": alike(
        message([TEXT], "end_turn", {"input_tokens": 12, "output_tokens": 7}),
        [
            start({"input_tokens": 12, "output_tokens": 0}),
            opened(0, type="text", text=""),
            said(0, "Hello."),
            closed(0),
            *ended("end_turn", {"input_tokens": 12, "output_tokens": 7}),
        ],
        Completion("Hello.", (), "stop", 12, 7),
    ),
    "vLLM: thinking with a signature of its own": alike(
        message(
            [{"type": "thinking", "thinking": "Hm.", "signature": "a0b1"}, TEXT, WEATHER],
            "tool_use",
            {"input_tokens": 12, "output_tokens": 7, "cache_read_input_tokens": 3, "cache_creation_input_tokens": 0},
        ),
        [
            start({"input_tokens": 12, "output_tokens": 0, "cache_read_input_tokens": 3}),
            opened(0, type="thinking", thinking="", signature=""),
            delta(0, "thinking_delta", thinking="Hm."),
            delta(0, "signature_delta", signature="a0b1"),
            closed(0),
            opened(1, type="text", text=""),
            said(1, "Hello."),
            closed(1),
            opened(2, type="tool_use", id="fG7hI9", name="weather", input={}),
            argued(2, '{"city":"Paris"}'),
            closed(2),
            *ended("tool_use", OUTPUT),
        ],
        Completion("Hello.", (Call("weather", '{"city":"Paris"}'),), "tool_calls", 15, 7, 3),
    ),
    "Ollama: two counts, and input only at the end": alike(
        message([TEXT], "end_turn", {"input_tokens": 12, "output_tokens": 7}),
        [
            start({"input_tokens": 0, "output_tokens": 0}),
            opened(0, type="text", text=""),
            said(0, "Hello."),
            closed(0),
            *ended("end_turn", {"input_tokens": 12, "output_tokens": 7}),
        ],
        Completion("Hello.", (), "stop", 12, 7),
    ),
    "another: no usage at all": alike(
        {name: value for name, value in message([TEXT], "end_turn", {}).items() if name != "usage"},
        [
            {"type": "message_start", "message": {"id": "1", "type": "message", "role": "assistant", "content": []}},
            opened(0, type="text", text=""),
            said(0, "Hello."),
            closed(0),
            {"type": "message_delta", "delta": {"stop_reason": "end_turn"}},
            {"type": "message_stop"},
        ],
        Completion("Hello.", (), "stop", 0, 0),
    ),
    "another: counts given twice, with zeros at the end": alike(
        message([TEXT], "end_turn", LLAMA_USAGE),
        [
            start(LLAMA_START),
            opened(0, type="text", text=""),
            said(0, "Hello."),
            closed(0),
            *ended("end_turn", {"input_tokens": 0, "output_tokens": 7, "cache_read_input_tokens": 0}),
        ],
        Completion("Hello.", (), "stop", 757, 7, 741),
    ),
    "another: text that stands in the block's start": alike(
        message([TEXT], "end_turn", LLAMA_USAGE),
        [start(LLAMA_START), opened(0, type="text", text="Hel"), said(0, "lo."), closed(0), *ended("end_turn", OUTPUT)],
        Completion("Hello.", (), "stop", 757, 7, 741),
    ),
    "another: arguments that stand in the block's start": alike(
        message([WEATHER], "tool_use", LLAMA_USAGE),
        [start(LLAMA_START), opened(0, **WEATHER), closed(0), *ended("tool_use", OUTPUT)],
        Completion(None, (Call("weather", '{"city":"Paris"}'),), "tool_calls", 757, 7, 741),
    ),
    "another: a start of thinking without its field": alike(
        message([{"type": "thinking", "thinking": "Hm."}, TEXT], "end_turn", LLAMA_USAGE),
        [
            start(LLAMA_START),
            opened(0, type="thinking"),
            delta(0, "thinking_delta", thinking="Hm."),
            closed(0),
            opened(1, type="text"),
            said(1, "Hello."),
            closed(1),
            *ended("end_turn", OUTPUT),
        ],
        Completion("Hello.", (), "stop", 757, 7, 741),
    ),
}


def completion_of(answer: Seen) -> Completion:
    """What a client of OpenAI's format puts together, of a plain answer or of a stream."""
    if not answer.streamed:
        [choice], usage = answer.data["choices"], answer.data["usage"]
        message, finish_reason = choice["message"], choice["finish_reason"]
        content = message["content"]
        calls = [
            Call(**{name: call["function"][name] for name in Call._fields}) for call in message.get("tool_calls", ())
        ]
    else:
        chunks = answer.events[:-1]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        texts = [choice["delta"]["content"] for choice in choices if choice["delta"].get("content")]
        parts = [part for choice in choices for part in choice["delta"].get("tool_calls", ())]
        calls = [
            Call(
                "".join(part["function"].get("name", "") for part in parts if part["index"] == index),
                "".join(part["function"].get("arguments", "") for part in parts if part["index"] == index),
            )
            for index in sorted({part["index"] for part in parts})
        ]
        content = "".join(texts) or (None if calls else "")
        [finish_reason] = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
        usage = chunks[-1]["usage"]
    counts = usage["prompt_tokens"], usage["completion_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
    return Completion(content, tuple(calls), finish_reason, *counts)


@asynccontextmanager
async def in_front_of(reply: Reply, folder: Path) -> AsyncIterator[str]:
    """A gateway whose upstream answers like this."""
    async with (
        ScriptedUpstream(reply) as upstream,
        configured_gateway(config_for({"own": {"base_url": upstream.url}}), folder) as url,
    ):
        yield url


@pytest.mark.parametrize("answers", ANSWERS.values(), ids=ANSWERS)
async def test_a_plain_answer_in_openai_s_format(tmp_path: Path, answers: Answers) -> None:
    """Whatever a server leaves out or adds, the completion is what it said."""
    async with in_front_of(Reply([orjson.dumps(answers.message)]), tmp_path) as url:
        answer = await ask_for(url, "openai")

    assert answers.plain == completion_of(answer)
    assert "model" == answer.data["model"]


@pytest.mark.parametrize("answers", ANSWERS.values(), ids=ANSWERS)
async def test_a_stream_in_openai_s_format(tmp_path: Path, answers: Answers) -> None:
    """In whichever order a server opens and closes its blocks, the chunks add up to what it said."""
    body = request_of(True, stream_options={"include_usage": True})
    async with in_front_of(stream_reply(answers.events), tmp_path) as url:
        answer = await ask_for(url, "openai", body=body)

    assert "whole" == ending_of(answer, "openai")
    assert answers.streamed == completion_of(answer)
    assert {"model"} == {chunk["model"] for chunk in answer.events[:-1]}


@pytest.mark.parametrize("answers", ANSWERS.values(), ids=ANSWERS)
async def test_a_plain_answer_in_the_messages_format(tmp_path: Path, answers: Answers) -> None:
    """A message comes as the server wrote it, but for the model's name, which is the client's."""
    async with in_front_of(Reply([orjson.dumps(answers.message)]), tmp_path) as url:
        answer = await ask_for(url, "messages")

    assert orjson.dumps({**answers.message, "model": "model"}) == answer.body


@pytest.mark.parametrize("answers", ANSWERS.values(), ids=ANSWERS)
async def test_a_stream_in_the_messages_format(tmp_path: Path, answers: Answers) -> None:
    """Events come as the server sent them and in its order, but for comments and the model's name."""
    async with in_front_of(stream_reply(answers.events), tmp_path) as url:
        answer = await ask_for(url, "messages", True)

    first, *rest = [event for event in answers.events if isinstance(event, Mapping)]
    if "model" in first["message"]:
        first = {**first, "message": {**first["message"], "model": "model"}}
    expected = [b"event: %b\ndata: %b\n\n" % (event["type"].encode(), orjson.dumps(event)) for event in (first, *rest)]
    assert b"".join(expected) == answer.body


async def test_a_count_with_more_than_the_count(tmp_path: Path) -> None:
    """vLLM says more about a count of tokens; that comes, too."""
    counted = b'{"input_tokens":19,"context_management":{"original_input_tokens":19}}'
    async with in_front_of(Reply([counted]), tmp_path) as url:
        answer = await ask_for(f"{url}/v1/messages/count_tokens?", "messages")  # the path goes into the query

    assert (200, counted) == (answer.status, answer.body)


# What other servers' errors become: status and message in OpenAI's format, status and type in the Messages format

CONTEXT = "request (5000 tokens) exceeds the available context size (4096 tokens)"
INTERNAL = "the provider failed to answer this request"


class Error(NamedTuple):
    """An error of a server, and what clients are told."""

    reply: Callable[[], Reply]
    openai: int
    messages: int
    type: str
    message: str


def with_status(number: int, body: Any = None, content_type: str = "application/json") -> Callable[[], Reply]:
    pieces = [] if body is None else [body if isinstance(body, bytes) else orjson.dumps(body)]
    return lambda: Reply(pieces, number, content_type)


def llama(number: int, type: str, message: str, **more: Any) -> Callable[[], Reply]:
    return with_status(number, {"error": {"code": number, "message": message, "type": type, **more}})


def vllm(number: int, type: str, message: str) -> Callable[[], Reply]:
    return with_status(number, {"type": "error", "error": {"type": type, "message": message}})


ERRORS = {
    "llama.cpp: a prompt that is too long": Error(
        llama(400, "exceed_context_size_error", CONTEXT, n_prompt_tokens=5000, n_ctx=4096),
        *(400, 400, "invalid_request_error", CONTEXT),
    ),
    "llama.cpp: a bad request": Error(
        llama(400, "invalid_request_error", "it is bad"), 400, 400, "invalid_request_error", "it is bad"
    ),
    "llama.cpp: an image without a vision model": Error(
        llama(500, "server_error", "image input is not supported"), 500, 500, "api_error", INTERNAL
    ),
    "llama.cpp: a wrong key": Error(
        llama(401, "authentication_error", "Invalid API Key"), 500, 500, "api_error", INTERNAL
    ),
    "llama.cpp: a path that isn't there": Error(
        llama(404, "not_found_error", "File Not Found"), 500, 500, "api_error", INTERNAL
    ),
    "llama.cpp: a model that is loading": Error(
        llama(503, "unavailable_error", "Loading model"), 503, 529, "overloaded_error", "Loading model"
    ),
    "llama.cpp: a compressed body": Error(with_status(415), 500, 500, "api_error", INTERNAL),
    "vLLM: a document": Error(
        vllm(400, "BadRequestError", "Input should be 'text'"),
        *(400, 400, "invalid_request_error", "Input should be 'text'"),
    ),
    "vLLM: an unknown model": Error(
        vllm(404, "NotFoundError", "The model does not exist."), 500, 500, "api_error", INTERNAL
    ),
    "vLLM: a failure": Error(vllm(500, "InternalServerError", "boom"), 500, 500, "api_error", INTERNAL),
    "Ollama: a bare 400": Error(
        with_status(400),
        *(400, 400, "invalid_request_error", "the provider refused the request without saying why"),
    ),
    "Ollama: an error that is a text": Error(
        with_status(400, {"error": "does not support tools"}),
        *(400, 400, "invalid_request_error", "does not support tools"),
    ),
    "Ollama: a bare 404": Error(with_status(404), 500, 500, "api_error", INTERNAL),
    "Ollama: a bare 500": Error(with_status(500), 500, 500, "api_error", INTERNAL),
    "Ollama: busy": Error(
        with_status(503, b"server busy", "text/plain"), 503, 529, "overloaded_error", "the provider is overloaded"
    ),
    "a proxy's page": Error(with_status(502, b"<h1>Bad Gateway</h1>", "text/html"), 500, 500, "api_error", INTERNAL),
}


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
@pytest.mark.parametrize("stream", PLAIN_AND_STREAMED.values(), ids=PLAIN_AND_STREAMED)
async def test_an_error_comes_in_the_client_s_envelope(tmp_path: Path, error: Error, stream: bool) -> None:
    """Whichever envelope a server has for its errors, the client reads its own, with the server's words where they
    are about the request."""
    told = {}
    for format in BOTH_ROUTES:
        async with in_front_of(error.reply(), tmp_path) as url:
            told[format] = await ask_for(url, format, stream)

    openai, messages = told["openai"], told["messages"]
    assert (error.openai, error.messages) == (openai.status, messages.status)
    assert (error.message, error.message) == (openai.data["error"]["message"], messages.data["error"]["message"])
    assert {"message", "type", "param", "code"} == set(openai.data["error"])
    assert ("error", error.type) == (messages.data["type"], messages.data["error"]["type"])
    assert messages.headers["x-request-id"] == messages.data["request_id"]


async def test_an_error_s_details_come_in_the_messages_format(tmp_path: Path) -> None:
    """What a server says beside its message reaches the client that speaks its format."""
    async with in_front_of(ERRORS["llama.cpp: a prompt that is too long"].reply(), tmp_path) as url:
        answer = await ask_for(url, "messages")

    assert {"n_prompt_tokens": 5000, "n_ctx": 4096}.items() <= answer.data["error"].items()


@ROUTES
async def test_an_error_of_an_unknown_type_within_a_stream(tmp_path: Path, format: str) -> None:
    """vLLM's own word for a failure ends the stream in the client's own word."""
    events = [
        start({"input_tokens": 12, "output_tokens": 0}),
        opened(0, type="text", text=""),
        said(0, "Hel"),
        {"type": "error", "error": {"type": "internal_error", "message": "boom"}},
    ]
    async with in_front_of(stream_reply(events), tmp_path) as url:
        answer = await ask_for(url, format, True)

    assert f"broken: {'server_error' if format == 'openai' else 'api_error'}" == ending_of(answer, format)


@ROUTES
async def test_comments_alone_are_no_answer(tmp_path: Path, format: str) -> None:
    """A server that only ever sent comments has not begun: its failure is an error with a status."""
    async with in_front_of(stream_reply([COMMENTS, COMMENTS]), tmp_path) as url:
        answer = await ask_for(url, format, True)

    assert 500 == answer.status
