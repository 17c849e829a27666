"""The plugin that sends an effort and asks for thinking."""

from __future__ import annotations

from typing import Any

import pytest

from plugins.chat_completions import ChatCompletions
from plugins.reasoning import Reasoning
from proxy.errors import GatewayError
from proxy.exchange import Exchange
from proxy.testing import ask, make_exchange
from tests.plugins.models import make_model

TOOLS = [{"type": "function", "function": {"name": "now"}}]
FORMAT = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
ADAPTIVE = {"type": "adaptive"}


async def reasoned(fields: dict[str, Any], **capabilities: Any) -> Exchange:
    """The request behind the translation and the plugin."""
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields}
    exchange = make_exchange(body, model=make_model(**capabilities))
    await ask(ChatCompletions(ChatCompletions.Settings()), exchange)
    await ask(Reasoning(Reasoning.Settings()), exchange)
    return exchange


EFFORTS: dict[str, tuple[dict[str, Any], dict[str, Any] | None, dict[str, Any] | None]] = {
    "absent": ({}, None, None),
    "null": ({"reasoning_effort": None}, None, None),
    "none": ({"reasoning_effort": "none"}, {"effort": "low"}, None),
    "minimal": ({"reasoning_effort": "minimal"}, {"effort": "low"}, None),
    "low": ({"reasoning_effort": "low"}, {"effort": "low"}, ADAPTIVE),
    "medium": ({"reasoning_effort": "medium"}, {"effort": "medium"}, ADAPTIVE),
    "high": ({"reasoning_effort": "high"}, {"effort": "high"}, ADAPTIVE),
    "xhigh": ({"reasoning_effort": "xhigh"}, {"effort": "xhigh"}, ADAPTIVE),
    "max": ({"reasoning_effort": "max"}, {"effort": "max"}, ADAPTIVE),
    "beside a schema": (
        {"reasoning_effort": "max", "response_format": FORMAT},
        {"format": {"type": "json_schema", "schema": {"type": "object"}}, "effort": "max"},
        ADAPTIVE,
    ),
    "with tools": ({"reasoning_effort": "high", "tools": TOOLS, "tool_choice": "auto"}, {"effort": "high"}, ADAPTIVE),
    "a call is forced": (
        {"reasoning_effort": "high", "tools": TOOLS, "tool_choice": "required"},
        {"effort": "high"},
        None,
    ),
    "a named call is forced": (
        {"reasoning_effort": "high", "tools": TOOLS, "tool_choice": TOOLS[0]},
        {"effort": "high"},
        None,
    ),
    "a dropped choice forces nothing": (
        {"reasoning_effort": "high", "tool_choice": "required"},
        {"effort": "high"},
        ADAPTIVE,
    ),
}


@pytest.mark.parametrize(("fields", "config", "thinking"), EFFORTS.values(), ids=EFFORTS)
async def test_an_effort(fields: dict[str, Any], config: Any, thinking: Any) -> None:
    """Each effort has its level, and from low on thinking is requested unless a call is forced."""
    exchange = await reasoned(fields)
    assert (config, thinking) == (exchange.body.get("output_config"), exchange.body.get("thinking"))
    assert "reasoning_effort" not in exchange.ignored


async def test_an_effort_that_the_model_lacks_is_refused() -> None:
    """The message names the efforts that there are; none and minimal need the lowest one."""
    with pytest.raises(GatewayError, match=r"^reasoning_effort: this model knows only the efforts low, medium$"):
        await reasoned({"reasoning_effort": "max"}, effort=("low", "medium"))
    with pytest.raises(GatewayError, match=r"^reasoning_effort: this model knows no effort$"):
        await reasoned({"reasoning_effort": "none"}, effort=())


async def test_an_unknown_effort_that_was_let_through_stays_named() -> None:
    """Without field_refusal it has no effect, and the client is told so."""
    exchange = await reasoned({"reasoning_effort": "ultra"})
    assert "output_config" not in exchange.body
    assert {"reasoning_effort"} == exchange.ignored
