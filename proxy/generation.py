"""Everything that is made from one configuration: plugins, deployments, endpoints.

A reload makes another one beside it. Each exchange ends under the generation that it began with, and a generation
ends with the last of its exchanges: only then its plugins stop.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import aiohttp
import structlog
from aiohttp import web

from proxy.background import Background
from proxy.built_in import BuiltIn
from proxy.errors import CannotStart
from proxy.limits import Limiter
from proxy.loading import Pipeline
from proxy.metrics import Metrics
from proxy.models import ModelTable
from proxy.pipeline import COMPLETE_TIMEOUT
from proxy.plugin import Plugin, Services
from proxy.public import Public
from proxy.running import Running
from proxy.settings import Config, UpstreamSettings
from proxy.store.store import Store
from proxy.upstream.client import Timeouts, Upstream, UpstreamClient
from proxy.upstream.deployments import Deployments
from proxy.yaml_source import Loc

_log = structlog.get_logger("ezat.server")
LINGER = 2.0
"""Seconds for what is still to be recorded when the last request has ended and the gateway stops."""
STOPPING = 10.0
"""Seconds for a plugin to stop."""


@dataclass(frozen=True, slots=True)
class Shared:
    """What outlives a generation."""

    limiter: Limiter
    store: Store
    running: Running
    metrics: Metrics
    built_in: BuiltIn


class Generation:
    """What serves by one configuration: ``start``, ``answer``, ``end``."""

    def __init__(self, config: Config, models: ModelTable, pipeline: Pipeline, shared: Shared) -> None:
        self.config = config
        self.models = models
        self.pipeline = pipeline
        self._shared = shared
        self._tasks = Background()
        self._client: UpstreamClient | None = None
        self._session: aiohttp.ClientSession | None = None
        self._started: list[Plugin] = []
        self._base_urls: set[str] = set()
        self._active = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.deployments: Deployments
        self._public: Public

    async def start(self, before: Generation | None = None) -> None:
        """Make ready to answer; ``before`` is what served until now. Whatever it raises, ``end`` is still to be called.

        Raises CannotStart.
        """
        settings, shared = self.config.server, self._shared
        self._client = UpstreamClient(
            Timeouts(settings.connect_timeout, settings.first_event_timeout, settings.idle_timeout)
        )
        self._base_urls = {upstream.base_url for upstream in self.config.upstreams.values()}
        urls = await shared.built_in.take(self._base_urls)
        upstreams = {
            name: self._upstream(name, each, urls.get(each.base_url, each.base_url))
            for name, each in self.config.upstreams.items()
        }
        self.deployments = Deployments(
            self.models,
            upstreams,
            self._client,
            settings.request_timeout,
            on_failure=shared.metrics.upstream_failed,
            before=before.deployments if before is not None else None,
        )
        self._session = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar())
        services = Services(self.models, shared.limiter, shared.store, self._session)
        entries = [entry for entry in self.config.plugins if entry.enabled]
        for entry, plugin in zip(entries, self.pipeline.plugins, strict=True):
            self._started.append(plugin)
            try:
                await plugin.start(services)
            except BaseException as error:
                if _is_asked_for(error):
                    raise
                _log.exception("plugin failed", plugin=plugin.name, hook="start")
                raise self._cannot_start(entry.loc, f"can't start: {type(error).__name__}: {error}") from error
        self._public = Public(
            settings,
            self.models,
            self.pipeline,
            self.deployments,
            self._tasks,
            services,
            shared.running,
            shared.metrics,
        )

    def _upstream(self, name: str, settings: UpstreamSettings, base_url: str) -> Upstream:
        """Raises CannotStart where its certificates can't be used."""
        try:
            return Upstream(name, settings, base_url)
        except OSError as error:  # an SSLError is one
            words = f"holds no certificates that can be used: {error.strerror}"
            raise self._cannot_start(("upstreams", name, "ca_file"), words) from error

    def _cannot_start(self, loc: Loc, words: str) -> CannotStart:
        return CannotStart(str(self.config.source.problem(loc, words)))

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request of the public listener."""
        self._active += 1
        self._idle.clear()
        try:
            return await self._public.answer(request)
        finally:
            self._active -= 1
            if not self._active:
                self._idle.set()

    async def end(self) -> None:
        """Wait for its last exchange, then close what it has opened."""
        await self._idle.wait()
        # A client may be gone whose answer is still being recorded. Only a stop is in a hurry.
        await self._tasks.drain(LINGER if self._shared.running.draining else COMPLETE_TIMEOUT + LINGER)
        for plugin in reversed(self._started):
            try:
                async with asyncio.timeout(STOPPING):
                    await plugin.stop()
            except BaseException as error:
                if _is_asked_for(error):
                    raise
                _log.exception("plugin failed", plugin=plugin.name, hook="stop")
        self._started.clear()
        self._shared.metrics.take_times(self.pipeline.timed)
        for opened in (self._session, self._client):
            if opened is not None:
                await opened.close()
        await self._shared.built_in.give_back(self._base_urls)
        self._base_urls = set()


def _is_asked_for(error: BaseException) -> bool:
    """Whether it is a cancellation of this task; whatever else a plugin raises, an exit too, is its own fault."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0
