"""Which tools the demo calls, by rule, and with what arguments.

1. `tool_choice` none, or no tool that a client runs: none.
2. `tool_choice` tool: the named one, always.
3. The user's text holds the word `parallel`: every tool once, unless `disable_parallel_tool_use`.
4. `tool_choice` any: the tool that the text is about, else the first, always.
5. auto: the tool that the text names; at a conversation's first question also the one that the text is about, else the
   first, if there are at most 5 tools. An agent brings dozens, and its user's first hello wants an answer.

Tool results as the newest message are answered in text (3 and 5): the tools have been called.
"""

import re

import orjson

from proxy.demo.prompt import Json, newest_user_message, newest_user_text
from proxy.demo.schema_instance import schema_instance

FEW_TOOLS = 5
SHORTEST_HINT = 4  # letters of a part of a tool's name that make a text be about it


def calls_for(body: Json, prompt_digest: bytes) -> list[Json]:
    """The `tool_use` blocks of the answer to a checked request, often none."""
    text = newest_user_text(body)
    blocks = []
    for number, tool in enumerate(_called_tools(body, text)):
        path = f"tools.{body['tools'].index(tool)}.custom.input_schema"
        arguments = schema_instance(tool["input_schema"], text, path=path)
        identity = f"toolu_{prompt_digest.hex()[:20]}{number:02d}"
        blocks.append({"type": "tool_use", "id": identity, "name": tool["name"], "input": arguments})
    return blocks


def holds_word(text: str, word: str) -> bool:
    return re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) is not None


def holds_tool_result(message: Json | None) -> bool:
    content = message["content"] if message is not None else []
    return any(block["type"] == "tool_result" for block in content if isinstance(block, dict))


def _called_tools(body: Json, text: str) -> list[Json]:
    tools = [tool for tool in body.get("tools") or [] if "name" in tool and tool.get("type") in (None, "custom")]
    choice = body.get("tool_choice") or {"type": "auto"}
    if not tools or choice["type"] == "none":
        return []
    if choice["type"] == "tool":
        return [tool for tool in tools if tool["name"] == choice["name"]]
    answered = choice["type"] == "auto" and holds_tool_result(newest_user_message(body))
    if answered:
        return []
    if holds_word(text, "parallel") and choice.get("disable_parallel_tool_use") is not True:
        return tools
    named = next((tool for tool in tools if _names(text, tool["name"])), None)
    if choice["type"] == "any" or (_is_first_question(body) and len(tools) <= FEW_TOOLS):
        return [named or next((tool for tool in tools if _is_about(text, tool["name"])), tools[0])]
    return [named] if named else []


def _is_first_question(body: Json) -> bool:
    return all(message["role"] != "assistant" for message in body["messages"])


def _names(text: str, tool_name: str) -> bool:
    """In its own letter case: "read on" doesn't name an agent's tool Read."""
    return re.search(rf"\b{re.escape(tool_name)}\b", text) is not None


def _is_about(text: str, tool_name: str) -> bool:
    parts = re.split(r"[_-]", tool_name)
    return any(len(part) >= SHORTEST_HINT and holds_word(text, part) for part in parts)


def argument_json(arguments: Json) -> str:
    """The arguments as the model writes them, a piece at a time in a stream."""
    return orjson.dumps(arguments).decode()
