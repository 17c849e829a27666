"""Plugins for gateways in processes of their own: which process answers, by which configuration, and a slow one."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from typing import ClassVar

from proxy.answer import Answer
from proxy.document import Event
from proxy.exchange import Exchange
from proxy.plugin import OutputPlugin, Plugin, Services, Settings

WHO = "tests.worker_plugins:TellsWorker"
SLOW = "tests.worker_plugins:Slow"
SLOW_SECONDS = {"on_headers": 0.05, "on_request": 0.1, "on_send": 0.15, "on_answer": 0.2, "on_event": 0.25}


class TellsWorkerSettings(Settings):
    edition: str = "1"
    """What is told, to know one configuration from another."""
    start_seconds: float = 0
    """How long its start takes."""
    fails: bool = False
    """Whether its start fails."""


class TellsWorker(Plugin):
    """Names the process and the edition of the configuration on every answer."""

    name: ClassVar[str] = "tells_worker"
    Settings = TellsWorkerSettings
    settings: TellsWorkerSettings

    async def start(self, services: Services) -> None:
        await asyncio.sleep(self.settings.start_seconds)
        if self.settings.fails:
            raise RuntimeError("this plugin can't start")

    async def on_headers(self, exchange: Exchange) -> None:
        exchange.answer_headers["x-worker"] = str(os.getpid())
        exchange.answer_headers["x-edition"] = self.settings.edition


class Slow(Plugin):
    """Takes its time in every hook, for requests with the header ``x-slow``."""

    name: ClassVar[str] = "slow"

    async def on_headers(self, exchange: Exchange) -> None:
        await asyncio.sleep(seconds_of("on_headers", exchange))

    async def on_request(self, exchange: Exchange) -> OutputPlugin:
        await asyncio.sleep(seconds_of("on_request", exchange))
        return SlowOutput(exchange)

    async def on_send(self, exchange: Exchange) -> None:
        await asyncio.sleep(seconds_of("on_send", exchange))


class SlowOutput(OutputPlugin):
    """The same on the way back."""

    events: ClassVar[frozenset[str]] = frozenset({"message_start"})

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    async def on_answer(self, answer: Answer) -> None:
        await asyncio.sleep(seconds_of("on_answer", self._exchange))

    def on_event(self, event: Event) -> Sequence[Event]:
        time.sleep(seconds_of("on_event", self._exchange))
        return (event,)


def seconds_of(hook: str, exchange: Exchange) -> float:
    return SLOW_SECONDS[hook] if "x-slow" in exchange.headers else 0
