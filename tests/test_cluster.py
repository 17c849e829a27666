"""Two gateways of config/cluster.yaml that are one to their clients, also when one of them and an upstream die.

How many conversations are held says ``EZAT_CONVERSATIONS``: 500 by default, so that it takes a busy machine little
more than a minute. Their names decide where they go, and all names are fixed, so each run deals them out alike.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest
from ruamel.yaml import YAML

from plugins.chat_completions import ChatCompletions
from proxy.config import load
from proxy.exchange import Key
from proxy.models import Model, ModelTable
from proxy.plugin import Route
from proxy.testing import ask, make_exchange
from proxy.upstream.choice import by_preference, conversation_name
from tests.conversations import Clients, Conversation, conversation_of
from tests.cuttable_upstream import OUTPUT_TOKENS, CuttableUpstream, answer_of
from tests.process import REPOSITORY, eventually, run
from tests.store import servers
from tests.store.gateways import INPUT_UNITS, OUTPUT_UNITS, PRICE, ledger, spent_units
from tests.store.processes import KillableGateway, begun

CONVERSATIONS = int(os.environ.get("EZAT_CONVERSATIONS", "500"))
TURNS = 5
TURN_OF_DEATH = 3
CLIENTS = 32
WEIGHTS = {"first": 1, "second": 2, "third": 3}
"""Of the deployments, one at each upstream."""
DYING = "second"
ORGANIZATION = "acme"
MUCH_USD = "1000000"
BUSY = CLIENTS // 4
"""Requests that a gateway is answering at least when it is killed."""
PATIENCE = 120.0
"""Seconds to wait for the middle; only a failure lasts that long."""
LONGEST_COOLING = 60.0
DEVIATIONS = 4
"""Standard deviations by which the conversations of a deployment may be more or fewer than its weight says."""


class Cluster(NamedTuple):
    """What runs, and who asks."""

    upstreams: Mapping[str, CuttableUpstream]
    gateways: Sequence[KillableGateway]
    clients: Clients
    model: Model
    store: str


@asynccontextmanager
async def cluster(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    """Two gateways of config/cluster.yaml, three upstreams, a PostgreSQL and a Redis."""
    with servers.postgres().lent_database() as store:
        servers.redis_server().empty()
        monkeypatch.setenv("EZAT_PORT", "0")
        monkeypatch.setenv("EZAT_STORE", store)
        monkeypatch.setenv("EZAT_LIMITER", servers.redis_server().url)
        async with AsyncExitStack() as stack:
            upstreams = {name: await stack.enter_async_context(CuttableUpstream(name)) for name in WEIGHTS}
            config = configured(upstreams)
            path = folder / "cluster.yaml"
            path.write_text(json.dumps(config))  # JSON is YAML
            key = await new_key(path)
            gateways = stack.enter_context(both_gateways(config, folder))
            unlimited = aiohttp.TCPConnector(limit=0)
            session = await stack.enter_async_context(aiohttp.ClientSession(connector=unlimited))
            [model] = ModelTable.from_settings(load(path).models)
            yield Cluster(upstreams, gateways, Clients(session, [each.url for each in gateways], key), model, store)


def configured(upstreams: Mapping[str, CuttableUpstream]) -> dict[str, Any]:
    """The file as it is, but for its upstreams and models."""
    config: dict[str, Any] = YAML(typ="safe").load(REPOSITORY / "config" / "cluster.yaml")
    config["upstreams"] = {name: {"base_url": each.url, "api_key": "secret"} for name, each in upstreams.items()}
    deployments = [{"upstream": name, "model": f"model-at-{name}", "weight": WEIGHTS[name]} for name in upstreams]
    model = {"id": "test/model", "aliases": ["model"], "max_output_tokens": 8192, "price": PRICE}
    config["models"] = [{**model, "deployments": deployments}]
    return config


@contextmanager
def both_gateways(config: Mapping[str, Any], folder: Path) -> Iterator[Sequence[KillableGateway]]:
    """Two with this configuration, ready."""
    with ExitStack() as stack:
        both = [begun(config, folder / name) for name in ("one", "two")]
        for gateway in both:
            stack.callback(gateway.stop)
        for gateway in both:
            gateway.wait_until_ready()
        yield both


async def new_key(config: Path) -> str:
    """A key as an operator makes it. Its limits and its organization's money are far off, but both must be counted."""
    for command in (
        ("orgs", "create", ORGANIZATION, "--credit", MUCH_USD, "--requests-per-minute", "1000000"),
        ("keys", "create", "clients", "--organization", ORGANIZATION, "--parallel-requests", "1000"),
    ):
        ended = await run("--config", str(config), *command)
        assert 0 == ended.code, ended.errors
    return ended.output.strip()


