"""SDKs of the summer of 2024, which many still run, unmodified: openai 1.40 and anthropic 0.34."""

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
    check_failure,
    play,
    promises_of,
    python_script,
)

pytestmark = pytest.mark.clients

CLIENTS = {
    "openai 1.40": Client(python_script("old_openai", "old_openai"), "openai", PYTHON_RAISES),
    "anthropic 0.34": Client(
        python_script("old_anthropic", "old_anthropic"),
        "messages",
        PYTHON_RAISES,
        {"structured": "it had no structured output yet"},
    ),
}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Played]]:
    folder = tmp_path_factory.mktemp("old_sdks")
    with clients_gateway(folder, CLIENTS) as gateway:
        yield {name: play(name, client, gateway, folder) for name, client in CLIENTS.items()}


@pytest.mark.parametrize(("client", "case"), promises_of(CLIENTS))
def test_an_old_sdk_works(played: dict[str, Played], client: str, case: str) -> None:
    """What an SDK could do when it came out it does here."""
    PROMISES[case](played[client])


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("client", CLIENTS)
def test_a_failure_is_the_sdks_error(played: dict[str, Played], client: str, failure: str) -> None:
    """Each failure is raised as the class that the SDK has for it."""
    check_failure(played[client], failure)


def test_the_old_list_of_models(played: dict[str, Played]) -> None:
    """It lists the models, and finds one by its alias."""
    openai = played["openai 1.40"]
    assert "anthropic/claude-sonnet-5-5" in openai.result("models")
    assert "claude-sonnet-5-5" in openai.result("one model")


def test_the_cache_in_its_beta(played: dict[str, Played]) -> None:
    """Prompt caching, which was in beta then, reads what the request before wrote."""
    assert 0 < played["anthropic 0.34"].result("cached")["read"]
