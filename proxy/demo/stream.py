"""An answer as the events of a stream, in the order and with the counts that the Messages API sends."""

import re
from collections.abc import Iterator

import orjson

from proxy.demo.prompt import Json
from proxy.demo.tool_calls import argument_json

WORDS = re.compile(r"\s*\S+\s*|\s+")
JSON_PIECE = 16  # characters of a call's arguments in one delta
COUNTS_AT_END = (
    *("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens"),
    *("output_tokens", "output_tokens_details"),
)


def events_of(message: Json) -> Iterator[Json]:
    """The events of one whole answer, a `ping` after the first as the API sends it."""
    usage = message["usage"]
    at_start = {**usage, "output_tokens": 1}
    at_start.pop("output_tokens_details", None)
    start = {**message, "content": [], "stop_reason": None, "stop_sequence": None, "usage": at_start}
    yield {"type": "message_start", "message": start}
    yield {"type": "ping"}
    for index, block in enumerate(message["content"]):
        yield {"type": "content_block_start", "index": index, "content_block": _opened(block)}
        for delta in _deltas(block):
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    ending = {"stop_reason": message["stop_reason"], "stop_sequence": message["stop_sequence"]}
    at_end = {name: usage[name] for name in COUNTS_AT_END if name in usage}
    yield {"type": "message_delta", "delta": ending, "usage": at_end}
    yield {"type": "message_stop"}


def frame(event: Json) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (event["type"].encode(), orjson.dumps(event))


def _opened(block: Json) -> Json:
    match block["type"]:
        case "text":
            return {"type": "text", "text": ""}
        case "thinking":
            return {"type": "thinking", "thinking": "", "signature": ""}
    return {**block, "input": {}}


def _deltas(block: Json) -> Iterator[Json]:
    match block["type"]:
        case "text":
            for word in WORDS.findall(block["text"]):
                yield {"type": "text_delta", "text": word}
        case "thinking":
            for word in WORDS.findall(block["thinking"]):
                yield {"type": "thinking_delta", "thinking": word}
            yield {"type": "signature_delta", "signature": block["signature"]}
        case "tool_use":
            yield {
                "type": "input_json_delta",
                "partial_json": "",
            }  # the API begins so, and a call without arguments ends so
            text = argument_json(block["input"]) if block["input"] else ""
            for at in range(0, len(text), JSON_PIECE):
                yield {"type": "input_json_delta", "partial_json": text[at : at + JSON_PIECE]}
