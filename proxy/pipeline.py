"""The two loops: inputs in the order of the list, outputs in the reverse order.

A chain is what of the list concerns one route, compiled to the hooks that are really defined, so that a plugin
costs only what it does. A passage is one exchange's way through a chain; it keeps the promises on how it ends.
This is the only file that knows about order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple

import structlog

from proxy.answer import Answer
from proxy.bounded import bounded
from proxy.document import Event
from proxy.errors import GatewayError, PluginFault
from proxy.exchange import Exchange
from proxy.plugin import Format, Outcome, OutputPlugin, Plugin, Route
from proxy.timing import HookTime, PluginTime, Timed

COMPLETE_TIMEOUT = 10.0
"""Seconds for all ``on_complete`` of an exchange together."""

_log = structlog.get_logger("ezat.pipeline")


class Hook(NamedTuple):
    """A hook that a plugin defines, and the format spoken at its place."""

    plugin: Plugin
    call: Callable[[Exchange], Coroutine[Any, Any, Any]]
    format: Format
    time: HookTime
    outputs_time: PluginTime
    """For the output that it may return."""


class Opened(NamedTuple):
    """An output of this exchange."""

    plugin: str
    output: OutputPlugin
    time: PluginTime


class EventHook(NamedTuple):
    """An output's ``on_event``, with the kinds that it wants."""

    plugin: str
    call: Callable[[Event], Sequence[Event]]
    kinds: frozenset[str] | None
    time: HookTime


@dataclass(frozen=True, slots=True)
class Chain:
    """What of the list concerns one route."""

    route: Route
    plugins: tuple[Plugin, ...]
    headers: tuple[Hook, ...]
    requests: tuple[Hook, ...]
    sends: tuple[Hook, ...]
    opens_leaves: bool
    """Whether a plugin may edit what a translator hands on unopened: then it must not be the client's own."""
    timeout: float
    """Seconds for each ``on_headers``, ``on_request`` and ``on_answer``."""


def defines(value: object, base: type, method: str) -> bool:
    """Whether a class defines a method itself, rather than inheriting the empty one."""
    return getattr(type(value), method) is not getattr(base, method)


def blamed(plugin: str, hook: str, error: BaseException) -> BaseException:
    """What a plugin's exception becomes. A cancellation that nobody asked this task for is the plugin's own bug: it
    awaited something that was cancelled, and its client is still there."""
    if isinstance(error, GatewayError):
        return error
    task = asyncio.current_task()
    if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
        return error
    return PluginFault(plugin, hook, error)


def compile_chain(route: Route, timed: Sequence[Timed], timeout: float) -> Chain:
    """The chain of a route, from all plugins in their order; ``proxy.loading`` has checked that its formats join up."""
    spoken: Format = "openai" if route is Route.CHAT_COMPLETIONS else "messages"
    concerned = [each for each in timed if route in each.plugin.routes]
    hooks: dict[str, list[Hook]] = {"on_headers": [], "on_request": [], "on_send": []}
    for plugin, time in concerned:
        for name, found in hooks.items():
            if defines(plugin, Plugin, name):
                found.append(Hook(plugin, getattr(plugin, name), spoken, getattr(time, name), time))
        spoken = plugin.turns_into or spoken
    return Chain(
        route,
        tuple(each.plugin for each in concerned),
        tuple(hooks["on_headers"]),
        tuple(hooks["on_request"]),
        tuple(hooks["on_send"]),
        any(each.plugin.opens_leaves for each in concerned),
        timeout,
    )


