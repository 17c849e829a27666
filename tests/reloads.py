"""A gateway whose files are changed while it serves, as an operator does it, and what it says of that."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tests.contract_plugins import Seen, ask_for, request_of
from tests.process import REPOSITORY, RUN, GatewayProcess, eventually

KEY = "ezat_sk_of-the-client-that-stays"
LEAVING_KEY = "ezat_sk_of-the-client-that-leaves"
UPSTREAM_KEY = "canary-key-of-the-upstream"
APPLIED = "the configuration was reloaded"
REFUSED = "the configuration was not reloaded, the present one stays"
UNCHANGED = "the configuration is as it was"
NOTICED = 10.0
"""Seconds in which a changed file must be noticed; usually it takes half of one."""
Entry = str | Mapping[str, Any]


def model(name: str = "test/model", *upstreams: str, **settings: Any) -> dict[str, Any]:
    """A model at these upstreams, in this order of priority; what stands behind the slash of its name is an alias."""
    deployments = [
        {"upstream": upstream, "model": f"model-at-{upstream}", "priority": number}
        for number, upstream in enumerate(upstreams or ("test",))
    ]
    usual = {"id": name, "aliases": [name.partition("/")[2]], "max_output_tokens": 8192, "price": "free"}
    return {**usual, "deployments": deployments, **settings}


def auth(*keys: Mapping[str, Any], organizations: Iterable[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """The plugin, with the key that stays, unless it is another here, and these."""
    stays = [] if any(key["name"] == "stays" for key in keys) else [{"name": "stays", "key": KEY}]
    return {"auth": {"keys": [*stays, *keys], "organizations": list(organizations)}}


def configured(
    upstream: str,
    *plugins: Entry,
    models: Any = None,
    upstreams: Mapping[str, Any] | None = None,
    server: Mapping[str, Any] | None = None,
    asks: Entry | None = None,
) -> dict[str, Any]:
    """A configuration whose usual model and upstream are called ``test``, with these plugins behind ``usage``.

    ``asks`` is its plugin auth. Ports and the store stay to be said.
    """
    return {
        "server": {"watch": False, "shutdown_timeout": 5, **(server or {})},
        "upstreams": {"test": {"base_url": upstream, "api_key": UPSTREAM_KEY}, **(upstreams or {})},
        "models": [model()] if models is None else models,
        "plugins": [asks or auth(), "rate_limit", "usage", *plugins, "chat_completions"],
    }


class Operated(GatewayProcess):
    """A running gateway, with its configuration file."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path, path: Path) -> None:
        super().__init__(process, folder)
        self.path = path

    def write(self, config: Mapping[str, Any]) -> None:
        """Write the configuration file in place."""
        self.path.write_text(self.text_of(config))

    def exchange(self, config: Mapping[str, Any]) -> None:
        """Put another configuration file in its place, as most editors do."""
        new = self.path.with_name("new")
        new.write_text(self.text_of(config))
        new.replace(self.path)

    def text_of(self, config: Mapping[str, Any]) -> str:
        """The configuration with the gateway's own ports and store, as YAML."""
        return text_of(completed(config, self._folder))

    @property
    def told(self) -> list[dict[str, Any]]:
        """What it has said of reloads."""
        lines = [line for line in self.written.splitlines() if '"ezat.reload"' in line or '"the configuration ' in line]
        return [json.loads(line) for line in lines if line.endswith("}")]

    async def next_told(self, known: int, seconds: float = NOTICED) -> dict[str, Any]:
        """The line behind so many that are known."""
        lines = await eventually(lambda: self.told[known:], seconds)
        return lines[0]

    async def hang_up(self) -> dict[str, Any]:
        """SIGHUP; what comes of it."""
        known = len(self.told)
        self.terminate(signal.SIGHUP)
        return await self.next_told(known)

    async def reload(self, config: Mapping[str, Any]) -> None:
        """Write the configuration and have it taken over. Raises AssertionError where it isn't."""
        self.write(config)
        line = await self.hang_up()
        assert line["event"] in (APPLIED, UNCHANGED), line

    async def ask(self, format: str = "messages", stream: bool = False, *, key: str = KEY, **fields: Any) -> Seen:
        """One request and its whole answer."""
        headers = {"authorization": f"Bearer {key}"}
        return await ask_for(self.url, format, stream, body=request_of(stream, **fields), headers=headers)

    @property
    def admin(self) -> str:
        """Where its admin listener is."""
        [url] = re.findall(r"with the admin token: (http://\S+)/metrics", self.written)
        return str(url)

    @property
    def admin_token(self) -> str:
        [token] = re.findall(r"shown only this once: (\S+)", self.written)
        return str(token)

    async def reloads(self) -> dict[str, int]:
        """Its metric: how many reloads came to what."""
        headers = {"authorization": f"Bearer {self.admin_token}"}
        async with aiohttp.ClientSession(headers=headers) as session, session.get(f"{self.admin}/metrics") as answer:
            text = await answer.text()
        found = re.findall(r'^ezat_reloads_total\{result="(\w+)"\} (\S+)$', text, re.MULTILINE)
        return {result: int(float(count)) for result, count in found}


def completed(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The configuration on free ports, with its store in the folder, where it says nothing else."""
    server = {"port": 0, "admin": {"port": 0}, **config["server"]}
    return {"store": f"sqlite:///{folder}/ezat.db", **config, "server": server}


def text_of(value: Any) -> str:
    """A value as YAML, which JSON is, in lines."""
    return json.dumps(value, indent=1)


@contextmanager
def operated(config: Mapping[str, Any], folder: Path, path: Path | None = None) -> Iterator[Operated]:
    """A gateway with this configuration, ready. ``path`` is a file that holds it already, complete."""
    with beginning(config, folder, path) as gateway:
        gateway.wait_until_ready()
        yield gateway


@contextmanager
def beginning(config: Mapping[str, Any], folder: Path, path: Path | None = None) -> Iterator[Operated]:
    """The same, which need not be ready yet."""
    if path is None:
        path = folder / "gateway.yaml"
        path.write_text(text_of(completed(config, folder)))
    with (folder / "output").open("wb") as output, (folder / "log").open("wb") as log:
        command = [*RUN, "--config", str(path)]
        process = subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=output, stderr=log)
    gateway = Operated(process, folder, path)
    try:
        yield gateway
    finally:
        gateway.stop()


def swap_link(link: Path, target: str) -> None:
    """Have a link point elsewhere from one moment to the next."""
    new = link.with_name(f"{link.name}.new")
    os.symlink(target, new)
    new.replace(link)


def lines_of(file: Path) -> Sequence[str]:
    """What a plugin has noted so far."""
    return file.read_text().splitlines() if file.exists() else []


async def noted(file: Path, line: str, seconds: float = NOTICED) -> None:
    """Wait until a plugin has noted this."""
    await eventually(lambda: line in lines_of(file), seconds)


async def ended(gateway: GatewayProcess, seconds: float) -> int | None:
    """Wait until a gateway has ended; its exit code."""
    await eventually(lambda: gateway.exit_code is not None, seconds)
    return gateway.exit_code


async def all_open(upstream: Any, number: int) -> None:
    """Wait until an upstream gives so many answers at the same time."""
    async with asyncio.timeout(NOTICED):
        while upstream.open < number:  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.002)
