"""LangChain's chat models against the demo, unmodified: ChatOpenAI on one format, ChatAnthropic on the other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.clients.gateway import clients_gateway
from tests.clients.playing import (
    FAILURES,
    PROMISES,
    PYTHON_RAISES,
    Client,
    Played,
    check_city,
    check_failure,
    check_known,
    play,
    promises_of,
    python_script,
)

pytestmark = pytest.mark.clients

OPENAI_RAISES = PYTHON_RAISES | {
    400: "OpenAIInvalidRequestError",
    401: "OpenAIAuthenticationError",
    403: "OpenAIPermissionDeniedError",
    404: "OpenAIModelNotFoundError",
    429: "OpenAIRateLimitError",
    **dict.fromkeys((500, 503, 504), "OpenAIAPIError"),
}
ANTHROPIC_RAISES = {
    400: "AnthropicInvalidRequestError",
    401: "AnthropicAuthenticationError",
    402: "PaymentRequiredError",
    403: "AnthropicPermissionDeniedError",
    404: "AnthropicModelNotFoundError",
    413: "ContentTooLargeError",
    429: "AnthropicRateLimitError",
    500: "AnthropicAPIError",
    504: "AnthropicAPIError",
    529: "AnthropicOverloadedError",
}
CLIENTS = {
    "ChatOpenAI": Client(python_script("newest", "langchain_models", "openai"), "openai", OPENAI_RAISES),
    "ChatAnthropic": Client(
        python_script("newest", "langchain_models", "messages"),
        "messages",
        ANTHROPIC_RAISES,
        {"request id": "it shows no header of an answer; its errors have the id"},
    ),
}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Played]]:
    folder = tmp_path_factory.mktemp("langchain")
    with clients_gateway(folder, CLIENTS) as gateway:
        yield {name: play(name, client, gateway, folder) for name, client in CLIENTS.items()}


@pytest.mark.parametrize(("client", "case"), promises_of(CLIENTS))
def test_a_chat_model_works(played: dict[str, Played], client: str, case: str) -> None:
    """What LangChain offers of a model works by its base URL alone."""
    PROMISES[case](played[client])


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("client", CLIENTS)
def test_a_failure_is_the_sdks_error(played: dict[str, Played], client: str, failure: str) -> None:
    """Each failure is raised as the class that the SDK below has for it."""
    check_failure(played[client], failure)


@pytest.mark.parametrize("client", CLIENTS)
def test_an_awaited_stream_is_the_same(played: dict[str, Played], client: str) -> None:
    """The awaited stream adds up to the plain answer, too."""
    assert played[client].result("plain") == played[client].result("streamed, awaited")


@pytest.mark.parametrize("client", CLIENTS)
def test_structured_output_by_a_forced_call(played: dict[str, Played], client: str) -> None:
    """The other way to structured output is a call that the model is forced to."""
    check_city("structured by a forced call")(played[client])


@pytest.mark.parametrize("client", CLIENTS)
def test_an_error_has_its_request_id(played: dict[str, Played], client: str) -> None:
    """The id of a refused request can be quoted."""
    check_known(played[client], played[client].result("request id of an error")["id"])


def test_tokens_are_counted(played: dict[str, Played]) -> None:
    """Counting tokens before asking works."""
    assert 0 < played["ChatAnthropic"].result("tokens")
