"""What recording costs: CPU time of the gateway's process per request, without usage, with it, and with a budget.

``python -m tests.store.measure_recording [REQUESTS]``. Client and upstream run in this process and don't count.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

from proxy.testing import ScriptedUpstream
from tests.store import servers
from tests.store.gateways import KEY, ask, configured, prepaid
from tests.store.processes import started

TOGETHER = 32
WARM_UP = 500
ROUNDS = 3
AUTH = {"keys": [{"name": "one", "key": KEY}]}


def cpu_seconds(pid: int) -> float:
    """User and system time of a process with all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def requests(url: str, number: int) -> None:
    left = iter(range(number))
    async with aiohttp.ClientSession() as session:

        async def some() -> None:
            for _ in left:
                assert (await ask(session, url)).status == 200

        await asyncio.gather(*(some() for _ in range(TOGETHER)))


async def measured(config: dict[str, Any], number: int) -> tuple[float, float]:
    """CPU microseconds and requests per second, the best of some rounds."""
    with tempfile.TemporaryDirectory() as folder, started(config, Path(folder)) as gateway:
        await requests(gateway.url, WARM_UP)
        found = []
        for _ in range(ROUNDS):
            before, at = cpu_seconds(gateway.pid), time.monotonic()
            await requests(gateway.url, number)
            spent = (cpu_seconds(gateway.pid) - before) / number * 1e6
            found.append((spent, number / (time.monotonic() - at)))
        return min(found)


async def main(number: int) -> None:
    async with ScriptedUpstream() as upstream:
        with tempfile.TemporaryDirectory() as folder:
            stores = {"SQLite": f"sqlite:///{folder}/ezat.db", "PostgreSQL": servers.postgres().database()}
            without = configured(stores["SQLite"], upstream.url, auth=AUTH)
            without["plugins"] = [
                each for each in without["plugins"] if not (isinstance(each, dict) and "usage" in each)
            ]
            cases = {"without usage": without}
            for name, store in stores.items():
                cases[f"with usage, {name}"] = configured(store, upstream.url, auth=AUTH)
                cases[f"with usage and a budget, {name}"] = configured(store, upstream.url, auth=prepaid(10**18))
            for name, config in cases.items():
                micros, rate = await measured(config, number)
                print(f"{name:42} {micros:7.0f} µs of CPU per request, {rate:6.0f} requests/s")


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 2000))
