"""The openai SDK as it was in the summer of 2024: ``parse`` and the stream helper were in beta."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from openai import OpenAI

from tests.clients.material import City
from tests.clients.scripts.play import PARALLEL, PORTO, TASK, broken_off, failures, play, result_of_tool

MODEL = TASK["model"]
TOOLS: Any = [{"type": "function", "function": {"name": name, "parameters": TASK["city"]}} for name in TASK["tools"]]


def client(key: str = TASK["key"]) -> Any:
    return OpenAI(api_key=key, base_url=TASK["openai_url"], max_retries=0, timeout=30)


def create(content: Any, **ask: Any) -> Any:
    asked = {"model": MODEL, "messages": [{"role": "user", "content": content}], **ask}
    return client().chat.completions.create(**asked)


def told(completion: Any) -> dict[str, Any]:
    usage = completion.usage
    return {
        "text": completion.choices[0].message.content,
        "input": usage.prompt_tokens,
        "output": usage.completion_tokens,
    }


def streamed() -> dict[str, Any]:
    chunks = list(create("Good morning!", stream=True, stream_options={"include_usage": True}))
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    usage = chunks[-1].usage
    return {"text": "".join(pieces), "input": usage.prompt_tokens, "output": usage.completion_tokens}


def tools(complete: Any) -> dict[str, Any]:
    messages: list[Any] = [{"role": "user", "content": PARALLEL}]
    reply = complete(messages).choices[0].message
    messages.append(reply)
    for call in reply.tool_calls:
        result = result_of_tool(call.function.name, json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    calls = [[call.function.name, json.loads(call.function.arguments)] for call in reply.tool_calls]
    return {"calls": calls, "text": complete(messages).choices[0].message.content}


def completed(messages: list[Any]) -> Any:
    return client().chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)


def completed_by_helper(messages: list[Any]) -> Any:
    strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]  # the helper insists
    with client().beta.chat.completions.stream(model=MODEL, messages=messages, tools=strict) as stream:
        return stream.get_final_completion()


def structured() -> Any:
    messages = [{"role": "user", "content": PORTO}]
    parsed = client().beta.chat.completions.parse(model=MODEL, messages=messages, response_format=City)
    return parsed.choices[0].message.parsed.model_dump()


def seen(part: dict[str, Any]) -> dict[str, Any]:
    return {"input": create([{"type": "text", "text": "What is this?"}, part]).usage.prompt_tokens}


def file_part() -> dict[str, Any]:
    return {"type": "file", "file": {"filename": "a.pdf", "file_data": f"data:application/pdf;base64,{TASK['pdf']}"}}


def request_id() -> dict[str, Any]:
    answer = client().chat.completions.with_raw_response.create(
        model=MODEL, messages=[{"role": "user", "content": "Hello!"}]
    )
    return {"id": answer.headers["x-request-id"]}  # answers had no _request_id yet; errors had theirs


def left() -> None:
    stream = create("slow", stream=True)
    next(iter(stream))
    stream.close()


def pieces_of(text: str) -> Iterator[str]:
    for chunk in create(text, stream=True):
        yield chunk.choices[0].delta.content or ""


def ask(key: str, model: str, text: str) -> Any:
    return client(key).chat.completions.create(model=model, messages=[{"role": "user", "content": text}])


play(
    {
        "plain": lambda: told(create("Good morning!")),
        "streamed": streamed,
        "tools": lambda: tools(completed),
        "streamed tools": lambda: tools(completed_by_helper),
        "structured": structured,
        "image": lambda: seen({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{TASK['image']}"}}),
        "PDF": lambda: seen(file_part()),
        "request id": request_id,
        "broken by an error": lambda: broken_off(pieces_of("fault error")),
        "broken by a cut": lambda: broken_off(pieces_of("fault cut")),
        "left": left,
        "models": lambda: [model.id for model in client().models.list()],
        "one model": lambda: client().models.retrieve(MODEL).id,
        **failures(ask),
    }
)
