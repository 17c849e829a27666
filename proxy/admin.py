"""The operator's listener: metrics, and what a reload would change.

It asks for a token of its own, which is no client's key. What it tells of a configuration holds no secret.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import structlog
import uuid_utils
from aiohttp import web

from proxy.errors import GatewayError, Kind, internal
from proxy.handler import DIALECTS
from proxy.headers import error_headers
from proxy.http_server import HttpServer
from proxy.jsontext import encode
from proxy.metrics import CONTENT_TYPE
from proxy.settings import Admin as AdminSettings
from proxy.store.admin_token import digest_of
from proxy.store.store import Store

MOST_BYTES = 2**16
KEEPALIVE = 75.0
METHODS: Mapping[str, tuple[str, ...]] = {"/healthz": ("GET", "HEAD"), "/metrics": ("GET", "HEAD"), "/plan": ("POST",)}
RENDERED_FOR = 1.0
"""Seconds for which the metrics are not made anew: a hundred scrapers at once cost as much as one."""
STOP_SECONDS = 1.0
_log = structlog.get_logger("ezat.admin")

Plan = Callable[[], Awaitable[Mapping[str, Any]]]


class Admin:
    """The listener: ``start``, ``stop``."""

    def __init__(
        self, settings: AdminSettings, store: Store, look: Callable[[], None], metrics: Callable[[], bytes]
    ) -> None:
        """``look`` takes note of states; ``metrics`` makes the text, in a thread, since it can take 100 ms."""
        self._settings = settings
        self._store = store
        self._look = look
        self._metrics = metrics
        self._rendering = asyncio.Lock()
        self._rendered = (0.0, b"")
        self._runner = web.ServerRunner(
            HttpServer(self._answer, most_bytes=MOST_BYTES, keepalive=KEEPALIVE), shutdown_timeout=STOP_SECONDS
        )
        self.plan: Plan | None = None
        """What answers ``POST /plan``: what a reload would change."""
        self.port = settings.port
        """The port that it listens on, once started."""

    async def start(self) -> None:
        """Listen. Raises OSError where the port can't be had."""
        await self._runner.setup()
        await web.TCPSite(self._runner, self._settings.host, self._settings.port).start()
        self.port = self._runner.addresses[0][1] if self._runner.addresses else self._settings.port

    async def stop(self) -> None:
        """Close every connection."""
        await self._runner.cleanup()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await self._answer_known(request)
        except GatewayError as error:
            return _told(error)
        except Exception:
            _log.exception("the admin listener failed", path=request.path[:256])
            return _told(internal())

    async def _answer_known(self, request: web.BaseRequest) -> web.Response:
        path, method = request.rel_url.raw_path, request.method
        allowed = METHODS.get(path)
        if allowed is None:
            raise GatewayError(Kind.PATH_NOT_FOUND, "there is nothing here; there are /metrics, /plan and /healthz")
        if path != "/healthz":
            self._check_token(request)
        if method not in allowed:
            message = f"this path takes {', '.join(allowed)}, not {method[:16]}"
            raise GatewayError(Kind.METHOD_NOT_ALLOWED, message, headers={"allow": ", ".join(allowed)})
        if (request.content_length or 0) > MOST_BYTES:
            raise GatewayError(Kind.TOO_LARGE, "nothing here takes so large a body")
        if path == "/healthz":
            return _json({"status": "ok"})
        if path == "/metrics":
            return web.Response(body=await self._metrics_now(), headers={"content-type": CONTENT_TYPE})
        if self.plan is None:
            raise GatewayError(Kind.UNAVAILABLE, "this gateway was not started from a file", retry_after=5)
        return _json(await self.plan())

    def _check_token(self, request: web.BaseRequest) -> None:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        own = self._settings.token
        expected = self._store.directory.admin if own is None else digest_of(own.get_secret_value())
        if expected is None:
            raise GatewayError(Kind.UNAVAILABLE, "the token can't be looked up now; try again", retry_after=5)
        if scheme.lower() != "bearer" or not hmac.compare_digest(digest_of(token.strip()), expected):
            message = "send the admin token as `Authorization: Bearer …`; `run.py admin-token` makes a new one"
            raise GatewayError(Kind.AUTHENTICATION, message, headers={"www-authenticate": "Bearer"})

    async def _metrics_now(self) -> bytes:
        async with self._rendering:
            now = asyncio.get_running_loop().time()
            made, text = self._rendered
            if not text or now - made > RENDERED_FOR:
                self._look()
                text = await asyncio.to_thread(self._metrics)
                self._rendered = (now, text)
            return text


def _told(error: GatewayError) -> web.Response:
    dialect, request_id = DIALECTS["messages"], str(uuid_utils.uuid7())
    headers = {"content-type": "application/json", "request-id": request_id, **error_headers(error)}
    body = dialect.error_body(error, request_id)
    return web.Response(status=dialect.wording(error.kind).status, body=body, headers=headers)


def _json(value: Mapping[str, Any]) -> web.Response:
    return web.Response(body=encode(value), headers={"content-type": "application/json"})
