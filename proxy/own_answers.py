"""An answer that did not come as it was asked for: a plugin's own, or a whole one where a stream was wanted.

What a plugin gave stays as it is: it may give the same to many.
"""

from __future__ import annotations

from collections.abc import Sequence

from proxy.answer import Answer
from proxy.dialects import Dialect
from proxy.document import Event
from proxy.exchange import Exchange


def filled(answer: Answer, dialect: Dialect, exchange: Exchange) -> Answer:
    """A whole answer with its ``data``, in the format of the dialect."""
    if answer.words is not None:
        return Answer(dialect.answer_of_text(answer.words, exchange), billed=answer.billed)
    if answer.events is not None:
        return Answer(dialect.answer_of(answer.events, exchange), billed=answer.billed)
    return Answer(raw=answer.encoded(), billed=answer.billed)


def events_of(answer: Answer, dialect: Dialect, exchange: Exchange) -> Sequence[Event]:
    """The events that the answer is streamed as."""
    if answer.events is not None:
        return [Event(event.kind, raw=event.encoded()) for event in answer.events]
    return dialect.events_of(filled(answer, dialect, exchange).data, exchange)
