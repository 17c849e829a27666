"""CheckingUpstream refuses what the Messages API refuses, and nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
import pytest

from plugins.cache_breakpoints import CacheBreakpoints
from plugins.chat_completions import ChatCompletions
from proxy.exchange import Exchange
from proxy.plugin import Plugin
from proxy.testing import CheckingUpstream, running_gateway

Json = dict[str, Any]

MARK = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}
PNG = "iVBORw0KGgo="
TOOL = {"name": "now", "input_schema": {"type": "object", "properties": {}}}


def text(words: str = "Hi", **more: Any) -> Json:
    """A text block."""
    return {"type": "text", "text": words, **more}


def user(*blocks: Json) -> Json:
    return {"role": "user", "content": [*blocks] or [text()]}


def assistant(*blocks: Json) -> Json:
    return {"role": "assistant", "content": [*blocks] or [text()]}


def call(id: str = "call_1", **more: Any) -> Json:
    return {"type": "tool_use", "id": id, "name": "now", "input": {}, **more}


def result(id: str = "call_1", **more: Any) -> Json:
    return {"type": "tool_result", "tool_use_id": id, "content": "noon", **more}


def messages(*of: Json) -> Json:
    return {"messages": list(of)}


def image(media_type: str = "image/png", data: str = PNG) -> Json:
    return {"type": "image", "source": {"type": "base64", "media_type": media_type, "data": data}}


def document(**source: Any) -> Json:
    return {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", **source}}


REFUSED: dict[str, tuple[Json, str]] = {
    # Turns
    "two messages of one side": (messages(user(), user()), "messages.1.role: roles must alternate"),
    "an empty message": (messages(user(), assistant(), {"role": "user", "content": []}), "messages.2: all messages"),
    "an unknown role": (messages({"role": "tool", "content": "x"}), "messages.0.role: Input should be"),
    "a message with a name": (messages({**user(), "name": "Ann"}), "messages.0.name: Extra inputs"),
    # Text
    "empty text": (messages(user(text(""))), "messages.0.content.0: text content blocks must be non-empty"),
    "blank text": (messages(user(text(" \n"))), "messages.0.content.0: text content blocks must contain"),
    "blank system text": ({"system": [text(" ")]}, "system.0: text content blocks must contain"),
    "white space at the end": (messages(user(), assistant(text("So "))), "messages: final assistant content"),
    "an unknown field of a block": (messages(user(text(name="x"))), "messages.0.content.0.text.name: Extra inputs"),
    # Calls and results
    "no result": (messages(user(), assistant(call())), "messages.1.content.0: `tool_use` ids without `tool_result`"),
    "half of the results": (
        messages(user(), assistant(call("a"), call("b")), user(result("a"))),
        "messages.1.content.1: `tool_use` ids without `tool_result` blocks immediately after: b",
    ),
    "a late result": (
        messages(user(), assistant(call()), user(text(), result())),
        "messages.2.content.1: `tool_result` blocks must stand before all other content",
    ),
    "a result without a call": (messages(user(result())), "messages.0.content.0: unexpected `tool_use_id`"),
    "an id twice": (
        messages(user(), assistant(call()), user(result()), assistant(call()), user(result())),
        "messages.3.content.0: `tool_use` ids must be unique",
    ),
    "an id with a dot": (messages(user(), assistant(call("a.b"))), "messages.1.content.0.tool_use.id: String should"),
    "a call's name with a dot": (
        messages(user(), assistant(call(name="a.b")), user(result())),
        "messages.1.content.0.tool_use.name: String should",
    ),
    "arguments that are no object": (
        messages(user(), assistant(call(input="{}"))),
        "messages.1.content.0.tool_use.input: Input should be a valid dictionary",
    ),
    "blank text in a result": (
        messages(user(), assistant(call()), user(result(content=[text("")]))),
        "messages.2.content.0.tool_result.content.0: text content blocks must be non-empty",
    ),
    # Images and documents
    "an unknown image type": (
        messages(user(image("image/jpg"))),
        "messages.0.content.0.image.source.base64.media_type",
    ),
    "an image that is no base64": (
        messages(user(image(data="data:image/png;base64,xx"))),
        "messages.0.content.0.image.source.base64.data: Input should be valid base64",
    ),
    "an image in a result that is no base64": (
        messages(user(), assistant(call()), user(result(content=[image(data="!")]))),
        "messages.2.content.0.tool_result.content.0.image.source.base64.data",
    ),
    "a document that is no PDF": (
        messages(user(document(media_type="text/html", data=PNG))),
        "messages.0.content.0.document.source.base64.media_type",
    ),
    "an empty document": (messages(user(document(data=""))), "messages.0.content.0.document.source.base64.data"),
    # Breakpoints
    "five breakpoints": (
        messages(user(*[text(cache_control=MARK) for _ in range(5)])),
        "A maximum of 4 blocks with cache_control may be provided. Found 5.",
    ),
    "a breakpoint on empty text": (
        messages(user(text("", cache_control=MARK))),
        "messages.0.content.0: cache_control cannot be set for empty text blocks",
    ),
    "a breakpoint on thinking": (
        messages(user(), assistant({"type": "thinking", "thinking": "h", "signature": "s", "cache_control": MARK})),
        "messages.1.content.0.cache_control: cannot be set on this block",
    ),
    "an hour behind five minutes": (
        {"system": [text(cache_control=MARK)], **messages(user(text(cache_control=HOUR)))},
        "messages.0.content.0.cache_control.ttl: a '1h' mark must not come after a '5m' mark",
    ),
    "an unknown ttl": (
        messages(user(text(cache_control={**MARK, "ttl": "2h"}))),
        "messages.0.content.0.cache_control.ttl: Input should be",
    ),
    "an unknown field of a breakpoint": (
        messages(user(text(cache_control={**MARK, "scope": "all"}))),
        "messages.0.content.0.cache_control.scope: Extra inputs",
    ),
    # Tools
    "a choice without tools": ({"tool_choice": {"type": "auto"}}, "tool_choice: may only be specified while"),
    "a choice of an unknown tool": (
        {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "then"}},
        "tool_choice: Tool 'then' not found in provided tools",
    ),
    "no call, and not in parallel": (
        {"tools": [TOOL], "tool_choice": {"type": "none", "disable_parallel_tool_use": True}},
        "tool_choice.none.disable_parallel_tool_use: Extra inputs",
    ),
    "a tool's name with a dot": ({"tools": [{**TOOL, "name": "a.b"}]}, "tools.0.custom.name: String should match"),
    "two tools of one name": ({"tools": [TOOL, TOOL]}, "tools: Tool names must be unique."),
    "a schema without a type": ({"tools": [{**TOOL, "input_schema": {}}]}, "tools.0.custom.input_schema.type"),
    "a tool in OpenAI's form": ({"tools": [{**TOOL, "function": {}}]}, "tools.0.custom.function: Extra inputs"),
    # Settings
    "a blank stop sequence": ({"stop_sequences": ["END", " "]}, "stop_sequences.1: each stop sequence must"),
    "too warm": ({"temperature": 1.5}, "temperature: Input should be less than or equal to 1"),
    "thinking and temperature": (
        {"thinking": {"type": "adaptive"}, "temperature": 0.5},
        "`temperature` may only be set to 1 when thinking is enabled.",
    ),
    "thinking and top_p": ({"thinking": {"type": "adaptive"}, "top_p": 0.9}, "`top_p` must be at least 0.95"),
    "thinking and top_k": ({"thinking": {"type": "adaptive"}, "top_k": 5}, "`top_k` must be unset"),
    "thinking and a forced call": (
        {"thinking": {"type": "adaptive"}, "tools": [TOOL], "tool_choice": {"type": "any"}},
        "Thinking may not be enabled when tool_choice forces tool use.",
    ),
    "an unknown kind of thinking": ({"thinking": {"type": "deep"}}, "thinking.type: Input should be one of"),
    "a budget for adaptive thinking": (
        {"thinking": {"type": "adaptive", "budget_tokens": 2000}},
        "thinking.adaptive.budget_tokens: Extra inputs",
    ),
    "a budget over the limit": (
        {"thinking": {"type": "enabled", "budget_tokens": 2000}, "max_tokens": 2000},
        "`max_tokens` must be greater than `thinking.budget_tokens`.",
    ),
    "an unknown effort": ({"output_config": {"effort": "minimal"}}, "output_config.effort: Input should be one of"),
    "a format with a name": (
        {"output_config": {"format": {"type": "json_schema", "schema": {}, "name": "n"}}},
        "output_config.format.name: Extra inputs",
    ),
    "a field of OpenAI's": ({"seed": 7}, "seed: Extra inputs are not permitted"),
    "no limit": ({"max_tokens": None}, "max_tokens: Input should be a valid integer"),
}

ANSWERED: dict[str, Json] = {
    "one word": {},
    "text that is a string": messages({"role": "user", "content": "Hi"}),
    "a prefilled answer": messages(user(), assistant(text("So"))),
    "system messages between the turns": messages(user(), {"role": "system", "content": "Be brief."}, assistant()),
    "parallel calls": messages(
        user(), assistant(text(), call("a"), call("b")), user(result("b"), result("a"), text("Go on"))
    ),
    "an image in a result": messages(user(), assistant(call()), user(result(content=[text(), image()]))),
    "a result without content": messages(
        user(), assistant(call()), user({"type": "tool_result", "tool_use_id": "call_1"})
    ),
    "a PDF": messages(user(document(data="JVBERi0="))),
    "four breakpoints, an hour first": {
        "system": [text(cache_control=HOUR)],
        **messages(user(text(cache_control=HOUR), text(cache_control=MARK)), assistant(text(cache_control=MARK))),
    },
    "every setting": {
        "tools": [{**TOOL, "description": "Tells the time.", "strict": True, "cache_control": MARK}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "stop_sequences": ["END"],
        "temperature": 1,
        "top_p": 0.95,
        "thinking": {"type": "adaptive", "display": "omitted"},
        "output_config": {"effort": "max", "format": {"type": "json_schema", "schema": {"type": "object"}}},
        "metadata": {"user_id": "u"},
    },
    "a budget for thinking": {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000},
}


@pytest.fixture
async def upstream() -> AsyncIterator[CheckingUpstream]:
    async with CheckingUpstream() as upstream:
        yield upstream


async def post(
    upstream: CheckingUpstream, body: Mapping[str, Any], path: str = "/v1/messages", version: str = "2023-06-01"
) -> tuple[int, Json]:
    """Status and answer to a request with these fields beside the least that there must be."""
    whole = {
        "model": "m",
        **({} if path.endswith("count_tokens") else {"max_tokens": 4096}),
        **messages(user()),
        **body,
    }
    headers = {"anthropic-version": version}
    async with (
        aiohttp.ClientSession() as session,
        session.post(upstream.url + path, json=whole, headers=headers) as response,
    ):
        return response.status, await response.json()


@pytest.mark.parametrize(("body", "message"), REFUSED.values(), ids=REFUSED)
async def test_what_the_api_refuses_is_refused_in_its_words(
    upstream: CheckingUpstream, body: Json, message: str
) -> None:
    """A request that breaks a rule gets a 400 in the API's envelope, and its words are kept for the test."""
    status, answer = await post(upstream, body)

    error = answer["error"]
    assert (400, "error", "invalid_request_error") == (status, answer["type"], error["type"])
    assert error["message"].startswith(message)
    assert [error["message"]] == upstream.refusals


