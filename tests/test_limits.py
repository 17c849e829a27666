"""Limits, in memory and in a real Redis: exactly as many pass as may, and whoever is refused is told when to come back.

Time is played: the clock that the windows read is put forward, and where a Redis keeps time itself, what it keeps is
brought as much nearer to its end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import NamedTuple

import pytest
import redis.asyncio
import uuid_utils
from hypothesis import given
from hypothesis import strategies as st

from proxy import limits as limits_module
from proxy import redis_places
from proxy.limits import Limiter, LimiterDown, open_limiter, seconds_until
from proxy.redis_places import LEASE
from tests.process import eventually
from tests.store import servers


class Clock:
    """The wall clock, which can be put forward and back."""

    def __init__(self) -> None:
        self._real = time.time
        self.ahead = 0.0

    def __call__(self) -> float:
        return self._real() + self.ahead


class World(NamedTuple):
    limiter: Limiter
    clock: Clock
    redis: redis.asyncio.Redis | None
    name: str
    """Of something that is limited, and that no other test knows."""

    async def pass_time(self, seconds: float) -> None:
        """Let so much time pass."""
        self.clock.ahead += seconds
        if self.redis is None:
            return
        async for key in self.redis.scan_iter(f"*{self.name}*"):
            left = await self.redis.pttl(key)
            await self.redis.pexpire(key, max(1, left - int(seconds * 1000)))
        await asyncio.sleep(0.01)  # what had a millisecond left is gone


@pytest.fixture(params=["memory", "redis"])
async def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    clock = Clock()
    monkeypatch.setattr(time, "time", clock)
    url = "memory" if request.param == "memory" else servers.redis_server().url
    limiter = open_limiter(url)
    client = None if url == "memory" else redis.asyncio.from_url(url)
    yield World(limiter, clock, client, f"test:{uuid_utils.uuid4().hex}")
    await limiter.close()
    if client is not None:
        await client.aclose()


# Requests per minute


async def test_exactly_as_many_pass_as_may(world: World) -> None:
    """L1: of 200 at once exactly 10 pass; the others are told a whole number of seconds, at least one."""
    windows = await asyncio.gather(*(world.limiter.hit(world.name, 10) for _ in range(200)))

    refused = [window for window in windows if window.wait is not None]
    assert 190 == len(refused)
    assert all(type(window.wait) is int and 1 <= window.wait <= 60 for window in refused)
    assert {(10, 0)} == {(window.limit, window.remaining) for window in refused}


async def test_what_is_left_counts_down(world: World) -> None:
    """Each request leaves one less; a look takes nothing."""
    counted = [(await world.limiter.hit(world.name, 3)).remaining for _ in range(4)]
    looked = await world.limiter.look(world.name, 3, tokens=False)

    assert [2, 1, 0, 0] == counted
    assert (3, 0, None) == (looked.limit, looked.remaining, looked.wait)


async def test_an_unused_window_is_whole(world: World) -> None:
    """Before the first request everything is left."""
    for tokens in (False, True):
        window = await world.limiter.look(world.name, 5, tokens=tokens)
        assert (5, 5, None) == (window.limit, window.remaining, window.wait)


async def test_names_and_kinds_have_windows_of_their_own(world: World) -> None:
    """What one has used up is no other's loss."""
    assert None is (await world.limiter.hit(world.name, 1)).wait
    assert None is not (await world.limiter.hit(world.name, 1)).wait

    assert None is (await world.limiter.hit(f"{world.name}:other", 1)).wait
    assert None is (await world.limiter.spend(f"{world.name}:tokens", 1, 1)).wait


async def test_the_time_to_wait_is_true(world: World) -> None:
    """After as many seconds as were told a request passes, and not much earlier."""
    await world.limiter.hit(world.name, 2)
    await world.pass_time(20)
    await world.limiter.hit(world.name, 2)
    wait = (await world.limiter.hit(world.name, 2)).wait
    assert wait is not None
    assert 38 <= wait <= 41, "the first of the two leaves the window"

    await world.pass_time(wait - 3)
    assert None is not (await world.limiter.hit(world.name, 2)).wait
    await world.pass_time(3.1)
    assert None is (await world.limiter.hit(world.name, 2)).wait


async def test_no_minute_sees_more_than_the_limit(world: World) -> None:
    """The window moves along: not twice the limit around the turn of a minute."""
    passed: list[float] = []
    for second in range(0, 180, 3):
        if (await world.limiter.hit(world.name, 7)).wait is None:
            passed.append(second)
        await world.pass_time(3)

    assert 7 >= max(sum(at <= other < at + 60 for other in passed) for at in passed)
    assert len(passed) >= 20


# Tokens per minute


