"""A plugin that breaks where a request's session tells it to, holding a secret in a local variable."""

from __future__ import annotations

from collections.abc import Sequence

from proxy.answer import Answer
from proxy.document import Event
from proxy.exchange import Exchange
from proxy.plugin import Outcome, OutputPlugin, Plugin

LOCAL = "canary-Local/4715+of?a=variable"


class Broken(Plugin):
    """Raises in the hook that ``x-ezat-session`` names."""

    name = "broken"
    completes = True

    async def on_headers(self, exchange: Exchange) -> None:
        fail_in("on_headers", exchange)

    async def on_request(self, exchange: Exchange) -> OutputPlugin:
        fail_in("on_request", exchange)
        return _Output(exchange)

    async def on_send(self, exchange: Exchange) -> None:
        fail_in("on_send", exchange)


class _Output(OutputPlugin):
    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    async def on_answer(self, answer: Answer) -> None:
        fail_in("on_answer", self._exchange)

    def on_event(self, event: Event) -> Sequence[Event]:
        if event.kind == "content_block_delta":
            fail_in("on_event", self._exchange)
        return (event,)

    async def on_complete(self) -> None:
        fail_in("on_complete", self._exchange)

    def on_close(self, outcome: Outcome) -> None:
        fail_in("on_close", self._exchange)


def fail_in(hook: str, exchange: Exchange) -> None:
    local = [LOCAL, str(exchange.client_document.unchanged)]
    if exchange.session == hook:
        del local[2]
