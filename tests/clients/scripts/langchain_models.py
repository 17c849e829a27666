"""LangChain's chat models, ChatOpenAI or ChatAnthropic as the argument says, with another base URL alone."""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from typing import Any

from tests.clients.material import City
from tests.clients.scripts.play import (
    PARALLEL,
    PORTO,
    TASK,
    Case,
    broken_off,
    failures,
    play,
    raised_by,
    result_of_tool,
)

TOOLS = [{"name": name, "description": f"Tells the {name}.", "input_schema": TASK["city"]} for name in TASK["tools"]]


def openai_model(key: str, name: str, **settings: Any) -> Any:
    from langchain_openai import ChatOpenAI

    settings = {"stream_usage": True, "include_response_headers": True, **settings}
    return ChatOpenAI(model=name, base_url=TASK["openai_url"], api_key=key, max_retries=0, timeout=30, **settings)


def anthropic_model(key: str, name: str, **settings: Any) -> Any:
    from langchain_anthropic import ChatAnthropic

    return ChatAnthropic(model=name, base_url=TASK["messages_url"], api_key=key, max_retries=0, timeout=30, **settings)


make: Callable[..., Any] = {"openai": openai_model, "messages": anthropic_model}[sys.argv[1]]


def model(name: str = TASK["model"], **settings: Any) -> Any:
    return make(TASK["key"], name, **settings)


def told(message: Any) -> dict[str, Any]:
    usage = message.usage_metadata
    return {"text": message.text, "input": usage["input_tokens"], "output": usage["output_tokens"]}


def whole(chunks: list[Any]) -> Any:
    added = chunks[0]
    for chunk in chunks[1:]:
        added += chunk
    return added


async def streamed_awaited() -> dict[str, Any]:
    return told(whole([chunk async for chunk in model().astream("Good morning!")]))


def streamed_message(messages: list[Any]) -> Any:
    return whole(list(model().bind_tools(TOOLS).stream(messages)))


def tools(complete: Callable[[list[Any]], Any]) -> dict[str, Any]:
    messages: list[Any] = [{"role": "user", "content": PARALLEL}]
    reply = complete(messages)
    messages.append(reply)
    for call in reply.tool_calls:
        content = result_of_tool(call["name"], call["args"])
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
    return {"calls": [[call["name"], call["args"]] for call in reply.tool_calls], "text": complete(messages).text}


def structured(name: str, method: str) -> Any:
    return model(name).with_structured_output(City, method=method).invoke(PORTO).model_dump()


def seen(part: dict[str, Any]) -> dict[str, Any]:
    content = [{"type": "text", "text": "What is this?"}, part]
    return {"input": told(model().invoke([{"role": "user", "content": content}]))["input"]}


def request_id() -> dict[str, Any]:
    headers = model().invoke("Hello!").response_metadata["headers"]
    return {"id": headers["x-request-id"]}


def tokens() -> int:
    from langchain_core.messages import HumanMessage

    return int(model().get_num_tokens_from_messages([HumanMessage("Hello!")]))


def left() -> None:
    stream = model().stream("slow")
    while not next(stream).text:
        pass
    stream.close()


def pieces_of(text: str) -> Iterator[str]:
    for chunk in model().stream(text):
        if chunk.text:
            yield chunk.text


openai_only: dict[str, Case] = {"request id": request_id}
anthropic_only: dict[str, Case] = {"tokens": tokens}
play(
    {
        "plain": lambda: told(model().invoke("Good morning!")),
        "streamed": lambda: told(whole(list(model().stream("Good morning!")))),
        "streamed, awaited": lambda: asyncio.run(streamed_awaited()),
        "tools": lambda: tools(model().bind_tools(TOOLS).invoke),
        "streamed tools": lambda: tools(streamed_message),
        "structured": lambda: structured(TASK["model"], "json_schema"),
        "structured by a forced call": lambda: structured(TASK["forcible"], "function_calling"),
        "image": lambda: seen({"type": "image", "base64": TASK["image"], "mime_type": "image/png"}),
        "PDF": lambda: seen(
            {"type": "file", "base64": TASK["pdf"], "mime_type": "application/pdf", "filename": "a.pdf"}
        ),
        "request id of an error": lambda: {"id": raised_by(lambda: model("gpt-9").invoke("Hello!"))["request_id"]},
        "broken by an error": lambda: broken_off(pieces_of("fault error")),
        "broken by a cut": lambda: broken_off(pieces_of("fault cut")),
        "left": left,
        **(openai_only if sys.argv[1] == "openai" else anthropic_only),
        **failures(lambda key, name, text: make(key, name).invoke(text)),
    }
)
