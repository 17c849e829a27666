"""The process and its storage under faults (group P), as far as test_process, test_config, test_workers, the tests of
reloads and those of the store don't have them: stopping, kills, one file for two, background tasks, clocks, starts.

Each gateway is a process that ``run.py`` starts; faults that nobody can cause from outside are made by plugins of
``fault_points``, which stand in its configuration.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import socket
import sqlite3
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import pytest_asyncio

from proxy.store.administration import create_key
from tests.attacks.conftest import unharmed
from tests.attacks.fault_points import BROKEN_TASK, CONSTANTS, KILLED, SLOW_COMMITS
from tests.attacks.raw_client import (
    CHAT,
    CLIENT_KEY,
    GET_HEALTH,
    MESSAGES,
    PATIENCE,
    Answer,
    Cut,
    RawClient,
    ask,
    asked,
    connected,
    head,
    post,
)
from tests.attacks.raw_upstream import (
    BEGUN,
    CHUNKED,
    ENDING,
    LAST_CHUNK,
    MESSAGE,
    PLAIN,
    RawUpstream,
    Step,
    chunk,
    frame,
    http,
)
from tests.attacks.starting import begun, gate, prepaid_config, run_each, started
from tests.process import REPOSITORY, Ended, GatewayProcess, eventually
from tests.store.gateways import in_store, ledger, reserved_units, spent_units
from tests.store.processes import KillableGateway

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

GET_READY = b"GET /readyz HTTP/1.1\r\nhost: gateway\r\n\r\n"


async def is_ready(gateway: GatewayProcess) -> bool:
    async with connected(gateway) as client:
        client.send(GET_READY)
        return (await client.answer()).status == 200


def is_whole(answer: Answer) -> bool:
    return answer.status == 200 and b'"error"' not in answer.body


def store_of(folder: Path) -> str:
    return f"sqlite:///{folder}/ezat.db"


# P1: stopping

LARGE = 20 * 2**20
LARGE_EVENT = (
    b"event: content_block_delta\ndata: "
    + json.dumps(
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Z" * (LARGE // 20)}}
    ).encode()
)
LARGE_STREAM = [CHUNKED, chunk(BEGUN), *[chunk(LARGE_EVENT + b"\n\n")] * 20, chunk(ENDING), LAST_CHUNK]
LARGE_PLAIN = http(json.dumps({**MESSAGE, "content": [{"type": "text", "text": "Z" * LARGE}]}).encode())


class Stop(NamedTuple):
    """What clients saw of a stop, each on a connection that it had before."""

    ready: Answer | None
    """Of a probe while a stream went on; None where its connection was closed at once, which says the same."""
    refused: Answer | None
    """Of a request that came meanwhile."""
    stream: bytes
    slow_stream: bytes
    """Of a client that reads slowly, as is the next."""
    slow_plain: bytes
    code: int | None


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stop(shared_upstream: RawUpstream, tmp_path_factory: pytest.TempPathFactory) -> Stop:
    """A stop with time enough for all that runs, but for connections that nobody takes for running."""
    folder = tmp_path_factory.mktemp("stop")
    config = prepaid_config(
        shared_upstream, folder, {CONSTANTS: {"values": {"proxy.server:LINGER": 0.2}}}, shutdown_timeout=20
    )
    shared_upstream.forget()
    with started(config, folder) as gateway, gate() as goes_on:
        async with AsyncExitStack() as stack:

            async def client_that_asks(*steps: Step, stream: bool, receive_buffer: int | None = None) -> RawClient:
                client = await stack.enter_async_context(connected(gateway, receive_buffer=receive_buffer))
                known = len(shared_upstream.asked)
                shared_upstream.play(*steps)
                client.send(post(MESSAGES, asked(stream=stream)))
                await eventually(lambda: len(shared_upstream.asked) > known)
                return client

            slow_plain = await client_that_asks(LARGE_PLAIN, stream=False, receive_buffer=2**16)
            await slow_plain.until(b"\r\n\r\n")
            slow_plain.stop_reading()
            slow_stream = await client_that_asks(*LARGE_STREAM, stream=True, receive_buffer=2**16)
            slow_stream.stop_reading()
            stream = await client_that_asks(CHUNKED, chunk(BEGUN), goes_on, chunk(ENDING), LAST_CHUNK, stream=True)
            await stream.until(b"Hel")
            probe, asks = [await stack.enter_async_context(connected(gateway)) for _ in range(2)]
            for client in (probe, asks):
                client.send(GET_READY)
                assert 200 == (await client.answer()).status

            gateway.terminate()
            await eventually(lambda: not takes_connections(gateway))
            ready = await last_answer(probe, GET_READY)
            refused = await last_answer(asks, post(MESSAGES, asked()))
            goes_on.set()
            streamed = await read_to(stream, LAST_CHUNK)
            slow = []
            for client, end in ((slow_stream, LAST_CHUNK), (slow_plain, LARGE_PLAIN[-30:])):
                await asyncio.sleep(0.8)  # several times what a connection has that nobody waits for
                client._writer.transport.resume_reading()  # type: ignore[attr-defined]
                slow.append(await read_to(client, end))
            code = await ended(gateway)
    shared_upstream.forget()
    return Stop(ready, refused, streamed, slow[0], slow[1], code)


async def read_to(client: RawClient, end: bytes) -> bytes:
    """What comes up to these bytes, or to the end of the connection."""
    read = bytearray()
    with suppress(ConnectionError):
        async with asyncio.timeout(PATIENCE):
            while not read.endswith(end) and (piece := await client._reader.read(2**18)):
                read += piece
    return bytes(read)


def takes_connections(gateway: GatewayProcess) -> bool:
    with socket.socket() as client:
        client.settimeout(1)
        return client.connect_ex((gateway.host, gateway.port)) == 0


async def ended(gateway: GatewayProcess) -> int | None:
    await eventually(lambda: gateway.exit_code is not None, PATIENCE)
    return gateway.exit_code


async def last_answer(client: RawClient, request: bytes) -> Answer | None:
    with suppress(Cut, ConnectionError):
        client.send(request)
        return await client.answer()
    return None


async def test_p1_readiness_is_red_at_once_on_a_kept_connection(stop: Stop) -> None:
    """After SIGTERM nobody who has a connection already is told that the gateway is ready."""
    assert stop.ready is None or 503 == stop.ready.status


async def test_p1_a_request_on_a_kept_connection_is_told_to_come_again(stop: Stop) -> None:
    """It is refused with a time, and not begun."""
    if stop.refused is not None:
        assert (503, "overloaded_error") == (stop.refused.status, stop.refused.data["error"]["type"])
        assert 1 <= int(stop.refused.headers["retry-after"]) <= 60


async def test_p1_kept_connections_are_not_kept_any_longer(stop: Stop) -> None:
    """Each answer after SIGTERM says that its connection is closed: else who comes again comes to the same place."""
    for answer in (stop.ready, stop.refused):
        assert answer is None or "close" == answer.headers.get("connection", "").lower()


async def test_p1_a_stream_ends_as_ever(stop: Stop) -> None:
    """What runs when SIGTERM comes is whole, and the exit code is 0."""
    assert (True, True, 0) == (b"message_stop" in stop.stream, stop.stream.endswith(LAST_CHUNK), stop.code)


async def test_p1_a_slow_client_gets_its_stream_whole(stop: Stop) -> None:
    """Who reads slowly has the time for it that running requests have."""
    assert (LARGE, True) == (stop.slow_stream.count(b"Z"), stop.slow_stream.endswith(LAST_CHUNK))


async def test_p1_a_slow_client_gets_its_plain_answer_whole(stop: Stop) -> None:
    """So has who asked for no stream, and has paid for the answer."""
    assert (LARGE, True) == (stop.slow_plain.count(b"Z"), stop.slow_plain.endswith(LARGE_PLAIN[-30:]))


SMALL_EVENT = frame({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Z" * 8000}})
FINEST = 2
"""Events that are less than what the gateway may hold back when a stream is over."""


async def test_p1_the_last_bytes_of_a_stream_are_sent(upstream: RawUpstream, tmp_path: Path) -> None:
    """Of a stream that is over, but whose client has not taken all of it when SIGTERM comes, nothing is lost."""
    with slow_to_stop(upstream, tmp_path) as gateway:
        async with AsyncExitStack() as stack:

            async def stalled(events: int) -> tuple[RawClient, bool]:
                """A client that takes nothing of a stream, and whether the stream is over all the same."""
                own_id = f"events-{events}"
                upstream.play(CHUNKED, chunk(BEGUN), *[chunk(SMALL_EVENT)] * events, chunk(ENDING), LAST_CHUNK)
                client = await stack.enter_async_context(connected(gateway, receive_buffer=4096))
                client.stop_reading()
                client.send(post(MESSAGES, asked(stream=True), f"x-request-id: {own_id}"))
                over = await becomes(lambda: bool(gateway.requests(client_request_id=own_id)), 0.4)
                return client, over

            fewest, most = 0, 1024  # of events: that a stream is over with, that it isn't
            last: list[RawClient] = []
            while most - fewest > FINEST:
                client, over = await stalled((fewest + most) // 2)
                fewest, most = ((fewest + most) // 2, most) if over else (fewest, (fewest + most) // 2)
                if over:
                    last.append(client)
                else:
                    client.reset()
            gateway.terminate()
            await eventually(lambda: not takes_connections(gateway))
            await becomes(lambda: gateway.exit_code is not None, 1)
            for client in last:
                client._writer.transport.resume_reading()  # type: ignore[attr-defined]
            streams = [await read_to(client, LAST_CHUNK) for client in last]
        code = await ended(gateway)

    assert streams
    assert [True] * len(streams) == [stream.endswith(LAST_CHUNK) for stream in streams]
    assert 0 == code


@contextmanager
def slow_to_stop(upstream: RawUpstream, folder: Path) -> Iterator[KillableGateway]:
    """A gateway with time enough for what runs."""
    with started(prepaid_config(upstream, folder, shutdown_timeout=20), folder) as running:
        yield running


async def becomes(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether it becomes so in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.01)
    return True


# P6: killed between the upstream's end and the client's

KILLED_AT = {"before it is recorded": (0, 0), "before the commit": (0, 0), "behind the commit": (1, 4)}
"""How many rows there are of four answers that end together, at least and at most."""
ENDINGS = re.compile(rb'\[DONE\]|message_stop|"(stop|finish)_reason": ?"')


async def test_p6_an_answer_that_was_not_recorded_has_no_ending(upstream: RawUpstream, tmp_path: Path) -> None:
    """Killed wherever it records, the gateway has told no client the end of an answer; each start after it finds the
    ledger as it was left, nothing billed that isn't in it, and nothing reserved."""
    url = store_of(tmp_path)
    counts: list[int] = []
    told: list[bytes] = []
    reserved: list[tuple[int, int]] = []
    for at in KILLED_AT:
        before = ledger(url) if counts else []
        gateway = begun(prepaid_config(upstream, tmp_path, {KILLED: {"at": at}}), tmp_path)
        gateway.wait_until_ready()
        reserved.append(reserved_units(url))
        assert before == ledger(url)
        told += await seen_of_four(gateway, upstream)
        assert -signal.SIGKILL == await ended(gateway)
        counts.append(len(ledger(url)) - len(before))
    with started(prepaid_config(upstream, tmp_path), tmp_path):
        reserved.append(reserved_units(url))
    rows = ledger(url)

    assert [] == [each for each in told if ENDINGS.search(each)]
    assert all(least <= count <= most for count, (least, most) in zip(counts, KILLED_AT.values(), strict=True)), counts
    assert [(0, 0)] * 4 == reserved
    assert len(rows) == len({row["request_id"] for row in rows})
    assert sum(row["cost"] for row in rows) == spent_units(url, "acme") > 0


