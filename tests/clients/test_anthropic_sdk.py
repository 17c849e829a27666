"""The newest anthropic SDK against the demo, plain and async: what its users do, and each error as it raises it."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import anthropic
import pytest

from tests.clients.both_kinds import Client, arrived, entered, every, first, kept
from tests.clients.material import CITY, LONG_TEXT, PDF, PNG, City, asked
from tests.process import GatewayProcess, eventually

pytestmark = pytest.mark.slow

MODEL = "claude-sonnet-5.5"
UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
TOOLS: list[dict[str, Any]] = [
    {"name": name, "description": f"Tells the {name} of a city.", "input_schema": CITY}
    for name in ("weather", "population")
]


def usual(text: str, **more: Any) -> dict[str, Any]:
    """What every request says, with these words of the user."""
    return {"model": MODEL, "max_tokens": 1024, "messages": asked(text), **more}


@asynccontextmanager
async def connected(kind: str, gateway: GatewayProcess, key: str = "ezat_sk_demo") -> AsyncIterator[Client]:
    """A client of this kind, with this key, that tries each request once."""
    made = {"plain": anthropic.Anthropic, "async": anthropic.AsyncAnthropic}[kind]
    async with entered(made(api_key=key, base_url=gateway.url, max_retries=0, timeout=20)) as client:
        yield client


@pytest.fixture
async def client(kind: str, gateway: GatewayProcess) -> AsyncIterator[Client]:
    async with connected(kind, gateway) as made:
        yield made


async def message_of_create(client: Client, **ask: Any) -> Any:
    return await arrived(client.messages.create(**ask))


async def message_of_helper(client: Client, **ask: Any) -> Any:
    async with entered(client.messages.stream(**ask)) as stream:
        return await arrived(stream.get_final_message())


async def test_a_plain_message(client: Client) -> None:
    """A message has its text, its ending, its usage and the model's name as it was sent."""
    answer = await message_of_create(client, **usual("Good morning!"))

    [block] = answer.content
    assert "Good morning!" in block.text
    assert ("message", "assistant", "end_turn", MODEL) == (answer.type, answer.role, answer.stop_reason, answer.model)
    assert 0 < answer.usage.input_tokens < answer.usage.output_tokens


async def test_a_stream_says_what_the_plain_answer_says(client: Client) -> None:
    """A stream adds up to the plain answer, in the events that the SDK knows and in their order, usage and all."""
    plain = await message_of_create(client, **usual("Good morning!"))

    events = await every(await message_of_create(client, **usual("Good morning!", stream=True)))

    kinds = [event.type for event in events if event.type != "content_block_delta"]
    text = "".join(event.delta.text for event in events if event.type == "content_block_delta")
    assert ["message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"] == kinds
    assert plain.content[0].text == text
    assert MODEL == events[0].message.model
    assert plain.usage.input_tokens == events[0].message.usage.input_tokens
    assert plain.usage.output_tokens == events[-2].usage.output_tokens


async def test_the_stream_helper_puts_the_message_together(client: Client) -> None:
    """The helper's final message is the plain one, and its text that of its deltas."""
    plain = await message_of_create(client, **usual("Good morning!"))

    async with entered(client.messages.stream(**usual("Good morning!"))) as stream:
        deltas = await every(stream.text_stream)
        final = await arrived(stream.get_final_message())

    assert plain.content[0].text == "".join(deltas) == final.content[0].text
    assert "end_turn" == final.stop_reason
    assert plain.usage.output_tokens == final.usage.output_tokens


@pytest.mark.parametrize("complete", [message_of_create, message_of_helper])
async def test_parallel_tools_make_the_round_trip(client: Client, complete: Callable[..., Any]) -> None:
    """The SDK's own blocks, thinking among them, appended with the tools' results, are a conversation that goes on."""
    ask = usual("Ask in parallel about Lisbon.", tools=TOOLS, thinking={"type": "adaptive"})
    called = await complete(client, **ask)
    calls = [block for block in called.content if block.type == "tool_use"]

    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": f"{call.name} of {call.input['city']}: fine"}
        for call in calls
    ]
    ask["messages"] += [{"role": "assistant", "content": called.content}, {"role": "user", "content": results}]
    answered = await complete(client, **ask)

    assert "tool_use" == called.stop_reason
    assert ["thinking", "tool_use", "tool_use"] == [block.type for block in called.content]
    assert ["weather", "population"] == [call.name for call in calls]
    assert "end_turn" == answered.stop_reason
    assert "weather of" in answered.content[-1].text
    assert "population of" in answered.content[-1].text


