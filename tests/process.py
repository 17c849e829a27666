"""A gateway in a process of its own, started as an operator starts it, and judged from outside.

What it writes goes to files, not to pipes: a pipe that nobody reads stops a process as soon as it is full.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

REPOSITORY = Path(__file__).parents[1]
RUN = [sys.executable, str(REPOSITORY / "run.py")]
START_SECONDS = 30.0
STOP_SECONDS = 15.0
_GREETING = "EZAT Router listens on "


class GatewayProcess:
    """One running gateway; ``started_gateway`` makes it."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self._process = process
        self._folder = folder
        self.url = ""
        """Where it listens, such as http://127.0.0.1:40000."""

    @property
    def host(self) -> str:
        return self.url.removeprefix("http://").rpartition(":")[0]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def written(self) -> str:
        """Everything that it has written so far, greeting and log."""
        return self._output() + self._log()

    @property
    def stored(self) -> str:
        """Its database with what belongs to it, byte for byte."""
        return "".join(path.read_bytes().decode("latin-1") for path in sorted(self._folder.glob("ezat.db*")))

    @property
    def log_lines(self) -> list[dict[str, Any]]:
        """Its log so far. Raises ValueError for a line that is no JSON object."""
        whole, _, _ = self._log().rpartition("\n")
        lines = [json.loads(line) for line in whole.splitlines()]
        if not all(isinstance(line, dict) for line in lines):
            raise ValueError("a line of the log is no JSON object")
        return lines

    def requests(self, **fields: Any) -> list[dict[str, Any]]:
        """The log's lines of requests that have these fields."""
        lines = [line for line in self.log_lines if line["event"] == "request"]
        return [line for line in lines if all(line.get(name) == value for name, value in fields.items())]

    def terminate(self, by: signal.Signals = signal.SIGTERM) -> None:
        """Ask it to stop, as an operator does."""
        self._process.send_signal(by)

    @property
    def exit_code(self) -> int | None:
        """How it ended; None while it runs."""
        return self._process.poll()

    def wait_until_ready(self) -> None:
        """Wait for the address in its greeting, and for /healthz. Raises AssertionError where it doesn't start."""
        deadline = time.monotonic() + START_SECONDS
        while not self._is_ready():
            assert self.exit_code is None, f"the gateway ended with {self.exit_code}:\n{self.written}"
            assert time.monotonic() < deadline, f"the gateway does not start:\n{self.written}"
            time.sleep(0.02)

    def stop(self) -> None:
        """End it, by force where it does not end by itself; that is a failure."""
        if self.exit_code is not None:
            return
        self.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise AssertionError(f"the gateway does not stop:\n{self.written}") from None

    def _is_ready(self) -> bool:
        _, found, rest = self._output().partition(_GREETING)
        if not found or "\n" not in rest:
            return False
        self.url = rest.partition("\n")[0]
        try:
            with urllib.request.urlopen(f"{self.url}/healthz", timeout=START_SECONDS) as answer:
                return bool(answer.status == 200)
        except urllib.error.URLError:
            return False

    def _output(self) -> str:
        return (self._folder / "output").read_text(errors="replace")

    def _log(self) -> str:
        return (self._folder / "log").read_text(errors="replace")


@contextmanager
def started_gateway(config: Mapping[str, Any], folder: Path) -> Iterator[GatewayProcess]:
    """A gateway with this configuration, on free ports, ready; its files stand in the folder."""
    with (folder / "output").open("wb") as output, (folder / "log").open("wb") as log:
        command = [*RUN, "--config", str(written_config(config, folder))]
        process = subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=output, stderr=log)
    gateway = GatewayProcess(process, folder)
    try:
        gateway.wait_until_ready()
        yield gateway
    finally:
        gateway.stop()


def written_config(config: Mapping[str, Any], folder: Path) -> Path:
    """A file with this configuration, its store in the folder, and on free ports where it names none."""
    server = {"port": 0, "admin": {"port": 0}, **config.get("server", {})}
    whole = {**config, "store": f"sqlite:///{folder}/ezat.db", "server": server}
    path = folder / "gateway.yaml"
    path.write_text(json.dumps(whole))  # JSON is YAML
    return path


class Ended(NamedTuple):
    """How a command ended, and what it said."""

    code: int | None
    output: str
    errors: str


async def run(*arguments: str) -> Ended:
    """``run.py`` with these arguments, to its end."""
    process = await asyncio.create_subprocess_exec(
        *RUN, *arguments, cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        async with asyncio.timeout(START_SECONDS):
            output, errors = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.communicate()
        raise
    return Ended(process.returncode, output.decode(), errors.decode())


async def eventually(condition: Callable[[], T], seconds: float = 5.0) -> T:
    """What the condition gives, as soon as that is true. Raises AssertionError where it is not in time."""
    deadline = time.monotonic() + seconds
    while True:
        result = condition()
        if result:
            return result
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        await asyncio.sleep(0.01)