async def seen_of_four(gateway: GatewayProcess, upstream: RawUpstream) -> list[bytes]:
    """What four clients see, of both formats, plain and streamed, whose answers end together."""

    async def ask_and_see(path: str, stream: bool) -> bytes:
        async with connected(gateway) as client:
            client.send(post(path, asked(stream=stream)))
            return await client.rest()

    asking: list[asyncio.Task[bytes]] = []
    with gate() as end:
        for path in (CHAT, MESSAGES):
            for stream in (False, True):
                known = len(upstream.asked)
                streamed: list[Step] = [CHUNKED, chunk(BEGUN), end, chunk(ENDING), LAST_CHUNK]
                upstream.play(*(streamed if stream else [end, PLAIN]))
                asking.append(asyncio.create_task(ask_and_see(path, stream)))
                await eventually(lambda known=known: len(upstream.asked) > known)  # type: ignore[misc]
    return list(await asyncio.gather(*asking))


# P7: a store that fails


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    with closing(sqlite3.connect(folder / "ezat.db", isolation_level=None)) as holder:
        holder.execute("BEGIN IMMEDIATE")
        yield


@contextmanager
def taken_away(folder: Path) -> Iterator[None]:
    names = [*folder.glob("ezat.db*")]
    for name in names:
        name.rename(folder / f"away-{name.name}")
    yield
    for name in names:
        (folder / f"away-{name.name}").rename(name)


