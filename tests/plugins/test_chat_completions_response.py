"""A whole message becomes a completion."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest

from plugins.chat_completions import ChatCompletions
from plugins.chat_completions.response import message_to_completion, stop_reason_to_finish_reason
from proxy.document import Document
from proxy.plugin import OutputPlugin
from proxy.testing import ask, make_exchange, pass_answer

Json = dict[str, Any]

FINISH_REASONS: dict[Any, str] = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "pause_turn": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
    "of_tomorrow": "stop",
    "": "stop",
    None: "stop",
    7: "stop",
    ("a", "list"): "stop",
}


@pytest.mark.parametrize(("reason", "expected"), FINISH_REASONS.items(), ids=map(str, FINISH_REASONS))
def test_finish_reasons(reason: Any, expected: str) -> None:
    """Each stop_reason has its finish_reason; what nobody knows is a stop."""
    assert expected == stop_reason_to_finish_reason(list(reason) if isinstance(reason, tuple) else reason)


def completed(raw: bytes) -> Json:
    """The completion of a message of this JSON text."""
    exchange = make_exchange({"model": "Model", "messages": []})
    document = Document(raw=raw)
    exchange.usage.take(document.data.get("usage"))
    document.replace(message_to_completion(document.data, exchange))
    completion: Json = orjson.loads(document.encoded())
    return completion


def message_of(*blocks: str, **fields: Any) -> bytes:
    rest = json.dumps({"type": "message", "stop_reason": "end_turn", **fields})
    return f'{{"content":[{",".join(blocks)}],{rest[1:]}'.encode()


TEXT = '{"type":"text","text":"a"}'
CALL = '{"type":"tool_use","id":"c","name":"f","input":{}}'
SAID = {"role": "assistant", "refusal": None}


def call(arguments: str, id: str = "c", name: str = "f") -> Json:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


CONTENTS: dict[str, tuple[list[str], Json]] = {
    "nothing": ([], {"content": ""}),
    "a text": ([TEXT], {"content": "a"}),
    "an empty text": (['{"type":"text","text":""}'], {"content": ""}),
    "texts are joined without a separator": ([TEXT, '{"type":"text","text":"\\nb"}'], {"content": "a\nb"}),
    "a text of null": (['{"type":"text","text":null}', TEXT], {"content": "a"}),
    "a lone surrogate": (['{"type":"text","text":"a\\ud800b"}'], {"content": "a\ufffdb"}),
    "a pair of surrogates": (['{"type":"text","text":"\\ud83d\\ude00"}'], {"content": "😀"}),
    "citations": (['{"type":"text","text":"a","citations":[{"cited_text":"secret"}]}'], {"content": "a"}),
    "a call": ([CALL], {"content": None, "tool_calls": [call("{}")]}),
    "a text and a call": ([TEXT, CALL], {"content": "a", "tool_calls": [call("{}")]}),
    "an empty text and a call": (
        ['{"type":"text","text":""}', CALL],
        {"content": None, "tool_calls": [call("{}")]},
    ),
    "calls in their order": (
        [CALL, TEXT, CALL.replace('"c"', '"d"')],
        {"content": "a", "tool_calls": [call("{}"), call("{}", id="d")]},
    ),
    "a call without input": (
        ['{"type":"tool_use","id":"c","name":"f"}'],
        {"content": None, "tool_calls": [call("{}")]},
    ),
    "a call with an input of null": (
        ['{"type":"tool_use","id":"c","name":"f","input":null}'],
        {"content": None, "tool_calls": [call("{}")]},
    ),
    "numbers keep their digits": (
        [CALL.replace("{}", '{"a": [1.10, 1E5, -0.0, 123456789012345678901234567890]}')],
        {"content": None, "tool_calls": [call('{"a":[1.10,1E5,-0.0,123456789012345678901234567890]}')]},
    ),
    "text beyond ASCII in arguments": (
        [CALL.replace("{}", '{"é": "\\ud83d\\ude00\\ud800"}')],
        {"content": None, "tool_calls": [call('{"é":"😀\ufffd"}')]},
    ),
    "thinking": (['{"type":"thinking","thinking":"hm","signature":"s"}', TEXT], {"content": "a"}),
    "redacted thinking": (['{"type":"redacted_thinking","data":"x"}'], {"content": ""}),
    "a tool of the provider": (
        ['{"type":"server_tool_use","id":"s","name":"web_search","input":{}}', TEXT],
        {"content": "a"},
    ),
    "a block of tomorrow": (['{"type":"of_tomorrow","text":"secret"}', TEXT], {"content": "a"}),
    "a block without a type": (['{"text":"secret"}'], {"content": ""}),
}


@pytest.mark.parametrize(("blocks", "expected"), CONTENTS.values(), ids=CONTENTS)
def test_content(blocks: list[str], expected: Json) -> None:
    """Texts are joined, calls listed, and nothing else of the message is shown."""
    [choice] = completed(message_of(*blocks))["choices"]

    assert SAID | expected == choice["message"]


def test_a_whole_completion() -> None:
    """A completion has OpenAI's fields in OpenAI's words, and the client's name for the model."""
    usage = {
        "input_tokens": 3,
        "output_tokens": 9,
        "cache_read_input_tokens": 10,
        "cache_creation_input_tokens": 20,
        "output_tokens_details": {"thinking_tokens": 4},
    }

    made = completed(message_of(TEXT, stop_reason="max_tokens", usage=usage))

    assert made.pop("id").startswith("chatcmpl-")
    assert isinstance(made.pop("created"), int)
    shown = made["usage"]
    assert (33, 9, 42) == (shown["prompt_tokens"], shown["completion_tokens"], shown["total_tokens"])
    assert 10 == shown["prompt_tokens_details"]["cached_tokens"]
    assert 20 == shown["prompt_tokens_details"]["cache_write_tokens"]
    assert 4 == shown["completion_tokens_details"]["reasoning_tokens"]
    choice = {"index": 0, "message": SAID | {"content": "a"}, "logprobs": None, "finish_reason": "length"}
    expected = {"object": "chat.completion", "model": "Model", "choices": [choice], "usage": shown}
    assert expected == made


async def test_the_plugin_translates_a_whole_answer() -> None:
    """What passes the plugin's output is a completion under the exchange's id."""
    exchange = make_exchange({"messages": [{"role": "user", "content": "Hi"}]})
    output = await ask(ChatCompletions(ChatCompletions.Settings()), exchange)
    assert isinstance(output, OutputPlugin)

    passed = await pass_answer(output, json.loads(message_of(TEXT)))

    assert (f"chatcmpl-{exchange.id}", "a") == (passed["id"], passed["choices"][0]["message"]["content"])
