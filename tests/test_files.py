"""How many connections there is room for."""

from __future__ import annotations

import resource
import sys

import pytest

from proxy.files import NOT_FOR_CLIENTS, most_connections

LIMITS = {
    "the usual one": (1024, (1024 - NOT_FOR_CLIENTS) // 2),
    "hardly any": (8, 1),
    "none": (resource.RLIM_INFINITY, sys.maxsize),
}


@pytest.mark.parametrize(("limit", "expected"), LIMITS.values(), ids=LIMITS)
def test_room_for_connections(limit: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each client takes one file and its request another; some are kept for the gateway, and no limit is no limit."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))

    assert expected == most_connections()
