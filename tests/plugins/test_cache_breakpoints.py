"""The plugin that sets breakpoints for the provider's prompt cache."""

from __future__ import annotations

from typing import Any

import pytest

from plugins.cache_breakpoints import CacheBreakpoints
from plugins.chat_completions import ChatCompletions
from proxy.exchange import Exchange
from proxy.testing import ask, make_exchange
from tests.plugins.models import make_model

AUTOMATIC = {"type": "ephemeral"}
OWN = {"type": "ephemeral", "ttl": "1h"}
SYSTEM = {"role": "system", "content": "S"}
HI = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "now"}}
CALL = {"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "now"}}]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "12:00"}


async def marked(
    messages: list[Any], tools: Any = None, headers: dict[str, str] | None = None, **capabilities: Any
) -> Exchange:
    """The request behind the translation and the plugin."""
    body = {"model": "m", "messages": messages, "tools": tools}
    exchange = make_exchange(body, model=make_model(**capabilities), headers=headers)
    await ask(ChatCompletions(ChatCompletions.Settings()), exchange)
    await ask(CacheBreakpoints(CacheBreakpoints.Settings()), exchange)
    return exchange


def marks(body: dict[str, Any]) -> dict[str, Any]:
    """The breakpoints of a request, by their place."""
    places = {f"system.{at}": block for at, block in enumerate(body.get("system", ()))}
    places |= {f"tools.{at}": tool for at, tool in enumerate(body.get("tools", ()))}
    for at, message in enumerate(body["messages"]):
        places |= {f"messages.{at}.{number}": block for number, block in enumerate(message["content"])}
    return {place: block["cache_control"] for place, block in places.items() if "cache_control" in block}


PLACES: dict[str, tuple[list[Any], Any, dict[str, Any]]] = {
    "nothing but a message": ([HI], None, {"messages.0.0": AUTOMATIC}),
    "system": ([SYSTEM, SYSTEM, HI], None, {"system.1": AUTOMATIC, "messages.0.0": AUTOMATIC}),
    "system and tools": ([SYSTEM, HI], [TOOL], {"system.0": AUTOMATIC, "messages.0.0": AUTOMATIC}),
    "tools": ([HI], [TOOL, TOOL], {"tools.1": AUTOMATIC, "messages.0.0": AUTOMATIC}),
    "blank system": (
        [{"role": "system", "content": " "}, HI],
        [TOOL],
        {"tools.0": AUTOMATIC, "messages.0.0": AUTOMATIC},
    ),
    "the newest message": ([HI, {"role": "assistant", "content": "A"}, HI, HI], None, {"messages.2.1": AUTOMATIC}),
    "a result": ([HI, CALL, RESULT], None, {"messages.2.0": AUTOMATIC}),
    "a call": ([HI, CALL], None, {"messages.1.0": AUTOMATIC}),
    "own on a part": (
        [SYSTEM, {"role": "user", "content": [{"type": "text", "text": "A", "cache_control": OWN}]}, HI],
        [TOOL],
        {"messages.0.0": OWN},
    ),
    "own on a system part": (
        [{"role": "developer", "content": [{"type": "text", "text": "S", "cache_control": OWN}]}, HI],
        None,
        {"system.0": OWN},
    ),
    "own on a tool": ([SYSTEM, HI], [{**TOOL, "cache_control": OWN}, TOOL], {"tools.0": OWN}),
    "null is none": (
        [{"role": "user", "content": [{"type": "text", "text": "A", "cache_control": None}]}],
        [{**TOOL, "cache_control": None}],
        {"tools.0": AUTOMATIC, "messages.0.0": AUTOMATIC},
    ),
    "on a message it is none": ([{**HI, "cache_control": OWN}], None, {"messages.0.0": AUTOMATIC}),
}


@pytest.mark.parametrize(("messages", "tools", "places"), PLACES.values(), ids=PLACES)
async def test_where_breakpoints_stand(messages: list[Any], tools: Any, places: dict[str, Any]) -> None:
    """One behind what never changes and one behind the newest message, or the client's own alone."""
    assert places == marks((await marked(messages, tools)).body)


@pytest.mark.parametrize("value", ["off", "OFF", " Off "])
async def test_the_client_can_turn_them_off(value: str) -> None:
    """The header stops the automatic breakpoints in any letter case."""
    assert {} == marks((await marked([SYSTEM, HI], headers={"x-ezat-cache": value})).body)


async def test_another_value_of_the_header_changes_nothing() -> None:
    """Only off is off."""
    assert 2 == len(marks((await marked([SYSTEM, HI], headers={"x-ezat-cache": "on"})).body))


async def test_a_model_without_a_cache_gets_none() -> None:
    """No breakpoints are set for a model that has no prompt cache."""
    assert {} == marks((await marked([SYSTEM, HI], prompt_caching=False)).body)


async def test_thinking_carries_none() -> None:
    """A block that can't carry a breakpoint is passed over, towards older messages."""
    exchange = make_exchange({"model": "m", "messages": [HI]}, model=make_model())
    await ask(ChatCompletions(ChatCompletions.Settings()), exchange)
    thinking = {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": "s"}]}
    exchange.change()["messages"].append(thinking)
    await ask(CacheBreakpoints(CacheBreakpoints.Settings()), exchange)
    assert {"messages.0.0": AUTOMATIC} == marks(exchange.body)
