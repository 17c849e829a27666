"""Bodies that are too large, too slow, broken, deep or odd (group B), over real sockets and on both endpoints.

The group stands in one file, row by row, so that none is missed.

Whatever a body is, its answer is the upstream's or a 400 or 413 in the envelope; what is refused reaches no upstream.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import re
import time
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

import pytest

from plugins.chat_completions import ChatCompletions
from proxy.testing import running_gateway
from tests.attacks.measuring import MB, taken_by
from tests.attacks.raw_client import (
    BOTH,
    CHAT,
    GET_HEALTH,
    MESSAGES,
    PATIENCE,
    UPSTREAM_KEY,
    Address,
    Answer,
    RawClient,
    ask,
    asked,
    connected,
    error_of,
    head,
    post,
    raw_asked,
)
from tests.attacks.raw_upstream import Move, RawUpstream
from tests.process import GatewayProcess, eventually

pytestmark = pytest.mark.asyncio(loop_scope="session")

MOST = 33_554_432
"""Bytes of the largest body."""


def padded(size: int) -> bytes:
    """A good body of exactly so many bytes."""
    empty = raw_asked(metadata=b'{"a":""}')
    return empty.replace(b'""', b'"' + b"x" * (size - len(empty)) + b'"')


def in_chunks(body: bytes, size: int, extension: bytes = b"") -> bytes:
    """A body in chunks of so many bytes, each with this extension."""
    pieces = (body[at : at + size] for at in range(0, len(body), size))
    return b"".join(b"%x%b\r\n%b\r\n" % (len(piece), extension, piece) for piece in pieces) + b"0\r\n\r\n"


# Too large


@pytest.mark.parametrize("path", BOTH)
async def test_b2_a_client_that_asks_first_is_not_told_to_send_too_much(
    gateway: GatewayProcess, upstream: RawUpstream, path: str
) -> None:
    """A body that is announced as too large is a 413, with no 100 Continue before it."""
    async with connected(gateway) as client:
        client.send(head(path, f"content-length: {MOST + 1}", "expect: 100-continue"))
        answer = await client.answer()

    error_of(answer, path, 413)
    assert [] == upstream.asked


@pytest.mark.parametrize("path", BOTH)
async def test_b3_a_body_of_exactly_32_mb_arrives(gateway: GatewayProcess, upstream: RawUpstream, path: str) -> None:
    """The largest body that is allowed is answered."""
    answer = await ask(gateway, path, padded(MOST))

    assert 200 == answer.status
    assert 1 == len(upstream.asked)


class Sending(NamedTuple):
    """How a body that is too large is sent."""

    announced: bool
    reads_meanwhile: bool


SENDING = {
    "announced, reading meanwhile": Sending(True, True),
    "announced, reading when all is sent": Sending(True, False),
    "in chunks, reading meanwhile": Sending(False, True),
    "in chunks, reading when all is sent": Sending(False, False),
}


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("how", SENDING)
async def test_b3_one_byte_more_is_a_413_that_reaches_a_client_that_is_still_sending(
    gateway: GatewayProcess, upstream: RawUpstream, path: str, how: str
) -> None:
    """The client can send all that it has and then read, and is neither reset nor left without the answer."""
    announced, reads_meanwhile = SENDING[how]
    body = padded(MOST + 1)
    framing = f"content-length: {len(body)}" if announced else "transfer-encoding: chunked"
    async with connected(gateway) as client:
        client.send(head(path, framing))
        sent = body if announced else in_chunks(body, MB)
        if reads_meanwhile:
            client.send(sent)
        else:
            await client.send_all(sent)
        answer = await client.answer()

    assert "32 MB" in error_of(answer, path, 413)["message"]
    assert [] == upstream.asked


# Slow, cut, in odd pieces

TINY = {
    "a million chunks of one byte": (b"x" * 1_000_000, 1, b""),
    "a thousand extensions of 8 KB": (b"x" * 1000, 1, b";a=" + b"e" * 8000),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
async def test_b5_tiny_chunks_cost_little(gateway: GatewayProcess, upstream: RawUpstream, name: str) -> None:
    """A body in absurd chunks is answered or refused, for seconds of processor time and little memory."""
    padding, size, extension = TINY[name]
    body = raw_asked(metadata=b'{"a":"%b"}' % padding)
    async with connected(gateway) as client, taken_by(gateway) as taken:
        client.send(head(MESSAGES, "transfer-encoding: chunked") + in_chunks(body, size, extension))
        answer = await client.answer()

    assert answer.status in (200, 400)
    assert taken.seconds < 10
    assert taken.memory < 64 * MB


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("cut", ["close", "half_close", "reset", "silence"])
async def test_b6_a_body_that_does_not_come_ends_its_request(
    hasty: GatewayProcess, upstream: RawUpstream, cut: str, path: str
) -> None:
    """Fifty of a hundred bytes and then nothing: the request ends, in time where the client stays, and goes nowhere."""
    own_id = f"b6-{cut}-{path.strip('/').replace('/', '-')}"
    async with connected(hasty) as client:
        client.send(head(path, "content-length: 100", "expect: 100-continue", f"x-request-id: {own_id}"))
        await client.until(b"100 Continue\r\n\r\n")  # now its body is being read
        client.send(b"{" * 50)
        if cut == "silence":
            assert "did not arrive" in error_of(await client.answer(), path, 400)["message"]
        else:
            getattr(client, cut)()
        [line] = await eventually(lambda: hasty.requests(client_request_id=own_id))

    assert ("failed" if cut == "silence" else "abandoned") == line["outcome"]
    assert [] == upstream.asked


# No JSON object

EMPTY: dict[str, tuple[bytes, str]] = {
    "a length of 0": (b"", "content-length: 0"),
    "no length at all": (b"", "accept: */*"),
    "an empty chunked body": (b"0\r\n\r\n", "transfer-encoding: chunked"),
    "spaces only": (b" \r\n\t ", "content-length: 5"),
}


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("name", EMPTY)
async def test_b8_an_empty_body_is_refused_by_name(
    gateway: GatewayProcess, upstream: RawUpstream, name: str, path: str
) -> None:
    """A body without anything in it is a 400 that speaks of the body."""
    body, framing = EMPTY[name]
    async with connected(gateway) as client:
        client.send(head(path, framing) + body)
        answer = await client.answer()

    assert "body" in error_of(answer, path, 400)["message"]
    assert [] == upstream.asked


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("body", ["null", "[]", '"x"', "1", "true"])
async def test_b9_a_body_that_is_no_object_is_refused(
    gateway: GatewayProcess, upstream: RawUpstream, body: str, path: str
) -> None:
    """Any other JSON value is a 400 that says that it must be an object."""
    answer = await ask(gateway, path, body.encode())

    assert re.search(r"must be an? (JSON )?object", error_of(answer, path, 400)["message"])
    assert [] == upstream.asked


# Depth

FAR_TOO_DEEP = {
    "100,000 brackets": b"[" * 100_000,
    "100,000 brackets, closed": b"[" * 100_000 + b"]" * 100_000,
    "100,000 braces": b'{"a":' * 100_000,
    "100,000 braces, closed": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "100,000 brackets in a field": raw_asked(metadata=b"[" * 100_000 + b"]" * 100_000),
    "100,000 braces in a message": raw_asked(
        messages=b'[{"role":"user","content":%b1%b}]' % (b'{"a":' * 100_000, b"}" * 100_000)
    ),
}


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("name", FAR_TOO_DEEP)
async def test_b11_a_body_that_no_parser_takes_is_refused(
    gateway: GatewayProcess, upstream: RawUpstream, name: str, path: str
) -> None:
    """A hundred thousand levels are a 400, whatever they are levels of."""
    answer = await ask(gateway, path, FAR_TOO_DEEP[name])

    error_of(answer, path, 400)
    assert [] == upstream.asked


def nested(levels: int) -> bytes:
    """A value of so many levels, lists and objects in turn."""
    return b'[{"a":' * (levels // 2) + b"[]" * (levels % 2) + b"1" * (1 - levels % 2) + b"}]" * (levels // 2)


def deep_message(levels: int) -> bytes:
    unread = b'"unread":%b' % nested(levels - 3)
    return raw_asked(messages=b'[{"role":"user","content":"Hi",%b}]' % unread)


def deep_tool(levels: int) -> bytes:
    return raw_asked(tools=b'[{"type":"function","function":{"name":"f","parameters":%b}}]' % schema(levels - 4))


def schema(levels: int) -> bytes:
    """A schema of so many levels."""
    return b'{"type":"object","x":%b}' % nested(levels - 1)


DEEP: dict[str, Callable[[int], bytes]] = {
    "messages": deep_message,
    "a tool's schema": deep_tool,
    "metadata": lambda levels: raw_asked(metadata=nested(levels - 1)),
}


@pytest.mark.parametrize("name", DEEP)
async def test_b11_200_levels_are_taken_in_the_openai_format_and_201_refused(
    gateway: GatewayProcess, upstream: RawUpstream, name: str
) -> None:
    """The limit is the same wherever the levels are, be it in a field that nobody reads."""
    taken = await ask(gateway, CHAT, DEEP[name](200))
    refused = await ask(gateway, CHAT, DEEP[name](201))

    assert 200 == taken.status
    assert "200 levels" in error_of(refused, CHAT, 400)["message"]
    assert 1 == len(upstream.asked)


@pytest.mark.parametrize("levels", [201, 500, 900])
@pytest.mark.parametrize("name", DEEP)
async def test_b11_what_is_deep_passes_unchanged_or_is_refused_in_the_messages_format(
    gateway: GatewayProcess, upstream: RawUpstream, name: str, levels: int
) -> None:
    """There the parser is the limit, and what it takes arrives to the byte."""
    body = DEEP[name](levels)

    answer = await ask(gateway, MESSAGES, body)

    if answer.status == 200:
        assert body.replace(b'"model":"model"', b'"model":"model-at-upstream"') == upstream.asked[0].body
    else:
        error_of(answer, MESSAGES, 400)
        assert [] == upstream.asked


async def test_b12_a_deep_schema_arrives_whole(gateway: GatewayProcess, upstream: RawUpstream) -> None:
    """A tool's schema of 190 levels loses none of them on its way through the translation."""
    deep = schema(190)

    answer = await ask(gateway, CHAT, deep_tool(194))

    assert 200 == answer.status
    assert json.loads(deep) == json.loads(upstream.asked[0].body)["tools"][0]["input_schema"]


