"""Conversations of several turns, and clients that hold them with several gateways behind a load balancer.

A client whose connection breaks sends its request again, to the next gateway: every SDK does so, and without it a
killed gateway would take the requests with it that it was answering. A stream that ends in an error is asked for again,
too, as its user would; it is noted apart, as no SDK does that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import aiohttp

from proxy.plugin import Route
from tests.contract_plugins import PATHS, Seen, ending_of, text_of
from tests.cuttable_upstream import question

MOST_CONVERSATIONS = 10_000
MOST_ATTEMPTS = 4


class Way(NamedTuple):
    """The format of a conversation, and by what its turns are known to belong together."""

    format: str
    known_by: str


WAYS = (
    Way("openai", "its beginning"),
    Way("messages", "its beginning"),
    Way("openai", "x-ezat-session"),
    Way("messages", "x-ezat-session"),
    Way("openai", "prompt_cache_key"),
)


class Request(NamedTuple):
    """One turn, as it is sent."""

    number: int
    """Another for each turn of each conversation."""
    format: str
    headers: Mapping[str, str]
    body: Mapping[str, Any]

    @property
    def route(self) -> Route:
        return Route.CHAT_COMPLETIONS if self.format == "openai" else Route.MESSAGES


def conversation_of(number: int) -> int:
    """The conversation that a request belongs to, by its number."""
    return number % MOST_CONVERSATIONS


class Conversation:
    """What was said so far, and the way in which it is said."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.way = WAYS[number % len(WAYS)]
        self._said: list[dict[str, str]] = []

    def request(self, turn: int) -> Request:
        """The next turn. One that has a name sends its last turns alone, so that nothing but the name stays."""
        number = turn * MOST_CONVERSATIONS + self.number
        named = self.way.known_by != "its beginning"
        system = f"Now it is turn {turn}." if named else "Be brief."
        messages = [*(self._said[-2:] if named else self._said), {"role": "user", "content": question(number)}]
        body: dict[str, Any] = {"model": "model", "max_tokens": 100}
        if (self.number + turn) % 3:
            body["stream"] = True
        if self.way.format == "openai":
            body["messages"] = [{"role": "system", "content": system}, *messages]
        else:
            body |= {"system": system, "messages": messages}
        name = f"conversation {self.number}"
        if self.way.known_by == "prompt_cache_key":
            body["prompt_cache_key"] = name
        headers = {"x-ezat-session": name} if self.way.known_by == "x-ezat-session" else {}
        return Request(number, self.way.format, headers, body)

    def goes_on(self, request: Request, answer: str) -> None:
        """A turn was answered."""
        asked: dict[str, str] = request.body["messages"][-1]
        self._said += [asked, {"role": "assistant", "content": answer}]


class Answered(NamedTuple):
    """An answer that a client saw whole."""

    id: str
    """The gateway's own, of the request."""
    text: str


class Clients:
    """Take turns in conversations, each at the next gateway in turn, and keep what they saw."""

    def __init__(self, session: aiohttp.ClientSession, gateways: Sequence[str], key: str) -> None:
        self._session = session
        self._gateways = gateways
        self._key = key
        self.answered: dict[int, Answered] = {}
        """By the numbers of the requests."""
        self.under_way: dict[str, set[int]] = {url: set() for url in gateways}
        """The requests that each gateway is answering."""
        self.broken: dict[str, set[int]] = {url: set() for url in gateways}
        """Those whose connection to it broke."""
        self.interrupted: list[int] = []
        """Those whose stream ended in an error after it had begun."""

    async def take_turn(self, conversation: Conversation, turn: int) -> str:
        """The text of the answer. Raises AssertionError where a gateway refuses, or none answers."""
        request = conversation.request(turn)
        for attempt in range(MOST_ATTEMPTS):
            url = self._gateways[(conversation.number + turn + attempt) % len(self._gateways)]
            seen = await self._seen(url, request)
            if seen is None:
                continue
            assert 200 == seen.status, f"{seen.status}: {seen.body!r}"
            if ending_of(seen, request.format) != "whole":
                self.interrupted.append(request.number)
                continue
            text = text_of(seen, request.format)
            self.answered[request.number] = Answered(seen.headers["request-id"], text)
            conversation.goes_on(request, text)
            return text
        raise AssertionError(f"request {request.number} was not answered in {MOST_ATTEMPTS} attempts")

    async def _seen(self, url: str, request: Request) -> Seen | None:
        """The answer to its end; None where the connection broke or there was none."""
        self.under_way[url].add(request.number)
        headers = {**request.headers, "authorization": f"Bearer {self._key}"}
        try:
            async with self._session.post(url + PATHS[request.format], json=request.body, headers=headers) as answer:
                names = {name.lower(): value for name, value in answer.headers.items()}
                return Seen(answer.status, names, await answer.read())
        except aiohttp.ClientConnectorError:
            pass  # nobody listens there any more
        except (aiohttp.ClientError, ConnectionResetError):
            self.broken[url].add(request.number)
        finally:
            self.under_way[url].discard(request.number)
        return None
