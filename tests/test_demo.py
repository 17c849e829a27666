"""The embedded demo upstream, over a real socket: what a client of the Messages format may expect of it."""

import asyncio
import io
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson
import pytest
from anthropic import AsyncAnthropic

from proxy.demo import DemoUpstream
from proxy.demo.prompt_cache import CAPACITY, PromptCache, count_prompt

Json = dict[str, Any]

LONG = "The quick brown fox jumps over the lazy dog. " * 8  # 360 bytes, 90 tokens
MARK = {"type": "ephemeral"}
MARK_1H = {"type": "ephemeral", "ttl": "1h"}
WEATHER = {
    "name": "get_weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CLOCK_TOOL = {"name": "get_time", "input_schema": {"type": "object", "properties": {"zone": {"type": "string"}}}}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Paris"}}
ANSWERING = {"type": "tool_result", "tool_use_id": "toolu_1"}
RESULT = {**ANSWERING, "content": "21 degrees"}


@dataclass
class Client:
    """A client of the demo upstream at `url`, and the clock that its prompt cache goes by."""

    url: str
    session: aiohttp.ClientSession
    now: float = 0.0
    demo: DemoUpstream | None = None

    async def send(self, body: Any, path: str = "/v1/messages") -> tuple[int, Json]:
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        async with self.session.post(self.url + path, data=data) as answer:
            return answer.status, await answer.json()

    async def message(self, body: Json) -> Json:
        status, message = await self.send(body)
        assert status == 200, message
        return message

    async def events(self, body: Json) -> list[Json]:
        async with self.session.post(f"{self.url}/v1/messages", json={**body, "stream": True}) as answer:
            assert answer.status == 200
            return events_in(await answer.text())


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    demo = DemoUpstream(clock=lambda: made.now)
    async with aiohttp.ClientSession() as session:
        made = Client(await demo.start(), session, demo=demo)
        yield made
    await demo.stop()


@pytest.fixture
async def sdk(client: Client) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(api_key="any", base_url=client.url, max_retries=0) as made:
        yield made


def asking(*contents: Any, **fields: Any) -> Json:
    """A request whose messages alternate between user and assistant."""
    roles = ("user", "assistant")
    messages = [{"role": roles[number % 2], "content": content} for number, content in enumerate(contents)]
    return {"model": "demo", "max_tokens": 1000, "messages": messages, **fields}


def text_block(text: str, **fields: Any) -> Json:
    return {"type": "text", "text": text, **fields}


def events_in(stream: str) -> list[Json]:
    events = []
    for frame in stream.split("\n\n")[:-1]:
        name, data = re.fullmatch(r"event: (\w+)\ndata: (.*)", frame, re.DOTALL).groups()  # type: ignore[union-attr]
        events.append(orjson.loads(data))
        assert name == events[-1]["type"]
    return events


def text_of(message: Json) -> str:
    return "".join(block["text"] for block in message["content"] if block["type"] == "text")


def put_together(events: list[Json]) -> Json:
    """The message that a stream's events describe, the counts of its end laid over those of its start."""
    message: Json = dict(events[0]["message"], content=[])
    arguments = ""
    for event in events[1:]:
        match event:
            case {"type": "content_block_start", "content_block": block}:
                message["content"].append(dict(block))
                arguments = ""
            case {"delta": {"type": "input_json_delta", "partial_json": piece}}:
                arguments += piece
            case {"type": "content_block_stop"} if arguments:
                message["content"][-1]["input"] = orjson.loads(arguments)
            case {"type": "content_block_delta", "delta": delta}:
                for name in delta.keys() - {"type"}:
                    message["content"][-1][name] += delta[name]
            case {"type": "message_delta", "delta": delta, "usage": usage}:
                message = {**message, **delta, "usage": {**message["usage"], **usage}}
    return message


# Answers


async def test_text_says_what_was_seen_and_what_to_try(client: Client) -> None:
    """A first answer is of use: it says that it is the demo, echoes the user, counts, and suggests."""
    message = await client.message(asking("first", "ok", "Hello   there", system="x" * 40))

    text = text_of(message)
    for part in ("demo", "“Hello there”", "3 messages and 17 input tokens", "0 of them read", "`fault 529`"):
        assert part in text
    assert ("end_turn", "demo", 17) == (message["stop_reason"], message["model"], message["usage"]["input_tokens"])


