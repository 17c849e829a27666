"""The newest openai SDK against the demo, plain and async: what its users do, and each error as it raises it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import openai
import pytest

from tests.clients.both_kinds import Client, arrived, entered, every, first, kept
from tests.clients.material import CITY, LONG_TEXT, PDF, PNG, City, asked
from tests.process import GatewayProcess, eventually

pytestmark = pytest.mark.slow

MODEL = "claude-sonnet-5.5"
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {"name": name, "description": f"Tells the {name} of a city.", "parameters": CITY},
    }
    for name in ("weather", "population")
]


@asynccontextmanager
async def connected(kind: str, gateway: GatewayProcess, key: str = "ezat_sk_demo") -> AsyncIterator[Client]:
    """A client of this kind, with this key, that tries each request once."""
    made = {"plain": openai.OpenAI, "async": openai.AsyncOpenAI}[kind]
    async with entered(made(api_key=key, base_url=f"{gateway.url}/openai/v1", max_retries=0, timeout=20)) as client:
        yield client


@pytest.fixture
async def client(kind: str, gateway: GatewayProcess) -> AsyncIterator[Client]:
    async with connected(kind, gateway) as made:
        yield made


async def completion_of_create(client: Client, **ask: Any) -> Any:
    return await arrived(client.chat.completions.create(model=MODEL, **ask))


async def completion_of_helper(client: Client, **ask: Any) -> Any:
    async with entered(client.chat.completions.stream(model=MODEL, **ask)) as stream:
        return await arrived(stream.get_final_completion())


async def test_a_plain_completion(client: Client) -> None:
    """A completion has its text, its ending, its usage and the model's name as it was sent."""
    answer = await completion_of_create(client, messages=asked("Good morning!"))

    [choice] = answer.choices
    assert "Good morning!" in choice.message.content
    assert ("assistant", "stop") == (choice.message.role, choice.finish_reason)
    assert ("chat.completion", MODEL) == (answer.object, answer.model)
    assert 0 < answer.usage.prompt_tokens < answer.usage.completion_tokens
    assert answer.usage.prompt_tokens + answer.usage.completion_tokens == answer.usage.total_tokens


async def test_a_stream_says_what_the_plain_answer_says(client: Client) -> None:
    """A stream adds up to the plain answer, with the same usage where that is asked for."""
    plain = await completion_of_create(client, messages=asked("Good morning!"))

    stream = await completion_of_create(
        client, messages=asked("Good morning!"), stream=True, stream_options={"include_usage": True}
    )
    chunks = await every(stream)

    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert plain.choices[0].message.content == "".join(choice.delta.content or "" for choice in choices)
    assert ["stop"] == [choice.finish_reason for choice in choices if choice.finish_reason]
    assert [plain.usage] == [chunk.usage for chunk in chunks if chunk.usage]
    assert [] == chunks[-1].choices


async def test_a_stream_has_no_usage_unless_it_is_asked_for(client: Client) -> None:
    """Without include_usage no chunk carries usage, so a client that expects a choice in each chunk finds it."""
    chunks = await every(await completion_of_create(client, messages=asked("Hello!"), stream=True))

    assert chunks
    assert [] == [chunk for chunk in chunks if chunk.usage is not None or not chunk.choices]
    assert 1 == len({(chunk.id, chunk.created, chunk.model) for chunk in chunks})


async def test_the_stream_helper_puts_the_answer_together(client: Client) -> None:
    """The helper's events end in a whole completion whose text is that of its deltas."""
    async with entered(client.chat.completions.stream(model=MODEL, messages=asked("Good morning!"))) as stream:
        events = await every(stream)
        final = await arrived(stream.get_final_completion())

    deltas = "".join(event.delta for event in events if event.type == "content.delta")
    assert deltas == final.choices[0].message.content
    assert "Good morning!" in deltas
    assert "stop" == final.choices[0].finish_reason


