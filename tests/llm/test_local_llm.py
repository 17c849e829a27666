"""The gateway on a real model, judged through the SDKs, where its server differs from the provider.

A model of this size says what it likes, so its words are never judged, but what surrounds them. With temperature 0 the
same request gives the same answer again.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import openai
import pytest

from tests.clients.both_kinds import Client, arrived, entered, every
from tests.llm.conftest import KEY, RunningLlm, llm_of, local_llm_config
from tests.llm.conversations import MODEL, anthropic_tools, asked, openai_tools, schema
from tests.process import GatewayProcess, eventually, started_gateway

pytestmark = [pytest.mark.llm, pytest.mark.slow]

GREETING = "Say hello, and nothing else."
TOO_LONG = "word " * 5000
PREFIX = "You answer questions about a bicycle. " + " ".join(f"Part {number} is made of steel." for number in range(20))
SILENT_TEXT = "The {} is on the table, and nobody knows since when it has been there. "
LEFT_SECONDS = 1.0


async def test_an_openai_client_gets_a_stream(openai_client: Client) -> None:
    """OpenAI's SDK gets the model's words as a stream, one ending, its usage and the name that it sent."""
    ask = asked(GREETING, stream=True, stream_options={"include_usage": True})

    chunks = await every(await arrived(openai_client.chat.completions.create(**ask)))

    choices = [choice for chunk in chunks for choice in chunk.choices]
    [ending] = [choice.finish_reason for choice in choices if choice.finish_reason]
    [usage] = [chunk.usage for chunk in chunks if chunk.usage]
    assert "".join(choice.delta.content or "" for choice in choices).strip()
    assert {MODEL} == {chunk.model for chunk in chunks}
    assert ending in ("stop", "length")
    assert usage.prompt_tokens > 0
    assert 0 < usage.completion_tokens <= 24
    assert 0 == usage.prompt_tokens_details.cache_write_tokens


async def test_an_openai_client_gets_a_whole_answer(openai_client: Client) -> None:
    """A plain completion has text, an ending and a sum of tokens that adds up."""
    answer = await arrived(openai_client.chat.completions.create(**asked(GREETING)))

    [choice] = answer.choices
    assert choice.message.content.strip()
    assert choice.finish_reason in ("stop", "length")
    assert MODEL == answer.model
    assert answer.usage.prompt_tokens + answer.usage.completion_tokens == answer.usage.total_tokens


async def test_an_anthropic_client_gets_a_stream(anthropic_client: Client) -> None:
    """Anthropic's SDK puts the message together from the server's events."""
    async with entered(anthropic_client.messages.stream(**asked(GREETING))) as stream:
        text = "".join(await every(stream.text_stream))
        message = await arrived(stream.get_final_message())

    assert text.strip()
    assert [text] == [block.text for block in message.content]
    assert MODEL == message.model
    assert message.stop_reason in ("end_turn", "max_tokens")
    assert 0 < message.usage.output_tokens <= 24


async def test_an_anthropic_client_gets_a_whole_answer(anthropic_client: Client) -> None:
    """A plain message has text and usage."""
    message = await arrived(anthropic_client.messages.create(**asked(GREETING)))

    [block] = message.content
    assert block.text.strip()
    assert MODEL == message.model
    assert message.usage.output_tokens > 0


async def test_the_second_turn_shows_what_the_cache_held(openai_client: Client) -> None:
    """A prefix that was sent before is counted as cached, and is still part of the prompt's tokens."""

    async def usage_of(question: str) -> Any:
        messages = [{"role": "system", "content": PREFIX}, {"role": "user", "content": question}]
        ask = asked("", messages=messages, max_tokens=1)
        return (await arrived(openai_client.chat.completions.create(**ask))).usage

    await usage_of("What is part 1?")
    usage = await usage_of("What is part 2?")

    assert 100 < usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens


