from collections.abc import Sequence

from pydantic import Field

from proxy.answer import Answer
from proxy.document import Event
from proxy.exchange import Exchange
from proxy.plugin import OutputPlugin, Plugin, Route, Settings


class RedactionSettings(Settings):
    """What to hide."""

    word: str = Field(min_length=1)
    """The word that no client is to see."""


class Redaction(Plugin):
    """Hides a word in every answer."""

    name = "redaction"
    routes = frozenset({Route.CHAT_COMPLETIONS, Route.MESSAGES})
    sees = "messages"
    Settings = RedactionSettings
    settings: RedactionSettings

    async def on_request(self, exchange: Exchange) -> OutputPlugin:
        return RedactionOutput(self.settings.word)


class RedactionOutput(OutputPlugin):
    """One answer. What may be the beginning of the word is held back until more has come."""

    events = frozenset({"content_block_start", "content_block_delta", "content_block_stop", "message_delta"})

    def __init__(self, word: str) -> None:
        self._word = word
        self._held: dict[int, str] = {}  # by block: some providers open one before they close the last

    async def on_answer(self, answer: Answer) -> None:
        if any(self._word in block.get("text", "") for block in answer.data["content"]):
            for block in answer.change()["content"]:
                if "text" in block:
                    block["text"] = self._hidden(block["text"])

    def on_event(self, event: Event) -> Sequence[Event]:
        if event.kind == "content_block_stop":
            return [*self._released(event.data["index"]), event]
        if event.kind == "message_delta":
            return [*(held for index in list(self._held) for held in self._released(index)), event]
        holder = "delta" if event.kind == "content_block_delta" else "content_block"
        text = event.data[holder].get("text")
        if text is None:  # a tool call, thinking
            return [event]
        index = event.data["index"]
        known = self._hidden(self._held.pop(index, "") + text)
        cut = len(known) - self._beginning_of_the_word_at_the_end_of(known)
        if cut < len(known):
            self._held[index] = known[cut:]
        if known[:cut] != text:
            event.change()[holder]["text"] = known[:cut]
        return [event]

    def _hidden(self, text: str) -> str:
        return text.replace(self._word, "[hidden]")

    def _beginning_of_the_word_at_the_end_of(self, text: str) -> int:
        lengths = range(len(self._word) - 1, 0, -1)
        return next((length for length in lengths if text.endswith(self._word[:length])), 0)

    def _released(self, index: int) -> list[Event]:
        text = self._held.pop(index, "")
        delta = {"type": "text_delta", "text": text}
        data = {"type": "content_block_delta", "index": index, "delta": delta}
        return [Event("content_block_delta", data)] if text else []
