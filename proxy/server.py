"""The server: what it lends to requests, its endpoints, its sockets, its start and its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import aiohttp
import orjson
import structlog
from aiohttp import web
from aiohttp.http_parser import HttpRequestParser

from proxy.background import Background
from proxy.catalogue import catalogue, messages_model, messages_page, openai_list, openai_model
from proxy.config import Config
from proxy.demo import DemoUpstream
from proxy.dialects import Dialect
from proxy.endpoints import Endpoint, below, find, is_openai
from proxy.errors import GatewayError, Kind, internal, refused
from proxy.exchange import Exchange, model_not_found
from proxy.handler import DIALECTS, Handler, Times
from proxy.headers import answer_headers, error_headers
from proxy.limits import MemoryLimiter
from proxy.loading import Pipeline
from proxy.models import Model, ModelTable
from proxy.pipeline import Passage
from proxy.plugin import Outcome, Plugin, Route, Services
from proxy.reading import MOST_BYTES
from proxy.store.memory import MemoryLedger
from proxy.upstream.client import Timeouts, Upstream, UpstreamClient
from proxy.upstream.deployments import Deployments

_log = structlog.get_logger("ezat.server")
LINGER = 2.0
"""Seconds for what is still to be recorded when the last request has ended."""


class Gateway:
    """One gateway: started with ``start``, stopped with ``stop``."""

    def __init__(self, config: Config, models: ModelTable, pipeline: Pipeline) -> None:
        self._config = config
        self._models = models
        self._pipeline = pipeline
        self._tasks = Background()
        self._ledger = MemoryLedger()
        self._demo: DemoUpstream | None = None
        self._client: UpstreamClient | None = None
        self._plugin_session: aiohttp.ClientSession | None = None
        self._started: list[Plugin] = []
        self._runner: web.AppRunner | None = None
        self._endpoints: dict[str, dict[str, Endpoint]] = {}
        self._draining = False
        self.port = config.server.port
        """The port that it listens on, once started."""

    async def start(self) -> None:
        """Open everything and listen. Raises OSError where the port can't be had."""
        if not issubclass(HttpRequestParser, object) or HttpRequestParser.__module__ != "aiohttp._http_parser":
            _log.warning("aiohttp runs without its C parser: slower, and less strict")
        settings = self._config.server
        self._client = UpstreamClient(
            Timeouts(settings.connect_timeout, settings.first_event_timeout, settings.idle_timeout)
        )
        deployments = Deployments(await self._upstreams(), self._client)
        self._plugin_session = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar())
        services = Services(self._models, MemoryLimiter(), self._ledger, self._plugin_session)
        for plugin in self._pipeline.plugins:
            self._started.append(plugin)
            await plugin.start(services)
        self._endpoints = self._table(deployments)
        await self._listen()

    async def stop(self) -> None:
        """Let running requests end, within the time for that, then close everything."""
        self._draining = True
        if self._runner is not None:
            await self._runner.cleanup()
        await self._tasks.drain(LINGER)
        for plugin in reversed(self._started):
            try:
                await plugin.stop()
            except Exception:
                _log.exception("plugin failed", plugin=plugin.name, hook="stop")
        for session in (self._plugin_session, self._client, self._demo):
            if session is not None:
                await (session.stop() if isinstance(session, DemoUpstream) else session.close())

    async def _upstreams(self) -> Mapping[str, Upstream]:
        upstreams = {}
        for name, settings in self._config.upstreams.items():
            base_url = settings.base_url
            if settings.is_demo:
                if self._demo is None:
                    self._demo = DemoUpstream()
                    self._demo_url = await self._demo.start()
                base_url = self._demo_url
            upstreams[name] = Upstream(name, settings, base_url)
        return upstreams

    async def _listen(self) -> None:
        settings = self._config.server
        app = web.Application(client_max_size=MOST_BYTES, logger=_QUIET)
        app.router.add_route("*", "/{path:.*}", self._dispatch, expect_handler=_no_continue)
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            logger=_QUIET,
            auto_decompress=False,
            keepalive_timeout=settings.keepalive_timeout,
            shutdown_timeout=settings.shutdown_timeout,
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, settings.host, settings.port, backlog=1024)
        await site.start()
        addresses = self._runner.addresses
        self.port = addresses[0][1] if addresses else settings.port

    def _table(self, deployments: Deployments) -> dict[str, dict[str, Endpoint]]:
        settings = self._config.server
        times = Times(settings.ping_interval, settings.request_timeout, settings.body_timeout)

        def exchange(route: Route, dialect: Dialect) -> Endpoint:
            chain = self._pipeline.chains.get(route)
            if chain is None:
                return _switched_off
            return Handler(chain, dialect, self._models, deployments, times, self._tasks).handle

        openai, messages = DIALECTS["openai"], DIALECTS["messages"]
        keyless = {
            "/": self._root,
            "/healthz": self._alive,
            "/readyz": self._ready,
            "/api/models": self._catalogue,
        }
        pages = [
            (path, self._page(value)) for plugin in self._pipeline.plugins for path, value in plugin.pages().items()
        ]
        return {
            "/v1/messages": {"POST": exchange(Route.MESSAGES, messages)},
            "/v1/messages/count_tokens": {"POST": exchange(Route.COUNT_TOKENS, messages)},
            "/openai/v1/chat/completions": {"POST": exchange(Route.CHAT_COMPLETIONS, openai)},
            "/v1/models": {"GET": self._messages_models},
            "/v1/models/": {"GET": self._messages_model},
            "/openai/v1/models": {"GET": self._openai_models},
            "/openai/v1/models/": {"GET": self._openai_model},
            **{path: {"GET": endpoint, "HEAD": endpoint} for path, endpoint in (*keyless.items(), *pages)},
        }

    async def _dispatch(self, request: web.Request) -> web.StreamResponse:
        try:
            endpoint = find(self._endpoints, request)
            return await endpoint(request)
        except GatewayError as error:
            return self._refusal(request, error)
        except (asyncio.CancelledError, ConnectionResetError):
            raise
        except Exception:
            _log.exception("the gateway failed", path=request.path[:256])
            return self._refusal(request, internal())

    def _refusal(self, request: web.Request, error: GatewayError) -> web.Response:
        exchange = Exchange(Route.MODELS, request.headers, self._models)
        dialect = DIALECTS["openai" if is_openai(request.path) else "messages"]
        return web.Response(
            status=dialect.wording(error.kind).status,
            body=dialect.error_body(error, exchange.request_id),
            headers={**answer_headers(exchange), **error_headers(error)},
        )

    async def _root(self, request: web.Request) -> web.Response:
        return self._json(request, {"name": "EZAT Router", "models": "/api/models"})

    async def _alive(self, request: web.Request) -> web.Response:
        return self._json(request, {"status": "ok"})

    async def _ready(self, request: web.Request) -> web.Response:
        if self._draining:
            return self._json(request, {"status": "draining"}, status=503)
        return self._json(request, {"status": "ready"})

    async def _catalogue(self, request: web.Request) -> web.Response:
        return self._json(request, catalogue(self._models))

    async def _openai_models(self, request: web.Request) -> web.Response:
        return self._json(request, openai_list(await self._visible(request)))

    async def _openai_model(self, request: web.Request) -> web.Response:
        return self._json(request, openai_model(await self._one(request, below(request, "/openai/v1/models/"))))

    async def _messages_model(self, request: web.Request) -> web.Response:
        return self._json(request, messages_model(await self._one(request, below(request, "/v1/models/"))))

    async def _messages_models(self, request: web.Request) -> web.Response:
        query = request.rel_url.query
        models = await self._visible(request)
        try:
            limit = int(query.get("limit", "20")) if query.get("limit", "20").isdecimal() else 0
            page = messages_page(models, limit, query.get("after_id"), query.get("before_id"))
        except ValueError as error:
            name, _, text = str(error).partition(": ")
            raise refused(name, text) from None
        return self._json(request, page)

    async def _visible(self, request: web.Request) -> list[Model]:
        """The models that the key may use. Raises GatewayError where it may not come in."""
        exchange = Exchange(Route.MODELS, request.headers, self._models)
        passage = Passage(self._pipeline.chains[Route.MODELS], exchange)
        outcome = Outcome.FAILED
        try:
            await passage.headers()
            outcome = Outcome.COMPLETED
        finally:
            passage.close(outcome)
        return self._models.visible(exchange.key.models if exchange.key is not None else None)

    async def _one(self, request: web.Request, name: str) -> Model:
        visible = await self._visible(request)
        model = self._models.find(name)
        if model is None or model not in visible:
            raise model_not_found(name)
        return model

    def _page(self, value: Any) -> Endpoint:
        async def page(request: web.Request) -> web.Response:
            return self._json(request, value)

        return page

    def _json(self, request: web.Request, value: Any, status: int = 200) -> web.Response:
        exchange = Exchange(Route.MODELS, request.headers, self._models)
        headers = {**answer_headers(exchange), "content-type": "application/json"}
        return web.Response(status=status, body=orjson.dumps(value), headers=headers)


async def _switched_off(request: web.Request) -> web.StreamResponse:
    message = "the plugin chat_completions is switched off here; use POST /v1/messages"
    raise GatewayError(Kind.PATH_NOT_FOUND, message)


async def _no_continue(request: web.Request) -> None:
    """``100 Continue`` goes out only when the body is to be read: the key is judged first."""


def _quiet_logger() -> logging.Logger:
    """aiohttp's own messages quote what clients sent, keys too: only what kind of error it was is logged."""

    class WithoutArguments(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            kind = record.exc_info[0].__name__ if record.exc_info and record.exc_info[0] else "none"
            record.msg, record.args, record.exc_info = f"aiohttp reports an error of kind {kind}", (), None
            return True

    logger = logging.getLogger("ezat.http")
    logger.addFilter(WithoutArguments())
    return logger


_QUIET = _quiet_logger()


def described_plugins(plugins: Iterable[Plugin]) -> list[tuple[str, str]]:
    """Name and purpose of each plugin."""
    return [(plugin.name, (type(plugin).__doc__ or "").strip().partition("\n")[0]) for plugin in plugins]
