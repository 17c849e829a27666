from proxy.errors import GatewayError, Kind
from proxy.exchange import Exchange
from proxy.plugin import Plugin, Route


class OneAtATime(Plugin):
    """Lets each key run one request at a time."""

    name = "one_at_a_time"
    routes = frozenset({Route.CHAT_COMPLETIONS, Route.MESSAGES})

    def __init__(self, settings: object) -> None:
        super().__init__(settings)
        self._busy: set[str] = set()  # keys, not requests

    async def on_headers(self, exchange: Exchange) -> None:
        key = exchange.key.id if exchange.key is not None else "nobody"
        if key in self._busy:
            raise GatewayError(Kind.RATE_LIMIT, "this key has a request running", retry_after=1)
        self._busy.add(key)
        exchange.defer(lambda: self._busy.discard(key))
