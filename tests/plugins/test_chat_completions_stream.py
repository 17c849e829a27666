"""The events of a streamed message become chunks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugins.chat_completions.stream import EventsToChunks
from proxy.dialects.messages import Messages
from proxy.dialects.openai import OpenAI
from proxy.document import Event
from proxy.errors import GatewayError, Kind
from proxy.exchange import Exchange
from proxy.progress import Progress
from proxy.sse import Frame, Splitter
from proxy.testing import make_exchange
from tests.strategies import events_of, messages, pieces_of

Json = dict[str, Any]


def exchange_of(**body: Any) -> Exchange:
    exchange = make_exchange({"messages": [], "stream": True, **body})
    exchange.id, exchange.created = "0190", 1767225600
    return exchange


def chunks_of(*events: Event, **body: Any) -> list[Json]:
    """The chunks of these events, as a client reads them."""
    exchange = exchange_of(**body)
    translation, progress = EventsToChunks(exchange), Progress(exchange.usage)
    chunks = []
    for event in events:
        progress.observe(event)
        for chunk in translation.chunks_of(event):
            chunks.append(orjson.loads(OpenAI().frame(chunk, exchange).removeprefix(b"data: ")))
    return chunks


def event(raw: str) -> Event:
    """The event of a JSON text."""
    return Event(json.loads(raw)["type"], raw=raw.encode())


START = event('{"type":"message_start","message":{"usage":{"input_tokens":3,"output_tokens":1}}}')
STOP = event('{"type":"message_stop"}')


def opened(block: str, index: int = 0) -> Event:
    return event(f'{{"type":"content_block_start","index":{index},"content_block":{block}}}')


def delta(fields: str, index: int = 0) -> Event:
    return event(f'{{"type":"content_block_delta","index":{index},"delta":{fields}}}')


def text(literal: str) -> Event:
    return delta(f'{{"type":"text_delta","text":{literal}}}')


def arguments(literal: str, index: int = 0) -> Event:
    return delta(f'{{"type":"input_json_delta","partial_json":{literal}}}', index)


def closed(index: int = 0) -> Event:
    return event(f'{{"type":"content_block_stop","index":{index}}}')


def ended(reason: str = '"end_turn"', usage: str = '{"output_tokens":9}') -> Event:
    return event(f'{{"type":"message_delta","delta":{{"stop_reason":{reason}}},"usage":{usage}}}')


def call(id: str = "c", input: str = "{}") -> str:
    return f'{{"type":"tool_use","id":"{id}","name":"f","input":{input}}}'


def begun(index: int = 0, id: str = "c") -> Json:
    function = {"name": "f", "arguments": ""}
    return {"tool_calls": [{"index": index, "id": id, "type": "function", "function": function}]}


def more(arguments: str, index: int = 0) -> Json:
    return {"tool_calls": [{"index": index, "function": {"arguments": arguments}}]}


EVENTS: dict[str, tuple[list[Event], list[Json]]] = {
    "nothing": ([], []),
    "the start": ([START], [{"role": "assistant", "content": ""}]),
    "text": ([opened('{"type":"text","text":""}'), text('"a"'), text('"b"')], [{"content": "a"}, {"content": "b"}]),
    "text in the block's start": (
        [opened('{"type":"text","text":"a"}'), text('"b"')],
        [{"content": "a"}, {"content": "b"}],
    ),
    "an empty delta": ([opened('{"type":"text"}'), text('""'), text('"b"')], [{"content": "b"}]),
    "escapes": ([text(r'"\"\\\/\n\u00e9\ud83d\ude00"')], [{"content": '"\\/\né😀'}]),
    "a lone surrogate": ([text(r'"a\ud800b"')], [{"content": "a\ufffdb"}]),
    "a lone surrogate in the block's start": ([opened(r'{"type":"text","text":"\udc00"}')], [{"content": "\ufffd"}]),
    "text with spaces around": ([delta('\n{ "text" : "a" , "type" : "text_delta" }\t')], [{"content": "a"}]),
    "text of null": ([text("null")], []),
    "a call": (
        [opened(call()), arguments(r'"{\"a\""'), arguments('":1.10}"'), closed()],
        [begun(), more('{"a"'), more(":1.10}")],
    ),
    "a call without arguments": ([opened(call()), closed()], [begun(), more("{}")]),
    "a call with an empty delta": ([opened(call()), arguments('""'), closed()], [begun(), more("{}")]),
    "a call with a delta of null": ([opened(call()), arguments("null"), closed()], [begun(), more("{}")]),
    "a call without input": ([opened('{"type":"tool_use","id":"c","name":"f"}'), closed()], [begun(), more("{}")]),
    "arguments in the block's start": (
        [opened(call(input='{"a": [1.10, 1E5]}')), closed()],
        [begun(), more('{"a":[1.10,1E5]}')],
    ),
    "a call that is never closed": ([opened(call()), ended(), STOP], [begun(), more("{}"), {}]),
    "a lone surrogate in arguments": (
        [opened(call()), arguments(r'"{\"\\ud800\":\"\ud800\"}"')],
        [begun(), more('{"\\ud800":"\ufffd"}')],
    ),
    "indexes count calls": (
        [opened('{"type":"text","text":"a"}'), opened(call("c"), 1), opened(call("d"), 5), closed(1), closed(5)],
        [{"content": "a"}, begun(0, "c"), begun(1, "d"), more("{}", 0), more("{}", 1)],
    ),
    "open at the same time": (
        [opened(call("c"), 1), opened(call("d"), 2), arguments('"{"', 2), arguments('"["', 1), arguments('"}"', 2)],
        [begun(0, "c"), begun(1, "d"), more("{", 1), more("[", 0), more("}", 1)],
    ),
    "text while a call is open": (
        [opened(call("c"), 1), text('"a"'), closed(1)],
        [begun(), {"content": "a"}, more("{}")],
    ),
    "thinking": (
        [
            opened('{"type":"thinking","thinking":"hm","signature":""}'),
            delta('{"type":"thinking_delta","thinking":"secret"}'),
            delta('{"type":"signature_delta","signature":"secret"}'),
            closed(),
        ],
        [],
    ),
    "citations": ([delta('{"type":"citations_delta","citation":{"cited_text":"secret"}}')], []),
    "a tool of the provider": (
        [opened('{"type":"server_tool_use","id":"s","name":"web_search","input":{}}'), arguments('"{}"'), closed()],
        [],
    ),
    "a block of tomorrow": ([opened('{"type":"of_tomorrow","text":"secret","input":{"a":1}}'), closed()], []),
    "a delta of tomorrow": ([delta('{"type":"of_tomorrow","text":"secret","partial_json":"secret"}')], []),
    "a delta without a type": ([delta('{"text":"secret"}')], []),
    "an event of tomorrow": ([event('{"type":"of_tomorrow","delta":{"type":"text_delta","text":"secret"}}')], []),
    "arguments of no call": ([arguments('"{}"', 7)], []),
    "the end": ([ended(), STOP], [{}]),
    "the end waits for the last event": ([ended()], []),
}


@pytest.mark.parametrize(("events", "expected"), EVENTS.values(), ids=EVENTS)
def test_deltas(events: list[Event], expected: list[Json]) -> None:
    """Each event becomes the deltas of the contract; what OpenAI's format lacks becomes none."""
    begun = [] if START in events else [START]
    seen = [chunk["choices"][0]["delta"] for chunk in chunks_of(*begun, *events)]
    assert expected == seen[len(begun) :]