@pytest.mark.parametrize("body", ANSWERED.values(), ids=ANSWERED)
async def test_what_the_api_takes_is_answered(upstream: CheckingUpstream, body: Json) -> None:
    """A request that keeps the rules gets a message of the demo."""
    status, answer = await post(upstream, body)

    assert ([], 200, "message") == (upstream.refusals, status, answer["type"])


async def test_every_request_is_kept(upstream: CheckingUpstream) -> None:
    """What was received is there to be looked at, whether it was refused or not."""
    await post(upstream, {})
    await post(upstream, {"seed": 7})

    assert ["/v1/messages"] * 2 == [received.path for received in upstream.received]
    assert [False, True] == [b'"seed"' in received.body for received in upstream.received]
    assert "2023-06-01" == upstream.received[0].headers["anthropic-version"]


@pytest.mark.parametrize(
    ("version", "body", "expected"),
    [
        pytest.param("2023-06-01", {"temperature": 1}, [], id="the old version takes sampling"),
        pytest.param(
            "2026-10-21", {"temperature": 1}, ["temperature: Extra inputs are not permitted"], id="the new one none"
        ),
        pytest.param("2026-10-21", {}, [], id="the new one without sampling"),
        pytest.param("", {}, ["anthropic-version: header is required"], id="no version"),
    ],
)
async def test_the_version_decides_about_sampling(
    upstream: CheckingUpstream, version: str, body: Json, expected: list[str]
) -> None:
    """The version that the gateway sends is one of the rules."""
    await post(upstream, body, version=version)

    assert expected == upstream.refusals


