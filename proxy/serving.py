"""Serving as a process: from a configuration to the exit code, with the signals that an operator sends.

SIGTERM and SIGINT: stop, a second one at once. SIGHUP: reload; before the start is over and during the stop there is
nothing to reload, so it is ignored. A worker may get SIGTERM twice, from its supervisor and from whoever tells all
processes: to it SIGINT alone means at once.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import click
import structlog

from proxy import logs
from proxy.background import Background, cancelled, kept_up
from proxy.errors import CannotStart
from proxy.files import open_as_many_files_as_may_be
from proxy.first_run import greeting
from proxy.reloading import Load, Loaded, Reloader
from proxy.server import Gateway

SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD}
"""Those that a supervisor waits for. Its workers begin with them blocked, until they can obey."""
METRICS_TURN = 5.0
"""Seconds between two looks at what is a state, for the metrics that several workers share."""
LOG_SECONDS = 2.0
"""Seconds for the rest of the log to be written at the end."""
_log = structlog.get_logger("ezat.server")


@dataclass(frozen=True, slots=True)
class Worker:
    """What a process knows of its place among several that serve one port; the first one serves the operator, too."""

    number: int
    port: int
    supervisor: int
    """The process that looks after them; what all have to do is told to it."""
    supervisor_pipe: int
    """Ends with that process."""
    tell_ready: Callable[[], object]
    tell_reloaded: Callable[[], object]
    """To be called when another configuration was taken over."""

    @property
    def is_first(self) -> bool:
        return self.number == 1


async def serve(loaded: Loaded, load: Load, worker: Worker | None = None) -> int:
    """Serve until SIGTERM or SIGINT; the exit code. ``load`` reads the configuration again, for a reload."""
    open_as_many_files_as_may_be()
    log = logs.set_up(pretty=logs.on_terminal(), worker=None if worker is None else worker.number)
    config, models, pipeline = loaded
    gateway = Gateway(
        config,
        models,
        pipeline,
        shared_port=None if worker is None else worker.port,
        has_admin=worker is None or worker.is_first,
    )
    gateway.metrics.lines_dropped = lambda: log.dropped
    gateway.metrics.counts_every_reload = worker is None or worker.is_first
    stop, tasks = asyncio.Event(), Background()

    def asked_to_stop(number: signal.Signals) -> None:
        if stop.is_set() and (worker is None or number == signal.SIGINT):
            gateway.stop_at_once()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, asked_to_stop, number)
    _on_hangup(_nothing)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    if worker is not None:
        asyncio.get_running_loop().add_reader(worker.supervisor_pipe, stop.set)
    try:
        if await _started(gateway, stop):
            _look_after(gateway, Reloader(gateway, load), tasks, worker)
            _greet(gateway, worker)
            await stop.wait()
        return 0
    except CannotStart as error:
        click.echo(f"the gateway can't start: {error}", err=True)
    except OSError as error:
        click.echo(f"the gateway can't start: {error.strerror or error}", err=True)
    except Exception as error:
        click.echo(f"the gateway can't start: {type(error).__name__}: {error}", err=True)
    finally:
        _on_hangup(_nothing)
        if worker is not None:
            asyncio.get_running_loop().remove_reader(worker.supervisor_pipe)
        await tasks.drain(0)
        await gateway.stop()
        log.close(LOG_SECONDS)
    return 1


async def exit_after(serving: Coroutine[Any, Any, int]) -> NoReturn:
    """End the process with what serving comes to, while signals are still handled: an event loop that is closed lets
    the next one end the process, and waits for tasks that don't let themselves be cancelled."""
    code = await serving
    with suppress(OSError):
        flush_output()
    os._exit(code)


async def _started(gateway: Gateway, stop: asyncio.Event) -> bool:
    """Whether it has started; not, where a stop was asked for meanwhile. Raises what ``Gateway.start`` does."""
    starting = asyncio.ensure_future(gateway.start())
    stopped = asyncio.ensure_future(stop.wait())
    await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not starting.done():
        await cancelled({starting})
    if not starting.done() or starting.cancelled():
        return False
    starting.result()
    return True


def _look_after(gateway: Gateway, reloader: Reloader, tasks: Background, worker: Worker | None) -> None:
    """What happens beside the requests: reloads, and with several workers the figures that they share."""

    async def reload() -> None:
        before = gateway.config
        await reloader.reload()
        if worker is not None and gateway.config is not before:
            worker.tell_reloaded()

    async def changed() -> None:
        if worker is None:
            await reloader.reload()
        else:
            os.kill(worker.supervisor, signal.SIGHUP)
            await reloader.note()

    _on_hangup(lambda: tasks.spawn(reload()))
    if worker is None or worker.is_first:
        tasks.spawn(kept_up("the watch of the files", lambda: reloader.watch(changed)))
    if gateway.admin is not None:
        gateway.admin.plan = reloader.plan
    if worker is not None:
        tasks.spawn(kept_up("the look at what is a state", lambda: _look_now_and_then(gateway)))


async def _look_now_and_then(gateway: Gateway) -> None:
    while True:
        gateway.look()
        await asyncio.sleep(METRICS_TURN)


def _greet(gateway: Gateway, worker: Worker | None) -> None:
    """Say what is there. With several workers the first one speaks for all; a token is shown by whoever has made it."""
    server, admin = gateway.config.server, gateway.admin
    if worker is not None:
        worker.tell_ready()
    lines = []
    if worker is None or worker.is_first:
        lines += [gateway.pipeline.described(), ""]
        lines.append(greeting(gateway.config, f"{_url(server.host, gateway.port)}{server.base_path}"))
    if admin is not None:
        lines.append(f"For the operator, with the admin token: {_url(server.admin.host, admin.port)}/metrics")
    if gateway.new_admin_token is not None:
        lines.append(f"The admin token, shown only this once: {gateway.new_admin_token}")
    with suppress(OSError):  # nobody reads it
        click.echo("\n".join(lines))
        flush_output()


def flush_output() -> None:
    """Let go out what was printed; it may be that there is no standard output."""
    if sys.stdout is not None:
        sys.stdout.flush()


def _url(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _on_hangup(act: Callable[[], object]) -> None:
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, act)


def _nothing() -> None:
    return
