"""Framing and headers of both sides (group C): what is no proper HTTP, what must not pass, and what every answer is.

Behind each malformed request stands a whole good one: if the gateway and whatever is in front of it read the first
differently, that is the request that would be smuggled. It must never be executed.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any, NamedTuple

import pytest

from tests.attacks.measuring import MB, taken_by
from tests.attacks.raw_client import (
    BOTH,
    CHAT,
    CLIENT_KEY,
    GET_HEALTH,
    MESSAGES,
    PATIENCE,
    UPSTREAM_KEY,
    Answer,
    Cut,
    ask,
    asked,
    connected,
    error_of,
    head,
    post,
)
from tests.attacks.raw_upstream import PLAIN, STREAMED, http
from tests.attacks.raw_upstream import RawUpstream as Upstream
from tests.process import GatewayProcess, eventually

pytestmark = pytest.mark.asyncio(loop_scope="session")

BODY = json.dumps(asked()).encode()
LENGTH = f"content-length: {len(BODY)}"
CHUNKED = "transfer-encoding: chunked"
SMUGGLED = post(MESSAGES, BODY)


async def refused(gateway: GatewayProcess, upstream: Upstream, sent: bytes) -> bytes:
    """What is answered to a request that is none. Fails where it is no 400, the connection stays, or more is done."""
    async with connected(gateway) as client:
        client.send(sent)
        answered = await client.rest()  # raises TimeoutError where the connection is kept
    statuses = re.findall(rb"^HTTP/1\.[01] (\d+)", answered, re.MULTILINE)
    assert [b"400"] == statuses, answered
    assert [] == upstream.asked
    return answered


# Two lengths, odd lengths

BOTH_LENGTHS: dict[str, tuple[str, ...]] = {
    "a length, then chunked": ("content-length: 4", CHUNKED),
    "chunked, then a length": (CHUNKED, "content-length: 4"),
    "chunked in another case": ("content-length: 4", "Transfer-Encoding: Chunked"),
    "chunked behind spaces": ("content-length: 4", "transfer-encoding: \t chunked "),
    "an unknown coding": ("content-length: 4", "transfer-encoding: xchunked"),
    "identity": (LENGTH, "transfer-encoding: identity"),
    "chunked, then another": (LENGTH, "transfer-encoding: chunked, identity"),
    "an empty coding": (LENGTH, "transfer-encoding:"),
}


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("name", BOTH_LENGTHS)
async def test_c1_a_length_and_chunks_at_once_are_refused(
    gateway: GatewayProcess, upstream: Upstream, name: str, path: str
) -> None:
    """A request of two lengths is a 400, its connection closed, and what follows it is not executed."""
    await refused(gateway, upstream, head(path, *BOTH_LENGTHS[name]) + b"0\r\n\r\n" + SMUGGLED)


NO_LENGTHS: dict[str, tuple[str, ...]] = {
    "twice the same": (LENGTH, LENGTH),
    "twice, different": (LENGTH, "content-length: 4"),
    "a sign": (f"content-length: +{len(BODY)}",),
    "hexadecimal": ("content-length: 0x20",),
    "negative": ("content-length: -1",),
    "a list": (f"content-length: {len(BODY)}, {len(BODY)}",),
    "20 digits": ("content-length: 99999999999999999999",),
    "two numbers": ("content-length: 2 2",),
    "empty": ("content-length:",),
    "an underscore": ("content-length: 1_0",),
    "a point": ("content-length: 10.0",),
    "digits of another script": ("content-length: \xb2",),
}


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("name", NO_LENGTHS)
async def test_c2_a_length_that_is_none_is_refused(
    gateway: GatewayProcess, upstream: Upstream, name: str, path: str
) -> None:
    """A length that two readers could read differently is a 400, and what follows is not executed."""
    await refused(gateway, upstream, head(path, *NO_LENGTHS[name]) + BODY + SMUGGLED)


# Malformed headers, malformed chunks

NO_HEADERS = {
    "a bare LF": "x: a\ny: b",
    "a bare CR": "x: a\ry: b",
    "CR and LF and a length": "x: a\r\ncontent-length: 3\ry: b",
    "NUL": "x: a\0b",
    "a folded line": "x: a\r\n b",
    "a fold by tab": "x: a\r\n\tb",
    "a space before the colon": "x : a",
    "a tab before the colon": "x\t: a",
    "a control byte in the name": "x\x01y: a",
    "a control byte in the value": "x: \x01",
    "DEL in the value": "x: \x7f",
    "an empty name": ": a",
    "no colon": "x",
    "Latin-1 in the name": "x\xe4: a",
    "a space before the first name": " x: a",
    "brackets in the name": "x(y): a",
}


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("name", NO_HEADERS)
async def test_c4_a_malformed_header_is_refused(
    gateway: GatewayProcess, upstream: Upstream, name: str, path: str
) -> None:
    """A header that could be split or hidden is a 400, and what follows is not executed."""
    await refused(gateway, upstream, head(path, NO_HEADERS[name], LENGTH) + BODY + SMUGGLED)


async def test_c4_lines_that_end_in_lf_alone_are_refused(gateway: GatewayProcess, upstream: Upstream) -> None:
    """A head without a single CR is a 400."""
    await refused(gateway, upstream, head(MESSAGES, LENGTH).replace(b"\r\n", b"\n") + BODY + SMUGGLED)


NO_SIZES = [b"0_2", b"-2", b"+2", b"0x2", b"1" * 17, b"2;a\nb", b" 2", b"2 ", b"", b"g", b"2\n", b"2;", b"2\0"]


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("size", NO_SIZES, ids=ascii)
async def test_c5_a_chunk_of_no_size_is_refused(
    gateway: GatewayProcess, upstream: Upstream, size: bytes, path: str
) -> None:
    """A chunk's size that two readers could read differently is a 400, and what follows is not executed."""
    await refused(gateway, upstream, head(path, CHUNKED) + size + b"\r\n{}\r\n0\r\n\r\n" + SMUGGLED)