async def test_structured_output_is_parsed(client: Client) -> None:
    """``parse`` gives an instance of the model that was asked for."""
    answer = await arrived(client.messages.parse(**usual("Tell me about Porto."), output_format=City))

    assert isinstance(answer.parsed_output, City)


async def test_structured_output_is_parsed_from_a_stream(client: Client) -> None:
    """The stream helper parses as ``parse`` does."""
    final = await message_of_helper(client, **usual("Tell me about Porto."), output_format=City)

    assert isinstance(final.parsed_output, City)


@pytest.mark.parametrize(
    ("block", "media_type", "data", "tokens"),
    [
        pytest.param("image", "image/png", PNG, 1000, id="image"),
        pytest.param("document", "application/pdf", PDF, 2000, id="PDF"),
    ],
)
async def test_inline_data_arrives(client: Client, block: str, media_type: str, data: str, tokens: int) -> None:
    """An image or a PDF in the message reaches the model: it counts what such a thing costs."""
    source = {"type": "base64", "media_type": media_type, "data": data}
    content = [{"type": "text", "text": "What is this?"}, {"type": block, "source": source}]

    answer = await message_of_create(client, **usual("", messages=[{"role": "user", "content": content}]))

    assert tokens <= answer.usage.input_tokens < tokens + 100


async def test_tokens_are_counted(client: Client) -> None:
    """``count_tokens`` counts what the message is billed for."""
    ask = {"model": MODEL, "messages": asked("Good morning!"), "system": LONG_TEXT, "tools": TOOLS}

    counted = await arrived(client.messages.count_tokens(**ask))
    billed = await message_of_create(client, **ask, max_tokens=1024)

    assert counted.input_tokens > 100
    assert counted.input_tokens == billed.usage.input_tokens


async def test_the_second_turn_reads_from_the_cache(client: Client, kind: str) -> None:
    """The marks that the client sets work as they do with the provider itself."""
    marked = {"type": "text", "text": f"{kind}: {LONG_TEXT}", "cache_control": {"type": "ephemeral"}}
    ask = usual("Who are you?", system=[marked])
    first_turn = await message_of_create(client, **ask)
    ask["messages"] += [{"role": "assistant", "content": first_turn.content}, *asked("And what do you see?")]

    second_turn = await message_of_create(client, **ask)

    assert 0 == first_turn.usage.cache_read_input_tokens
    assert second_turn.usage.cache_read_input_tokens > 0
    assert first_turn.usage.cache_creation_input_tokens == second_turn.usage.cache_read_input_tokens


async def test_the_beta_client_is_served(client: Client) -> None:
    """The beta client's query string and header do no harm."""
    answer = await arrived(client.beta.messages.create(**usual("Hello!"), betas=["interleaved-thinking-2025-05-14"]))

    assert "end_turn" == answer.stop_reason


@pytest.mark.parametrize("page", [1, 2, 20])
async def test_the_list_of_models(client: Client, page: int) -> None:
    """Every model is listed under its canonical id, however many the SDK asks for at a time."""
    listed = await every(client.models.list(limit=page))

    assert ["anthropic/claude-sonnet-5-5", "anthropic/claude-haiku-4-5", "demo/tiny"] == [each.id for each in listed]
    assert {"model"} == {each.type for each in listed}
    assert all(each.display_name and each.created_at.year > 2000 for each in listed)


@pytest.mark.parametrize("name", ["anthropic/claude-sonnet-5-5", "claude-sonnet-5.5"])
async def test_one_model(client: Client, name: str) -> None:
    """A model is found by its id, slash and all, and by its aliases."""
    found = await arrived(client.models.retrieve(name))

    assert "model" == found.type
    assert "sonnet" in found.id


def body_of(error: anthropic.APIStatusError) -> dict[str, Any]:
    """The error as the gateway told it."""
    assert isinstance(error.body, dict)
    return error.body


