"""What a key may know of itself: GET /api/key and GET /api/key/requests/ID."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest

from proxy.store.periods import span_of
from proxy.testing import ScriptedUpstream, message_reply, stream_reply, text_events
from tests.process import eventually
from tests.store import servers
from tests.store.gateways import KEY, PATHS, Told, ask, configured, gated_message, look, serving

OTHER = "ezat_sk_other"
AUTH: dict[str, Any] = {
    "organizations": [{"name": "acme", "balance_usd": 2, "requests_per_minute": 100}],
    "keys": [
        {
            "name": "one",
            "key": KEY,
            "organization": "acme",
            "models": ["model"],
            "spend_limit_usd": "0.5",
            "spend_period": "month",
            "requests_per_minute": 10,
            "input_tokens_per_minute": 1000,
            "parallel_requests": 3,
        },
        {"name": "other", "key": OTHER},
    ],
}
COST = "0.000047"
"""12 input tokens at 1 USD and 7 output tokens at 5 USD per million."""


@pytest.fixture(params=["sqlite", "postgresql"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/ezat.db"
        return
    with servers.postgres().lent_database() as url:
        yield url


class World(NamedTuple):
    session: aiohttp.ClientSession
    url: str
    upstream: ScriptedUpstream

    async def ask(self, **fields: Any) -> Told:
        return await ask(self.session, self.url, **fields)

    async def look(self, path: str = "/api/key", key: str = KEY) -> Told:
        return await look(self.session, self.url, path, key)


@pytest.fixture
async def world(store_url: str) -> AsyncIterator[World]:
    async with (
        aiohttp.ClientSession() as session,
        ScriptedUpstream() as upstream,
        serving(configured(store_url, upstream.url, auth=AUTH)) as url,
    ):
        yield World(session, url, upstream)


def resets_at() -> str:
    return datetime.fromtimestamp(span_of("month", datetime.now(UTC).timestamp()).ends, UTC).strftime(
        "%Y-%m-%dT%H:%M:%SZ"
    )


async def test_a_key_sees_what_is_left(world: World) -> None:
    """Its budgets with what is spent, reserved and left, and when they begin anew; its limits; its models."""
    await world.ask()

    told = await world.look()

    month = f"{datetime.now(UTC):%Y-%m}"
    limits = told.json["limits"]
    assert 200 == told.status
    assert ("one", "acme", ["test/model"]) == (told.json["name"], told.json["organization"], told.json["models"])
    assert [
        {**budget("key", None, None, None, None)},
        {**budget("key", month, "0.5", "0.499953", resets_at())},
        {**budget("organization", None, "2", "1.999953", None)},
    ] == told.json["budgets"]
    assert (10, 8) == (limits["key"]["requests_per_minute"]["limit"], limits["key"]["requests_per_minute"]["remaining"])
    assert 1000 > limits["key"]["input_tokens_per_minute"]["remaining"] > 900
    assert 3 == limits["key"]["parallel_requests"]
    assert 98 == limits["organization"]["requests_per_minute"]["remaining"]
    assert None is limits["organization"]["input_tokens_per_minute"]
    assert all(1 <= limits[of]["requests_per_minute"]["reset_seconds"] <= 60 for of in ("key", "organization"))


def budget(of: str, period: str | None, limit: str | None, left: str | None, resets: str | None) -> dict[str, Any]:
    return {
        "of": of,
        "period": period,
        "limit_usd": limit,
        "spent_usd": COST,
        "reserved_usd": "0",
        "left_usd": left,
        "resets_at": resets,
    }


async def test_a_key_without_limits_sees_none(world: World) -> None:
    """No limit is null, not zero; and another key's use is not its own."""
    await world.ask()

    told = (await world.look(key=OTHER)).json

    assert (None, ["0"], [None]) == (
        told["organization"],
        [each["spent_usd"] for each in told["budgets"]],
        [each["limit_usd"] for each in told["budgets"]],
    )
    none = {"requests_per_minute": None, "input_tokens_per_minute": None, "parallel_requests": None}
    assert {"key": none, "organization": none} == told["limits"]


async def test_what_a_running_request_has_reserved_is_seen(world: World) -> None:
    """While an answer runs, what it may cost is reserved and not left."""
    gate = asyncio.Event()
    world.upstream.replies.append(gated_message(gate))
    running = asyncio.create_task(world.ask(max_tokens=100))
    await eventually(lambda: world.upstream.open == 1)

    during = (await world.look()).json["budgets"][2]
    gate.set()
    await running
    after = (await world.look()).json["budgets"][2]

    assert 0.0005 < float(during["reserved_usd"]) < 0.0006
    assert 2 == pytest.approx(float(during["left_usd"]) + float(during["reserved_usd"]))
    assert ("0", "1.999953") == (after["reserved_usd"], after["left_usd"])


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
async def test_a_key_sees_what_its_request_cost(world: World, path: str) -> None:
    """By the request-id of the answer: tokens, cost and how exact it is."""
    counts = {
        "input_tokens": 10,
        "output_tokens": 4,
        "cache_read_input_tokens": 3,
        "cache_creation_input_tokens": 7,
        "cache_creation": {"ephemeral_5m_input_tokens": 2, "ephemeral_1h_input_tokens": 5},
        "output_tokens_details": {"thinking_tokens": 1},
    }
    world.upstream.replies.append(message_reply(usage=counts))
    answer = await world.ask(path=path)

    told = (await world.look(f"/api/key/requests/{answer.id}")).json

    tokens = {"input": 10, "cache_read": 3, "cache_write_5m": 2, "cache_write_1h": 5, "output": 4, "thinking": 1}
    # 10 + 3 * 0.1 + 2 * 1.25 + 5 * 2 + 4 * 5 = 42.8
    assert (answer.id, "test/model", tokens, "0.0000428", "exact", None) == (
        told["request_id"],
        told["model"],
        told["tokens"],
        told["cost_usd"],
        told["exactness"],
        told["reason"],
    )
    assert abs(datetime.fromisoformat(told["at"]).timestamp() - datetime.now(UTC).timestamp()) < 60


async def test_the_cost_is_known_when_the_answer_ends(world: World) -> None:
    """A client that has heard the end of a stream finds its cost at once."""
    for _ in range(5):  # as often as the key may ask
        world.upstream.replies.append(stream_reply(text_events("Hello.")))
        answer = await world.ask(stream=True)
        told = await world.look(f"/api/key/requests/{answer.id}")
        assert COST == told.json["cost_usd"]


STRANGERS = ["00000000-0000-7000-8000-000000000000", "nothing", "' OR '1'='1", "%00", "a%2Fb", "%ff", "é"]


async def test_another_keys_request_is_not_there(world: World) -> None:
    """404 for what is another's and for what nobody asked, in the same words."""
    answer = await world.ask()

    told = [await world.look(f"/api/key/requests/{name}", OTHER) for name in (answer.id, *STRANGERS)]

    assert [404] * len(told) == [each.status for each in told]
    assert 1 == len({each.json["error"]["message"] for each in told if each.id})


async def test_without_a_key_nothing_is_told(world: World) -> None:
    """401 for no key and a wrong one."""
    for path in ("/api/key", "/api/key/requests/x"):
        async with world.session.get(world.url + path) as answer:
            assert 401 == answer.status
        assert 401 == (await world.look(path, "ezat_sk_nobody")).status
