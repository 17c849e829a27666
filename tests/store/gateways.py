"""A whole gateway on a store of the test's choice, and a look into that store from outside."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
from sqlalchemy import Connection, func, select

from plugins import BUNDLED
from proxy.loading import load_all
from proxy.plugin import Plugin
from proxy.server import Gateway
from proxy.store.database import READ_ONLY, open_engine
from proxy.store.schema import budgets, reservations, usage
from proxy.testing import Reply, message_reply, stream_reply, text_events

T = TypeVar("T")

KEY = "ezat_sk_one"
PATHS = {"openai": "/openai/v1/chat/completions", "messages": "/v1/messages"}
INPUT_UNITS = 10**6
"""What an input token of the model costs, in units."""
OUTPUT_UNITS = 5 * 10**6
PRICE = {"input": 1, "output": 5}


def configured(
    store: str,
    upstream: str,
    *,
    auth: Mapping[str, Any] | None = None,
    limiter: str = "memory",
    usage: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
    first: Sequence[str] = (),
    server: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A configuration of one model at one upstream. ``first`` are plugins between usage and the translator."""
    return {
        "server": {"port": 0, "admin": {"port": 0}, **(server or {})},
        "store": store,
        "limiter": limiter,
        "upstreams": {"up": {"base_url": upstream, "api_key": "upstream-secret"}},
        "models": [
            {
                "id": "test/model",
                "aliases": ["model"],
                "max_output_tokens": 8192,
                "price": PRICE,
                "deployments": [{"upstream": "up", "model": "model-at-upstream"}],
                **(model or {}),
            }
        ],
        "plugins": [
            {"auth": auth if auth is not None else {"keys": [{"name": "one", "key": KEY}]}},
            "rate_limit",
            {"usage": dict(usage or {})},
            *first,
            "field_refusal",
            "chat_completions",
        ],
    }


def prepaid(units: int) -> dict[str, Any]:
    """The settings of auth: one key, whose organization has paid in so much."""
    organization = {"name": "acme", "balance_usd": f"{units / 10**12:.12f}"}
    return {"organizations": [organization], "keys": [{"name": "one", "key": KEY, "organization": "acme"}]}


@asynccontextmanager
async def serving(config: Mapping[str, Any], **further: type[Plugin]) -> AsyncIterator[str]:
    """A gateway in this process; its URL. ``further`` are plugins that aren't bundled, by their names."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "gateway.yaml")
        path.write_text(json.dumps(config))  # JSON is YAML
        loaded = load_all(path, {**BUNDLED, **further}, {})
    gateway = Gateway(*loaded)
    try:
        await gateway.start()
        yield f"http://127.0.0.1:{gateway.port}"
    finally:
        await gateway.stop()


def body(**fields: Any) -> dict[str, Any]:
    """A request that both formats take."""
    return {"model": "model", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}], **fields}


class Gated(list[bytes | float]):
    """Pieces of a reply of which the rest are held back until the gate is opened."""

    def __init__(self, before: Iterable[bytes | float], gate: asyncio.Event, after: Iterable[bytes | float]) -> None:
        super().__init__([*before, *after])
        self._before, self._gate, self._after = list(before), gate, list(after)

    def __iter__(self) -> Iterator[bytes | float]:
        yield from self._before
        while not self._gate.is_set():
            yield 0.01
        yield from self._after


def gated_stream(gate: asyncio.Event) -> Reply:
    """A stream whose end is held back: all text before it, the tail after it."""
    reply = stream_reply(text_events("Hello."))
    reply.pieces = Gated(reply.pieces[:3], gate, reply.pieces[3:])
    return reply


def gated_message(gate: asyncio.Event) -> Reply:
    """A whole message that is held back."""
    reply = message_reply()
    reply.pieces = Gated([], gate, reply.pieces)
    return reply


class Told:
    """An answer, read to its end."""

    def __init__(self, status: int, headers: Mapping[str, str], text: str) -> None:
        self.status = status
        self.headers = headers
        self.text = text

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def id(self) -> str:
        return self.headers["request-id"]

    @property
    def is_whole(self) -> bool:
        """Whether it is an answer that came to its proper end."""
        whole = "[DONE]" in self.text or "message_stop" in self.text or '"usage"' in self.text
        return self.status == 200 and whole and '"error"' not in self.text


async def ask(
    session: aiohttp.ClientSession, url: str, *, key: str | None = KEY, path: str = PATHS["messages"], **fields: Any
) -> Told:
    """Send one request."""
    headers = {} if key is None else {"x-api-key": key}
    async with session.post(url + path, json=body(**fields), headers=headers) as answer:
        return Told(answer.status, answer.headers, await answer.text())


async def look(session: aiohttp.ClientSession, url: str, path: str, key: str = KEY) -> Told:
    """GET one page."""
    async with session.get(url + path, headers={"x-api-key": key}) as answer:
        return Told(answer.status, answer.headers, await answer.text())


def from_store(url: str, job: Callable[[Connection], T]) -> T:
    """What a job reads from a store, beside whoever serves from it."""
    engine = open_engine(url)
    try:
        with engine.connect().execution_options(**READ_ONLY) as connection:
            return job(connection)
    finally:
        engine.dispose()


def in_store(url: str, job: Callable[[Connection], T]) -> T:
    """Change a store from outside, as the command line does."""
    engine = open_engine(url)
    try:
        with engine.begin() as connection:
            return job(connection)
    finally:
        engine.dispose()


def ledger(url: str) -> list[dict[str, Any]]:
    """All rows, the oldest first."""
    query = select(usage).order_by(usage.c.at, usage.c.request_id)
    return from_store(url, lambda connection: [dict(row) for row in connection.execute(query).mappings()])


def spent_units(url: str, name: str) -> int:
    """What a key or an organization has spent for all time, by its budget."""
    query = select(budgets.c.spent).where(budgets.c.name == name, budgets.c.period == "")
    return int(from_store(url, lambda connection: connection.execute(query).scalar()) or 0)


def reserved_units(url: str) -> tuple[int, int]:
    """What stands reserved: by the budgets, and how many reservations there are."""

    def job(connection: Connection) -> tuple[int, int]:
        total = connection.execute(select(func.sum(budgets.c.reserved))).scalar()
        return int(total or 0), int(connection.execute(select(func.count()).select_from(reservations)).scalar_one())

    return from_store(url, job)