async def test_the_same_request_gets_the_same_answer(client: Client) -> None:
    """Nothing but the message's id differs between two answers to one request."""
    body = asking("What is the weather?", tools=[WEATHER], thinking={"type": "adaptive"})

    first, second = await client.message(body), await client.message(body)

    assert first.pop("id") != second.pop("id")
    assert first == second


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(asking("Hello"), id="text"),
        pytest.param(asking("Weather in Paris?", tools=[WEATHER]), id="a call"),
        pytest.param(asking("now", tools=[CLOCK_TOOL]), id="a call without arguments"),
        pytest.param(asking("parallel please", tools=[WEATHER, CLOCK_TOOL]), id="calls"),
        pytest.param(asking("Hello", thinking={"type": "adaptive"}), id="thinking"),
        pytest.param(asking("Hello", thinking={"type": "adaptive", "display": "omitted"}), id="thinking omitted"),
        pytest.param(asking("Hello", max_tokens=1), id="length"),
        pytest.param(asking("Hello", stop_sequences=["demo"]), id="stop sequence"),
    ],
)
async def test_a_stream_says_what_the_plain_answer_says(client: Client, body: Json) -> None:
    """The events of a stream add up to the plain answer, usage included."""
    plain = await client.message(body)
    events = await client.events(body)

    streamed = put_together(events)

    plain.pop("id"), streamed.pop("id")
    assert plain == streamed
    assert ["message_start", "ping"] == [event["type"] for event in events[:2]]
    assert ["message_delta", "message_stop"] == [event["type"] for event in events[-2:]]
    assert 1 == events[0]["message"]["usage"]["output_tokens"]
    assert plain["usage"]["input_tokens"] == events[-2]["usage"]["input_tokens"]


async def test_text_is_streamed_word_by_word(client: Client) -> None:
    """A delta holds one word, so that a stream looks like one."""
    events = await client.events(asking("Hello"))

    deltas = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    assert ["Hello! ", "I ", "am ", "the ", "demo "] == deltas[:5]


async def test_slow_streams_pause_between_words(client: Client) -> None:
    """With the word slow in the prompt the deltas leave one by one."""
    body = asking("a slow answer", max_tokens=4)  # "Hello! I am the "
    writes = 0

    async with client.session.post(f"{client.url}/v1/messages", json={**body, "stream": True}) as answer:
        async for _, ends_a_write in answer.content.iter_chunks():
            writes += ends_a_write

    assert 5 == writes


async def test_the_length_limit_cuts_the_text(client: Client) -> None:
    """max_tokens is honoured to the token of 4 bytes."""
    message = await client.message(asking("Hello", max_tokens=3))

    assert "Hello! I am " == text_of(message)
    assert ("max_tokens", 3) == (message["stop_reason"], message["usage"]["output_tokens"])


async def test_a_call_that_does_not_fit_is_left_out(client: Client) -> None:
    """No half arguments are ever given."""
    message = await client.message(asking("Weather?", tools=[WEATHER], max_tokens=2))

    assert ([], "max_tokens") == (message["content"], message["stop_reason"])


async def test_the_first_stop_sequence_ends_the_text(client: Client) -> None:
    """Of several stop sequences the one that comes first ends the answer, and isn't part of it."""
    message = await client.message(asking("Hello", stop_sequences=["demo", "am the", "nowhere"]))

    assert "Hello! I " == text_of(message)
    assert ("stop_sequence", "am the") == (message["stop_reason"], message["stop_sequence"])


async def test_thinking_comes_first_signed_and_counted(client: Client) -> None:
    """Thinking that was asked for stands before the text, and its tokens are told apart."""
    message = await client.message(asking("Hello", thinking={"type": "enabled", "budget_tokens": 1024}))

    assert ["thinking", "text"] == [block["type"] for block in message["content"]]
    assert message["content"][0]["thinking"]
    assert message["content"][0]["signature"]
    assert 0 < message["usage"]["output_tokens_details"]["thinking_tokens"] < message["usage"]["output_tokens"]