async def test_tokens_are_counted_without_a_limit(upstream: CheckingUpstream) -> None:
    """count_tokens takes the same body, less what has no meaning there."""
    counted = await post(upstream, {}, "/v1/messages/count_tokens")
    refused = await post(upstream, {"stream": True}, "/v1/messages/count_tokens")

    assert (200, {"input_tokens"}) == (counted[0], set(counted[1]))
    assert (400, ["stream: Extra inputs are not permitted"]) == (refused[0], upstream.refusals)


class _Careless(Plugin):
    """Adds a sentence to the prompt as one would not: as a message of its own."""

    name = "careless"
    sees = "messages"

    async def on_request(self, exchange: Exchange) -> None:
        exchange.change()["messages"].append({"role": "user", "content": "Be kind."})


@pytest.mark.parametrize(
    ("plugins", "refusals"),
    [
        pytest.param([ChatCompletions, CacheBreakpoints], [], id="the bundled plugins keep the rules"),
        pytest.param(
            [ChatCompletions, _Careless],
            ["messages.1.role: roles must alternate between 'user' and 'assistant'"],
            id="a careless one does not",
        ),
    ],
)
async def test_a_plugin_that_breaks_a_request_is_found(plugins: list[type[Plugin]], refusals: list[str]) -> None:
    """Behind a gateway it tells which plugins spoil a request, and the client gets its words."""
    body = {"model": "model", "messages": [{"role": "user", "content": "Hi"}]}

    async with (
        CheckingUpstream() as upstream,
        running_gateway(plugins, upstream=upstream.url) as url,
        aiohttp.ClientSession() as session,
        session.post(url + "/openai/v1/chat/completions", json=body) as response,
    ):
        answer = await response.json()

    assert refusals == upstream.refusals
    assert refusals == ([answer["error"]["message"]] if response.status == 400 else [])


