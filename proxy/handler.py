"""One exchange's life, from the headers to the ending. Every failure takes the same way out, in one place, and one
question decides how it is told: has the answer begun?
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic

from aiohttp import web

from proxy.answer import Answer
from proxy.background import Background
from proxy.dialects import Dialect
from proxy.dialects.messages import Messages
from proxy.dialects.openai import OpenAI
from proxy.document import Event
from proxy.edge import client_address
from proxy.errors import GatewayError, PluginFault, internal
from proxy.exchange import Exchange
from proxy.headers import answer_headers, error_headers
from proxy.metrics import Metrics
from proxy.own_answers import events_of, filled
from proxy.pipeline import Chain, Passage
from proxy.plugin import Outcome, Route
from proxy.progress import Progress
from proxy.reading import check_headers, check_messages_request, model_name, parse, read_body
from proxy.request_log import log_bug, log_fault, log_lost_record, log_request
from proxy.running import UNKNOWN_LENGTH, Running, stopping
from proxy.settings import Server
from proxy.streaming import AnswerStream, until_sent
from proxy.upstream.deployments import Deployments
from proxy.upstream.faults import UpstreamFault, client_path
from proxy.upstream.stream import MessageStream

DIALECTS: dict[str, Dialect] = {"openai": OpenAI(), "messages": Messages()}
NewExchange = Callable[[Route, web.BaseRequest], Exchange]


@dataclass(frozen=True, slots=True)
class Handler:
    """Answers the exchanges of one route."""

    chain: Chain
    dialect: Dialect
    new_exchange: NewExchange
    deployments: Deployments
    settings: Server
    tasks: Background
    running: Running
    metrics: Metrics

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request."""
        exchange = self.new_exchange(self.chain.route, request)
        run = _Run(self, request, exchange)
        self.running.add(run)
        try:
            response = await run.run()
            if not response.prepared:
                if self.running.leaving:
                    response.force_close()  # who comes again shall come to another
                await response.prepare(request)
                await response.write_eof()
                await until_sent(request)
            return response
        finally:
            self.running.remove(run)


class _Run:
    """One exchange while it runs."""

    def __init__(self, handler: Handler, request: web.BaseRequest, exchange: Exchange) -> None:
        self._handler = handler
        self._request = request
        self._exchange = exchange
        self._passage = Passage(handler.chain, exchange)
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
        except ConnectionResetError:
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
        if self._task is not None and not self._ended_from_outside and not self._passage.is_ending:
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
        document = parse(await self._body(), exchange.route)
        exchange.asked_model = model_name(document)
        exchange.read(document)
        exchange.use_model(exchange.asked_model)
        if exchange.route is not Route.CHAT_COMPLETIONS:
            check_messages_request(exchange, document)
        exchange.stream = exchange.route is not Route.COUNT_TOKENS and document.value("stream") is True

    async def _body(self) -> bytes:
        """The body, counted among all that are in memory until the exchange is over."""
        running = self._handler.running
        announced = self._request.content_length
        taken = UNKNOWN_LENGTH if announced is None else announced
        running.take(taken)
        counted = [taken]
        self._exchange.defer(lambda: running.give_back(sum(counted)))
        raw = await read_body(self._request, self._handler.settings.body_timeout)
        if announced is None and len(raw) > taken:
            running.take(len(raw) - taken)
            counted.append(len(raw) - taken)
        return raw

    async def _plain(self, answer: Answer | None) -> web.Response:
        exchange, passage = self._exchange, self._passage
        if answer is None:
            answer = await self._handler.deployments.whole(exchange)
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

    async def _streamed(self, answer: Answer | None) -> web.StreamResponse:
        exchange, passage, handler = self._exchange, self._passage, self._handler
        progress = Progress(exchange.usage)
        self._stream = stream = AnswerStream(
            self._request,
            lambda: answer_headers(exchange),
            handler.dialect.ping,
            handler.settings.ping_interval,
            handler.tasks,
        )
        source: MessageStream | None = None
        handler.metrics.open_streams += 1
        try:
            if answer is None:
                opened = await handler.deployments.stream(exchange, progress)
                handler.metrics.first_event(exchange, monotonic() - exchange.started)
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
            await stream.end(tail + handler.dialect.tail)
            self._status = 200
            return stream.response
        finally:
            handler.metrics.open_streams -= 1
            if source is not None:
                self._leave(source)

    async def _pass_on(self, events: Sequence[Event], progress: Progress) -> bytes:
        """Send what these events become; what belongs to the tail is given back, to be sent when all is recorded."""
        dialect, exchange, pass_event = self._handler.dialect, self._exchange, self._passage.event
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
            completing = self._handler.tasks.spawn(self._passage.complete())
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
            self._handler.tasks.spawn(source.drain())
        else:
            source.close()

    async def _tell(self, error: GatewayError) -> web.StreamResponse:
        """The error, in the one way or the other."""
        exchange, dialect = self._exchange, self._handler.dialect
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
        exchange.ignored.clear()  # of a request that was refused nothing had an effect
        exchange.adjusted.clear()
        headers = {**answer_headers(exchange), **error_headers(error)}
        return web.Response(status=self._status, body=dialect.error_body(error, exchange.request_id), headers=headers)

    def _end(self, error: GatewayError | None) -> None:
        """What is left to do, on every path."""
        if self._stream is not None:
            self._stream.close()
        handler, exchange = self._handler, self._exchange
        outcome, seconds = self._passage.outcome or Outcome.ABANDONED, monotonic() - exchange.started
        client = client_address(self._request, handler.settings.trusted_proxies)
        log_request(exchange, outcome, self._status, error, client, seconds)
        handler.metrics.request_ended(exchange, outcome, self._status, error, seconds)
