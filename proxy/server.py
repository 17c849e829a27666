"""The server: what it lends to requests, its endpoints, its sockets, its start and its end."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import aiohttp
import structlog
from aiohttp import web
from aiohttp.http_parser import HttpRequestParser

from proxy.background import Background
from proxy.demo import DemoUpstream
from proxy.errors import CannotStart
from proxy.http_server import HttpServer
from proxy.limits import Limiter, open_limiter
from proxy.loading import Pipeline
from proxy.local_llm import LocalLlm
from proxy.models import ModelTable
from proxy.plugin import Plugin, Services
from proxy.public import Public
from proxy.reading import MOST_BYTES
from proxy.running import Running
from proxy.setting_types import DEMO, LOCAL_LLM
from proxy.settings import Config
from proxy.store.database import StoreInUse
from proxy.store.store import Store
from proxy.store.writer import StoreDown
from proxy.upstream.client import Timeouts, Upstream, UpstreamClient
from proxy.upstream.deployments import Deployments

_log = structlog.get_logger("ezat.server")
LINGER = 2.0
"""Seconds for what is still to be recorded when the last request has ended."""
_CLASS_OF_WORD: Mapping[str, type[DemoUpstream | LocalLlm]] = {DEMO: DemoUpstream, LOCAL_LLM: LocalLlm}
"""The upstreams that run with the gateway, under the words that stand for their base URLs."""


class Gateway:
    """One gateway: started with ``start``, stopped with ``stop``."""

    def __init__(self, config: Config, models: ModelTable, pipeline: Pipeline) -> None:
        self._config = config
        self._models = models
        self._pipeline = pipeline
        self._tasks = Background()
        self._store: Store | None = None
        self._limiter: Limiter | None = None
        self._built_in: dict[str, DemoUpstream | LocalLlm] = {}
        self._client: UpstreamClient | None = None
        self._plugin_session: aiohttp.ClientSession | None = None
        self._started: list[Plugin] = []
        self._runner: web.ServerRunner | None = None
        self._running = Running(config.server.most_body_bytes)
        self._stop_at_once = asyncio.Event()
        self.port = config.server.port
        """The port that it listens on, once started."""

    async def start(self) -> None:
        """Open everything and listen. Raises CannotStart, OSError where the port can't be had."""
        if not issubclass(HttpRequestParser, object) or HttpRequestParser.__module__ != "aiohttp._http_parser":
            _log.warning("aiohttp runs without its C parser: slower, and less strict")
        settings = self._config.server
        self._client = UpstreamClient(
            Timeouts(settings.connect_timeout, settings.first_event_timeout, settings.idle_timeout)
        )
        deployments = Deployments(await self._upstreams(), self._client, settings.request_timeout)
        self._plugin_session = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar())
        self._limiter = open_limiter(self._config.limiter)
        self._store = await self._open_store()
        services = Services(self._models, self._limiter, self._store, self._plugin_session)
        for plugin in self._pipeline.plugins:
            self._started.append(plugin)
            try:
                await plugin.start(services)
            except Exception:
                _log.exception("plugin failed", plugin=plugin.name, hook="start")
                raise
        public = Public(settings, self._models, self._pipeline, deployments, self._tasks, services, self._running)
        await self._listen(public)

    async def stop(self) -> None:
        """Let running requests end, within the time for that, then close everything."""
        if self._runner is not None:
            for site in tuple(self._runner.sites):
                await site.stop()
        await self._running.drain(self._config.server.shutdown_timeout, self._stop_at_once)
        if self._runner is not None:
            await self._runner.cleanup()
        await self._tasks.drain(LINGER)
        for plugin in reversed(self._started):
            try:
                await plugin.stop()
            except Exception:
                _log.exception("plugin failed", plugin=plugin.name, hook="stop")
        if self._store is not None:
            await self._store.stop(LINGER)
        for opened in (self._limiter, self._plugin_session, self._client):
            if opened is not None:
                await opened.close()
        for built_in in self._built_in.values():
            await built_in.stop()

    def stop_at_once(self) -> None:
        """Wait no longer for running requests."""
        self._stop_at_once.set()

    async def _open_store(self) -> Store:
        store = Store(self._config.store)
        try:
            await store.start()
        except (StoreInUse, StoreDown) as error:
            await store.stop(0)
            raise CannotStart(str(error)) from error
        return store

    async def _upstreams(self) -> Mapping[str, Upstream]:
        upstreams = {}
        urls: dict[str, str] = {}
        for name, settings in self._config.upstreams.items():
            word = settings.base_url
            if word in _CLASS_OF_WORD and word not in urls:
                self._built_in[word] = _CLASS_OF_WORD[word]()
                urls[word] = await self._built_in[word].start()
            upstreams[name] = Upstream(name, settings, urls.get(word, word))
        return upstreams

    async def _listen(self, public: Public) -> None:
        settings = self._config.server
        server = HttpServer(public.answer, most_bytes=MOST_BYTES, keepalive=settings.keepalive_timeout)
        self._runner = web.ServerRunner(server, shutdown_timeout=LINGER)
        await self._runner.setup()
        site = web.TCPSite(self._runner, settings.host, settings.port, backlog=1024)
        await site.start()
        addresses = self._runner.addresses
        self.port = addresses[0][1] if addresses else settings.port
