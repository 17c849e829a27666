"""Requests in OpenAI's format, as the property tests draw them.

They are drawn from the installed SDK's own types, so that a field of tomorrow is drawn as soon as the SDK knows it;
what has a meaning between its parts (calls and their results, tools and the choice among them) is drawn by hand.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming

Json = dict[str, Any]
Drawn = st.SearchStrategy[Any]

PNG = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptV"
MISNAMED = PNG.replace("image/png", "IMAGE/JPG")
PDF = "data:application/pdf;base64,JVBERi0xLjQK"
MOST_MARKS = 4


# From the SDK's types


def values_of(kind: Any) -> Drawn:
    """Values of a type of the SDK."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return st.sampled_from(inner)
    if origin in (Union, types.UnionType):
        return st.one_of([values_of(each) for each in inner])
    if hasattr(kind, "__required_keys__"):
        members = {name: values_of(each) for name, each in get_type_hints(kind).items()}
        required = {name: each for name, each in members.items() if name in kind.__required_keys__}
        return st.fixed_dictionaries(required, optional={name: members[name] for name in members.keys() - required})
    if origin is dict:
        return st.dictionaries(texts, values_of(inner[1]), max_size=2)
    if origin is not None and issubclass(origin, Iterable):
        return st.lists(values_of(inner[0]), max_size=2)
    return _PLAIN[kind]


texts = st.one_of(
    st.text(max_size=6),
    st.sampled_from(("", " \n", "Hi", "Go on. ", "\ud83d", "\u2028", "\x00", "data: [DONE]\n\n", "é😀", "k" * 300)),
)
integers = st.one_of(st.integers(-3, 3), st.sampled_from((2**63, -(2**64), 10**30)))
floats = st.floats(allow_nan=False, allow_infinity=False)
anything = st.recursive(
    st.none() | st.booleans() | integers | floats | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)
_PLAIN: Mapping[Any, Drawn] = {
    str: texts,
    int: integers,
    float: floats | st.integers(-2, 2),
    bool: st.booleans(),
    object: anything,
    types.NoneType: st.none(),
}


# By hand, where parts belong together


names = st.text("abcdefgh_-0Z", min_size=1, max_size=8)
ids = st.text(max_size=6) | st.sampled_from(("call_1", "functions.now:0", "", "a b", "toolu_01", "\n"))
schemas = st.sampled_from(
    (
        {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
        {"type": "object"},
        {"properties": {"n": {"type": "integer"}}},
        {},
    )
)
marks = st.sampled_from((None, None, None, None, {"type": "ephemeral"}))
text_parts = st.fixed_dictionaries({"type": st.just("text"), "text": texts}, optional={"cache_control": marks})
refusal_parts = st.fixed_dictionaries({"type": st.just("refusal"), "refusal": texts})
image_parts = st.fixed_dictionaries(
    {
        "type": st.just("image_url"),
        "image_url": st.fixed_dictionaries(
            {"url": st.sampled_from((PNG, PNG, PNG, MISNAMED, MISNAMED, "http://127.0.0.1:9/x.png"))},
            optional={"detail": st.sampled_from(("auto", "low", "high"))},
        ),
    },
    optional={"cache_control": marks, "prompt_cache_breakpoint": st.just({"mode": "explicit"})},
)
file_parts = st.fixed_dictionaries(
    {"type": st.just("file"), "file": st.fixed_dictionaries({"file_data": st.just(PDF)}, optional={"filename": texts})}
)
user_parts = st.one_of(text_parts, text_parts, image_parts, file_parts)
SOMETIMES = st.integers(0, 19).map(lambda drawn: drawn == 7)


def content_of(parts: Drawn) -> Drawn:
    """The content of a message: text, or parts."""
    return texts | st.lists(parts, max_size=3)


@st.composite
def conversations(draw: st.DrawFn) -> list[Json]:
    """Messages in the order that the API asks for: each call is answered behind its message, by its id."""
    messages: list[Json] = []
    used: set[str] = set()
    for _ in range(draw(st.integers(1, 4))):
        if draw(st.integers(0, 2)) == 0:
            role = draw(st.sampled_from(("system", "developer")))
            messages.append({"role": role, "content": draw(content_of(text_parts))})
        messages.append({"role": "user", "content": draw(content_of(user_parts))})
        if draw(st.booleans()):
            messages += draw(answers(used))
    if draw(st.booleans()):
        messages.append({"role": "user", "content": "And now?"})
    for message in messages:
        if draw(SOMETIMES):
            message["name"] = draw(names)
    return messages


@st.composite
def answers(draw: st.DrawFn, used: set[str]) -> list[Json]:
    """An assistant's message as SDKs keep it, and the results of its calls, in any order."""
    content = draw(st.none() | content_of(text_parts | refusal_parts))
    message: Json = {"role": "assistant", "content": content, **draw(st.sampled_from(ECHOES))}
    called = draw(st.lists(ids.filter(lambda id: id not in used), max_size=3, unique=True))
    used.update(called)
    if not called:
        return [message]
    message["tool_calls"] = [
        {
            "id": id,
            "type": "function",
            "function": {
                "name": draw(names),
                "arguments": draw(st.sampled_from(("", "{}", '{"city": "Oslo", "n": 1.10}'))),
            },
        }
        for id in called
    ]
    results: list[Json] = [
        {"role": "tool", "tool_call_id": id, "content": draw(content_of(text_parts | image_parts))}
        for id in draw(st.permutations(called))
    ]
    if draw(SOMETIMES):
        results.insert(draw(st.integers(0, len(results))), {"role": "user", "content": "I wait."})
    return [message, *results]


ECHOES: tuple[Json, ...] = (
    {},
    {"refusal": None, "audio": None, "function_call": None, "annotations": [], "tool_calls": None},
    {"refusal": "No.", "audio": {"id": "audio_1"}, "tool_calls": []},
)
LEGACY_MESSAGES: tuple[Json, ...] = (
    {"role": "function", "name": "now", "content": "noon"},
    {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]},
    {"role": "user", "content": [{"type": "file", "file": {"file_id": "file_1"}}]},
)


