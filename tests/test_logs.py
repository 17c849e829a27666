"""The log and the queue in front of it: whatever becomes of standard error, requests are answered.

Everything is judged through real pipes and files, and where it concerns a whole process, in one of its own: the set-up
belongs to the process, and what a process writes at its end is seen from outside only.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import structlog

from proxy.exchange import Exchange
from proxy.log_queue import GATHER_SECONDS, WHOLE, LogQueue, Room
from proxy.logs import LAST_SECONDS, LONGEST_LINE
from proxy.plugin import Plugin
from proxy.testing import ScriptedUpstream
from tests.process import REPOSITORY, RUN, GatewayProcess, eventually, started_gateway, written_config

KEY = "ezat_sk_canary-of-the-client"
PROMPT = "canary of the prompt"
MESSAGES = "/v1/messages"
SMALLEST_PIPE = 4096
"""Bytes that a pipe of one page holds."""
FILLING = b"." * (SMALLEST_PIPE - 1) + b"\n"
LINES_OF_A_REQUEST = 300
"""Lines that the plugin below writes for each request."""
ENOUGH_TO_DROP = 50
"""So many requests write more lines than the queue holds, and more than a thousand times what the pipe holds."""
WITHOUT_STANDARD_ERROR = ["sh", "-c", 'exec "$@" 2>&-', "sh"]
"""What starts a command so."""
SHUTDOWN = 1.0
SLACK = 4.0
"""Seconds for a process to end on a busy machine, beyond the times that it is allowed."""


class Talkative(Plugin):
    """Writes many lines for each request."""

    name = "talkative"

    async def on_headers(self, exchange: Exchange) -> None:
        for number in range(LINES_OF_A_REQUEST):
            structlog.get_logger("talkative").info("spoken", number=number, words="word " * 50)


# The queue


class Pipe:
    """A pipe of one page that nobody reads yet."""

    def __init__(self) -> None:
        self._queues: list[LogQueue] = []
        self.reader, self.writer = os.pipe()
        fcntl.fcntl(self.writer, fcntl.F_SETPIPE_SZ, SMALLEST_PIPE)

    def queue(self, room: Room = WHOLE) -> LogQueue:
        """A queue that writes to this pipe."""
        made = LogQueue(self.writer, notice, room)
        self._queues.append(made)
        return made

    def fill(self) -> None:
        """Take all room, with one line, so that not even the first of a queue's lines gets in."""
        os.write(self.writer, FILLING)

    def read_until(self, text: bytes) -> bytes:
        """What comes, up to the read that brings the text, less the filling."""
        return read_until(self.reader, text).removeprefix(FILLING)

    def lend_reader(self) -> int:
        """The reading end, for somebody who closes it."""
        reader, self.reader = self.reader, -1
        return reader

    def close_writer(self) -> None:
        """Leave the writing end to the processes that were given it."""
        os.close(self.writer)
        self.writer = -1

    def close(self) -> None:
        """Close the reader first, so that no thread is left that writes to what is another file's number later."""
        if self.reader >= 0:
            os.close(self.reader)
        for queue in self._queues:
            queue.close(5)
        if self.writer >= 0:
            os.close(self.writer)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    made.close()


def read_until(reader: int, text: bytes, seconds: float = 5.0) -> bytes:
    """What comes, up to the read that brings the text. Raises AssertionError where it does not come."""
    got, deadline = b"", time.monotonic() + seconds
    while text not in got:
        ready, _, _ = select.select([reader], [], [], max(0, deadline - time.monotonic()))
        assert ready, f"{text!r} does not come; the last is {got[-500:]!r}"
        got += os.read(reader, 2**20)
    return got


def notice(lines: int) -> bytes:
    return b"dropped %d\n" % lines


def line(number: int, length: int = 400) -> bytes:
    return b"%04d " % number + b"x" * length + b"\n"


