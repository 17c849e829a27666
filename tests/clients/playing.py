"""Plays a client's script against the gateway, and says what every client has been promised.

A script (``scripts/``, ``node/``) does with its client what its users do and prints what came of it, case by case;
whether that is right is judged here, in one place for all of them.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.clients.environments import node_packages, python_of, surroundings
from tests.clients.gateway import key_of
from tests.clients.material import CITY, LONG_TEXT, PDF, PNG, City
from tests.process import REPOSITORY, GatewayProcess, eventually

MODEL = "claude-sonnet-5-5"
FORCIBLE = "claude-haiku-4-5"
"""A model that can be forced to call a tool."""
TOOLS = ("weather", "population")
SCRIPT_SECONDS = 120


class Failing(NamedTuple):
    """What is asked, and the status that it has to end with, by format."""

    openai: int
    messages: int
    words: str
    text: str = "Hello!"
    model: str = MODEL
    key: str | None = None
    """None: the client's own."""


FAILURES = {
    "an unknown key": Failing(401, 401, "the API key is not valid", key="ezat_sk_unknown"),
    "no money left": Failing(402, 402, "the prepaid balance of this organization is used up", key="ezat_sk_penniless"),
    "a model that the key may not use": Failing(
        403, 403, f"this key may not use the model `{MODEL}`", key="ezat_sk_haiku"
    ),
    "an unknown model": Failing(404, 404, "The model `gpt-9` does not exist", model="gpt-9"),
    "a bad request": Failing(400, 400, "The demo fails as asked: fault 400.", "fault 400"),
    "a request too large": Failing(413, 413, "The demo fails as asked: fault 413.", "fault 413"),
    "too many requests": Failing(429, 429, "The demo fails as asked: fault 429.", "fault 429"),
    "a broken provider": Failing(500, 500, "the provider failed", "fault 500"),
    "no capacity": Failing(503, 529, "The demo fails as asked: fault 529.", "fault 529"),
    "a slow provider": Failing(504, 504, "The demo fails as asked: fault 504.", "fault 504"),
}


class Client(NamedTuple):
    """A client: how its script is started, what it speaks, and what its errors are called."""

    command: Callable[[], list[str]]
    format: str
    """``openai`` or ``messages``."""
    raises: Mapping[int, str]
    """The class that stands for a status."""
    omits: Mapping[str, str] = {}
    """The cases that it doesn't have, each with the reason."""


PYTHON_RAISES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    402: "APIStatusError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    413: "APIStatusError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "InternalServerError",
    504: "InternalServerError",
    529: "InternalServerError",
}
"""The classes of both SDKs for Python, where they have no special one."""


class Played(NamedTuple):
    """What a client's script printed, and the gateway that it ran against."""

    name: str
    client: Client
    results: dict[str, dict[str, Any]]
    gateway: GatewayProcess

    def result(self, case: str) -> Any:
        """What came of a case. Raises AssertionError with the client's own words where it broke."""
        told = self.results.get(case, {"broken": "the script has no such case"})
        assert "broken" not in told, told["broken"]
        return told["result"]


def python_script(environment: str, name: str, *arguments: str) -> Callable[[], list[str]]:
    """A script of ``scripts/`` in an environment of Python."""
    return lambda: [python_of(environment), "-m", f"tests.clients.scripts.{name}", *arguments]


def node_script(name: str, *arguments: str) -> Callable[[], list[str]]:
    """A script of ``node/``."""
    return lambda: ["node", str(node_packages() / name), *arguments]


def task_for(name: str, gateway: GatewayProcess) -> dict[str, Any]:
    """All that a script needs to know."""
    return {
        "openai_url": f"{gateway.url}/openai/v1",
        "messages_url": gateway.url,
        "key": key_of(name),
        "model": MODEL,
        "forcible": FORCIBLE,
        "tools": TOOLS,
        "city": CITY,
        "schema": {**City.model_json_schema(), "additionalProperties": False},
        "image": PNG,
        "pdf": PDF,
        "long_text": LONG_TEXT,
        "failures": {
            failure: {"key": each.key or key_of(name), "model": each.model, "text": each.text}
            for failure, each in FAILURES.items()
        },
    }


