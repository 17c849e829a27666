"""An agent's conversation, as it grows: nothing that was sent before ever changes, so the provider's cache finds it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import pytest
from openai import AsyncOpenAI

from plugins import BUNDLED
from proxy.testing import CheckingUpstream, running_gateway

TURNS = 10
REQUESTS = 2 * TURNS
"""Each question is asked, and asked on with the results of its calls."""
MARK = b',"cache_control":{"type":"ephemeral"}'
PLACE = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": f"Tells the {name} of a place.", "parameters": PLACE},
    }
    for name in ("weather", "population", "mayor")
]
SYSTEM = "You are an agent that looks up what it doesn't know, and says in one sentence what it found. " * 8
LEAST_SHARE_READ = 0.85
"""Of all tokens of the prompts of such a conversation; without breakpoints it is nothing."""


async def complete(client: AsyncOpenAI, **ask: Any) -> Any:
    """A completion, whole."""
    return await client.chat.completions.create(**ask)


async def complete_streamed(client: AsyncOpenAI, **ask: Any) -> Any:
    """A completion, put together by the SDK from its stream."""
    async with client.chat.completions.stream(**ask, stream_options={"include_usage": True}) as stream:
        return await stream.get_final_completion()


Complete = Callable[..., Awaitable[Any]]


class Talk(NamedTuple):
    """What was sent to the provider and what it counted, request by request."""

    bodies: Sequence[bytes]
    prompts: Sequence[int]
    cached: Sequence[int]


async def conversation(complete: Complete, settings: Mapping[str, Any]) -> Talk:
    """A conversation of an agent: each of its turns asks all tools, in parallel."""
    plugins = [plugin for name, plugin in BUNDLED.items() if name != "auth"]
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    usages = []
    async with (
        CheckingUpstream() as upstream,
        running_gateway(plugins, upstream=upstream.url) as url,
        AsyncOpenAI(api_key="none", base_url=url + "/openai/v1", max_retries=0) as client,
    ):
        for turn in range(TURNS):
            messages.append({"role": "user", "content": f"Ask in parallel about place number {turn}."})
            asked = await complete(client, model="model", messages=messages, tools=TOOLS, **settings)
            reply = asked.choices[0].message
            messages.append(reply)
            for call in reply.tool_calls:
                result = f"{call.function.name} of {call.function.arguments}: as ever ({turn})"
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            told = await complete(client, model="model", messages=messages, tools=TOOLS, **settings)
            messages.append(told.choices[0].message)
            usages += [asked.usage, told.usage]
            assert (len(TOOLS), None) == (len(reply.tool_calls), told.choices[0].message.tool_calls)
    assert [] == upstream.refusals
    return Talk(
        [received.body for received in upstream.received],
        [usage.prompt_tokens for usage in usages],
        [usage.prompt_tokens_details.cached_tokens for usage in usages],
    )


def members(body: bytes) -> dict[str, bytes]:
    """The members of a body, as they were sent."""
    return {name: bytes(raw) for name, raw in msgspec.json.decode(body, type=dict[str, msgspec.Raw]).items()}


WAYS: dict[str, tuple[Complete, dict[str, Any]]] = {
    "plain": (complete, {}),
    "streamed": (complete_streamed, {}),
    "with thinking": (complete, {"reasoning_effort": "high", "temperature": 0.5}),
    "named": (complete_streamed, {"prompt_cache_key": "conversation-7", "parallel_tool_calls": True}),
}


@pytest.mark.parametrize(("complete", "settings"), WAYS.values(), ids=WAYS)
async def test_what_was_sent_is_sent_again_byte_for_byte(complete: Complete, settings: dict[str, Any]) -> None:
    """Each request begins with the bytes of the one before, but for the mark on the newest message, which wanders; and
    the provider reads from its cache all that it was sent before."""
    talk = await conversation(complete, settings)

    sent = [members(body) for body in talk.bodies]
    messages = [each.pop("messages") for each in sent]
    unmarked = [each.replace(MARK, b"") for each in messages]
    assert REQUESTS == len(sent)
    assert [sent[0]] * REQUESTS == sent
    assert [1] * REQUESTS == [each.count(MARK) for each in messages]
    assert [1] * REQUESTS == [each["system"].count(MARK) for each in sent]
    assert all(each.removesuffix(b"]").endswith(MARK + b"}]}") for each in messages)
    assert [] == [turn for turn, (a, b) in enumerate(pairwise(unmarked)) if not b.startswith(a.removesuffix(b"]"))]
    assert [0, *talk.prompts[:-1]] == talk.cached
    assert sum(talk.cached) / sum(talk.prompts) > LEAST_SHARE_READ
