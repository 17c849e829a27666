"""Pydantic AI's agents against the demo, unmodified: on its OpenAI model and on its Anthropic model."""

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
    play,
    promises_of,
    python_script,
)

pytestmark = pytest.mark.clients

RAISES = {
    400: "ModelRequestRejectedError",
    401: "ModelAuthenticationError",
    402: "ModelQuotaExceededError",
    403: "ModelAuthenticationError",
    404: "ModelNotFoundError",
    413: "ModelHTTPError",
    429: "ModelRateLimitError",
    500: "ModelServerError",
    503: "ModelOverloadedError",
    504: "ModelServerError",
    529: "ModelOverloadedError",
}
OMITS = {"request id": "it shows no header of an answer"}
CLIENTS = {
    "OpenAIChatModel": Client(python_script("newest", "pydantic_agents", "openai"), "openai", RAISES, OMITS),
    "AnthropicModel": Client(python_script("newest", "pydantic_agents", "messages"), "messages", RAISES, OMITS),
}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Played]]:
    folder = tmp_path_factory.mktemp("pydantic_ai")
    with clients_gateway(folder, CLIENTS) as gateway:
        yield {name: play(name, client, gateway, folder) for name, client in CLIENTS.items()}


@pytest.mark.parametrize(("client", "case"), promises_of(CLIENTS))
def test_an_agent_works(played: dict[str, Played], client: str, case: str) -> None:
    """An agent works by its model's base URL alone."""
    PROMISES[case](played[client])


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("client", CLIENTS)
def test_a_failure_is_the_frameworks_error(played: dict[str, Played], client: str, failure: str) -> None:
    """Each failure is raised with its status."""
    check_failure(played[client], failure)


@pytest.mark.parametrize("client", CLIENTS)
def test_structured_output_by_a_forced_call(played: dict[str, Played], client: str) -> None:
    """Its default way to structured output is a call that the model is forced to."""
    check_city("structured by a forced call")(played[client])
