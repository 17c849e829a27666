"""Server-sent events: bytes to frames, as the HTML standard reads them."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.errors import GatewayError, Kind
from proxy.sse import Frame, Splitter
from tests.strategies import pieces_of


def frames_of(*pieces: bytes) -> list[Frame]:
    splitter = Splitter()
    return [frame for piece in pieces for frame in splitter.feed(piece)]


def by_the_standard(stream: bytes) -> list[Frame]:
    """The events of a whole stream, line by line, as the standard's chapter on parsing has it."""
    lines = re.split(rb"\r\n|\n|\r", stream.removeprefix(b"\xef\xbb\xbf"))
    frames, name, data = [], b"", list[bytes]()
    for line in lines[:-1]:  # behind the last line end there is no line
        if not line:
            if data:
                frames.append(Frame(name, b"\n".join(data)))
            name, data = b"", []
        elif not line.startswith(b":"):
            field, _, value = line.partition(b":")
            value = value[1:] if value.startswith(b" ") else value
            if field == b"data":
                data.append(value)
            elif field == b"event":
                name = value
    return frames


A = Frame(b"a", b"1")
STREAMS = {
    "nothing": (b"", []),
    "one": (b"event: a\ndata: 1\n\n", [A]),
    "two": (b"event: a\ndata: 1\n\nevent: b\ndata: 2\n\n", [A, Frame(b"b", b"2")]),
    "the data first": (b"data: 1\nevent: a\n\n", [A]),
    "without spaces": (b"event:a\ndata:1\n\n", [A]),
    "only one space is taken": (b"event:  a\ndata:  1\n\n", [Frame(b" a", b" 1")]),
    "without a name": (b"data: 1\n\n", [Frame(b"", b"1")]),
    "an empty name": (b"event: \ndata: 1\n\n", [Frame(b"", b"1")]),
    "the last name counts": (b"event: b\nevent: a\ndata: 1\n\n", [A]),
    "a name alone": (b"event: a\n\ndata: 1\n\n", [Frame(b"", b"1")]),
    "empty data": (b"event: a\ndata:\n\n", [Frame(b"a", b"")]),
    "data without a colon": (b"event: a\ndata\n\n", [Frame(b"a", b"")]),
    "several data lines": (b"data: 1\ndata: 2\ndata:\ndata: 4\n\n", [Frame(b"", b"1\n2\n\n4")]),
    "several data lines behind the name": (b"event: a\ndata: 1\ndata: 2\n\n", [Frame(b"a", b"1\n2")]),
    "a comment between": (b"event: a\n: hello\ndata: 1\n\n", [A]),
    "a comment alone": (b": ping\n\nevent: a\ndata: 1\n\n", [A]),
    "id and retry": (b"id: 7\nretry: 9\nevent: a\ndata: 1\n\n", [A]),
    "unknown fields": (b"dat: 0\ndatas: 0\n data: 0\nevent: a\ndata: 1\n\n", [A]),
    "colons in the data": (b"event: a\ndata: 1: 2\n\n", [Frame(b"a", b"1: 2")]),
    "blank lines before and between": (b"\n\n\nevent: a\ndata: 1\n\n\n\n\nevent: a\ndata: 1\n\n", [A, A]),
    "CRLF": (b"event: a\r\ndata: 1\r\n\r\n", [A]),
    "CR": (b"event: a\rdata: 1\r\r", [A]),
    "mixed line ends": (b"event: a\r\ndata: 1\r\revent: a\ndata: 1\n\r\n", [A, A]),
    "CRLF, then LF": (b"event: a\r\ndata: 1\r\n\nevent: a\ndata: 1\n\n", [A, A]),
    "a BOM": (b"\xef\xbb\xbfevent: a\ndata: 1\n\n", [A]),
    "two BOMs": (b"\xef\xbb\xbf\xef\xbb\xbfevent: a\ndata: 1\n\n", [Frame(b"", b"1")]),
    "a BOM later": (b"event: a\ndata: 1\n\n\xef\xbb\xbfevent: a\ndata: 1\n\n", [A, Frame(b"", b"1")]),
    "NUL": (b"event: a\ndata: \0\n\n", [Frame(b"a", b"\0")]),
    "bytes that are no UTF-8": (b"event: a\ndata: \xff\n\n", [Frame(b"a", b"\xff")]),
    "no blank line at the end": (b"event: a\ndata: 1\n\nevent: b\ndata: 2\n", [A]),
    "cut off": (b"event: a\ndata: 1\n\nevent: b\ndata: ", [A]),
}


