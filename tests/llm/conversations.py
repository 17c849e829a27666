"""What the model is asked, in both formats."""

from __future__ import annotations

import json
from typing import Any

MODEL = "SmolLM2"
"""In other letters than its alias and than the server's own name for it: it comes back as it was sent."""
CITIES = {"Rome": "sunny", "Oslo": "snow", "Lima": "fog"}


def asked(text: str, **more: Any) -> dict[str, Any]:
    """The parts that a request has in both formats."""
    return {"model": MODEL, "max_tokens": 24, "messages": [{"role": "user", "content": text}], **more}


def openai_tools() -> dict[str, Any]:
    """A conversation whose earlier turns each say a word and call the tool: the model follows them."""
    messages: list[dict[str, Any]] = []
    for number, (city, weather) in enumerate(CITIES.items()):
        call = {"name": "weather", "arguments": json.dumps({"city": city})}
        calls = [{"id": f"call_{number}", "type": "function", "function": call}]
        messages += [
            {"role": "user", "content": f"What is the weather in {city}?"},
            {"role": "assistant", "content": "Let me look.", "tool_calls": calls},
            {"role": "tool", "tool_call_id": f"call_{number}", "content": weather},
            {"role": "assistant", "content": f"The weather in {city}: {weather}."},
        ]
    tool = {"name": "weather", "description": "Tells the weather of a city", "parameters": schema()}
    return {
        "model": MODEL,
        "max_tokens": 60,
        "temperature": 0,
        "messages": [*messages, {"role": "user", "content": "What is the weather in Paris?"}],
        "tools": [{"type": "function", "function": tool}],
    }


def anthropic_tools() -> dict[str, Any]:
    """The same conversation in the Messages format; the SDK takes a temperature only beside its own fields."""
    messages: list[dict[str, Any]] = []
    for number, (city, weather) in enumerate(CITIES.items()):
        call = {"type": "tool_use", "id": f"call_{number}", "name": "weather", "input": {"city": city}}
        result = {"type": "tool_result", "tool_use_id": f"call_{number}", "content": weather}
        messages += [
            {"role": "user", "content": f"What is the weather in {city}?"},
            {"role": "assistant", "content": [{"type": "text", "text": "Let me look."}, call]},
            {"role": "user", "content": [result]},
            {"role": "assistant", "content": f"The weather in {city}: {weather}."},
        ]
    return {
        "model": MODEL,
        "max_tokens": 60,
        "extra_body": {"temperature": 0},
        "messages": [*messages, {"role": "user", "content": "What is the weather in Paris?"}],
        "tools": [{"name": "weather", "description": "Tells the weather of a city", "input_schema": schema()}],
    }


def schema() -> dict[str, Any]:
    return {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
