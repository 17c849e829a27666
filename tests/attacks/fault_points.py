"""Plugins through which a test breaks a gateway that runs in a process of its own, at a point that it names.

They are no part of what is tested: each makes happen what a disk, a clock, a bug or an operator's kill would, and
the gateway around it is the real one. What is for one task alone happens once, at ``GET /v1/models`` with the name in
``x-ezat-session``: that request itself needs none of the tasks.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import aiohttp
from sqlalchemy import Connection, event

from proxy.exchange import Exchange
from proxy.plugin import Outcome, OutputPlugin, Plugin, Route, Services, Settings
from proxy.reloading import Reloader
from proxy.store import store as store_module
from proxy.store.store import Store
from proxy.streaming import AnswerStream

CONSTANTS = "tests.attacks.fault_points:Constants"
KILLED = "tests.attacks.fault_points:Killed"
BROKEN_TASK = "tests.attacks.fault_points:BrokenTask"
SLOW_COMMITS = "tests.attacks.fault_points:SlowCommits"
HANGING = "tests.attacks.fault_points:Hanging"
HASTY_CLIENT = "tests.attacks.fault_points:HastyClient"
INTERNET = "tests.attacks.fault_points:Internet"


class ConstantsSettings(Settings):
    """What to set."""

    values: Mapping[str, float]
    """By `module:NAME`."""


class Constants(Plugin):
    """Sets times and bounds of the engine to what a test can wait for, before anything is started."""

    name: ClassVar[str] = "constants"
    Settings = ConstantsSettings
    settings: ConstantsSettings

    def __init__(self, settings: ConstantsSettings) -> None:
        super().__init__(settings)
        for path, value in settings.values.items():
            module, _, name = path.partition(":")
            known = importlib.import_module(module)
            assert isinstance(getattr(known, name), float | int), path
            setattr(known, name, value)


class HastyClientSettings(Settings):
    """How hasty it is."""

    seconds: float


class HastyClient(Plugin):
    """Gives sessions of aiohttp a time for a whole answer that a test can outlast, where nobody gives them another."""

    name: ClassVar[str] = "hasty_client"
    Settings = HastyClientSettings

    def __init__(self, settings: HastyClientSettings) -> None:
        super().__init__(settings)
        setattr(aiohttp.client, "DEFAULT_TIMEOUT", aiohttp.ClientTimeout(total=settings.seconds))  # noqa: B010


class KilledSettings(Settings):
    """Where the process is killed."""

    at: Literal["before it is recorded", "before the commit", "behind the commit"]


class Killed(Plugin):
    """Kills the process at the end of the first answer."""

    name: ClassVar[str] = "killed"
    completes: ClassVar[bool] = True
    Settings = KilledSettings
    settings: KilledSettings

    async def start(self, services: Services) -> None:
        if self.settings.at != "before the commit":
            return
        engine = services.store._engine

        def executed(connection: Connection, cursor: Any, statement: str, *_: Any) -> None:
            if statement.startswith("INSERT INTO usage"):
                connection.info["records"] = True

        def committing(connection: Connection) -> None:
            if connection.info.get("records"):
                _kill()

        event.listen(engine, "after_cursor_execute", executed)
        event.listen(engine, "commit", committing)

    async def on_request(self, exchange: Exchange) -> OutputPlugin:
        return _KilledOutput(self.settings.at)


class _KilledOutput(OutputPlugin):
    def __init__(self, at: str) -> None:
        self._at = at

    async def on_complete(self) -> None:
        if self._at == "before it is recorded":
            _kill()

    def on_close(self, outcome: Outcome) -> None:
        if self._at == "behind the commit" and outcome is Outcome.COMPLETED:
            _kill()


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Bug(Exception):
    """What nobody has thought of."""


class BrokenTask(Plugin):
    """Lets one of the gateway's own tasks meet an exception that nobody has thought of, once."""

    name: ClassVar[str] = "broken_task"
    _store: Store

    async def start(self, services: Services) -> None:
        self._store = services.store

    async def on_headers(self, exchange: Exchange) -> None:
        place = self._places().get(exchange.session or "") if exchange.route is Route.MODELS else None
        if place is not None:
            _raise_once(*place)

    def _places(self) -> Mapping[str, tuple[Any, str]]:
        """What each task calls at its next turn."""
        return {
            "the writer": (self._store._writer, "_settle"),
            "the look at the keys": (self._store, "_refresh"),
            "the heartbeat": (store_module, "alive"),
            "the watcher": (Reloader, "_is_news"),
            "the ping": (AnswerStream, "_send_ping"),
        }


def _raise_once(owner: Any, name: str) -> None:
    usual = getattr(owner, name)

    def broken(*_: Any, **__: Any) -> None:
        setattr(owner, name, usual)
        raise Bug

    async def broken_later(*_: Any, **__: Any) -> None:
        broken()

    setattr(owner, name, broken_later if asyncio.iscoroutinefunction(usual) else broken)


class SlowCommitsSettings(Settings):
    """How slow the disk is."""

    seconds: float


class SlowCommits(Plugin):
    """A disk that takes its time for each commit."""

    name: ClassVar[str] = "slow_commits"
    Settings = SlowCommitsSettings
    settings: SlowCommitsSettings

    async def start(self, services: Services) -> None:
        event.listen(services.store._engine, "commit", lambda _: time.sleep(self.settings.seconds))


class HangingSettings(Settings):
    """Where to write which request has come where."""

    file: Path


class Hanging(Plugin):
    """Never returns from the hook that a request's session names."""

    name: ClassVar[str] = "hanging"
    Settings = HangingSettings
    settings: HangingSettings

    async def on_headers(self, exchange: Exchange) -> None:
        await self._hang("on_headers", exchange)

    async def on_request(self, exchange: Exchange) -> OutputPlugin:
        await self._hang("on_request", exchange)
        return _HangingOutput(lambda: self._hang("on_answer", exchange))

    async def on_send(self, exchange: Exchange) -> None:
        await self._hang("on_send", exchange)

    async def _hang(self, hook: str, exchange: Exchange) -> None:
        if exchange.session == hook:
            with self.settings.file.open("a") as file:
                file.write(f"{exchange.request_id}\n")
            await asyncio.Event().wait()


class _HangingOutput(OutputPlugin):
    def __init__(self, hang: Callable[[], Any]) -> None:
        self._hang = hang

    async def on_answer(self, answer: Any) -> None:
        await self._hang()


class InternetSettings(Settings):
    """Which public addresses are where."""

    at: Mapping[str, int]
    """By `address:port`, a port of this machine."""


class Internet(Plugin):
    """Leads connections to public addresses to this machine; the guard against private ones judges them as ever."""

    name: ClassVar[str] = "internet"
    Settings = InternetSettings
    settings: InternetSettings

    async def start(self, services: Services) -> None:
        loop: Any = asyncio.get_running_loop()
        connect = loop.sock_connect

        async def connected(sock: Any, address: Any) -> None:
            at = self.settings.at.get(f"{address[0]}:{address[1]}")
            await connect(sock, address if at is None else ("127.0.0.1", at))

        loop.sock_connect = connected