async def test_structured_output_is_an_instance_of_the_schema(client: Client) -> None:
    """A json_schema format gets an object with every property, through references and choices."""
    schema = {
        "type": "object",
        "properties": {
            "title": {"type": "string"},
            "kind": {"enum": ["bug", "wish"]},
            "count": {"type": "integer", "minimum": 7},
            "share": {"type": "number", "maximum": 0.5},
            "done": {"type": "boolean"},
            "day": {"type": "string", "format": "date"},
            "maybe": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tag"}]},
            "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "minItems": 2},
            "both": {
                "allOf": [{"properties": {"a": {"const": 1}}}, {"properties": {"b": {"type": ["null", "string"]}}}]
            },
        },
        "$defs": {"tag": {"type": "string", "maxLength": 3}},
    }
    form = {"format": {"type": "json_schema", "schema": schema}}

    message = await client.message(asking("a report", output_config=form))

    assert {
        "title": "a report",
        "kind": "bug",
        "count": 7,
        "share": 0.5,
        "done": True,
        "day": "2026-01-31",
        "maybe": "a r",
        "tags": ["a r", "a r"],
        "both": {"a": 1, "b": "a report"},
    } == orjson.loads(text_of(message))


@pytest.mark.parametrize(
    ("schema", "status"),
    [
        pytest.param({"$ref": "#"}, 200, id="calls itself"),
        pytest.param({"properties": {name: {"$ref": "#"} for name in "abcdef"}}, 200, id="grows without end"),
        pytest.param({"type": "array", "minItems": 10**9, "items": {"$ref": "#"}}, 200, id="many items"),
        pytest.param({"type": "object", "properties": 5}, 400, id="no schema"),
    ],
)
async def test_no_schema_costs_much(client: Client, schema: Json, status: int) -> None:
    """A schema that calls itself ends, and one that is none is refused by its path."""
    form = {"format": {"type": "json_schema", "schema": schema}}

    got, answer = await client.send(asking("a report", output_config=form))

    assert status == got
    assert status == 200 or answer["error"]["message"].startswith("output_config.format.schema: ")


# Tools


@pytest.mark.parametrize(
    ("question", "fields", "called"),
    [
        pytest.param("Hello", {}, ["get_weather"], id="first question: the first tool"),
        pytest.param("What time is it?", {}, ["get_time"], id="first question: the tool it is about"),
        pytest.param("use get_time", {}, ["get_time"], id="the tool it names"),
        pytest.param("Hello", {"tool_choice": {"type": "none"}}, [], id="none"),
        pytest.param("Hello", {"tool_choice": {"type": "any"}}, ["get_weather"], id="any"),
        pytest.param("x", {"tool_choice": {"type": "tool", "name": "get_time"}}, ["get_time"], id="named"),
        pytest.param("in parallel", {}, ["get_weather", "get_time"], id="parallel"),
        pytest.param(
            "in parallel",
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            ["get_weather"],
            id="parallel refused",
        ),
        pytest.param("Hello", {"tools": [{"type": "web_search_20260101", "name": "web_search"}]}, [], id="server tool"),
        pytest.param(
            "Hello", {"tools": [{**WEATHER, "name": f"tool{number}"} for number in range(6)]}, [], id="an agent's many"
        ),
    ],
)
async def test_which_tools_are_called(client: Client, question: str, fields: Json, called: list[str]) -> None:
    """The rule is the documented one, and no chance."""
    message = await client.message(asking(question, **{"tools": [WEATHER, CLOCK_TOOL], **fields}))

    calls = [block for block in message["content"] if block["type"] == "tool_use"]
    assert called == [call["name"] for call in calls]
    assert len(called) == len({call["id"] for call in calls})
    assert ("tool_use" if called else "end_turn") == message["stop_reason"]


@pytest.mark.parametrize(
    ("question", "city"),
    [
        pytest.param("What is the weather in San Francisco?", "San Francisco", id="a name"),
        pytest.param('weather of "New York, NY" please', "New York NY", id="a quotation"),
        pytest.param("how warm is it; rm -rf ~", "how warm is it rm rf", id="plain words only"),
    ],
)
async def test_arguments_come_from_the_users_words(client: Client, question: str, city: str) -> None:
    """A string argument is what the user speaks of, without characters that a shell would heed."""
    message = await client.message(asking(question, tools=[WEATHER]))

    assert [{"city": city}] == [block["input"] for block in message["content"]]


async def test_a_later_question_is_answered_in_text(client: Client) -> None:
    """With auto, tools are called at the first question or by their name, not at every turn."""
    plain = await client.message(asking("Hi", "Hello", "And now?", tools=[WEATHER]))
    named = await client.message(asking("Hi", "Hello", "call get_weather", tools=[WEATHER]))

    assert ("end_turn", "tool_use") == (plain["stop_reason"], named["stop_reason"])


