"""Several worker processes that are one gateway, and the supervisor that keeps them so.

All of it is judged from outside: by which process answered (a plugin tells), by what a process leaves behind, by exit
codes and by what is written. Each gateway is the leader of a process group of its own, as a shell would start it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from proxy.testing import ScriptedUpstream
from proxy.workers import TURN
from tests.admin_listener import admin_of, figure, tokens_in, total
from tests.process import REPOSITORY, RUN, eventually, run
from tests.store import servers
from tests.store.gateways import (
    INPUT_UNITS,
    KEY,
    OUTPUT_UNITS,
    PATHS,
    body,
    configured,
    gated_message,
    gated_stream,
    ledger,
    spent_units,
)
from tests.store.processes import KillableGateway
from tests.worker_plugins import WHO

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

WORKERS = 2
MANY = 40
"""New connections: that all of them reach the same one of two workers happens once in 2^39 times."""
MARK = "EZAT_TEST_MARK"
PATIENCE = 20.0
AT_ONCE = 6.0
"""Seconds in which a stop that waits for no request is over, on a busy machine."""
START = 0.3
"""Seconds that a slow start takes."""
RELOADED = ("the configuration was reloaded", "the configuration is as it was")
NOT_RELOADED = "the configuration was not reloaded, the present one stays"
REPLACED = "a worker has ended, another one takes its place"
COST = 12 * INPUT_UNITS + 7 * OUTPUT_UNITS
"""Of the scripted upstream's answer, in units."""
AUTH = {
    "organizations": [{"name": "acme", "balance_usd": f"{3 * COST / 10**12:.12f}"}],
    "keys": [
        {"name": "one", "key": KEY},
        {"name": "ten", "key": "ezat_sk_ten", "requests_per_minute": 10},
        {"name": "three", "key": "ezat_sk_three", "parallel_requests": 3},
        {"name": "poor", "key": "ezat_sk_poor", "organization": "acme"},
    ],
}


class Workers(KillableGateway):
    """A gateway of several workers, and what it leaves in its folder."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path, mark: str) -> None:
        super().__init__(process, folder)
        self._path = folder / "gateway.yaml"
        self._temporary = folder / "temporary"
        self._mark = mark

    @property
    def pids(self) -> set[int]:
        """Its workers, dead ones that nobody has buried included."""
        try:
            children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        except FileNotFoundError:
            return set()
        return {int(pid) for pid in children.split()}

    @property
    def survivors(self) -> set[int]:
        """Every process that was ever part of it and is still there."""
        found = set()
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if f"{MARK}={self._mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found.add(int(folder.name))
        return found

    @property
    def listeners(self) -> int:
        """How many sockets listen on its port."""
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        return sum(int(row[1].rpartition(":")[2], 16) == self.port and row[3] == "0A" for row in rows)

    @property
    def temporary_files(self) -> list[str]:
        return [path.name for path in self._temporary.iterdir()]

    def logged(self, *events: str) -> list[dict[str, Any]]:
        return [line for line in self.log_lines if line["event"] in events]

    def rewrite(self, config: Mapping[str, Any] | str) -> None:
        """Put another file in the place of its configuration, in one step."""
        rewrite(self._path, config)

    def tell_group(self, number: signal.Signals) -> None:
        """What a terminal does at Ctrl-C: tell every process of the group."""
        os.killpg(self.pid, number)


def rewrite(path: Path, config: Mapping[str, Any] | str) -> None:
    new = path.with_suffix(".new")
    new.write_text(config if isinstance(config, str) else json.dumps(config))  # JSON is YAML
    new.replace(path)


def begun(config: Mapping[str, Any], folder: Path) -> Workers:
    """A gateway that need not be ready yet."""
    (folder / "temporary").mkdir(parents=True)
    (folder / "gateway.yaml").write_text(json.dumps(config))
    mark = uuid.uuid4().hex
    with (folder / "output").open("wb") as output, (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*RUN, "--config", str(folder / "gateway.yaml")],
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=log,
            env={**os.environ, MARK: mark, "TMPDIR": str(folder / "temporary")},
            start_new_session=True,
        )
    return Workers(process, folder, mark)


@contextmanager
def started(config: Mapping[str, Any], folder: Path) -> Iterator[Workers]:
    """A gateway whose workers are all ready."""
    gateway = begun(config, folder)
    try:
        gateway.wait_until_ready()
        deadline = time.monotonic() + PATIENCE
        while gateway.listeners < config["server"]["workers"]:
            assert time.monotonic() < deadline, gateway.written
            time.sleep(0.02)
        time.sleep(2 * TURN)  # the supervisor knows it by then, of which there is no sign
        yield gateway
    finally:
        gateway.stop()
        for pid in gateway.survivors:
            os.kill(pid, signal.SIGKILL)


def config_for(
    upstream: ScriptedUpstream, store: str, *, server: Mapping[str, Any] | None = None, **plugin: Any
) -> dict[str, Any]:
    """Two workers that don't watch the file; ``plugin`` are settings of the one that tells which of them answers."""
    settings = {"workers": WORKERS, "watch": False, "shutdown_timeout": 5, **(server or {})}
    config = configured(store, upstream.url, auth=AUTH, limiter=servers.redis_server().url, server=settings)
    config["plugins"].insert(-1, {WHO: plugin})
    return config


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_upstream() -> AsyncIterator[ScriptedUpstream]:
    async with ScriptedUpstream() as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def upstream(shared_upstream: ScriptedUpstream) -> ScriptedUpstream:
    """The upstream of the shared gateways, as if it were new."""
    await eventually(lambda: shared_upstream.open == 0)
    shared_upstream.replies.clear()
    shared_upstream.received.clear()
    return shared_upstream