def test_the_role_comes_first_though_the_upstream_leaves_out_the_start() -> None:
    """A stream that begins with a block has a first chunk with the role all the same, and one only."""
    seen = [chunk["choices"][0]["delta"] for chunk in chunks_of(text('"a"'), text('"b"'))]
    assert [{"role": "assistant", "content": ""}, {"content": "a"}, {"content": "b"}] == seen


FINISHES = {
    "a reason": ([ended('"max_tokens"')], "length"),
    "a call": ([ended('"tool_use"')], "tool_calls"),
    "a reason of tomorrow": ([ended('"of_tomorrow"')], "stop"),
    "a later one without a reason": ([ended('"max_tokens"'), ended("null")], "length"),
    "the latest reason": ([ended('"max_tokens"'), ended('"tool_use"')], "tool_calls"),
    "no reason": ([], "stop"),
}


@pytest.mark.parametrize(("events", "expected"), FINISHES.values(), ids=FINISHES)
def test_the_finish(events: list[Event], expected: str) -> None:
    """The finish chunk has an empty delta and the reason; all chunks before it have none."""
    *before, last = chunks_of(START, text('"a"'), *events, STOP)

    assert [None, None] == [chunk["choices"][0]["finish_reason"] for chunk in before]
    assert ({}, expected) == (last["choices"][0]["delta"], last["choices"][0]["finish_reason"])