Orders = Mapping[int, Sequence[str]]
"""By conversation, the upstreams in the order in which it asks them."""


async def orders_of(conversations: Iterable[Conversation], model: Model) -> Orders:
    """What the rule of the choice says, without any gateway."""
    orders = {}
    for conversation in conversations:
        request = conversation.request(turn=1)
        key = Key("clients", "clients", ORGANIZATION)
        exchange = make_exchange(request.body, route=request.route, model=model, headers=request.headers, key=key)
        if request.route is Route.CHAT_COMPLETIONS:
            await ask(ChatCompletions(None), exchange)  # it reads prompt_cache_key
        preferred = by_preference(model.deployments, conversation_name(exchange))
        orders[conversation.number] = [deployment.upstream for deployment in preferred]
    return orders


async def take_turns(clients: Clients, conversations: Iterable[Conversation], turn: int) -> None:
    """The same turn of all conversations, so many at a time as there are clients."""
    waiting = iter(conversations)

    async def one_after_the_other() -> None:
        for conversation in waiting:
            await clients.take_turn(conversation, turn)

    async with asyncio.TaskGroup() as group:
        for _ in range(CLIENTS):
            group.create_task(one_after_the_other())


class Death(NamedTuple):
    """How things stood at the moment at which a gateway and an upstream died."""

    met: Mapping[str, int]
    """How many requests had reached each upstream."""
    waiting: frozenset[int]
    """The requests to the upstream, by way of the other gateway, of which it had answered nothing."""
    streaming: frozenset[int]
    """Those whose streams it had begun."""


async def death_in_the_middle(running: Cluster, answers: int) -> Death:
    """Kill a gateway and cut an upstream off, after so many answers, and while both have requests of every kind.

    The upstream hangs a moment before it dies, so that there are some, however few are asked in all."""
    clients, upstream, (doomed, other) = running.clients, running.upstreams[DYING], running.gateways

    def death() -> Death | None:
        elsewhere = clients.under_way[other.url]
        found = Death(
            {name: len(each.met) for name, each in running.upstreams.items()},
            frozenset(upstream.waiting & elsewhere),
            frozenset(upstream.streaming & elsewhere),
        )
        return found if len(clients.under_way[doomed.url]) >= BUSY and found.waiting and found.streaming else None

    await eventually(lambda: len(clients.answered) >= answers, PATIENCE)
    upstream.hangs = True
    found = await eventually(death, PATIENCE)
    assert found is not None
    doomed.kill()
    upstream.cut_off()
    return found


async def home_again(clients: Clients, conversation: Conversation, turn: int) -> int:
    """Go on with a conversation until the upstream that came back answers; the turn in which it did."""
    deadline = time.monotonic() + LONGEST_COOLING
    while not (await clients.take_turn(conversation, turn)).startswith(DYING):
        assert time.monotonic() < deadline, f"not at home after {LONGEST_COOLING:g} s"
        await asyncio.sleep(0.1)
        turn += 1
    return turn


def strays(orders: Orders, met: Mapping[str, Sequence[int]], living: Collection[str]) -> list[tuple[str, int]]:
    """The requests that reached another upstream than the first of their conversation's order that lives."""
    homes = {number: next(name for name in order if name in living) for number, order in orders.items()}
    return [(name, each) for name, numbers in met.items() for each in numbers if homes[conversation_of(each)] != name]


def judge_shares(orders: Orders) -> Counter[str]:
    """Each deployment has as many conversations as its weight says, within the bound."""
    counts = Counter(order[0] for order in orders.values())
    for name, weight in WEIGHTS.items():
        share = weight / sum(WEIGHTS.values())
        deviation = math.sqrt(len(orders) * share * (1 - share))
        assert counts[name] == pytest.approx(len(orders) * share, abs=DEVIATIONS * deviation)
    return counts