# Numbers

NUMBERS = {
    "5000 digits": b"9" * 5000,
    "2^64": b"18446744073709551616",
    "2^53+1": b"9007199254740993",
    "1e400": b"1e400",
    "-0": b"-0",
    "-0.0": b"-0.0",
    "many decimals": b"0.1000000000000000055511151231257827",
}


@pytest.mark.parametrize("name", NUMBERS)
async def test_b14_a_number_that_nobody_reads_keeps_its_digits(
    gateway: GatewayProcess, upstream: RawUpstream, name: str
) -> None:
    """In a tool's schema it reaches the upstream as it was written, from both formats; ignored, it is no error."""
    number = NUMBERS[name]
    parameters = b'{"type":"object","maximum":%b}' % number

    openai = await ask(
        gateway,
        CHAT,
        raw_asked(
            seed=number,
            metadata=b'{"a":[%b]}' % number,
            tools=b'[{"type":"function","function":{"name":"f","parameters":%b}}]' % parameters,
        ),
    )
    native = await ask(gateway, MESSAGES, raw_asked(tools=b'[{"name":"f","input_schema":%b}]' % parameters, x=number))

    assert (200, 200) == (openai.status, native.status), openai.body + native.body
    assert [True, True] == [b'"maximum":%b}' % number in each.body for each in upstream.asked]


