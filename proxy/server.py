"""The server: its start, its reload, its end, and what outlives a configuration: sockets, store, limits, metrics."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress

import structlog
from aiohttp import web
from aiohttp.http_parser import HttpRequestParser

from proxy.admin import Admin
from proxy.built_in import BuiltIn
from proxy.errors import CannotStart
from proxy.files import most_connections
from proxy.generation import LINGER, STOPPING, Generation, Shared
from proxy.http_server import HttpServer
from proxy.limits import open_limiter
from proxy.loading import Pipeline
from proxy.metrics import Metrics
from proxy.models import ModelTable
from proxy.plan import changes, refusal
from proxy.reading import MOST_BYTES
from proxy.running import Running
from proxy.settings import Admin as AdminSettings
from proxy.settings import Config, Server
from proxy.store.database import StoreInUse
from proxy.store.store import Store
from proxy.store.writer import StoreDown
from proxy.upstream.client import VERSION

_log = structlog.get_logger("ezat.server")
BACKLOG = 1024


class CannotReload(Exception):
    """The configuration can't be taken over while the gateway runs; the text says why."""


class Gateway:
    """One gateway: started with ``start``, stopped with ``stop``."""

    def __init__(
        self,
        config: Config,
        models: ModelTable,
        pipeline: Pipeline,
        *,
        shared_port: int | None = None,
        has_admin: bool = True,
    ) -> None:
        """``shared_port``: one that other processes listen on, too. ``has_admin``: whether it serves the operator."""
        self._made = (config, models, pipeline)
        self._shared_port = shared_port
        self._has_admin = has_admin
        self._shared: Shared | None = None
        self._current: Generation | None = None
        self._retiring: set[asyncio.Task[None]] = set()
        self._http = HttpServer(self._answer, most_bytes=MOST_BYTES, keepalive=config.server.keepalive_timeout)
        self._runner = web.ServerRunner(self._http, shutdown_timeout=LINGER)
        self._running = Running(config.server.most_body_bytes)
        self._stop_at_once = asyncio.Event()
        self.metrics = Metrics(VERSION)
        self.admin: Admin | None = None
        """The operator's listener, once started."""
        self.new_admin_token: str | None = None
        """The text of the admin token, where this start has made the first one."""
        self.port = config.server.port
        """The port that it listens on, once started."""

    @property
    def config(self) -> Config:
        """The configuration in force."""
        return self._made[0] if self._current is None else self._current.config

    @property
    def pipeline(self) -> Pipeline:
        """The plugins in force."""
        return self._made[2] if self._current is None else self._current.pipeline

    async def start(self) -> None:
        """Open everything and listen. Raises CannotStart, OSError where a port can't be had."""
        if HttpRequestParser.__module__ != "aiohttp._http_parser":
            _log.warning("aiohttp runs without its C parser: slower, and less strict")
        config, models, pipeline = self._made
        store = Store(config.store, self.metrics.recorded)
        self._shared = Shared(open_limiter(config.limiter), store, self._running, self.metrics, BuiltIn())
        try:
            await store.start()
        except (StoreInUse, StoreDown) as error:
            raise CannotStart(str(error)) from error
        self._current = Generation(config, models, pipeline, self._shared)
        await self._current.start()
        has_admin = self._has_admin and config.server.admin.enabled
        if has_admin:  # first, so that nothing is served where it can't be had
            await self._serve_the_operator(config.server.admin, store)
        await self._listen(config.server)
        if has_admin and config.server.admin.token is None:  # last: one of a start that failed would be shown to nobody
            self.new_admin_token = await self._first_admin_token(store)

    async def _listen(self, settings: Server) -> None:
        await self._runner.setup()
        shares = self._shared_port is not None
        port = settings.port if self._shared_port is None else self._shared_port
        backlog = min(BACKLOG, most_connections() // 4)  # as many are taken at once, before the oldest can make room
        site = web.TCPSite(self._runner, settings.host, port, backlog=max(1, backlog), reuse_port=shares or None)
        await _started(site, f"{settings.host}:{port}, server.port")
        self.port = self._runner.addresses[0][1] if self._runner.addresses else port

    async def _serve_the_operator(self, settings: AdminSettings, store: Store) -> None:
        self.admin = Admin(settings, store, self.look, self.metrics.text)
        await _started(self.admin, f"{settings.host}:{settings.port}, server.admin.port")

    async def _first_admin_token(self, store: Store) -> str | None:
        try:
            return await store.first_admin_token()
        except StoreDown as error:
            raise CannotStart(f"the store can't be written: {error}") from error

    async def reload(self, config: Config, models: ModelTable, pipeline: Pipeline) -> None:
        """Serve by another configuration from the next request on, or by the present one as if nothing had been.

        Raises CannotReload.
        """
        current, shared = self._current, self._shared
        if current is None or shared is None or self._running.draining:
            raise CannotReload("the gateway is not serving")
        if reason := refusal(changes(current.config, config)):
            raise CannotReload(reason)
        new = Generation(config, models, pipeline, shared)
        try:
            await new.start(current)
        except BaseException as error:
            self._retire(new)
            if not isinstance(error, Exception):
                raise
            raise CannotReload(f"it can't be started: {error}") from error
        self._current = new
        self._running.most_bytes = config.server.most_body_bytes
        self._http.keepalive = config.server.keepalive_timeout
        self._retire(current)

    async def stop(self) -> None:
        """Let running requests end, within the time for that, then close everything."""
        self._running.leaving = True
        if self._runner.sites and self.config.server.shutdown_delay:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.config.server.shutdown_delay):
                    await self._stop_at_once.wait()
        for site in tuple(self._runner.sites):
            await site.stop()
        await self._running.drain(self.config.server.shutdown_timeout, self._stop_at_once)
        if self._runner.server is not None:
            await self._runner.cleanup()
        if self._current is not None:
            self._retire(self._current)
        if self._retiring:
            _, late = await asyncio.wait(self._retiring, timeout=LINGER + STOPPING)
            if late:
                _log.error("plugins were still stopping at the end")
        if self.admin is not None:
            await self.admin.stop()
        shared = self._shared
        if shared is not None:
            await shared.store.stop(LINGER)
            await shared.limiter.close()

    def stop_at_once(self) -> None:
        """Wait no longer for running requests."""
        self._stop_at_once.set()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if self._current is None:
            raise RuntimeError("the gateway has not been started")
        response = await self._current.answer(request)
        if self._running.leaving and not response.prepared:
            response.force_close()  # who comes again shall come to another
        return response

    def _retire(self, generation: Generation) -> None:
        task = asyncio.get_running_loop().create_task(generation.end())
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    def look(self) -> None:
        """Take note of what is a state, for the metrics."""
        current, shared = self._current, self._shared
        if current is None or shared is None:
            return
        waiting, lag = shared.store.backlog
        self.metrics.take_times(current.pipeline.timed)
        self.metrics.look_at_deployments(current.deployments.health())
        self.metrics.look_at(
            {
                "ezat_running_requests": len(self._running),
                "ezat_body_bytes": self._running.bytes,
                "ezat_ledger_waiting": waiting,
                "ezat_ledger_lag_seconds": lag,
                "ezat_store_ready": shared.store.is_ready,
            }
        )


async def _started(site: web.TCPSite | Admin, place: str) -> None:
    """Raises CannotStart with the address and the setting."""
    try:
        await site.start()
    except UnicodeError as error:
        raise CannotStart(f"can't listen on {place}: it is no name of a host") from error
    except OSError as error:
        number = error.errno or 0  # asyncio's own words repeat the address; a name that nobody knows has none
        reason = os.strerror(number) if number > 0 else error.strerror or error
        raise CannotStart(f"can't listen on {place}: {reason}") from error
