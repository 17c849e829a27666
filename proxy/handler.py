"""One exchange's life, from the headers to the ending. Every failure takes the same way out, in one place, and one
question decides how it is told: has the answer begun?
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import aiohttp
from aiohttp import web

from proxy.answer import Answer
from proxy.background import Background
from proxy.dialects import Dialect
from proxy.dialects.messages import Messages
from proxy.dialects.openai import OpenAI
from proxy.document import Event
from proxy.edge import Network, client_address
from proxy.ending import log_bug, log_fault, log_lost_record, log_request
from proxy.errors import GatewayError, PluginFault, internal
from proxy.exchange import Exchange
from proxy.headers import answer_headers, error_headers
from proxy.own_answers import events_of, filled
from proxy.pipeline import Chain, Passage
from proxy.plugin import Outcome, Route
from proxy.progress import Progress
from proxy.reading import check_headers, check_messages_request, model_name, parse, read_body
from proxy.running import UNKNOWN_LENGTH, Running, stopping
from proxy.streaming import AnswerStream
from proxy.upstream.deployments import Deployments
from proxy.upstream.faults import UpstreamFault, client_path, timed_out
from proxy.upstream.stream import MessageStream

DIALECTS: dict[str, Dialect] = {"openai": OpenAI(), "messages": Messages()}


NewExchange = Callable[[Route, web.BaseRequest], Exchange]


@dataclass(frozen=True, slots=True)
class Rim:
    """What the server's settings say of every exchange; times in seconds."""

    ping_interval: float
    request_timeout: float
    body_timeout: float
    trusted_proxies: Sequence[Network]


