"""The requests of the probe, as a table: the row that each fills, its body, and who judges the answer.

``max_tokens`` is small where only the refusal matters, and leaves room where the answer does: models that think by
default do so before they say a word.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, NamedTuple

from proxy.models import EFFORT_LEVELS
from proxy.probe import findings, material
from proxy.probe.findings import Judge

MESSAGES = "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"
PLAIN = "plain answer"
CACHING = "prompt caching"
ROOM = 1024
"""max_tokens where the answer is looked at."""
BRIEF = 64

_GREETING = "Say hello."
_SCHEMA = {
    "type": "object",
    "properties": {"waves": {"type": "integer"}, "harbour": {"type": "string"}},
    "required": ["waves", "harbour"],
    "additionalProperties": False,
}


class Question(NamedTuple):
    """One request. ``body`` is laid over a greeting of a few tokens."""

    row: str
    body: Mapping[str, Any]
    judge: Judge
    path: str = MESSAGES


class Control(NamedTuple):
    """A request with nonsense in a field, sent where that was taken and no effect was seen: is it read at all?"""

    rows: tuple[str, ...]
    body: Mapping[str, Any]
    nonsense: str


def _tool(name: str, argument: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return {"name": name, "description": f"Gets the {argument}'s {name}.", "input_schema": schema}


def _user(*content: Mapping[str, Any] | str) -> dict[str, Any]:
    blocks = [{"type": "text", "text": each} if isinstance(each, str) else each for each in content]
    return {"messages": [{"role": "user", "content": blocks}], "max_tokens": ROOM}


def _block(kind: str, media_type: str, data: bytes) -> dict[str, Any]:
    source = {"type": "base64", "media_type": media_type, "data": base64.b64encode(data).decode()}
    return {"type": kind, "source": source}


_EFFORTS = tuple(
    Question(f"effort {each}", {"output_config": {"effort": each}}, findings.taken) for each in EFFORT_LEVELS
)
_SAMPLING = (
    Question("temperature", {"temperature": 0.5}, findings.taken),
    Question("top_p", {"top_p": 0.9}, findings.taken),
    Question("temperature with top_p", {"temperature": 0.5, "top_p": 0.9}, findings.taken),
)
QUESTIONS = (
    Question("stream", {"stream": True}, findings.stream),
    Question("count_tokens", {"max_tokens": None}, findings.count_of_tokens, COUNT_TOKENS),
    *_SAMPLING,
    *_EFFORTS,
    Question(
        "adaptive thinking",
        {**_user("What is 17 times 23, plus 4?"), "thinking": {"type": "adaptive"}},
        findings.thinking,
    ),
    Question(
        "forced tool call",
        {**_user(_GREETING), "tools": [_tool("weather", "city")], "tool_choice": {"type": "any"}},
        findings.forced_call,
    ),
    Question(
        "parallel tool calls",
        {
            **_user("I need the weather of Paris and the mayor of Rome. Call both tools at once, in parallel."),
            "tools": [_tool("weather", "city"), _tool("mayor", "city")],
        },
        findings.parallel_calls,
    ),
    Question(
        "structured output",
        {**_user("Describe the sea."), "output_config": {"format": {"type": "json_schema", "schema": _SCHEMA}}},
        findings.fits(_SCHEMA),
    ),
    Question(
        "stop sequences",
        {**_user("Say these words in this order: apple pear plum cherry"), "stop_sequences": ["plum"]},
        findings.stopped_before("plum", "pear"),
    ),
    Question(
        "images",
        _user(_block("image", "image/png", material.picture()), "Which colour is this? Answer with one word."),
        findings.looked_at(material.COLOUR),
    ),
    Question(
        "PDFs",
        _user(_block("document", "application/pdf", material.pdf()), "Which word is this? Answer with one word."),
        findings.looked_at(material.WORD),
    ),
)
CONTROLS = (
    Control(tuple(each.row for each in _SAMPLING), {"temperature": "nonsense"}, "a temperature that is no number"),
    Control(
        tuple(each.row for each in _EFFORTS), {"output_config": {"effort": "nonsense"}}, "a level that does not exist"
    ),
    Control(("adaptive thinking",), {"thinking": {"type": "nonsense"}}, "a kind of thinking that does not exist"),
)


def body_for(model: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """A whole body: the fields over a greeting; a field that is None is left out."""
    greeting = [{"role": "user", "content": _GREETING}]
    whole = {"model": model, "max_tokens": BRIEF, "messages": greeting, **fields}
    return {name: value for name, value in whole.items() if value is not None}


def cached_prefix(run: str, *, marked: bool) -> dict[str, Any]:
    """A long system prompt, which ``run`` makes unlike any other, with or without a mark."""
    mark = {"cache_control": {"type": "ephemeral"}} if marked else {}
    return {"system": [{"type": "text", "text": material.long_text(run), **mark}]}
