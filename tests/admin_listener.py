"""A gateway's admin listener as an operator uses it, with the address and the token that the gateway printed."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from proxy.admin import RENDERED_FOR
from tests.process import GatewayProcess

Labels = frozenset[tuple[str, str]]
Figures = Mapping[tuple[str, Labels], float]
"""By the name of a series and its labels, what it is."""

PATIENCE = 15.0
_URL = re.compile(r"^For the operator, with the admin token: (\S+)/metrics$", re.MULTILINE)
_TOKEN = re.compile(r"^The admin token, shown only this once: (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class AdminListener:
    """Where it is, and what it asks for."""

    url: str
    token: str

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.token}"}

    async def text(self) -> str:
        """What a scraper gets. Raises aiohttp.ClientError."""
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENCE)) as session,
            session.get(f"{self.url}/metrics", headers=self.headers, raise_for_status=True) as answer,
        ):
            return await answer.text()

    async def figures(self) -> Figures:
        """The figures of now, or of a second ago at most."""
        return figures_of(await self.text())

    async def present(self) -> Figures:
        """Those of now, for which the old ones have to be over."""
        await asyncio.sleep(RENDERED_FOR + 0.05)
        return await self.figures()

    async def once(self, holds: Callable[[Figures], Any], seconds: float = PATIENCE) -> Figures:
        """The figures as soon as they are so. Raises AssertionError where they don't become so."""
        deadline = time.monotonic() + seconds
        while not holds(found := await self.figures()):
            assert time.monotonic() < deadline, f"not within {seconds:g} s: {dict(found)}"
            await asyncio.sleep(0.1)
        return found


def admin_of(gateway: GatewayProcess, token: str | None = None) -> AdminListener:
    """The one that the gateway printed last; its token where this start has made it."""
    written = gateway.written
    return AdminListener(_URL.findall(written)[-1], token or tokens_in(written)[0])


def tokens_in(written: str) -> list[str]:
    """Every token that a gateway has shown."""
    return _TOKEN.findall(written)


def figures_of(text: str) -> Figures:
    """Read by Prometheus' own parser."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def figure(figures: Figures, name: str, **labels: str) -> float:
    """One of them. Raises KeyError where there is none."""
    return figures[name, frozenset(labels.items())]


def total(figures: Figures, name: str, **labels: str) -> float:
    """The sum of all series of a name with these labels among theirs."""
    wanted = frozenset(labels.items())
    return sum(value for (each, found), value in figures.items() if each == name and wanted <= found)


def labels_of(figures: Figures, names: Iterable[str]) -> set[tuple[str, Labels]]:
    """The series of these names."""
    wanted = set(names)
    return {(name, labels) for name, labels in figures if name in wanted}
