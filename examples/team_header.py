from proxy.exchange import Exchange
from proxy.plugin import Plugin


class TeamHeader(Plugin):
    """Tells the client for whom it asked."""

    name = "team_header"

    async def on_headers(self, exchange: Exchange) -> None:
        if exchange.key is not None and exchange.key.organization is not None:
            exchange.answer_headers["x-team"] = exchange.key.organization
