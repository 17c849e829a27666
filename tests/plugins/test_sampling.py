"""The plugin that sends temperature and top_p."""

from __future__ import annotations

from typing import Any

import pytest

from plugins.chat_completions import ChatCompletions
from plugins.reasoning import Reasoning
from plugins.sampling import Sampling
from proxy.errors import GatewayError
from proxy.exchange import Exchange
from proxy.jsontext import Float, encode
from proxy.testing import ask, make_exchange
from tests.plugins.models import make_model


async def sampled(fields: dict[str, Any], **capabilities: Any) -> Exchange:
    """The request behind the translation, the reasoning and the plugin."""
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields}
    exchange = make_exchange(body, model=make_model(**capabilities))
    for plugin in (ChatCompletions, Reasoning, Sampling):
        await ask(plugin(plugin.Settings()), exchange)
    return exchange


SAMPLING: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], set[str], dict[str, str]]] = {
    "nothing asked": ({}, {}, {}, set(), {}),
    "both": ({}, {"temperature": 0.2, "top_p": 0.9}, {"temperature": 0.2, "top_p": 0.9}, set(), {}),
    "zeros": ({}, {"temperature": 0, "top_p": 0}, {"temperature": 0, "top_p": 0}, set(), {}),
    "null": ({}, {"temperature": None, "top_p": None}, {}, set(), {}),
    "a temperature above 1": ({}, {"temperature": 1.7}, {"temperature": 1}, set(), {"temperature": "1"}),
    "a top_p of 1": ({}, {"top_p": 1}, {}, set(), {}),
    "a model without sampling": (
        {"sampling": False},
        {"temperature": 1.7, "top_p": 0.5},
        {},
        {"temperature", "top_p"},
        {},
    ),
    "with thinking": (
        {},
        {"temperature": 0.2, "top_p": 0.5, "reasoning_effort": "low"},
        {},
        {"temperature", "top_p"},
        {},
    ),
    "an effort without thinking": (
        {},
        {"temperature": 0.2, "reasoning_effort": "none"},
        {"temperature": 0.2},
        set(),
        {},
    ),
    "one of the two": (
        {"sampling_exclusive": True},
        {"temperature": 0.2, "top_p": 0.5},
        {"temperature": 0.2},
        {"top_p"},
        {},
    ),
    "one of the two, temperature at its default": (
        {"sampling_exclusive": True},
        {"temperature": 1, "top_p": 0.5},
        {"temperature": 1},
        {"top_p"},
        {},
    ),
    "one of the two, temperature capped to its default": (
        {"sampling_exclusive": True},
        {"temperature": 1.5, "top_p": 0.5},
        {"temperature": 1},
        {"top_p"},
        {"temperature": "1"},
    ),
    "one of the two, top_p at its default": (
        {"sampling_exclusive": True},
        {"temperature": 1, "top_p": 1},
        {"temperature": 1},
        set(),
        {},
    ),
    "top_p alone": ({"sampling_exclusive": True}, {"top_p": 0.5}, {"top_p": 0.5}, set(), {}),
}


@pytest.mark.parametrize(("capabilities", "fields", "sent", "ignored", "adjusted"), SAMPLING.values(), ids=SAMPLING)
async def test_sampling(
    capabilities: dict[str, Any],
    fields: dict[str, Any],
    sent: dict[str, Any],
    ignored: set[str],
    adjusted: dict[str, str],
) -> None:
    """Sent is what the model takes; what is dropped or changed is named."""
    exchange = await sampled(fields, **capabilities)
    body = exchange.body
    assert sent == {name: body[name] for name in ("temperature", "top_p") if name in body}
    assert (ignored, adjusted) == (exchange.ignored, exchange.adjusted)


async def test_the_digits_are_kept() -> None:
    """A number goes on as it was written."""
    exchange = await sampled({"temperature": Float("0.20"), "top_p": 0})
    assert b'{"temperature":0.20,"top_p":0}' == encode({name: exchange.body[name] for name in ("temperature", "top_p")})


REFUSED: dict[str, tuple[str, Any, str]] = {
    "temperature too high": ("temperature", 2.1, "must be between 0 and 2"),
    "temperature too low": ("temperature", -0.1, "must be between 0 and 2"),
    "temperature true": ("temperature", True, "must be a number"),
    "temperature of another type": ("temperature", "hot", "must be a number"),
    "temperature beyond all numbers": ("temperature", 10**400, "must be between 0 and 2"),
    "top_p too high": ("top_p", 1.01, "must be between 0 and 1"),
    "top_p of another type": ("top_p", {}, "must be a number"),
}


@pytest.mark.parametrize("sampling", [True, False], ids=["sampling", "no sampling"])
@pytest.mark.parametrize(("field", "value", "text"), REFUSED.values(), ids=REFUSED)
async def test_a_wrong_value_is_refused(field: str, value: Any, text: str, sampling: bool) -> None:
    """A value that no model takes is refused, though this one would take none at all."""
    with pytest.raises(GatewayError) as caught:
        await sampled({field: value}, sampling=sampling)
    assert (f"{field}: {text}", field) == (caught.value.message, caught.value.param)
