"""An answer that did not come as it was asked for: a plugin's own, or a whole one where a stream was wanted."""

from __future__ import annotations

from collections.abc import Sequence

from proxy.answer import Answer
from proxy.dialects import Dialect
from proxy.document import Event
from proxy.exchange import Exchange


def fill(answer: Answer, dialect: Dialect, exchange: Exchange) -> None:
    """Give the answer its ``data``, in the format of the dialect."""
    if answer.words is not None:
        answer.replace(dialect.answer_of_text(answer.words, exchange))
    elif answer.events is not None:
        answer.replace(dialect.answer_of(answer.events, exchange))


def events_of(answer: Answer, dialect: Dialect, exchange: Exchange) -> Sequence[Event]:
    """The events that the answer is streamed as."""
    if answer.events is None:
        fill(answer, dialect, exchange)
        answer.events = dialect.events_of(answer.data, exchange)
    return answer.events