@pytest.mark.parametrize("complete", [completion_of_create, completion_of_helper])
async def test_parallel_tools_make_the_round_trip(client: Client, complete: Callable[..., Any]) -> None:
    """The SDK's own reply object, appended with the tools' results, is a conversation that goes on."""
    messages: list[Any] = asked("Ask in parallel about Lisbon.")
    called = await complete(client, messages=messages, tools=TOOLS)
    calls = called.choices[0].message.tool_calls

    messages.append(called.choices[0].message)
    for call in calls:
        result = f"{call.function.name} of {json.loads(call.function.arguments)['city']}: fine"
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    answered = await complete(client, messages=messages, tools=TOOLS)

    assert "tool_calls" == called.choices[0].finish_reason
    assert ["weather", "population"] == [call.function.name for call in calls]
    assert 2 == len({call.id for call in calls})
    assert "stop" == answered.choices[0].finish_reason
    assert "weather of" in answered.choices[0].message.content
    assert "population of" in answered.choices[0].message.content


async def test_structured_output_is_parsed(client: Client) -> None:
    """``parse`` gives an instance of the model that was asked for."""
    answer = await arrived(
        client.chat.completions.parse(model=MODEL, messages=asked("Tell me about Porto."), response_format=City)
    )

    assert isinstance(answer.choices[0].message.parsed, City)


async def test_structured_output_is_parsed_from_a_stream(client: Client) -> None:
    """The stream helper parses as ``parse`` does."""
    final = await completion_of_helper(client, messages=asked("Tell me about Porto."), response_format=City)

    assert isinstance(final.choices[0].message.parsed, City)


@pytest.mark.parametrize(
    ("part", "tokens"),
    [
        pytest.param({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}, 1000, id="image"),
        pytest.param(
            {"type": "file", "file": {"filename": "a.pdf", "file_data": f"data:application/pdf;base64,{PDF}"}},
            2000,
            id="PDF",
        ),
    ],
)
async def test_a_data_url_arrives(client: Client, part: dict[str, Any], tokens: int) -> None:
    """An image or a PDF in the message reaches the model: it counts what such a thing costs."""
    content = [{"type": "text", "text": "What is this?"}, part]

    answer = await completion_of_create(client, messages=[{"role": "user", "content": content}])

    assert tokens <= answer.usage.prompt_tokens < tokens + 100


async def test_reasoning_is_counted(client: Client) -> None:
    """With an effort the model thinks; the thinking is counted and not shown."""
    answer = await completion_of_create(client, messages=asked("Think hard."), reasoning_effort="high")

    assert 0 < answer.usage.completion_tokens_details.reasoning_tokens < answer.usage.completion_tokens


async def test_the_second_turn_reads_from_the_cache(client: Client) -> None:
    """The prompt cache works though the client knows nothing of it."""
    messages: list[Any] = [{"role": "system", "content": LONG_TEXT}, *asked("Who are you?")]
    first_turn = await completion_of_create(client, messages=messages)
    messages += [first_turn.choices[0].message, *asked("And what do you see?")]

    second_turn = await completion_of_create(client, messages=messages)

    cached = second_turn.usage.prompt_tokens_details.cached_tokens
    assert cached > 0
    assert first_turn.usage.prompt_tokens <= cached < second_turn.usage.prompt_tokens


async def test_the_list_of_models(client: Client) -> None:
    """Every model of the configuration is listed under its canonical id."""
    listed = await every(client.models.list())

    assert ["anthropic/claude-sonnet-5-5", "anthropic/claude-haiku-4-5", "demo/tiny"] == [each.id for each in listed]
    assert {"model"} == {each.object for each in listed}


@pytest.mark.parametrize("name", ["anthropic/claude-sonnet-5-5", "claude-sonnet-5.5"])
async def test_one_model(client: Client, name: str) -> None:
    """A model is found by its id, slash and all, and by its aliases."""
    found = await arrived(client.models.retrieve(name))

    assert ("model", "anthropic") == (found.object, found.owned_by)


