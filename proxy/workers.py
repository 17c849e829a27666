"""Several processes that serve one port, and the one that looks after them.

The supervisor serves nothing and opens nothing but the port's reservation, so there is little that it could fail at.
It has read the configuration, and each worker is a fork of it: one that dies is replaced by one with the configuration
in force, whatever stands in the file by then. The kernel spreads connections over those that listen (SO_REUSEPORT). A
worker whose supervisor is gone stops as if it were told to.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

import click
import orjson
from prometheus_client.multiprocess import mark_process_dead

from proxy.errors import CannotStart
from proxy.metrics import refused_reloads, share_through
from proxy.plan import changes, refusal
from proxy.port import reserved
from proxy.reloading import Load, Loaded
from proxy.serving import SIGNALS, Worker, exit_after, flush_output, serve
from proxy.yaml_source import ConfigError

READY, RELOADED = b"!", b"+"
TURN = 0.1
"""Seconds between two looks at what no signal tells: who is ready, who is due to begin again."""
SHORTEST_PAUSE = 0.5
LONGEST_PAUSE = 30.0
LONG_ENOUGH = 60.0
"""Seconds after which a worker that dies counts as one that had worked."""
MORE_THAN_SHUTDOWN = 25.0
"""Seconds beyond ``server.shutdown_timeout`` after which a worker that should stop is killed."""


@dataclass(slots=True)
class _Seat:
    """A place for a worker."""

    number: int
    pid: int = 0
    pipe: int = -1
    """What the worker tells: READY, RELOADED."""
    is_ready: bool = False
    edition: int = 0
    """Which of the configurations in force it has been told of."""
    began: float = 0.0
    failures: int = 0
    due: float = 0.0
    """When it is to begin again."""


class Supervisor:
    """Runs the workers of a configuration, until SIGTERM or SIGINT."""

    def __init__(self, loaded: Loaded, load: Load) -> None:
        self._loaded = loaded
        self._offered = loaded
        """What workers were told to take over; in force as soon as one of them has."""
        self._load = load
        self._edition = 1
        self._seats = [_Seat(number) for number in range(1, loaded[0].server.workers + 1)]
        self._all_were_ready = False
        self._stop_until: float | None = None
        self._failed = False
        self._refused_reloads: Any = None
        self._asked_to_reload = False
        self._judge_thread: threading.Thread | None = None
        self._judged = (loaded, False, "")
        self._folder = ""
        self._port = 0
        self._alive = (-1, -1)

    def run(self) -> int:
        """The exit code."""
        server = self._loaded[0].server
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        self._alive = os.pipe()
        try:
            with reserved(server.host, server.port) as self._port, _folder() as self._folder:
                share_through(self._folder)
                self._refused_reloads = refused_reloads()
                while not (self._stop_until is not None and all(not seat.pid for seat in self._seats)):
                    self._reload()
                    if self._judge_thread is None:
                        self._begin_those_due()
                    got = signal.sigtimedwait(SIGNALS, TURN)
                    if got is not None:
                        self._obey(got.si_signo)
                    self._look()
        except CannotStart as error:
            click.echo(f"the gateway can't start: {error}", err=True)
            return 1
        return 1 if self._failed else 0

    def _obey(self, number: int) -> None:
        if number in (signal.SIGTERM, signal.SIGINT):
            self._stop()
        elif number == signal.SIGHUP and self._stop_until is None:
            self._asked_to_reload = True

    def _stop(self) -> None:
        if self._stop_until is not None:
            self._tell_all(signal.SIGINT)
            return
        self._stop_until = time.monotonic() + self._loaded[0].server.shutdown_timeout + MORE_THAN_SHUTDOWN
        self._tell_all(signal.SIGTERM)

    def _judge(self) -> None:
        """In a thread, while nobody is forked: read the configuration, which may take as long as a plugin likes."""
        try:
            loaded = self._load()
            found = changes(self._loaded[0], loaded[0])
            self._judged = (loaded, bool(found), refusal(found))
        except ConfigError as error:
            self._judged = (self._loaded, False, str(error))
        except BaseException as error:  # a plugin's, when it is made; the workers go on
            self._judged = (self._loaded, False, f"{type(error).__name__}: {error}")

    def _reload(self) -> None:
        """Judge the configuration once for all; each worker then takes it over by itself."""
        if self._asked_to_reload and self._judge_thread is None:
            self._asked_to_reload = False
            self._judge_thread = threading.Thread(target=self._judge, daemon=True)
            self._judge_thread.start()
        if self._judge_thread is not None and not self._judge_thread.is_alive():
            self._judge_thread = None
            self._offer(*self._judged)

    def _offer(self, loaded: Loaded, is_another: bool, reason: str) -> None:
        if reason:
            self._refused_reloads.inc()
            _log("error", "the configuration was not reloaded, the present one stays", reason=reason)
            return
        self._offered = loaded
        if not is_another:
            self._loaded = loaded
        self._edition += 1
        for seat in self._seats:
            if seat.is_ready:
                seat.edition = self._edition
                os.kill(seat.pid, signal.SIGHUP)

    def _begin_those_due(self) -> None:
        """At the start the first one alone, so that what hinders all of them is told once."""
        first = self._seats[0]
        for seat in self._seats:
            may_begin = seat is first or first.is_ready or self._all_were_ready
            if may_begin and not seat.pid and self._stop_until is None and time.monotonic() >= seat.due:
                self._begin(seat)

    def _begin(self, seat: _Seat) -> None:
        seat.pipe, told = os.pipe()
        os.set_blocking(seat.pipe, False)
        seat.began, seat.is_ready = time.monotonic(), False
        seat.edition = self._edition if self._offered is self._loaded else 0
        with suppress(OSError):
            flush_output()
        try:
            seat.pid = os.fork()
        except OSError as error:  # no memory, or too many processes
            os.close(told)
            self._ended(seat, error.strerror)
            return
        if not seat.pid:
            self._work(seat, told)
        os.close(told)

    def _work(self, seat: _Seat, told: int) -> None:
        """In the new process: serve, and end it."""
        try:
            os.setpgid(0, 0)  # Ctrl-C is for the supervisor alone, which tells the workers
            os.close(self._alive[1])
            share_through(self._folder)
            tell_ready, tell_reloaded = partial(os.write, told, READY), partial(os.write, told, RELOADED)
            worker = Worker(seat.number, self._port, os.getppid(), self._alive[0], tell_ready, tell_reloaded)
            asyncio.run(exit_after(serve(self._loaded, self._load, worker)))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    def _look(self) -> None:
        """What have they told, and who has ended?"""
        for seat in self._seats:
            told = _told(seat.pipe) if seat.pid else b""
            if RELOADED in told:
                self._loaded = self._offered
            if READY in told:
                seat.is_ready = True
                if seat.edition != self._edition:
                    seat.edition = self._edition
                    os.kill(seat.pid, signal.SIGHUP)
        self._bury()
        self._all_were_ready = self._all_were_ready or all(seat.is_ready for seat in self._seats)
        if self._stop_until is not None and time.monotonic() > self._stop_until:
            self._tell_all(signal.SIGKILL)

    def _bury(self) -> None:
        """Take note of all processes that have ended: as the first one of a container, also of those of others."""
        while any(seat.pid for seat in self._seats):
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            for seat in self._seats:
                if seat.pid == pid:
                    self._ended(seat, os.waitstatus_to_exitcode(status))

    def _ended(self, seat: _Seat, code: int | str | None) -> None:
        """``code``: that of its exit, or why it could not begin."""
        mark_process_dead(seat.pid, self._folder)  # type: ignore[no-untyped-call]
        os.close(seat.pipe)
        seat.pid, seat.is_ready = 0, False
        if self._stop_until is not None:
            self._failed = self._failed or code != 0
            return
        if not self._all_were_ready:
            if code != 1:  # else it has said why
                click.echo(f"the gateway can't start: a worker has ended, with {code}", err=True)
            self._failed = True
            self._stop()
            return
        seat.failures = 1 if time.monotonic() - seat.began > LONG_ENOUGH else seat.failures + 1
        pause = min(LONGEST_PAUSE, SHORTEST_PAUSE * 2 ** (seat.failures - 1))
        seat.due = time.monotonic() + pause
        _log("error", "a worker has ended, another one takes its place", worker=seat.number, code=code, seconds=pause)

    def _tell_all(self, number: signal.Signals) -> None:
        for seat in self._seats:
            if seat.pid:
                os.kill(seat.pid, number)


@contextmanager
def _folder() -> Iterator[str]:
    """Where the workers share their metrics. Raises CannotStart."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="ezat-metrics-")
    except OSError as error:
        raise CannotStart(f"there is no folder for the metrics of the workers: {error.strerror}") from error
    with folder as path:
        yield path


def _told(pipe: int) -> bytes:
    try:
        return os.read(pipe, 256)
    except BlockingIOError:
        return b""


def _log(level: str, event: str, **fields: object) -> None:
    """A line of the log, unless that would mean to wait: the supervisor waits for nobody."""
    moment = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    line = orjson.dumps({**fields, "event": event, "level": level, "timestamp": moment}) + b"\n"
    if sys.__stderr__ is None:  # then number 2 is something else
        return
    with suppress(OSError):
        _, writable, _ = select.select([], [2], [], 0)
        if writable:
            os.write(2, line[: select.PIPE_BUF - 1].rstrip(b"\n") + b"\n")
