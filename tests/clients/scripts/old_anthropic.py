"""The anthropic SDK as it was in the summer of 2024: the key in ``x-api-key``, and no structured output yet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from anthropic import Anthropic

from tests.clients.scripts.play import PARALLEL, TASK, broken_off, failures, play, result_of_tool

MODEL = TASK["model"]
TOOLS: Any = [{"name": name, "input_schema": TASK["city"]} for name in TASK["tools"]]


def client(key: str = TASK["key"]) -> Any:
    return Anthropic(api_key=key, base_url=TASK["messages_url"], max_retries=0, timeout=30)


def usual(content: Any, **ask: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 1000, "messages": [{"role": "user", "content": content}], **ask}


def told(message: Any) -> dict[str, Any]:
    usage = message.usage
    return {"text": message.content[0].text, "input": usage.input_tokens, "output": usage.output_tokens}


def streamed() -> dict[str, Any]:
    with client().messages.stream(**usual("Good morning!")) as stream:
        text = "".join(stream.text_stream)
        return {**told(stream.get_final_message()), "text": text}


def tools(complete: Any) -> dict[str, Any]:
    messages: list[Any] = [{"role": "user", "content": PARALLEL}]
    reply = complete(messages)
    calls = [block for block in reply.content if block.type == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": result_of_tool(call.name, call.input)}
        for call in calls
    ]
    messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": results}]
    return {"calls": [[call.name, call.input] for call in calls], "text": complete(messages).content[0].text}


def completed(messages: list[Any]) -> Any:
    return client().messages.create(**usual("", messages=messages, tools=TOOLS))


def completed_by_helper(messages: list[Any]) -> Any:
    with client().messages.stream(**usual("", messages=messages, tools=TOOLS)) as stream:
        return stream.get_final_message()


def seen(kind: str, media_type: str, data: str) -> dict[str, Any]:
    part = {"type": kind, "source": {"type": "base64", "media_type": media_type, "data": data}}
    content = [{"type": "text", "text": "What is this?"}, part]
    return {"input": client().messages.create(**usual(content)).usage.input_tokens}


def cached() -> dict[str, Any]:
    system = [{"type": "text", "text": TASK["long_text"], "cache_control": {"type": "ephemeral"}}]
    asked = usual("Who are you?", system=system)
    client().beta.prompt_caching.messages.create(**asked)
    usage = client().beta.prompt_caching.messages.create(**asked).usage
    return {"read": usage.cache_read_input_tokens}


def request_id() -> dict[str, Any]:
    answer = client().messages.with_raw_response.create(**usual("Hello!"))
    return {"id": answer.headers["request-id"]}


def left() -> None:
    with client().messages.stream(**usual("slow")) as stream:
        next(iter(stream.text_stream))


def pieces_of(text: str) -> Iterator[str]:
    with client().messages.stream(**usual(text)) as stream:
        yield from stream.text_stream


def ask(key: str, model: str, text: str) -> Any:
    return client(key).messages.create(**usual(text, model=model))


play(
    {
        "plain": lambda: told(client().messages.create(**usual("Good morning!"))),
        "streamed": streamed,
        "tools": lambda: tools(completed),
        "streamed tools": lambda: tools(completed_by_helper),
        "image": lambda: seen("image", "image/png", TASK["image"]),
        "PDF": lambda: seen("document", "application/pdf", TASK["pdf"]),
        "cached": cached,
        "request id": request_id,
        "broken by an error": lambda: broken_off(pieces_of("fault error")),
        "broken by a cut": lambda: broken_off(pieces_of("fault cut")),
        "left": left,
        **failures(ask),
    }
)