def question(**more: Any) -> Json:
    """OpenAI messages: one that moves the indexes, then a question."""
    return {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}], **more}


def function(**of: Any) -> Json:
    return {"type": "function", "function": {"name": "now", **of}}


CALLED = {"role": "assistant", "tool_calls": [{"id": "call_1", **function(arguments="{}")}]}
MARKED = [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there", "cache_control": {**MARK, "ttl": "2h"}}]

NAMED: dict[str, tuple[Json, str, str]] = {
    "a tool's name": (
        question(tools=[function(), function(name="a.b")]),
        "tools.1.custom.name: String should match pattern",
        "tools[1].function.name",
    ),
    "a tool's schema": (
        question(tools=[function(parameters={"type": "array"})]),
        "tools.0.custom.input_schema.type: Input should be 'object'",
        "tools[0].function.parameters.type",
    ),
    "a call without a result": (
        {"messages": [*question()["messages"], CALLED, {"role": "user", "content": "Well?"}]},
        "messages.1.content.0: `tool_use` ids without",
        "messages[2].tool_calls[0]",
    ),
    "a result without a call": (
        {"messages": [{"role": "system", "content": "x"}, {"role": "tool", "tool_call_id": "c", "content": "noon"}]},
        "messages.0.content.0: unexpected `tool_use_id`",
        "messages[1]",
    ),
    "a breakpoint": (
        {"messages": [{"role": "developer", "content": "x"}, {"role": "user", "content": MARKED}]},
        "messages.0.content.1.cache_control.ttl: Input should be",
        "messages[1].content[1].cache_control.ttl",
    ),
}


@pytest.mark.parametrize(("body", "message", "param"), NAMED.values(), ids=NAMED)
async def test_a_refusal_of_the_provider_names_the_clients_own_field(body: Json, message: str, param: str) -> None:
    """What the provider says reaches an OpenAI client word for word, with the place in the client's own request."""
    async with (
        CheckingUpstream() as upstream,
        running_gateway([ChatCompletions], upstream=upstream.url) as url,
        aiohttp.ClientSession() as session,
        session.post(url + "/openai/v1/chat/completions", json={"model": "model", **body}) as response,
    ):
        error = (await response.json())["error"]

    assert (400, param) == (response.status, error["param"])
    assert error["message"].startswith(message)
    assert [error["message"]] == upstream.refusals