@st.composite
def tools_and_choice(draw: st.DrawFn) -> Json:
    """Tools of different names, a choice among them, or none of both."""
    called = draw(st.lists(names, max_size=3, unique=True))
    optional = {
        "description": st.none() | texts,
        "parameters": st.none() | schemas,
        "strict": st.none() | st.booleans(),
    }
    function = st.fixed_dictionaries({}, optional=optional)
    tools: list[Json] = [{"type": "function", "function": {"name": name, **draw(function)}} for name in called]
    if draw(SOMETIMES):
        tools.append({"type": "custom", "custom": {"name": "shell"}})
    choices: list[Any] = [None, "auto", "none", "required", *FOREIGN_CHOICES[: draw(SOMETIMES) * 2]]
    choices += [{"type": "function", "function": {"name": name}} for name in called]
    drawn = {"tools": tools or draw(st.sampled_from((None, []))), "tool_choice": draw(st.sampled_from(choices))}
    return {**drawn, "parallel_tool_calls": draw(st.sampled_from((None, True, False)))}


FOREIGN_CHOICES = (
    {"type": "custom", "custom": {"name": "shell"}},
    {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
)
limits = st.none() | st.integers(1, 4000) | st.sampled_from((64.0, 10**6))
BY_HAND: Mapping[str, Drawn] = {
    "max_completion_tokens": limits,
    "max_tokens": limits,
    "temperature": st.none() | st.integers(0, 2) | st.floats(0, 2),
    "top_p": st.none() | st.integers(0, 1) | st.floats(0, 1),
    "stop": st.none() | st.sampled_from(("END", "", [], ["a", "", "b"], ["\n"])),
    "stream": st.none() | st.booleans(),
    "prompt_cache_key": st.none() | st.text(max_size=256),
    "response_format": st.one_of(
        st.just({"type": "text"}),
        st.fixed_dictionaries(
            {
                "type": st.just("json_schema"),
                "json_schema": st.fixed_dictionaries(
                    {"name": names, "schema": schemas},
                    optional={"strict": st.none() | st.booleans(), "description": texts},
                ),
            }
        ),
    ),
}
REFUSED: Mapping[str, Sequence[Any]] = {
    "n": (2,),
    "logprobs": (True,),
    "top_logprobs": (5,),
    "logit_bias": ({"50256": -100},),
    "modalities": (["text", "audio"],),
    "audio": ({"voice": "alloy", "format": "wav"},),
    "web_search_options": ({},),
    "functions": ([{"name": "now"}],),
    "function_call": ("auto",),
    "response_format": ({"type": "json_object"},),
}
HARMLESS: Json = {"n": 1, "logprobs": False, "top_logprobs": 0, "logit_bias": {}, "modalities": ["text"]}
OF_THE_SDK = {
    name: values_of(kind)
    for name, kind in get_type_hints(CompletionCreateParamsNonStreaming).items()
    if name not in {"model", "messages", "tools", "tool_choice", "parallel_tool_calls", *BY_HAND, *REFUSED}
}
OPTIONAL = {**OF_THE_SDK, **BY_HAND}
UNKNOWN = st.dictionaries(
    st.sampled_from(("thinking", "system", "top_k", "extra_body", "of_tomorrow", "é")), anything, max_size=2
)


@st.composite
def requests(draw: st.DrawFn) -> Json:
    """A request that OpenAI's own API would take; now and then with something that the gateway refuses."""
    optional = draw(st.lists(st.sampled_from(sorted(OPTIONAL)), max_size=6, unique=True))
    body: Json = {
        "model": draw(st.sampled_from(("model", "TEST/model", " Model "))),
        "messages": draw(conversations()),
        **draw(tools_and_choice()),
        **{name: draw(st.none() | OPTIONAL[name]) for name in optional},
        **draw(UNKNOWN),
        **{name: HARMLESS[name] for name in draw(st.lists(st.sampled_from(sorted(HARMLESS)), max_size=2, unique=True))},
    }
    if draw(SOMETIMES):
        name = draw(st.sampled_from(sorted(REFUSED)))
        body[name] = draw(st.sampled_from(REFUSED[name]))
    if draw(SOMETIMES):
        body["messages"].append(draw(st.sampled_from(LEGACY_MESSAGES)))
    return _few_marks(body)


def _few_marks(body: Json) -> Json:
    """Without the breakpoints that are more than the API takes."""
    parts = [part for each in body["messages"] if isinstance(each["content"], list) for part in each["content"]]
    for part in [part for part in parts if part.get("cache_control")][MOST_MARKS:]:
        del part["cache_control"]
    return body