async def test_tokens_are_counted_as_they_are_used(anthropic_client: Client) -> None:
    """What count_tokens says is what the message takes, from the cache and beside it."""
    ask = asked("How many tokens are these?", system="Answer briefly.")
    without_limit = {name: value for name, value in ask.items() if name != "max_tokens"}

    counted = await arrived(anthropic_client.messages.count_tokens(**without_limit))
    usage = (await arrived(anthropic_client.messages.create(**ask))).usage

    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


@pytest.mark.parametrize("stream", [False, True])
async def test_an_overflow_is_told_to_an_openai_client(openai_client: Client, stream: bool) -> None:
    """A prompt beyond the context is a 400 in OpenAI's envelope, with the server's own sentence."""
    with pytest.raises(openai.BadRequestError) as caught:
        await arrived(openai_client.chat.completions.create(**asked(TOO_LONG, stream=stream)))

    body: Any = caught.value.body
    assert "exceeds the available context size (4096 tokens)" in body["message"]
    assert {"type": "invalid_request_error", "param": None, "code": None} == {
        name: body[name] for name in ("type", "param", "code")
    }


@pytest.mark.parametrize("stream", [False, True])
async def test_an_overflow_is_told_to_an_anthropic_client(anthropic_client: Client, stream: bool) -> None:
    """The same in the Messages envelope, with the server's details and the gateway's id."""
    with pytest.raises(anthropic.BadRequestError) as caught:
        await arrived(anthropic_client.messages.create(**asked(TOO_LONG, stream=stream)))

    body: Any = caught.value.body
    assert {"type", "error", "request_id"} == set(body)
    assert "error" == body["type"]
    assert "exceeds the available context size (4096 tokens)" in body["error"]["message"]
    assert 4096 == body["error"]["n_ctx"]
    assert caught.value.response.headers["x-request-id"] == body["request_id"]


async def test_a_stop_sequence_ends_the_answer(openai_client: Client, anthropic_client: Client) -> None:
    """The server says end_turn and names the sequence: both formats show an ordinary end before it."""
    ask = asked("Tell the days of the week.", extra_body={"temperature": 0})
    whole = (await arrived(anthropic_client.messages.create(**ask))).content[0].text
    word = whole.split()[3]

    message = await arrived(anthropic_client.messages.create(**ask, stop_sequences=[word]))
    completion = await arrived(openai_client.chat.completions.create(**ask, stop=word))

    before = whole.partition(word)[0]
    assert ("end_turn", word) == (message.stop_reason, message.stop_sequence)
    assert [before] == [block.text for block in message.content]
    assert (before, "stop") == (completion.choices[0].message.content, completion.choices[0].finish_reason)


async def completion_of_create(client: Client, **ask: Any) -> Any:
    return await arrived(client.chat.completions.create(**ask))


async def completion_of_stream(client: Client, **ask: Any) -> Any:
    async with entered(client.chat.completions.stream(**ask)) as stream:
        return await arrived(stream.get_final_completion())


async def message_of_create(client: Client, **ask: Any) -> Any:
    return await arrived(client.messages.create(**ask))


async def message_of_stream(client: Client, **ask: Any) -> Any:
    async with entered(client.messages.stream(**ask)) as stream:
        return await arrived(stream.get_final_message())


@pytest.mark.parametrize("complete", [completion_of_create, completion_of_stream])
async def test_an_openai_client_gets_a_tool_call(openai_client: Client, complete: Callable[..., Any]) -> None:
    """A call has an id, its name and whole arguments, though its block opens without input before the text's closes."""
    answer = await complete(openai_client, **openai_tools())

    [choice] = answer.choices
    [call] = choice.message.tool_calls or no_call()
    assert call.id
    assert ("function", "weather") == (call.type, call.function.name)
    assert isinstance(json.loads(call.function.arguments), dict)
    assert "tool_calls" == choice.finish_reason