async def test_tool_results_are_answered_in_text(client: Client) -> None:
    """What the tool said stands in the answer."""
    message = await client.message(asking("Weather?", [CALL], [RESULT], tools=[WEATHER]))

    assert "end_turn" == message["stop_reason"]
    assert text_of(message).startswith("The tool answered: 21 degrees.")


# Checks


REFUSED = {
    "no object": (b"[]", "Input should be a valid dictionary"),
    "no JSON": (b"{", "The request body is not valid JSON: "),
    "a lone surrogate": (b'{"model": "\\ud800"}', "The request body is not valid JSON: "),
    "no model": ({"max_tokens": 1, "messages": []}, "model: Field required"),
    "model of a wrong type": (asking("a", model=5), "model: Input should be a valid string"),
    "no max_tokens": ({"model": "m", "messages": []}, "max_tokens: Field required"),
    "max_tokens 0": (asking("a", max_tokens=0), "max_tokens: Input should be greater than or equal to 1"),
    "max_tokens true": (asking("a", max_tokens=True), "max_tokens: Input should be a valid integer"),
    "max_tokens a fraction": (asking("a", max_tokens=1.5), "max_tokens: Input should be a valid integer"),
    "no messages": ({"model": "m", "max_tokens": 1}, "messages: Field required"),
    "empty messages": (asking(), "messages: at least one message is required"),
    "unknown role": (
        asking(messages=[{"role": "tool", "content": "a"}]),
        "messages.0.role: Input should be 'user', 'assistant' or 'system'",
    ),
    "empty content": (asking("a", "b", ""), "messages.2: all messages must have non-empty content"),
    "empty text": (
        asking("a", "b", [text_block("c"), text_block("")]),
        "messages.2.content.1: text content blocks must be non-empty",
    ),
    "blank text": (
        asking([text_block(" ")]),
        "messages.0.content.0: text content blocks must contain non-whitespace text",
    ),
    "blank string": (asking(" "), "messages.0.content: text content blocks must contain non-whitespace text"),
    "blank system": (asking("a", system=[text_block("")]), "system.0: text content blocks must be non-empty"),
    "mark on empty text": (
        asking([text_block("", cache_control=MARK)]),
        "messages.0.content.0: cache_control cannot be set for empty text blocks",
    ),
    "image without source": (asking([{"type": "image"}]), "messages.0.content.0.image.source: Field required"),
    "prefill with a blank": (
        asking("a", "b "),
        "messages: final assistant content cannot end with trailing whitespace",
    ),
    "call's id": (
        asking("a", [{**CALL, "id": "a:b"}], [RESULT]),
        "messages.1.content.0.tool_use.id: String should match pattern '^[a-zA-Z0-9_-]+$'",
    ),
    "result's id": (
        asking("a", [CALL], [{**RESULT, "tool_use_id": ""}]),
        "messages.2.content.0.tool_result.tool_use_id: String should match pattern",
    ),
    "call of the user": (asking([CALL]), "messages.0.content.0: `tool_use` blocks can only be in `assistant` messages"),
    "result without a call": (asking([RESULT]), "messages.0.content.0: unexpected `tool_use_id`"),
    "result of an older call": (asking("a", [CALL], [RESULT], "b", [RESULT]), "messages.4.content.0: unexpected"),
    "call without a result": (asking("a", [CALL], "b"), "messages.1.content.0: `tool_use` ids without `tool_result`"),
    "result behind text": (
        asking("a", [CALL], [text_block("b"), RESULT]),
        "messages.2.content.1: `tool_result` blocks must stand before all other content",
    ),
    "five marks": (
        asking([text_block(word, cache_control=MARK) for word in "abcde"]),
        "A maximum of 4 blocks with cache_control may be provided. Found 5.",
    ),
    "four marks and the automatic one": (
        asking([text_block(word, cache_control=MARK) for word in "abcd"], cache_control=MARK),
        "A maximum of 4 blocks with cache_control may be provided. Found 5.",
    ),
    "mark of an unknown ttl": (
        asking([text_block("a", cache_control={**MARK, "ttl": "2h"})]),
        "messages.0.content.0.cache_control.ttl: Input should be '5m' or '1h'",
    ),
    "an hour behind five minutes": (
        asking([text_block("a", cache_control=MARK_1H)], system=[text_block("b", cache_control=MARK)]),
        "messages.0.content.0.cache_control.ttl: ",
    ),
    "mark on thinking": (
        asking("a", [{"type": "thinking", "thinking": "b", "signature": "c", "cache_control": MARK}], "d"),
        "messages.1.content.0.cache_control: ",
    ),
    "blank stop": (asking("a", stop_sequences=["b", "\n"]), "stop_sequences.1: "),
    "choice without tools": (asking("a", tool_choice={"type": "auto"}), "tool_choice: "),
    "choice of an unknown tool": (
        asking("a", tools=[WEATHER], tool_choice={"type": "tool", "name": "x"}),
        "tool_choice: Tool 'x' not found",
    ),
    "tool without a schema": (asking("a", tools=[{"name": "x"}]), "tools.0.custom.input_schema: Field required"),
    "tools of one name": (asking("a", tools=[WEATHER, WEATHER]), "tools: Tool names must be unique."),
    "stream of a wrong type": (asking("a", stream="yes"), "stream: Input should be a valid boolean"),
    "format without a schema": (
        asking("a", output_config={"format": {"type": "json_schema"}}),
        "output_config.format.schema: Field required",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
async def test_what_the_api_refuses(client: Client, what: str) -> None:
    """A bad request is a 400 in the envelope, with a message that begins with the field's path."""
    body, message = REFUSED[what]

    status, answer = await client.send(body)

    assert (400, "error", "invalid_request_error") == (status, answer["type"], answer["error"]["type"])
    assert answer["error"]["message"].startswith(message), answer


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(asking("a", max_tokens=64.0), id="a whole number with a fraction of 0"),
        pytest.param(asking("a", ""), id="an empty prefill"),
        pytest.param(asking("a", cache_control=None, system="", tools=[]), id="nothing in many fields"),
        pytest.param(
            asking(messages=[{"role": "user", "content": "a"}, {"role": "system", "content": [], "output_config": {}}]),
            id="a system message that only holds settings",
        ),
        pytest.param(
            asking(
                messages=[
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": [CALL]},
                    {"role": "assistant", "content": [{**CALL, "id": "toolu_2"}]},
                    {"role": "system", "content": "Be brief."},
                    {"role": "user", "content": [RESULT]},
                    {"role": "user", "content": [{**RESULT, "tool_use_id": "toolu_2"}, text_block("And?")]},
                ]
            ),
            id="a turn in several messages",
        ),
    ],
)
async def test_what_the_api_accepts(client: Client, body: Json) -> None:
    """No check is stricter than the API's."""
    status, answer = await client.send(body)

    assert 200 == status, answer


