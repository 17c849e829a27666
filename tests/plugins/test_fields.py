"""The one table of request fields: what is refused, what is named as ignored, and that nothing is missing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from openai.types.chat import (
    ChatCompletionContentPartParam,
    ChatCompletionContentPartRefusalParam,
    ChatCompletionToolUnionParam,
)
from openai.types.chat.completion_create_params import (
    CompletionCreateParamsNonStreaming,
    CompletionCreateParamsStreaming,
)

from plugins.chat_completions.fields import FIELDS, compat, ignored, refusals
from plugins.chat_completions.tables import PARTS, TOOLS
from proxy.jsontext import Float, decode

FUNCTION = {"type": "function", "function": {"name": "now"}}
NO_LOGPROBS = "log probabilities are not available"
NO_AUDIO = "modalities: only text output is supported"
NO_FUNCTIONS = "functions: the legacy functions API is not supported; use tools"
NO_JSON_OBJECT = (
    'response_format: type "json_object" is not supported; use "json_schema" with a schema '
    '(objects need "additionalProperties": false)'
)
USE_EFFORT = "reasoning_effort: use one of none, minimal, low, medium, high, xhigh, max"

REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "n 2": ({"n": 2}, "n", "n: only 1 choice per request is supported"),
    "n 0": ({"n": 0}, "n", "n: only 1 choice per request is supported"),
    "logprobs": ({"logprobs": True}, "logprobs", f"logprobs: {NO_LOGPROBS}"),
    "top_logprobs": ({"top_logprobs": 3}, "top_logprobs", f"top_logprobs: {NO_LOGPROBS}"),
    "logit_bias": ({"logit_bias": {"50256": -100}}, "logit_bias", "logit_bias: is not supported"),
    "audio": ({"audio": {"voice": "alloy"}}, "modalities", NO_AUDIO),
    "modalities with audio": ({"modalities": ["text", "audio"]}, "modalities", NO_AUDIO),
    "no modalities": ({"modalities": []}, "modalities", NO_AUDIO),
    "web_search_options": ({"web_search_options": {}}, "web_search_options", "web_search_options: is not supported"),
    "functions": ({"functions": [{"name": "f"}]}, "functions", NO_FUNCTIONS),
    "no functions": ({"functions": []}, "functions", NO_FUNCTIONS),
    "function_call": ({"function_call": "auto"}, "functions", NO_FUNCTIONS),
    "json_object": ({"response_format": {"type": "json_object"}}, "response_format", NO_JSON_OBJECT),
    "custom tool": (
        {"tools": [FUNCTION, {"type": "custom"}]},
        "tools[1].type",
        "tools[1].type: only function tools are supported",
    ),
    "unknown effort": ({"reasoning_effort": "HIGH"}, "reasoning_effort", USE_EFFORT),
    "empty effort": ({"reasoning_effort": ""}, "reasoning_effort", USE_EFFORT),
    "effort of another type": ({"reasoning_effort": ["low"]}, "reasoning_effort", USE_EFFORT),
    "n of another type": ({"n": "two"}, "n", "n: must be an integer"),
    "n true": ({"n": True}, "n", "n: must be an integer"),
    "n beyond all numbers": ({"n": Float("9" * 5000)}, "n", "n: must be an integer"),
    "logprobs of another type": ({"logprobs": 1}, "logprobs", "logprobs: must be a boolean"),
    "top_logprobs of another type": ({"top_logprobs": "0"}, "top_logprobs", "top_logprobs: must be an integer"),
    "logit_bias of another type": ({"logit_bias": []}, "logit_bias", "logit_bias: must be an object"),
    "modalities of another type": ({"modalities": "text"}, "modalities", "modalities: must be a list"),
}

LET_THROUGH: dict[str, dict[str, Any]] = {
    "nothing": {},
    "n 1": {"n": 1},
    "n 1.0": {"n": Float("1.0")},
    "logprobs false": {"logprobs": False},
    "top_logprobs 0": {"top_logprobs": 0},
    "an empty logit_bias": {"logit_bias": {}},
    "text alone": {"modalities": ["text"]},
    "a schema": {"response_format": {"type": "json_schema", "json_schema": {}}},
    "function tools": {"tools": [FUNCTION]},
    "every effort": {"reasoning_effort": "xhigh"},
    "null everywhere": dict.fromkeys(FIELDS),
    "ignored fields": {"seed": 7, "user": "u", "never_heard_of": {"a": [1]}},
}

IGNORED: dict[str, tuple[dict[str, Any], set[str]]] = {
    "ignored fields": ({"seed": 7, "user": "u", "presence_penalty": 1.5}, {"seed", "user", "presence_penalty"}),
    "unknown fields": ({"never_heard_of": {}, "top_k": 5}, {"never_heard_of", "top_k"}),
    "what later plugins send": (
        {"temperature": 0, "top_p": 0.5, "reasoning_effort": "low"},
        {"temperature", "top_p", "reasoning_effort"},
    ),
    "refused fields that were let through": (
        {"n": 2, "logprobs": 1, "audio": {}, "function_call": "auto", "response_format": {"type": "json_object"}},
        {"n", "logprobs", "audio", "function_call", "response_format"},
    ),
    "null": (dict.fromkeys([*FIELDS, "never_heard_of"]), set()),
    "values without effect": (
        {
            "n": Float("1.0"),
            "logit_bias": {},
            "top_p": 1,
            "temperature": Float("1.0"),
            "stream_options": {"include_usage": True},
            "presence_penalty": 0,
            "store": False,
            "metadata": {},
            "service_tier": "auto",
        },
        set(),
    ),
    "what only looks as if it had no effect": ({"top_p": True, "store": 0}, {"top_p", "store"}),
    "honoured fields": ({"model": "m", "messages": [], "max_tokens": 5, "stop": "x", "stream": True}, set()),
}


def literal_types(union: Any) -> Iterator[str]:
    """The values of ``type`` in a union of the SDK's typed dictionaries."""
    for member in get_args(union) or (union,):
        annotation = get_type_hints(member)["type"]
        yield from get_args(annotation if get_origin(annotation) is Literal else get_args(annotation)[0])