async def test_the_request_id_is_the_sdks(client: Client) -> None:
    """The SDK reads the gateway's own id, of an answer, of a stream and of an error; the error quotes the client's."""
    answer = await message_of_create(client, **usual("Hello!"))
    async with entered(client.messages.stream(**usual("Hello!"))) as stream:
        streamed = stream.request_id
    with pytest.raises(anthropic.BadRequestError) as raised:
        await message_of_create(client, **usual("fault 400"), extra_headers={"x-request-id": "trace-7"})

    ids = [answer._request_id, streamed, raised.value.request_id]
    assert [] == [each for each in ids if not UUID.fullmatch(each or "")]
    assert 3 == len(set(ids))
    assert "trace-7" == body_of(raised.value)["request_id"]


class Failure(NamedTuple):
    """What is asked beyond the usual, and how the SDK says that it failed."""

    raised: type[anthropic.APIStatusError]
    status: int
    type: str
    message: str
    ask: Mapping[str, Any] = MappingProxyType({})
    key: str = "ezat_sk_demo"


REFUSALS = {
    "an unknown key": Failure(
        anthropic.AuthenticationError,
        *(401, "authentication_error", "the API key is not valid"),
        key="ezat_sk_unknown",
    ),
    "a revoked key": Failure(
        anthropic.AuthenticationError,
        *(401, "authentication_error", "the API key is not valid"),
        key="ezat_sk_revoked",
    ),
    "no money left": Failure(
        anthropic.PaymentRequiredError,
        *(402, "billing_error", "the prepaid balance of this organization is used up"),
        key="ezat_sk_penniless",
    ),
    "a suspended organization": Failure(
        anthropic.PermissionDeniedError,
        *(403, "permission_error", "the organization of this key is suspended"),
        key="ezat_sk_frozen",
    ),
    "a model that the key may not use": Failure(
        anthropic.PermissionDeniedError,
        *(403, "permission_error", f"this key may not use the model `{MODEL}`"),
        key="ezat_sk_haiku",
    ),
    "an unknown model": Failure(
        anthropic.NotFoundError,
        *(404, "not_found_error", "The model `gpt-9` does not exist or you do not have access to it."),
        {"model": "gpt-9"},
    ),
    "a wrong field": Failure(
        anthropic.BadRequestError,
        *(400, "invalid_request_error", "max_tokens: must be an integer of at least 1"),
        {"max_tokens": 0},
    ),
    "more than 32 MB": Failure(
        anthropic.ContentTooLargeError,
        *(413, "request_too_large", "the request is larger than 32 MB"),
        {"messages": asked("x" * 33 * 2**20)},
    ),
}
FAULTS = {
    "400": Failure(anthropic.BadRequestError, 400, "invalid_request_error", "The demo fails as asked: fault 400."),
    "401": Failure(anthropic.InternalServerError, 500, "api_error", "the provider failed"),
    "402": Failure(anthropic.InternalServerError, 500, "api_error", "the provider failed"),
    "403": Failure(anthropic.InternalServerError, 500, "api_error", "the provider failed"),
    "404": Failure(anthropic.InternalServerError, 500, "api_error", "the provider failed"),
    "413": Failure(anthropic.ContentTooLargeError, 413, "request_too_large", "fault 413"),
    "429": Failure(anthropic.RateLimitError, 429, "rate_limit_error", "fault 429"),
    "500": Failure(anthropic.InternalServerError, 500, "api_error", "the provider failed"),
    "503": Failure(anthropic.OverloadedError, 529, "overloaded_error", "fault 503"),
    "504": Failure(anthropic.GatewayTimeoutError, 504, "timeout_error", "fault 504"),
    "529": Failure(anthropic.OverloadedError, 529, "overloaded_error", "fault 529"),
}
FAILURES = REFUSALS | {
    f"fault {name} of the provider": each._replace(ask={"messages": asked(f"fault {name}")})
    for name, each in FAULTS.items()
}