READ_NUMBERS: dict[str, tuple[str, str, dict[str, bytes], int]] = {
    "max_tokens of 5000 digits, negative": (CHAT, "max_tokens", {"max_tokens": b"-" + b"9" * 5000}, 400),
    "max_tokens of 1e400": (CHAT, "max_tokens", {"max_tokens": b"1e400"}, 400),
    "max_tokens of -0": (CHAT, "max_tokens", {"max_tokens": b"-0"}, 400),
    "max_tokens of 2^64": (CHAT, "max_tokens", {"max_tokens": b"18446744073709551616"}, 200),
    "max_tokens of 2^53+1": (CHAT, "max_tokens", {"max_tokens": b"9007199254740993"}, 200),
    "temperature of 5000 digits": (CHAT, "temperature", {"temperature": b"9" * 5000}, 400),
    "temperature of 1e400": (CHAT, "temperature", {"temperature": b"1e400"}, 400),
    "temperature of -0": (CHAT, "temperature", {"temperature": b"-0"}, 200),
    "top_p of 2^64": (CHAT, "top_p", {"top_p": b"18446744073709551616"}, 400),
    "n of 5000 digits": (CHAT, "n", {"n": b"9" * 5000}, 400),
    "n of 1e400": (CHAT, "n", {"n": b"1e400"}, 400),
    "top_logprobs of 2^64": (CHAT, "top_logprobs", {"top_logprobs": b"18446744073709551616"}, 400),
    "native max_tokens of 5000 digits, negative": (
        MESSAGES,
        "max_tokens",
        {"max_tokens": b"-" + b"9" * 5000},
        400,
    ),
    "native max_tokens of 1e400": (MESSAGES, "max_tokens", {"max_tokens": b"1e400"}, 400),
    "native max_tokens of -0": (MESSAGES, "max_tokens", {"max_tokens": b"-0"}, 400),
    "native max_tokens of 2^64": (MESSAGES, "max_tokens", {"max_tokens": b"18446744073709551616"}, 200),
    "native max_tokens of 5000 digits": (MESSAGES, "max_tokens", {"max_tokens": b"9" * 5000}, 400),
}


