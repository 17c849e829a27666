"""The demo upstream as a server: routes, the error envelope, streams, and the faults that need a connection.

It runs in the gateway's own process and loop, so nothing in it blocks: an answer to a short prompt is composed in
well under a millisecond and, unless the prompt says `slow`, a stream leaves in one write. Any api key is accepted.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable

import orjson
from aiohttp import web

from proxy.demo.answers import compose_content, message_for
from proxy.demo.checks import check_request
from proxy.demo.faults import STATUS_FAULTS, before_break, fault_in
from proxy.demo.prompt import Json, newest_user_text
from proxy.demo.prompt_cache import PromptCache, count_prompt
from proxy.demo.refusal import RETRY_AFTER, Refusal, error_envelope
from proxy.demo.stream import events_of, frame
from proxy.demo.tool_calls import holds_word

MOST_BODY = 32 * 2**20  # bytes, as the real API
SLOW_DELTA = 0.05  # seconds before each delta where the prompt says `slow`
PAUSE_BEFORE_CUT = 0.02  # seconds in which the client reads what came before: a lost connection can hide it
REQUEST_ID = web.RequestKey("request_id", str)

log = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class DemoUpstream:
    """Serves /v1/messages, /v1/messages/count_tokens and /healthz; its prompt cache lives as long as it does.

    `clock` gives seconds, for the lifetime of cached prompts.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._cache = PromptCache(clock)
        self._runner: web.AppRunner | None = None
        self._stopping = asyncio.Event()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MOST_BODY, middlewares=[_in_envelope])
        app.router.add_post("/v1/messages", self._messages)
        app.router.add_post("/v1/messages/count_tokens", self._count_tokens)
        app.router.add_get("/healthz", _healthz)
        app.on_shutdown.append(self._let_go)
        return app

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Listen, on a free port where `port` is 0, and return the base URL.

        Raises OSError if the port is taken, RuntimeError if it listens already.
        """
        if self._runner is not None:
            raise RuntimeError("the demo upstream has been started already")
        self._stopping.clear()
        runner = web.AppRunner(self.app(), handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError:
            await runner.cleanup()
            raise
        self._runner = runner
        return f"http://{host}:{runner.addresses[0][1]}"

    async def stop(self) -> None:
        """Stop listening and let every client go, hanging ones too. Without effect where nothing was started."""
        if self._runner is None:
            return
        await self._runner.cleanup()
        self._runner = None

    async def _let_go(self, _: web.Application) -> None:
        self._stopping.set()

    async def _count_tokens(self, request: web.Request) -> web.StreamResponse:
        body = await self._read(request, counting=True)
        return _json_answer({"input_tokens": count_prompt(body).tokens})

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        body = await self._read(request)
        streams = body.get("stream", False)
        fault = fault_in(newest_user_text(body))
        if fault in STATUS_FAULTS:
            raise Refusal(f"The demo fails as asked: fault {fault}.", int(fault))
        if fault == "error" and not streams:
            raise Refusal("The demo fails as asked: fault error.", 529)
        if fault == "hang" or (fault == "stall" and not streams):
            return await self._hang(request)
        if fault == "cut" and not streams:
            return _cut(request)
        message = self._answer(body)
        return await self._stream(request, message, body, fault) if streams else _json_answer(message)

    async def _read(self, request: web.Request, *, counting: bool = False) -> Json:
        return check_request(await _json_body(request), counting=counting)

    def _answer(self, body: Json) -> Json:
        prompt = count_prompt(body)
        seen = self._cache.use(prompt)
        return message_for(body, compose_content(body, prompt, seen), seen)

    async def _stream(self, request: web.Request, message: Json, body: Json, fault: str | None) -> web.StreamResponse:
        response = web.StreamResponse(headers={"cache-control": "no-cache", "request-id": request[REQUEST_ID]})
        response.content_type = "text/event-stream"
        response.charset = "utf-8"
        await response.prepare(request)
        events = events_of(message)
        delay = SLOW_DELTA if holds_word(newest_user_text(body), "slow") else 0
        try:
            await _write_events(response, events if fault is None else before_break(events), delay)
            match fault:
                case "error":
                    refusal = error_envelope(529, "The demo fails as asked: fault error.", request[REQUEST_ID])
                    await response.write(frame(refusal))
                case "cut":
                    await asyncio.sleep(PAUSE_BEFORE_CUT)
                    return _cut(request, response)
                case "stall":
                    return await self._hang(request, response)
            await response.write_eof()
        except ConnectionError:
            log.debug("the client left the stream")
        return response

    async def _hang(self, request: web.Request, begun: web.StreamResponse | None = None) -> web.StreamResponse:
        """Wait until the client leaves, which cancels the handler, or the server stops."""
        await self._stopping.wait()
        return _cut(request, begun)


@web.middleware
async def _in_envelope(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every answer gets its id, and every failure its envelope, aiohttp's own 404 and 405 too."""
    request[REQUEST_ID] = f"req_{secrets.token_hex(12)}"
    try:
        response = await handler(request)
    except Refusal as refusal:
        response = _failure(request, refusal.status, refusal.message)
    except web.HTTPRequestEntityTooLarge:
        response = _failure(request, 413, "Request exceeds the maximum size")
    except web.HTTPException as refused:
        response = _failure(request, refused.status, refused.reason)
        if "Allow" in refused.headers:
            response.headers["Allow"] = refused.headers["Allow"]
    if not response.prepared:
        response.headers["request-id"] = request[REQUEST_ID]
    return response


def _failure(request: web.Request, status: int, message: str) -> web.Response:
    response = _json_answer(error_envelope(status, message, request[REQUEST_ID]), status)
    if status in RETRY_AFTER:
        response.headers["retry-after"] = RETRY_AFTER[status]
    return response


def _json_answer(data: Json, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(data), status=status, content_type="application/json")


async def _json_body(request: web.Request) -> object:
    try:
        return orjson.loads(await request.read())
    except orjson.JSONDecodeError as error:
        raise Refusal(f"The request body is not valid JSON: {error.msg}") from error


async def _healthz(_: web.Request) -> web.Response:
    return _json_answer({"status": "ok"})


async def _write_events(response: web.StreamResponse, events: Iterable[Json], delay: float) -> None:
    """All in one write; with a delay, in seconds, each delta in its own."""
    waiting: list[bytes] = []
    for event in events:
        if delay and event["type"] == "content_block_delta":
            await response.write(b"".join(waiting))
            waiting.clear()
            await asyncio.sleep(delay)
        waiting.append(frame(event))
    await response.write(b"".join(waiting))


def _cut(request: web.Request, begun: web.StreamResponse | None = None) -> web.StreamResponse:
    """Close the connection where it stands."""
    if request.transport is not None:
        request.transport.abort()
    return begun or web.Response()
