"""Whatever a client may say in OpenAI's format, a strict provider never has to refuse what the gateway makes of it.

One gateway on one strict upstream serves all of them.
"""

from __future__ import annotations

import json
import re
from asyncio import Runner
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings

from plugins import BUNDLED
from proxy.testing import CheckingUpstream, running_gateway
from tests.openai_requests import HARMLESS, PDF, PNG, requests

Json = dict[str, Any]

CHAT = "/openai/v1/chat/completions"
EXAMPLES_DRAWN = 100
FEWEST_ANSWERED = 30


# The gateway


class Setup(NamedTuple):
    """One gateway for all examples, on one strict upstream, in one loop."""

    runner: Runner
    session: aiohttp.ClientSession
    url: str
    upstream: CheckingUpstream

    def answer(self, body: Json) -> tuple[int, str, str]:
        """Status, content type and text of the answer to a request."""
        return self.runner.run(self._answer(json.dumps(body).encode()))

    async def _answer(self, body: bytes) -> tuple[int, str, str]:
        async with self.session.post(self.url + CHAT, data=body) as response:
            return response.status, response.content_type, await response.text()


@pytest.fixture(scope="module")
def setup() -> Iterator[Setup]:
    plugins = [plugin for name, plugin in BUNDLED.items() if name != "auth"]
    with Runner() as runner:
        stack = AsyncExitStack()

        async def enter() -> Setup:
            upstream = await stack.enter_async_context(CheckingUpstream())
            url = await stack.enter_async_context(running_gateway(plugins, upstream=upstream.url))
            return Setup(runner, await stack.enter_async_context(aiohttp.ClientSession()), url, upstream)

        yield runner.run(enter())
        runner.run(stack.aclose())


def error_in(text: str) -> Json:
    """The error of an answer in OpenAI's envelope, and nothing but that."""
    [(name, error)] = json.loads(text).items()
    assert ("error", {"message", "type", "param", "code"}) == (name, set(error))
    told: Json = error
    return told


def check_stream(text: str) -> None:
    """A stream of one completion: a role, an end, and OpenAI's last word."""
    *frames, last, rest = text.split("\n\n")
    chunks = [json.loads(frame.removeprefix("data: ")) for frame in frames]
    assert ("data: [DONE]", "") == (last, rest)
    assert [] == [chunk for chunk in chunks if "error" in chunk]
    assert "assistant" == chunks[0]["choices"][0]["delta"]["role"]
    assert 1 == sum(choice["finish_reason"] is not None for chunk in chunks for choice in chunk["choices"])


