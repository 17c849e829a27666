"""Clients that leave and crowd (group E), where that takes a ledger, the operator's figures, a plugin or few files.

test_process and test_client_faults hold the usual places at which a client may leave; here it leaves in each hook of a
plugin and while an image is fetched, a thousand times at random with an account of every row, and in crowds.
"""

from __future__ import annotations

import asyncio
import json
import random
import resource
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import pytest_asyncio

from tests.admin_listener import Figures, admin_of, figure, total
from tests.attacks.conftest import unharmed
from tests.attacks.fault_points import CONSTANTS, HANGING, INTERNET
from tests.attacks.measuring import MB, taken_by
from tests.attacks.raw_client import (
    BOTH,
    CHAT,
    MESSAGES,
    PATIENCE,
    Answer,
    Cut,
    RawClient,
    ask,
    asked,
    connected,
    post,
)
from tests.attacks.raw_upstream import (
    BEGUN,
    CHUNKED,
    ENDING,
    LAST_CHUNK,
    MESSAGE,
    Move,
    RawUpstream,
    Step,
    answer_head,
    chunk,
    frame,
    http,
)
from tests.attacks.starting import prepaid_config, started
from tests.process import GatewayProcess, eventually
from tests.store.gateways import ledger, reserved_units, spent_units
from tests.store.processes import KillableGateway

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