CHUNKED_BODY = b"%x\r\n%b\r\n" % (len(BODY), BODY)
NO_CHUNKS = {
    "no CR and LF behind the data": b"2\r\n{}0\r\n\r\n",
    "LF alone behind the data": b"2\r\n{}\n0\r\n\r\n",
    "LF alone everywhere": CHUNKED_BODY.replace(b"\r\n", b"\n") + b"0\n\n",
    "10,000 trailers": CHUNKED_BODY + b"0\r\n" + b"a: b\r\n" * 10_000 + b"\r\n",
    "a trailer of 1 MB": CHUNKED_BODY + b"0\r\na: %b\r\n\r\n" % (b"b" * MB),
}


@pytest.mark.parametrize("name", NO_CHUNKS)
async def test_c5_a_chunk_that_is_none_is_refused(gateway: GatewayProcess, upstream: Upstream, name: str) -> None:
    """Chunks and trailers out of bounds are a 400, and cost no memory."""
    async with taken_by(gateway) as taken:
        await refused(gateway, upstream, head(MESSAGES, CHUNKED) + NO_CHUNKS[name] + SMUGGLED)

    assert taken.memory < 16 * MB


# Other versions, other protocols


class Foreign(NamedTuple):
    """A request of another kind, and the statuses that may answer it; none: the connection may just be closed."""

    sent: bytes
    statuses: tuple[int, ...]


