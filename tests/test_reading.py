"""Reading a request: its size and time, what is JSON, the fields that decide, the model's name."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import re
import zlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import make_mocked_request

from plugins.chat_completions import ChatCompletions
from proxy.errors import GatewayError, Kind
from proxy.plugin import Route
from proxy.reading import DEEPEST, MOST_BYTES, check_headers, check_messages_request, model_name, parse
from proxy.testing import ScriptedUpstream, make_exchange, running_gateway
from tests.strategies import MALFORMED

BOTH_FORMATS = pytest.mark.parametrize(
    "route", [Route.MESSAGES, Route.CHAT_COMPLETIONS], ids=["messages", "chat_completions"]
)


def refusal_of(call: Any, *arguments: Any) -> GatewayError | None:
    try:
        call(*arguments)
    except GatewayError as error:
        return error
    return None


NO_OBJECTS = {
    "nothing": (b"", "the body is empty; a JSON object is expected"),
    "spaces": (b" \t\r\n", "the body is empty; a JSON object is expected"),
    "null": (b"null", "the body must be a JSON object"),
    "a list": (b"[]", "the body must be a JSON object"),
    "a list of objects": (b'[{"model":"m"}]', "the body must be a JSON object"),
    "a text": (b'"x"', "the body must be a JSON object"),
    "a number": (b"1", "the body must be a JSON object"),
    "true": (b"true", "the body must be a JSON object"),
    "a form": (b"model=m&messages=x", "the body must be a JSON object"),
    "a multipart form": (b"--x\r\ncontent-disposition: form-data\r\n\r\n--x--", "the body must be a JSON object"),
    "a BOM": (b'\xef\xbb\xbf{"model":"m"}', "the body must be a JSON object"),
}


@BOTH_FORMATS
@pytest.mark.parametrize(("raw", "message"), NO_OBJECTS.values(), ids=NO_OBJECTS)
def test_a_body_that_is_no_object(route: Route, raw: bytes, message: str) -> None:
    """A body that is anything but an object is a 400 that says so."""
    refusal = refusal_of(parse, raw, route)

    assert refusal is not None
    assert (Kind.INVALID_REQUEST, message) == (refusal.kind, refusal.message)


@BOTH_FORMATS
@pytest.mark.parametrize("value", MALFORMED.values(), ids=MALFORMED)
def test_a_body_that_is_no_json(route: Route, value: bytes) -> None:
    """A body with anything in it that is not valid JSON, or too deep for the parser, is a 400 and never a crash."""
    raw = b'{"model":"m","x":[' + (value if value.strip() else b",") + b"]}"

    refusal = refusal_of(parse, raw, route)

    assert refusal is not None
    assert Kind.INVALID_REQUEST is refusal.kind
    assert refusal.message.startswith("the body is not valid JSON: ")


READABLE = {
    "spaces around": b' \r\n{"model" : "m"}\n',
    "an unknown field twice": b'{"a":1,"model":"m","a":2}',
    "a decisive field twice, deeper": b'{"model":"m","x":{"model":1,"model":2,"stream":1,"stream":1}}',
    "lone surrogates": b'{"model":"m","x":"\\ud800","\\udc00":1}',
    "a pair of surrogates": '{"model":"m","x":"\\ud83d\\ude00😀"}'.encode(),
    "odd characters": '{"model":"m","x":"\\u0000\u2028\u202e\x7f"}'.encode(),
    "long and large numbers": b'{"model":"m","x":[' + b"1" * 5000 + b",1e400,-0,18446744073709551616,1.10]}",
}


@BOTH_FORMATS
@pytest.mark.parametrize("raw", READABLE.values(), ids=READABLE)
def test_a_body_that_is_odd(route: Route, raw: bytes) -> None:
    """What nobody reads is no error, and the bytes stay as they came."""
    document = parse(raw, route)

    assert raw == document.unchanged
    assert "m" == document.value("model")
    assert isinstance(document.data, dict)


DOUBLED = {
    "model": (b'{"model":"a","model":"b"}', "model"),
    "model, the same": (b'{"model":"a","model":"a"}', "model"),
    "model, escaped": (b'{"model":"a","mod\\u0065l":"b"}', "model"),
    "max_tokens": (b'{"max_tokens":1,"model":"a","max\\u005ftokens":2}', "max_tokens"),
    "messages": (b'{"messages":[],"model":"a","messages":[]}', "messages"),
    "stream": (b'{"stream":true,"model":"a","stream":false}', "stream"),
    "stream, three times": (b'{"stream":1,"stream":1,"stream":1}', "stream"),
}


@BOTH_FORMATS
@pytest.mark.parametrize(("raw", "field"), DOUBLED.values(), ids=DOUBLED)
def test_a_decisive_field_stands_once(route: Route, raw: bytes, field: str) -> None:
    """A field that gateway and upstream might read differently is refused when it stands twice, however spelt."""
    refusal = refusal_of(parse, raw, route)

    assert refusal is not None
    assert (field, f"{field}: stands more than once") == (refusal.param, refusal.message)


def nested(levels: int) -> bytes:
    """A body of so many levels, itself included."""
    return b'{"x":' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}"


DEPTHS = {
    "chat, the deepest": (Route.CHAT_COMPLETIONS, DEEPEST, True),
    "chat, one more": (Route.CHAT_COMPLETIONS, DEEPEST + 1, False),
    "messages, as deep": (Route.MESSAGES, DEEPEST + 1, True),
    "messages, 500": (Route.MESSAGES, 500, True),
    "messages, far too deep": (Route.MESSAGES, 100_000, False),
    "count_tokens, as deep": (Route.COUNT_TOKENS, DEEPEST + 1, True),
}


@pytest.mark.parametrize(("route", "levels", "readable"), DEPTHS.values(), ids=DEPTHS)
def test_how_deep_a_body_may_be(route: Route, levels: int, readable: bool) -> None:
    """200 levels in OpenAI's format, what the parser takes in the other."""
    refusal = refusal_of(parse, nested(levels), route)

    assert readable == (refusal is None)
    assert refusal is None or Kind.INVALID_REQUEST is refusal.kind


