"""The gateways under attack: processes as an operator starts them, in front of an upstream of raw bytes.

They are shared, since an attack must leave nothing behind: after each test the same gateway has to be idle, alive and
without a broken line in its log, or the test that did it fails.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio

from tests.attacks.raw_client import CLIENT_KEY, GET_HEALTH, UPSTREAM_KEY, connected
from tests.attacks.raw_upstream import RawUpstream
from tests.process import GatewayProcess, eventually, started_gateway

SHORT = 0.5
"""Seconds of the time-outs of the hasty gateway."""
_BROKEN = ("exception", "Traceback", "never retrieved", "never awaited", "Unclosed", "unclosed")


def config_for(upstream: RawUpstream, *more: dict[str, Any], **server: Any) -> dict[str, Any]:
    """A gateway with all its plugins, and these, that asks this upstream, with these settings of the server."""
    return {
        "server": {"shutdown_timeout": 1, **server},
        "upstreams": {"raw": {"base_url": upstream.url, "api_key": UPSTREAM_KEY}},
        "models": [model("raw/model", "raw", aliases=["model"])],
        "plugins": [
            {"auth": {"keys": [{"name": "attacker", "key": CLIENT_KEY}]}},
            *("rate_limit", "usage", "field_refusal", "chat_completions"),
            *("image_fetcher", "cache_breakpoints", "reasoning", "sampling"),
            *more,
        ],
    }


def model(name: str, *upstreams: str, **more: Any) -> dict[str, Any]:
    """A model that runs at these upstreams, asked in this order."""
    deployments = [
        {"upstream": each, "model": "model-at-upstream", "priority": place} for place, each in enumerate(upstreams)
    ]
    return {"id": name, "max_output_tokens": 8192, "price": "free", "deployments": deployments, **more}


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_upstream() -> AsyncIterator[RawUpstream]:
    async with RawUpstream() as started:
        yield started


@pytest_asyncio.fixture(loop_scope="session")
async def upstream(shared_upstream: RawUpstream) -> AsyncIterator[RawUpstream]:
    """The upstream of the shared gateways, as if it were new; no answer is being given when the test is over."""
    shared_upstream.forget()
    yield shared_upstream
    shared_upstream.forget()
    await eventually(lambda: shared_upstream.playing == 0, 10)


@pytest.fixture(scope="session")
def closed_port() -> Iterator[int]:
    """A port that takes no connection, and that nobody else can have meanwhile."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield int(bound.getsockname()[1])


@pytest.fixture(scope="session")
def usual_gateway(
    shared_upstream: RawUpstream,
    closed_port: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[GatewayProcess]:
    config = config_for(shared_upstream)
    unreachable = {
        "refused": f"http://127.0.0.1:{closed_port}",
        "no-tls": shared_upstream.url.replace("http:", "https:"),
        "no-name": f"http://{'a' * 64}.invalid",  # too long a label: nobody is asked for it
    }
    config["upstreams"] |= {name: {"base_url": url, "api_key": UPSTREAM_KEY} for name, url in unreachable.items()}
    config["models"] += [model(f"gone/{name}", name) for name in unreachable]
    config["models"] += [model(f"gone/{name}-and-good", name, "raw") for name in unreachable]
    with started_gateway(config, tmp_path_factory.mktemp("usual")) as running:
        yield running


@pytest.fixture(scope="session")
def hasty_gateway(shared_upstream: RawUpstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    names = ("first_event", "idle", "request", "body", "keepalive")
    config = config_for(shared_upstream, **{f"{name}_timeout": SHORT for name in names})
    with started_gateway(config, tmp_path_factory.mktemp("hasty")) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="session")
async def gateway(usual_gateway: GatewayProcess) -> AsyncIterator[GatewayProcess]:
    """A gateway with the usual times, unharmed by the test."""
    async with unharmed(usual_gateway):
        yield usual_gateway


@pytest_asyncio.fixture(loop_scope="session")
async def hasty(hasty_gateway: GatewayProcess) -> AsyncIterator[GatewayProcess]:
    """A gateway with times of half a second, unharmed by the test."""
    async with unharmed(hasty_gateway):
        yield hasty_gateway


@asynccontextmanager
async def unharmed(gateway: GatewayProcess) -> AsyncIterator[None]:
    """Fails where the gateway is busy, dead or has written of something broken when the block is over."""
    before = len(gateway.written)
    yield
    async with connected(gateway) as client, asyncio.timeout(10):
        client.send(GET_HEALTH)
        assert 200 == (await client.answer()).status
    written = gateway.written[before:]
    assert [] == [word for word in _BROKEN if word in written], written