@pytest.mark.parametrize("name", READ_NUMBERS)
async def test_b14_a_number_that_is_read_is_taken_or_refused_by_name(
    gateway: GatewayProcess, upstream: RawUpstream, name: str
) -> None:
    """Where a number can't be meant it is a 400 that begins with the field's name; else it is taken."""
    path, field, members, status = READ_NUMBERS[name]

    answer = await ask(gateway, path, raw_asked(**members))

    if status == 400:
        assert error_of(answer, path, 400)["message"].startswith(f"{field}: ")
    assert (status, [200].count(status)) == (answer.status, len(upstream.asked))


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity", "+1", "01", "1.", ".5", "0x1"])
@pytest.mark.parametrize("field", ["temperature", "metadata", "x"])
async def test_b15_what_is_no_number_is_no_json(
    gateway: GatewayProcess, upstream: RawUpstream, field: str, constant: str, path: str
) -> None:
    """A value that JSON doesn't know is a 400 wherever it stands, and never goes on as null or as it is."""
    answer = await ask(gateway, path, raw_asked(**{field: b'{"a":[%b]}' % constant.encode()}))

    assert "not valid JSON" in error_of(answer, path, 400)["message"]
    assert [] == upstream.asked


# Text

TEXTS = {
    "a pair of surrogates": rb"\ud83d\ude00",
    "U+0000": rb"a\u0000b",
    "U+2028 and U+2029": "a\u2028b\u2029c".encode(),
    "U+2028, escaped": rb"a\u2028b",
    "bidi marks": "a\u202eb\u2066c\u2069".encode(),
    "four bytes": "😀𐍈".encode(),
    "a BOM within": "a\ufeffb".encode(),
    "escapes of all kinds": rb"\"\\\/\b\f\n\r\t\u00e9\u007f",
}


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("name", TEXTS)
async def test_b17_text_arrives_unchanged(gateway: GatewayProcess, upstream: RawUpstream, name: str, path: str) -> None:
    """Whatever is valid text reaches the upstream as that text, from the Messages format to the byte."""
    text = TEXTS[name]

    answer = await ask(gateway, path, raw_asked(messages=b'[{"role":"user","content":"%b"}]' % text))

    assert 200 == answer.status
    sent = upstream.asked[0].body
    content = json.loads(sent)["messages"][0]["content"]
    assert json.loads(b'"%b"' % text) == (content if isinstance(content, str) else content[0]["text"])
    assert path == CHAT or b'"content":"%b"' % text in sent


