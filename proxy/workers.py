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
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime

import click
import orjson
from prometheus_client.multiprocess import mark_process_dead

from proxy.errors import CannotStart
from proxy.metrics import share_through
from proxy.plan import changes
from proxy.reloading import Load, Loaded
from proxy.serving import Worker, serve
from proxy.yaml_source import ConfigError

SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD}
TURN = 0.1
"""Seconds between two looks at what no signal tells: who is ready, who is due to begin again."""
SHORTEST_PAUSE = 0.5
LONGEST_PAUSE = 30.0
LONG_ENOUGH = 60.0
"""Seconds after which a worker that dies counts as one that had worked."""
MORE_THAN_SHUTDOWN = 15.0
"""Seconds beyond ``server.shutdown_timeout`` after which a worker that should stop is killed."""


@dataclass(slots=True)
class _Seat:
    """A place for a worker."""

    number: int
    pid: int = 0
    ready_pipe: int = -1
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
        self._load = load
        self._edition = 1
        self._seats = [_Seat(number) for number in range(1, loaded[0].server.workers + 1)]
        self._all_were_ready = False
        self._stop_until: float | None = None
        self._failed = False
        self._folder = ""
        self._port = 0
        self._alive = (-1, -1)

    def run(self) -> int:
        """The exit code."""
        server = self._loaded[0].server
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        self._alive = os.pipe()
        try:
            with _reserved(server.host, server.port) as self._port, tempfile.TemporaryDirectory() as self._folder:
                while not (self._stop_until is not None and all(not seat.pid for seat in self._seats)):
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
            self._reload()

    def _stop(self) -> None:
        patience = self._loaded[0].server.shutdown_timeout + MORE_THAN_SHUTDOWN
        self._stop_until = self._stop_until or time.monotonic() + patience
        self._tell_all(signal.SIGTERM)

    def _reload(self) -> None:
        """Judge the configuration once for all; each worker then takes it over by itself."""
        try:
            loaded = self._load()
            fixed = [str(change) for change in changes(self._loaded[0], loaded[0]) if change.needs_restart]
            reason = "; ".join(fixed)
        except ConfigError as error:
            reason = str(error)
        if reason:
            _log("error", "the configuration was not reloaded, the present one stays", reason=reason)
            return
        self._loaded = loaded
        self._edition += 1
        for seat in self._seats:
            if seat.is_ready:
                seat.edition = self._edition
                os.kill(seat.pid, signal.SIGHUP)

    def _begin_those_due(self) -> None:
        for seat in self._seats:
            if not seat.pid and self._stop_until is None and time.monotonic() >= seat.due:
                self._begin(seat)

    def _begin(self, seat: _Seat) -> None:
        seat.ready_pipe, told = os.pipe()
        os.set_blocking(seat.ready_pipe, False)
        seat.began, seat.is_ready, seat.edition = time.monotonic(), False, self._edition
        sys.stdout.flush()
        seat.pid = os.fork()
        if not seat.pid:
            self._work(seat, told)
        os.close(told)

    def _work(self, seat: _Seat, told: int) -> None:
        """In the new process: serve, and end it."""
        code = 1
        try:
            os.setpgid(0, 0)  # Ctrl-C is for the supervisor alone, which tells the workers
            os.close(self._alive[1])
            share_through(self._folder)
            worker = Worker(seat.number, self._port, os.getppid(), self._alive[0], lambda: os.write(told, b"!"))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            code = asyncio.run(serve(self._loaded, self._load, worker))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)

    def _look(self) -> None:
        """Who has become ready, and who has ended?"""
        for seat in self._seats:
            if seat.pid and not seat.is_ready and _is_told(seat.ready_pipe):
                seat.is_ready = True
                if seat.edition != self._edition:
                    seat.edition = self._edition
                    os.kill(seat.pid, signal.SIGHUP)
            if seat.pid:
                pid, status = os.waitpid(seat.pid, os.WNOHANG)
                if pid:
                    self._ended(seat, os.waitstatus_to_exitcode(status))
        self._all_were_ready = self._all_were_ready or all(seat.is_ready for seat in self._seats)
        if self._stop_until is not None and time.monotonic() > self._stop_until:
            self._tell_all(signal.SIGKILL)

    def _ended(self, seat: _Seat, code: int) -> None:
        mark_process_dead(seat.pid, self._folder)  # type: ignore[no-untyped-call]
        os.close(seat.ready_pipe)
        seat.pid, seat.is_ready = 0, False
        if self._stop_until is not None:
            self._failed = self._failed or code != 0
            return
        if not self._all_were_ready:  # it has said why
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
def _reserved(host: str, port: int) -> Iterator[int]:
    """The port, which workers may share; 0 has become a free one. Raises CannotStart where somebody else has it.

    The reservation is bound and doesn't listen, so that no connection goes there.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as alone:  # whoever shares the port already is somebody else
            alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            alone.bind(address)
            taken = alone.getsockname()
        reservation = socket.socket(family, kind, protocol)
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reservation.bind(taken)
    except OSError as error:
        raise CannotStart(f"can't listen on {host}:{port}, server.port: {error.strerror or error}") from error
    with reservation:
        yield taken[1]


def _is_told(pipe: int) -> bool:
    try:
        return bool(os.read(pipe, 1))
    except BlockingIOError:
        return False


def _log(level: str, event: str, **fields: object) -> None:
    """A line of the log, unless that would mean to wait: the supervisor waits for nobody."""
    moment = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    line = orjson.dumps({**fields, "event": event, "level": level, "timestamp": moment}) + b"\n"
    _, writable, _ = select.select([], [2], [], 0)
    if writable:
        os.write(2, line)
