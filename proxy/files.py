"""How many files, connections among them, the process may have open."""

from __future__ import annotations

import resource
import sys
from contextlib import suppress

NOT_FOR_CLIENTS = 64
"""Files that are kept for the store, listeners and what else the gateway opens for itself."""


def open_as_many_files_as_may_be() -> None:
    """Raise the process's limit to what the system lets it have: 1024, the usual one, is for other programs."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def most_connections() -> int:
    """How many connections of clients there is room for, each with one to an upstream."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return sys.maxsize
    return max(1, (limit - NOT_FOR_CLIENTS) // 2)
