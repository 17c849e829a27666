"""The events of a streamed message become chunks.

Deltas are nearly all that a stream is made of: their text is taken out of the provider's bytes as a literal and put
between prepared halves of a chunk, never decoded. Blocks are told apart by the provider's index, since some open a
block before they close the last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from plugins.chat_completions.response import stop_reason_to_finish_reason
from proxy.dialects.openai import Chunks, usage_object
from proxy.document import Event
from proxy.errors import GatewayError, Kind
from proxy.exchange import Exchange
from proxy.jsontext import encode, without_lone_surrogates

_NONE = msgspec.Raw(b'""')


class _Delta(msgspec.Struct, gc=False):
    type: str = ""
    text: msgspec.Raw = _NONE
    partial_json: msgspec.Raw = _NONE


class _BlockDelta(msgspec.Struct, gc=False):
    delta: _Delta
    index: int = 0


_deltas = msgspec.json.Decoder(_BlockDelta)


class _Call:
    """A tool call that is being streamed."""

    __slots__ = ("given", "index", "with_arguments")

    def __init__(self, index: int, given: bytes) -> None:
        self.index = index
        self.given = given
        """The arguments that stood at the call's beginning, as a JSON text: they count where no delta follows."""
        self.with_arguments = False


class EventsToChunks:
    """Turns the events of one message into chunks."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._chunks = Chunks(exchange)
        self._calls: dict[int, _Call] = {}
        self._stop_reason: object = None
        self._begun = False
        self._translators: dict[str, Callable[[Event], Sequence[Event]]] = {
            "message_start": self._start,
            "content_block_start": self._block_start,
            "content_block_delta": self._block_delta,
            "content_block_stop": self._block_stop,
            "message_delta": self._message_delta,
            "message_stop": self._stop,
        }

    def chunks_of(self, event: Event) -> Sequence[Event]:
        """The chunks of one event: often one, none for what OpenAI's format lacks."""
        translate = self._translators.get(event.kind)
        chunks = translate(event) if translate is not None else ()
        if chunks and not self._begun:
            self._begun = True
            if event.kind != "message_start":  # an upstream that leaves it out
                return [self._chunks.role(), *chunks]
        return chunks

    def _start(self, event: Event) -> Sequence[Event]:
        return (self._chunks.role(),)

    def _block_start(self, event: Event) -> Sequence[Event]:
        block = event.data.get("content_block") or {}
        kind = block.get("type")
        if kind == "text" and block.get("text"):
            return (self._chunks.text(encode(block["text"])),)
        if kind != "tool_use":
            return ()
        call = _Call(len(self._calls), encode(block.get("input") or {}))
        self._calls[event.data.get("index", 0)] = call
        return (self._chunks.tool_call(call.index, block.get("id") or "", block.get("name") or ""),)

    def _block_delta(self, event: Event) -> Sequence[Event]:
        read = _read_delta(event.encoded())
        delta = read.delta
        if delta.type == "text_delta":
            literal = bytes(delta.text)
            return (self._chunks.text(literal),) if _is_piece(literal) else ()
        if delta.type != "input_json_delta":
            return ()
        literal, call = bytes(delta.partial_json), self._calls.get(read.index)
        if call is None or not _is_piece(literal):
            return ()
        call.with_arguments = True
        return (self._chunks.arguments(call.index, literal),)

    def _block_stop(self, event: Event) -> Sequence[Event]:
        call = self._calls.get(event.data.get("index", 0))
        return self._missing_arguments([call] if call is not None else [])

    def _message_delta(self, event: Event) -> Sequence[Event]:
        self._stop_reason = (event.data.get("delta") or {}).get("stop_reason") or self._stop_reason
        return ()

    def _stop(self, event: Event) -> Sequence[Event]:
        chunks = self._missing_arguments(list(self._calls.values()))
        chunks.append(self._chunks.finish(stop_reason_to_finish_reason(self._stop_reason)))
        if self._chunks.with_usage:
            chunks.append(self._chunks.usage(usage_object(self._exchange.usage)))
        return chunks

    def _missing_arguments(self, calls: list[_Call]) -> list[Event]:
        chunks = []
        for call in calls:
            if not call.with_arguments:
                call.with_arguments = True
                chunks.append(self._chunks.arguments(call.index, encode(call.given.decode())))
        return chunks


def _is_piece(literal: bytes) -> bool:
    """Whether a JSON literal is a text that holds something."""
    return len(literal) > 2 and literal.startswith(b'"')


def _read_delta(raw: bytes) -> _BlockDelta:
    try:
        if not raw.isascii():
            raw.decode()  # slices are not checked by who skips over them
        try:
            return _deltas.decode(raw)
        except msgspec.MsgspecError:
            return _deltas.decode(without_lone_surrogates(raw))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise GatewayError(Kind.INTERNAL, "the provider sent an event that can't be read") from error
