"""Failures on demand: the words `fault NAME` in the newest user message make the demo fail in that way.

Only the newest message counts, so that a conversation that holds the words further up recovers by its next message.
"""

import re
from collections.abc import Iterable, Iterator

from proxy.demo.prompt import Json

STATUS_FAULTS = ("400", "401", "402", "403", "404", "413", "429", "500", "503", "504", "529")
OTHER_FAULTS = (
    "error",  # a stream breaks with an `error` event; a plain answer is a 529
    "cut",  # the connection is dropped, in mid-stream or instead of an answer
    "hang",  # no answer, not even its head, until the client leaves
    "stall",  # a stream stops in its middle for ever; a plain answer hangs
)
FAULT = re.compile(rf"\bfault\s+({'|'.join(STATUS_FAULTS + OTHER_FAULTS)})\b", re.IGNORECASE)
DELTAS_BEFORE_BREAK = 3


def fault_in(text: str) -> str | None:
    """The fault that the text asks for: a status, or one of OTHER_FAULTS."""
    found = FAULT.search(text)
    return found.group(1).lower() if found else None


def before_break(events: Iterable[Json]) -> Iterator[Json]:
    """The events of a stream that breaks: up to its third delta, and never its ending."""
    deltas = 0
    for event in events:
        deltas += event["type"] == "content_block_delta"
        if event["type"] == "message_delta":
            return
        yield event
        if deltas == DELTAS_BEFORE_BREAK:
            return
