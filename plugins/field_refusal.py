"""Refuses the fields whose wish can't be granted; left out of the list, they are ignored and named instead.

It has no rules of its own: the table in ``chat_completions.fields`` has them, in the order in which they are judged.
"""

from __future__ import annotations

from typing import ClassVar

from plugins.chat_completions.fields import refusals
from proxy.exchange import Exchange
from proxy.plugin import Plugin, Route, Sees


class FieldRefusal(Plugin):
    """Refuses Chat Completions requests that ask for what no answer can give."""

    name: ClassVar[str] = "field_refusal"
    opens_leaves: ClassVar[bool] = False
    routes: ClassVar[frozenset[Route]] = frozenset({Route.CHAT_COMPLETIONS})
    sees: ClassVar[Sees] = "openai"

    async def on_request(self, exchange: Exchange) -> None:
        """Raise the GatewayError of the first such field."""
        error = refusals(exchange.body)
        if error is not None:
            raise error
