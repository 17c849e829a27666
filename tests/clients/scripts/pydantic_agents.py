"""Pydantic AI's agents, on its OpenAI or its Anthropic model as the argument says."""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import asyncio
import base64
import sys
from collections.abc import Callable
from typing import Any

from pydantic_ai import Agent, BinaryContent, NativeOutput, ToolOutput

from tests.clients.material import City
from tests.clients.scripts.play import PARALLEL, PORTO, TASK, failures, play, raised_by, result_of_tool


def openai_model(key: str, name: str) -> Any:
    from openai import AsyncOpenAI
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    client = AsyncOpenAI(api_key=key, base_url=TASK["openai_url"], max_retries=0)
    return OpenAIChatModel(name, provider=OpenAIProvider(openai_client=client))


def anthropic_model(key: str, name: str) -> Any:
    from anthropic import AsyncAnthropic
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    client = AsyncAnthropic(api_key=key, base_url=TASK["messages_url"], max_retries=0)
    return AnthropicModel(name, provider=AnthropicProvider(anthropic_client=client))


make: Callable[[str, str], Any] = {"openai": openai_model, "messages": anthropic_model}[sys.argv[1]]


def agent(name: str = TASK["model"], **settings: Any) -> Any:
    return Agent(make(TASK["key"], name), retries=0, **settings)


def told(result: Any) -> dict[str, Any]:
    usage = result.usage
    return {"text": result.output, "input": usage.input_tokens, "output": usage.output_tokens}


async def streamed() -> dict[str, Any]:
    async with agent().run_stream("Good morning!") as result:
        text = "".join([piece async for piece in result.stream_text(delta=True)])
        return {"text": text, "input": result.usage.input_tokens, "output": result.usage.output_tokens}


def tool_agent(calls: list[Any]) -> Any:
    made = agent()

    def weather(city: str) -> str:
        calls.append(["weather", {"city": city}])
        return result_of_tool("weather", {"city": city})

    def population(city: str) -> str:
        calls.append(["population", {"city": city}])
        return result_of_tool("population", {"city": city})

    made.tool_plain(weather)
    made.tool_plain(population)
    return made


def tools() -> dict[str, Any]:
    calls: list[Any] = []
    text = tool_agent(calls).run_sync(PARALLEL).output
    return {"calls": sorted(calls, key=lambda call: TASK["tools"].index(call[0])), "text": text}


async def streamed_tools() -> dict[str, Any]:
    calls: list[Any] = []
    async with tool_agent(calls).run_stream(PARALLEL) as result:
        text = await result.get_output()
    return {"calls": sorted(calls, key=lambda call: TASK["tools"].index(call[0])), "text": text}


def structured(name: str, output: Any) -> Any:
    return agent(name, output_type=output).run_sync(PORTO).output.model_dump()


def seen(data: str, media_type: str) -> dict[str, Any]:
    part = BinaryContent(base64.b64decode(data), media_type=media_type)
    return {"input": agent().run_sync(["What is this?", part]).usage.input_tokens}


async def left() -> None:
    async with agent().run_stream("slow") as result:
        async for _ in result.stream_text(delta=True):
            break


def broken(text: str) -> dict[str, Any]:
    pieces: list[str] = []

    async def gather() -> None:
        async with agent().run_stream(text) as result:
            async for piece in result.stream_text(delta=True, debounce_by=None):
                pieces.append(piece)

    return {**raised_by(lambda: asyncio.run(gather())), "pieces": len(pieces)}


play(
    {
        "plain": lambda: told(agent().run_sync("Good morning!")),
        "streamed": lambda: asyncio.run(streamed()),
        "tools": tools,
        "streamed tools": lambda: asyncio.run(streamed_tools()),
        "structured": lambda: structured(TASK["model"], NativeOutput(City)),
        "structured by a forced call": lambda: structured(TASK["forcible"], ToolOutput(City)),
        "image": lambda: seen(TASK["image"], "image/png"),
        "PDF": lambda: seen(TASK["pdf"], "application/pdf"),
        "broken by an error": lambda: broken("fault error"),
        "broken by a cut": lambda: broken("fault cut"),
        "left": lambda: asyncio.run(left()),
        **failures(lambda key, name, text: Agent(make(key, name), retries=0).run_sync(text)),
    }
)
