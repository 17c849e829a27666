"""Two coding agents against the demo, unmodified, each on one format: Claude Code, and opencode.

Each answers, calls a tool of its own with what the demo says, sends back its result and answers again.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.clients.environments import agent_program, surroundings
from tests.clients.gateway import clients_gateway, key_of
from tests.process import GatewayProcess

pytestmark = pytest.mark.clients

MODEL = "claude-sonnet-5-5"
AGENT_SECONDS = 180


class Agent(NamedTuple):
    """An agent: how it is started with its prompt on standard input, and how its lines are read."""

    command: Callable[[], list[str]]
    variables: Callable[[str], Mapping[str, str]]
    """Environment variables for the gateway's address."""
    text_of: Callable[[dict[str, Any]], str | None]
    """What a line says to the user."""
    tool_output_of: Callable[[dict[str, Any]], str | None]
    """What a line says that a tool put out."""
    tool: str
    """The name of its shell."""
    route: str


def claude_command() -> list[str]:
    output = ["--output-format", "stream-json", "--verbose"]
    return [agent_program("claude"), "-p", "--model", MODEL, "--allowedTools", "Bash", *output]


def claude_variables(url: str) -> dict[str, str]:
    return {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": key_of("claude"), "IS_SANDBOX": "1"}


def claude_text(line: dict[str, Any]) -> str | None:
    return line["result"] if line["type"] == "result" else None


def claude_tool_output(line: dict[str, Any]) -> str | None:
    content = line["message"]["content"] if line["type"] == "user" else []
    return next((block["content"] for block in content if block["type"] == "tool_result"), None)


def opencode_command() -> list[str]:
    return [agent_program("opencode"), "run", "--format", "json", "--model", f"ezat/{MODEL}"]


def opencode_variables(url: str) -> dict[str, str]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{url}/openai/v1", "apiKey": key_of("opencode")},
        "models": {MODEL: {}},
    }
    config = {"provider": {"ezat": provider}, "permission": {"bash": "allow"}, "share": "disabled", "autoupdate": False}
    return {"OPENCODE_CONFIG_CONTENT": json.dumps(config)}


def opencode_text(line: dict[str, Any]) -> str | None:
    return line["part"]["text"] if line["type"] == "text" else None


def opencode_tool_output(line: dict[str, Any]) -> str | None:
    return line["part"]["state"]["output"] if line["type"] == "tool_use" else None


AGENTS = {
    "claude": Agent(claude_command, claude_variables, claude_text, claude_tool_output, "Bash", "messages"),
    "opencode": Agent(
        opencode_command, opencode_variables, opencode_text, opencode_tool_output, "bash", "chat_completions"
    ),
}


HAS_OPENCODE = (sys.platform, platform.machine()) == ("linux", "x86_64")
NAMES = [
    "claude",
    pytest.param("opencode", marks=pytest.mark.skipif(not HAS_OPENCODE, reason="it is locked for Linux on x64 alone")),
]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    with clients_gateway(tmp_path_factory.mktemp("agents"), AGENTS) as running:
        yield running


class Told(NamedTuple):
    """What an agent printed."""

    text: str
    tool_outputs: list[str]


def told_by(name: str, prompt: str, gateway: GatewayProcess, folder: Path) -> Told:
    """Run an agent with this prompt, in an empty project and an empty home. Raises AssertionError where it fails."""
    agent = AGENTS[name]
    home, project = folder / "home", folder / "project"
    home.mkdir()
    project.mkdir()
    ran = subprocess.run(
        agent.command(),
        cwd=project,
        env={**surroundings(os.environ["PATH"], home), **agent.variables(gateway.url)},
        input=prompt,
        capture_output=True,
        text=True,
        timeout=AGENT_SECONDS,
    )
    assert 0 == ran.returncode, ran.stdout + ran.stderr + gateway.written
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    outputs = [output for line in lines if (output := agent.tool_output_of(line)) is not None]
    return Told("".join(text for line in lines if (text := agent.text_of(line)) is not None), outputs)


@pytest.mark.parametrize("name", NAMES)
def test_an_agent_answers(name: str, gateway: GatewayProcess, tmp_path: Path) -> None:
    """An agent's first hello is answered, however long its own prompt and many its tools."""
    told = told_by(name, "Good morning, who are you?", gateway, tmp_path)

    assert "Good morning, who are you?" in told.text
    assert [] == told.tool_outputs


@pytest.mark.parametrize("name", NAMES)
def test_an_agent_calls_its_tool(name: str, gateway: GatewayProcess, tmp_path: Path) -> None:
    """The model calls the agent's tool, the agent runs it, and the model answers with what it put out."""
    told = told_by(name, f'Call {AGENTS[name].tool} with "echo hello from the shell", please.', gateway, tmp_path)

    assert ["hello from the shell"] == [output.strip() for output in told.tool_outputs]
    assert "The tool answered: hello from the shell." in told.text
    lines = gateway.requests(key=name)
    assert {(200, "completed", AGENTS[name].route)} == {
        (line["status"], line["outcome"], line["route"]) for line in lines
    }, "nothing that an agent asks beside its conversation is refused"
    assert 0 < lines[-1]["cache_read"], "its second turn reads from the cache"