def test_every_field_of_the_sdk_has_a_row() -> None:
    """No field of the installed openai SDK's requests is missing in the table."""
    known = CompletionCreateParamsNonStreaming.__annotations__ | CompletionCreateParamsStreaming.__annotations__
    assert set() == set(known) - set(FIELDS)


def test_every_part_and_tool_of_the_sdk_has_a_row() -> None:
    """No type of a message part or of a tool that the installed openai SDK knows is missing."""
    parts = {*literal_types(ChatCompletionContentPartParam), *literal_types(ChatCompletionContentPartRefusalParam)}
    assert set() == parts - set(PARTS)
    assert set() == set(literal_types(ChatCompletionToolUnionParam)) - set(TOOLS)


@pytest.mark.parametrize(("body", "path", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_granted_is_refused(body: dict[str, Any], path: str, message: str) -> None:
    """Each refusal has its exact message and names its field."""
    error = refusals(body)
    assert error is not None
    assert (message, path) == (error.message, error.param)


@pytest.mark.parametrize("body", LET_THROUGH.values(), ids=LET_THROUGH)
def test_what_asks_for_nothing_special_is_let_through(body: dict[str, Any]) -> None:
    """Null, and values that are the way answers are anyway, are refused nowhere."""
    assert refusals(body) is None


def test_of_several_refusals_the_first_of_the_table_is_told() -> None:
    """The order of judgement is the table's, whatever order the client wrote the fields in."""
    faults = {
        "reasoning_effort": "ultra",
        "tools": [{"type": "custom"}],
        "response_format": {"type": "json_object"},
        "functions": [],
        "web_search_options": {},
        "modalities": ["audio"],
        "logit_bias": {"1": 1},
        "top_logprobs": 1,
        "logprobs": True,
        "n": 2,
    }
    judged = []
    while (error := refusals(faults)) is not None:
        assert error.param is not None
        judged.append(error.param.partition("[")[0])
        del faults[judged[-1]]
    assert [
        "n",
        "logprobs",
        "top_logprobs",
        "logit_bias",
        "modalities",
        "web_search_options",
        "functions",
        "response_format",
        "tools",
        "reasoning_effort",
    ] == judged


@pytest.mark.parametrize(("body", "names"), IGNORED.values(), ids=IGNORED)
def test_fields_without_effect_are_named(body: dict[str, Any], names: set[str]) -> None:
    """Named is what asked for something and doesn't get it, and nothing else."""
    assert names == ignored(body)


def test_a_client_can_ask_what_becomes_of_its_fields() -> None:
    """The tables are told with class, message and note, and without empty entries."""
    told = compat()
    assert {"class": "refused", "message": "logit_bias: is not supported"} == told["fields"]["logit_bias"]
    assert "honoured" == told["fields"]["response_format"]["class"]
    assert NO_JSON_OBJECT == told["fields"]["response_format"]["message"]
    assert "ignored" == told["fields"]["seed"]["class"]
    assert "refused" == told["parts"]["input_audio"]["class"]
    assert "honoured" == told["tools"]["function"]["class"]
    assert {"fields", "parts", "tools"} == set(told)


def test_digits_beyond_all_numbers_do_no_harm() -> None:
    """A number that no field can mean is named or passed over, never an error."""
    body = decode(b'{"seed": ' + b"9" * 5000 + b', "top_p": 1e400}')
    assert refusals(body) is None
    assert {"seed", "top_p"} == ignored(body)