@pytest.fixture
def store() -> Iterator[str]:
    with servers.postgres().lent_database() as url:
        yield url


@pytest.fixture(scope="module")
def shared_store() -> str:
    servers.redis_server().empty()
    return servers.postgres().database()


@pytest.fixture(scope="module")
def shared_pair(
    shared_upstream: ScriptedUpstream, shared_store: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Workers]:
    folder = tmp_path_factory.mktemp("pair")
    with started(config_for(shared_upstream, shared_store), folder) as gateway:
        yield gateway


@pytest.fixture
def pair(shared_pair: Workers, shared_upstream: ScriptedUpstream, shared_store: str) -> Workers:
    """Two workers with the first edition of the configuration in their file."""
    shared_pair.rewrite(config_for(shared_upstream, shared_store))
    return shared_pair


class Got:
    """An answer, read to its end."""

    def __init__(self, answer: aiohttp.ClientResponse, text: str) -> None:
        self.status = answer.status
        self.text = text
        self.worker = int(answer.headers.get("x-worker", 0))
        self.edition = answer.headers.get("x-edition")

    @property
    def is_whole(self) -> bool:
        return self.status == 200 and ("message_stop" in self.text or '"usage"' in self.text)


@asynccontextmanager
async def clients() -> AsyncIterator[aiohttp.ClientSession]:
    """Clients each of whose requests comes by a connection of its own."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=PATIENCE)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        yield session


async def ask(session: aiohttp.ClientSession, gateway: Workers, key: str = KEY, **fields: Any) -> Got:
    url = gateway.url + PATHS["messages"]
    async with session.post(url, json=body(**fields), headers={"x-api-key": key}) as answer:
        return Got(answer, await answer.text())


async def ask_many(gateway: Workers, number: int = MANY, key: str = KEY, **fields: Any) -> list[Got]:
    """So many requests at once."""
    async with clients() as session:
        return await asyncio.gather(*(ask(session, gateway, key, **fields) for _ in range(number)))


async def ask_until_answered(session: aiohttp.ClientSession, gateway: Workers) -> Got:
    """One request, sent again where its connection breaks."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return await ask(session, gateway)
        except aiohttp.ClientConnectionError:
            assert time.monotonic() < deadline, "nobody answers"