def test_any_request_is_answered_or_refused_by_the_gateway(setup: Setup) -> None:
    """Every request gets a completion, or a refusal in OpenAI's envelope that begins with the field's path.

    The provider never refuses what it is sent, and is never asked for thinking and sampling at once.
    """
    statuses: Counter[int] = Counter()

    @settings(max_examples=EXAMPLES_DRAWN, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
    @given(requests())
    def check(body: Json) -> None:
        setup.upstream.received.clear()
        setup.upstream.refusals.clear()

        status, content_type, text = setup.answer(body)

        statuses[status] += 1
        assert [] == setup.upstream.refusals
        for received in setup.upstream.received:
            sent = json.loads(received.body)
            assert not ("thinking" in sent and {"temperature", "top_p"} & set(sent))
        if status != 200:
            error = error_in(text)
            assert 400 == status, error
            assert error["message"].startswith(f"{error['param']}: ")
        elif content_type == "text/event-stream":
            assert body["stream"] is True
            check_stream(text)
        else:
            assert "chat.completion" == json.loads(text)["object"]

    check()

    assert statuses[200] > FEWEST_ANSWERED, "the requests drawn say little"
    assert statuses[400] > 0, "no refusal was drawn"


# Wrong types

WHOLE: Json = {
    "model": "model",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {
            "role": "developer",
            "content": [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}},
                {"type": "image_url", "image_url": {"url": PNG}},
                {"type": "file", "file": {"file_data": PDF}},
            ],
        },
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "So."}],
            "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "noon"}]},
    ],
    "tools": [
        {
            "type": "function",
            "function": {"name": "now", "description": "Time.", "parameters": {"type": "object"}, "strict": True},
            "cache_control": {"type": "ephemeral"},
        }
    ],
    "tool_choice": {"type": "function", "function": {"name": "now"}},
    "parallel_tool_calls": False,
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
    "reasoning_effort": "low",
    "temperature": 0.5,
    "top_p": 0.5,
    "max_completion_tokens": 100,
    "max_tokens": 100,
    "stop": ["END"],
    "stream": False,
    "stream_options": {"include_usage": True},
    "prompt_cache_key": "conversation",
    **HARMLESS,
}
"""Every described field, with a value that is taken."""
EXAMPLES: Mapping[str, tuple[Any, ...]] = {
    "a string": ("x",),
    "an integer": (7, 64.0),
    "a number": (0.5,),
    "a boolean": (True, False),
    "a list": ([], [7]),
    "an object": ({}, {"x": 1}),
}
TAKES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("model", "prompt_cache_key", "reasoning_effort"), ("a string",)),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "n", "top_logprobs"), ("an integer",)),
    **dict.fromkeys(("temperature", "top_p"), ("an integer", "a number")),
    **dict.fromkeys(("stream", "stream_options.include_usage", "parallel_tool_calls", "logprobs"), ("a boolean",)),
    **dict.fromkeys(("messages", "tools", "modalities"), ("a list",)),
    **dict.fromkeys(("stream_options", "response_format", "logit_bias"), ("an object",)),
    **dict.fromkeys(("stop", "tool_choice"), ("a string", "a list", "an object")),
    "stop[0]": ("a string",),
    "tool_choice.type": ("a string",),
    "tool_choice.function": ("an object",),
    "tool_choice.function.name": ("a string",),
    "response_format.type": ("a string",),
    **dict.fromkeys(("response_format.json_schema", "response_format.json_schema.schema"), ("an object",)),
    **dict.fromkeys(("tools[0]", "tools[0].function", "tools[0].function.parameters"), ("an object",)),
    **dict.fromkeys(("tools[0].type", "tools[0].function.name", "tools[0].function.description"), ("a string",)),
    "tools[0].function.strict": ("a boolean",),
    "tools[0].cache_control": ("an object",),
    **{f"messages[{index}]": ("an object",) for index in range(5)},
    **{f"messages[{index}].role": ("a string",) for index in range(5)},
    **{f"messages[{index}].content": ("a string", "a list") for index in range(5)},
    **{f"messages[2].content[{index}]": ("an object",) for index in range(3)},
    **{f"messages[2].content[{index}].type": ("a string",) for index in range(3)},
    "messages[1].content[0].cache_control": ("an object",),
    "messages[2].content[0].text": ("a string",),
    "messages[2].content[0].cache_control": ("an object",),
    "messages[2].content[1].image_url": ("an object",),
    "messages[2].content[1].image_url.url": ("a string",),
    "messages[2].content[2].file": ("an object",),
    "messages[2].content[2].file.file_data": ("a string",),
    "messages[3].content[0].text": ("a string",),
    "messages[3].tool_calls": ("a list",),
    "messages[3].tool_calls[0]": ("an object",),
    "messages[3].tool_calls[0].id": ("a string",),
    "messages[3].tool_calls[0].type": ("a string",),
    "messages[3].tool_calls[0].function": ("an object",),
    "messages[3].tool_calls[0].function.name": ("a string",),
    "messages[3].tool_calls[0].function.arguments": ("a string",),
    "messages[4].tool_call_id": ("a string",),
    "messages[4].content[0]": ("an object",),
    "messages[4].content[0].text": ("a string",),
}
"""The types of each described field."""
NAMED_BY_ITS_FIELD = ("tool_choice",)
"""Fields of one value: what is wrong inside is told of the whole."""


def with_value(path: str, value: Any) -> Json:
    """The whole request with another value at this path."""
    body: Json = json.loads(json.dumps(WHOLE))
    *steps, last = [int(step) if step.isdecimal() else step for step in re.findall(r"\w+", path)]
    place: Any = body
    for step in steps:
        place = place[step]
    place[last] = value
    return body


def test_the_whole_request_is_answered(setup: Setup) -> None:
    """The request whose fields are spoilt one by one is itself a good one."""
    assert (200, "application/json") == setup.answer(WHOLE)[:2]


@pytest.mark.parametrize("path", TAKES)
def test_a_wrong_type_is_refused_by_name(setup: Setup, path: str) -> None:
    """A value of any other type in a described field is a 400 whose message and param begin with the field's path."""
    wrong = [value for kind, values in EXAMPLES.items() if kind not in TAKES[path] for value in values]
    top = re.split(r"[.\[]", path)[0]
    expected = top if top in NAMED_BY_ITS_FIELD else path

    errors = {json.dumps(value): setup.answer(with_value(path, value)) for value in wrong}

    found = {value: (status, error_in(text)["param"]) for value, (status, _, text) in errors.items() if status != 200}
    assert {json.dumps(value): (400, expected) for value in wrong} == found
    assert [] == [text for _, _, text in errors.values() if not error_in(text)["message"].startswith(f"{expected}: ")]