NAMES = {
    "a name": ("m", None),
    "spaces around": ("  m\t", None),
    "the longest": ("x" * 128, None),
    "the longest, spaces around": (" " + "x" * 128 + " ", None),
    "too long": ("x" * 129, "model: must have 1 to 128 characters"),
    "empty": ("", "model: must have 1 to 128 characters"),
    "spaces": ("   ", "model: must have 1 to 128 characters"),
    "null": (None, "model: is required"),
    "a number": (1, "model: must be a string"),
    "true": (True, "model: must be a string"),
    "a list": (["m"], "model: must be a string"),
    "an object": ({"id": "m"}, "model: must be a string"),
    "path signs": ("../../x", None),
    "line ends inside": ("a\r\nb", None),
    "NUL": ("a\0", None),
    "full width": ("ｍ", None),
}


@BOTH_FORMATS
@pytest.mark.parametrize(("name", "message"), NAMES.values(), ids=NAMES)
def test_the_models_name(route: Route, name: Any, message: str | None) -> None:
    """A name of 1 to 128 characters is taken exactly as it was sent; whether there is such a model is judged later."""
    document = parse(json.dumps({"model": name}).encode(), route)

    refusal = refusal_of(model_name, document)

    assert message == (refusal and refusal.message)
    if refusal is None:
        assert name == model_name(document)
    else:
        assert "model" == refusal.param


def test_no_models_name() -> None:
    """A body without a model is refused naming it."""
    refusal = refusal_of(model_name, parse(b"{}", Route.MESSAGES))

    assert refusal is not None
    assert "model: is required" == refusal.message