def test_one_id_throughout() -> None:
    """All chunks of a stream have the same envelope."""
    chunks = chunks_of(START, text('"a"'), opened(call()), closed(), ended(), STOP)

    expected = {"id": "chatcmpl-0190", "object": "chat.completion.chunk", "created": 1767225600, "model": "test/model"}
    assert [expected] * 5 == [{name: chunk[name] for name in expected} for chunk in chunks]
    assert not any("usage" in chunk for chunk in chunks)


def test_the_usage_comes_last_where_it_is_asked_for() -> None:
    """With include_usage a last chunk has the counts and no choices, and every other one a usage of null."""
    usage = '{"input_tokens":0,"output_tokens":9,"cache_read_input_tokens":4}'

    *before, last = chunks_of(START, text('"a"'), ended(usage=usage), STOP, stream_options={"include_usage": True})

    assert [None] * 3 == [chunk["usage"] for chunk in before]
    assert [] == last["choices"]
    assert (7, 9, 16) == tuple(last["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens"))


BROKEN = {
    "no delta": '{"type":"content_block_delta","index":0}',
    "a delta that is no object": '{"type":"content_block_delta","index":0,"delta":"text"}',
    "an index that is no number": '{"type":"content_block_delta","index":"0","delta":{"type":"text_delta"}}',
    "no JSON": '{"type":"content_block_delta","index":0,',
    "a list": "[]",
}


@pytest.mark.parametrize("raw", BROKEN.values(), ids=BROKEN)
def test_a_delta_that_can_not_be_read_is_an_error(raw: str) -> None:
    """A delta of another shape is the provider's failure, told as such."""
    with pytest.raises(GatewayError) as raised:
        chunks_of(Event("content_block_delta", raw=raw.encode()))

    assert Kind.INTERNAL is raised.value.kind


def test_an_event_that_a_plugin_changed_is_translated_as_changed() -> None:
    """What a plugin behind the translation made of an event is what the client sees."""
    changed = text('"a"')
    changed.change()["delta"]["text"] = "é\ud800"

    assert {"content": "é\ufffd"} == chunks_of(START, changed)[1]["choices"][0]["delta"]


# Any stream, in any bytes

_line_ends = st.sampled_from(("\n", "\r\n", "\r"))
_noise = st.sampled_from(("", "", ": comment{0}", ":{0}{0}", "id: 7{0}", "retry: 10{0}", "{0}"))


@st.composite
def written(draw: st.DrawFn, events: Iterable[Json]) -> bytes:
    """The bytes of a stream of these events, as any server may write them."""
    parts = [draw(st.sampled_from(("", "", "\ufeff")))]
    for each in events:
        end = draw(_line_ends)
        body = json.dumps(each, ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from((None, None, 1))))
        space = draw(st.sampled_from((" ", "")))
        parts.append(draw(_noise).format(end))
        named = each["type"] if draw(st.booleans()) else None
        parts.append(f"event:{space}{named}{end}" if named else "")
        parts += [f"data:{' ' if line.startswith(' ') else space}{line}{end}" for line in body.split("\n")]
        parts.append(draw(st.sampled_from(("", ": behind{0}"))).format(end) + end)
    return "".join(parts).encode()


def read(*pieces: bytes) -> list[Frame]:
    splitter = Splitter()
    return [frame for piece in pieces for frame in splitter.feed(piece)]


def as_events(frames: Iterable[Frame]) -> list[Event]:
    return [Event(json.loads(frame.data)["type"], raw=frame.data) for frame in frames]


def shown(events: Iterable[Event]) -> tuple[list[Json], bytes]:
    """What clients of both formats get of a stream: chunks, and frames of the Messages format."""
    events = list(events)
    frames = b"".join(Messages().frame(each, exchange_of()) for each in events)
    return chunks_of(*events, stream_options={"include_usage": True}), frames


def in_one_line(frames: bytes) -> list[tuple[str, Any]]:
    """The events of frames of the Messages format: name and value."""
    found = re.findall(rb"event: (\w+)\n((?:data: .*\n)+)\n", frames)
    return [(name.decode(), json.loads(re.sub(rb"(?m)^data: ", b"", data))) for name, data in found]


@given(messages.flatmap(events_of), st.data())
def test_any_stream_in_any_bytes(events: list[Json], data: st.DataObject) -> None:
    """However a server writes a stream and however the reads cut it, clients of both formats get the same."""
    stream = data.draw(written(events))

    whole, cut = shown(as_events(read(stream))), shown(as_events(read(*data.draw(pieces_of(stream)))))

    assert whole == cut
    assert shown(Event(each["type"], each) for each in events)[0] == whole[0]
    assert [(each["type"], each) for each in events] == in_one_line(whole[1])
