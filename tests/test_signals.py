"""Signals at any moment of a process's life, standard output that nobody reads, and a stop that is announced first."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from proxy.testing import ScriptedUpstream, message_reply
from tests.process import REPOSITORY, RUN, GatewayProcess, eventually, started_gateway, written_config
from tests.store.gateways import KEY, ask, configured

pytestmark = pytest.mark.slow

EARLY = (0.1, 0.4, 0.8)
"""Seconds after the start of the process, which reads its code for more than one."""
DELAY = 1.0


def config_for(upstream: ScriptedUpstream, **server: Any) -> dict[str, Any]:
    return configured("unused", upstream.url, server={"shutdown_timeout": 5, **server})


@contextmanager
def begun(config: Path, folder: Path, **streams: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has just been started."""
    with (folder / "output").open("wb") as output, (folder / "log").open("wb") as log:
        files = {"stdout": output, "stderr": log, **streams}
        process = subprocess.Popen([*RUN, "--config", str(config)], cwd=REPOSITORY, stdin=subprocess.DEVNULL, **files)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("moment", EARLY)
async def test_a_stop_while_it_is_still_being_read(tmp_path: Path, moment: float) -> None:
    """A SIGTERM that comes before the gateway can obey is obeyed as soon as it can: exit code 0."""
    async with ScriptedUpstream() as upstream:
        with begun(written_config(config_for(upstream), tmp_path), tmp_path) as process:
            await asyncio.sleep(moment)
            process.send_signal(signal.SIGTERM)

            code = await asyncio.to_thread(process.wait, 20)

    assert 0 == code


async def test_a_reload_while_it_is_still_being_read(tmp_path: Path) -> None:
    """SIGHUP during the start ends nothing."""
    async with ScriptedUpstream() as upstream:
        with begun(written_config(config_for(upstream), tmp_path), tmp_path) as process:
            gateway = GatewayProcess(process, tmp_path)
            for moment in EARLY:
                await asyncio.sleep(moment / 2)
                process.send_signal(signal.SIGHUP)

            await asyncio.to_thread(gateway.wait_until_ready)

            gateway.stop()
    assert 0 == gateway.exit_code


async def test_signals_during_the_stop(tmp_path: Path) -> None:
    """Signals that come until the last moment change the exit code of a stop no more."""
    async with ScriptedUpstream() as upstream:
        with started_gateway(config_for(upstream), tmp_path) as gateway:
            gateway.terminate()
            while gateway.exit_code is None:
                await asyncio.sleep(0.02)
                for number in (signal.SIGHUP, signal.SIGTERM):
                    gateway.terminate(number)

    assert 0 == gateway.exit_code


@pytest.mark.parametrize("output", ["closed", "a pipe that nobody reads any more", "in Latin-1"])
async def test_an_output_that_takes_nothing_stops_no_gateway(
    tmp_path: Path, output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The greeting is a courtesy: the gateway serves, though it can't be written."""
    async with ScriptedUpstream() as upstream, aiohttp.ClientSession() as session:
        port = free_port()
        path = written_config(config_for(upstream, port=port), tmp_path)
        redirected = {"closed": ">&-", "a pipe that nobody reads any more": "| head -0", "in Latin-1": ""}[output]
        if output == "in Latin-1":
            monkeypatch.setenv("PYTHONIOENCODING", "latin-1")
        command = f"{' '.join(RUN)} --config {path} {redirected}"
        with (tmp_path / "output").open("wb") as told, (tmp_path / "log").open("wb") as log:
            shell = await asyncio.create_subprocess_exec(
                "sh", "-c", command, cwd=REPOSITORY, stdout=told, stderr=log, start_new_session=True
            )
        try:
            upstream.replies.append(message_reply())
            answer = await answered(session, f"http://127.0.0.1:{port}")
        finally:
            os.killpg(shell.pid, signal.SIGTERM)
            await asyncio.wait_for(shell.wait(), 20)

    assert answer.is_whole


async def answered(session: aiohttp.ClientSession, url: str) -> Any:
    """The answer as soon as somebody gives one."""
    deadline = time.monotonic() + 20
    while True:
        try:
            return await ask(session, url)
        except aiohttp.ClientConnectionError:
            assert time.monotonic() < deadline, "nobody answers"
            await asyncio.sleep(0.1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def test_a_stop_that_is_announced_first(tmp_path: Path) -> None:
    """With a delay the gateway is not ready at once, still answers new connections, and then takes no more."""
    async with ScriptedUpstream(message_reply()) as upstream:
        with started_gateway(config_for(upstream, shutdown_delay=DELAY), tmp_path) as gateway:
            asked_at = time.monotonic()
            gateway.terminate()
            async with aiohttp.ClientSession() as session:
                readiness = await status(session, f"{gateway.url}/readyz")
                while readiness == 200:
                    readiness = await status(session, f"{gateway.url}/readyz")
                answer = await ask(session, gateway.url, key=KEY)
            await eventually(lambda: gateway.exit_code is not None, 10)
            taken = time.monotonic() - asked_at

    assert (503, True) == (readiness, answer.is_whole)
    assert taken >= DELAY
    assert 0 == gateway.exit_code


async def test_a_second_signal_does_not_wait_for_the_delay(tmp_path: Path) -> None:
    """Whoever asks twice is in a hurry."""
    async with ScriptedUpstream() as upstream:
        with started_gateway(config_for(upstream, shutdown_delay=60), tmp_path) as gateway:
            gateway.terminate()
            await asyncio.sleep(0.2)
            gateway.terminate()

            await eventually(lambda: gateway.exit_code is not None, 10)

    assert 0 == gateway.exit_code


async def status(session: aiohttp.ClientSession, url: str) -> int:
    async with session.get(url, headers={"connection": "close"}) as answer:
        return answer.status