NO_UTF8 = {
    "a lone byte": b"\xff",
    "an overlong slash": b"\xc0\xaf",
    "an overlong NUL": b"\xe0\x80\x80",
    "a raw surrogate": b"\xed\xa0\x80",
    "a raw pair of surrogates": b"\xed\xa0\xbd\xed\xb8\x80",
    "beyond U+10FFFF": b"\xf4\x90\x80\x80",
    "cut short": b"\xe2\x82",
    "Latin-1": "Zürich".encode("latin-1"),
}
PLACES: dict[str, Callable[[bytes], bytes]] = {
    "in a message": lambda raw: raw_asked(messages=b'[{"role":"user","content":"%b"}]' % raw),
    "in a field that nobody reads": lambda raw: raw_asked(metadata=b'{"a":"%b"}' % raw),
    "in a key": lambda raw: raw_asked(metadata=b'{"%b":1}' % raw),
    "outside of text": lambda raw: raw_asked() + raw,
}


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", NO_UTF8)
async def test_b18_what_is_no_utf8_is_refused(
    gateway: GatewayProcess, upstream: RawUpstream, name: str, place: str, path: str
) -> None:
    """Bytes that are no UTF-8 are a 400 wherever they stand; nothing is replaced and sent on."""
    answer = await ask(gateway, path, PLACES[place](NO_UTF8[name]))

    assert "not valid JSON" in error_of(answer, path, 400)["message"]
    assert [] == upstream.asked


# Types and encodings

FORM = "multipart/form-data; boundary=x"
CONTENT_TYPES = {
    "none": (),
    "text/plain": ("content-type: text/plain",),
    "a form": (f"content-type: {FORM}",),
    "a URL-encoded form": ("content-type: application/x-www-form-urlencoded",),
    "another charset": ("content-type: application/json; charset=utf-16",),
    "nonsense": ("content-type: ;;=\x80",),
}
FORMS = {
    "multipart": b'--x\r\ncontent-disposition: form-data; name="model"\r\n\r\nmodel\r\n--x--\r\n',
    "URL-encoded": b"model=model&max_tokens=64&messages=[]",
}


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("type", CONTENT_TYPES)
async def test_b20_the_body_counts_and_not_its_type(
    gateway: GatewayProcess, upstream: RawUpstream, type: str, path: str
) -> None:
    """JSON is read whatever the type says, and a form is no JSON whatever the type says."""
    fields = CONTENT_TYPES[type]

    good = await ask(gateway, path, asked(), *fields)
    forms = [await ask(gateway, path, form, *fields) for form in FORMS.values()]

    assert 200 == good.status
    assert [400, 400] == [answer.status for answer in forms]
    assert 1 == len(upstream.asked)
    assert "application/json" == upstream.asked[0].headers["content-type"]


GOOD = json.dumps(asked()).encode()
ENCODED: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "gzip": (gzip.compress(GOOD), ("gzip",)),
    "gzip in capitals": (gzip.compress(GOOD), ("GZIP",)),
    "broken gzip": (b"\x1f\x8b\x08" + GOOD, ("gzip",)),
    "no gzip at all": (GOOD, ("gzip",)),
    "truncated gzip": (gzip.compress(GOOD)[:-9], ("gzip",)),
    "a bomb": (gzip.compress(b" " * 50 * MB), ("gzip",)),
    "deflate": (zlib.compress(GOOD), ("deflate",)),
    "br": (GOOD, ("br",)),
    "zstd": (GOOD, ("zstd",)),
    "gzip in gzip": (gzip.compress(gzip.compress(GOOD)), ("gzip, gzip",)),
    "gzip behind identity": (gzip.compress(GOOD), ("identity, gzip",)),
    "two headers": (gzip.compress(GOOD), ("identity", "gzip")),
    "unknown": (GOOD, ("x-unknown",)),
}


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("name", ENCODED)
async def test_b21_a_compressed_body_is_refused_and_never_inflated(
    gateway: GatewayProcess, upstream: RawUpstream, name: str, path: str
) -> None:
    """Any encoding is a 400 that names the header, be the body good, broken, cut or a bomb."""
    body, encodings = ENCODED[name]
    async with taken_by(gateway) as taken:
        answer = await ask(gateway, path, body, *(f"content-encoding: {each}" for each in encodings))

    assert error_of(answer, path, 400)["message"].startswith("content-encoding: ")
    assert [] == upstream.asked
    assert taken.memory < 25 * MB


