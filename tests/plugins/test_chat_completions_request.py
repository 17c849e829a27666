"""The request side of the translation: lengths, stops, tools, formats, and what is promised for any input."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.chat_completions.request import Translation, translate
from plugins.chat_completions.tools import safe_id
from proxy.errors import GatewayError, Kind
from proxy.jsontext import Float, decode, encode
from tests.plugins.models import make_model

HI = {"role": "user", "content": "Hi"}
NOW = {"type": "function", "function": {"name": "now"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}


def translated(capabilities: dict[str, Any] | None = None, **fields: Any) -> Translation:
    """What becomes of a small request with these fields."""
    return translate({"model": "m", "messages": [HI], **fields}, make_model(**(capabilities or {})))


def refusal(capabilities: dict[str, Any] | None = None, **fields: Any) -> GatewayError:
    """How a small request with these fields is refused."""
    with pytest.raises(GatewayError) as caught:
        translated(capabilities, **fields)
    return caught.value


def test_a_small_request_becomes_a_small_request() -> None:
    """Nothing is sent that was not asked for."""
    result = translated(stream=False)
    assert {"max_tokens": 32_000, "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]} == (
        result.body
    )
    assert (set(), {}, None) == (result.ignored, result.adjusted, result.session)


LENGTHS: dict[str, tuple[int, dict[str, Any], int, dict[str, str], set[str]]] = {
    "neither": (64_000, {}, 32_000, {}, set()),
    "neither, a lower maximum": (8192, {}, 8192, {}, set()),
    "null": (8192, {"max_tokens": None, "max_completion_tokens": None}, 8192, {}, set()),
    "max_tokens": (64_000, {"max_tokens": 10}, 10, {}, set()),
    "a whole number with a point": (64_000, {"max_tokens": Float("64.0")}, 64, {}, set()),
    "both": (64_000, {"max_tokens": 10, "max_completion_tokens": 20}, 20, {}, {"max_tokens"}),
    "both the same": (64_000, {"max_tokens": 20, "max_completion_tokens": 20}, 20, {}, set()),
    "above the maximum": (8192, {"max_tokens": 128_000}, 8192, {"max_tokens": "8192"}, set()),
    "above, newer name": (
        8192,
        {"max_completion_tokens": 128_000},
        8192,
        {"max_completion_tokens": "8192"},
        set(),
    ),
    "above every machine word": (8192, {"max_tokens": 10**40}, 8192, {"max_tokens": "8192"}, set()),
}


@pytest.mark.parametrize(("maximum", "fields", "sent", "adjusted", "ignored"), LENGTHS.values(), ids=LENGTHS)
def test_the_limit_of_output(
    maximum: int, fields: dict[str, Any], sent: int, adjusted: dict[str, str], ignored: set[str]
) -> None:
    """The newer name wins, the model's maximum is never passed, and a change is told under the client's name."""
    result = translated({"max_output_tokens": maximum}, **fields)
    assert (sent, adjusted, ignored) == (result.body["max_tokens"], result.adjusted, result.ignored)
    assert type(result.body["max_tokens"]) is int


STOPS: dict[str, tuple[Any, list[str] | None]] = {
    "a string": ("END", ["END"]),
    "a list": (["A", "B"], ["A", "B"]),
    "null": (None, None),
    "an empty string": ("", None),
    "an empty list": ([], None),
    "an empty string in a list": (["", "END"], ["END"]),
}


@pytest.mark.parametrize(("stop", "sent"), STOPS.values(), ids=STOPS)
def test_stop_becomes_stop_sequences(stop: Any, sent: list[str] | None) -> None:
    """Empty strings stop nothing and are dropped."""
    assert sent == translated(stop=stop).body.get("stop_sequences")


TOOL_SCHEMAS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "name alone": ({}, {"input_schema": {"type": "object", "properties": {}}}),
    "nulls": (
        {"parameters": None, "description": None, "strict": None},
        {"input_schema": {"type": "object", "properties": {}}},
    ),
    "an empty schema": ({"parameters": {}}, {"input_schema": {"type": "object", "properties": {}}}),
    "a schema without type": (
        {"parameters": {"properties": {"x": {}}}},
        {"input_schema": {"type": "object", "properties": {"x": {}}}},
    ),
    "everything": (
        {"description": "D", "strict": True, "parameters": SCHEMA},
        {"description": "D", "strict": True, "input_schema": SCHEMA},
    ),
    "not strict": ({"strict": False, "parameters": SCHEMA}, {"input_schema": SCHEMA}),
}


@pytest.mark.parametrize(("function", "sent"), TOOL_SCHEMAS.values(), ids=TOOL_SCHEMAS)
def test_a_function_becomes_a_tool(function: dict[str, Any], sent: dict[str, Any]) -> None:
    """A tool keeps what it says, and its schema is an object's in any case."""
    result = translated(tools=[{"type": "function", "function": {"name": "f", **function}}])
    assert [{"name": "f", **sent}] == result.body["tools"]