# Prompt caching


def cached(message: Json) -> tuple[int, int, int]:
    usage = message["usage"]
    return usage["input_tokens"], usage["cache_creation_input_tokens"], usage["cache_read_input_tokens"]


async def test_a_prefix_is_written_once_and_then_read(client: Client) -> None:
    """The marked prefix costs a write first and a read afterwards, and the text tells of it."""
    body = asking("Hello there!", system=[text_block(LONG, cache_control=MARK)])

    first, second = await client.message(body), await client.message(body)

    assert (3, 90, 0) == cached(first)
    assert (3, 0, 90) == cached(second)
    assert "90 of them read from the cache" in text_of(second)
    assert {"ephemeral_5m_input_tokens": 90, "ephemeral_1h_input_tokens": 0} == first["usage"]["cache_creation"]


async def test_a_conversation_reads_what_its_last_turn_wrote(client: Client) -> None:
    """A mark that moves with the newest message finds the prefix of the turn before."""
    await client.message(asking([text_block(LONG, cache_control=MARK)]))

    second = await client.message(asking(LONG, "Yes?", [text_block("Go on, please!!!", cache_control=MARK)]))

    assert (0, 5, 90) == cached(second)


@pytest.mark.parametrize(
    ("mark", "lifetime"),
    [pytest.param(MARK, 300, id="five minutes"), pytest.param(MARK_1H, 3600, id="an hour")],
)
async def test_a_read_renews_the_lifetime(client: Client, mark: Json, lifetime: int) -> None:
    """A prefix that is read stays, one that isn't goes when its time is over."""
    body = asking("Hi!!", system=[text_block(LONG, cache_control=mark)])
    await client.message(body)

    seen = []
    for moment in (lifetime - 1, 2 * lifetime - 2, 3 * lifetime - 2):
        client.now = moment
        seen.append(cached(await client.message(body)))

    assert [(1, 0, 90), (1, 0, 90), (1, 90, 0)] == seen


