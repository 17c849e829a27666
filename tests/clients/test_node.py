"""The clients for Node against the demo, unmodified: both makers' SDKs, and the AI SDK with two of its providers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.clients.gateway import clients_gateway
from tests.clients.playing import (
    FAILURES,
    PROMISES,
    Client,
    Played,
    check_city,
    check_failure,
    check_known,
    check_tools,
    node_script,
    play,
    promises_of,
)

pytestmark = pytest.mark.clients

RAISES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    402: "APIError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    413: "APIError",
    429: "RateLimitError",
    **dict.fromkeys((500, 503, 504, 529), "InternalServerError"),
}
ANTHROPIC_RAISES = RAISES | {
    402: "PaymentRequiredError",
    413: "ContentTooLargeError",
    504: "GatewayTimeoutError",
    529: "OverloadedError",
}
AI_RAISES = dict.fromkeys(RAISES, "APICallError")
CLIENTS = {
    "openai": Client(node_script("openai.mjs"), "openai", RAISES),
    "anthropic": Client(node_script("anthropic.mjs"), "messages", ANTHROPIC_RAISES),
    "ai openai": Client(node_script("ai_sdk.mjs", "openai"), "openai", AI_RAISES),
    "ai anthropic": Client(node_script("ai_sdk.mjs", "messages"), "messages", AI_RAISES),
}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Played]]:
    folder = tmp_path_factory.mktemp("node")
    with clients_gateway(folder, CLIENTS) as gateway:
        yield {name: play(name, client, gateway, folder) for name, client in CLIENTS.items()}


@pytest.mark.parametrize(("client", "case"), promises_of(CLIENTS))
def test_a_client_for_node_works(played: dict[str, Played], client: str, case: str) -> None:
    """What a client offers works by its base URL alone."""
    PROMISES[case](played[client])


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("client", CLIENTS)
def test_a_failure_is_the_clients_error(played: dict[str, Played], client: str, failure: str) -> None:
    """Each failure is thrown as the class that the client has for it."""
    check_failure(played[client], failure)


def test_run_tools(played: dict[str, Played]) -> None:
    """The SDK's own loop calls the tools and comes to its end."""
    check_tools("run tools")(played["openai"])


@pytest.mark.parametrize("client", ["ai openai", "ai anthropic"])
def test_structured_output_is_streamed(played: dict[str, Played], client: str) -> None:
    """A structured answer can be streamed, too."""
    check_city("streamed and structured")(played[client])


@pytest.mark.parametrize("client", ["openai", "anthropic"])
def test_the_models(played: dict[str, Played], client: str) -> None:
    """The models are listed, page after page, and one is found whose name has a slash."""
    assert ["anthropic/claude-sonnet-5-5", "anthropic/claude-haiku-4-5", "demo/tiny"] == played[client].result("models")
    assert "anthropic/claude-sonnet-5-5" == played[client].result("one model")


@pytest.mark.parametrize("client", ["openai", "anthropic"])
def test_an_error_has_its_request_id(played: dict[str, Played], client: str) -> None:
    """The id of a refused request can be quoted."""
    check_known(played[client], played[client].result("request id of an error")["id"])


def test_tokens_are_counted(played: dict[str, Played]) -> None:
    """Counting tokens before asking works."""
    assert 0 < played["anthropic"].result("tokens")