SEED = 20260713
NOTICED = 1.0
"""Seconds in which a client that leaves must be noticed."""
IMAGES_AT = "93.184.216.34"
"""A public address, at which the test's own host of images stands."""
STALLED = 1.0
"""Seconds for which a client may take nothing."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def images() -> AsyncIterator[RawUpstream]:
    """A host of images, which plays what it is told to."""
    async with RawUpstream() as started:
        yield started


class Crowded(NamedTuple):
    """A gateway whose client pays, with its folder."""

    gateway: KillableGateway
    folder: Path

    @property
    def store(self) -> str:
        return f"sqlite:///{self.folder}/ezat.db"

    @property
    def hanging(self) -> str:
        """The ids of the requests that have come to the hook that they asked for."""
        file = self.folder / "hanging"
        return file.read_text() if file.exists() else ""


@pytest.fixture(scope="module")
def running(
    shared_upstream: RawUpstream, images: RawUpstream, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Crowded]:
    folder = tmp_path_factory.mktemp("crowded")
    config = prepaid_config(
        shared_upstream,
        folder,
        {CONSTANTS: {"values": {"proxy.streaming:STALLED_READER": STALLED}}},
        {INTERNET: {"at": {f"{IMAGES_AT}:80": int(images.url.rpartition(":")[2])}}},
        {HANGING: {"file": str(folder / "hanging")}},
    )
    with started(config, folder) as gateway:
        yield Crowded(gateway, folder)


@pytest_asyncio.fixture(loop_scope="session")
async def crowded(running: Crowded) -> AsyncIterator[Crowded]:
    """That gateway, unharmed by the test: nothing runs, nothing is reserved, and its figures say so."""
    async with unharmed(running.gateway):
        yield running
    await eventually(lambda: reserved_units(running.store) == (0, 0))
    await admin_of(running.gateway).once(is_idle)


def is_idle(figures: Figures) -> bool:
    """Whether nothing is under way, by what the operator is shown."""
    names = ("ezat_running_requests", "ezat_open_streams", "ezat_body_bytes", "ezat_ledger_waiting")
    return [0.0] * 5 == [*(figure(figures, name) for name in names), total(figures, "ezat_deployment_running")]


# E1: leaving while plugins work

HOOKS = ["on_headers", "on_request", "on_send", "on_answer"]
CASES = [
    pytest.param(
        hook, path, stream, id=f"{hook}-{'chat' if path == CHAT else 'messages'}-{'stream' if stream else 'plain'}"
    )
    for hook in HOOKS
    for path in (CHAT, MESSAGES)
    for stream in (False, True)
    if not (stream and hook == "on_answer")
]


@pytest.mark.parametrize("way", ["close", "reset"])
@pytest.mark.parametrize(("hook", "path", "stream"), CASES)
async def test_e1_a_client_that_leaves_in_a_hook_of_a_plugin_ends_it(
    crowded: Crowded, upstream: RawUpstream, hook: str, path: str, stream: bool, way: str
) -> None:
    """Within a second the plugin's work is over, the request abandoned, what it had reserved given back; no upstream
    was asked, but where an answer was on its way back; and there is no row."""
    own_id = f"e1-{hook}-{path[1:4]}-{stream}-{way}".replace("/", "-")
    before = len(ledger(crowded.store))
    async with connected(crowded.gateway) as client:
        client.send(post(path, asked(stream=stream), f"x-request-id: {own_id}", f"x-ezat-session: {hook}"))
        await eventually(lambda: own_id in crowded.hanging)

        getattr(client, way)()
        await judge_abandoned(crowded, own_id, before)

    assert (hook == "on_answer") == bool(upstream.asked)


async def judge_abandoned(crowded: Crowded, own_id: str, rows: int) -> None:
    [line] = await eventually(lambda: crowded.gateway.requests(client_request_id=own_id), NOTICED)
    await eventually(lambda: reserved_units(crowded.store) == (0, 0), NOTICED)
    assert "abandoned" == line["outcome"]
    assert rows == len(ledger(crowded.store))


DOWNLOADS: dict[str, Sequence[Step]] = {
    "before the host answers": [Move.WAIT],
    "in the middle of the image": [answer_head("content-length: 100000", type="image/png"), b"\x89PNG", Move.WAIT],
}


@pytest.mark.parametrize("way", ["close", "reset"])
@pytest.mark.parametrize("where", DOWNLOADS)
async def test_e1_a_client_that_leaves_takes_its_downloads_with_it(
    crowded: Crowded, upstream: RawUpstream, images: RawUpstream, where: str, way: str
) -> None:
    """Within a second the host of the image is left, too; no upstream was asked, and there is no row."""
    own_id = f"e1-{where}-{way}".replace(" ", "-")
    before = len(ledger(crowded.store))
    images.forget()
    images.play(*DOWNLOADS[where])
    image = {"type": "image_url", "image_url": {"url": f"http://{IMAGES_AT}/picture.png"}}
    async with connected(crowded.gateway) as client:
        client.send(post(CHAT, asked(messages=[{"role": "user", "content": [image]}]), f"x-request-id: {own_id}"))
        await eventually(lambda: images.playing == 1)

        getattr(client, way)()
        await eventually(lambda: images.left == 1, NOTICED)
        await judge_abandoned(crowded, own_id, before)

    assert [] == upstream.asked


# E3: leaving at any moment

LEAVERS = 1000
TOGETHER = 50


async def test_e3_a_thousand_clients_that_leave_at_any_moment_leave_the_books_right(
    crowded: Crowded, upstream: RawUpstream
) -> None:
    """Each stream that began has one row, each whole answer an exact one, what was left early an estimated one; the
    money is their sum; and the figures know of every request, and of none that still runs."""
    chance = random.Random(SEED)
    known_lines, known_rows = len(crowded.gateway.requests()), len(ledger(crowded.store))
    whole: set[str] = set()

    async def come_and_leave(number: int) -> None:
        own_id, stream = f"e3-{number}", chance.random() < 0.7
        sent = post(chance.choice([CHAT, MESSAGES]), asked(stream=stream), f"x-request-id: {own_id}")
        leave, moment = chance.choice(["close", "reset", "half_close"]), chance.random() * 0.1
        if chance.random() < 0.2:
            sent = sent[: chance.randrange(len(sent))]
        elif chance.random() < 0.2:
            moment = PATIENCE  # one that stays
        upstream.play(CHUNKED, chunk(BEGUN), 0.02, chunk(ENDING), LAST_CHUNK)
        async with connected(crowded.gateway) as client:
            client.send(sent)
            try:
                answer = await client.answer(moment)
            except (TimeoutError, Cut):
                getattr(client, leave)()
            else:
                whole.update([own_id] if answer.status == 200 else [])

    for first in range(0, LEAVERS, TOGETHER):
        await asyncio.gather(*(come_and_leave(number) for number in range(first, first + TOGETHER)))
    await eventually(lambda: upstream.playing == 0)
    upstream.scripts.clear()
    figures = await admin_of(crowded.gateway).once(is_idle)
    await eventually(lambda: reserved_units(crowded.store) == (0, 0))

    lines = crowded.gateway.requests()
    rows = ledger(crowded.store)
    new = {line["request_id"]: line for line in lines[known_lines:]}
    found = Counter(row["request_id"] for row in rows[known_rows:])
    exactness = {row["request_id"]: row["exactness"] for row in rows}
    own_ids = [line["client_request_id"] for line in new.values()]
    assert len(own_ids) == len(set(own_ids)), "two lines of one request"
    assert 0 < len(whole) < LEAVERS
    assert len(new) == len(lines) - known_lines <= LEAVERS
    assert {} == {each: times for each, times in found.items() if times > 1}, "two rows of one request"
    assert {each for each, line in new.items() if must_have_row(line)} == set(found)
    assert whole <= {line["client_request_id"] for each, line in new.items() if exactness.get(each) == "exact"}
    assert set() == {each for each, line in new.items() if began(line) and exactness[each] == "unknown"}
    assert sum(row["cost"] for row in rows) == spent_units(crowded.store, "acme")
    assert len(lines) <= total(figures, "ezat_requests_total")
    answer = await ask(crowded.gateway, MESSAGES, asked())
    assert 200 == answer.status, "the next one is served"


def began(line: Mapping[str, Any]) -> bool:
    """Whether the upstream's counts had come, which stand in its first event."""
    return bool(line["outcome"] in ("completed", "abandoned") and line["input"] > 0)


