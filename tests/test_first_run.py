"""What somebody sees who starts the gateway for the first time: every line that is printed works as it is printed."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import anthropic
import openai
import orjson
import pytest
from ruamel.yaml import YAML

from plugins.chat_completions import ChatCompletions
from proxy.config import load
from proxy.first_run import conversation, first_key, first_model, greeting
from proxy.testing import running_gateway
from tests.process import REPOSITORY, GatewayProcess, run, started_gateway, written_config

DEMO = REPOSITORY / "config" / "demo.yaml"
KEY = "ezat_sk_demo"
CLIENTS = (
    *("curl", "Python, OpenAI SDK", "Python, Anthropic SDK", "Node, OpenAI SDK", "Node, Anthropic SDK"),
    *("Claude Code", "An editor with an OpenAI-compatible provider"),
)


def demo(**server: Any) -> dict[str, Any]:
    """The shipped demo, with these settings of its server; its store is named by whoever writes it."""
    config: dict[str, Any] = YAML(typ="safe", pure=True).load(DEMO)
    del config["store"]
    return {**config, "server": server}


@pytest.fixture(scope="module", params=["", "/llm"], ids=["at the root", "below a base path"])
def gateway(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """The demo, started as the README says, but on a free port."""
    with started_gateway(demo(base_path=request.param), tmp_path_factory.mktemp("gateway")) as started:
        yield started


def lines_for(gateway: GatewayProcess, client: str) -> str:
    """What the greeting prints below the name of a client."""
    found = re.search(rf"^{re.escape(client)}\n((?:  .*\n)+)", gateway.written, re.MULTILINE)
    assert found, f"no lines for {client}:\n{gateway.written}"
    return found[1]


# The lines to try


@pytest.mark.slow
def test_the_curl_line_works_as_it_is_printed(gateway: GatewayProcess) -> None:
    """Pasted into a shell, the first line gets a completion."""
    script = lines_for(gateway, "curl")

    ended = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=30)

    assert 0 == ended.returncode, ended.stderr
    completion = orjson.loads(ended.stdout)
    assert "You said: “Hello!”." in completion["choices"][0]["message"]["content"]


@pytest.mark.slow
def test_the_python_line_for_openai_works_as_it_is_printed(gateway: GatewayProcess) -> None:
    """The client that the line makes gets a completion of the model that is shown."""
    made: dict[str, Any] = {"openai": openai}
    exec(lines_for(gateway, "Python, OpenAI SDK").strip(), made)

    with made["client"] as client:
        completion = client.chat.completions.create(
            model="claude-sonnet-5-5", messages=[{"role": "user", "content": "Hello!"}]
        )

    assert "Hello!" in completion.choices[0].message.content


@pytest.mark.slow
def test_the_python_line_for_anthropic_works_as_it_is_printed(gateway: GatewayProcess) -> None:
    """The client that the line makes gets a message of the model that is shown."""
    made: dict[str, Any] = {"anthropic": anthropic}
    exec(lines_for(gateway, "Python, Anthropic SDK").strip(), made)

    with made["client"] as client:
        message = client.messages.create(
            model="claude-sonnet-5-5", max_tokens=100, messages=[{"role": "user", "content": "Hello!"}]
        )

    assert "Hello!" in message.content[0].text


@pytest.mark.slow
@pytest.mark.parametrize("client", CLIENTS)
def test_every_client_is_told_its_base_url_and_the_key(gateway: GatewayProcess, client: str) -> None:
    """OpenAI's clients get the URL that ends in /openai/v1, Anthropic's the bare one, and each of them the key."""
    printed = lines_for(gateway, client)

    [url] = set(re.findall(r"http://[^\s\"']+", printed))
    is_openai = "OpenAI" in client or client == "curl"
    assert gateway.url + ("/openai/v1" if is_openai else "") == url.removesuffix("/chat/completions")
    assert KEY in printed


# What is printed where there is something to hide


class Shown(NamedTuple):
    """What of a configuration with one key decides whether the key is printed."""

    upstreams: Mapping[str, Mapping[str, str]]
    has_key: bool
    expected: bool


OWN = {"base_url": "https://llm.example", "api_key": "provider-key"}
SHOWN = {
    "the demo": Shown({"demo": {"base_url": "demo"}}, True, True),
    "a provider": Shown({"demo": OWN}, True, False),
    "a provider beside the demo": Shown({"demo": {"base_url": "demo"}, "own": OWN}, True, False),
    "no key": Shown({"demo": {"base_url": "demo"}}, False, False),
}


@pytest.mark.parametrize("shown", SHOWN.values(), ids=SHOWN)
def test_a_key_is_printed_for_the_demo_alone(tmp_path: Path, shown: Shown) -> None:
    """Where a request can cost money, the greeting is the address and nothing else."""
    auth = [{"auth": {"keys": [{"name": "a", "key": "ezat_sk_own"}]}}] if shown.has_key else []
    config = {**demo(open=not shown.has_key), "upstreams": shown.upstreams, "plugins": [*auth, "chat_completions"]}
    loaded = load(written_config(config, tmp_path), {})

    text = greeting(loaded, "http://127.0.0.1:8787")

    assert shown.expected == ("ezat_sk_own" in text)
    if not shown.expected:
        assert "EZAT Router listens on http://127.0.0.1:8787" == text


# The conversation that shows caching


@pytest.mark.slow
async def test_the_demo_shows_the_cache_at_work(tmp_path: Path) -> None:
    """`run.py demo` prints three turns, of which each reads what the one before wrote."""
    ended = await run("demo", "--config", str(written_config(demo(), tmp_path)))

    assert (0, "") == (ended.code, ended.errors)
    turns = [[int(number) for number in re.findall(r"\d+", line)] for line in ended.output.splitlines() if "%" in line]
    assert [1, 2, 3] == [turn[0] for turn in turns]
    assert_caching_grows([turn[1:4] for turn in turns])
    assert "The client sent no cache marks" in ended.output


def assert_caching_grows(turns: list[list[int]]) -> None:
    """The first turn reads nothing, each later one all that was in the cache before it."""
    prompt, read, written = zip(*turns, strict=True)
    assert 0 == read[0] < written[0]
    assert [read[0] + written[0], read[1] + written[1]] == [read[1], read[2]]
    assert list(prompt) == sorted(set(prompt))
    assert all(one + other <= whole for whole, one, other in turns)


@pytest.mark.slow
async def test_the_demo_runs_beside_a_running_gateway(tmp_path: Path) -> None:
    """The greeting of a running gateway says to try it: it does so in another shell, with the same configuration."""
    with started_gateway(demo(), tmp_path):
        ended = await run("demo", "--config", str(tmp_path / "gateway.yaml"))

    assert 0 == ended.code, ended.errors
    assert 3 == ended.output.count("%")


async def test_the_conversation_needs_no_key_where_none_is_asked_for() -> None:
    """An open gateway holds the same conversation; without the plugin that marks it, the cache stays empty."""
    async with running_gateway([ChatCompletions]) as url:
        table = await conversation(url, None, "model")

    assert ["0", "0", "0"] == list(table.columns[2].cells)


def test_the_shown_names_are_those_of_the_configuration(tmp_path: Path) -> None:
    """The key is the first of the list, and the model goes by its short name."""
    loaded = load(written_config(demo(), tmp_path), {})

    assert (KEY, "claude-sonnet-5-5") == (first_key(loaded), first_model(loaded))
