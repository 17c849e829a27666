from pydantic import Field

from proxy.exchange import Exchange
from proxy.plugin import Plugin, Route, Settings


class AnswerCapSettings(Settings):
    """How long an answer may be."""

    most: int = Field(1000, ge=1)
    """Tokens of one answer."""


class AnswerCap(Plugin):
    """Keeps answers short."""

    name = "answer_cap"
    routes = frozenset({Route.CHAT_COMPLETIONS, Route.MESSAGES})
    sees = "messages"
    Settings = AnswerCapSettings
    settings: AnswerCapSettings

    async def on_request(self, exchange: Exchange) -> None:
        most = self.settings.most
        if exchange.body["max_tokens"] <= most:
            return
        exchange.change()["max_tokens"] = most
        for field in ("max_tokens", "max_completion_tokens"):
            if exchange.client_body.get(field) is not None:
                exchange.adjusted[field] = str(most)
