"""Plugins that write down what becomes of them, in a file named by their settings: gateways in processes of their own
have them in their lists. Others fail, or take their time, where they are told to."""

from __future__ import annotations

import asyncio
import itertools
import time
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import SecretStr

from proxy.exchange import Exchange
from proxy.plugin import OutputPlugin, Plugin, Services, Settings

NOTED = "tests.noted_plugins:Noted"
FIRST = "tests.noted_plugins:First"
SECOND = "tests.noted_plugins:Second"
FAILING = "tests.noted_plugins:Failing"
SERVED_BY = "x-noted"
"""The header that tells which instance saw a request."""
PASSED = "x-passed"
"""The header that tells which of First and Second saw a request, in this order."""
_numbers = itertools.count(1)


class NotedSettings(Settings):
    """Where to write, and how long to take."""

    file: Path
    """What lines are added to: `starting N`, `start N`, `see N`, `completing N`, `complete N`, `stop N`."""
    start_seconds: float = 0
    """How long a start takes."""
    complete_seconds: float = 0
    """How long an answer takes to be completed."""


class Noted(Plugin):
    """Writes down its instances' lives, each by its number."""

    name: ClassVar[str] = "noted"
    completes: ClassVar[bool] = True
    Settings = NotedSettings
    settings: NotedSettings
    number = 0

    def note(self, what: str) -> None:
        with self.settings.file.open("a") as file:
            file.write(f"{what} {self.number}\n")

    async def start(self, services: Services) -> None:
        self.number = next(_numbers)
        self.note("starting")
        await asyncio.sleep(self.settings.start_seconds)
        self.note("start")

    async def stop(self) -> None:
        self.note("stop")

    async def on_headers(self, exchange: Exchange) -> None:
        self.note("see")
        exchange.answer_headers[SERVED_BY] = str(self.number)

    async def on_request(self, exchange: Exchange) -> OutputPlugin:
        return _NotedOutput(self)


class _NotedOutput(OutputPlugin):
    def __init__(self, plugin: Noted) -> None:
        self._plugin = plugin

    async def on_complete(self) -> None:
        self._plugin.note("completing")
        await asyncio.sleep(self._plugin.settings.complete_seconds)
        self._plugin.note("complete")


class _Passed(Plugin):
    async def on_headers(self, exchange: Exchange) -> None:
        before = exchange.answer_headers.get(PASSED)
        exchange.answer_headers[PASSED] = self.name if before is None else f"{before} {self.name}"


class First(_Passed):
    """Says that a request has passed it."""

    name: ClassVar[str] = "first"


class Second(_Passed):
    """Says so, too."""

    name: ClassVar[str] = "second"


class FailingSettings(Settings):
    """Where to fail."""

    where: Literal["constructor", "start", "a long constructor"]
    """In which call; or a constructor that does not end in time."""
    file: Path | None = None
    """Where a long constructor says that it was called."""
    token: SecretStr = SecretStr("")
    """What must not be told."""


class Failing(Plugin):
    """Can't be had."""

    name: ClassVar[str] = "failing"
    Settings = FailingSettings
    settings: FailingSettings

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        if self.settings.where == "constructor":
            raise ValueError(f"no such thing; {self.settings.token}")
        if self.settings.where == "a long constructor":
            if self.settings.file is not None:
                self.settings.file.write_text("making\n")
            time.sleep(60)

    async def start(self, services: Services) -> None:
        if self.settings.where == "start":
            secret = self.settings.token.get_secret_value()
            raise ConnectionError(f"nobody there, {len(secret)} characters were sent")
