"""The gateway on the real model: ``config/local-llm.yaml`` as it is, but that it sends its keep-alive earlier."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

import anthropic
import openai
import pytest
from ruamel.yaml import YAML

from proxy.local_llm import missing_packages
from tests.clients.both_kinds import Client, entered
from tests.process import REPOSITORY, GatewayProcess, started_gateway

KEY = "ezat_sk_local"
TIMEOUT = 120  # seconds: the model shares the processor with whatever else runs
OPENAI = {"plain": openai.OpenAI, "async": openai.AsyncOpenAI}
ANTHROPIC = {"plain": anthropic.Anthropic, "async": anthropic.AsyncAnthropic}


class RunningLlm(NamedTuple):
    """The model's server, asked past the gateway."""

    url: str

    def get(self, path: str) -> Any:
        """What it answers. Raises OSError where nobody is there."""
        with urllib.request.urlopen(self.url + path, timeout=TIMEOUT) as answer:
            return json.load(answer)

    def is_gone(self) -> bool:
        """Whether nobody listens at its address any more."""
        try:
            self.get("/health")
        except OSError:
            return True
        return False

    def is_busy(self) -> bool:
        """Whether it works on an answer."""
        return any(slot["is_processing"] for slot in self.get("/slots"))


def local_llm_config() -> dict[str, Any]:
    """The shipped configuration, with a keep-alive after half a second of silence."""
    config: dict[str, Any] = YAML(typ="safe", pure=True).load(REPOSITORY / "config" / "local-llm.yaml")
    return {**config, "server": {"ping_interval": 0.5}}


def llm_of(gateway: GatewayProcess) -> RunningLlm:
    """The model that this gateway has started."""
    [line] = [line for line in gateway.log_lines if line["event"] == "the local LLM is ready"]
    return RunningLlm(line["url"])


@pytest.fixture(scope="session")
def packages() -> None:
    """The extra local-llm, without which these tests are skipped."""
    missing = missing_packages()
    if missing:
        pytest.skip(f"{' and '.join(missing)} not installed: make test-llm installs what is needed")


@pytest.fixture(scope="session")
def gateway(packages: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """The running gateway."""
    with started_gateway(local_llm_config(), tmp_path_factory.mktemp("llm")) as running:
        yield running


@pytest.fixture(scope="session")
def llm(gateway: GatewayProcess) -> RunningLlm:
    """Its model."""
    return llm_of(gateway)


@pytest.fixture(params=["plain", "async"])
def kind(request: pytest.FixtureRequest) -> str:
    """Both kinds of client that an SDK offers."""
    return str(request.param)


@pytest.fixture
async def openai_client(kind: str, gateway: GatewayProcess) -> AsyncIterator[Client]:
    """A client of OpenAI's SDK that tries each request once."""
    made = OPENAI[kind](api_key=KEY, base_url=f"{gateway.url}/openai/v1", max_retries=0, timeout=TIMEOUT)
    async with entered(made) as client:
        yield client


@pytest.fixture
async def anthropic_client(kind: str, gateway: GatewayProcess) -> AsyncIterator[Client]:
    """A client of Anthropic's SDK that tries each request once."""
    made = ANTHROPIC[kind](api_key=KEY, base_url=gateway.url, max_retries=0, timeout=TIMEOUT)
    async with entered(made) as client:
        yield client
