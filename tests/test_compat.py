"""What becomes of each field of OpenAI's format: the page and the docs say the same, as they come from one table."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from plugins import BUNDLED
from plugins.chat_completions.fields import compat
from proxy.testing import running_gateway

Table = Mapping[str, Mapping[str, str]]

DOCS = Path(__file__).parents[1] / "docs" / "compatibility.md"
SECTIONS = {"fields": "Fields", "parts": "Parts of messages", "tools": "Tools"}
CLASSES = ("honoured", "refused", "ignored")
KEY = {"keys": [{"name": "test", "key": "ezat_sk_test"}]}


@pytest.fixture
async def page() -> AsyncIterator[aiohttp.ClientResponse]:
    """The answer of GET /api/compat, asked without a key of a gateway that asks for keys."""
    plugins = [(plugin, KEY) if name == "auth" else plugin for name, plugin in BUNDLED.items()]
    async with (
        running_gateway(plugins, server={"open": False}) as url,
        aiohttp.ClientSession() as session,
        session.get(url + "/api/compat") as response,
    ):
        yield response


async def test_the_page_is_there_without_a_key(page: aiohttp.ClientResponse) -> None:
    """GET /api/compat needs no key and shows the whole table."""
    assert (200, "application/json") == (page.status, page.content_type)
    assert compat() == await page.json()


async def test_the_page_has_its_shape(page: aiohttp.ClientResponse) -> None:
    """Fields, parts and tools each map a name to its class, with a message and a note where there are such."""
    shown: dict[str, dict[str, Any]] = await page.json()
    entries = [entry for table in shown.values() for entry in table.values()]

    assert set(SECTIONS) == set(shown)
    assert set() == {name for entry in entries for name in entry} - {"class", "message", "note"}
    assert set(CLASSES) == {entry["class"] for entry in entries}
    assert [] == [entry for entry in entries if not all(isinstance(text, str) and text for text in entry.values())]


async def test_what_is_refused_says_so_and_what_is_ignored_says_why(page: aiohttp.ClientResponse) -> None:
    """A refused entry has the message of its refusal, an ignored one its reason or what to use instead."""
    shown = await page.json()
    entries = {(part, name): entry for part, table in shown.items() for name, entry in table.items()}

    assert [] == [each for each, entry in entries.items() if entry["class"] == "refused" and "message" not in entry]
    assert [] == [each for each, entry in entries.items() if entry["class"] == "ignored" and "note" not in entry]


async def test_the_page_is_the_translators() -> None:
    """Without the translator there is nothing to show."""
    async with (
        running_gateway([BUNDLED["usage"]]) as url,
        aiohttp.ClientSession() as session,
        session.get(url + "/api/compat") as response,
    ):
        assert 404 == response.status


def rows(table: Table) -> list[str]:
    """The rows of a table in the docs, those of one class together."""
    by_class = sorted(table.items(), key=lambda row: CLASSES.index(row[1]["class"]))
    return [
        _row(f"`{name}`", entry["class"], _code(entry.get("message")), entry.get("note", ""))
        for name, entry in by_class
    ]


def _row(*cells: str) -> str:
    return "".join(f"| {cell} " if cell else "| " for cell in cells) + "|"


def _code(text: str | None) -> str:
    return f"`{text}`" if text else ""


@pytest.mark.parametrize("part", SECTIONS)
def test_the_docs_show_the_table(part: str) -> None:
    """docs/compatibility.md has a row for each entry, with its class, its refusal and its note, and no other row.

    After a change of the table, the rows that the failure shows belong into the page.
    """
    section = re.search(rf"^## {SECTIONS[part]}$(.*?)(?=^## |\Z)", DOCS.read_text(), re.MULTILINE | re.DOTALL)
    assert section
    found = [line for line in section[1].splitlines() if line.startswith("| `")]

    assert rows(compat()[part]) == found