def must_have_row(line: Mapping[str, Any]) -> bool:
    """Whole answers, and streams that were left once they had been sent up."""
    left = line["outcome"] == "abandoned" and line["stream"] and line["upstream"] is not None
    return bool(left or line["outcome"] == "completed")


# E4, E6: clients that take nothing

DELTA = frame({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "x" * (16 * 1024)}})
LONG_STREAM = [CHUNKED, chunk(BEGUN), *[chunk(DELTA * 16)] * 40, chunk(ENDING), LAST_CHUNK]
"""Ten megabytes."""


@pytest.mark.parametrize("path", BOTH)
async def test_e4_a_client_that_takes_nothing_is_left_in_time(
    crowded: Crowded, upstream: RawUpstream, path: str
) -> None:
    """After the time for that its connection is ended, its upstream left, and what came so far is billed."""
    own_id = f"e4-{path[1:4]}".replace("/", "-")
    before = len(ledger(crowded.store))
    upstream.play(*LONG_STREAM, *LONG_STREAM[2:-2] * 10)
    async with connected(crowded.gateway, receive_buffer=4096) as client:
        client.stop_reading()
        client.send(post(path, asked(stream=True), f"x-request-id: {own_id}"))

        await eventually(lambda: upstream.left == 1, 15 * STALLED)
        [line] = await eventually(lambda: crowded.gateway.requests(client_request_id=own_id), NOTICED)
        await eventually(lambda: len(ledger(crowded.store)) > before, NOTICED)

    assert "abandoned" == line["outcome"]
    assert ["estimated"] == [row["exactness"] for row in ledger(crowded.store)[before:]]


LARGE_PLAIN = http(json.dumps({**MESSAGE, "content": [{"type": "text", "text": "x" * 20 * MB}]}).encode())