def judge_ledger(running: Cluster) -> int:
    """Each answer that a client saw whole has its row, and but for those that the killed gateway could not deliver any
    more there is no other; how many of these there are."""
    rows = {row["request_id"]: row for row in ledger(running.store)}
    seen = {answer.id: number for number, answer in running.clients.answered.items()}
    assert set() == seen.keys() - rows.keys(), "seen whole, but not in the ledger"
    assert seen == {id: rows[id]["input"] for id in seen}, "the row of another request"
    answers = {answer_of(rows[id]["deployment"].partition("/")[0], number) for id, number in seen.items()}
    assert answers == {answer.text for answer in running.clients.answered.values()}
    undelivered = [row["input"] for id, row in rows.items() if id not in seen]
    assert set() == set(undelivered) - running.clients.broken[running.gateways[0].url], "more rows than answers"
    assert len(undelivered) == len(set(undelivered))
    assert {"exact"} == {row["exactness"] for row in rows.values()}
    cost = sum(row["input"] * INPUT_UNITS + OUTPUT_TOKENS * OUTPUT_UNITS for row in rows.values())
    assert cost == sum(row["cost"] for row in rows.values()) == spent_units(running.store, ORGANIZATION)
    return len(undelivered)


def judge_places(running: Cluster, orders: Orders, death: Death) -> None:
    """Every request reached the first of its conversation's order that lived, and no other upstream."""
    before = {name: each.met[: death.met[name]] for name, each in running.upstreams.items()}
    after = {name: each.met[death.met[name] :] for name, each in running.upstreams.items()}
    assert [] == strays(orders, before, living=WEIGHTS)
    assert [] == strays(orders, after, living=WEIGHTS.keys() - {DYING})


def judge_losses(running: Cluster, conversations: Iterable[Conversation], death: Death) -> None:
    """Each turn was answered whole. Asked for again were only those that nobody could go on with: of the killed
    gateway, and the streams that the dead upstream had begun."""
    clients, (killed, other) = running.clients, running.gateways
    asked = {each.request(turn).number for each in conversations for turn in range(1, TURNS + 1)}
    assert asked == clients.answered.keys()
    assert 1 <= len(clients.broken[killed.url]) <= CLIENTS, "each connection breaks once at most"
    assert set() == clients.broken[other.url]
    assert set() == set(clients.interrupted) - death.streaming


async def hold(running: Cluster, conversations: Sequence[Conversation]) -> Death:
    """All five turns of all conversations, with the death in the middle."""
    for turn in range(1, TURN_OF_DEATH):
        await take_turns(running.clients, conversations, turn)
    async with asyncio.TaskGroup() as group:
        group.create_task(take_turns(running.clients, conversations, TURN_OF_DEATH))
        death = await death_in_the_middle(running, answers=round((TURN_OF_DEATH - 0.5) * len(conversations)))
    for turn in range(TURN_OF_DEATH + 1, TURNS + 1):
        await take_turns(running.clients, conversations, turn)
    return death


@pytest.mark.slow
async def test_two_gateways_are_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each conversation meets one deployment only, by whichever gateway it comes; a gateway and an upstream that die
    take no answer with them, move only the conversations of that upstream, and these go home when it is back."""
    conversations = [Conversation(number) for number in range(CONVERSATIONS)]
    async with cluster(tmp_path, monkeypatch) as running:
        clients, dying = running.clients, running.upstreams[DYING]
        orders = await orders_of(conversations, running.model)
        movers = [each for each in conversations if orders[each.number][0] == DYING]

        began = time.monotonic()
        death = await hold(running, conversations)
        took = time.monotonic() - began

        shares = judge_shares(orders)
        judge_places(running, orders, death)
        judge_losses(running, conversations, death)

        await dying.come_back()
        back, known = time.monotonic(), len(dying.met)
        turn = await home_again(clients, movers[0], TURNS + 1)
        waited = time.monotonic() - back
        await take_turns(clients, movers, turn + 1)

        at_home = [conversation_of(number) for number in dying.met[known:]]
        assert [movers[0].number] == at_home[:1], "the probe"
        assert [each.number for each in movers] == sorted(at_home[1:])
        undelivered = await asyncio.to_thread(judge_ledger, running)
    with capsys.disabled():
        print(
            f"\n{CONVERSATIONS} conversations of {TURNS} turns in {took:.0f} s: homes {dict(shares)}",
            f"{sum(map(len, clients.broken.values()))} connections and {len(clients.interrupted)} streams broken, "
            f"{len(death.waiting)} requests failed over",
            f"moved to {dict(Counter(orders[each.number][1] for each in movers))}, home after {waited:.1f} s",
            f"{len(clients.answered)} answers, {undelivered} more rows",
            sep="; ",
        )