def test_a_schema_is_embedded_as_it_is() -> None:
    """A tool's schema is the client's own object, not a copy."""
    assert translated(tools=[{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]).body["tools"][0][
        "input_schema"
    ] is (SCHEMA)


MARKED_TOOLS: dict[str, tuple[dict[str, Any], Any]] = {
    "on the tool": ({**NOW, "cache_control": {"type": "ephemeral", "ttl": "1h"}}, {"type": "ephemeral", "ttl": "1h"}),
    "on the function": (
        {"type": "function", "function": {"name": "now", "cache_control": {"type": "ephemeral"}}},
        {"type": "ephemeral"},
    ),
    "null": ({**NOW, "cache_control": None}, None),
}


@pytest.mark.parametrize(("tool", "mark"), MARKED_TOOLS.values(), ids=MARKED_TOOLS)
def test_a_breakpoint_on_a_tool_is_passed_on(tool: dict[str, Any], mark: Any) -> None:
    """A tool's own breakpoint stays with it; null is none."""
    assert mark == translated(tools=[tool]).body["tools"][0].get("cache_control")


NAMED = {"type": "function", "function": {"name": "now"}}
CHOICES: dict[str, tuple[Any, bool | None, dict[str, Any] | None]] = {
    "none given": (None, None, None),
    "auto": ("auto", None, {"type": "auto"}),
    "none": ("none", None, {"type": "none"}),
    "required": ("required", None, {"type": "any"}),
    "named": (NAMED, None, {"type": "tool", "name": "now"}),
    "one at a time": (None, False, {"type": "auto", "disable_parallel_tool_use": True}),
    "several": (None, True, None),
    "auto, one at a time": ("auto", False, {"type": "auto", "disable_parallel_tool_use": True}),
    "none, one at a time": ("none", False, {"type": "none"}),
    "required, one at a time": ("required", False, {"type": "any", "disable_parallel_tool_use": True}),
    "named, one at a time": (NAMED, False, {"type": "tool", "name": "now", "disable_parallel_tool_use": True}),
}


@pytest.mark.parametrize(("choice", "parallel", "sent"), CHOICES.values(), ids=CHOICES)
def test_the_choice_among_tools(choice: Any, parallel: bool | None, sent: dict[str, Any] | None) -> None:
    """Every choice has its counterpart; one call at a time stands with it."""
    result = translated(tools=[NOW], tool_choice=choice, parallel_tool_calls=parallel)
    assert sent == result.body.get("tool_choice")


@pytest.mark.parametrize("tools", [None, []], ids=["null", "empty"])
@pytest.mark.parametrize(("choice", "ignored"), [("auto", set()), ("none", set()), ("required", {"tool_choice"})])
def test_without_tools_there_is_no_choice(tools: Any, choice: str, ignored: set[str]) -> None:
    """Choice and parallel calls are dropped; what was asked for and can have no effect is named as ignored."""
    result = translated(tools=tools, tool_choice=choice, parallel_tool_calls=False)
    assert {"max_tokens", "messages"} == set(result.body)
    assert {"parallel_tool_calls", *ignored} == result.ignored


def test_a_schema_for_the_answer() -> None:
    """The schema alone reaches the provider, not the envelope's other fields."""
    answer = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": SCHEMA}}
    assert {"format": {"type": "json_schema", "schema": SCHEMA}} == translated(response_format=answer).body[
        "output_config"
    ]


@pytest.mark.parametrize(
    ("answer", "ignored"), [(None, set()), ({"type": "text"}, set()), ({"type": "json_object"}, {"response_format"})]
)
def test_other_formats_of_the_answer_send_nothing(answer: Any, ignored: set[str]) -> None:
    """Text asks for nothing; json_object, where it isn't refused, is ignored and named."""
    result = translated(response_format=answer)
    assert "output_config" not in result.body
    assert ignored == result.ignored


def test_the_cache_key_names_the_conversation() -> None:
    """It is not sent, and an empty one names nothing."""
    result = translated(prompt_cache_key="k" * 256)
    assert "k" * 256 == result.session
    assert {"max_tokens", "messages"} == set(result.body)
    assert translated(prompt_cache_key="").session is None


def test_effort_and_sampling_are_left_to_other_plugins() -> None:
    """What only a later plugin sends on is not sent, and named as ignored until it is."""
    result = translated(temperature=0, top_p=0.5, reasoning_effort="low", seed=1)
    assert {"max_tokens", "messages"} == set(result.body)
    assert {"temperature", "top_p", "reasoning_effort", "seed"} == result.ignored


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "max_tokens 0": ({"max_tokens": 0}, "max_tokens: must be at least 1"),
    "max_tokens true": ({"max_tokens": True}, "max_tokens: must be an integer"),
    "max_tokens 1.5": ({"max_tokens": Float("1.5")}, "max_tokens: must be an integer"),
    "max_tokens of 5,000 digits": ({"max_tokens": Float("9" * 5000)}, "max_tokens: must be an integer"),
    "the limit that loses is judged too": (
        {"max_tokens": "5", "max_completion_tokens": 5},
        "max_tokens: must be an integer",
    ),
    "max_completion_tokens": ({"max_completion_tokens": [5]}, "max_completion_tokens: must be an integer"),
    "stop": ({"stop": 5}, "stop: must be a string or a list of strings"),
    "stop of white space": ({"stop": " \n"}, "stop: must contain a character other than white space"),
    "white space in stop": ({"stop": ["a", " "]}, "stop[1]: must contain a character other than white space"),
    "null in stop": ({"stop": [None]}, "stop[0]: must be a string"),
    "stream": ({"stream": 1}, "stream: must be a boolean"),
    "stream_options": ({"stream_options": [True]}, "stream_options: must be an object"),
    "include_usage": (
        {"stream_options": {"include_usage": "yes"}},
        "stream_options.include_usage: must be a boolean",
    ),
    "tools": ({"tools": {}}, "tools: must be a list"),
    "a tool": ({"tools": [NOW, "now"]}, "tools[1]: must be an object"),
    "a tool of another type": ({"tools": [{"type": "custom"}]}, "tools[0].type: only function tools are supported"),
    "a tool without function": ({"tools": [{"type": "function"}]}, "tools[0].function: is required"),
    "a tool without name": ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name: is required"),
    "a tool's schema": (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
        "tools[0].function.parameters: must be an object",
    ),
    "a tool's description": (
        {"tools": [{"type": "function", "function": {"name": "f", "description": 5}}]},
        "tools[0].function.description: must be a string",
    ),
    "a tool's strict": (
        {"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]},
        "tools[0].function.strict: must be a boolean",
    ),
    "a tool's breakpoint": ({"tools": [{**NOW, "cache_control": True}]}, "tools[0].cache_control: must be an object"),
    "parallel_tool_calls": (
        {"tools": [NOW], "parallel_tool_calls": "no"},
        "parallel_tool_calls: must be a boolean",
    ),
    "response_format": ({"response_format": "json"}, "response_format: must be an object"),
    "response_format without type": ({"response_format": {}}, "response_format.type: is required"),
    "response_format of another type": (
        {"response_format": {"type": "xml"}},
        'response_format.type: must be "text" or "json_schema"',
    ),
    "json_schema": (
        {"response_format": {"type": "json_schema"}},
        "response_format.json_schema: is required",
    ),
    "json_schema without schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema: is required",
    ),
    "prompt_cache_key": ({"prompt_cache_key": 5}, "prompt_cache_key: must be a string"),
    "a long prompt_cache_key": (
        {"prompt_cache_key": "k" * 257},
        "prompt_cache_key: must not be longer than 256 characters",
    ),
}