@pytest.mark.parametrize("path", BOTH)
async def test_b21_identity_is_no_compression(gateway: GatewayProcess, upstream: RawUpstream, path: str) -> None:
    """A body that says that it is as it is passes."""
    assert 200 == (await ask(gateway, path, asked(), "content-encoding: identity")).status


# Much at once


async def test_b23_large_bodies_at_once_are_bounded(gateway: GatewayProcess, upstream: RawUpstream) -> None:
    """Of twenty bodies of 32 MB at once some are a 503 with retry-after before they are read; later all have room."""
    beginning = head(MESSAGES, f"content-length: {MOST}") + padded(MOST)[:MB]  # and the rest doesn't come
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connected(gateway)) for _ in range(20)]
        await asyncio.gather(*(client.send_all(beginning) for client in clients))
        at_once = await asyncio.gather(*(client.answer(1) for client in clients), return_exceptions=True)
    later = await ask(gateway, MESSAGES, asked())

    refused = [answer for answer in at_once if isinstance(answer, Answer)]
    assert {503} == {answer.status for answer in refused}
    assert 20 - 512 // 32 == len(refused)
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
    assert 200 == later.status


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
@pytest.mark.parametrize("announced", [True, False], ids=["announced", "in chunks"])
async def test_b23_bodies_count_until_they_are_answered(announced: bool) -> None:
    """Room for 64 MB is room for three bodies of 20 MB that the upstream hasn't answered, however they are sent."""
    body = padded(20 * MB)
    framing = f"content-length: {len(body)}" if announced else "transfer-encoding: chunked"
    sent = head(MESSAGES, framing) + (body if announced else in_chunks(body, MB))
    async with (
        RawUpstream() as upstream,
        running_gateway([ChatCompletions], upstream=upstream.url, server={"most_body_bytes": 64 * MB}) as url,
        AsyncExitStack() as stack,
    ):
        for _ in range(3):
            upstream.play(Move.WAIT)
            client = await stack.enter_async_context(connected(Address.of(url)))
            await client.send_all(sent)
        await eventually(lambda: upstream.playing == 3, PATIENCE)
        fourth = await stack.enter_async_context(connected(Address.of(url)))
        await fourth.send_all(sent)
        answer = await fourth.answer()

        assert 503 == answer.status
        assert 3 == len(upstream.asked)


# A large body and the others

LARGE: dict[str, Sequence[dict[str, Any]]] = {
    "one text": [{"role": "user", "content": "x" * 30_000_000}],
    "three images": [
        {
            "role": "user",
            "content": [
                {
                    "type": "image_url",
                    "image_url": {
                        "url": "data:image/png;base64,"
                        + base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"\0" * 7_000_000).decode()
                    },
                }
            ]
            * 3,
        }
    ],
    "30,000 messages": [{"role": ("user", "assistant")[at % 2], "content": "word " * 200} for at in range(29_001)],
}
LARGE_CASES = [*((CHAT, shape) for shape in LARGE), (MESSAGES, "one text")]
LONGEST_STALL, MOST_WORK = 4.0, 2.0
"""Seconds that another request may take meanwhile, and of the gateway's processor: many times what is usual, since a
busy machine stretches the first."""


@pytest.mark.slow
@pytest.mark.parametrize(("path", "shape"), LARGE_CASES)
async def test_b24_a_large_body_does_not_hold_up_the_others(
    gateway: GatewayProcess, upstream: RawUpstream, shape: str, path: str
) -> None:
    """While a body of 30 MB is read, translated and sent on, other requests are answered."""
    body = json.dumps(asked(messages=LARGE[shape])).encode()
    async with connected(gateway) as client, connected(gateway) as probe, taken_by(gateway) as taken:
        client.send(post(path, body))
        answering = asyncio.create_task(client.answer())
        stalls = [seconds async for seconds in _probed(probe, answering)]
        answer = await answering

    assert 28_000_000 < len(body) < MOST
    assert 200 == answer.status, answer.body[:500]
    assert max(stalls) < LONGEST_STALL
    assert taken.seconds < MOST_WORK


