"""The public listener: what each path answers, and how an unknown one is told."""

from __future__ import annotations

import asyncio
from typing import Any

import structlog
from aiohttp import web

from proxy.background import Background
from proxy.catalogue import catalogue
from proxy.dialects import Dialect
from proxy.edge import cors_headers, is_preflight, preflight_headers
from proxy.endpoints import Endpoint, find, is_openai, not_found
from proxy.errors import GatewayError, Kind, PluginFault, internal
from proxy.exchange import Exchange
from proxy.handler import DIALECTS, Handler
from proxy.headers import answer_headers, error_headers
from proxy.loading import Pipeline
from proxy.metrics import Metrics
from proxy.models import ModelTable
from proxy.openapi import as_yaml, document
from proxy.openapi.operations import YAML
from proxy.pages import Pages, json_answer
from proxy.plugin import Route, Services
from proxy.request_log import log_fault
from proxy.running import Running
from proxy.settings import Server
from proxy.upstream.deployments import Deployments

_log = structlog.get_logger("ezat.server")


class Public:
    """Answers every request of the public listener."""

    def __init__(
        self,
        settings: Server,
        models: ModelTable,
        pipeline: Pipeline,
        deployments: Deployments,
        tasks: Background,
        services: Services,
        running: Running,
        metrics: Metrics,
    ) -> None:
        self._settings = settings
        self._models = models
        self._pipeline = pipeline
        self._tasks = tasks
        self._services = services
        self._running = running
        self._metrics = metrics
        self._base = settings.base_path
        table = self._table(deployments)
        self._endpoints = table
        self._description = document(
            {path: methods for path, methods in table.items() if _switched_off not in methods.values()},
            pipeline.plugins,
            base_path=self._base,
            asks_for_key=any(plugin.authenticates for plugin in pipeline.plugins),
        )
        self._description_text: bytes | None = None

    def _table(self, deployments: Deployments) -> dict[str, dict[str, Endpoint]]:
        settings = self._settings

        def exchange(route: Route, dialect: Dialect) -> Endpoint:
            chain = self._pipeline.chains.get(route)
            if chain is None:
                return _switched_off
            handler = Handler(
                chain, dialect, self._exchange, deployments, settings, self._tasks, self._running, self._metrics
            )
            return handler.handle

        openai, messages = DIALECTS["openai"], DIALECTS["messages"]
        keyless = {
            "/": self._root,
            "/healthz": self._alive,
            "/readyz": self._ready,
            "/api/models": self._catalogue,
            "/openapi.yaml": self._described,
        }
        pages = [
            (path, self._page(value)) for plugin in self._pipeline.plugins for path, value in plugin.pages().items()
        ]
        return {
            "/v1/messages": {"POST": exchange(Route.MESSAGES, messages)},
            "/v1/messages/count_tokens": {"POST": exchange(Route.COUNT_TOKENS, messages)},
            "/openai/v1/chat/completions": {"POST": exchange(Route.CHAT_COMPLETIONS, openai)},
            **Pages(
                self._pipeline.chains[Route.MODELS],
                self._services,
                self._exchange,
                self._refusal,
                self._base,
                self._metrics,
            ).table(),
            **{path: {"GET": endpoint, "HEAD": endpoint} for path, endpoint in (*keyless.items(), *pages)},
        }

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request, whatever it is."""
        try:
            path = request.rel_url.raw_path
            inside = path.removeprefix(self._base)
            known = path == self._base or path.startswith(f"{self._base}/")
            methods = find(self._endpoints, inside or "/") if known else None
            if methods is None:
                raise GatewayError(Kind.PATH_NOT_FOUND, not_found(inside))
            if self._settings.cors_origins and is_preflight(request):
                headers = answer_headers(self._exchange(Route.MODELS, request))
                return web.Response(status=204, headers={**headers, **preflight_headers(request)})
            endpoint = methods.get(request.method)
            if endpoint is None:
                allowed = ", ".join(methods)
                message = f"this path takes {allowed}, not {request.method[:16]}"
                raise GatewayError(Kind.METHOD_NOT_ALLOWED, message, headers={"allow": allowed})
            return await endpoint(request)
        except GatewayError as error:
            return self._refused(request, error)
        except (asyncio.CancelledError, ConnectionResetError):
            raise
        except Exception:
            _log.exception("the gateway failed", path=request.path[:256])
            return self._refused(request, internal())

    def _exchange(self, route: Route, request: web.BaseRequest) -> Exchange:
        exchange = Exchange(route, request.headers, self._models)
        if self._settings.cors_origins:
            exchange.answer_headers.update(cors_headers(request, self._settings.cors_origins))
        return exchange

    def _refused(self, request: web.BaseRequest, error: GatewayError) -> web.Response:
        """The refusal of what is no exchange."""
        response = self._refusal(request, self._exchange(Route.MODELS, request), error)
        self._metrics.refused(response.status, error)
        return response

    def _refusal(self, request: web.BaseRequest, exchange: Exchange, error: GatewayError) -> web.Response:
        if isinstance(error, PluginFault):
            log_fault(error, exchange)
        dialect = DIALECTS["openai" if is_openai(request.path.removeprefix(self._base)) else "messages"]
        status = dialect.wording(error.kind).status
        return web.Response(
            status=status,
            body=dialect.error_body(error, exchange.request_id),
            headers={**answer_headers(exchange), **error_headers(error)},
        )

    async def _root(self, request: web.BaseRequest) -> web.Response:
        return self._json(request, {"name": "EZAT Router", "models": "/api/models"})

    async def _alive(self, request: web.BaseRequest) -> web.Response:
        return self._json(request, {"status": "ok"})

    async def _ready(self, request: web.BaseRequest) -> web.Response:
        if self._running.leaving or not self._services.store.is_ready:
            return self._json(request, {"status": "not ready"}, status=503)
        return self._json(request, {"status": "ready"})

    async def _catalogue(self, request: web.BaseRequest) -> web.Response:
        return self._json(request, catalogue(self._models))

    async def _described(self, request: web.BaseRequest) -> web.Response:
        if self._description_text is None:
            self._description_text = await asyncio.to_thread(as_yaml, self._description)
        headers = {**answer_headers(self._exchange(Route.MODELS, request)), "content-type": YAML}
        return web.Response(body=self._description_text, headers=headers)

    def _page(self, value: Any) -> Endpoint:
        async def page(request: web.BaseRequest) -> web.Response:
            return self._json(request, value)

        return page

    def _json(self, request: web.BaseRequest, value: Any, status: int = 200) -> web.Response:
        return json_answer(self._exchange(Route.MODELS, request), value, status)


async def _switched_off(request: web.BaseRequest) -> web.StreamResponse:
    message = "the plugin chat_completions is switched off here; use POST /v1/messages"
    raise GatewayError(Kind.PATH_NOT_FOUND, message)