MAX_TOKENS_REFUSED = "max_tokens: must be an integer of at least 1"
STREAM_REFUSED = "stream: must be true or false"
# what is laid over a good request, as JSON text; None leaves the field out
FIELDS: dict[str, tuple[dict[str, str | None], str | None]] = {
    "as it should be": ({}, None),
    "max_tokens missing": ({"max_tokens": None}, "max_tokens: is required"),
    "max_tokens null": ({"max_tokens": "null"}, MAX_TOKENS_REFUSED),
    "max_tokens 0": ({"max_tokens": "0"}, MAX_TOKENS_REFUSED),
    "max_tokens -0": ({"max_tokens": "-0"}, MAX_TOKENS_REFUSED),
    "max_tokens below 0": ({"max_tokens": "-1"}, MAX_TOKENS_REFUSED),
    "max_tokens with a fraction": ({"max_tokens": "1.5"}, MAX_TOKENS_REFUSED),
    "max_tokens 64.0": ({"max_tokens": "64.0"}, None),
    "max_tokens 1e3": ({"max_tokens": "1e3"}, None),
    "max_tokens beyond 64 bits": ({"max_tokens": "18446744073709551616"}, None),
    "max_tokens of 5000 digits": ({"max_tokens": "9" * 5000}, MAX_TOKENS_REFUSED),
    "max_tokens 1e400": ({"max_tokens": "1e400"}, MAX_TOKENS_REFUSED),
    "max_tokens true": ({"max_tokens": "true"}, MAX_TOKENS_REFUSED),
    "max_tokens a text": ({"max_tokens": '"64"'}, MAX_TOKENS_REFUSED),
    "max_tokens a list": ({"max_tokens": "[64]"}, MAX_TOKENS_REFUSED),
    "messages missing": ({"messages": None}, "messages: is required"),
    "messages null": ({"messages": "null"}, "messages: must be a list"),
    "messages an object": ({"messages": "{}"}, "messages: must be a list"),
    "messages a text": ({"messages": '"[]"'}, "messages: must be a list"),
    "messages empty": ({"messages": "[]"}, "messages: must not be empty"),
    "messages empty but for spaces": ({"messages": "[ \r\n\t]"}, "messages: must not be empty"),
    "messages of anything": ({"messages": "[ null]"}, None),
    "stream true": ({"stream": "true"}, None),
    "stream false": ({"stream": "false"}, None),
    "stream null": ({"stream": "null"}, STREAM_REFUSED),
    "stream 1": ({"stream": "1"}, STREAM_REFUSED),
    "stream a text": ({"stream": '"true"'}, STREAM_REFUSED),
}


def native(fields: Mapping[str, str | None]) -> bytes:
    good: dict[str, str | None] = {"model": '"m"', "max_tokens": "1", "messages": '[{"role":"user","content":"Hi"}]'}
    members = [f'"{name}": {text}' for name, text in {**good, **fields}.items() if text is not None]
    return f"{{{', '.join(members)}}}".encode()


def checked(fields: Mapping[str, str | None], route: Route) -> GatewayError | None:
    exchange = make_exchange({}, route=route)
    return refusal_of(check_messages_request, exchange, parse(native(fields), route))


@pytest.mark.parametrize(("fields", "message"), FIELDS.values(), ids=FIELDS)
def test_what_is_checked_of_a_native_request(fields: dict[str, str | None], message: str | None) -> None:
    """The fields that decide are checked, and named where they can't be meant."""
    refusal = checked(fields, Route.MESSAGES)

    assert message == (refusal and refusal.message)
    assert refusal is None or refusal.message.startswith(f"{refusal.param}: ")


COUNTED = {name: row for name, row in FIELDS.items() if name.startswith("messages")}
NOT_COUNTED = {name: fields for name, (fields, _) in FIELDS.items() if not name.startswith("messages")}


@pytest.mark.parametrize(("fields", "message"), COUNTED.values(), ids=COUNTED)
def test_counting_tokens_needs_messages(fields: dict[str, str | None], message: str | None) -> None:
    """A request whose tokens are to be counted needs messages."""
    refusal = checked(fields, Route.COUNT_TOKENS)

    assert message == (refusal and refusal.message)


@pytest.mark.parametrize("fields", NOT_COUNTED.values(), ids=NOT_COUNTED)
def test_counting_tokens_needs_nothing_else(fields: dict[str, str | None]) -> None:
    """A request whose tokens are to be counted has neither max_tokens nor stream, and nobody looks at them."""
    assert checked(fields, Route.COUNT_TOKENS) is None


ENCODINGS = {
    "none": (None, True),
    "identity": ("identity", True),
    "IDENTITY": (" IDENTITY ", True),
    "nothing": ("", True),
    "gzip": ("gzip", False),
    "deflate": ("deflate", False),
    "br": ("br", False),
    "zstd": ("zstd", False),
    "twice": ("gzip, gzip", False),
    "identity and more": ("identity, gzip", False),
    "unknown": ("x-unknown", False),
}