class Passage:
    """One exchange's way through a chain, and back."""

    __slots__ = ("_chain", "_closed", "_completing", "_event_hooks", "_exchange", "_outputs", "format", "outcome")

    def __init__(self, chain: Chain, exchange: Exchange) -> None:
        self._chain = chain
        self._exchange = exchange
        self._outputs: list[Opened] = []
        self._event_hooks: tuple[EventHook, ...] = ()
        self._closed = self._completing = False
        self.outcome: Outcome | None = None
        """How the exchange ended, once it has."""
        self.format: Format = "messages"
        """The format in which the answer enters the outputs."""

    async def headers(self) -> None:
        """Every ``on_headers``. Raises GatewayError."""
        await self._run(self._chain.headers, "on_headers")

    async def request(self) -> Answer | None:
        """Every ``on_request``; the answer of the plugin that gave one. Raises GatewayError."""
        self._exchange.keeps_apart = self._chain.opens_leaves
        answer = await self._run(self._chain.requests, "on_request")
        self._event_hooks = tuple(
            EventHook(name, output.on_event, output.events, time.on_event)
            for name, output, time in self._outputs
            if defines(output, OutputPlugin, "on_event")
        )
        return answer

    async def send(self) -> None:
        """Every ``on_send``. Raises GatewayError."""
        for hook in self._chain.sends:
            began = perf_counter()
            try:
                await hook.call(self._exchange)
            except (Exception, asyncio.CancelledError) as error:
                raise blamed(hook.plugin.name, "on_send", error)
            finally:
                hook.time.add(perf_counter() - began)

    async def _run(self, hooks: tuple[Hook, ...], name: str) -> Answer | None:
        if not hooks:
            return None
        hook = hooks[0]
        try:
            for hook in hooks:
                began = perf_counter()
                try:
                    result = await bounded(hook.call(self._exchange), self._chain.timeout)
                finally:
                    hook.time.add(perf_counter() - began)
                if result is None:
                    continue
                if isinstance(result, Answer):
                    self.format = hook.format
                    return result
                self._open(hook, result)
        except (Exception, asyncio.CancelledError) as error:
            raise blamed(hook.plugin.name, name, error)
        return None

    def _open(self, hook: Hook, output: OutputPlugin) -> None:
        plugin = hook.plugin
        if not isinstance(output, OutputPlugin):
            raise TypeError(f"on_request returned a {type(output).__name__}, not an OutputPlugin, an Answer or None")
        self._outputs.insert(0, Opened(plugin.name, output, hook.outputs_time))
        if defines(output, OutputPlugin, "on_complete") and not plugin.completes:
            raise TypeError("its output has an on_complete, which `completes = True` on the plugin must announce")

    async def answer(self, answer: Answer) -> None:
        """A whole answer passes every output. Raises GatewayError."""
        name = ""
        try:
            for name, output, time in self._outputs:
                if defines(output, OutputPlugin, "on_answer"):
                    began = perf_counter()
                    try:
                        await bounded(output.on_answer(answer), self._chain.timeout)
                    finally:
                        time.on_answer.add(perf_counter() - began)
        except (Exception, asyncio.CancelledError) as error:
            raise blamed(name, "on_answer", error)

    def event(self, event: Event) -> Sequence[Event]:
        """One event passes every output that wants its kind. Raises GatewayError."""
        events: Sequence[Event] = (event,)
        name = ""
        try:
            for name, call, kinds, time in self._event_hooks:
                if len(events) == 1:
                    only = events[0]
                    if kinds is None or only.kind in kinds:
                        began = perf_counter()
                        events = call(only)
                        if type(events) is not tuple and type(events) is not list:
                            events = tuple(events)  # a generator, or nothing that holds events
                        time.seconds += perf_counter() - began
                        time.calls += 1
                else:
                    began = perf_counter()
                    wanted = [kinds is None or each.kind in kinds for each in events]
                    events = [
                        passed
                        for each, wants in zip(events, wanted, strict=True)
                        for passed in (call(each) if wants else (each,))
                    ]
                    time.seconds += perf_counter() - began
                    time.calls += sum(wanted)
        except (Exception, asyncio.CancelledError) as error:
            raise blamed(name, "on_event", error)
        return events

    @property
    def is_ending(self) -> bool:
        """Whether the answer is being recorded, or all is over: then nothing else may end it."""
        return self._completing or self._closed

    @property
    def completes(self) -> bool:
        """Whether any output wants to record the answer before its end goes out."""
        return any(defines(opened.output, OutputPlugin, "on_complete") for opened in self._outputs)

    def complete(self) -> Coroutine[Any, Any, None]:
        """Every ``on_complete``, then the end. Raises GatewayError where one of them fails.

        To be run in a task of its own: from this call on, a client that leaves changes nothing.
        """
        self._completing = True
        return self._complete()

    async def _complete(self) -> None:
        name, outcome = "", Outcome.FAILED
        try:
            async with asyncio.timeout(COMPLETE_TIMEOUT):
                for name, output, time in self._outputs:
                    if defines(output, OutputPlugin, "on_complete"):
                        began = perf_counter()
                        try:
                            await output.on_complete()
                        finally:
                            time.on_complete.add(perf_counter() - began)
            outcome = Outcome.COMPLETED
        except (Exception, asyncio.CancelledError) as error:
            raise blamed(name, "on_complete", error)
        finally:
            self._completing = False
            self.close(outcome)

    def close(self, outcome: Outcome) -> None:
        """Every ``on_close``, then what was deferred. The first call counts, the others do nothing."""
        if self._closed or self._completing:
            return
        self._closed = True
        self.outcome = outcome
        for name, output, _ in self._outputs:
            if not defines(output, OutputPlugin, "on_close"):
                continue
            try:
                output.on_close(outcome)
            except Exception:
                _log.exception("plugin failed", plugin=name, hook="on_close", request_id=self._exchange.id)
        for undo in self._exchange.take_defers():
            try:
                undo()
            except Exception:
                _log.exception("plugin failed", hook="defer", request_id=self._exchange.id)
