"""Rows for the ledger, as tests need them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import uuid_utils

from proxy.store import Budget, UsageRow

NOVEMBER = 1_794_000_000.0  # 2026-11-06T20:00:00Z

ROW = UsageRow(
    request_id="",
    at=NOVEMBER,
    key_id="key-1",
    organization="acme",
    end_user=None,
    model="test/model",
    asked_model="model",
    deployment="up/model-at-upstream",
    stream=False,
    input=10,
    cache_read=0,
    cache_write_5m=0,
    cache_write_1h=0,
    output=2,
    thinking=0,
    cost=20,
    prices={"input": 1, "output": 5},
    exactness="exact",
    reason=None,
    raw={"input_tokens": 10, "output_tokens": 2},
)

KEY_BUDGET = Budget("key", "key-1")
ACME = Budget("organization", "acme")
CHARGED: Sequence[Budget] = (KEY_BUDGET, ACME)


def new_id() -> str:
    return str(uuid_utils.uuid7())


def row(**fields: Any) -> UsageRow:
    """A row of a request of its own."""
    return replace(ROW, **{"request_id": new_id(), **fields})


def limited(limit: int, name: str = "acme") -> Budget:
    """An organization's budget."""
    return Budget("organization", name, limit=limit)