@pytest.mark.parametrize(("encoding", "accepted"), ENCODINGS.values(), ids=ENCODINGS)
def test_a_compressed_body_is_refused(encoding: str | None, accepted: bool) -> None:
    """Nothing is inflated: any encoding but identity is a 400 that names the header."""
    headers = {} if encoding is None else {"content-encoding": encoding}

    refusal = refusal_of(check_headers, make_mocked_request("POST", "/", headers=headers))

    assert accepted == (refusal is None)
    if refusal is not None:
        assert (Kind.INVALID_REQUEST, "content-encoding") == (refusal.kind, refusal.param)


LENGTHS = {"none": (None, True), "0": (0, True), "32 MB": (MOST_BYTES, True), "one more": (MOST_BYTES + 1, False)}


@pytest.mark.parametrize(("length", "accepted"), LENGTHS.values(), ids=LENGTHS)
def test_an_announced_length(length: int | None, accepted: bool) -> None:
    """A body that is announced as too large is refused before it is read."""
    headers = {} if length is None else {"content-length": str(length)}

    refusal = refusal_of(check_headers, make_mocked_request("POST", "/", headers=headers))

    assert accepted == (refusal is None)
    assert refusal is None or Kind.TOO_LARGE is refusal.kind


# Over real sockets


@dataclass
class World:
    """A running gateway, its upstream and a client."""

    url: str
    upstream: ScriptedUpstream
    session: aiohttp.ClientSession

    async def send(self, body: Any, path: str = "/v1/messages", **headers: str) -> tuple[int, Any]:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        body = io.BytesIO(body) if isinstance(body, bytes) else body
        async with self.session.post(self.url + path, data=body, headers=sent) as answer:
            return answer.status, await answer.json()

    async def speak(self, sent: bytes, *, then_leave: bool = False) -> list[bytes]:
        """The answers to these bytes, head and body, up to the first that isn't 100."""
        reader, writer = await asyncio.open_connection("127.0.0.1", int(self.url.rpartition(":")[2]))
        answers: list[bytes] = []
        try:
            writer.write(sent)
            while not then_leave and (not answers or answers[-1].startswith(b"HTTP/1.1 100 ")):
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"(?i)content-length: (\d+)", head)
                answers.append(head + (await reader.readexactly(int(length[1])) if length else b""))
            return answers
        finally:
            writer.close()
            await writer.wait_closed()


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with (
        ScriptedUpstream() as upstream,
        running_gateway([ChatCompletions], upstream=upstream.url) as url,
        aiohttp.ClientSession() as session,
    ):
        yield World(url, upstream, session)


GOOD = native({"model": '"model"'})


def padded(size: int) -> bytes:
    """A good request of exactly so many bytes."""
    empty = native({"model": '"model"', "metadata": '""'})
    return empty.replace(b'""', b'"' + b"x" * (size - len(empty)) + b'"')


async def test_the_largest_body(world: World) -> None:
    """A body of exactly 32 MB arrives whole."""
    body = padded(MOST_BYTES)

    status, _ = await world.send(body)

    assert 200 == status
    assert len(body) + len("model-at-upstream") - len("model") == len(world.upstream.received[0].body)


async def _in_chunks(size: int) -> AsyncIterator[bytes]:
    body = padded(size)
    for at in range(0, size, 2**20):
        yield body[at : at + 2**20]


@pytest.mark.parametrize("path", ["/v1/messages", "/openai/v1/chat/completions"])
@pytest.mark.parametrize("announced", [True, False], ids=["announced", "in chunks"])
async def test_one_byte_more(world: World, path: str, announced: bool) -> None:
    """One byte more is a 413, announced or not, and the client that is still sending can read it."""
    size = MOST_BYTES + 1

    status, answer = await world.send(padded(size) if announced else _in_chunks(size), path)

    assert 413 == status
    assert "the request is larger than 32 MB" == answer["error"]["message"]
    assert [] == world.upstream.received


EXPECTING = b"POST /v1/messages HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: %d\r\n\r\n"