TLS_HELLO = bytes.fromhex("16030100f8010000f40303") + b"\x80" * 241
FOREIGN = {
    "HTTP/0.9": Foreign(b"GET /p\r\n\r\n", (400, 404)),
    "HTTP/0.9, another method": Foreign(b"POST /v1/messages\r\n\r\n", (400, 401)),
    "HTTP/1.2": Foreign(b"GET /healthz HTTP/1.2\r\nhost: a\r\n\r\n", (400,)),
    "HTTP/3.0": Foreign(b"GET /healthz HTTP/3.0\r\nhost: a\r\n\r\n", (400,)),
    "the preface of HTTP/2": Foreign(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0", (400,)),
    "a TLS hello": Foreign(TLS_HELLO, (400,)),
    "SSH": Foreign(b"SSH-2.0-OpenSSH_9.0\r\n", (400,)),
    "noise": Foreign(bytes(range(256)) * 4 + b"\r\n\r\n", (400,)),
    "no Host": Foreign(b"GET /p HTTP/1.1\r\n\r\n", (400, 404)),
    "two Hosts": Foreign(b"GET /p HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", (400, 404)),
    "no target": Foreign(b"GET  HTTP/1.1\r\nhost: a\r\n\r\n", (400,)),
    "a target with a space": Foreign(b"GET /a b HTTP/1.1\r\nhost: a\r\n\r\n", (400,)),
    "a tab behind the method": Foreign(b"GET\t/p HTTP/1.1\r\nhost: a\r\n\r\n", (400,)),
    "a broken IPv6 target": Foreign(b"GET http://[::1/p HTTP/1.1\r\nhost: a\r\n\r\n", (400, 404)),
    "a target of an impossible port": Foreign(b"GET http://a:99999/p HTTP/1.1\r\nhost: a\r\n\r\n", (400, 404)),
    "a target that is an asterisk": Foreign(b"OPTIONS * HTTP/1.1\r\nhost: a\r\n\r\n", (400, 404, 405)),
    "a target of broken escapes": Foreign(b"GET /%zz%ff%00 HTTP/1.1\r\nhost: a\r\n\r\n", (400, 404)),
    "a target of Latin-1": Foreign(b"GET /\xff\xfe HTTP/1.1\r\nhost: a\r\n\r\n", (400, 404)),
    "CONNECT": Foreign(b"CONNECT 127.0.0.1:9 HTTP/1.1\r\nhost: a\r\n\r\n", (400, 404, 405)),
}


@pytest.mark.parametrize("name", FOREIGN)
async def test_c7_what_is_another_protocol_is_refused(gateway: GatewayProcess, upstream: Upstream, name: str) -> None:
    """Another version or protocol is an error or a closed connection, at most two lines in the log, and no harm."""
    sent, statuses = FOREIGN[name]
    marker = f"c7-{list(FOREIGN).index(name)}"  # behind its line come those of this test
    await ask(gateway, MESSAGES, asked(model="of nobody"), f"x-request-id: {marker}")
    await eventually(lambda: gateway.requests(client_request_id=marker))
    before = len(gateway.log_lines)

    async with connected(gateway) as client:
        client.send(sent)
        client.half_close()
        answered = await client.rest()

    found = [int(status) for status in re.findall(rb"^HTTP/\d\.\d (\d+)", answered, re.MULTILINE)]
    assert len(found) <= 1
    assert set(found) <= set(statuses), answered
    assert len(gateway.log_lines) - before <= 2


@pytest.mark.parametrize("keep", [False, True], ids=["closing", "keep-alive"])
@pytest.mark.parametrize("path", BOTH)
async def test_c7_a_client_of_http_1_0_is_answered_without_chunks(
    gateway: GatewayProcess, upstream: Upstream, path: str, keep: bool
) -> None:
    """HTTP/1.0 works: the answer has a length, and the connection stays only if that was asked for."""
    fields = ("connection: keep-alive",) if keep else ()
    async with connected(gateway) as client:
        client.send(post(path, asked(), *fields, version="1.0"))
        first = await client.answer()  # fails where it is chunked
        if keep:
            client.send(post(path, asked(), version="1.0"))
            second = await client.answer()
            assert 200 == second.status
        assert b"" == await client.rest()

    assert (200, True) == (first.status, "content-length" in first.headers)


# Too many, too long

TOO_MUCH = {
    "129 headers": head(CHAT, *(f"x-{number}: a" for number in range(129)), LENGTH) + BODY,
    "a header of 8191 bytes": head(CHAT, "x: " + "a" * 8191, LENGTH) + BODY,
    "a name of 8191 bytes": head(CHAT, "x" * 8191 + ": a", LENGTH) + BODY,
    "a target of 8191 bytes": head("/" + "a" * 8190),
    "10,000 cookies": head(CHAT, *["cookie: a=b"] * 10_000, LENGTH) + BODY,
    "10,000 cookies in one header": head(CHAT, "cookie: " + "a=b; " * 10_000, LENGTH) + BODY,
    "a header of 10 MB": head(CHAT, "x: " + "a" * 10 * MB, LENGTH) + BODY,
}


@pytest.mark.parametrize("name", TOO_MUCH)
async def test_c8_too_many_and_too_long_headers_are_refused(
    gateway: GatewayProcess, upstream: Upstream, name: str
) -> None:
    """Headers out of bounds are a 400, and cost no memory."""
    async with taken_by(gateway) as taken:
        await refused(gateway, upstream, TOO_MUCH[name] + SMUGGLED)

    assert taken.memory < 16 * MB


async def test_c8_many_and_long_headers_are_taken(gateway: GatewayProcess, upstream: Upstream) -> None:
    """What is within the bounds passes: real clients send many headers, and some of them long."""
    fields = (*(f"x-{number}: a" for number in range(100)), "cookie: " + "a=b; " * 1600)

    assert 200 == (await ask(gateway, CHAT, asked(), *fields)).status


# What must not pass

GOLDEN = {
    "accept": "*/*",
    "accept-encoding": "identity",
    "anthropic-version": "2023-06-01",
    "content-type": "application/json",
    "x-api-key": UPSTREAM_KEY,
}
"""What an upstream gets, besides its own host, the length of the body and the gateway's own name."""


def sent_on(upstream: Upstream) -> dict[str, str]:
    """The headers of the one request that came, but for host, length and user agent; fails where these are wrong."""
    [request] = upstream.asked
    headers = {name.lower(): value for name, value in request.headers.items()}
    assert len(headers) == len(request.headers)
    assert upstream.url == "http://" + headers.pop("host")
    assert len(request.body) == int(headers.pop("content-length"))
    assert re.fullmatch(r"ezat-router/[\w.]+", headers.pop("user-agent"))
    return headers


HOP_BY_HOP = {
    "Connection names the key": ("connection: x-api-key, authorization, close",),
    "Connection names the content": ("connection: content-type, content-length",),
    "Keep-Alive": ("keep-alive: timeout=1, max=1",),
    "TE": ("te: trailers, deflate",),
    "Trailer": ("trailer: x-api-key",),
    "Proxy-Authorization": ("proxy-authorization: Basic YTpi",),
    "Proxy-Connection": ("proxy-connection: keep-alive",),
    "an upgrade to HTTP/2": ("connection: upgrade, http2-settings", "upgrade: h2c", "http2-settings: AAMAAABk"),
    "an upgrade to a WebSocket": ("connection: upgrade", "upgrade: websocket", "sec-websocket-key: AAAA"),
}


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("name", HOP_BY_HOP)
async def test_c10_headers_of_the_connection_stay_on_it(
    gateway: GatewayProcess, upstream: Upstream, name: str, path: str
) -> None:
    """None is passed on, and none takes the key away, though Connection names it."""
    answer = await ask(gateway, path, asked(), *HOP_BY_HOP[name])

    assert 200 == answer.status
    assert GOLDEN == sent_on(upstream)


CLIENTS_OWN = (
    "cookie: session=1",
    "x-forwarded-for: 127.0.0.1",
    "x-forwarded-host: internal",
    "x-forwarded-proto: https",
    "forwarded: for=127.0.0.1",
    "x-real-ip: 127.0.0.1",
    "via: 1.1 proxy",
    "referer: http://internal/",
    "origin: http://internal",
    "user-agent: client/1",
    "traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    "x-amz-date: 20260101T000000Z",
    "x-amzn-trace-id: Root=1",
    "anthropic-dangerous-direct-browser-access: true",
    "anthropic-version: 2099-01-01",
    "accept: text/html",
    "accept-encoding: gzip, br",
    "accept-language: de",
    "content-language: de",
    "x-request-id: own-id",
    "x-ezat-session: own-session",
    "x-stainless-lang: python",
    "openai-organization: org",
    "range: bytes=0-1",
    "if-none-match: a",
    "expect-ct: a",
    "x-http-method-override: DELETE",
    "x-original-url: /admin",
)


@pytest.mark.parametrize("path", BOTH)
async def test_c11_of_a_clients_headers_only_beta_is_passed_on(
    gateway: GatewayProcess, upstream: Upstream, path: str
) -> None:
    """The upstream gets the golden list, and anthropic-beta where the client speaks the Messages format."""
    beta = "context-1m-2025-08-07,interleaved-thinking-2025-05-14"

    answer = await ask(gateway, path, asked(), *CLIENTS_OWN, f"anthropic-beta: {beta}")

    assert 200 == answer.status
    assert GOLDEN | ({"anthropic-beta": beta} if path == MESSAGES else {}) == sent_on(upstream)


BETAS: dict[str, tuple[str, ...]] = {
    "twice": ("anthropic-beta: a", "anthropic-beta: b"),
    "Latin-1": ("anthropic-beta: \xe4\xff",),
    "UTF-8": ("anthropic-beta: " + "ä".encode().decode("latin-1"),),
    "a tab": ("anthropic-beta: a\tb",),
    "empty": ("anthropic-beta:",),
    "long": ("anthropic-beta: " + "a" * 8000,),
}


@pytest.mark.parametrize("name", BETAS)
async def test_c11_an_odd_beta_splits_no_header(gateway: GatewayProcess, upstream: Upstream, name: str) -> None:
    """However it is written, it is passed on as one header or left out, and the request is answered."""
    answer = await ask(gateway, MESSAGES, asked(), *BETAS[name])

    headers = sent_on(upstream)
    headers.pop("anthropic-beta", None)
    assert 200 == answer.status
    assert GOLDEN == headers


SERVERS_OWN = {
    "Set-Cookie": "set-cookie: a=b",
    "Server": "server: internal/1",
    "Via": "via: 1.1 internal",
    "the key": f"x-api-key: {UPSTREAM_KEY}",
    "an organization": "anthropic-organization-id: org-1",
    "rate limits": "anthropic-ratelimit-requests-remaining: 1",
    "an id": "request-id: req_of_the_upstream",
    "another id": "x-request-id: req_of_the_upstream",
    "Alt-Svc": 'alt-svc: h3="internal:443"',
    "Location": "location: http://internal/",
    "Connection": "connection: close",
    "Keep-Alive": "keep-alive: timeout=100",
    "Upgrade": "upgrade: h2c",
    "CORS": "access-control-allow-origin: *",
    "Strict-Transport-Security": "strict-transport-security: max-age=1",
    "WWW-Authenticate": "www-authenticate: Basic",
    "Content-Disposition": "content-disposition: attachment",
    "Cache-Control": "cache-control: public",
    "Latin-1": "x-name: \xe4\xff",
    "the gateway's own": "x-ezat-ignored: a",
}


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize("path", BOTH)
async def test_c13_no_header_of_an_upstream_reaches_a_client(
    gateway: GatewayProcess, upstream: Upstream, path: str, stream: bool
) -> None:
    """Whatever the upstream puts beside its answer, the client gets the headers that it always gets."""
    good = STREAMED if stream else PLAIN
    beside = "".join(f"\r\n{each}" for each in SERVERS_OWN.values()).encode("latin-1")
    usual = await ask(gateway, path, asked(stream=stream))
    upstream.play(good.replace(b"\r\n", beside + b"\r\n", 1))

    answer = await ask(gateway, path, asked(stream=stream))

    assert _own_headers(usual) == _own_headers(answer)
    assert usual.status == answer.status == 200


def _own_headers(answer: Answer) -> dict[str, str]:
    """The headers, without the values that differ from answer to answer."""
    differ = ("date", "request-id", "x-request-id")
    headers = {name.lower(): "" if name.lower() in differ else value for name, value in answer.headers.items()}
    ids = (answer.headers["request-id"], answer.headers["x-request-id"])
    assert all(re.fullmatch(r"[0-9a-f-]{36}", each) for each in ids), ids
    return headers


INJECTED = {
    "a bare LF": b"x: a\nset-cookie: injected=1\r\n",
    "a bare CR": b"x: a\rset-cookie: injected=1\r\n",
    "NUL": b"x: a\0\r\nset-cookie: injected=1\r\n",
    "in retry-after": b"retry-after: 1\nset-cookie: injected=1\r\n",
}


@pytest.mark.parametrize("status", [b"200 OK", b"429 Too Many Requests", b"529 Overloaded"])
@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("name", INJECTED)
async def test_c13_a_malformed_header_of_an_upstream_injects_nothing(
    gateway: GatewayProcess, upstream: Upstream, name: str, path: str, status: bytes
) -> None:
    """A header that breaks the rules is dropped with all others, or the answer is an error."""
    upstream.play(PLAIN.replace(b"200 OK\r\n", status + b"\r\n" + INJECTED[name], 1))

    answer = await ask(gateway, path, asked())

    assert answer.status in (200, 429, 500, 503, 529)
    assert "set-cookie" not in answer.headers
    assert b"injected" not in answer.body
    assert re.fullmatch(r"\d+", answer.headers.get("retry-after", "1"))


def quoting(text: str, **more: Any) -> bytes:
    error = {"type": "invalid_request_error", "message": f"the key {text} is bad", **more}
    return json.dumps({"type": "error", "error": error}).encode()


ESCAPED_KEY = "".join(f"\\u{ord(letter):04x}" for letter in UPSTREAM_KEY).encode()
KEY_QUOTES = {
    "in the message": quoting(UPSTREAM_KEY),
    "twice": quoting(UPSTREAM_KEY * 2),
    "in a detail": quoting("", details={"headers": [f"x-api-key: {UPSTREAM_KEY}"]}),
    "as a name": quoting("", details={UPSTREAM_KEY: 1}),
    "in the type": quoting("").replace(b"invalid_request_error", UPSTREAM_KEY.encode()),
    "escaped": quoting("KEY").replace(b"KEY", ESCAPED_KEY),
    "in another envelope": json.dumps({"error": f"bad key {UPSTREAM_KEY}"}).encode(),
    "in no JSON": f"<p>{UPSTREAM_KEY}</p>".encode(),
}


@pytest.mark.parametrize("status", ["400 Bad Request", "413 Too Large", "429 Too Many", "529 Overloaded"])
@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("name", KEY_QUOTES)
async def test_c14_an_upstream_that_quotes_its_key_is_not_passed_on(
    gateway: GatewayProcess, upstream: Upstream, name: str, path: str, status: str
) -> None:
    """The key is cut out of what is passed on, wherever it stands and however it is written."""
    upstream.play(http(KEY_QUOTES[name], status=status))

    answer = await ask(gateway, path, asked())

    assert answer.status >= 400
    assert UPSTREAM_KEY not in json.dumps(answer.data, ensure_ascii=False)
    assert UPSTREAM_KEY.encode() not in answer.body
    assert ESCAPED_KEY not in answer.body


# What every answer is

ERRORS: dict[str, tuple[bytes, str, int]] = {
    **{f"no key, {path}": (head(path, key=None), path, 401) for path in (CHAT, MESSAGES)},
    **{f"an unknown key, {path}": (head(path, key="ezat_sk_x"), path, 401) for path in (CHAT, MESSAGES)},
    **{f"no JSON, {path}": (post(path, b"{"), path, 400) for path in (CHAT, MESSAGES)},
    **{f"no model, {path}": (post(path, asked(model="no")), path, 404) for path in (CHAT, MESSAGES)},
    **{f"GET, {path}": (head(path, method="GET"), path, 405) for path in (CHAT, MESSAGES)},
    **{f"TRACE, {path}": (head(path, method="TRACE"), path, 405) for path in (CHAT, MESSAGES)},
    **{f"an odd method, {path}": (head(path, method="PROPFIND"), path, 405) for path in (CHAT, MESSAGES)},
    **{f"too large, {path}": (head(path, "content-length: 99999999"), path, 413) for path in (CHAT, MESSAGES)},
    "an unknown path": (head("/x", method="GET"), "/x", 404),
    "an unknown path of OpenAI's": (head("/openai/v1/x", method="GET"), "/openai/v1/x", 404),
    "an unknown model in the path": (head("/openai/v1/models/no", method="GET"), "/openai/v1/models/no", 404),
    "an expectation of nothing": (head("/x", "expect: nonsense", method="GET"), "/x", 404),
}


@pytest.mark.parametrize("name", ERRORS)
async def test_c16_every_error_is_json_in_the_envelope_of_its_path(
    gateway: GatewayProcess, upstream: Upstream, name: str
) -> None:
    """Whatever is refused is refused in JSON with both ids, and the connection is not broken by it."""
    sent, path, status = ERRORS[name]
    async with connected(gateway) as client:
        client.send(sent)
        answer = await client.answer()

    error_of(answer, path, status)
    assert [] == upstream.asked


@pytest.mark.parametrize("path", BOTH)
async def test_c16_a_failure_of_the_provider_is_told_in_the_envelope(
    gateway: GatewayProcess, upstream: Upstream, path: str
) -> None:
    """So is a 500."""
    upstream.play(http(b"<html>", status="502 Bad Gateway", type="text/html"))

    error_of(await ask(gateway, path, asked()), path, 500)


CANARY = "canary4714"
QUOTED = {
    "a value with NUL": head(CHAT, f"authorization: Bearer {CANARY}\0"),
    "a value with a control byte": head(CHAT, f"cookie: \x01{CANARY}"),
    "a folded value": head(CHAT, f"x-api-key: a\r\n {CANARY}"),
    "a value that is too long": head(CHAT, "x-api-key: " + CANARY * 900),
    "a bad length": head(CHAT, f"content-length: {CANARY}"),
    "a bad coding": head(CHAT, f"transfer-encoding: chunked, {CANARY}"),
    "a line without a colon": head(CHAT, CANARY),
    "a space before the colon": head(CHAT, f"x-api-key : {CANARY}"),
    "a target that is too long": head("/" + CANARY * 900),
    "a target with a space": head(f"/ {CANARY}"),
    "a method": head("/", method=f"{CANARY}("),
    "a version": head("/", version=CANARY),
    "a chunk": head(CHAT, CHUNKED) + CANARY.encode() + b"\r\n",
    "two Hosts": head(CHAT, f"host: {CANARY}"),
    "two types": head(CHAT, f"content-type: {CANARY}", f"content-type: {CANARY}", "content-length: 0"),
}


@pytest.mark.parametrize("name", QUOTED)
async def test_c16_a_refusal_of_no_http_quotes_nothing(gateway: GatewayProcess, upstream: Upstream, name: str) -> None:
    """What the parser refuses is not said again, to the client or in the log, in no HTML and with no traceback."""
    answered = await refused(gateway, upstream, QUOTED[name])

    assert CANARY.encode() not in answered
    assert not re.search(rb"<html|Traceback|text/html", answered, re.IGNORECASE)
    assert CANARY not in gateway.written


# Several requests on a connection


async def test_c17_requests_in_one_piece_are_answered_in_their_order(
    gateway: GatewayProcess, upstream: Upstream
) -> None:
    """A hundred requests at once: each is answered, in turn, none before the one in front of it."""
    ids = [f"c17-{number}" for number in range(100)]
    sent = [post((CHAT, MESSAGES)[place % 2], asked(), f"x-request-id: {each}") for place, each in enumerate(ids)]
    async with connected(gateway) as client:
        client.send(b"".join(sent))
        answers = [await client.answer() for _ in ids]

    assert ids == [answer.headers["x-request-id"] for answer in answers]
    assert {200} == {answer.status for answer in answers}
    assert (100, 1) == (len(upstream.asked), upstream.most_at_once)


UNREAD: dict[str, bytes] = {
    "refused for its key": post(CHAT, BODY).replace(CLIENT_KEY.encode(), b"x"),
    "refused for its method": post("/healthz", BODY),
    "refused for its path": post("/x", BODY),
    "refused for its encoding": post(MESSAGES, BODY, "content-encoding: br"),
    "a GET with a body": post("/healthz", BODY).replace(b"POST", b"GET", 1),
    "refused for its key, in chunks": head(CHAT, CHUNKED, key="x") + CHUNKED_BODY + b"0\r\n\r\n",
}


@pytest.mark.parametrize("name", UNREAD)
async def test_c17_a_body_that_nobody_read_is_not_the_next_request(
    gateway: GatewayProcess, upstream: Upstream, name: str
) -> None:
    """Behind an answer to a request whose body was not read, the next one is answered or the connection closed."""
    async with connected(gateway) as client:
        client.send(UNREAD[name] + head("/healthz", "x-request-id: next", method="GET"))
        first = await client.answer()
        try:
            second: Answer | None = await client.answer()
        except Cut:
            second = None

    assert "next" != first.headers["x-request-id"]
    assert second is None or (200, "next") == (second.status, second.headers["x-request-id"])


async def test_c17_requests_that_nobody_waits_for_are_not_queued_without_end(
    gateway: GatewayProcess, upstream: Upstream
) -> None:
    """A client that sends requests and reads nothing is held back before it fills the memory."""
    many = GET_HEALTH * 200_000  # 9 MB
    async with connected(gateway, receive_buffer=4096) as client, taken_by(gateway) as taken:
        client.stop_reading()
        client.send(many)
        for _ in range(20):
            await _is_answered(gateway)

    assert taken.memory < 16 * MB


async def _is_answered(gateway: GatewayProcess) -> None:
    async with connected(gateway) as client, asyncio.timeout(PATIENCE):
        client.send(GET_HEALTH)
        assert 200 == (await client.answer()).status


@pytest.mark.parametrize("path", BOTH)
async def test_c19_what_a_client_wrote_is_never_html(gateway: GatewayProcess, upstream: Upstream, path: str) -> None:
    """An error that quotes a script is JSON, and no browser may take it for anything else."""
    answer = await ask(gateway, path, asked(model="<script>alert(1)</script>"))

    assert "<script>" in error_of(answer, path, 404)["message"]  # which also sees to type and nosniff