@pytest.mark.parametrize(("fields", "message"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_value_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    """The message begins with the field's path, which is told apart from it as well."""
    error = refusal(**fields)
    assert (Kind.INVALID_REQUEST, message) == (error.kind, error.message)
    assert message.split(": ")[0] == error.param


@pytest.mark.parametrize(
    "choice",
    ["always", {"type": "allowed_tools"}, {"type": "function"}, {"type": "custom", "custom": {"name": "now"}}, 1, []],
    ids=repr,
)
def test_an_unknown_choice_is_refused(choice: Any) -> None:
    """No choice is turned into another in silence."""
    message = 'tool_choice: use "auto", "none", "required" or a named function'
    assert message == refusal(tools=[NOW], tool_choice=choice).message


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
PDF = {"type": "file", "file": {"file_data": "data:application/pdf;base64,JVBERi0xLjQK"}}
CANNOT: dict[str, tuple[str, dict[str, Any], str]] = {
    "images": ("images", {"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]"),
    "pdfs": ("pdfs", {"messages": [{"role": "user", "content": [PDF]}]}, "messages[0].content[0].file"),
    "structured outputs": (
        "structured_outputs",
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        "response_format",
    ),
    "any tool": ("forced_tool_choice", {"tools": [NOW], "tool_choice": "required"}, "tool_choice"),
    "a named tool": ("forced_tool_choice", {"tools": [NOW], "tool_choice": NAMED}, "tool_choice"),
}


@pytest.mark.parametrize(("capability", "fields", "path"), CANNOT.values(), ids=CANNOT)
def test_what_a_model_cannot_do_is_refused(capability: str, fields: dict[str, Any], path: str) -> None:
    """A request beyond the model is refused with the field's name, and passes for a model that can."""
    error = refusal({capability: False}, **fields)
    assert path == error.param
    assert error.message.startswith(f"{path}: this model ")
    translated(**fields)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.sampled_from([Float("1.0"), Float("9" * 400), "", " ", "auto", "text", "user", "function", "type"])
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)

FULL: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "S", "cache_control": {"type": "ephemeral"}}]},
        {"role": "user", "content": [{"type": "text", "text": "Look."}, IMAGE, PDF]},
        {
            "role": "assistant",
            "content": "Yes",
            "tool_calls": [{"id": "a.b", "type": "function", "function": {"name": "now", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "a.b", "content": [{"type": "text", "text": "12:00"}, IMAGE]},
        {"role": "assistant", "content": "Noon "},
    ],
    "tools": [{**NOW, "cache_control": None}],
    "tool_choice": NAMED,
    "parallel_tool_calls": False,
    "stop": ["END"],
    "stream": True,
    "stream_options": {"include_usage": True},
    "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
    "prompt_cache_key": "k",
    "max_tokens": 5,
    "max_completion_tokens": 5,
    "temperature": 1,
    "n": 1,
}


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values inside of a value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, item in inside for place in ((*path, key), *places(item, (*path, key)))]