@pytest.mark.parametrize(("stream", "expected"), STREAMS.values(), ids=STREAMS)
def test_a_stream(stream: bytes, expected: list[Frame]) -> None:
    """A stream gives the standard's events, in one read, byte by byte, and cut at every place."""
    assert expected == by_the_standard(stream)
    assert expected == frames_of(stream)
    assert expected == frames_of(*(stream[at : at + 1] for at in range(len(stream))))
    for at in range(len(stream)):
        assert expected == frames_of(stream[:at], stream[at:]), f"cut at {at}"


_lines = st.sampled_from(
    (b"event: a", b"event:b", b"event", b"data: 1", b"data:2", b"data", b"data:  x: y", b": comment", b":", b"id: 1")
) | st.binary(max_size=4).map(lambda data: data.replace(b"\r", b"").replace(b"\n", b""))
_line_ends = st.sampled_from((b"\n", b"\r", b"\r\n"))
_streams = st.tuples(
    st.sampled_from((b"", b"", b"\xef\xbb\xbf")),
    st.lists(st.tuples(st.one_of(_lines, st.just(b"")), _line_ends).map(b"".join), max_size=12).map(b"".join),
    st.sampled_from((b"", b"data: cut o")),
).map(b"".join)


@settings(max_examples=300)
@given(_streams, st.data())
def test_any_stream_however_cut(stream: bytes, data: st.DataObject) -> None:
    """Any lines with any line ends give the standard's events, however the reads cut them."""
    pieces = data.draw(pieces_of(stream))

    assert by_the_standard(stream) == frames_of(*pieces)


def test_frames_come_with_the_read_that_completes_them() -> None:
    """Nothing is held back: a frame is there as soon as its blank line is."""
    splitter = Splitter()

    assert [] == splitter.feed(b"event: a\ndata: 1\n")
    assert [A] == splitter.feed(b"\nevent: a\nda")
    assert [A, A] == splitter.feed(b"ta: 1\n\nevent: a\ndata: 1\n\n")
    assert [] == splitter.feed(b"")


def test_a_long_line_in_small_reads() -> None:
    """A line of 2 MB, longer than any reader's limit, is whole however small the reads are."""
    line = b"x" * 2**21
    stream = b"event: a\ndata: " + line + b"\n\n"

    assert [Frame(b"a", line)] == frames_of(*(stream[at : at + 512] for at in range(0, len(stream), 512)))


def test_a_million_blank_lines() -> None:
    """Lines without anything give nothing and don't add up to an event that is too long."""
    splitter = Splitter(longest=1000)

    assert [] == [frame for _ in range(100) for frame in splitter.feed(b"\n" * 10_000)]
    assert [A] == splitter.feed(b"event: a\ndata: 1\n\n")


def test_an_event_without_end_is_an_error() -> None:
    """An event longer than the limit is an error as soon as it is longer, so memory stays bounded."""
    splitter = Splitter(longest=1000)
    assert [] == splitter.feed(b"data: " + b"x" * 994)

    with pytest.raises(GatewayError) as raised:
        splitter.feed(b"x")

    assert Kind.INTERNAL is raised.value.kind


def test_the_limit_is_for_one_event() -> None:
    """A stream may be longer than the limit if its events aren't, in whatever reads they come."""
    splitter = Splitter(longest=100)
    event = b"event: a\ndata: " + b"x" * 60 + b"\n\n"
    stream = event * 50

    found = [frame for at in range(0, len(stream), 7) for frame in splitter.feed(stream[at : at + 7])]

    assert [Frame(b"a", b"x" * 60)] * 50 == found
