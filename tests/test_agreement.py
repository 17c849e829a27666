"""Plain and streamed answers of one message say the same.

Both are compared with the message itself as well, so that they can't agree on a mistake.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.chat_completions import ChatCompletions
from plugins.chat_completions.response import message_to_completion
from plugins.chat_completions.stream import EventsToChunks
from proxy.dialects.openai import OpenAI
from proxy.document import Document, Event
from proxy.jsontext import encode
from proxy.progress import Progress
from proxy.testing import Reply, ScriptedUpstream, make_exchange, message_reply, running_gateway, stream_reply
from tests.strategies import Number, Pairs, events_of, messages, reading

Json = dict[str, Any]

FINISH_REASONS = {
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


class Said(NamedTuple):
    """What an answer says, in whatever way it came."""

    content: str | None
    calls: list[tuple[str, str, Any]]
    """Id, name and the arguments as they read."""
    finish_reason: str
    usage: Json


def said_by(message: Json) -> Said:
    """What an answer must say, from the provider's message alone."""
    blocks = message["content"]
    calls = [block for block in blocks if block["type"] == "tool_use"]
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    counts = message["usage"]
    read, written = counts["cache_read_input_tokens"] or 0, counts["cache_creation_input_tokens"] or 0
    prompt, output = counts["input_tokens"] + read + written, counts["output_tokens"]
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": read, "cache_write_tokens": written},
        "completion_tokens_details": {
            "reasoning_tokens": counts.get("output_tokens_details", {}).get("thinking_tokens", 0)
        },
    }
    return Said(
        text or None if calls else text,
        [(call["id"], call["name"], call["input"]) for call in calls],
        FINISH_REASONS.get(message["stop_reason"], "stop"),
        usage,
    )