@pytest.mark.parametrize("stream", [pytest.param(False, id="whole"), pytest.param(True, id="stream")])
@pytest.mark.parametrize("name", FAILURES)
async def test_a_failure_is_the_sdks_error(kind: str, gateway: GatewayProcess, name: str, stream: bool) -> None:
    """Each failure before the answer begins is raised as the SDK's class for it, streamed or not."""
    failure = FAILURES[name]
    ask = {**usual("Hello!", stream=stream), **failure.ask}

    async with connected(kind, gateway, failure.key) as client:
        with pytest.raises(failure.raised) as raised:
            await message_of_create(client, **ask)

    told = body_of(raised.value)["error"]
    assert failure.raised is type(raised.value)
    assert (failure.status, failure.type) == (raised.value.status_code, told["type"])
    assert failure.message in told["message"]
    assert raised.value.request_id


async def test_a_connection_that_the_provider_drops_is_a_500(client: Client) -> None:
    """A provider that drops the connection instead of answering is the provider's failure."""
    with pytest.raises(anthropic.InternalServerError) as raised:
        await message_of_create(client, **usual("fault cut"))

    assert (500, "api_error") == (raised.value.status_code, body_of(raised.value)["error"]["type"])


async def ask_three_times(client: Client) -> None:
    """Twice would do, if the limit's minute could not end in between."""
    for _ in range(3):
        await message_of_create(client, **usual("Hello!"))


async def test_too_many_requests_say_when_to_come_back(kind: str, gateway: GatewayProcess) -> None:
    """Beyond the key's limit the SDK raises its RateLimitError, with whole seconds to wait."""
    async with connected(kind, gateway, "ezat_sk_one_a_minute") as client:
        with pytest.raises(anthropic.RateLimitError) as raised:
            await ask_three_times(client)

    assert "rate_limit_error" == body_of(raised.value)["error"]["type"]
    assert 1 <= int(raised.value.response.headers["retry-after"]) <= 60


@pytest.mark.parametrize(
    ("call", "words"),
    [
        pytest.param(lambda client: client.messages.batches.retrieve("one"), "batches are not offered", id="batches"),
        pytest.param(lambda client: client.models.retrieve("gpt-9"), "`gpt-9`", id="an unknown model"),
    ],
)
async def test_what_is_not_there_is_not_found(client: Client, call: Callable[[Client], Any], words: str) -> None:
    """What the gateway does not offer is a NotFoundError whose words help."""
    with pytest.raises(anthropic.NotFoundError, match=words):
        await arrived(call(client))


BROKEN = [
    pytest.param("error", "overloaded_error", "The demo fails as asked: fault error.", id="an error event"),
    pytest.param("cut", "api_error", "the provider's answer broke off", id="a connection cut"),
]


@pytest.mark.parametrize(("name", "type_", "message"), BROKEN)
async def test_a_broken_stream_is_raised(client: Client, name: str, type_: str, message: str) -> None:
    """A stream that breaks in its middle is raised as an error behind what came; it never looks whole."""
    events: list[Any] = []

    with pytest.raises(anthropic.APIStatusError) as raised:
        await kept(events, await message_of_create(client, **usual(f"fault {name}", stream=True)))

    assert {"type": type_, "message": message} == body_of(raised.value)["error"]
    assert "content_block_delta" in [event.type for event in events]
    assert {"message_delta", "message_stop"}.isdisjoint(event.type for event in events)


@pytest.mark.parametrize(("name", "type_", "message"), BROKEN)
async def test_the_stream_helper_raises_a_broken_stream(client: Client, name: str, type_: str, message: str) -> None:
    """The helper gives no final message of half an answer."""
    async with entered(client.messages.stream(**usual(f"fault {name}"))) as stream:
        with pytest.raises(anthropic.APIStatusError) as raised:
            await arrived(stream.get_final_message())

    assert {"type": type_, "message": message} == body_of(raised.value)["error"]


async def test_a_stream_left_early_is_abandoned(client: Client, gateway: GatewayProcess) -> None:
    """A client that leaves is noticed within a second: its line in the log says so."""
    async with entered(client.messages.stream(**usual("slow"))) as stream:
        await first(stream.text_stream)
        request_id = stream.request_id

    [line] = await eventually(lambda: gateway.requests(request_id=request_id), 1)

    assert ("abandoned", "messages") == (line["outcome"], line["route"])
    assert line["output"] > 0
