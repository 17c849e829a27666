"""SIGKILL at random moments under load: what a client saw whole is in the ledger, once, and the money is right.

How many rounds are played says ``EZAT_KILL_ROUNDS``: 8 by default, three quarters of them on SQLite, the others on
PostgreSQL. Each round goes on with the store that the killed gateway left behind, and has a seed of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
from collections import Counter
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from proxy.store.ledger import alive
from proxy.store.store import DEAD
from proxy.testing import stream_reply, text_events
from tests.process import eventually
from tests.store import servers
from tests.store.gateways import (
    INPUT_UNITS,
    KEY,
    OUTPUT_UNITS,
    PATHS,
    body,
    configured,
    in_store,
    ledger,
    prepaid,
    reserved_units,
    spent_units,
)
from tests.store.processes import KillableGateway, begun

ROUNDS = int(os.environ.get("EZAT_KILL_ROUNDS", "8"))
CLIENTS = 12
MUCH = 10**18


def usage_of(number: int) -> dict[str, int]:
    """What the upstream counts for a request; another for each."""
    return {"input_tokens": 100 + number, "output_tokens": 1 + number % 50, "cache_read_input_tokens": number % 7}


def cost_of(number: int) -> int:
    counts = usage_of(number)
    fresh, read = counts["input_tokens"], counts["cache_read_input_tokens"]
    return fresh * INPUT_UNITS + read * INPUT_UNITS // 10 + counts["output_tokens"] * OUTPUT_UNITS


class CountingUpstream:
    """Answers each numbered request with counts of its own, now slowly and now at once, and keeps what it gave."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self.given: list[int] = []
        self.url = ""

    async def __aenter__(self) -> CountingUpstream:
        app = web.Application()
        app.router.add_post("/v1/messages", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        sent = await request.read()
        found = re.search(rb"number (\d+)", sent)
        assert found is not None
        number = int(found.group(1))
        self.given.append(number)
        counts = usage_of(number)
        events = text_events("a", "b", "c")
        events[0]["message"]["usage"] = counts
        events[-2]["usage"] = {"output_tokens": counts["output_tokens"]}
        if b'"stream":true' not in sent.replace(b" ", b""):
            await asyncio.sleep(self._chance.random() / 50)
            message = {**events[0]["message"], "content": [{"type": "text", "text": "abc"}], "stop_reason": "end_turn"}
            return web.json_response(message)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for piece in stream_reply(events).pieces:
            if self._chance.random() < 0.2:
                await asyncio.sleep(self._chance.random() / 50)
            assert isinstance(piece, bytes)
            await response.write(piece)
        await response.write_eof()
        return response


class Clients:
    """Ask without end, in both formats, whole and streamed; some leave early."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._next = 0
        self.whole: set[int] = set()
        """The requests whose answers came to their proper end."""

    async def run(self, url: str, until: Awaitable[None]) -> None:
        """Ask until ``until`` is over and nobody answers any more."""
        async with aiohttp.ClientSession() as session:
            asking = [asyncio.create_task(self._ask_on(session, url)) for _ in range(CLIENTS)]
            await until
            await asyncio.gather(*asking)

    async def _ask_on(self, session: aiohttp.ClientSession, url: str) -> None:
        while True:
            self._next += 1
            number = self._next
            try:
                if await self._one(session, url, number):
                    self.whole.add(number)
            except aiohttp.ClientConnectorError:
                return
            except (aiohttp.ClientError, ConnectionResetError):
                continue

    async def _one(self, session: aiohttp.ClientSession, url: str, number: int) -> bool:
        path = PATHS[self._chance.choice(["openai", "messages"])]
        streams, leaves = self._chance.random() < 0.7, self._chance.random() < 0.1
        fields = {"stream": streams, "messages": [{"role": "user", "content": f"number {number}"}]}
        async with session.post(url + path, json=body(**fields), headers={"x-api-key": KEY}) as answer:
            if leaves:
                return False
            text = await answer.text()
            assert answer.status == 200, text
        if streams:
            return text.rstrip().endswith(("data: [DONE]", '{"type":"message_stop"}')) and '"error"' not in text
        return bool(json.loads(text)["usage"])


def judge(url: str, upstream: CountingUpstream, clients: Clients) -> None:
    """What must be true of the store, whatever happened."""
    rows = ledger(url)
    numbers = Counter(row["input"] - 100 for row in rows if row["exactness"] != "unknown")
    exact = [row for row in rows if row["exactness"] == "exact"]
    assert {} == {number: times for number, times in numbers.items() if times > 1}, "two rows of one request"
    assert len(rows) == len({row["request_id"] for row in rows})
    assert set() == clients.whole - {row["input"] - 100 for row in exact}, "seen whole, but not in the ledger"
    assert set() == set(numbers) - set(upstream.given), "in the ledger, but never answered"
    assert [cost_of(row["input"] - 100) for row in exact] == [row["cost"] for row in exact]
    assert all(row["exactness"] in ("exact", "estimated", "unknown") for row in rows)
    assert sum(row["cost"] for row in rows) == spent_units(url, "acme") == spent_units(url, "yaml:one")


def reserved_at_next_start(url: str) -> tuple[int, int]:
    """What stands reserved when a gateway has started again; on PostgreSQL, when the killed ones count as dead."""
    if url.startswith("postgresql"):
        rows = ledger(url)
        later = max(row["at"] for row in rows) + 10**6
        in_store(url, alive("the next", later, DEAD))
    return reserved_units(url)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "rounds"), [("sqlite", ROUNDS - ROUNDS // 4), ("postgresql", ROUNDS // 4)])
async def test_nothing_that_was_answered_is_lost(
    tmp_path: Path, kind: str, rounds: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """P6: every answer that a client saw whole has exactly one row, no request has two, no reservation outlives its
    gateway, and the money is what the upstream counted, to the last unit."""
    url = f"sqlite:///{tmp_path}/ezat.db" if kind == "sqlite" else servers.postgres().database()
    limiter = "memory" if kind == "sqlite" else servers.redis_server().url
    chance = random.Random(kind)
    clients = Clients(chance)
    async with CountingUpstream(chance) as upstream:
        config: dict[str, Any] = configured(url, upstream.url, auth=prepaid(MUCH), limiter=limiter)
        for seed in range(rounds):
            gateway = begun(config, tmp_path / str(seed))
            try:
                await asyncio.to_thread(gateway.wait_until_ready)
                if seed:
                    assert (0, 0) == reserved_at_next_start(url)
                await clients.run(gateway.url, killed_soon(gateway, upstream, random.Random(seed)))
            finally:
                gateway.kill()
            judge(url, upstream, clients)
        last = begun(config, tmp_path / "last")
        await asyncio.to_thread(last.wait_until_ready)
        last.stop()

    assert (0, 0) == reserved_at_next_start(url)
    judge(url, upstream, clients)
    rows = len(ledger(url))
    with capsys.disabled():
        print(
            f"\n{kind}: {rounds} gateways killed, {len(upstream.given)} requests answered by the upstream, "
            f"{len(clients.whole)} seen whole, {rows} rows"
        )
    assert len(clients.whole) > rounds


async def killed_soon(gateway: KillableGateway, upstream: CountingUpstream, chance: random.Random) -> None:
    """Kill it at a random moment, when so many requests have reached the upstream."""
    enough = len(upstream.given) + chance.randrange(5, 60)
    await eventually(lambda: len(upstream.given) >= enough, 60)
    await asyncio.sleep(chance.random() / 50)
    gateway.kill()
