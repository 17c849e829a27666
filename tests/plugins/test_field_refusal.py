"""The plugin that refuses what can't be granted."""

from __future__ import annotations

import pytest

from plugins.field_refusal import FieldRefusal
from proxy.errors import GatewayError
from proxy.testing import ask, make_exchange

MESSAGES = [{"role": "user", "content": "Hi"}]


async def test_the_first_refusal_of_the_table_ends_the_request() -> None:
    """Of two such fields the one that stands first in the table is told."""
    exchange = make_exchange({"logprobs": True, "n": 2, "messages": MESSAGES})
    with pytest.raises(GatewayError) as caught:
        await ask(FieldRefusal(FieldRefusal.Settings()), exchange)
    assert ("n: only 1 choice per request is supported", "n") == (caught.value.message, caught.value.param)


async def test_other_requests_pass_unchanged() -> None:
    """A request without such a field goes on as the bytes that came."""
    exchange = make_exchange({"n": 1, "messages": MESSAGES})
    await ask(FieldRefusal(FieldRefusal.Settings()), exchange)
    assert exchange.document.unchanged is not None