async def test_two_lifetimes_are_counted_apart(client: Client) -> None:
    """Tools marked for an hour and a system prompt for five minutes are written at their own prices."""
    tool = {**WEATHER, "description": LONG, "cache_control": MARK_1H}
    body = asking("Hi!!", tools=[tool], system=[text_block(LONG, cache_control=MARK)])

    written = (await client.message(body))["usage"]["cache_creation"]

    assert 90 == written["ephemeral_5m_input_tokens"]
    assert 90 < written["ephemeral_1h_input_tokens"] < 140


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"model": "another"}, id="another model"),
        pytest.param({"tools": [WEATHER]}, id="other tools, which come first"),
        pytest.param({"system": [text_block("x"), text_block(LONG, cache_control=MARK)]}, id="a block before it"),
        pytest.param({"system": [text_block(LONG + "x", cache_control=MARK)]}, id="another text"),
    ],
)
async def test_another_prefix_is_not_read(client: Client, other: Json) -> None:
    """Every byte before a breakpoint counts, and a prefix belongs to its model."""
    body = asking("Hi!!", system=[text_block(LONG, cache_control=MARK)])
    await client.message(body)

    assert 0 == cached(await client.message({**body, **other}))[2]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(
            asking(LONG, "Yes?", [text_block("Go", cache_control=MARK)]),
            asking(
                [text_block(LONG, cache_control=MARK)], [text_block("Yes?")], [text_block("Go", cache_control=MARK)]
            ),
            id="a string and its one text block, with another mark",
        ),
        pytest.param(
            asking([text_block(LONG, cache_control=MARK)]),
            asking([text_block(LONG)], cache_control=MARK),
            id="the automatic mark",
        ),
        pytest.param(
            asking("a", [CALL], [{**RESULT, "content": [text_block(LONG, cache_control=MARK)]}]),
            asking("a", [CALL], [{"content": [text_block(LONG)], **ANSWERING, "cache_control": MARK}]),
            id="a mark in a tool result, and a block's keys in another order",
        ),
    ],
)
async def test_the_same_prefix_in_another_spelling_is_read(client: Client, first: Json, second: Json) -> None:
    """Marks and the form of a content don't belong to a prefix."""
    written = cached(await client.message(first))[1]

    assert written >= 90
    assert written == cached(await client.message(second))[2]


@pytest.mark.parametrize(
    ("length", "written"), [pytest.param(63 * 4, 0, id="too short"), pytest.param(64 * 4, 64, id="just long enough")]
)
async def test_short_prefixes_are_not_cached(client: Client, length: int, written: int) -> None:
    """Below 64 tokens nothing is written, and it is no error."""
    body = asking([text_block("x" * length, cache_control=MARK)])

    assert written == cached(await client.message(body))[1]


@pytest.mark.parametrize(
    ("added", "read"), [pytest.param(19, 90, id="within 20 blocks"), pytest.param(20, 0, id="one block too far")]
)
async def test_how_far_back_an_entry_is_searched(client: Client, added: int, read: int) -> None:
    """From a breakpoint 20 blocks are looked at, itself included, as in the real cache."""
    await client.message(asking([text_block(LONG, cache_control=MARK)]))
    blocks = [text_block(LONG), *(text_block(f"block {number}") for number in range(added))]
    blocks[-1]["cache_control"] = MARK

    assert read == cached(await client.message(asking(blocks)))[2]


async def test_a_request_without_marks_uses_no_cache(client: Client) -> None:
    """Caching is asked for; a known prefix is not read unasked."""
    await client.message(asking([text_block(LONG, cache_control=MARK)]))

    assert (90, 0, 0) == cached(await client.message(asking(LONG)))


async def test_a_failed_request_writes_nothing(client: Client) -> None:
    """A prompt that got no answer is not in the cache afterwards."""
    system = [text_block(LONG, cache_control=MARK)]
    await client.send(asking("fault 529", system=system))

    assert (1, 90, 0) == cached(await client.message(asking("Hi!!", system=system)))


def test_the_cache_stays_small() -> None:
    """Neither many prompts nor a long life make it grow without end."""
    now = 0.0
    cache = PromptCache(lambda: now)
    for number in range(CAPACITY + 10):
        cache.use(count_prompt(asking([text_block(f"{number} {LONG}", cache_control=MARK)])))
    assert CAPACITY == len(cache)

    now = 301.0
    cache.use(count_prompt(asking("Hi")))

    assert 0 == len(cache)


