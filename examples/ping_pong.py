from proxy.answer import Answer
from proxy.exchange import Exchange
from proxy.plugin import Plugin, Route

PING = {"role": "user", "content": "ping"}


class PingPong(Plugin):
    """Answers "ping" without asking a provider."""

    name = "ping_pong"
    routes = frozenset({Route.CHAT_COMPLETIONS, Route.MESSAGES})
    sees = "either"

    async def on_request(self, exchange: Exchange) -> Answer | None:
        return Answer.text("pong") if exchange.body.get("messages") == [PING] else None
