"""The gateway that the clients are let loose on: the demo, under every model name that they were seen to send.

Tests of clients take it from here, not from ``conftest.py``: a client of another language is a process of its own,
and what it does is judged by what it prints and by the gateway's log.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.clients.conftest import demo_config
from tests.process import GatewayProcess, started_gateway

RECORDED_KEY = "ezat_sk_test"
"""The key that the clients were recorded with."""
RECORDED_NAMES = {"anthropic/claude-haiku-4-5": ["claude-haiku-5"]}
"""Names that clients were seen to send and that the demo doesn't know, by the model that answers to them here."""


def key_of(client: str) -> str:
    """The API key of a client's own, so that its requests can be told from others in the log."""
    return f"ezat_sk_{client.replace(' ', '_')}"


def clients_config(clients: Iterable[str] = ()) -> dict[str, Any]:
    """The configuration of the demo, with the names and the key of the recordings, and a key for each client."""
    config = demo_config()
    for model in config["models"]:
        model.setdefault("aliases", []).extend(RECORDED_NAMES.get(model["id"], []))
    auth = config["plugins"][0]["auth"]
    keys = {"recorded": RECORDED_KEY, **{client: key_of(client) for client in clients}}
    auth["keys"] += [{"name": name, "key": key, "organization": "demo"} for name, key in keys.items()]
    return config


@contextmanager
def clients_gateway(folder: Path, clients: Iterable[str] = ()) -> Iterator[GatewayProcess]:
    """The running gateway; its files stand in the folder."""
    with started_gateway(clients_config(clients), folder) as running:
        yield running