# Faults


@pytest.mark.parametrize(
    ("status", "kind", "retry_after"),
    [
        (400, "invalid_request_error", None),
        (401, "authentication_error", None),
        (402, "billing_error", None),
        (403, "permission_error", None),
        (404, "not_found_error", None),
        (413, "request_too_large", None),
        (429, "rate_limit_error", "2"),
        (500, "api_error", None),
        (503, "overloaded_error", None),
        (504, "timeout_error", None),
        (529, "overloaded_error", "2"),
    ],
)
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
async def test_a_status_on_demand(
    client: Client, status: int, kind: str, retry_after: str | None, stream: bool
) -> None:
    """`fault N` in the prompt is that status, in the envelope, before any stream begins."""
    body = asking(f"please Fault {status}!", stream=stream)

    async with client.session.post(f"{client.url}/v1/messages", json=body) as answer:
        error = await answer.json()

    assert (status, kind) == (answer.status, error["error"]["type"])
    assert retry_after == answer.headers.get("retry-after")
    assert error["request_id"] == answer.headers["request-id"]


@pytest.mark.parametrize(
    "contents",
    [
        pytest.param(("fault 529", "Sorry.", "Go on"), id="an older message"),
        pytest.param(("default 529",), id="part of a word"),
        pytest.param(("fault 5290",), id="another number"),
        pytest.param(("a", [CALL], [{**RESULT, "content": "fault 529"}]), id="a tool's result"),
        pytest.param(([text_block("fault 529"), text_block("Hello")],), id="an agent's reminder before the words"),
    ],
)
async def test_what_is_no_fault(client: Client, contents: tuple[Any, ...]) -> None:
    """Only what the user typed last counts, so a conversation recovers."""
    status, _ = await client.send(asking(*contents))

    assert 200 == status


async def test_a_stream_that_breaks_with_an_error(client: Client) -> None:
    """After some deltas comes an error event and nothing else; plain, it is a 529."""
    events = await client.events(asking("fault error"))
    status, _ = await client.send(asking("fault error"))

    assert 3 == sum(event["type"] == "content_block_delta" for event in events)
    assert ("error", "overloaded_error") == (events[-1]["type"], events[-1]["error"]["type"])
    assert 529 == status


async def test_a_stream_that_is_cut(client: Client) -> None:
    """The connection ends in mid-stream, after some deltas."""
    async with client.session.post(f"{client.url}/v1/messages", json=asking("fault cut", stream=True)) as answer:
        got = await answer.content.readany()
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.content.readany()

    assert 3 == got.count(b"event: content_block_delta")
    assert b"message_delta" not in got


async def test_a_plain_answer_that_is_cut(client: Client) -> None:
    """The connection ends without an answer."""
    with pytest.raises(aiohttp.ServerDisconnectedError):
        await client.send(asking("fault cut"))


async def until_tasks_are(count: int) -> None:
    async with asyncio.timeout(5):
        while len(asyncio.all_tasks()) > count:  # noqa: ASYNC110  nothing tells when a server's task has gone
            await asyncio.sleep(0)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(asking("fault hang"), id="hang"),
        pytest.param(asking("fault hang", stream=True), id="hang, streamed"),
        pytest.param(asking("fault stall"), id="stall, plain"),
    ],
)
async def test_a_request_that_hangs(client: Client, body: Json) -> None:
    """No answer comes, and a client that leaves takes everything with it."""
    before = len(asyncio.all_tasks())

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(client.send(body), 0.1)

    await until_tasks_are(before)


async def test_a_stream_that_stalls(client: Client) -> None:
    """Some deltas come and then nothing more, and a client that leaves takes everything with it."""
    before = len(asyncio.all_tasks())

    async with client.session.post(f"{client.url}/v1/messages", json=asking("fault stall", stream=True)) as answer:
        got = await answer.content.readany()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(answer.content.readany(), 0.1)
        answer.close()

    assert 3 == got.count(b"event: content_block_delta")
    await until_tasks_are(before)


async def test_stopping_lets_hanging_clients_go(client: Client) -> None:
    """Who waits when the demo stops is not left waiting."""
    async with client.session.post(f"{client.url}/v1/messages", json=asking("fault stall", stream=True)) as answer:
        assert client.demo is not None
        await client.demo.stop()

        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.read()


