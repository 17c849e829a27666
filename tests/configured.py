"""A gateway in the test's own process, with a configuration of the test's choice, in front of scripted upstreams."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from plugins import BUNDLED
from proxy.config import load
from proxy.loading import build
from proxy.models import ModelTable
from proxy.server import Gateway
from proxy.testing import Reply, ScriptedUpstream
from tests.process import written_config

AT_UPSTREAM = "model-at-upstream"
NAMES = ("first", "second", "third")
"""Of upstreams, in the order of their priorities."""
Upstreams = Mapping[str, Mapping[str, Any]]


def config_for(
    upstreams: Upstreams,
    deployments: Sequence[Mapping[str, Any]] = (),
    server: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A configuration of one model, ``test/model``, deployed at each upstream, in this order of priority.

    ``deployments`` says it otherwise, ``server`` is laid over its settings.
    """
    in_order = [{"upstream": name, "model": AT_UPSTREAM, "priority": number} for number, name in enumerate(upstreams)]
    return {
        "server": {"open": True, **(server or {})},
        "upstreams": upstreams,
        "models": [
            {
                "id": "test/model",
                "aliases": ["model"],
                "max_output_tokens": 8192,
                "price": "free",
                "deployments": list(deployments) or in_order,
            }
        ],
        "plugins": ["chat_completions"],
    }


@asynccontextmanager
async def configured_gateway(config: Mapping[str, Any], folder: Path) -> AsyncIterator[str]:
    """A running gateway with this configuration, whose files stand in the folder; its URL, without a base path."""
    loaded = load(written_config(config, folder), {})
    models = ModelTable.from_settings(loaded.models)
    gateway = Gateway(loaded, models, build(loaded, models, BUNDLED))
    try:
        await gateway.start()
        yield f"http://127.0.0.1:{gateway.port}"
    finally:
        await gateway.stop()


class World(NamedTuple):
    """A gateway and its upstreams, in the order of their priorities."""

    url: str
    upstreams: Sequence[ScriptedUpstream]

    @property
    def asked(self) -> list[int]:
        """How many requests each upstream got."""
        return [len(upstream.received) for upstream in self.upstreams]


@asynccontextmanager
async def world(
    folder: Path, *replies: Sequence[Reply], options: Mapping[str, Mapping[str, Any]] | None = None, **server: Any
) -> AsyncIterator[World]:
    """One upstream for each list of replies; ``options`` are laid over the deployments at these upstreams."""
    async with AsyncExitStack() as stack:
        upstreams = [await stack.enter_async_context(ScriptedUpstream(*each)) for each in replies]
        urls = {name: {"base_url": upstream.url} for name, upstream in zip(NAMES, upstreams, strict=False)}
        deployments = [
            {"upstream": name, "model": f"{AT_UPSTREAM}-{name}", "priority": number, **(options or {}).get(name, {})}
            for number, name in enumerate(urls)
        ]
        config = config_for(urls, deployments, server=server)
        yield World(await stack.enter_async_context(configured_gateway(config, folder)), upstreams)