def play(name: str, client: Client, gateway: GatewayProcess, home: Path) -> Played:
    """Run a client's script to its end. Raises AssertionError where it prints anything but its results."""
    ran = subprocess.run(
        client.command(),
        cwd=REPOSITORY,
        env=surroundings(os.environ["PATH"], home),
        input=json.dumps(task_for(name, gateway)),
        capture_output=True,
        text=True,
        timeout=SCRIPT_SECONDS,
    )
    assert 0 == ran.returncode, ran.stdout + ran.stderr
    told = [json.loads(line) for line in ran.stdout.splitlines()]
    return Played(name, client, {line["case"]: line for line in told}, gateway)


def check_plain(played: Played) -> None:
    """A plain answer has its text and its usage."""
    told = played.result("plain")
    assert "Good morning!" in told["text"], told
    assert 0 < told["input"] < told["output"], told


def check_streamed(played: Played) -> None:
    """A stream adds up to the plain answer, usage and all."""
    told = played.result("streamed")
    assert played.result("plain") == told, told


def check_tools(case: str) -> Callable[[Played], None]:
    def check(played: Played) -> None:
        """Parallel calls arrive with their arguments, and their results are answered."""
        told = played.result(case)
        assert list(TOOLS) == [name for name, _ in told["calls"]], told
        assert [{"city"}] * 2 == [set(arguments) for _, arguments in told["calls"]], told
        assert all(f"{name} of" in told["text"] for name in TOOLS), told

    return check


def check_city(case: str) -> Callable[[Played], None]:
    def check(played: Played) -> None:
        """A structured answer is an instance of what was asked for."""
        City.model_validate(played.result(case), strict=True)

    return check


def check_input(case: str, tokens: int) -> Callable[[Played], None]:
    def check(played: Played) -> None:
        """What was attached reaches the model: it counts what such a thing costs."""
        told = played.result(case)
        assert tokens <= told["input"] < tokens + 100, told

    return check


def check_known(played: Played, request_id: str | None) -> None:
    """A request of this id stands in the gateway's log."""
    lines = asyncio.run(eventually(lambda: played.gateway.requests(request_id=request_id), 2))
    assert 1 == len(lines), request_id


def check_request_id(played: Played) -> None:
    """The client shows the id under which the gateway's log knows the request."""
    check_known(played, played.result("request id")["id"])


def check_broken(case: str, words: str) -> Callable[[Played], None]:
    def check(played: Played) -> None:
        """A stream that breaks is raised behind what came before."""
        told = played.result(case)
        assert told["raised"] is not None, told
        assert words in told["message"], told
        assert 0 < told["pieces"], told

    return check


def check_left(played: Played) -> None:
    """A stream left early is noticed at once, and its provider is let go."""
    played.result("left")
    lines = asyncio.run(eventually(lambda: played.gateway.requests(key=played.name, outcome="abandoned"), 2))
    assert 1 == len(lines), lines


PROMISES: dict[str, Callable[[Played], None]] = {
    "plain": check_plain,
    "streamed": check_streamed,
    "tools": check_tools("tools"),
    "streamed tools": check_tools("streamed tools"),
    "structured": check_city("structured"),
    "image": check_input("image", 1000),
    "PDF": check_input("PDF", 2000),
    "request id": check_request_id,
    "broken by an error": check_broken("broken by an error", "The demo fails as asked: fault error."),
    "broken by a cut": check_broken("broken by a cut", "the provider's answer broke off"),
    "left": check_left,
}


def check_failure(played: Played, failure: str) -> None:
    """A failure is raised as the client's class for its status, with the gateway's words."""
    expected, told = FAILURES[failure], played.result(failure)
    status = expected.openai if played.client.format == "openai" else expected.messages
    assert (played.client.raises[status], status) == (told["raised"], told.get("status")), told
    assert expected.words in told["message"], told


def promises_of(clients: Mapping[str, Client]) -> list[tuple[str, str]]:
    """Every client with every promise that its kind knows."""
    return [(name, case) for name, client in clients.items() for case in PROMISES if case not in client.omits]