@pytest.mark.parametrize(
    ("room", "most"),
    [
        pytest.param(Room(lines=100, bytes=10**6), 90, id="lines"),
        pytest.param(Room(lines=10**6, bytes=50_000), 45_000 // len(line(0)), id="bytes"),
    ],
)
def test_lines_without_room_are_dropped_and_counted(pipe: Pipe, room: Room, most: int) -> None:
    """Where nobody reads, the oldest lines are kept, the newest dropped, and none is unaccounted for."""
    pipe.fill()
    queue = pipe.queue(room)
    for number in range(1000):
        queue.put(line(number))
    kept = 1000 - queue.dropped

    *lines, rest = pipe.read_until(b"\n%04d " % (kept - 1)).splitlines()

    assert [b"dropped %d" % queue.dropped] == [each for each in lines if each.startswith(b"dropped")]
    assert list(range(kept)) == [int(each.split()[0]) for each in [*lines, rest] if not each.startswith(b"dropped")]
    assert most == kept


def test_after_a_gap_everything_is_written_again(pipe: Pipe) -> None:
    """Once the sink takes lines the number of dropped ones is told, once, and later lines come as ever."""
    pipe.fill()
    queue = pipe.queue(Room(100, 10**6))
    for number in range(1000):
        queue.put(line(number))
    before = pipe.read_until(b"89 x")

    queue.put(line(1000))
    after = pipe.read_until(b"1000 x")

    assert 1 == (before + after).count(b"dropped 910\n")
    assert 910 == queue.dropped


def test_errors_have_room_when_infos_have_none_left(pipe: Pipe) -> None:
    """A flood of other lines does not push out the line that says why."""
    pipe.fill()
    queue = pipe.queue(Room(100, 10**6))
    for number in range(1000):
        queue.put(line(number))
    dropped = queue.dropped

    queue.put_urgent(b"why\n")

    assert dropped == queue.dropped
    assert b"why\n" in pipe.read_until(b"why\n")


def test_put_returns_while_the_sink_is_stuck(pipe: Pipe) -> None:
    """However many lines nobody reads, whoever logs does not wait."""
    pipe.fill()
    queue = pipe.queue()

    started = time.monotonic()
    for number in range(50_000):
        queue.put(line(number))
    taken = time.monotonic() - started

    assert taken < 5  # 0.1 ms each, a hundred times what it needs
    assert queue.dropped > 30_000


def test_closing_a_stuck_queue_gives_up(pipe: Pipe) -> None:
    """The end waits for a stuck sink as long as it was told to, and a second time not at all."""
    queue = pipe.queue()
    for number in range(100):
        queue.put(line(number))

    started = time.monotonic()
    queue.close(0.2)
    once = time.monotonic() - started
    queue.close(60)
    twice = time.monotonic() - started

    assert 0.2 <= once <= twice < 5


def test_a_sink_that_fails_is_tried_again(tmp_path: Path) -> None:
    """Nothing is lost when the reader of the log is replaced by another."""
    path = tmp_path / "log"
    os.mkfifo(path)
    first = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    sink = os.open(path, os.O_WRONLY)
    os.close(first)
    queue = LogQueue(sink, notice)
    for number in range(10):
        queue.put(line(number, 10))
    time.sleep(20 * GATHER_SECONDS)  # nothing shows from outside that it has failed

    second = os.open(path, os.O_RDONLY)
    got = read_until(second, line(9, 10))
    queue.close(5)
    os.close(second)
    os.close(sink)

    assert b"".join(line(number, 10) for number in range(10)) == got
    assert 0 == queue.dropped


def test_a_sink_that_never_works_does_not_delay_the_end() -> None:
    """A full disk is tried once more at the end; what it doesn't take is counted."""
    with open("/dev/full", "wb", buffering=0) as full:
        queue = LogQueue(full.fileno(), notice)
        for number in range(1000):
            queue.put(line(number))

        started = time.monotonic()
        queue.close(60)
        taken = time.monotonic() - started

    assert taken < 5
    assert 1000 == queue.dropped


def test_a_closed_sink_is_no_harm(pipe: Pipe) -> None:
    """A descriptor that somebody has closed fails as any other sink does."""
    pipe.close_writer()
    queue = LogQueue(pipe.writer, notice)

    queue.put(line(1))
    queue.close(5)

    assert 1 == queue.dropped


def test_a_non_blocking_sink_gets_every_line(pipe: Pipe) -> None:
    """Another process that shares standard error may have made it non-blocking: lines stay whole."""
    os.set_blocking(pipe.writer, False)
    queue = pipe.queue()
    for number in range(200):
        queue.put(line(number, 10 + 40 * number))

    got = pipe.read_until(line(199, 10 + 40 * 199))

    assert b"".join(line(number, 10 + 40 * number) for number in range(200)) == got


# The log of a process


SETTING_UP = """
import logging, os, sys, threading, time, warnings
import structlog
from proxy import logs
log = structlog.get_logger("test")
queue = logs.set_up(pretty=False)
"""


def started(script: str, *arguments: str, stderr: int | Any) -> subprocess.Popen[bytes]:
    """Python with the log set up, and this script."""
    command = [sys.executable, "-c", SETTING_UP + textwrap.dedent(script), *arguments]
    return subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr)