async def _probed(probe: RawClient, until: asyncio.Task[Any]) -> AsyncIterator[float]:
    """How long each of many small requests takes, in seconds, one after the other."""
    while not until.done():
        began = time.monotonic()
        probe.send(GET_HEALTH)
        await probe.answer()
        yield time.monotonic() - began


# Fields that mean something elsewhere

TEMPTING: dict[str, Any] = {
    "api_base": "http://127.0.0.1:9/",
    "base_url": "http://127.0.0.1:9/",
    "upstream": "other",
    "headers": {"x-api-key": "stolen", "host": "127.0.0.1:9"},
    "extra_headers": {"x-injected": "1"},
    "extra_query": {"a": "b"},
    "api_key": "stolen",
    "callbacks": ["os.system"],
    "organization": "other",
    "custom_llm_provider": "other",
    "mock_response": "Hacked.",
}


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("field", TEMPTING)
async def test_b26_no_field_decides_where_a_request_goes(
    gateway: GatewayProcess, upstream: RawUpstream, field: str, path: str
) -> None:
    """Address, path and headers are the gateway's own: such a field is ignored, or passed on within the body."""
    plain = await ask(gateway, path, asked())
    tempted = await ask(gateway, path, asked(**{field: TEMPTING[field]}))

    usual, other = upstream.asked
    assert (200, 200) == (plain.status, tempted.status)
    assert usual.line == other.line
    assert sorted(_without_length(usual.headers)) == sorted(_without_length(other.headers))
    assert UPSTREAM_KEY == other.headers["x-api-key"]
    assert (path == MESSAGES) == (field in json.loads(other.body))


def _without_length(headers: Any) -> list[tuple[str, str]]:
    return [(name.lower(), value) for name, value in headers.items() if name.lower() != "content-length"]


# Names of models

NO_MODELS = {
    "a path": "../../x",
    "CR and LF": "model\r\nx-injected: 1",
    "NUL": "model\0",
    "full width": "ｍｏｄｅｌ",
    "a template": "{{7*7}}${jndi:ldap://127.0.0.1/a}%s%n",
    "HTML": "<script>alert(1)</script>",
    "128 characters": "x" * 128,
    "129 characters": "x" * 129,
    "a megabyte": "x" * MB,
    "empty": "",
    "spaces": "   ",
    "a lone surrogate": "\ud800",
}
BAD_NAMES = ("129 characters", "a megabyte", "empty", "spaces")


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("name", NO_MODELS)
async def test_b27_a_name_of_no_model_is_refused(
    gateway: GatewayProcess, upstream: RawUpstream, name: str, path: str
) -> None:
    """Such a name is a 404, or a 400 where it can be none; it splits no header and no line of the log."""
    own_id = f"b27-{list(NO_MODELS).index(name)}{path.replace('/', '-')}"

    answer = await ask(gateway, path, asked(model=NO_MODELS[name]), f"x-request-id: {own_id}")

    error_of(answer, path, 400 if name in BAD_NAMES else 404)
    assert "x-injected" not in answer.headers
    assert [] == upstream.asked
    assert len(answer.body) < 1000
    lines = await eventually(lambda: gateway.requests(client_request_id=own_id))
    assert [None] == [line["model"] for line in lines]


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("name", ["MODEL", "  model ", "\tRaw/Model\n", "raw/MODEL"])
async def test_b27_letter_case_and_outer_spaces_do_not_matter(
    gateway: GatewayProcess, upstream: RawUpstream, name: str, path: str
) -> None:
    """A model is found so, and the answer calls it exactly what the client did."""
    answer = await ask(gateway, path, asked(model=name))

    assert (200, name) == (answer.status, answer.data["model"])
    assert "model-at-upstream" == json.loads(upstream.asked[0].body)["model"]
