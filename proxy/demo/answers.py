"""The demo's answer to a request: composed whole, then cut where a stop sequence or the length limit falls.

A stream is made of the same answer (`stream.py`), so plain and streamed answers can't differ. Message ids are unique;
all else is the same for the same request in the same state of the prompt cache.
"""

import base64
import secrets
from collections.abc import Iterable
from dataclasses import dataclass

import orjson

from proxy.demo.prompt import Json, count_tokens, first_tokens, newest_user_message, newest_user_text
from proxy.demo.prompt_cache import MINIMUM_TOKENS, CountedPrompt, InputTokens
from proxy.demo.schema_instance import schema_instance
from proxy.demo.tool_calls import argument_json, calls_for, holds_tool_result

MOST_ECHOED = 200  # characters of the user's words
MOST_RESULT = 500  # characters of the tools' results


@dataclass(frozen=True, slots=True)
class _Ending:
    content: list[Json]
    stop_reason: str
    stop_sequence: str | None = None


def compose_content(body: Json, prompt: CountedPrompt, seen: InputTokens) -> list[Json]:
    """The blocks of the answer, before any limit: thinking where asked, then calls, or else one text."""
    thinking = [_thinking_block(body, seen)] if _thinks(body) else []
    calls = calls_for(body, prompt.digests[-1] if prompt.digests else b"")
    return thinking + (calls or [{"type": "text", "text": _text(body, seen)}])


def message_for(body: Json, content: list[Json], seen: InputTokens) -> Json:
    """The whole Messages answer: content within the limits, stop_reason and usage."""
    ending = _within_limits(content, int(body["max_tokens"]), body.get("stop_sequences") or [])
    usage = _usage(ending.content, seen, thinks=_thinks(body))
    omitted = (body.get("thinking") or {}).get("display") == "omitted"
    return {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "model": body["model"],
        "content": [
            {**block, "thinking": ""} if omitted and "thinking" in block else block for block in ending.content
        ],
        "stop_reason": ending.stop_reason,
        "stop_sequence": ending.stop_sequence,
        "usage": usage,
    }


def _thinks(body: Json) -> bool:
    thinking = body.get("thinking")
    return isinstance(thinking, dict) and thinking.get("type") in ("adaptive", "enabled")


def _thinking_block(body: Json, seen: InputTokens) -> Json:
    text = f"The user sent {_counted(seen.all, 'token')}. I am the demo: I look at the rules and choose an answer."
    if holds_tool_result(newest_user_message(body)):
        text += " The tools have answered, so I can."
    signature = base64.b64encode(f"demo signature {seen.all}".encode()).decode()
    return {"type": "thinking", "thinking": text, "signature": signature}


def _text(body: Json, seen: InputTokens) -> str:
    form = (body.get("output_config") or {}).get("format")
    if form is not None:
        path = "output_config.format.schema"
        instance = schema_instance(form["schema"], newest_user_text(body), path=path, optional_too=True)
        return orjson.dumps(instance).decode()
    newest = newest_user_message(body)
    if newest is not None and holds_tool_result(newest):
        return f"{_results_text(newest)} {_seen_text(body, seen)}"
    return (
        "Hello! I am the demo upstream: there is no model behind me, yet your request took the whole way through the "
        f"gateway. {_echo(newest_user_text(body))} {_seen_text(body, seen)}\n\n{_suggestions(seen)}"
    )


def _echo(user_text: str) -> str:
    words = " ".join(user_text.split())
    if not words:
        return "You sent no text."
    return f"You said: “{_shortened(words, MOST_ECHOED)}”."


def _seen_text(body: Json, seen: InputTokens) -> str:
    messages = _counted(len(body["messages"]), "message")
    return f"I saw {messages} and {_counted(seen.all, 'input token')}, {seen.read} of them read from the cache."


def _suggestions(seen: InputTokens) -> str:
    cached = "send one more turn, and it is read from the cache"
    if seen.all < MINIMUM_TOKENS:
        cached = f"send a second turn and a third to see the prompt cached (from {MINIMUM_TOKENS} tokens on)"
    return (
        f"Things to try: {cached}; write `fault 529` or `fault cut` to see a failure, `slow` to watch a stream; "
        "give me tools, and I call one (with the word `parallel`, all of them)."
    )


def _results_text(message: Json) -> str:
    texts = [_result_text(block) for block in message["content"] if block["type"] == "tool_result"]
    answer = _shortened("; ".join(" ".join(text.split()) or "nothing" for text in texts), MOST_RESULT)
    return f"{'The tool' if len(texts) == 1 else 'The tools'} answered: {answer}."


def _result_text(block: Json) -> str:
    content = block.get("content") or ""
    if isinstance(content, str):
        return content
    return " ".join(part["text"] if part["type"] == "text" else f"[{part['type']}]" for part in content)


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most].rstrip()}…"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _within_limits(content: list[Json], max_tokens: int, stop_sequences: list[str]) -> _Ending:
    """What is said before the first stop sequence or the length limit, whichever comes first.

    A call that doesn't fit whole is left out: half of one would be no object.
    """
    kept: list[Json] = []
    room = max_tokens
    for block in content:
        if block["type"] == "tool_use":
            if block_tokens(block) > room:
                return _Ending(kept, "max_tokens")
            kept.append(block)
        else:
            kind = block["type"]
            stop = _first_stop(block["text"], stop_sequences) if kind == "text" else None
            text = block[kind] if stop is None else block[kind].partition(stop)[0]
            fitting = first_tokens(text, room)
            if fitting:
                kept.append({**block, kind: fitting})
            if fitting != text:
                return _Ending(kept, "max_tokens")
            if stop is not None:
                return _Ending(kept, "stop_sequence", stop)
        room -= block_tokens(block)
    return _Ending(kept, "tool_use" if kept and kept[-1]["type"] == "tool_use" else "end_turn")


def _first_stop(text: str, stop_sequences: list[str]) -> str | None:
    found = [stop for stop in stop_sequences if stop in text]
    return min(found, key=text.index, default=None)


def block_tokens(block: Json) -> int:
    """Output tokens of one block of an answer."""
    if block["type"] == "tool_use":
        return count_tokens(block["name"]) + count_tokens(argument_json(block["input"]))
    return count_tokens(block[block["type"]])


def _usage(content: Iterable[Json], seen: InputTokens, *, thinks: bool) -> Json:
    by_block = [(block["type"], block_tokens(block)) for block in content]
    usage: Json = {
        "input_tokens": seen.rest,
        "cache_creation_input_tokens": seen.written_5m + seen.written_1h,
        "cache_read_input_tokens": seen.read,
        "cache_creation": {
            "ephemeral_5m_input_tokens": seen.written_5m,
            "ephemeral_1h_input_tokens": seen.written_1h,
        },
        "output_tokens": sum(tokens for _, tokens in by_block),
        "service_tier": "standard",
    }
    if thinks:
        thought = sum(tokens for kind, tokens in by_block if kind == "thinking")
        usage["output_tokens_details"] = {"thinking_tokens": thought}
    return usage