async def workers_of(gateway: Workers) -> set[int]:
    """Those that answer."""
    return {got.worker for got in await ask_many(gateway)}


async def reloaded(gateway: Workers, times: int = WORKERS) -> None:
    """Let it reload, and wait until so many workers have said that they did."""
    known = len(gateway.logged(*RELOADED))
    gateway.terminate(signal.SIGHUP)
    await eventually(lambda: len(gateway.logged(*RELOADED)) >= known + times, PATIENCE)


async def ended(gateway: Workers, seconds: float = PATIENCE) -> int:
    """Its exit code, once it has ended; none of its processes and files may be left."""
    await eventually(lambda: gateway.exit_code is not None, seconds)
    assert set() == gateway.survivors
    assert [] == gateway.temporary_files
    assert gateway.exit_code is not None
    return gateway.exit_code


# One gateway


async def test_every_worker_serves_the_one_free_port(pair: Workers, upstream: ScriptedUpstream) -> None:
    """With port 0 all workers listen on the same free port, and the kernel spreads connections over them."""
    answers = await ask_many(pair)

    assert {200} == {got.status for got in answers}
    assert WORKERS == len(pair.pids)
    assert pair.pids == {got.worker for got in answers}
    assert 1 == pair.written.count("EZAT Router listens on ")


async def test_a_limit_on_requests_holds_over_all_workers(pair: Workers, upstream: ScriptedUpstream) -> None:
    """Of forty requests at once against ten a minute exactly ten pass, whichever workers they reach."""
    answers = await ask_many(pair, key="ezat_sk_ten")

    passed = [got for got in answers if got.status == 200]
    assert (10, 30) == (len(passed), sum(got.status == 429 for got in answers))
    assert 10 == len(upstream.received)


async def test_places_for_parallel_requests_hold_over_all_workers(pair: Workers, upstream: ScriptedUpstream) -> None:
    """While three requests run, every other of their key is refused by every worker; then three may run again."""
    gate = asyncio.Event()
    upstream.replies.extend(gated_message(gate) for _ in range(3))
    async with clients() as session:
        running = [asyncio.create_task(ask(session, pair, "ezat_sk_three")) for _ in range(3)]
        await eventually(lambda: upstream.open == 3)

        others = await ask_many(pair, key="ezat_sk_three")
        gate.set()
        first = await asyncio.gather(*running)
        later = [await ask(session, pair, "ezat_sk_three") for _ in range(3)]

    assert {429} == {got.status for got in others}
    assert [200] * 6 == [got.status for got in (*first, *later)]


async def test_a_budget_holds_over_all_workers(pair: Workers, upstream: ScriptedUpstream, shared_store: str) -> None:
    """While running requests have reserved a balance, every worker refuses every other request; no more is spent than
    there was, and all of it is known."""
    gate = asyncio.Event()
    upstream.replies.extend(gated_message(gate) for _ in range(MANY))
    async with clients() as session:
        asking = [asyncio.create_task(ask(session, pair, "ezat_sk_poor", max_tokens=7)) for _ in range(MANY)]
        await eventually(lambda: sum(task.done() for task in asking) + upstream.open == MANY, PATIENCE)
        gate.set()
        answers = await asyncio.gather(*asking)
    upstream.replies.clear()

    passed = sum(got.status == 200 for got in answers)
    assert [200] * passed + [429] * (MANY - passed) == sorted(got.status for got in answers)
    assert 1 <= passed <= 3
    assert WORKERS == len({got.worker for got in answers if got.status == 429})
    rows = await asyncio.to_thread(ledger, shared_store)
    assert passed == sum(row["organization"] == "acme" for row in rows)
    assert passed * COST == await asyncio.to_thread(spent_units, shared_store, "acme")


