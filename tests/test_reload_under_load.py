"""Reloads while clients ask all the time: no request fails that would not have failed without them.

The clients are the two SDKs, which do not repeat anything here. What becomes of a request for the model that is removed
meanwhile depends on its moment: those that ended before its removal were answered, those that began after it are not.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import anthropic
import openai
import pytest

from tests.cuttable_upstream import CuttableUpstream, answer_of, question
from tests.noted_plugins import FAILING, FIRST, NOTED, SECOND
from tests.process import eventually
from tests.reloads import APPLIED, KEY, REFUSED, Operated, auth, configured, lines_of, model, operated
from tests.store.gateways import ledger

CLIENTS = 20
KEEP_ASKING = 0.3
"""Seconds for which the clients ask between two reloads, at least."""
UPSTREAM = "test"
FIRST_REQUEST = 1001
"""The requests are numbered from here, so that each is as long as any other."""


class Asked(NamedTuple):
    """One request, from its beginning to its end, and what came of it."""

    number: int
    model: str
    began: float
    ended: float
    outcome: str
    """`whole`, `404`, or what went wrong."""


class Removal(NamedTuple):
    """When a model was removed: the moments between which that happened."""

    after: float
    before: float


Ask = Callable[[int, str], Awaitable[str]]
"""Asks with this number for this model, and gives the text of the answer."""


def openai_plain(client: openai.AsyncOpenAI) -> Ask:
    async def ask(number: int, name: str) -> str:
        answer = await client.chat.completions.create(
            model=name, max_tokens=64, messages=[{"role": "user", "content": question(number)}]
        )
        assert answer.choices[0].finish_reason == "stop"
        return answer.choices[0].message.content or ""

    return ask


def openai_streamed(client: openai.AsyncOpenAI) -> Ask:
    async def ask(number: int, name: str) -> str:
        stream = await client.chat.completions.create(
            model=name, max_tokens=64, messages=[{"role": "user", "content": question(number)}], stream=True
        )
        choices = [choice async for chunk in stream for choice in chunk.choices]
        assert choices[-1].finish_reason == "stop"
        return "".join(choice.delta.content or "" for choice in choices)

    return ask


def messages_plain(client: anthropic.AsyncAnthropic) -> Ask:
    async def ask(number: int, name: str) -> str:
        answer = await client.messages.create(
            model=name, max_tokens=64, messages=[{"role": "user", "content": question(number)}]
        )
        assert answer.stop_reason == "end_turn"
        return "".join(block.text for block in answer.content if block.type == "text")

    return ask


def messages_streamed(client: anthropic.AsyncAnthropic) -> Ask:
    async def ask(number: int, name: str) -> str:
        async with client.messages.stream(
            model=name, max_tokens=64, messages=[{"role": "user", "content": question(number)}]
        ) as stream:
            answer = await stream.get_final_message()
        assert answer.stop_reason == "end_turn"
        return "".join(block.text for block in answer.content if block.type == "text")

    return ask


class Load:
    """Clients that ask on and on, until they are stopped."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._numbers = itertools.count(FIRST_REQUEST)
        self._stopped = False
        self.models = ["model", "model", "leaving"]
        """What is asked for, in turn."""
        self.asked: list[Asked] = []

    async def __aenter__(self) -> Load:
        self._stack = AsyncExitStack()
        chat = await self._stack.enter_async_context(
            openai.AsyncOpenAI(base_url=f"{self._url}/openai/v1", api_key=KEY, max_retries=0)
        )
        messages = await self._stack.enter_async_context(
            anthropic.AsyncAnthropic(base_url=self._url, api_key=KEY, max_retries=0)
        )
        ways = (openai_plain(chat), openai_streamed(chat), messages_plain(messages), messages_streamed(messages))
        self._tasks = [asyncio.create_task(self._ask_on(ways[number % 4])) for number in range(CLIENTS)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopped = True
        await asyncio.gather(*self._tasks)
        await self._stack.aclose()

    async def _ask_on(self, ask: Ask) -> None:
        while not self._stopped:
            number = next(self._numbers)
            name = self.models[number % len(self.models)]
            began = time.monotonic()
            try:
                text = await ask(number, name)
                outcome = "whole" if text == answer_of(UPSTREAM, number) else f"another text: {text}"
            except (openai.NotFoundError, anthropic.NotFoundError):
                outcome = "404"
            except (openai.APIError, anthropic.APIError, AssertionError) as error:
                outcome = f"{type(error).__name__}: {error}"
            self.asked.append(Asked(number, name, began, time.monotonic(), outcome))


def judged(asked: list[Asked], removal: Removal) -> Iterator[Asked]:
    """The requests that came to something else than they should have."""
    for each in asked:
        right = {"whole"}
        if each.model == "leaving" and each.ended > removal.after:
            right = {"404"} if each.began > removal.before else {"whole", "404"}
        if each.outcome not in right:
            yield each


async def reloaded(gateway: Operated, config: dict[str, Any], expected: str) -> Removal:
    """Write a configuration and wait until the watching gateway has judged it; the moments between which it did."""
    known, after = len(gateway.told), time.monotonic()
    gateway.write(config)
    line = await gateway.next_told(known, 30)
    before = time.monotonic()
    assert expected == line["event"], line
    await asyncio.sleep(KEEP_ASKING)
    return Removal(after, before)


@pytest.fixture
async def upstream() -> AsyncIterator[CuttableUpstream]:
    async with CuttableUpstream(UPSTREAM) as started:
        yield started


@pytest.mark.slow
async def test_no_request_fails_by_a_reload(tmp_path: Path, upstream: CuttableUpstream) -> None:
    """While clients of both formats ask, whole and streamed, plugins come, go and change places, a model is removed and
    one is added, and broken files are refused: every answer is whole, and each is in the ledger once."""
    notes = tmp_path / "notes"

    def config(*plugins: Any, models: tuple[str, ...] = ("model", "leaving"), **parts: Any) -> dict[str, Any]:
        named = [model(f"test/{name}") for name in models]
        return configured(upstream.url, *plugins, models=named, server={"watch": True}, **parts)

    noted = {NOTED: {"file": str(notes)}}
    with operated(config(FIRST, SECOND), tmp_path) as gateway:
        async with Load(gateway.url) as load:
            await eventually(lambda: len(load.asked) > CLIENTS, 30)
            await reloaded(gateway, config(FIRST, SECOND, noted), APPLIED)
            await reloaded(gateway, config(SECOND, noted, FIRST), APPLIED)
            await reloaded(gateway, config({FAILING: {"where": "start"}}, models=("none",)), REFUSED)
            removal = await reloaded(gateway, config(noted, SECOND, models=("model",)), APPLIED)
            await reloaded(gateway, {**config(), "plugins": "none"}, REFUSED)
            further = {"name": "further", "key": f"{KEY}-2"}
            await reloaded(gateway, config(noted, models=("model", "new"), asks=auth(further)), APPLIED)
            load.models.append("new")
            await reloaded(gateway, config(models=("new", "model")), APPLIED)
            await reloaded(gateway, config(FIRST, noted, models=("new", "model")), APPLIED)

        outcomes = Counter((each.model, each.outcome) for each in load.asked)
        rows = await asyncio.to_thread(ledger, f"sqlite:///{tmp_path}/ezat.db")
        lives = Counter(note.split()[0] for note in lines_of(notes))
        await eventually(lambda: Counter(note.split()[0] for note in lines_of(notes))["stop"] == lives["start"] - 1)

    whole = [each.number for each in load.asked if each.outcome == "whole"]
    assert [] == list(judged(load.asked, removal))
    assert {("model", "whole"), ("leaving", "whole"), ("leaving", "404"), ("new", "whole")} == outcomes.keys()
    assert sorted(whole) == sorted(row["input"] for row in rows)
    assert sorted(whole) == sorted(upstream.met)
    assert lives["start"] == lives["starting"]
