"""The server: its start, its reload, its end, and what outlives a configuration: sockets, store, limits, metrics."""

from __future__ import annotations

import asyncio

import structlog
from aiohttp import web
from aiohttp.http_parser import HttpRequestParser

from proxy.admin import Admin
from proxy.built_in import BuiltIn
from proxy.errors import CannotStart
from proxy.generation import LINGER, Generation, Shared
from proxy.http_server import HttpServer
from proxy.limits import open_limiter
from proxy.loading import Pipeline
from proxy.metrics import Metrics
from proxy.models import ModelTable
from proxy.plan import changes
from proxy.reading import MOST_BYTES
from proxy.running import Running
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

    @property
    def new_admin_token(self) -> str | None:
        """The admin token, where this start has made the first one."""
        return self._shared.store.new_admin_token if self._shared is not None else None

    async def start(self) -> None:
        """Open everything and listen. Raises CannotStart, OSError where a port can't be had."""
        if not issubclass(HttpRequestParser, object) or HttpRequestParser.__module__ != "aiohttp._http_parser":
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
        await self._listen(config.server)

    async def _listen(self, settings: Server) -> None:
        await self._runner.setup()
        shares = self._shared_port is not None
        port = settings.port if self._shared_port is None else self._shared_port
        site = web.TCPSite(self._runner, settings.host, port, backlog=BACKLOG, reuse_port=shares or None)
        await _started(site, f"{settings.host}:{port}, server.port")
        self.port = self._runner.addresses[0][1] if self._runner.addresses else port
        if self._has_admin and self._shared is not None:
            self.admin = Admin(settings.admin, self._shared.store, self._metrics_text)
            await _started(self.admin, f"{settings.admin.host}:{settings.admin.port}, server.admin.port")

    async def reload(self, config: Config, models: ModelTable, pipeline: Pipeline) -> None:
        """Serve by another configuration from the next request on, or by the present one as if nothing had been.

        Raises CannotReload.
        """
        current, shared = self._current, self._shared
        if current is None or shared is None or self._running.draining:
            raise CannotReload("the gateway is not serving")
        fixed = [str(change) for change in changes(current.config, config) if change.needs_restart]
        if fixed:
            raise CannotReload("; ".join(fixed))
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
        for site in tuple(self._runner.sites):
            await site.stop()
        await self._running.drain(self.config.server.shutdown_timeout, self._stop_at_once)
        if self._runner.server is not None:
            await self._runner.cleanup()
        if self._current is not None:
            self._retire(self._current)
        if self._retiring:
            await asyncio.wait(self._retiring, timeout=2 * LINGER)
        if self.admin is not None:
            await self.admin.stop()
        shared = self._shared
        if shared is not None:
            await shared.store.stop(LINGER)
            await shared.limiter.close()
            await shared.built_in.keep(set())

    def stop_at_once(self) -> None:
        """Wait no longer for running requests."""
        self._stop_at_once.set()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if self._current is None:
            raise RuntimeError("the gateway has not been started")
        return await self._current.answer(request)

    def _retire(self, generation: Generation) -> None:
        task = asyncio.get_running_loop().create_task(self._ended(generation))
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    async def _ended(self, generation: Generation) -> None:
        await generation.end()
        if self._shared is not None and self._current is not None:
            await self._shared.built_in.keep(self._current.built_in)

    def _metrics_text(self) -> bytes:
        self.look()
        return self.metrics.text()

    def look(self) -> None:
        """Take note of what is a state, for the metrics."""
        current, shared = self._current, self._shared
        if current is None or shared is None:
            return
        waiting, lag = shared.store.backlog
        self.metrics.take_times(current.pipeline.times)
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
    except OSError as error:
        raise CannotStart(f"can't listen on {place}: {error.strerror or error}") from error