class Handler:
    """Answers the exchanges of one route."""

    def __init__(
        self,
        chain: Chain,
        dialect: Dialect,
        new_exchange: NewExchange,
        deployments: Deployments,
        rim: Rim,
        tasks: Background,
        running: Running,
    ) -> None:
        self._chain = chain
        self._dialect = dialect
        self._new_exchange = new_exchange
        self._deployments = deployments
        self._rim = rim
        self._tasks = tasks
        self._running = running

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request."""
        exchange = self._new_exchange(self._chain.route, request)
        run = _Run(self, request, exchange)
        self._running.add(run)
        try:
            return await run.run()
        finally:
            self._running.remove(run)


class _Run:
    """One exchange while it runs."""

    def __init__(self, handler: Handler, request: web.BaseRequest, exchange: Exchange) -> None:
        self._handler = handler
        self._request = request
        self._exchange = exchange
        self._passage = Passage(handler._chain, exchange)
        self._stream: AnswerStream | None = None
        self._in_tail = False
        self._task = asyncio.current_task()
        self._ended_from_outside = False
        self._status = 0

    async def run(self) -> web.StreamResponse:
        outcome, error = Outcome.FAILED, None
        try:
            response = await self._answer()
            outcome = Outcome.COMPLETED
        except GatewayError as refusal:
            error = refusal
        except (ConnectionResetError, aiohttp.ClientConnectionResetError):
            outcome = Outcome.ABANDONED
            raise
        except asyncio.CancelledError:
            if not self._ended_from_outside or self._task is None:
                outcome = Outcome.ABANDONED
                raise
            self._task.uncancel()
            error = stopping()
        except Exception as bug:
            log_bug(self._exchange)
            error = internal()
            error.__cause__ = bug
        finally:
            self._passage.close(outcome)
            if error is None:
                self._end(None)
        if error is None:
            return response
        try:
            return await self._tell(error)
        finally:
            self._end(error)

    def end_now(self) -> None:
        """The gateway stops, and this has run for too long: end it with an error that says so."""
        if self._task is not None and not self._ended_from_outside:
            self._ended_from_outside = True
            self._task.cancel()

    async def _answer(self) -> web.StreamResponse:
        """The two flat loops, and the upstream between them."""
        exchange, passage = self._exchange, self._passage
        await passage.headers()
        await self._read()
        answer = await passage.request()
        if answer is None:
            await passage.send()
        else:
            exchange.billed = answer.billed
        if exchange.stream:
            return await self._streamed(answer)
        return await self._plain(answer)

    async def _read(self) -> None:
        exchange = self._exchange
        check_headers(self._request)
        self._make_room()
        document = parse(await read_body(self._request, self._handler._rim.body_timeout), exchange.route)
        exchange.asked_model = model_name(document)
        exchange.read(document)
        exchange.use_model(exchange.asked_model)
        if exchange.route is not Route.CHAT_COMPLETIONS:
            check_messages_request(exchange, document)
        exchange.stream = exchange.route is not Route.COUNT_TOKENS and document.value("stream") is True

    def _make_room(self) -> None:
        """Count the body among all that are in memory, until the exchange is over."""
        length = self._request.content_length
        size = UNKNOWN_LENGTH if length is None else length
        running = self._handler._running
        running.take(size)
        self._exchange.defer(lambda: running.give_back(size))

    async def _plain(self, answer: Answer | None) -> web.Response:
        exchange, passage = self._exchange, self._passage
        if answer is None:
            answer = await self._whole()
        else:
            answer = filled(answer, DIALECTS[passage.format], exchange)
            if passage.format == "messages":
                exchange.usage.take(answer.data.get("usage"))
        if exchange.route is not Route.COUNT_TOKENS:
            await passage.answer(answer)
        body = answer.encoded()
        await self._complete()
        self._status = 200
        return web.Response(body=body, headers={**answer_headers(exchange), "content-type": "application/json"})

    async def _whole(self) -> Answer:
        seconds = self._handler._rim.request_timeout
        try:
            async with asyncio.timeout(seconds):
                return await self._handler._deployments.whole(self._exchange)
        except TimeoutError:
            message = f"the answer took longer than {seconds:g} seconds; ask for a stream (stream: true)"
            raise timed_out("the time of a whole request is over", message) from None

    async def _streamed(self, answer: Answer | None) -> web.StreamResponse:
        exchange, passage, handler = self._exchange, self._passage, self._handler
        progress = Progress(exchange.usage)
        self._stream = stream = AnswerStream(
            self._request,
            lambda: answer_headers(exchange),
            handler._dialect.ping,
            handler._rim.ping_interval,
            handler._tasks,
        )
        source: MessageStream | None = None
        try:
            if answer is None:
                opened = await handler._deployments.stream(exchange, progress)
                if isinstance(opened, MessageStream):
                    source = opened
                else:
                    answer = opened
            tail = b""
            if source is not None:
                while arrived := await source.read():
                    tail += await self._pass_on(arrived, progress)
            elif answer is not None:
                events = events_of(answer, DIALECTS[passage.format], exchange)
                for event in events:
                    progress.observe(event)
                tail = await self._pass_on(events, progress)
            await self._complete()
            await stream.end(tail + handler._dialect.tail)
            self._status = 200
            return stream.response
        finally:
            if source is not None:
                self._leave(source)

    async def _pass_on(self, events: Sequence[Event], progress: Progress) -> bytes:
        """Send what these events become; what belongs to the tail is given back, to be sent when all is recorded."""
        dialect, exchange, pass_event = self._handler._dialect, self._exchange, self._passage.event
        frames: list[bytes] = []
        tail: list[bytes] = []
        out = tail if self._in_tail else frames
        try:
            for event in events:
                if event is progress.tail_event:
                    self._in_tail, out = True, tail
                if event.kind == "ping":
                    if dialect.format == "messages":
                        out.append(dialect.frame(event, exchange))
                    continue
                for passed in pass_event(event):
                    out.append(dialect.frame(passed, exchange))
        finally:  # an event that fails ends its read: what stood before it goes out first
            if frames and self._stream is not None:
                await self._stream.write(b"".join(frames))
        return b"".join(tail)

    async def _complete(self) -> None:
        """Record the answer. From here on, a client that leaves changes nothing."""
        if self._passage.completes:
            completing = self._handler._tasks.spawn(self._passage.complete())
            try:
                await asyncio.shield(completing)
            except asyncio.CancelledError:
                completing.add_done_callback(self._log_late_failure)
                raise
        else:
            self._passage.close(Outcome.COMPLETED)

    def _log_late_failure(self, completing: asyncio.Task[None]) -> None:
        """The client has left, and its answer could not be recorded: nobody is told but the log."""
        error = None if completing.cancelled() else completing.exception()
        if isinstance(error, PluginFault):
            log_fault(error, self._exchange)
        elif error is not None:
            log_lost_record(error, self._exchange)

    def _leave(self, source: MessageStream) -> None:
        if self._passage.outcome is Outcome.COMPLETED and not source.at_end:
            self._handler._tasks.spawn(source.drain())
        else:
            source.close()

    async def _tell(self, error: GatewayError) -> web.StreamResponse:
        """The error, in the one way or the other."""
        exchange, dialect = self._exchange, self._handler._dialect
        if isinstance(error, PluginFault):
            log_fault(error, exchange)
        elif isinstance(error, UpstreamFault) and exchange.path_of is not None:
            error.param = error.param or client_path(error.message, exchange.path_of)
        self._status = dialect.wording(error.kind).status
        if self._stream is not None and self._stream.begun:
            try:
                await self._stream.end(dialect.error_frames(error, exchange.request_id))
                return self._stream.response
            finally:
                self._stream.close()
        if self._stream is not None:
            self._stream.close()  # before a ping starts it
        headers = {**answer_headers(exchange), **error_headers(error)}
        return web.Response(status=self._status, body=dialect.error_body(error, exchange.request_id), headers=headers)

    def _end(self, error: GatewayError | None) -> None:
        """What is left to do, on every path."""
        if self._stream is not None:
            self._stream.close()
        client = client_address(self._request, self._handler._rim.trusted_proxies)
        log_request(self._exchange, self._passage.outcome, self._status, error, client)
