"""The demo gateway for the SDKs: ``config/demo.yaml`` as it is, with some further keys, one for each refusal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.process import REPOSITORY, GatewayProcess, started_gateway

ORGANIZATIONS = [{"name": "penniless", "balance_usd": 0}, {"name": "frozen", "suspended": True}]
KEYS = [
    {"name": "penniless", "key": "ezat_sk_penniless", "organization": "penniless"},
    {"name": "frozen", "key": "ezat_sk_frozen", "organization": "frozen"},
    {"name": "revoked", "key": "ezat_sk_revoked", "revoked": True},
    {"name": "haiku alone", "key": "ezat_sk_haiku", "models": ["anthropic/claude-haiku-4-5"]},
    {"name": "one a minute", "key": "ezat_sk_one_a_minute", "requests_per_minute": 1},
]


def demo_config() -> dict[str, Any]:
    """The shipped configuration of the demo, and the keys of these tests."""
    config: dict[str, Any] = YAML(typ="safe", pure=True).load(REPOSITORY / "config" / "demo.yaml")
    auth = config["plugins"][0]["auth"]
    auth["organizations"] += ORGANIZATIONS
    auth["keys"] += KEYS
    return config


@pytest.fixture(scope="session")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """The running demo."""
    with started_gateway(demo_config(), tmp_path_factory.mktemp("demo")) as running:
        yield running


@pytest.fixture(params=["plain", "async"])
def kind(request: pytest.FixtureRequest) -> str:
    """The two kinds of client that an SDK has."""
    return str(request.param)