@pytest.mark.parametrize("complete", [message_of_create, message_of_stream])
async def test_an_anthropic_client_gets_a_tool_call(anthropic_client: Client, complete: Callable[..., Any]) -> None:
    """The same in the Messages format: the SDK puts the input together."""
    message = await complete(anthropic_client, **anthropic_tools())

    [call] = [block for block in message.content if block.type == "tool_use"] or no_call()
    assert call.id
    assert "weather" == call.name
    assert isinstance(call.input, dict)
    assert "tool_use" == message.stop_reason


def no_call() -> list[Any]:
    pytest.skip("the model called no tool here: its arithmetic differs from one kind of processor to another")


async def test_overlapping_blocks_are_told_apart(gateway: GatewayProcess) -> None:
    """Blocks that close only at the end, together, are one text and one call with the index 0."""
    ask = {**openai_tools(), "stream": True}

    chunks = [json.loads(line) for line in await lines(gateway, "/openai/v1/chat/completions", ask) if "{" in line]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())] or no_call()

    assert "".join(delta.get("content") or "" for delta in deltas).strip()
    assert {0} == {call["index"] for call in calls}
    assert ["weather"] == [call["function"]["name"] for call in calls if "name" in call["function"]]
    assert "" == calls[0]["function"]["arguments"]


async def lines(gateway: GatewayProcess, path: str, ask: dict[str, Any]) -> list[str]:
    """The lines of a stream that aren't empty, each without the word `data`."""
    async with aiohttp.ClientSession(gateway.url, headers={"x-api-key": KEY}) as client:
        answer = await client.post(path, json=ask)
        return [line.removeprefix("data: ") for line in (await answer.text()).splitlines() if line]


@pytest.mark.parametrize(
    ("path", "ping", "word"),
    [
        pytest.param("/openai/v1/chat/completions", [": ping"], "cup", id="openai"),
        pytest.param("/v1/messages", ["event: ping", '{"type": "ping"}'], "pen", id="messages"),
    ],
)
async def test_a_long_prompt_is_waited_for(gateway: GatewayProcess, path: str, ping: list[str], word: str) -> None:
    """While the model reads, the client gets the gateway's keep-alives, and never the server's own comments."""
    ask = asked(SILENT_TEXT.format(word) * 20, stream=True, max_tokens=2)

    came = await lines(gateway, path, ask)

    assert ping == came[: len(ping)]
    assert {": ping"} >= {line for line in came if line.startswith(":")}
    assert came[-1] in ("[DONE]", '{"type":"message_stop"}')


@pytest.mark.parametrize("path", ["/openai/v1/chat/completions", "/v1/messages"])
async def test_the_model_stops_when_the_client_leaves(gateway: GatewayProcess, llm: RunningLlm, path: str) -> None:
    """A client that leaves a stream takes it with it: the model is free long before the answer would be whole."""
    ask = asked("Tell a very long story about a fox.", stream=True, max_tokens=2000)
    async with aiohttp.ClientSession(gateway.url, headers={"x-api-key": KEY}) as client:
        answer = await client.post(path, json=ask)
        await answer.content.readany()
        was_busy = llm.is_busy()

        answer.close()
        await eventually(lambda: not llm.is_busy(), LEFT_SECONDS)

    assert was_busy


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("reasoning_effort", "low"),
        ("tool_choice", "required"),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "city", "schema": schema()}}),
    ],
)
async def test_what_the_model_cannot_do_is_refused(openai_client: Client, name: str, value: object) -> None:
    """What the server would take and ignore is a 400 that names the field."""
    ask = {**openai_tools(), name: value}

    with pytest.raises(openai.BadRequestError, match=f"{name}: "):
        await arrived(openai_client.chat.completions.create(**ask))


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGKILL])
async def test_the_model_ends_with_the_gateway(packages: None, by: signal.Signals, tmp_path: Path) -> None:
    """However the gateway ends, asked to or killed, its child is gone."""
    with started_gateway(local_llm_config(), tmp_path) as gateway:
        llm = llm_of(gateway)
        was_gone = llm.is_gone()

        gateway.terminate(by)
        await eventually(llm.is_gone)

    assert not was_gone