async def test_e4_a_client_that_takes_no_plain_answer_is_left_in_time(crowded: Crowded, upstream: RawUpstream) -> None:
    """A connection that nobody reads from is not kept for ever with what could not be sent: it ends in that time."""
    async with AsyncExitStack() as stack:
        clients = []
        for path in (CHAT, MESSAGES):
            upstream.play(LARGE_PLAIN)
            client = await stack.enter_async_context(connected(crowded.gateway, receive_buffer=4096))
            client.send(post(path, asked()))
            assert (await client.until(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
            client.stop_reading()
            clients.append(client)
        await asyncio.sleep(4 * STALLED)

        for client in clients:
            client._writer.transport.resume_reading()  # type: ignore[attr-defined]
            with pytest.raises(Cut):
                await rest_of(client, len(LARGE_PLAIN) // 2)


async def rest_of(client: RawClient, size: int) -> None:
    """Read so many bytes. Raises Cut where they don't come."""
    try:
        async with asyncio.timeout(PATIENCE):
            while size > 0:
                piece = await client._reader.read(MB)
                if not piece:
                    raise Cut("closed")
                size -= len(piece)
    except ConnectionError as error:
        raise Cut(type(error).__name__) from error


CROWD = 200
STEP = 50


async def test_e6_two_hundred_stalled_clients_starve_nobody(gateway: GatewayProcess, upstream: RawUpstream) -> None:
    """What each of them costs is little, and no more than what the one before cost; others are served meanwhile."""
    held = []
    async with AsyncExitStack() as stack, taken_by(gateway) as taken:
        for number in range(1, CROWD + 1):
            upstream.play(*LONG_STREAM)
            client = await stack.enter_async_context(connected(gateway, receive_buffer=4096))
            client.stop_reading()
            client.send(post(MESSAGES, asked(stream=True)))
            if number % STEP == 0:
                await eventually(lambda number=number: upstream.playing == number, PATIENCE)  # type: ignore[misc]
                await until_nothing_moves(upstream)
                held.append(taken.memory)
        others = [
            await ask(gateway, path, asked(stream=stream)) for path in (CHAT, MESSAGES) for stream in (False, True)
        ]
        stalled = upstream.playing

    assert ([200] * 4, CROWD) == ([answer.status for answer in others], stalled)
    assert held[-1] < CROWD * 2 * MB
    assert held[-1] - held[-2] < 2 * (held[-1] / (CROWD / STEP)) + 4 * MB, held


async def until_nothing_moves(upstream: RawUpstream) -> None:
    async with asyncio.timeout(PATIENCE):
        before = -1
        while before != upstream.sent:
            before = upstream.sent
            await asyncio.sleep(0.2)


# E10: idle connections


class Idle(NamedTuple):
    """How many files a gateway may have open, at first and at most, and how many connections are idle."""

    files: int
    most: int | None
    connections: int


IDLE = {
    "as many files as a system usually gives": Idle(1024, None, 2000),
    "fewer files than connections": Idle(512, 512, 800),
}


@pytest.fixture
def many_files() -> Iterator[int]:
    """Lets the test itself open as many files as it needs; how many it may."""
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    yield most
    resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))


@pytest.mark.parametrize("name", IDLE)
async def test_e10_idle_connections_of_one_address_keep_nobody_out(
    upstream: RawUpstream, tmp_path: Path, many_files: int, name: str
) -> None:
    """However many connections of one address send nothing, another is served, now and when they are gone; and the log
    is not filled by them."""
    idle = IDLE[name]
    if many_files < 2 * idle.connections:
        pytest.skip("this system does not let one process have so many connections")
    with started(prepaid_config(upstream, tmp_path), tmp_path, files=idle.files, most_files=idle.most) as gateway:
        async with AsyncExitStack() as stack:
            for _ in range(idle.connections):
                await stack.enter_async_context(connected(gateway))
            during = await answer_from_elsewhere(gateway)
        after = await answer_from_elsewhere(gateway)
        written = len(gateway.written.splitlines())

    assert [200, 200] == [None if answer is None else answer.status for answer in (during, after)]
    assert written < 200


async def answer_from_elsewhere(gateway: GatewayProcess) -> Answer | None:
    """The answer to somebody at another address; None where none comes."""
    reader, writer = await asyncio.open_connection(gateway.host, gateway.port, local_addr=("127.0.0.2", 0))
    try:
        client = RawClient(reader, writer)
        client.send(post(MESSAGES, asked()))
        return await client.answer(5)
    except (Cut, TimeoutError):
        return None
    finally:
        writer.transport.abort()


# E13: one id for two


@pytest.mark.parametrize("path", BOTH)
async def test_e13_two_requests_of_one_id_are_two_rows(crowded: Crowded, upstream: RawUpstream, path: str) -> None:
    """What a client calls its requests makes no two of them one for whom they are billed to."""
    before = len(ledger(crowded.store))

    answers = await asyncio.gather(
        *(ask(crowded.gateway, path, asked(stream=stream), "x-request-id: same") for stream in (False, True))
    )

    rows = ledger(crowded.store)[before:]
    assert {answer.headers["request-id"] for answer in answers} == {row["request_id"] for row in rows}
    assert 2 == len(rows)