async def test_the_request_id_is_the_sdks(client: Client) -> None:
    """The SDK reads the id to quote in a report, that of the client where it sends one."""
    given = await completion_of_create(client, messages=asked("Hello!"), extra_headers={"x-request-id": "trace-7"})
    made = await completion_of_create(client, messages=asked("Hello!"))

    assert "trace-7" == given._request_id
    assert f"chatcmpl-{made._request_id}" == made.id


class Failure(NamedTuple):
    """What is asked beyond the usual, and how the SDK says that it failed."""

    raised: type[openai.APIStatusError]
    status: int
    type: str
    code: str | None
    message: str
    ask: Mapping[str, Any] = MappingProxyType({})
    key: str = "ezat_sk_demo"
    param: str | None = None


REFUSALS = {
    "an unknown key": Failure(
        openai.AuthenticationError,
        *(401, "invalid_request_error", "invalid_api_key", "the API key is not valid"),
        key="ezat_sk_unknown",
    ),
    "a revoked key": Failure(
        openai.AuthenticationError,
        *(401, "invalid_request_error", "invalid_api_key", "the API key is not valid"),
        key="ezat_sk_revoked",
    ),
    "no money left": Failure(
        openai.APIStatusError,
        *(402, "insufficient_quota", "insufficient_quota", "the prepaid balance of this organization is used up"),
        key="ezat_sk_penniless",
    ),
    "a suspended organization": Failure(
        openai.PermissionDeniedError,
        *(403, "permission_error", None, "the organization of this key is suspended"),
        key="ezat_sk_frozen",
    ),
    "a model that the key may not use": Failure(
        openai.PermissionDeniedError,
        *(403, "permission_error", None, f"this key may not use the model `{MODEL}`"),
        key="ezat_sk_haiku",
        param="model",
    ),
    "an unknown model": Failure(
        openai.NotFoundError,
        *(404, "invalid_request_error", "model_not_found"),
        "The model `gpt-9` does not exist or you do not have access to it.",
        {"model": "gpt-9"},
        param="model",
    ),
    "a refused field": Failure(
        openai.BadRequestError,
        *(400, "invalid_request_error", None, "n: only 1 choice per request is supported"),
        {"n": 2},
        param="n",
    ),
    "more than 32 MB": Failure(
        openai.APIStatusError,
        *(413, "invalid_request_error", "request_too_large", "the request is larger than 32 MB"),
        {"messages": asked("x" * 33 * 2**20)},
    ),
}
FAULTS = {
    "400": Failure(openai.BadRequestError, 400, "invalid_request_error", None, "The demo fails as asked: fault 400."),
    "401": Failure(openai.InternalServerError, 500, "server_error", None, "the provider failed"),
    "402": Failure(openai.InternalServerError, 500, "server_error", None, "the provider failed"),
    "403": Failure(openai.InternalServerError, 500, "server_error", None, "the provider failed"),
    "404": Failure(openai.InternalServerError, 500, "server_error", None, "the provider failed"),
    "413": Failure(openai.APIStatusError, 413, "invalid_request_error", "request_too_large", "fault 413"),
    "429": Failure(openai.RateLimitError, 429, "rate_limit_error", "rate_limit_exceeded", "fault 429"),
    "500": Failure(openai.InternalServerError, 500, "server_error", None, "the provider failed"),
    "503": Failure(openai.InternalServerError, 503, "server_error", "overloaded", "fault 503"),
    "504": Failure(openai.InternalServerError, 504, "server_error", "timeout", "fault 504"),
    "529": Failure(openai.InternalServerError, 503, "server_error", "overloaded", "fault 529"),
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
    ask = {"model": MODEL, "messages": asked("Hello!"), "stream": stream, **failure.ask}

    async with connected(kind, gateway, failure.key) as client:
        with pytest.raises(failure.raised) as raised:
            await arrived(client.chat.completions.create(**ask))

    error = raised.value
    assert failure.raised is type(error)
    assert (failure.status, failure.type, failure.code) == (error.status_code, error.type, error.code)
    assert failure.param == error.param
    assert failure.message in error.message
    assert error.request_id


async def test_a_connection_that_the_provider_drops_is_a_500(client: Client) -> None:
    """A provider that drops the connection instead of answering is the provider's failure."""
    with pytest.raises(openai.InternalServerError) as raised:
        await completion_of_create(client, messages=asked("fault cut"))

    assert (500, "server_error") == (raised.value.status_code, raised.value.type)


async def ask_three_times(client: Client) -> None:
    """Twice would do, if the limit's minute could not end in between."""
    for _ in range(3):
        await completion_of_create(client, messages=asked("Hello!"))


async def test_too_many_requests_say_when_to_come_back(kind: str, gateway: GatewayProcess) -> None:
    """Beyond the key's limit the SDK raises its RateLimitError, with whole seconds to wait."""
    async with connected(kind, gateway, "ezat_sk_one_a_minute") as client:
        with pytest.raises(openai.RateLimitError) as raised:
            await ask_three_times(client)

    assert "rate_limit_exceeded" == raised.value.code
    assert 1 <= int(raised.value.response.headers["retry-after"]) <= 60


@pytest.mark.parametrize(
    ("call", "words"),
    [
        pytest.param(lambda client: client.responses.create(model=MODEL, input="Hello!"), "chat/completions", id="API"),
        pytest.param(lambda client: client.embeddings.create(model=MODEL, input="Hello!"), "embeddings", id="endpoint"),
        pytest.param(lambda client: client.models.retrieve("gpt-9"), "`gpt-9`", id="model"),
    ],
)
async def test_what_is_not_there_is_not_found(client: Client, call: Callable[[Client], Any], words: str) -> None:
    """What the gateway does not offer is a NotFoundError whose words help."""
    with pytest.raises(openai.NotFoundError, match=words):
        await arrived(call(client))


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        pytest.param("error", "overloaded", "The demo fails as asked: fault error.", id="an error event"),
        pytest.param("cut", None, "the provider's answer broke off", id="a connection cut"),
    ],
)
async def test_a_broken_stream_is_raised(client: Client, name: str, code: str | None, message: str) -> None:
    """A stream that breaks in its middle is raised as an error behind what came; it never looks whole."""
    chunks: list[Any] = []
    ask = {"messages": asked(f"fault {name}"), "stream": True, "stream_options": {"include_usage": True}}

    with pytest.raises(openai.APIError) as raised:
        await kept(chunks, await completion_of_create(client, **ask))

    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert ("server_error", code, message) == (raised.value.type, raised.value.code, raised.value.message)
    assert any(choice.delta.content for choice in choices)
    assert [] == [choice.finish_reason for choice in choices if choice.finish_reason]
    assert [] == [chunk.usage for chunk in chunks if chunk.usage]


@pytest.mark.parametrize("name", ["error", "cut"])
async def test_the_stream_helper_raises_a_broken_stream(client: Client, name: str) -> None:
    """The helper gives no final completion of half an answer."""
    async with entered(client.chat.completions.stream(model=MODEL, messages=asked(f"fault {name}"))) as stream:
        with pytest.raises(openai.APIError):
            await arrived(stream.get_final_completion())


async def test_a_stream_left_early_is_abandoned(client: Client, gateway: GatewayProcess) -> None:
    """A client that leaves is noticed within a second: its line in the log says so."""
    stream = await completion_of_create(client, messages=asked("slow"), stream=True)
    begun = await first(stream)

    await arrived(stream.close())
    [line] = await eventually(lambda: gateway.requests(request_id=begun.id.removeprefix("chatcmpl-")), 1)

    assert "abandoned" == line["outcome"]