async def test_tokens_are_counted_by_their_number(world: World) -> None:
    """A request takes as many as it has; one that would take more than is left is refused and takes none."""
    assert 400 == (await world.limiter.spend(world.name, 1000, 600)).remaining
    refused = await world.limiter.spend(world.name, 1000, 500)
    assert refused.wait is not None
    assert 400 == refused.remaining
    assert None is (await world.limiter.spend(world.name, 1000, 400)).wait


async def test_more_than_the_whole_limit_counts_as_the_whole(world: World) -> None:
    """A request that is larger than the limit passes where nothing was used; else it could never pass."""
    assert None is (await world.limiter.spend(world.name, 1000, 10**9)).wait
    assert None is not (await world.limiter.spend(world.name, 1000, 1)).wait


@pytest.mark.parametrize("tokens", [1, 300, 1000])
async def test_the_time_to_wait_for_tokens_is_true(world: World, tokens: int) -> None:
    """The seconds that a refused request is told are those after which a request of its size passes."""
    await world.limiter.spend(world.name, 1000, 900)
    await world.limiter.spend(world.name, 1000, 100)
    wait = (await world.limiter.spend(world.name, 1000, tokens)).wait
    assert wait is not None
    assert 1 <= wait <= 121

    await world.pass_time(max(0, wait - 3))
    if wait > 3 and tokens > 60:
        assert None is not (await world.limiter.spend(world.name, 1000, tokens)).wait, "too early"
    await world.pass_time(3.1)
    assert None is (await world.limiter.spend(world.name, 1000, tokens)).wait


WAITS = {
    "room enough": ((10, 100, 0, 0.0, 50, 90.0), 0.0),
    "the minute before fades": ((50, 100, 120, 30.0, 10, 90.0), 9.5),
    "the current minute must end": ((60, 100, 0, 0.0, 82, 80.0), 20 + 60 * (1 - 41 / 82)),
    "the whole limit": ((100, 100, 0, 0.0, 100, 70.0), 10 + 60 * (1 - 1 / 100)),
}


@pytest.mark.parametrize(("given_", "expected"), WAITS.values(), ids=WAITS)
def test_when_a_window_has_room(given_: tuple[int, int, int, float, int, float], expected: float) -> None:
    """Told from the counts of this minute and of the one before."""
    assert expected == pytest.approx(seconds_until(*given_))


@given(
    st.integers(1, 1000),
    st.integers(1, 1000),
    st.integers(0, 1000),
    st.floats(0, 60),
    st.integers(0, 1000),
    st.floats(60, 120),
)
def test_no_wait_is_longer_than_two_minutes(
    tokens: int, limit: int, previous: int, previous_left: float, current: int, current_left: float
) -> None:
    """Whatever was counted, all of it is forgotten after two minutes."""
    told = seconds_until(
        min(tokens, limit), limit, min(previous, limit), previous_left, min(current, limit), current_left
    )
    assert told <= 120


# Places


async def test_no_more_run_at_once_than_may(world: World) -> None:
    """L3: of 50 at once 5 have a place; each that is given back is another's."""
    taken = await asyncio.gather(*(world.limiter.take_place(world.name, 5, str(n)) for n in range(50)))
    assert 5 == sum(taken)

    for number in [n for n, has in enumerate(taken) if has]:
        world.limiter.give_place_back(world.name, str(number))
    if world.redis is not None:
        key = f"ezat:places:{world.name}"
        async with asyncio.timeout(5):
            while await world.redis.zcard(key):  # noqa: ASYNC110 - it is another server's
                await asyncio.sleep(0.005)
    again = await asyncio.gather(*(world.limiter.take_place(world.name, 5, f"again {n}") for n in range(6)))

    assert 5 == sum(again)


async def test_a_cancelled_request_keeps_no_place(world: World) -> None:
    """A client that leaves while its place is asked for leaves the place, whatever the moment."""
    for turn in range(50):
        request_id = str(turn)
        asking = asyncio.create_task(world.limiter.take_place(world.name, 1000, request_id))
        for _ in range(turn % 6):
            await asyncio.sleep(0)
        asking.cancel()
        [outcome] = await asyncio.gather(asking, return_exceptions=True)
        if outcome is True:
            world.limiter.give_place_back(world.name, request_id)

    if world.redis is not None:
        key = f"ezat:places:{world.name}"
        async with asyncio.timeout(5):
            await asyncio.sleep(0.05)
            while await world.redis.zcard(key):  # noqa: ASYNC110 - it is another server's
                await asyncio.sleep(0.005)
    assert all(await asyncio.gather(*(world.limiter.take_place(world.name, 10, f"new {n}") for n in range(10))))