def said_plainly(completion: Json) -> Said:
    [choice] = completion["choices"]
    calls = choice["message"].get("tool_calls", [])
    return Said(
        choice["message"]["content"],
        [(call["id"], call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls],
        choice["finish_reason"],
        counted(completion["usage"]),
    )


def said_in_chunks(chunks: Iterable[Json]) -> Said:
    """What a client of a stream has at its end, put together as the SDKs do it."""
    text, calls, reasons, usages = "", dict[int, list[str]](), list[str](), list[Json]()
    for chunk in chunks:
        usages += [chunk["usage"]] if chunk.get("usage") else []
        for choice in chunk["choices"]:
            text += choice["delta"].get("content") or ""
            reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
            for part in choice["delta"].get("tool_calls", []):
                if "id" in part:
                    calls[part["index"]] = [part["id"], part["function"]["name"], part["function"]["arguments"]]
                else:
                    calls[part["index"]][2] += part["function"]["arguments"]
    assert list(range(len(calls))) == list(calls)
    [reason], [usage] = reasons, usages
    made = [(id, name, json.loads(arguments)) for id, name, arguments in calls.values()]
    return Said(text or None if calls else text, made, reason, counted(usage))


def counted(usage: Json) -> Json:
    """The counts of the contract; a completion may show more."""
    prompt, output = usage["prompt_tokens_details"], usage["completion_tokens_details"]
    return {
        **{name: usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")},
        "prompt_tokens_details": {name: prompt[name] for name in ("cached_tokens", "cache_write_tokens")},
        "completion_tokens_details": {"reasoning_tokens": output["reasoning_tokens"]},
    }


def completion_of(raw: bytes) -> Json:
    exchange = make_exchange({"messages": []})
    message = Document(raw=raw).data
    exchange.usage.take(message["usage"])
    completion: Json = json.loads(encode(message_to_completion(message, exchange)))
    return completion


def chunks_of(events: Iterable[bytes]) -> list[Json]:
    exchange = make_exchange({"messages": [], **STREAMED})
    translation, progress = EventsToChunks(exchange), Progress(exchange.usage)
    chunks: list[Json] = []
    for raw in events:
        event = Event(json.loads(raw)["type"], raw=raw)
        progress.observe(event)
        frames = [OpenAI().frame(chunk, exchange) for chunk in translation.chunks_of(event)]
        chunks += [json.loads(frame.removeprefix(b"data: ")) for frame in frames]
    return chunks


@settings(max_examples=150)
@given(messages, st.data())
def test_plain_and_streamed_answers_agree(message: Json, data: st.DataObject) -> None:
    """Whole or in events of any cut, open at the same time or not, a message has the same content, calls,
    finish_reason and usage."""
    ascii = data.draw(st.booleans())
    events = data.draw(events_of(message))

    plain = completion_of(json.dumps(message, ensure_ascii=ascii).encode())
    chunks = chunks_of(json.dumps(event, ensure_ascii=ascii).encode() for event in events)

    assert said_by(message) == said_plainly(plain)
    assert said_by(message) == said_in_chunks(chunks)


_digits = st.from_regex(r"-?[1-9][0-9]{0,25}(\.[0-9]{1,20})?([eE][+-]?[0-9]{1,3})?", fullmatch=True)


@given(st.lists(_digits, max_size=3), st.booleans(), st.data())
def test_arguments_keep_their_digits_both_ways(numbers: list[str], at_the_start: bool, data: st.DataObject) -> None:
    """The numbers of a call's arguments have the provider's digits, whole and streamed."""
    input = f'{{"n": [{", ".join(numbers)}]}}'
    message = f'{{"content":[{{"type":"tool_use","id":"c","name":"f","input":{input}}}],"usage":{{}}}}'
    opened = f'{{"type":"tool_use","id":"c","name":"f","input":{input if at_the_start else "{}"}}}'
    events = [f'{{"type":"content_block_start","index":0,"content_block":{opened}}}']
    if not at_the_start:
        cut = data.draw(st.integers(0, len(input)))
        events += [
            f'{{"type":"content_block_delta","index":0,"delta":{{"type":"input_json_delta","partial_json":{piece}}}}}'
            for piece in (json.dumps(input[:cut]), json.dumps(input[cut:]))
        ]
    events.append('{"type":"content_block_stop","index":0}')

    [choice] = completion_of(message.encode())["choices"]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks_of(event.encode() for event in events)]

    expected = Pairs([("n", [Number(number) for number in numbers])])
    [call] = choice["message"]["tool_calls"]
    streamed = "".join(part["function"]["arguments"] for delta in deltas for part in delta.get("tool_calls", ()))
    assert expected == reading(call["function"]["arguments"].encode())
    assert expected == reading(streamed.encode())


class World(NamedTuple):
    """A running gateway, its upstream and a client."""

    runner: asyncio.Runner
    upstream: ScriptedUpstream
    session: aiohttp.ClientSession
    url: str

    def ask(self, path: str, reply: Reply, **more: Any) -> bytes:
        """The body of the answer to one request, for which the upstream has this reply."""
        return self.runner.run(self._ask(path, reply, more))

    async def _ask(self, path: str, reply: Reply, more: Json) -> bytes:
        self.upstream.replies.append(reply)
        body = {"model": "model", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}], **more}
        async with self.session.post(self.url + path, json=body) as answer:
            read = await answer.read()
            assert 200 == answer.status, read
            return read


@asynccontextmanager
async def _started(runner: asyncio.Runner) -> AsyncIterator[World]:
    async with (
        ScriptedUpstream() as upstream,
        running_gateway([ChatCompletions], upstream=upstream.url) as url,
        aiohttp.ClientSession() as session,
    ):
        yield World(runner, upstream, session, url)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """One gateway for all examples: hypothesis calls a plain function, so the loop is run around each request."""
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        started = _started(runner)
        yield runner.run(started.__aenter__())
        runner.run(started.__aexit__(None, None, None))


@settings(max_examples=30)
@given(messages, st.data())
def test_plain_and_streamed_answers_agree_through_the_gateway(world: World, message: Json, data: st.DataObject) -> None:
    """What a client of the real gateway gets says the same in all four ways, one of them the message itself."""
    events = data.draw(events_of(message))
    whole, stream = message_reply(**message), stream_reply(events)
    openai, native = "/openai/v1/chat/completions", "/v1/messages"

    plain = json.loads(world.ask(openai, whole))
    chunks = world.ask(openai, stream, **STREAMED).decode().split("\n\n")
    native_plain = json.loads(world.ask(native, whole))
    native_events = world.ask(native, stream, stream=True).decode().split("\n\n")

    assert ["data: [DONE]", ""] == chunks[-2:]
    assert said_by(message) == said_plainly(plain)
    assert said_by(message) == said_in_chunks(json.loads(chunk.removeprefix("data: ")) for chunk in chunks[:-2])
    assert message | {"model": "model"} == native_plain
    expected = [event for event in events if event is not events[0]]
    assert expected == [json.loads(event.partition("\ndata: ")[2]) for event in native_events[1:-1]]