def logged(script: str, *arguments: str) -> list[dict[str, Any]]:
    """The lines of a process that ran to a good end."""
    with started(script, *arguments, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        written = process.stderr.read()
    assert 0 == process.returncode, written.decode()
    return lines_of(written)


def lines_of(written: bytes) -> list[dict[str, Any]]:
    assert written.endswith(b"\n") or not written
    return [json.loads(each) for each in written.splitlines()]


def test_everything_that_was_logged_is_there_at_the_end() -> None:
    """A process that ends leaves no line behind, though nobody closes the queue, and each in its place."""
    lines = logged("""
        for number in range(3000):
            log.info("said", number=number)
            if number % 100 == 0:
                logging.getLogger("library").warning("said %d", number)
    """)

    assert list(range(3000)) == [each["number"] for each in lines if each["event"] == "said"]
    assert [f"said {number}" for number in range(0, 3000, 100)] == [
        each["event"] for each in lines if each["event"] != "said"
    ]


def test_what_is_logged_after_closing_is_written_too() -> None:
    """The loop's last complaints come after everything was closed."""
    lines = logged("""
        log.info("early")
        queue.close(5)
        log.info("late")
    """)

    assert ["early", "late"] == [each["event"] for each in lines]


SAID_BY_OTHERS = {
    "a library": ('logging.getLogger("asyncio").warning("it was %s", "slow")', {"event": "it was slow"}),
    "a warning": ('warnings.warn("do not", UserWarning)', {}),
    "a finalizer": (
        """
        class Broken:
            def __del__(self):
                raise ValueError("broken")
        Broken()
        """,
        {"event": "an exception was ignored", "where": "function"},
    ),
    "a thread": (
        """
        def fail():
            raise ValueError("broken")
        thread = threading.Thread(target=fail, name="its name")
        thread.start()
        thread.join()
        """,
        {"event": "a thread failed", "thread": "its name"},
    ),
    "a record that can't be formatted": (
        f'logging.getLogger("library").warning("%d", "{PROMPT}")',
        {"event": "a record could not be logged", "logger": "library"},
    ),
    "a lone surrogate": ('log.info("said", words="a\\ud800b")', {"event": "said", "words": "'a\\ud800b'"}),
    "an integer beyond 64 bits": ('log.info("said", number=2**70)', {"event": "said", "number": str(2**70)}),
}


@pytest.mark.parametrize("name", SAID_BY_OTHERS)
def test_whoever_says_something_it_is_one_json_line(name: str) -> None:
    """Nothing reaches standard error beside the queue, where it could wait for a reader, or in another form."""
    script, expected = SAID_BY_OTHERS[name]

    [found] = logged(script)

    assert {"event", "level", "timestamp"} <= set(found)
    assert expected == {field: found[field] for field in expected}
    assert PROMPT not in str(found)


def test_what_aiohttp_quotes_is_not_written() -> None:
    """Of an error within aiohttp its kind is logged; its text and its arguments may be a key."""
    [found] = logged(f"""
        import proxy.http_server
        try:
            raise ValueError("{KEY}")
        except ValueError:
            logging.getLogger("ezat.http").exception("of %s", "{KEY}")
    """)

    assert "aiohttp reports an error of kind ValueError" == found["event"]
    assert KEY not in str(found)


def test_a_line_that_is_too_long_is_shortened() -> None:
    """An exception that quotes a whole body leaves a line that still says where and what."""
    [found] = logged(f"""
        try:
            raise ValueError("x" * 1_000_000)
        except ValueError:
            log.exception("plugin failed", plugin="test", request_id="id", many=["y" * {LONGEST_LINE}])
    """)

    assert ("plugin failed", "test", "id") == (found["event"], found["plugin"], found["request_id"])
    assert "ValueError" in found["exception"]
    assert len(json.dumps(found)) < LONGEST_LINE


def test_a_fork_has_a_queue_of_its_own() -> None:
    """A worker process writes through its own thread, though its loggers were made before the fork."""
    lines = logged("""
        log.info("parent before")
        queue.close(5)
        child = os.fork()
        if not child:
            logs.set_up(pretty=False)
            log.info("child")
            sys.exit()
        assert os.waitpid(child, 0)[1] == 0
        log.info("parent after")
    """)

    assert ["parent before", "child", "parent after"] == [each["event"] for each in lines]


def test_a_fork_does_not_wait_for_its_parents_queue() -> None:
    """Nor does it write once more what waits there."""
    lines = logged("""
        log.info("parent")
        child = os.fork()
        if not child:
            started = time.monotonic()
            queue.close(60)
            os._exit(time.monotonic() - started > 30)
        assert os.waitpid(child, 0)[1] == 0
    """)

    assert ["parent"] == [each["event"] for each in lines]


def test_lines_of_two_processes_do_not_mix(pipe: Pipe) -> None:
    """Workers share one pipe: each line is whole, and those of one process are in order."""
    script = """
        for number in range(2000):
            log.info("said", who=sys.argv[1], number=number, words="w" * (number * 37 % 3800))
            if number % 50 == 0:
                time.sleep(0.001)
        queue.close(60)
    """
    processes = [started(script, who, stderr=pipe.writer) for who in ("one", "two")]
    pipe.close_writer()
    with os.fdopen(pipe.lend_reader(), "rb") as reader:
        lines = lines_of(reader.read())

    assert [0, 0] == [process.wait() for process in processes]
    for who in ("one", "two"):
        assert list(range(2000)) == [each["number"] for each in lines if each["who"] == who]


def test_a_terminal_gets_text() -> None:
    """The pretty form goes through the queue as well, tracebacks included."""
    script = """
        logs.set_up(pretty=True)
        try:
            raise ValueError("broken")
        except ValueError:
            log.exception("it failed", number=1)
        logging.getLogger("library").warning("said")
    """
    with started(script, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        written = process.stderr.read().decode()

    assert 0 == process.returncode
    first, *traceback, last = written.splitlines()
    assert "it failed" in first
    assert "ValueError: broken" in traceback
    assert "said" in last


def test_a_closed_standard_error_is_no_harm(tmp_path: Path) -> None:
    """The first file that is opened gets its number; no line of the log goes there."""
    script = """
        log.info("said")
        logging.getLogger("library").warning("said")
        queue.close(5)
        sys.exit(queue.dropped)
    """
    first = "import os, sys\nassert os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT) == 2\n"
    opened = tmp_path / "opened"
    command = [*WITHOUT_STANDARD_ERROR, sys.executable, "-c", first + SETTING_UP + textwrap.dedent(script), str(opened)]

    ended = subprocess.run(command, cwd=REPOSITORY, stdin=subprocess.DEVNULL, timeout=30, check=False)

    assert 0 == ended.returncode
    assert b"" == opened.read_bytes()


# The gateway


def config_for(upstream: ScriptedUpstream, *plugins: str) -> dict[str, Any]:
    return {
        "server": {"shutdown_timeout": SHUTDOWN},
        "upstreams": {"test": {"base_url": upstream.url}},
        "models": [
            {
                "id": "test/model",
                "max_output_tokens": 8192,
                "price": "free",
                "deployments": [{"upstream": "test", "model": "model"}],
            }
        ],
        "plugins": [*plugins, {"auth": {"keys": [{"name": "canary", "key": KEY}]}}],
    }


@contextmanager
def gateway_logging_to(
    stderr: int, config: dict[str, Any], folder: Path, command: Sequence[str] = ()
) -> Iterator[GatewayProcess]:
    """A gateway whose standard error is this, started by ``command`` with its own command behind."""
    whole = [*command, *RUN, "--config", str(written_config(config, folder))]
    (folder / "log").touch()
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(whole, cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=output, stderr=stderr)
    gateway = GatewayProcess(process, folder)
    try:
        gateway.wait_until_ready()
        yield gateway
    finally:
        gateway.stop()


async def statuses(gateway: GatewayProcess, number: int) -> list[int]:
    """The statuses of so many requests, one after the other."""
    body = {"model": "test/model", "max_tokens": 64, "messages": [{"role": "user", "content": PROMPT}]}
    found = []
    async with aiohttp.ClientSession(headers={"x-api-key": KEY}, timeout=aiohttp.ClientTimeout(total=10)) as session:
        for _ in range(number):
            async with session.post(gateway.url + MESSAGES, json=body) as answer:
                await answer.read()
                found.append(answer.status)
    return found


def all_of(reader: int, seen: list[dict[str, Any]]) -> None:
    """Read lines to the end of the pipe, and collect them."""
    with os.fdopen(reader, "rb") as lines:
        for each in lines:
            seen.append(json.loads(each))


def accounted(seen: Sequence[dict[str, Any]]) -> int:
    """The lines of requests that were read, or are told to be lost."""
    counted = {"spoken": 1, "request": 1}
    return sum(each["lines"] if "lines" in each else counted.get(each["event"], 0) for each in seen)


@pytest.mark.slow
async def test_a_log_that_nobody_reads_stops_no_request(tmp_path: Path, pipe: Pipe) -> None:
    """Requests are answered on and on; the reader that comes back gets whole lines, and the number of the lost ones."""
    async with ScriptedUpstream() as upstream:
        config = config_for(upstream, "tests.test_logs:Talkative")
        with gateway_logging_to(pipe.writer, config, tmp_path) as gateway:
            pipe.close_writer()
            answered = await statuses(gateway, ENOUGH_TO_DROP)

            seen: list[dict[str, Any]] = []
            reading = asyncio.create_task(asyncio.to_thread(all_of, pipe.lend_reader(), seen))
            await eventually(lambda: accounted(seen) == ENOUGH_TO_DROP * (LINES_OF_A_REQUEST + 1), 20)
            backlog = len(seen)
            answered += await statuses(gateway, 1)
            gateway.terminate()
            await asyncio.wait_for(reading, SHUTDOWN + LAST_SECONDS + SLACK)

    told = [each for each in seen if each["event"] == "log lines were dropped"]
    assert [200] * (ENOUGH_TO_DROP + 1) == answered
    assert [("warning", True)] == [(each["level"], "timestamp" in each) for each in told]
    assert list(range(LINES_OF_A_REQUEST)) == [each["number"] for each in seen[backlog:] if each["event"] == "spoken"]
    assert "request" == seen[-1]["event"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_log_that_nobody_reads_does_not_hold_up_the_end(
    tmp_path: Path, pipe: Pipe, number: signal.Signals
) -> None:
    """The gateway waits for the log's reader no longer than it says, and ends as it does otherwise."""
    async with ScriptedUpstream() as upstream:
        with gateway_logging_to(pipe.writer, config_for(upstream), tmp_path) as gateway:
            answered = await statuses(gateway, 50)

            gateway.terminate(number)
            await eventually(lambda: gateway.exit_code is not None, SHUTDOWN + LAST_SECONDS + SLACK)

    assert [200] * 50 == answered
    assert 0 == gateway.exit_code


@pytest.mark.slow
async def test_a_full_disk_stops_no_request(tmp_path: Path) -> None:
    """A log that can't be written delays neither an answer nor the end."""
    full = os.open("/dev/full", os.O_WRONLY)
    async with ScriptedUpstream() as upstream:
        with gateway_logging_to(full, config_for(upstream), tmp_path) as gateway:
            os.close(full)
            answered = await statuses(gateway, 10)

            gateway.terminate()
            await eventually(lambda: gateway.exit_code is not None, SHUTDOWN + LAST_SECONDS + SLACK)

    assert [200] * 10 == answered
    assert 0 == gateway.exit_code


@pytest.mark.slow
async def test_a_gateway_without_standard_error_serves(tmp_path: Path) -> None:
    """Started with 2>&- it answers and ends as ever."""
    async with ScriptedUpstream() as upstream:
        config = config_for(upstream)
        with gateway_logging_to(subprocess.DEVNULL, config, tmp_path, WITHOUT_STANDARD_ERROR) as gateway:
            answered = await statuses(gateway, 10)

            gateway.terminate()
            await eventually(lambda: gateway.exit_code is not None, SHUTDOWN + LAST_SECONDS + SLACK)

    assert [200] * 10 == answered
    assert 0 == gateway.exit_code


BROKEN = {
    "a control byte": f"POST {MESSAGES} HTTP/1.1\r\nhost: a\r\nx-api-key: {KEY}\x01\r\n\r\n",
    "no colon": f"POST {MESSAGES} HTTP/1.1\r\nhost: a\r\n{KEY}\r\n\r\n",
    "a chunk without a size": f"POST {MESSAGES} HTTP/1.1\r\nhost: a\r\nx-api-key: {KEY}\r\n"
    f"transfer-encoding: chunked\r\n\r\n{KEY}\r\n",
}


@pytest.mark.slow
async def test_a_broken_header_is_nowhere_when_the_log_is_complete(tmp_path: Path) -> None:
    """What waits in the queue while the client is answered holds no key either: after the end all of it is there."""
    async with ScriptedUpstream() as upstream:
        with started_gateway(config_for(upstream), tmp_path) as gateway:
            for broken in BROKEN.values():
                reader, writer = await asyncio.open_connection(gateway.host, gateway.port)
                writer.write(broken.encode())
                await asyncio.wait_for(reader.read(), 5)
                writer.close()
            [answered] = await statuses(gateway, 1)

            gateway.terminate()
            await eventually(lambda: gateway.exit_code is not None, 10)

    assert 200 == answered
    assert 1 == len(gateway.requests(status=200))
    assert [] == [each for each in gateway.log_lines if KEY in str(each)]
    assert KEY not in gateway.written