async def test_the_figures_are_those_of_all_workers(pair: Workers, upstream: ScriptedUpstream) -> None:
    """What the one listener shows is the sum of what every worker did."""
    admin = admin_of(pair)
    before = await admin.present()
    assert 1 == figure(before, "ezat_store_ready")

    answers = await ask_many(pair)
    labels = {"route": "messages", "model": "test/model", "outcome": "completed", "status": "200"}
    wanted = figure(before, "ezat_requests_total", **labels) + MANY
    after = await admin.once(lambda figures: figure(figures, "ezat_requests_total", **labels) >= wanted)

    assert WORKERS == len({got.worker for got in answers})
    assert wanted == figure(after, "ezat_requests_total", **labels)
    assert MANY * 12 == total(after, "ezat_tokens_total", kind="input") - total(
        before, "ezat_tokens_total", kind="input"
    )
    counted = [
        total(each, "ezat_request_seconds_count", route="messages", model="test/model") for each in (before, after)
    ]
    assert MANY == counted[1] - counted[0]


async def test_running_requests_of_all_workers_are_shown(pair: Workers, upstream: ScriptedUpstream) -> None:
    """What is under way is looked at in every worker, too."""
    admin, gate = admin_of(pair), asyncio.Event()
    upstream.replies.extend(gated_stream(gate) for _ in range(12))
    asking = asyncio.create_task(ask_many(pair, 12, stream=True))
    try:
        await admin.once(lambda figures: figure(figures, "ezat_open_streams") == 12)
        shown = await admin.once(lambda figures: total(figures, "ezat_deployment_running") == 12)
    finally:
        gate.set()
    answers = await asking

    assert all(got.is_whole for got in answers)
    assert WORKERS == len({got.worker for got in answers})
    assert 12 == figure(shown, "ezat_running_requests")


# Reloads


async def test_sighup_reloads_every_worker(pair: Workers, upstream: ScriptedUpstream, shared_store: str) -> None:
    """After all workers have said that they reloaded no new connection meets the old configuration, and no request
    that comes meanwhile fails."""
    meanwhile: list[Got] = []

    async def go_on() -> None:
        async with clients() as session:
            while True:
                meanwhile.append(await ask(session, pair))

    going_on = asyncio.create_task(go_on())
    pair.rewrite(config_for(upstream, shared_store, edition="2"))

    await reloaded(pair)
    after = await ask_many(pair)
    going_on.cancel()

    assert {"2"} == {got.edition for got in after}
    assert WORKERS == len({got.worker for got in after})
    assert {200} == {got.status for got in meanwhile}
    assert pair.pids == {got.worker for got in after}, "no worker was started anew"


