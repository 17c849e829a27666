"""``temperature`` and ``top_p``, for the models that take them, where no thinking is requested.

The translation has put both among the ignored fields; what is sent is taken off again. The values are checked even
where they are dropped: a wrong value is the client's mistake with any model.
"""

from __future__ import annotations

from typing import ClassVar

from plugins.chat_completions.values import number
from proxy.exchange import Exchange
from proxy.plugin import Plugin, Route, Sees

HIGHEST_ASKED = 2
HIGHEST_SENT = 1


class Sampling(Plugin):
    """Sends temperature and top_p on to the models that take them."""

    name: ClassVar[str] = "sampling"
    opens_leaves: ClassVar[bool] = False
    routes: ClassVar[frozenset[Route]] = frozenset({Route.CHAT_COMPLETIONS})
    sees: ClassVar[Sees] = "messages"

    async def on_request(self, exchange: Exchange) -> None:
        """Add what was asked for. Raises GatewayError for a value out of its range."""
        asked = exchange.client_body
        temperature = number(asked.get("temperature"), "temperature", HIGHEST_ASKED)
        top_p = number(asked.get("top_p"), "top_p", 1)
        capabilities = exchange.model.capabilities
        if not capabilities.sampling or _thinks(exchange):
            return
        if temperature is not None and temperature > HIGHEST_SENT:
            temperature = HIGHEST_SENT
            exchange.adjusted["temperature"] = str(HIGHEST_SENT)
            exchange.ignored.discard("temperature")
        values = {"temperature": temperature, "top_p": top_p if top_p is not None and top_p < 1 else None}
        if capabilities.sampling_exclusive and None not in values.values():
            del values["top_p"]
        values = {name: value for name, value in values.items() if value is not None}
        if values:
            exchange.change().update(values)
            exchange.ignored.difference_update(values)


def _thinks(exchange: Exchange) -> bool:
    thinking = exchange.body.get("thinking")
    return thinking is not None and thinking.get("type") != "disabled"
