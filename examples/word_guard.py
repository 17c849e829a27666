from proxy.errors import refused
from proxy.exchange import Exchange
from proxy.plugin import Plugin


class WordGuard(Plugin):
    """Refuses requests that mention project X."""

    name = "word_guard"
    sees = "either"

    async def on_request(self, exchange: Exchange) -> None:
        if "project x" in str(exchange.body).lower():
            raise refused("messages", "must not mention project X")