BROKEN = {
    "no YAML": "server: [",
    "an unknown setting": "server: {prot: 1}",
    "nothing": "",
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
async def test_a_broken_file_changes_nothing(pair: Workers, upstream: ScriptedUpstream, broken: str) -> None:
    """A file that can't be used is told once, counted, and otherwise as if it weren't there."""
    admin = admin_of(pair)
    await reloaded(pair)
    before = figure(await admin.figures(), "ezat_reloads_total", result="refused")
    known = len(pair.logged(NOT_RELOADED))
    pair.rewrite(broken)

    pair.terminate(signal.SIGHUP)
    await eventually(lambda: len(pair.logged(NOT_RELOADED)) > known)
    after = await ask_many(pair)
    await admin.once(lambda figures: figure(figures, "ezat_reloads_total", result="refused") > before)
    told = pair.logged(NOT_RELOADED)[known:]

    assert {("1", 200)} == {(got.edition, got.status) for got in after}
    assert ["error"] == [line["level"] for line in told]
    assert "gateway.yaml" in told[0]["reason"]


async def test_a_reload_that_needs_a_restart_is_refused(
    pair: Workers, upstream: ScriptedUpstream, shared_store: str
) -> None:
    """What only a start can change is named, and nothing of the file is taken over."""
    await reloaded(pair)
    known = len(pair.logged(NOT_RELOADED))
    pair.rewrite(config_for(upstream, shared_store, server={"workers": 3}, edition="2"))

    pair.terminate(signal.SIGHUP)
    [line] = await eventually(lambda: pair.logged(NOT_RELOADED)[known:])

    assert "server.workers: 2 → 3 (needs a restart)" == line["reason"]
    assert {"1"} == {got.edition for got in await ask_many(pair)}
    assert WORKERS == len(pair.pids)


# A worker that dies


async def test_a_killed_worker_is_replaced(pair: Workers, upstream: ScriptedUpstream) -> None:
    """A worker that dies costs no request but those on its own connections; it is replaced, buried and told of, and
    what it had counted stays counted, whichever it was."""
    admin = admin_of(pair)
    await reloaded(pair)
    before, old = await admin.present(), set(pair.pids)
    async with clients() as session:
        for victim in sorted(old):  # the one with the admin listener is among them
            os.kill(victim, signal.SIGKILL)
            answers = [await ask_until_answered(session, pair) for _ in range(MANY)]
            assert {200} == {got.status for got in answers}
        await eventually(lambda: len(pair.pids) == WORKERS and not pair.pids & old, PATIENCE)
        new = set(pair.pids)

    async def all_answer() -> bool:
        return await workers_of(pair) == new

    while not await all_answer():
        assert not pair.pids & old
    after = await admin_of(pair, admin.token).figures()

    assert [1, 2] == sorted(line["worker"] for line in pair.logged(REPLACED))
    assert [-signal.SIGKILL] * 2 == [line["code"] for line in pair.logged(REPLACED)]
    counters = [(name, labels) for name, labels in before if name.endswith(("_total", "_count", "_bucket"))]
    lost = {each: (before[each], after.get(each, 0)) for each in counters if after.get(each, 0) < before[each]}
    assert {} == lost
    assert 1 == figure(after, "ezat_store_ready")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def slow_starters(
    shared_upstream: ScriptedUpstream, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[Workers, str]]:
    """Two workers that watch their file and whose start takes a while, and their store."""
    url = servers.postgres().database()
    config = config_for(shared_upstream, url, server={"watch": True}, start_seconds=START)
    with started(config, tmp_path_factory.mktemp("slow")) as gateway:
        await eventually(lambda: len(gateway.pids) == WORKERS)
        yield gateway, url


async def told_edition(gateway: Workers, edition: str, seconds: float = PATIENCE) -> None:
    """Wait until both workers answer, and by this edition only."""
    deadline = time.monotonic() + seconds
    while True:
        async with clients() as session:
            answers = await asyncio.gather(*(ask_until_answered(session, gateway) for _ in range(MANY)))
        if {edition} == {got.edition for got in answers} and WORKERS == len({got.worker for got in answers}):
            return
        assert time.monotonic() < deadline, [(got.worker, got.edition) for got in answers]


async def test_a_changed_file_reloads_every_worker(
    slow_starters: tuple[Workers, str], upstream: ScriptedUpstream
) -> None:
    """Nobody needs to send a signal: the file is watched for all workers, models in a file of their own too."""
    gateway, url = slow_starters
    config = config_for(upstream, url, server={"watch": True}, start_seconds=START)
    await told_edition(gateway, "1")
    models = gateway._path.with_name("models.yaml")
    price = config["models"][0]["price"]
    rewrite(models, json.dumps(config["models"]))

    gateway.rewrite({**config, "models": models.name, "plugins": edition_of(config, "2")})
    await told_edition(gateway, "2")
    known = len(gateway.logged(*RELOADED))
    rewrite(models, json.dumps([{**config["models"][0], "price": {**price, "input": 2}}]))
    lines = await eventually(lambda: gateway.logged(*RELOADED)[known:], PATIENCE)

    assert [["models.test/model.price.input: 1 → 2"]] == [line["changes"] for line in lines[:1]]


async def test_a_broken_file_is_watched_until_it_is_mended(
    slow_starters: tuple[Workers, str], upstream: ScriptedUpstream
) -> None:
    """A file that only the broken configuration names is watched, too, and read as soon as it is right."""
    gateway, url = slow_starters
    config = config_for(upstream, url, server={"watch": True}, start_seconds=START)
    models = gateway._path.with_name("further-models.yaml")
    rewrite(models, "[broken")
    refused = len(gateway.logged(NOT_RELOADED)) + 1
    gateway.rewrite({**config, "models": models.name, "plugins": edition_of(config, "mended")})
    await logged_so_often(gateway, NOT_RELOADED, refused)

    rewrite(models, json.dumps(config["models"]))

    await told_edition(gateway, "mended")


def edition_of(config: Mapping[str, Any], edition: str, **settings: Any) -> list[Any]:
    """The plugins of a configuration, with another edition and settings of the one that tells it."""
    return [
        {WHO: {**each[WHO], "edition": edition, **settings}} if isinstance(each, dict) and WHO in each else each
        for each in config["plugins"]
    ]


async def test_a_reload_reaches_a_worker_that_just_begins(
    slow_starters: tuple[Workers, str], upstream: ScriptedUpstream
) -> None:
    """A worker that begins while the others reload serves by the new configuration, too."""
    gateway, url = slow_starters
    config = config_for(upstream, url, server={"watch": False}, start_seconds=START)
    gateway.rewrite({**config, "plugins": edition_of(config, "3")})
    await told_edition(gateway, "3")
    old = set(gateway.pids)
    os.kill(max(old), signal.SIGKILL)
    await eventually(lambda: len(gateway.pids - old) == 1, PATIENCE)

    gateway.rewrite({**config, "plugins": edition_of(config, "4")})
    gateway.terminate(signal.SIGHUP)

    await told_edition(gateway, "4")


async def test_a_worker_is_replaced_by_the_configuration_in_force(
    slow_starters: tuple[Workers, str], upstream: ScriptedUpstream
) -> None:
    """Whatever stands in the file, a dead worker is replaced by one with what the others serve by: where the file is
    broken, and where it could be read but no worker could start with it."""
    gateway, url = slow_starters
    config = config_for(upstream, url, server={"watch": False}, start_seconds=START)
    gateway.rewrite({**config, "plugins": edition_of(config, "5")})
    gateway.terminate(signal.SIGHUP)
    await told_edition(gateway, "5")
    for unusable in ({**config, "plugins": edition_of(config, "6", fails=True)}, "server: ["):
        refused = len(gateway.logged(NOT_RELOADED)) + (1 if isinstance(unusable, str) else WORKERS)
        gateway.rewrite(unusable)
        gateway.terminate(signal.SIGHUP)
        await logged_so_often(gateway, NOT_RELOADED, refused)

        await killed(gateway, min(gateway.pids))

        await told_edition(gateway, "5")


async def logged_so_often(gateway: Workers, event: str, times: int) -> None:
    await eventually(lambda: len(gateway.logged(event)) >= times, PATIENCE)


async def killed(gateway: Workers, pid: int) -> None:
    """Kill a worker, and wait until another one has its place."""
    os.kill(pid, signal.SIGKILL)
    await eventually(lambda: pid not in gateway.pids and len(gateway.pids) == WORKERS, PATIENCE)


async def test_a_worker_that_dies_again_and_again_is_started_with_growing_pauses(
    slow_starters: tuple[Workers, str], upstream: ScriptedUpstream
) -> None:
    """Each death of a worker that has not worked for a minute doubles the pause; the others go on."""
    gateway, _ = slow_starters
    steady, victim = sorted(gateway.pids)
    known = len(gateway.logged(REPLACED))
    measured = []
    for _ in range(2):
        began = time.monotonic()
        await killed(gateway, victim)
        measured.append(time.monotonic() - began)
        [victim] = gateway.pids - {steady}
    async with clients() as session:
        answers = [await ask_until_answered(session, gateway) for _ in range(MANY)]

    first, second = [line["seconds"] for line in gateway.logged(REPLACED)[known:]]
    assert second == 2 * first
    assert [True, True] == [measured[0] >= first, measured[1] >= second]
    assert {200} == {got.status for got in answers}
    assert steady in gateway.pids


# The end


async def stopped(gateway: Workers, number: signal.Signals = signal.SIGTERM) -> int:
    gateway.terminate(number)
    return await ended(gateway)


def everyone(gateway: Workers) -> None:
    """As `pkill` does: supervisor and workers alike."""
    for pid in gateway.survivors:
        os.kill(pid, signal.SIGTERM)


ENDS: Mapping[str, Callable[[Workers], None]] = {
    "Ctrl-C": lambda gateway: gateway.tell_group(signal.SIGINT),
    "SIGTERM to every process": everyone,
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
async def test_running_streams_end_whole(
    end: Callable[[Workers], None], upstream: ScriptedUpstream, store: str, tmp_path: Path
) -> None:
    """A stop takes no new connections, lets the streams of all workers end, and leaves nothing behind."""
    gate = asyncio.Event()
    upstream.replies.extend(gated_stream(gate) for _ in range(12))
    with started(config_for(upstream, store), tmp_path / "gateway") as gateway:
        asking = asyncio.create_task(ask_many(gateway, 12, stream=True))
        await eventually(lambda: upstream.open == 12, PATIENCE)

        end(gateway)
        await eventually(lambda: not takes_connections(gateway))
        running = gateway.exit_code is None and len(gateway.pids) == WORKERS
        gate.set()
        answers = await asking
        code = await ended(gateway)

    assert running
    assert WORKERS == len({got.worker for got in answers})
    assert [True] * 12 == [got.is_whole for got in answers]
    assert 0 == code


def takes_connections(gateway: Workers) -> bool:
    try:
        socket.create_connection((gateway.host, gateway.port), 1).close()
    except OSError:
        return False
    return True


async def test_sigterm_waits_for_streams_and_a_second_one_does_not(
    upstream: ScriptedUpstream, store: str, tmp_path: Path
) -> None:
    """After SIGTERM streams end whole, whichever worker they are with; after a second one those that are left end in
    an error that says so, at once."""
    gates = [asyncio.Event() for _ in range(2)]
    upstream.replies.extend(gated_stream(gate) for gate in gates for _ in range(12))
    with started(config_for(upstream, store, server={"shutdown_timeout": 600}), tmp_path / "gateway") as gateway:
        first = asyncio.create_task(ask_many(gateway, 12, stream=True))
        await eventually(lambda: upstream.open == 12, PATIENCE)
        others = asyncio.create_task(ask_many(gateway, 12, stream=True))
        await eventually(lambda: upstream.open == 24, PATIENCE)

        gateway.terminate()
        await eventually(lambda: not takes_connections(gateway))
        gates[0].set()
        whole = await first
        assert gateway.exit_code is None
        gateway.terminate()
        cut = await asyncio.wait_for(others, AT_ONCE)
        code = await ended(gateway, AT_ONCE)

    assert [True] * 12 == [got.is_whole for got in whole]
    assert [True] * 12 == ["the gateway is stopping; try again" in got.text for got in cut]
    assert [WORKERS] * 2 == [len({got.worker for got in each}) for each in (whole, cut)]
    assert 0 == code


@pytest.mark.parametrize("delay", [0.0, 0.25])
async def test_a_stop_during_the_start_is_obeyed(
    upstream: ScriptedUpstream, store: str, tmp_path: Path, delay: float
) -> None:
    """Whenever the stop is asked for after the first worker was begun, it ends all, and that is no failure."""
    gateway = begun(config_for(upstream, store, start_seconds=0.2), tmp_path / "gateway")
    try:
        await eventually(lambda: gateway.pids, PATIENCE)
        await asyncio.sleep(delay)  # what is tested is the moment

        assert 0 == await stopped(gateway), gateway.written
        assert "can't start" not in gateway.written
    finally:
        gateway.stop()


async def test_workers_end_by_themselves_when_their_supervisor_is_killed(
    upstream: ScriptedUpstream, store: str, tmp_path: Path
) -> None:
    """Workers that nobody looks after any more stop as if they were told to: running streams end whole."""
    gate = asyncio.Event()
    upstream.replies.extend(gated_stream(gate) for _ in range(6))
    with started(config_for(upstream, store), tmp_path / "gateway") as gateway:
        asking = asyncio.create_task(ask_many(gateway, 6, stream=True))
        await eventually(lambda: upstream.open == 6, PATIENCE)

        gateway.kill()
        await eventually(lambda: not takes_connections(gateway))
        gate.set()
        answers = await asking
        await eventually(lambda: not gateway.survivors, PATIENCE)

    assert [True] * 6 == [got.is_whole for got in answers]


# A start that can't work


@contextmanager
def somebody_else(**options: int) -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.socket() as listener:
        for option in options.values():
            listener.setsockopt(socket.SOL_SOCKET, option, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


async def test_what_can_not_work_is_refused_with_its_sentence(
    upstream: ScriptedUpstream, store: str, tmp_path: Path
) -> None:
    """A start that fails ends everything, with exit code 1 and one sentence, however many workers there are."""
    with (
        somebody_else() as taken,
        somebody_else(shared=socket.SO_REUSEPORT) as shared,
        somebody_else() as admin,
    ):
        listening = "can't listen on 127.0.0.1:{}, server.{}:"
        nowhere = f"postgresql://ezat@127.0.0.1:{closed_port()}/ezat"
        cases: Mapping[str, tuple[dict[str, Any], str]] = {
            "the port is taken": (
                config_for(upstream, store, server={"port": taken}),
                listening.format(taken, "port"),
            ),
            "the port is taken by somebody who would share it": (
                config_for(upstream, store, server={"port": shared}),
                listening.format(shared, "port"),
            ),
            "the admin port is taken": (
                config_for(upstream, store, server={"admin": {"port": admin}}),
                listening.format(admin, "admin.port"),
            ),
            "the store is down": (config_for(upstream, nowhere), "the store can't be opened: OperationalError"),
            "a plugin's start fails": (
                config_for(upstream, store, fails=True),
                f"{tmp_path}/a-plugins-start-fails/gateway.yaml:1: plugins[4].",
            ),
        }
        begun_at_once = {
            name: begun(config, tmp_path / name.replace(" ", "-").replace("'", ""))
            for name, (config, _) in cases.items()
        }
        found = {}
        for name, gateway in begun_at_once.items():
            code = await ended(gateway, PATIENCE)
            sentences = [line for line in gateway._log().splitlines() if line.startswith("the gateway can't start")]
            found[name] = (code, sentences)

    assert dict.fromkeys(cases, (1, 1)) == {name: (code, len(told)) for name, (code, told) in found.items()}
    for name, (_, [told]) in found.items():
        assert told.startswith(f"the gateway can't start: {cases[name][1]}"), name
    assert ["address already in use" in told.lower() for _, [told] in found.values()] == [
        True,
        True,
        True,
        False,
        False,
    ]


def closed_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


UNSHARED = """\
server:
  port: 0
  open: true
  admin: {port: 0}
  workers: 2
store: sqlite:///ezat.db
limiter: memory
upstreams:
  up: {base_url: "http://127.0.0.1:9"}
models:
  - id: test/model
    max_output_tokens: 100
    price: free
    deployments: [{upstream: up, model: m}]
plugins: [chat_completions]
"""


async def test_check_refuses_workers_without_something_to_share(tmp_path: Path) -> None:
    """Several workers on a store or a limiter of one process are refused before the start, with file and line."""
    path = tmp_path / "gateway.yaml"
    path.write_text(UNSHARED)

    checked = await run("check", "--config", str(path))

    complaints = [line for line in checked.errors.splitlines() if "server.workers" in line]
    assert 1 == checked.code
    assert 2 == len(complaints)
    assert all(f"{path}:5" in line for line in complaints), complaints
    assert ["limiter: redis://" in checked.errors, "store: postgresql://" in checked.errors] == [True, True]


async def test_the_admin_token_is_shown_once(pair: Workers) -> None:
    """Of all workers one makes the token and prints it, once."""
    assert 1 == len(tokens_in(pair.written))