STORE_FAULTS = {"locked for good": locked, "taken away": taken_away}
IMPATIENT = {"proxy.store.writer:PATIENCE": 1.0, "proxy.store.database:LOCK_TIMEOUT": 0.3}


async def test_p7_a_store_that_fails_and_comes_back(upstream: RawUpstream, tmp_path: Path) -> None:
    """While the store can't be written, running answers end in an error before their ending and new requests are 503s
    that reach no upstream; then the gateway serves again by itself, and what was whole is in the ledger."""
    whole, seen = [], []
    with started(prepaid_config(upstream, tmp_path, {CONSTANTS: {"values": IMPATIENT}}), tmp_path) as gateway:
        for fault in STORE_FAULTS.values():
            async with connected(gateway) as stream:
                with gate() as end:
                    upstream.play(CHUNKED, chunk(BEGUN), end, chunk(ENDING), LAST_CHUNK)
                    stream.send(post(CHAT, asked(stream=True, stream_options={"include_usage": True})))
                    await eventually(lambda: upstream.playing == 1)
                    with fault(tmp_path):
                        end.set()
                        broken = await stream.answer()
                        await eventually_async(lambda: is_red(gateway))
                        known = len(upstream.asked)
                        refused = [await ask(gateway, path, asked()) for path in (CHAT, MESSAGES)]
                seen.append((broken, refused, len(upstream.asked) - known))
            await eventually_async(lambda: is_ready(gateway))
            whole.append(await ask(gateway, MESSAGES, asked()))

    for broken, (chat, messages), reached in seen:
        assert broken.body.endswith(b"data: [DONE]\n\n")
        assert (b'{"error":' in broken.body, b'"finish_reason":"' in broken.body) == (True, False)
        assert [(503, "server_error"), (503, "overloaded_error")] == [
            (each.status, each.data["error"]["type"]) for each in (chat, messages)
        ]
        assert ["5", "5"] == [each.headers["retry-after"] for each in (chat, messages)]
        assert 0 == reached
    assert [True] * len(STORE_FAULTS) == [is_whole(answer) for answer in whole]
    rows = ledger(store_of(tmp_path))
    assert [answer.headers["request-id"] for answer in whole] == [row["request_id"] for row in rows]