async def test_a_client_that_waits_is_told_to_go_on(world: World) -> None:
    """With `Expect: 100-continue` the body is asked for, and then answered."""
    first, second = await world.speak(EXPECTING % len(GOOD) + GOOD)

    assert b"HTTP/1.1 100 Continue\r\n\r\n" == first
    assert second.startswith(b"HTTP/1.1 200 ")


async def test_a_client_that_waits_with_too_much_is_not_told_to_go_on(world: World) -> None:
    """A body that is announced as too large is never asked for."""
    [only] = await world.speak(EXPECTING % (MOST_BYTES + 1))

    assert only.startswith(b"HTTP/1.1 413 ")


SHORT = b"POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n" + b"{" * 50


async def test_a_body_that_does_not_come() -> None:
    """A body that stops arriving is a 400 after its time, not a connection held for ever."""
    async with (
        ScriptedUpstream() as upstream,
        running_gateway([], upstream=upstream.url, server={"body_timeout": 0.05}) as url,
        aiohttp.ClientSession() as session,
    ):
        [said] = await World(url, upstream, session).speak(SHORT)

    assert said.startswith(b"HTTP/1.1 400 ")
    assert b"did not arrive within 0.05 seconds" in said
    assert [] == upstream.received


async def test_a_client_that_leaves_in_its_body(world: World) -> None:
    """A body that ends early ends the request, and the next one is answered."""
    await world.speak(SHORT, then_leave=True)

    assert (200, 1) == ((await world.send(GOOD))[0], len(world.upstream.received))


async def test_a_body_in_tiny_chunks(world: World) -> None:
    """The body is the same in chunks of one byte."""
    chunks = b"".join(b"1\r\n%b\r\n" % GOOD[at : at + 1] for at in range(len(GOOD)))
    head = b"POST /v1/messages HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"

    [said] = await world.speak(head + chunks + b"0\r\n\r\n")

    assert said.startswith(b"HTTP/1.1 200 ")
    assert native({"model": '"model-at-upstream"'}) == world.upstream.received[0].body


TYPES = ["application/json", "text/plain", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded", ""]


@pytest.mark.parametrize("path", ["/v1/messages", "/openai/v1/chat/completions"])
@pytest.mark.parametrize("type", TYPES)
async def test_json_is_read_whatever_the_type_says(world: World, path: str, type: str) -> None:
    """Clients send all kinds of types; the body counts, and a form is no JSON."""
    assert 200 == (await world.send(GOOD, path, content_type=type))[0]
    assert 400 == (await world.send(b"model=model&messages=x", path, content_type=type))[0]


COMPRESSED = {
    "gzip": ("gzip", gzip.compress(GOOD)),
    "truncated": ("gzip", gzip.compress(GOOD)[:-9]),
    "no gzip at all": ("gzip", GOOD),
    "deflate": ("deflate", zlib.compress(GOOD)),
    "a bomb": ("gzip", gzip.compress(padded(MOST_BYTES + 1))),
    "unknown": ("zstd", GOOD),
}


@pytest.mark.parametrize("path", ["/v1/messages", "/openai/v1/chat/completions"])
@pytest.mark.parametrize(("encoding", "body"), COMPRESSED.values(), ids=COMPRESSED)
async def test_nothing_is_inflated(world: World, path: str, encoding: str, body: bytes) -> None:
    """A compressed body is a 400 naming the header, good, broken or a bomb."""
    status, answer = await world.send(body, path, content_encoding=encoding)

    assert 400 == status
    assert answer["error"]["message"].startswith("content-encoding: ")
    assert [] == world.upstream.received
    assert 200 == (await world.send(GOOD, path, content_encoding="identity"))[0]


NO_MODELS = ["../../x", "a\r\nb", "model\0", "ｍodel", "<script>", "'", "\ud800", "x" * 128]


@pytest.mark.parametrize("path", ["/v1/messages", "/openai/v1/chat/completions"])
@pytest.mark.parametrize("name", NO_MODELS, ids=ascii)
async def test_a_name_of_no_model(world: World, path: str, name: str) -> None:
    """Whatever stands in a name, there is no such model: a 404 as JSON, and no header is split."""
    status, answer = await world.send(native({"model": json.dumps(name)}), path)

    assert 404 == status
    shown = name.replace("\ud800", "\ufffd")
    assert f"The model `{shown}` does not exist or you do not have access to it." == answer["error"]["message"]
