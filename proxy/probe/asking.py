"""Asking an upstream one thing at a time, and keeping what it said in a form that may be printed.

Not by the gateway's own client: that one hides what an upstream says behind what a client is told, and here its status
and its words are what is wanted. Where it goes and with which headers is the gateway's own ``Upstream``.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from proxy.built_in import BuiltIn
from proxy.jsontext import JsonError, decode, encode
from proxy.settings import Config, UpstreamSettings
from proxy.upstream.client import Upstream
from proxy.upstream.faults import fault_of_status, retry_after

TIME_LIMIT = 120.0
"""Seconds for one request."""
PAUSE = 2.0
"""Seconds before a request is repeated, where the upstream names none."""
LONGEST_PAUSE = 10.0
"""Seconds; an upstream that asks for more isn't asked again."""
MOST_BYTES = 8 * 2**20
LONGEST_WORDS = 160
_SHORTEST_SECRET = 8  # of a header's value: a shorter one, such as `eu`, is a word of its own
_NO_SECRETS = ("anthropic-beta", "user-agent")
_REFUSALS = (403, 404, 405)
_PASSING = (408, 429)

Note = Callable[[str], None]


class Outcome(Enum):
    """What became of a request."""

    TAKEN = "taken"
    REFUSED = "refused"
    """It is about what was asked for."""
    UNKNOWN = "unknown"
    """It is about the moment, the key or the account, or there was no answer."""


@dataclass(frozen=True, slots=True)
class Answered:
    """An upstream's answer, or what came instead: then ``status`` is None. ``words`` may be printed."""

    outcome: Outcome
    status: int | None
    words: str
    raw: bytes = b""
    content_type: str = ""

    @property
    def evidence(self) -> str:
        """Status and words."""
        return ": ".join(filter(None, (str(self.status or ""), self.words)))

    @property
    def data(self) -> Any:
        """The JSON of the body, None where there is none."""
        try:
            return decode(self.raw)
        except JsonError:
            return None


class Asker:
    """One upstream, asked one thing after the other, with its key sent in one way."""

    def __init__(self, session: aiohttp.ClientSession, settings: UpstreamSettings, name: str, url: str) -> None:
        self.auth = settings.auth
        self.has_key = settings.api_key is not None
        self.version = settings.version
        self._session = session
        self._settings = settings
        self._upstream = Upstream(name, settings, url)
        self._secrets = _secrets(settings)
        self.asked = 0
        """How many requests it has got."""

    def sending_otherwise(self) -> Asker:
        """The same upstream with the key sent in the other way."""
        other = self._settings.model_copy(update={"auth": "bearer" if self.auth == "x-api-key" else "x-api-key"})
        return Asker(self._session, other, self._upstream.name, self._upstream.base_url)

    async def ask(self, path: str, body: Mapping[str, Any]) -> Answered:
        """The answer to a request, which is repeated once where it failed for a reason that may pass."""
        answered, pause = await self._once(path, body)
        if pause is None or pause > LONGEST_PAUSE:
            return answered
        await asyncio.sleep(pause)
        return (await self._once(path, body))[0]

    async def _once(self, path: str, body: Mapping[str, Any]) -> tuple[Answered, float | None]:
        """The answer, and the seconds after which another try may help."""
        self.asked += 1
        try:
            async with self._session.post(
                self._upstream.base_url + path,
                data=encode(body),
                headers=self._upstream.headers,
                allow_redirects=False,
                proxy=self._upstream.proxy,
                ssl=self._upstream.ssl,
            ) as response:
                raw = await _read(response)
                return self._answered(response, raw)
        except aiohttp.ConnectionTimeoutError:
            return Answered(Outcome.UNKNOWN, None, "no connection in time"), PAUSE
        except TimeoutError:
            return Answered(Outcome.UNKNOWN, None, f"no whole answer within {TIME_LIMIT:g} s"), PAUSE
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return Answered(Outcome.UNKNOWN, None, f"no answer ({type(error).__name__})"), PAUSE

    def _answered(self, response: aiohttp.ClientResponse, raw: bytes) -> tuple[Answered, float | None]:
        status, kind = response.status, response.content_type
        if status == 200:
            return Answered(Outcome.TAKEN, status, "", raw, kind), None
        words = _printable(_said(raw, kind), self._secrets)
        fault = fault_of_status(status, raw, response.headers, None)
        refused = fault.is_final or status in _REFUSALS
        answered = Answered(Outcome.REFUSED if refused else Outcome.UNKNOWN, status, words, raw, kind)
        if status < 500 and status not in _PASSING:
            return answered, None
        asked = response.headers.get("retry-after")
        return answered, PAUSE if asked is None else retry_after(asked)


@asynccontextmanager
async def asker_for(config: Config, name: str) -> AsyncIterator[Asker]:
    """Whoever asks the upstream of this name, a built-in one started for as long. Raises CannotStart."""
    settings = config.upstreams[name]
    built_in = BuiltIn()
    timeout = aiohttp.ClientTimeout(total=TIME_LIMIT, sock_connect=config.server.connect_timeout)
    try:
        urls = await built_in.take([settings.base_url])
        async with aiohttp.ClientSession(timeout=timeout, cookie_jar=aiohttp.DummyCookieJar()) as session:
            yield Asker(session, settings, name, urls.get(settings.base_url, settings.base_url))
    finally:
        await built_in.give_back([settings.base_url])


async def _read(response: aiohttp.ClientResponse) -> bytes:
    pieces, size = [], 0
    async for piece in response.content.iter_any():
        pieces.append(piece)
        size += len(piece)
        if size > MOST_BYTES:
            raise ValueError("the answer is too large")
    return b"".join(pieces)


def _said(raw: bytes, content_type: str) -> str:
    """The words of an error, in whatever envelope."""
    if content_type == "text/html":
        return "an HTML page"
    try:
        said = decode(raw)
    except JsonError:
        return raw.decode("utf-8", "replace")
    for field in ("error", "message", "detail"):
        if isinstance(said, dict) and said.get(field):
            said = said[field]
    return said if isinstance(said, str) else encode(said).decode()


def _secrets(settings: UpstreamSettings) -> tuple[str, ...]:
    """What must not be printed, as it is and as JSON writes it, the longest first."""
    headers = {name.lower(): value for name, value in settings.headers.items()}
    found = {value for name, value in headers.items() if len(value) >= _SHORTEST_SECRET and name not in _NO_SECRETS}
    if settings.api_key is not None:
        found.add(settings.api_key.get_secret_value())
    if settings.proxy is not None and (password := urlsplit(settings.proxy).password):
        found.add(password)
    found |= {encode(each).decode()[1:-1] for each in found}
    return tuple(sorted(found, key=len, reverse=True))


def _printable(text: str, secrets: tuple[str, ...]) -> str:
    """The text on one line, shortened, without secrets and without what a terminal would obey."""
    for secret in secrets:
        text = text.replace(secret, "[redacted]")
    text = re.sub(r"\s+", " ", "".join(letter if letter.isprintable() else " " for letter in text)).strip()
    return text if len(text) <= LONGEST_WORDS else text[:LONGEST_WORDS].rstrip() + "…"
