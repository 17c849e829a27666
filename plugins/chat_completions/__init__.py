"""Translates OpenAI's Chat Completions to Messages, and the answer back.

The request side checks and translates the whole request at once; the answer side works on the bytes of the
provider's events where nobody changed them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from plugins.chat_completions.description import description
from plugins.chat_completions.fields import compat
from plugins.chat_completions.request import translate
from plugins.chat_completions.response import message_to_completion
from plugins.chat_completions.stream import EventsToChunks
from proxy.answer import Answer
from proxy.document import Event
from proxy.exchange import Exchange
from proxy.plugin import Format, OutputPlugin, Plugin, Route, Sees


class ChatCompletions(Plugin):
    """Translates Chat Completions to Messages, and the answer back."""

    name: ClassVar[str] = "chat_completions"
    opens_leaves: ClassVar[bool] = False
    routes: ClassVar[frozenset[Route]] = frozenset({Route.CHAT_COMPLETIONS})
    sees: ClassVar[Sees] = "openai"
    turns_into: ClassVar[Format] = "messages"

    def pages(self) -> Mapping[str, Any]:
        return {"/api/compat": compat()}

    def describe(self) -> Mapping[str, Any]:
        return description()

    async def on_request(self, exchange: Exchange) -> OutputPlugin:
        translation = translate(exchange.body, exchange.model)
        exchange.replace(translation.body)
        exchange.ignored |= translation.ignored
        exchange.adjusted.update(translation.adjusted)
        if exchange.session is None:
            exchange.session = translation.session
        elif translation.session is not None:
            exchange.ignored.add("prompt_cache_key")
        exchange.path_of = translation.path_of
        return ChatCompletionsOutput(exchange)


class ChatCompletionsOutput(OutputPlugin):
    """A message becomes a completion, the events of a message become chunks."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._stream = EventsToChunks(exchange) if exchange.stream else None

    async def on_answer(self, answer: Answer) -> None:
        answer.replace(message_to_completion(answer.data, self._exchange))

    def on_event(self, event: Event) -> Sequence[Event]:
        if self._stream is None:
            raise RuntimeError("an event of an answer that is not streamed")
        return self._stream.chunks_of(event)
