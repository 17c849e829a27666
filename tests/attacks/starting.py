"""Gateways in processes of their own, started under circumstances: an environment, few files, another clock; and many
starts that must fail, quickly: each is a fork of a process that has imported what ``run.py`` will.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.attacks.conftest import config_for
from tests.attacks.raw_client import CLIENT_KEY
from tests.attacks.raw_upstream import RawUpstream
from tests.process import REPOSITORY, RUN, START_SECONDS, Ended
from tests.store.processes import KillableGateway

PRICE = {"input": 1, "output": 5}
BALANCE_UNITS = 10**15
"""What the organization of the client has paid in."""
Entry = str | Mapping[str, Any]


def prepaid_config(upstream: RawUpstream, folder: Path, *more: Entry, **server: Any) -> dict[str, Any]:
    """A gateway whose client pays, on free ports, with its store in the folder, and with these further plugins."""
    config = config_for(upstream, **server)
    config["server"] = {"port": 0, "admin": {"port": 0}, **config["server"]}
    config["store"] = f"sqlite:///{folder}/ezat.db"
    for each in config["models"]:
        each["price"] = PRICE
    organization = {"name": "acme", "balance_usd": BALANCE_UNITS // 10**12}
    key = {"name": "attacker", "key": CLIENT_KEY, "organization": "acme"}
    config["plugins"][0] = {"auth": {"organizations": [organization], "keys": [key]}}
    config["plugins"] += more
    return config


@contextmanager
def gate() -> Iterator[asyncio.Event]:
    """What steps of an upstream may wait for. It opens in the end: an upstream that still waits would never end."""
    opened = asyncio.Event()
    try:
        yield opened
    finally:
        opened.set()


@contextmanager
def started(
    config: Mapping[str, Any],
    folder: Path,
    environ: Mapping[str, str] | None = None,
    *,
    files: int | None = None,
    most_files: int | None = None,
) -> Iterator[KillableGateway]:
    """A gateway with exactly this configuration, ready. ``files`` is how many it may have open at first, ``most_files``
    how many it may ask for."""
    gateway = begun(config, folder, environ)
    if files is not None:
        _, most = resource.prlimit(gateway.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(gateway.pid, resource.RLIMIT_NOFILE, (files, most_files or most))
    try:
        gateway.wait_until_ready()
        yield gateway
    finally:
        gateway.stop()


def begun(config: Mapping[str, Any], folder: Path, environ: Mapping[str, str] | None = None) -> KillableGateway:
    """The same, which need not be ready yet."""
    folder.mkdir(exist_ok=True)
    path = folder / "gateway.yaml"
    path.write_text(json.dumps(config))  # JSON is YAML
    with (folder / "output").open("wb") as output, (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*RUN, "--config", str(path)],
            cwd=REPOSITORY,
            env={**os.environ, **(environ or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=log,
        )
    return KillableGateway(process, folder)


_EACH = """
import gc, os, runpy, sys
import plugins, proxy.command
gc.freeze()
for folder in sys.argv[1:]:
    child = os.fork()
    if not child:
        for name, number in (("output", 1), ("errors", 2)):
            os.dup2(os.open(f"{folder}/{name}", os.O_CREAT | os.O_WRONLY), number)
        sys.argv = ["run.py", "--config", f"{folder}/gateway.yaml"]
        runpy.run_path("run.py", run_name="__main__")
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with open(f"{folder}/code", "w") as file:
        file.write(str(code))
"""


def run_each(folders: Iterable[Path]) -> list[Ended]:
    """``run.py`` with the ``gateway.yaml`` of each folder, one after the other. Each has to end by itself."""
    known = [*folders]
    command = [sys.executable, "-c", _EACH, *map(str, known)]
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    subprocess.run(command, cwd=REPOSITORY, env=environ, timeout=START_SECONDS, check=True)
    return [
        Ended(int((each / "code").read_text()), (each / "output").read_text(), (each / "errors").read_text())
        for each in known
    ]
