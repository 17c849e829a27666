"""What a process takes: its memory and its processor time, as the kernel counts them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.process import GatewayProcess

MB = 2**20
_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")
_EVERY = 0.01


@dataclass
class Taken:
    """What a gateway took within a block."""

    memory: int = 0
    """The most bytes of memory beyond those that it had at the beginning."""
    seconds: float = 0
    """Of processor time."""


@asynccontextmanager
async def taken_by(gateway: GatewayProcess) -> AsyncIterator[Taken]:
    """Watches a gateway while the block runs; the result is whole behind it."""
    folder = Path("/proc", str(gateway._process.pid))
    taken, memory, seconds = Taken(), _resident(folder), _processor_seconds(folder)

    async def watch() -> None:
        while True:
            taken.memory = max(taken.memory, _resident(folder) - memory)
            await asyncio.sleep(_EVERY)

    watching = asyncio.create_task(watch())
    try:
        yield taken
    finally:
        watching.cancel()
        taken.memory = max(taken.memory, _resident(folder) - memory)
        taken.seconds = _processor_seconds(folder) - seconds


def _resident(folder: Path) -> int:
    return int((folder / "statm").read_text().split()[1]) * _PAGE


def _processor_seconds(folder: Path) -> float:
    fields = (folder / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS
