"""Gateways in processes of their own, on a store of the test's choice; they can be killed."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.process import REPOSITORY, RUN, GatewayProcess


class KillableGateway(GatewayProcess):
    """One running gateway."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        super().__init__(process, folder)
        self._child = process

    @property
    def pid(self) -> int:
        return self._child.pid

    def kill(self) -> None:
        """End it at once, without a chance to write anything."""
        self._child.send_signal(signal.SIGKILL)
        self._child.wait()


@contextmanager
def started(config: Mapping[str, Any], folder: Path) -> Iterator[KillableGateway]:
    """A gateway with exactly this configuration, ready; its log stands in the folder."""
    gateway = begun(config, folder)
    try:
        gateway.wait_until_ready()
        yield gateway
    finally:
        gateway.stop()


def begun(config: Mapping[str, Any], folder: Path) -> KillableGateway:
    """The same, which need not be ready yet."""
    folder.mkdir(exist_ok=True)
    path = folder / "gateway.yaml"
    path.write_text(json.dumps(config))  # JSON is YAML
    with (folder / "output").open("wb") as output, (folder / "log").open("wb") as log:
        command = [*RUN, "--config", str(path)]
        process = subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=output, stderr=log)
    return KillableGateway(process, folder)


@contextmanager
def two_gateways(config: Mapping[str, Any], folder: Path) -> Iterator[list[str]]:
    """The URLs of two gateways that share a store and a limiter; they start at the same time."""
    both = [begun(config, folder / name) for name in ("one", "two")]
    with ExitStack() as stack:
        for gateway in both:
            stack.callback(gateway.stop)
        for gateway in both:
            gateway.wait_until_ready()
        yield [gateway.url for gateway in both]