# Endpoints


async def test_count_tokens_counts_what_a_message_would(client: Client) -> None:
    """The count is the whole input, by the documented estimate, and changes no cache."""
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    body = asking([text_block("Grüße"), image], system=[text_block(LONG, cache_control=MARK)])
    counted = {name: body[name] for name in body if name != "max_tokens"}

    status, answer = await client.send(counted, "/v1/messages/count_tokens")

    assert (200, {"input_tokens": 90 + 2 + 1000}) == (status, answer)
    assert (1002, 90, 0) == cached(await client.message(body))


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/healthz", 200),
        ("GET", "/nowhere", 404),
        ("GET", "/v1/messages", 405),
        ("POST", "/v1/messages", 400),
        ("POST", "/v1/messages/count_tokens", 400),
    ],
)
async def test_every_answer_has_an_id(client: Client, method: str, path: str, status: int) -> None:
    """Every answer carries a request-id of its own, and every failure repeats it in its envelope."""
    async with client.session.request(method, client.url + path) as answer:
        body = await answer.json()

    assert status == answer.status
    assert re.fullmatch(r"req_\w+", answer.headers["request-id"])
    assert status == 200 or ("error", answer.headers["request-id"]) == (body["type"], body["request_id"])


async def test_a_body_over_32_mb_is_too_large(client: Client) -> None:
    """The limit of the real API holds here too."""
    body = io.BytesIO(b" " * (32 * 2**20 + 1))

    async with client.session.post(f"{client.url}/v1/messages", data=body) as answer:
        error = await answer.json()

    assert (413, "request_too_large") == (answer.status, error["error"]["type"])


async def test_it_starts_again_after_it_stopped() -> None:
    """Start and stop come in pairs, and a second start without a stop is refused."""
    demo = DemoUpstream()
    async with aiohttp.ClientSession() as session:
        for _ in range(2):
            url = await demo.start()
            with pytest.raises(RuntimeError):
                await demo.start()
            async with session.get(f"{url}/healthz") as answer:
                assert 200 == answer.status
            await demo.stop()
        with pytest.raises(aiohttp.ClientConnectorError):
            await session.get(f"{url}/healthz")


# The Anthropic SDK as the client


async def test_the_sdk_reads_a_plain_answer(sdk: AsyncAnthropic) -> None:
    """What the SDK sends is accepted, and what it gets is a Message."""
    message = await sdk.messages.create(model="demo", max_tokens=500, messages=[{"role": "user", "content": "Hello"}])

    assert message.content[0].type == "text"
    assert "demo" in message.content[0].text
    assert message._request_id is not None


async def test_the_sdk_reads_a_stream_with_thinking(sdk: AsyncAnthropic) -> None:
    """The SDK puts the stream together to the message that a plain answer is."""
    async with sdk.messages.stream(
        model="demo", max_tokens=500, thinking={"type": "adaptive"}, messages=[{"role": "user", "content": "Hello"}]
    ) as stream:
        texts = [text async for text in stream.text_stream]
        message = await stream.get_final_message()

    thought, said = message.content
    assert (thought.type, said.type) == ("thinking", "text")
    assert thought.type == "thinking" and thought.signature and thought.thinking  # noqa: PT018  narrows the type
    assert said.type == "text" and "".join(texts) == said.text  # noqa: PT018
    assert message.stop_reason == "end_turn"
    assert message.usage.output_tokens_details is not None


async def test_the_sdk_goes_round_with_a_tool(sdk: AsyncAnthropic) -> None:
    """A call that the SDK streamed can be answered, and the answer tells the result."""
    question: Any = {"role": "user", "content": "What is the weather in Paris?"}
    tools: Any = [WEATHER]
    async with sdk.messages.stream(model="demo", max_tokens=500, messages=[question], tools=tools) as stream:
        asked = await stream.get_final_message()
    call = asked.content[0]
    assert call.type == "tool_use"
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "21 degrees"}

    answered = await sdk.messages.create(
        model="demo",
        max_tokens=500,
        tools=tools,
        messages=[question, {"role": "assistant", "content": asked.content}, {"role": "user", "content": [result]}],
    )

    assert ("tool_use", {"city": "Paris"}) == (asked.stop_reason, call.input)
    assert answered.content[0].type == "text"
    assert "21 degrees" in answered.content[0].text
