"""A streamed answer of an upstream: bytes in, events out, and whether it is whole.

One timer watches for the first event and for silence; waiting with a time-out around each read would cost as much
as the read.
"""

from __future__ import annotations

import asyncio

import aiohttp
import msgspec

from proxy.document import Event
from proxy.errors import GatewayError
from proxy.jsonbytes import members, replaced
from proxy.jsontext import JsonError, encode, without_lone_surrogates
from proxy.progress import Progress
from proxy.sse import Frame, Splitter
from proxy.upstream.faults import UpstreamFault, cut_off, fault_of_event, no_messages_answer, timed_out
from proxy.upstream.inflate import Inflater

TAIL_TIMEOUT = 5.0
"""Seconds to wait for a ``message_stop`` that may have been lost."""
DRAIN_TIMEOUT = 1.0
"""Seconds for an upstream to end its body behind the ``message_stop``, so that the connection can be used again."""
MOST_BYTES = 2**30
"""Of one decompressed stream."""

KINDS = {
    name.encode(): name
    for name in (
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "ping",
        "error",
    )
}


_READ = frozenset(KINDS.values()) - {"content_block_delta", "ping"}
"""Kinds whose data somebody behind this relies on as an object; deltas are checked by who reads them."""


class _Typed(msgspec.Struct):
    type: str = ""


_type_of = msgspec.json.Decoder(_Typed)


class MessageStream:
    """The events of one answer. ``read`` gives them by the reads that brought them."""

    def __init__(
        self,
        response: aiohttp.ClientResponse,
        progress: Progress,
        model: str,
        secret: str | None,
        first_timeout: float,
        idle_timeout: float,
    ) -> None:
        self._response = response
        self._content = response.content
        self._progress = progress
        self._model = encode(model)
        self._secret = secret
        self._idle_timeout = idle_timeout
        self._splitter = Splitter()
        encoding = response.headers.get("content-encoding", "identity")
        self._inflater = None if encoding == "identity" else Inflater(encoding, MOST_BYTES)
        self._begun = self._message_begun = self._reading = False
        self._loop = asyncio.get_running_loop()
        self._deadline = self._loop.time() + first_timeout
        self._timer = self._loop.call_at(self._deadline, self._tick)
        self._first: list[Event] = []
        self._broken: UpstreamFault | None = None
        self._late = False

    async def wait_for_first_event(self) -> None:
        """Wait for the first events; the next ``read`` gives them. Raises UpstreamFault."""
        self._first = await self.read()

    async def read(self) -> list[Event]:
        """The events of the next read; an empty list at the end of a whole answer. Raises UpstreamFault.

        An upstream's own pings before its first event are left out.
        """
        if self._first:
            first, self._first = self._first, []
            return first
        while not self._progress.stopped:
            if self._broken is not None:
                raise self._broken
            data = await self._read()
            if not data:
                return self._ended(timed_out("silence") if self._late else cut_off("end of file"))
            events = self._events(data)
            if events:
                return events
        return []

    async def _read(self) -> bytes:
        if self._begun:
            self._wait(TAIL_TIMEOUT if self._progress.in_tail else self._idle_timeout)
        self._reading = True
        try:
            data = await self._content.readany()
            if data and self._inflater is not None:
                return self._inflater.feed(data) or await self._read()
            if not data and self._inflater is not None:
                self._inflater.end()
            return data
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if self._late or self._progress.in_tail:
                return b""
            raise cut_off(type(error).__name__) from error
        except UpstreamFault:
            if self._progress.in_tail:
                return b""
            raise
        finally:
            self._reading = False

    def _events(self, data: bytes) -> list[Event]:
        events: list[Event] = []
        observe = self._progress.observe
        try:
            for frame in self._splitter.feed(data):
                event = self._event(frame)
                if event is not None:
                    if event.kind == "message_stop" and not self._progress.in_tail:
                        raise cut_off("no stop_reason")
                    observe(event)
                    events.append(event)
                    self._begun = True
                    if self._progress.stopped:
                        break
        except GatewayError as error:  # what stood before it goes out first
            fault = error if isinstance(error, UpstreamFault) else no_messages_answer(error.message)
            if not events:
                raise fault from None
            self._broken = fault
        return events

    def _event(self, frame: Frame) -> Event | None:
        kind = KINDS.get(frame.name)
        if kind is None:
            kind = self._kind_of(frame)
        if kind == "error":
            raise fault_of_event(frame.data, self._secret)
        if kind == "ping" and not self._begun:
            return None
        if kind == "message_start":
            if self._message_begun:
                return None  # a second one
            self._message_begun = True
            return Event(kind, raw=self._renamed(frame.data))
        event = Event(kind, raw=frame.data)
        if kind in _READ:
            _check(event)
        return event

    def _kind_of(self, frame: Frame) -> str:
        """The kind of an event without a known name: its type, else the name that it has."""
        try:
            kind = _type_of.decode(frame.data).type
        except (msgspec.MsgspecError, UnicodeDecodeError):
            kind = _type_of_odd(frame.data)
        kind = kind or frame.name.decode("utf-8", "replace")
        if not kind or not kind.isprintable():
            raise no_messages_answer("an event without a type")
        return kind

    def _renamed(self, raw: bytes) -> bytes:
        """A message_start with the name that the client used for the model."""
        event = Event("message_start", raw=raw)
        _check(event)
        if not isinstance(event.data.get("message"), dict):
            raise no_messages_answer("a message_start without a message")
        for outer in members(raw, raw.index(b"{")):
            if outer.key == "message":
                for inner in members(raw, outer.at):
                    if inner.key == "model":
                        return replaced(raw, inner.at, inner.end, self._model)
        return raw

    def _ended(self, fault: UpstreamFault) -> list[Event]:
        """The stream has no more bytes: complete where there was a stop_reason, an error where not."""
        if not self._progress.in_tail:
            raise fault
        event = Event("message_stop", raw=b'{"type":"message_stop"}')
        self._progress.observe(event)
        return [event]

    def _wait(self, seconds: float) -> None:
        """Move the deadline; the timer follows by itself, unless it would come too late."""
        self._deadline = self._loop.time() + seconds
        if self._deadline < self._timer.when():
            self._timer.cancel()
            self._timer = self._loop.call_at(self._deadline, self._tick)

    def _tick(self) -> None:
        if not self._reading:  # the client takes its time, not the upstream
            self._deadline = self._loop.time() + self._idle_timeout
        if self._deadline - self._loop.time() > 0.001:
            self._timer = self._loop.call_at(self._deadline, self._tick)
            return
        self._late = True
        self._content.set_exception(TimeoutError("the upstream is silent"))

    @property
    def at_end(self) -> bool:
        """Whether the body has been read to its end."""
        return self._content.at_eof()

    async def drain(self) -> None:
        """Wait briefly for the end of the body, so that the connection can be used again."""
        self._timer.cancel()
        try:
            async with asyncio.timeout(DRAIN_TIMEOUT):
                while await self._content.readany():
                    pass
        except (aiohttp.ClientError, TimeoutError, OSError):
            pass
        finally:
            self._response.close()

    def close(self) -> None:
        """Leave the upstream at once."""
        self._timer.cancel()
        self._response.close()


def _type_of_odd(data: bytes) -> str:
    try:
        return _type_of.decode(without_lone_surrogates(data)).type
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""


def _check(event: Event) -> None:
    try:
        data = event.data
    except JsonError:
        data = None
    if not isinstance(data, dict):
        raise no_messages_answer(f"a {event.kind} that is no object")
