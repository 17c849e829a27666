"""The GETs that ask for a key and answer by themselves: the model lists, and a key's own view."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Any

import orjson
from aiohttp import web

from proxy.catalogue import messages_model, messages_page, openai_list, openai_model
from proxy.endpoints import Endpoint, below
from proxy.errors import GatewayError, Kind, refused
from proxy.exchange import Exchange, model_not_found
from proxy.handler import NewExchange
from proxy.headers import answer_headers
from proxy.metrics import Metrics
from proxy.models import Model
from proxy.own_view import cost_of_request, key_view
from proxy.pipeline import Chain, Passage
from proxy.plugin import Outcome, Route, Services
from proxy.store.writer import StoreDown

KeyedPage = Callable[[web.BaseRequest, Exchange], Awaitable[Any]]
Refuse = Callable[[web.BaseRequest, Exchange, GatewayError], web.Response]


def json_answer(exchange: Exchange, value: Any, status: int = 200) -> web.Response:
    """A page of JSON."""
    headers = {**answer_headers(exchange), "content-type": "application/json"}
    return web.Response(status=status, body=orjson.dumps(value), headers=headers)


class Pages:
    """The pages by their paths. A path that ends in a slash stands for all paths below it."""

    def __init__(
        self,
        chain: Chain,
        services: Services,
        new_exchange: NewExchange,
        refuse: Refuse,
        base_path: str,
        metrics: Metrics,
    ) -> None:
        self._chain = chain
        self._metrics = metrics
        self._services = services
        self._new_exchange = new_exchange
        self._refuse = refuse
        self._base = base_path

    def table(self) -> dict[str, dict[str, Endpoint]]:
        """What answers each path."""
        pages: dict[str, KeyedPage] = {
            "/v1/models": self._messages_models,
            "/v1/models/": self._messages_model,
            "/openai/v1/models": self._openai_models,
            "/openai/v1/models/": self._openai_model,
            "/api/key": self._key,
            "/api/key/requests/": self._request,
        }
        return {path: {"GET": self._keyed(page)} for path, page in pages.items()}

    def _keyed(self, page: KeyedPage) -> Endpoint:
        async def endpoint(request: web.BaseRequest) -> web.StreamResponse:
            exchange = self._new_exchange(Route.MODELS, request)
            passage = Passage(self._chain, exchange)
            outcome, error = Outcome.FAILED, None
            try:
                await passage.headers()
                response = json_answer(exchange, await page(request, exchange))
                outcome = Outcome.COMPLETED
            except GatewayError as refusal:
                error = refusal
            except StoreDown:
                error = GatewayError(Kind.UNAVAILABLE, "the store can't be read now; try again", retry_after=5)
            finally:
                passage.close(outcome)
            if error is not None:
                response = self._refuse(request, exchange, error)
            self._metrics.request_ended(exchange, outcome, response.status, error, monotonic() - exchange.started)
            return response

        return endpoint

    def _visible(self, exchange: Exchange) -> list[Model]:
        """The models that the key may use."""
        return self._services.models.visible(exchange.key.models if exchange.key is not None else None)

    def _one(self, exchange: Exchange, name: str) -> Model:
        model = self._services.models.find(name)
        if model is None or model not in self._visible(exchange):
            raise model_not_found(name)
        return model

    async def _openai_models(self, request: web.BaseRequest, exchange: Exchange) -> Any:
        return openai_list(self._visible(exchange))

    async def _openai_model(self, request: web.BaseRequest, exchange: Exchange) -> Any:
        return openai_model(self._one(exchange, below(request, self._base + "/openai/v1/models/")))

    async def _messages_model(self, request: web.BaseRequest, exchange: Exchange) -> Any:
        return messages_model(self._one(exchange, below(request, self._base + "/v1/models/")))

    async def _messages_models(self, request: web.BaseRequest, exchange: Exchange) -> Any:
        query = request.rel_url.query
        try:
            return messages_page(
                self._visible(exchange),
                query.get("limit"),
                query.get("after_id"),
                query.get("before_id"),
            )
        except ValueError as error:
            name, _, text = str(error).partition(": ")
            raise refused(name, text) from None

    async def _key(self, request: web.BaseRequest, exchange: Exchange) -> Any:
        return await key_view(exchange, self._services, self._visible(exchange))

    async def _request(self, request: web.BaseRequest, exchange: Exchange) -> Any:
        return await cost_of_request(exchange, self._services, below(request, self._base + "/api/key/requests/"))