async def is_red(gateway: GatewayProcess) -> bool:
    return not await is_ready(gateway)


async def eventually_async(condition: Callable[[], Awaitable[bool]], seconds: float = PATIENCE) -> None:
    """Return as soon as it is so. Raises AssertionError where it isn't in time."""
    deadline = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        await asyncio.sleep(0.02)


# P9: clients that leave within a call of the database

LEAVERS = 1000
TOGETHER = 50
SEED = 20260712


async def test_p9_clients_that_leave_within_a_call_of_the_database_leave_it_as_it_was(
    upstream: RawUpstream, tmp_path: Path
) -> None:
    """A thousand clients that leave while their requests are judged, reserved, recorded and given back leave no
    connection, no lock, no reservation and no thread, and the money is right."""
    chance = random.Random(SEED)
    url = store_of(tmp_path)
    slow = {SLOW_COMMITS: {"seconds": 0.004}}
    with started(prepaid_config(upstream, tmp_path, slow), tmp_path) as gateway:
        async with unharmed(gateway):
            await asyncio.gather(*(ask(gateway, CHAT, asked()) for _ in range(TOGETHER)))
            before = files_and_threads(gateway)

            async def come_and_leave() -> bool:
                path, stream = chance.choice([CHAT, MESSAGES]), chance.random() < 0.5
                async with connected(gateway) as client:
                    client.send(post(path, asked(stream=stream)))
                    try:
                        return is_whole(
                            await client.answer(PATIENCE if chance.random() < 0.1 else chance.random() * 0.15)
                        )
                    except (TimeoutError, Cut):
                        return False

            whole = 0
            for _ in range(LEAVERS // TOGETHER):
                whole += sum(await asyncio.gather(*(come_and_leave() for _ in range(TOGETHER))))
            await eventually(lambda: reserved_units(url) == (0, 0), PATIENCE)
            at_once = time.monotonic()
            with closing(sqlite3.connect(tmp_path / "ezat.db", timeout=0.5, isolation_level=None)) as other:
                other.execute("BEGIN IMMEDIATE")  # raises where a lock was left
                other.execute("ROLLBACK")
            waited = time.monotonic() - at_once
            after = files_and_threads(gateway)

    rows = ledger(url)
    assert before == after
    assert waited < 0.4
    assert len(rows) == len({row["request_id"] for row in rows})
    assert 0 < whole < LEAVERS
    assert TOGETHER + whole <= len(rows)
    assert sum(row["cost"] for row in rows) == spent_units(url, "acme") == spent_units(url, "yaml:attacker")


def files_and_threads(gateway: KillableGateway) -> tuple[list[str], int]:
    """What a gateway has open of its store, and how many threads it has."""
    opened = [os.readlink(each) for each in Path("/proc", str(gateway.pid), "fd").iterdir() if each.is_symlink()]
    threads = len(list(Path("/proc", str(gateway.pid), "task").iterdir()))
    return sorted(name for name in opened if "ezat.db" in name), threads


# Starts that must fail


class Refused(NamedTuple):
    """A start that must fail: its file, and what is to be said of it, as a pattern for its one line."""

    content: str | bytes
    words: str


@pytest.fixture(scope="module")
def refusals(usual_gateway: GatewayProcess, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Ended]:
    """How each of the starts ended, and what it said."""
    cases = {**REFUSED_FILES, **second_gateways(usual_gateway._folder), **NO_PLACES}
    folders = [tmp_path_factory.mktemp(f"refused-{number}") for number in range(len(cases))]
    for folder, case in zip(folders, cases.values(), strict=True):
        content = case.content if isinstance(case.content, bytes) else case.content.encode()
        (folder / "gateway.yaml").write_bytes(content.replace(b"FOLDER", str(folder).encode()))
    return dict(zip(cases, run_each(folders), strict=True))


def said(refused: Ended) -> list[str]:
    """The lines of a refusal, without the first one of those for a file; fails where it isn't one in words."""
    assert (1, "") == (refused.code, refused.output)
    assert "Traceback" not in refused.errors
    lines = refused.errors.splitlines()
    return lines[1:] if lines[0] == "Error: the configuration can't be used:" else lines


# P10: one file for two

OTHER_NAMES: Mapping[str, Callable[[Path], str]] = {
    "a store in use": lambda folder: f"{folder}/ezat.db",
    "a store in use, by a path with dots": lambda folder: f"{folder}/../{folder.name}/./ezat.db",
    "a store in use, by a relative path": lambda folder: os.path.relpath(folder / "ezat.db", REPOSITORY),
    "a store in use, by a link to the file": lambda folder: linked(folder / "link.db", folder / "ezat.db"),
    "a store in use, by a link to the folder": lambda folder: f"{linked(folder / 'link', folder)}/ezat.db",
}
IN_USE = r"the gateway can't start: another gateway serves from \S+ezat\.db; .*"
SMALL = {
    "upstreams": {"a": {"base_url": "http://127.0.0.1:9"}},
    "models": [{"id": "a", "max_output_tokens": 1, "price": "free", "deployments": [{"upstream": "a", "model": "a"}]}],
}


def linked(link: Path, to: Path) -> str:
    link.symlink_to(to)
    return str(link)


def small_config(store: str = "sqlite:///FOLDER/ezat.db", **server: Any) -> str:
    listening: dict[str, Any] = {"port": 0, "admin": {"port": 0}, "open": True}
    return json.dumps({**SMALL, "store": store, "server": {**listening, **server}})


def second_gateways(folder: Path) -> dict[str, Refused]:
    return {name: Refused(small_config(f"sqlite:///{call(folder)}"), IN_USE) for name, call in OTHER_NAMES.items()}


@pytest.mark.parametrize("name", OTHER_NAMES)
async def test_p10_a_second_gateway_on_one_file_does_not_start(
    refusals: Mapping[str, Ended], gateway: GatewayProcess, upstream: RawUpstream, name: str
) -> None:
    """By whatever name the file goes, the second gateway says that it is in use and exits; the first serves on."""
    [line] = said(refusals[name])

    assert re.fullmatch(IN_USE, line)
    assert 200 == (await ask(gateway, MESSAGES, asked())).status


# P12: configurations

SECRET = "canary-of-a-slip/4716"
BOMB = "a: &a [x]\n" + "".join(f"{name}: &{name} [*{before}, *{before}]\n" for before, name in ("ab", "bc", "cd"))
REFUSED_FILES = {
    "comments alone": Refused("# nothing\n", "1: the file is empty"),
    "a list": Refused("- a\n", "1: must be a mapping of settings"),
    "a tab": Refused(f"store: memory\nserver:\n\tport: {SECRET}\n", "3: .*tab.*"),
    "a setting twice": Refused(f"limiter: memory\nlimiter: '{SECRET}'\n", "2: .*limiter.* is set twice.*"),
    "an unknown setting": Refused(f"server:\n  prot: {SECRET}\n", "2: server.prot: unknown setting.*"),
    "a wrong type": Refused(f"server:\n\n  port: {SECRET}\n", r"3: server\.port: must be a whole number.*"),
    "a key in the place of another setting": Refused(f"server:\n  open: {SECRET}\n", "2: server.open: .*"),
    "a key in the place of its upstream": Refused(
        f"upstreams:\n  a: {SECRET}\n", "2: upstreams.a: must be a mapping.*"
    ),
    "an address with a password": Refused(
        f"upstreams:\n  a:\n    base_url: http://u:{SECRET}@h\n", "3: upstreams.a.base_url: .*"
    ),
    "a store with a password": Refused(f"store: mysql://u:{SECRET}@h/d\n", "1: store: .*"),
    "a file for a key that is the key": Refused(
        f"upstreams:\n  a: {{base_url: demo, api_key_file: {SECRET}}}\n",
        "2: upstreams.a.api_key_file: .*",
    ),
    "a bomb of anchors": Refused(BOMB, "1: .*anchors.*"),
    "a byte order mark before a slip": Refused(f"\ufeff# first\nserver: {{prot: {SECRET}}}\n", "2: server.prot: .*"),
    "no UTF-8": Refused(b"store: \xff" + SECRET.encode(), "1: is not UTF-8 text"),
    "a control character": Refused(f"store: memory\nlimiter: \0{SECRET}\n", "2: holds a control character"),
    "an unset variable": Refused(f"store: ${{EZAT_UNSET}}{SECRET}\n", "1: store: .*EZAT_UNSET is not set.*"),
    "no YAML": Refused(f"server: [\nstore: {SECRET}\n", "\\d: is not valid YAML.*"),
}


@pytest.mark.parametrize("name", REFUSED_FILES)
async def test_p12_a_configuration_that_cannot_be_used_is_one_clear_line(
    refusals: Mapping[str, Ended], name: str
) -> None:
    """The gateway does not start, and says what is wrong in a line that begins with the file and the line's number,
    without a traceback and without what may be a secret."""
    lines = said(refusals[name])

    assert 1 == len([line for line in lines if re.fullmatch(rf".*/gateway\.yaml:{REFUSED_FILES[name].words}", line)]), (
        lines
    )
    assert SECRET not in refusals[name].errors


# P22: where to listen

HOSTS = {
    "another machine's address": ("server", "192.0.2.1"),
    "another machine's address of IPv6": ("server", "2001:db8::1"),
    "an address that is none": ("server", "300.1.1.1"),
    "a name that can't be one": ("server", f"{'a' * 64}.invalid"),
    "another machine's address, for the operator": ("server.admin", "192.0.2.1"),
    "a name that can't be one, for the operator": ("server.admin", f"{'a' * 64}.invalid"),
}
NO_PLACES = {
    name: Refused(
        small_config(**({"host": host} if listener == "server" else {"admin": {"port": 0, "host": host}})),
        rf"the gateway can't start: can't listen on {re.escape(host)}:0, {re.escape(listener)}\.port: \S.*",
    )
    for name, (listener, host) in HOSTS.items()
}


@pytest.mark.parametrize("name", NO_PLACES)
async def test_p22_an_address_that_cannot_be_had_is_one_clear_line(refusals: Mapping[str, Ended], name: str) -> None:
    """Where one of the two can't listen, the gateway says where, which setting, and why, in one line, and exits."""
    [line] = said(refusals[name])

    assert re.fullmatch(NO_PLACES[name].words, line), line


async def test_p22_it_listens_on_ipv6_or_says_that_there_is_none(upstream: RawUpstream, tmp_path: Path) -> None:
    """On ::1 both listeners serve under the addresses that are printed; without IPv6 the start is refused in words."""
    config = prepaid_config(upstream, tmp_path, host="::1")
    config["server"]["admin"]["host"] = "::1"
    if not has_ipv6():
        (tmp_path / "gateway.yaml").write_text(json.dumps(config))
        [line] = said(run_each([tmp_path])[0])
        assert line.startswith("the gateway can't start: can't listen on ::1:0, server.port: ")
        return

    with started(config, tmp_path) as gateway:
        urls = [gateway.url, *re.findall(r"the admin token: (http://\[::1\]:\d+)/metrics", gateway.written)]
        found = [await status_of(url) for url in urls]

    assert [True, True] == [url.startswith("http://[::1]:") for url in urls]
    assert [200, 200] == found


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as found:
            found.bind(("::1", 0))
    except OSError:
        return False
    return True


async def status_of(url: str) -> int:
    reader, writer = await asyncio.open_connection("::1", int(url.rpartition(":")[2]))
    try:
        writer.write(GET_HEALTH)
        return int((await reader.readuntil(b"\r\n")).split()[1])
    finally:
        writer.transport.abort()


# P19: tasks in the background

QUICK = {
    "proxy.store.writer:PATIENCE": 1.0,
    "proxy.store.store:REFRESH": 0.1,
    "proxy.store.store:STALE": 1.0,
    "proxy.store.store:HEARTBEAT": 0.1,
    "proxy.reloading:SETTLED": 0.05,
    "proxy.reloading:TURN": 0.5,
}
"""Times of background tasks as a test can wait for them."""
LONG_ENOUGH = 4.0
"""Seconds for a task to be there again: several of its turns, and a pause."""


@pytest.fixture
def breakable(upstream: RawUpstream, tmp_path: Path) -> Iterator[KillableGateway]:
    """A gateway whose background tasks can be broken."""
    config = prepaid_config(upstream, tmp_path, {CONSTANTS: {"values": QUICK}}, BROKEN_TASK, ping_interval=0.1)
    with started(config, tmp_path) as running:
        yield running


async def break_task(gateway: GatewayProcess, name: str) -> int:
    """Let a task meet a bug at its next turn; how much the gateway had written by then."""
    before = len(gateway.written)
    async with connected(gateway) as client:
        client.send(head("/v1/models", f"x-ezat-session: {name}", method="GET"))
        assert 200 == (await client.answer()).status
    return before


async def goes_on_or_is_red(gateway: GatewayProcess, goes_on: Callable[[], bool | Awaitable[bool]]) -> bool:
    """Whether the task is there again in time, or readiness is red, or the process has ended."""
    deadline = time.monotonic() + LONG_ENOUGH
    while time.monotonic() < deadline:
        going = goes_on()
        if going is True or (not isinstance(going, bool) and await going):
            return True
        try:
            if not await is_ready(gateway):
                return True
        except (Cut, ConnectionError):
            return True
        await asyncio.sleep(0.05)
    return False


def complaints(gateway: GatewayProcess, before: int) -> list[str]:
    """The lines of the log from a place on that are no information."""
    return [line for line in gateway.written[before:].splitlines() if line and '"level":"info"' not in line]


def last_heartbeat(folder: Path) -> float:
    with closing(sqlite3.connect(folder / "ezat.db")) as store:
        return float(store.execute("SELECT max(seen_at) FROM gateways").fetchone()[0])


@pytest.mark.parametrize("task", ["the writer", "the heartbeat"])
async def test_p19_what_writes_does_not_die_while_the_gateway_seems_ready(
    breakable: KillableGateway, upstream: RawUpstream, tmp_path: Path, task: str
) -> None:
    """A writer or a heartbeat that meets a bug goes on, or readiness turns red before a request finds out; no answer is
    whole that isn't recorded, and the log tells of it."""
    broken_at = time.time()
    before = await break_task(breakable, task)

    fine = await goes_on_or_is_red(breakable, lambda: last_heartbeat(tmp_path) > broken_at + 0.5)
    answers = [await ask(breakable, path, asked(stream=stream)) for path in (CHAT, MESSAGES) for stream in (0, 1)]

    whole = {answer.headers["request-id"] for answer in answers if is_whole(answer)}
    assert whole == {row["request_id"] for row in ledger(store_of(tmp_path))}
    assert (True, True) == (fine, complaints(breakable, before) != []), "it went on, or was red; the log told of it"


async def test_p19_the_look_at_the_keys_goes_on(
    breakable: KillableGateway, upstream: RawUpstream, tmp_path: Path
) -> None:
    """A look at keys and organizations that meets a bug is followed by the next, or readiness turns red; the log tells
    of it; and be it red, it is green again as soon as it can be."""
    before = await break_task(breakable, "the look at the keys")
    await asyncio.sleep(0.3)  # it meets the bug
    key = in_store(store_of(tmp_path), lambda connection: create_key(connection, "later")).text

    fine = await goes_on_or_is_red(breakable, lambda: is_known(breakable, key))

    assert (True, True) == (fine, complaints(breakable, before) != []), "it went on, or was red; the log told of it"


async def is_known(gateway: GatewayProcess, key: str) -> bool:
    async with connected(gateway) as client:
        client.send(head("/v1/models", method="GET", key=key))
        return (await client.answer()).status == 200


async def test_p19_a_key_that_cannot_be_read_ends_no_look(
    breakable: KillableGateway, upstream: RawUpstream, tmp_path: Path
) -> None:
    """When a broken row of the keys is mended, the gateway serves again by itself."""
    changed = "UPDATE revisions SET revision = revision + 1 WHERE name = 'directory'"
    with closing(sqlite3.connect(tmp_path / "ezat.db", isolation_level=None)) as store:
        store.execute("INSERT INTO keys (id, name, digest, shown, models, created_at) VALUES (1, 1, x'00', '', '[', 0)")
        store.execute(changed)
        await asyncio.sleep(0.3)  # it is looked at
        store.execute("DELETE FROM keys")
        store.execute(changed)
    key = in_store(store_of(tmp_path), lambda connection: create_key(connection, "later")).text

    await eventually_async(lambda: is_known(breakable, key), LONG_ENOUGH)

    assert await is_ready(breakable)


async def test_p19_the_files_are_watched_on(breakable: KillableGateway, upstream: RawUpstream, tmp_path: Path) -> None:
    """A watcher that meets a bug watches on, or readiness turns red; the log tells of it."""
    path = tmp_path / "gateway.yaml"
    config = json.loads(path.read_text())
    config["models"][0]["aliases"] = ["model", "later"]
    before = await break_task(breakable, "the watcher")
    path.write_text(path.read_text() + "\n")
    await eventually(lambda: complaints(breakable, before))  # it has met the bug

    path.write_text(json.dumps(config))

    assert await goes_on_or_is_red(breakable, lambda: '"the configuration was reloaded"' in breakable.written)


async def test_p19_a_stream_is_pinged_on(breakable: KillableGateway, upstream: RawUpstream) -> None:
    """A ping that meets a bug is followed by others, and the stream is whole; the log tells of it."""
    for path, ping in ((CHAT, b": ping\n"), (MESSAGES, b"event: ping\n")):
        before = await break_task(breakable, "the ping")
        upstream.play(CHUNKED, chunk(BEGUN), 0.45, chunk(ENDING), LAST_CHUNK)

        answer = await ask(breakable, path, asked(stream=True))

        assert is_whole(answer)
        assert 1 <= answer.body.count(ping) <= 3  # of four
        assert complaints(breakable, before)


# P21: without aiohttp's own parser


async def test_p21_a_slow_parser_is_told_of_loudly(
    gateway: GatewayProcess, upstream: RawUpstream, tmp_path: Path
) -> None:
    """Without aiohttp's C parser the gateway serves, and has warned before it does; with it, it says nothing."""
    with started(prepaid_config(upstream, tmp_path), tmp_path, {"AIOHTTP_NO_EXTENSIONS": "1"}) as slow:
        warnings = [line["level"] for line in slow.log_lines if "C parser" in line["event"]]
        served = await ask(slow, MESSAGES, asked())

    assert (["warning"], 200) == (warnings, served.status)
    assert "C parser" not in gateway.written


# P24: a clock that is wrong


class Clock(NamedTuple):
    """When a machine believes to wake up, and what becomes of keys that end in 1980 and in 2030."""

    starts_at: float
    year: str
    until_1980: int
    until_2030: int


CLOCKS = [Clock(4_102_444_805.0, "2100", 401, 401), Clock(5.0, "1970", 200, 200)]
UNTIL_1980, UNTIL_2030 = "ezat_sk_until-1980", "ezat_sk_until-2030"
_PATCH = """
import time
_really = time.time
_ahead = {starts_at} - _really()
time.time = lambda: _really() + _ahead
time.time_ns = lambda: int(time.time() * 1e9)
"""


async def test_p24_a_wrong_clock_is_no_crash(upstream: RawUpstream, tmp_path: Path) -> None:
    """Started in 2100 and then, on the same store, in 1970, the gateway serves and counts by that clock, and a key ends
    when the clock says so."""
    config = prepaid_config(upstream, tmp_path)
    config["plugins"][0]["auth"]["keys"] += [
        {"name": "a", "key": UNTIL_1980, "expires_at": "1980-01-01T00:00:00Z", "spend_limit_usd": 1},
        {"name": "b", "key": UNTIL_2030, "expires_at": "2030-01-01T00:00:00Z", "requests_per_minute": 1},
    ]
    statuses: list[list[int]] = []
    waits: list[str] = []
    years: list[str] = []

    for clock in CLOCKS:
        (tmp_path / "sitecustomize.py").write_text(_PATCH.format(starts_at=clock.starts_at))
        known = len(years)
        with started(config, tmp_path, {"PYTHONPATH": str(tmp_path)}) as gateway:
            async with unharmed(gateway):
                statuses.append(
                    [(await asked_with(gateway, key)).status for key in (CLIENT_KEY, UNTIL_1980, UNTIL_2030)]
                )
                waits.append((await asked_with(gateway, UNTIL_2030)).headers.get("retry-after", "60"))
        years = sorted(time.strftime("%Y", time.gmtime(row["at"])) for row in ledger(store_of(tmp_path)))
        assert years.count(clock.year) == len(years) - known == statuses[-1].count(200)

    assert [[200, clock.until_1980, clock.until_2030] for clock in CLOCKS] == statuses
    assert all(1 <= int(wait) <= 60 for wait in waits)
    assert (0, 0) == reserved_units(store_of(tmp_path))


async def asked_with(gateway: GatewayProcess, key: str) -> Answer:
    """The answer to a request with this key."""
    body = json.dumps(asked()).encode()
    async with connected(gateway) as client:
        client.send(head(CHAT, f"content-length: {len(body)}", key=key) + body)
        return await client.answer()