async def test_a_dead_gateways_places_run_out() -> None:
    """In Redis a place is a lease: what a gateway had taken that was killed is free after two minutes."""
    url, name = servers.redis_server().url, uuid_utils.uuid4().hex
    dead, living = open_limiter(url), open_limiter(url)
    assert await dead.take_place(name, 1, "a")
    assert not await living.take_place(name, 1, "b")
    await dead.close()  # it gives nothing back

    client = redis.asyncio.from_url(url)
    key = f"ezat:places:{name}"
    assert 0 < await client.ttl(key) <= LEASE
    await client.zincrby(key, -LEASE - 1, "a")

    assert await living.take_place(name, 1, "b")
    await living.close()
    await client.aclose()


async def test_two_gateways_share_what_redis_counts() -> None:
    """Whatever gateway a request comes to, it counts for the same limit."""
    url, name = servers.redis_server().url, uuid_utils.uuid4().hex
    both = [open_limiter(url), open_limiter(url)]

    windows = await asyncio.gather(*(both[n % 2].hit(name, 10) for n in range(40)))
    places = await asyncio.gather(*(both[n % 2].take_place(name, 3, str(n)) for n in range(40)))
    for limiter in both:
        await limiter.close()

    assert 10 == sum(window.wait is None for window in windows)
    assert 3 == sum(places)


# Clocks, memory, and a Redis that is gone


JUMPS = {"a day ahead": 86400.0, "a day back": -86400.0, "5 s ahead": 5.0, "5 s back": -5.0}


@pytest.mark.parametrize("jump", JUMPS.values(), ids=JUMPS)
async def test_a_clock_that_jumps_locks_nobody_out(world: World, jump: float) -> None:
    """L13: within one window after a jump of the clock all is as usual, and no wait is negative or beyond a minute."""
    for _ in range(3):
        await world.limiter.hit(world.name, 3)

    world.clock.ahead += jump
    window = await world.limiter.hit(world.name, 3)
    assert window.wait is None or 1 <= window.wait <= 60
    assert 1 <= window.reset <= 60
    await world.pass_time(66)

    assert None is (await world.limiter.hit(world.name, 3)).wait


async def test_what_has_run_out_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """L12: many thousands of keys leave nothing behind in memory once their minute is over, and a request does not
    pay for all the others' keys."""
    clock = Clock()
    monkeypatch.setattr(time, "time", clock)
    monkeypatch.setattr(limits_module, "SWEEP", 0.05)
    limiter = open_limiter("memory")
    for number in range(3000):
        await limiter.hit(f"key {number}", 10)
        await limiter.spend(f"key {number}", 1000, 10)
        await limiter.take_place(f"key {number}", 5, "a")
        limiter.give_place_back(f"key {number}", "a")
    memory = limiter._memory
    assert memory is not None
    assert 3000 == len(memory.events)

    clock.ahead += 200
    await eventually(lambda: not (memory.events or memory.storage or memory.expirations or memory.locks))

    assert not limiter._places._taken  # type: ignore[attr-defined]
    await limiter.close()


async def test_a_limiter_that_cannot_be_asked_says_so() -> None:
    """Without its Redis nothing is counted and nobody is let in by mistake: it is told, at once."""
    limiter = open_limiter("redis://127.0.0.1:1/0")

    for asking in (
        limiter.hit("a", 1),
        limiter.spend("a", 1, 1),
        limiter.look("a", 1, tokens=False),
        limiter.look("a", 1, tokens=True),
        limiter.take_place("a", 1, "a"),
    ):
        with pytest.raises(LimiterDown):
            await asking
    limiter.give_place_back("a", "a")
    await limiter.close()


async def test_a_limiter_goes_on_when_redis_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis gone, hanging, and back under the same address: the very next request is counted again."""
    monkeypatch.setattr(redis_places, "REDIS_TIMEOUT", 0.2)
    server = servers.redis_server()
    limiter, name = open_limiter(server.url), uuid_utils.uuid4().hex
    await limiter.hit(name, 5)

    server.stop()
    with pytest.raises(LimiterDown):
        await limiter.hit(name, 5)
    server.start()
    assert 4 == (await limiter.hit(name, 5)).remaining, "Redis has forgotten, and is asked again"

    server.pause()
    with pytest.raises(LimiterDown):
        await limiter.hit(name, 5)
    server.go_on()
    assert None is (await limiter.hit(name, 5)).wait
    await limiter.close()


async def test_a_cancelled_request_does_not_mix_up_replies(world: World) -> None:
    """A client that leaves in the middle of a question leaves no reply behind for the next."""
    for turn in range(60):
        asking = asyncio.create_task(world.limiter.hit(f"{world.name}:{turn % 3}", 1000))
        for _ in range(turn % 7):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

    window = await world.limiter.look(f"{world.name}:fresh", 77, tokens=False)
    assert (77, 77) == (window.limit, window.remaining)