def changed(body: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """The body with another value at a place."""
    body = deepcopy(body)
    holder: Any = body
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    return body


def outcome(body: dict[str, Any]) -> Translation | GatewayError:
    """What comes of a request, a refusal too."""
    try:
        return translate(body, make_model())
    except GatewayError as error:
        return error


@settings(max_examples=400)
@given(st.sampled_from(places(FULL)), json_values, json_values)
def test_whatever_stands_in_a_field_is_translated_or_refused(path: tuple[Any, ...], value: Any, extra: Any) -> None:
    """No value makes the translation fail otherwise than with a refusal, and the client's body is left alone."""
    body = changed({**FULL, "extra": extra}, path, value)
    before = deepcopy(body)
    came = outcome(body)
    assert before == body
    if isinstance(came, GatewayError):
        assert (Kind.INVALID_REQUEST, True) == (came.kind, came.message.startswith(f"{came.param}: "))
    else:
        assert {"max_tokens", "messages"} <= set(decode(encode(came.body)))


@given(st.lists(st.text(alphabet="ab.:_-ez01é\n", max_size=12), unique=True), st.booleans())
def test_ids_of_calls_never_collide(ids: list[str], mapped_too: bool) -> None:
    """Different ids stay different, though a client sends the ids that were made for it as its own."""
    known = dict.fromkeys([*ids, *(safe_id(id) for id in ids if mapped_too)])
    made = [safe_id(id) for id in known]
    assert len(known) == len(set(made))
    assert all(id and set(id) <= set("abcdefghijklmnopqrstuvwxyz0123456789_-") for id in made)


@given(st.text(max_size=200))
def test_an_id_is_mapped_alike_every_time(id: str) -> None:
    """The mapping has no memory, and leaves alone what is fine."""
    assert safe_id(id) == safe_id(id)
    if id.isascii() and id.isalnum():
        assert id == safe_id(id)
