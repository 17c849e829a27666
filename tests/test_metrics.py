"""What a gateway counts and measures, judged from outside: after requests that are known, by Prometheus' own parser."""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
import sqlite3
import string
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from proxy.metrics import METRICS
from proxy.testing import CUT, Reply, ScriptedUpstream, message_reply, stream_reply, text_events
from proxy.upstream.client import VERSION
from tests.admin_listener import AdminListener, Figures, admin_of, figure, labels_of, total
from tests.process import GatewayProcess, eventually, started_gateway
from tests.store.gateways import (
    INPUT_UNITS,
    KEY,
    OUTPUT_UNITS,
    PATHS,
    PRICE,
    body,
    configured,
    gated_stream,
    ledger,
)
from tests.worker_plugins import SLOW, SLOW_SECONDS

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

CHAT, MESSAGES, COUNT = PATHS["openai"], PATHS["messages"], "/v1/messages/count_tokens"
PATIENCE = 15.0
FOREVER = 60.0
RANDOM_REQUESTS = 10_000
UNITS_PER_USD = 10**12
AUTH = {
    "keys": [
        {"name": "one", "key": KEY},
        {"name": "rare", "key": "ezat_sk_rare", "requests_per_minute": 1},
    ]
}
SPARE = {"model": "spare/model", "upstream": "first", "deployment": "model-at-first"}


def config_for(
    upstream: ScriptedUpstream, *plugins: str, deployments: Iterable[str] = ("first", "second")
) -> dict[str, Any]:
    """A gateway of two models: one at one upstream, and one at several, all of which are the same server."""
    config = configured("", upstream.url, auth=AUTH, first=plugins, server={"watch": False, "shutdown_timeout": 1})
    config["upstreams"].update({name: {"base_url": upstream.url} for name in ("first", "second")})
    at = [
        {"upstream": name, "model": f"model-at-{name}", "priority": number} for number, name in enumerate(deployments)
    ]
    config["models"].append({"id": "spare/model", "max_output_tokens": 8192, "price": PRICE, "deployments": at})
    return config


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_upstream() -> AsyncIterator[ScriptedUpstream]:
    async with ScriptedUpstream() as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def upstream(shared_upstream: ScriptedUpstream) -> ScriptedUpstream:
    """The upstream of the shared gateway, as if it were new."""
    await eventually(lambda: shared_upstream.open == 0)
    shared_upstream.replies.clear()
    shared_upstream.received.clear()
    return shared_upstream


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gateway")


@pytest.fixture(scope="module")
def gateway(shared_upstream: ScriptedUpstream, folder: Path) -> Iterator[GatewayProcess]:
    with started_gateway(config_for(shared_upstream, SLOW), folder) as running:
        yield running


@pytest.fixture
def admin(gateway: GatewayProcess) -> AdminListener:
    return admin_of(gateway)


async def ask(
    gateway: GatewayProcess, path: str = MESSAGES, key: str | None = KEY, *, method: str = "POST", **fields: Any
) -> int:
    """One request, read to its end; its status. Fields that begin with ``x_`` are headers."""
    headers = {name.replace("_", "-"): fields.pop(name) for name in tuple(fields) if name.startswith("x_")}
    headers |= {} if key is None else {"x-api-key": key}
    sent = body(**fields) if method == "POST" else None
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENCE)) as session,
        session.request(method, gateway.url + path, headers=headers, json=sent) as answer,
    ):
        await answer.read()
        return answer.status


async def leave_in_the_middle(gateway: GatewayProcess) -> None:
    """A stream that its client leaves after the first text."""
    async with (
        aiohttp.ClientSession() as session,
        session.post(gateway.url + MESSAGES, json=body(stream=True), headers={"x-api-key": KEY}) as answer,
    ):
        await answer.content.readuntil(b"content_block_delta")


def error_reply(status: int, kind: str, **headers: str) -> Reply:
    error = {"type": "error", "error": {"type": kind, "message": "so it is"}}
    return Reply([json.dumps(error).encode()], status=status, headers=headers)


# A known mix of requests


RICH = {
    "input_tokens": 3,
    "output_tokens": 5,
    "cache_read_input_tokens": 100,
    "cache_creation": {"ephemeral_5m_input_tokens": 10, "ephemeral_1h_input_tokens": 20},
}


async def ask_the_mix(gateway: GatewayProcess, upstream: ScriptedUpstream) -> list[int]:
    """Requests of every kind; their statuses."""
    statuses: list[int] = []

    async def one(reply: Reply | None, **request: Any) -> None:
        upstream.replies.extend([reply] if reply else [])
        statuses.append(await ask(gateway, **request))

    await one(error_reply(500, "api_error"))
    await one(error_reply(401, "authentication_error"))
    await one(error_reply(529, "overloaded_error"))
    await one(error_reply(400, "invalid_request_error"))
    await one(stream_reply([*text_events("Hello.", stop_reason=None), CUT]), stream=True)
    upstream.replies.append(stream_reply([*text_events("Hello.", stop_reason=None), FOREVER]))
    await leave_in_the_middle(gateway)
    await eventually(lambda: upstream.open == 0)
    await one(message_reply())
    await one(stream_reply(text_events("Hello.")), stream=True)
    await one(message_reply(), path=CHAT)
    await one(stream_reply(text_events("Hello.")), path=CHAT, stream=True)
    await one(message_reply(usage=RICH))
    await one(Reply([b'{"input_tokens": 5}']), path=COUNT)
    await one(None, path=CHAT, n=2)
    await one(None, model="nobody/knows")
    await one(None, key=None)
    await one(message_reply(), key="ezat_sk_rare")
    await one(None, key="ezat_sk_rare")
    await one(None, path="/nowhere", method="GET")
    await one(None, path=MESSAGES, method="GET")
    await one(None, path="/healthz", method="GET")
    return statuses


STATUSES = [500, 500, 529, 400, 200, 200, 200, 200, 200, 200, 200, 400, 404, 401, 200, 429, 404, 405, 200]

REQUESTS = {
    ("messages", "test/model", "failed", "500"): 3,
    ("messages", "test/model", "failed", "529"): 1,
    ("messages", "test/model", "failed", "400"): 1,
    ("messages", "test/model", "abandoned", "0"): 1,
    ("messages", "test/model", "completed", "200"): 4,
    ("chat_completions", "test/model", "completed", "200"): 2,
    ("count_tokens", "test/model", "completed", "200"): 1,
    ("chat_completions", "test/model", "failed", "400"): 1,
    ("messages", "none", "failed", "404"): 1,
    ("messages", "none", "failed", "401"): 1,
    ("messages", "none", "failed", "429"): 1,
    ("none", "none", "failed", "404"): 1,
    ("none", "none", "failed", "405"): 1,
}
ERRORS = {
    ("messages", "internal"): 3,
    ("messages", "overloaded"): 1,
    ("messages", "invalid_request"): 1,
    ("chat_completions", "invalid_request"): 1,
    ("messages", "model_not_found"): 1,
    ("messages", "authentication"): 1,
    ("messages", "rate_limit"): 1,
    ("none", "path_not_found"): 1,
    ("none", "method_not_allowed"): 1,
}
TOKENS = {
    # seven answers that count 12 and 7, of which one was cut and one was left, and the rich one
    ("test/model", "input"): 7 * 12 + 3,
    ("test/model", "output"): 7 * 7 + 5,
    ("test/model", "cache_read"): 100,
    ("test/model", "cache_write_5m"): 10,
    ("test/model", "cache_write_1h"): 20,
}
COST_UNITS = 6 * (12 * INPUT_UNITS + 7 * OUTPUT_UNITS) + (
    3 * INPUT_UNITS + 5 * OUTPUT_UNITS + 100 * INPUT_UNITS // 10 + 10 * INPUT_UNITS * 5 // 4 + 20 * INPUT_UNITS * 2
)
"""All but the one that was cut, which is a failure and costs nothing."""
CALLS = {
    ("auth", "on_headers"): 17,
    ("rate_limit", "on_headers"): 16,
    ("usage", "on_headers"): 14,
    ("usage", "on_request"): 13,
    ("field_refusal", "on_request"): 3,
    ("chat_completions", "on_request"): 2,
    ("rate_limit", "on_send"): 13,
    ("usage", "on_send"): 12,
    ("chat_completions", "on_answer"): 1,
    ("chat_completions", "on_event"): 6,
    ("usage", "on_complete"): 6,
}
FIRST_EVENTS = {("messages", "test/model"): 3, ("chat_completions", "test/model"): 1}
FAILURES = {("up", "internal", "no"): 1, ("up", "internal", "yes"): 1, ("up", "overloaded", "no"): 1}
DEPLOYMENTS = [
    ("test/model", "up", "model-at-upstream"),
    ("spare/model", "first", "model-at-first"),
    ("spare/model", "second", "model-at-second"),
]


def expected_figures() -> dict[str, Any]:
    """Every series of every family, but for times."""
    whole: dict[tuple[str, ...], float] = {}
    for (route, model, _, _), number in REQUESTS.items():
        if route != "none":
            whole[route, model] = whole.get((route, model), 0) + number
    return {
        "ezat_requests_total": REQUESTS,
        "ezat_errors_total": ERRORS,
        "ezat_tokens_total": TOKENS,
        "ezat_cost_usd_total": {("test/model",): pytest.approx(COST_UNITS / UNITS_PER_USD, rel=1e-12)},
        "ezat_first_event_seconds_count": FIRST_EVENTS,
        "ezat_request_seconds_count": whole,
        "ezat_plugin_calls_total": CALLS,
        "ezat_upstream_failures_total": FAILURES,
        "ezat_reloads_total": {("applied",): 0, ("refused",): 0, ("unchanged",): 0},
        "ezat_log_lines_dropped_total": {(): 0},
        "ezat_open_streams": {(): 0},
        "ezat_running_requests": {(): 0},
        "ezat_body_bytes": {(): 0},
        "ezat_deployment_state": dict.fromkeys(DEPLOYMENTS, 1),
        "ezat_deployment_running": dict.fromkeys(DEPLOYMENTS, 0),
        "ezat_ledger_waiting": {(): 0},
        "ezat_ledger_lag_seconds": {(): 0},
        "ezat_store_ready": {(): 1},
        "ezat_build_info": {(VERSION,): 1},
    }


TIMES = ("_seconds_sum", "_seconds_bucket", "ezat_plugin_seconds_total")


def by_family(figures: Figures) -> dict[str, dict[tuple[str, ...], float]]:
    """All figures of ours that are no times, by name and the values of their labels in their order."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for (name, labels), value in figures.items():
        if name.startswith("ezat_") and not name.endswith(TIMES):
            order = METRICS[name.removesuffix("_count")].labels
            values = dict(labels)
            found.setdefault(name, {})[tuple(values.pop(label) for label in order)] = value
            assert {} == values, name
    return found


async def test_after_a_known_mix_every_figure_is_exact(tmp_path: Path) -> None:
    """Both formats, plain and streamed, refused, failed, cut, left: each is counted once, where it belongs, with the
    ledger's cost; and when all is over nothing is under way."""
    async with ScriptedUpstream() as upstream:
        with started_gateway(config_for(upstream), tmp_path) as gateway:
            admin = admin_of(gateway)
            await admin.text()

            statuses = await ask_the_mix(gateway, upstream)
            expected = expected_figures()
            wanted = sum(REQUESTS.values())
            figures = await admin.once(
                lambda figures: (
                    total(figures, "ezat_requests_total") == wanted
                    and figure(figures, "ezat_ledger_waiting") == 0
                    and total(figures, "ezat_cost_usd_total") >= COST_UNITS / UNITS_PER_USD * 0.999
                )
            )
            rows = await asyncio.to_thread(ledger, f"sqlite:///{tmp_path}/ezat.db")

    assert STATUSES == statuses
    assert expected == by_family(figures)
    assert COST_UNITS == sum(row["cost"] for row in rows)
    assert labels_of(figures, ["ezat_plugin_calls_total"]) == {
        ("ezat_plugin_calls_total", labels) for _, labels in labels_of(figures, ["ezat_plugin_seconds_total"])
    }
    for (name, labels), value in figures.items():
        if name.endswith("_seconds_bucket") and ("le", "+Inf") in labels:
            count = name.replace("_bucket", "_count")
            assert figures[count, labels - {("le", "+Inf")}] == value
        assert value >= 0, name


async def test_a_model_list_is_a_request_of_its_route(gateway: GatewayProcess, admin: AdminListener) -> None:
    """The GETs that ask for a key are counted under the route `models`, answered and refused ones."""
    before = await admin.present()

    statuses = [await ask(gateway, "/v1/models", key, method="GET") for key in (KEY, None)]
    after = await admin.once(
        lambda figures: total(figures, "ezat_requests_total") > total(before, "ezat_requests_total")
    )

    assert [200, 401] == statuses
    assert 1 == total(after, "ezat_requests_total", route="models", outcome="completed", status="200")
    assert 1 == total(after, "ezat_requests_total", route="models", outcome="failed", status="401")


# The text


async def test_the_text_describes_every_metric(admin: AdminListener) -> None:
    """Prometheus can parse it, and finds each metric that there is with its type and what it says, and no other."""
    text = await admin.text()

    families = {family.name: family for family in text_string_to_metric_families(text)}
    ours = {name for name in families if name.startswith("ezat_")}
    assert {name.removesuffix("_total") for name in METRICS} == ours
    for name, each in METRICS.items():
        family = families[name.removesuffix("_total")]
        assert (each.text, each.make.__name__.lower()) == (family.documentation, family.type), name
        assert 1 == len(re.findall(rf"^# HELP {name} ", text, re.MULTILINE)), name
        assert 1 == len(re.findall(rf"^# TYPE {name} {family.type}$", text, re.MULTILINE)), name
    assert {"process_resident_memory_bytes", "process_open_fds"} <= families.keys()


# Labels


def random_word() -> str:
    return "".join(random.choices(string.ascii_letters + string.digits, k=12))


KNOWN_METHODS = ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "PROPFIND", "REPORT", "LOCK", "COPY", "SEARCH", "PURGE")


def request_with(kind: str) -> bytes:
    """A request with something random in it."""
    word, method, path, key = random_word(), "POST", MESSAGES, KEY
    sent = body()
    if kind == "model":
        sent, path = body(model=word), random.choice((CHAT, MESSAGES, COUNT))
    elif kind == "path":
        method, path = (
            random.choice(("GET", "POST")),
            random.choice((f"/{word}", f"/v1/{word}", f"/openai/v1/models/{word}")),
        )
    elif kind == "method":
        method, path = random.choice(KNOWN_METHODS), random.choice((MESSAGES, CHAT, f"/{word}"))
    elif kind == "key":
        key = f"ezat_sk_{word}"
    data = json.dumps(sent).encode()
    head = [
        f"{method} {path} HTTP/1.1",
        f"host: {word}",
        f"x-api-key: {key}",
        f"x-ezat-session: {word}",
        f"x-request-id: {word}",
        f"user-agent: {word}",
        f"content-length: {len(data)}",
    ]
    return "\r\n".join([*head, "", ""]).encode() + data


async def answered(gateway: GatewayProcess, requests: Iterable[bytes]) -> list[int]:
    """The statuses of requests that are sent together, over one connection."""
    reader, writer = await asyncio.open_connection(gateway.host, gateway.port)
    sent = list(requests)
    writer.write(b"".join(sent))
    statuses = []
    async with asyncio.timeout(FOREVER):
        for _ in sent:
            head = await reader.readuntil(b"\r\n\r\n")
            [length] = re.findall(rb"(?i)content-length: (\d+)", head)
            await reader.readexactly(int(length))
            statuses.append(int(head.split(b" ", 2)[1]))
    writer.close()
    return statuses


async def test_nothing_random_becomes_a_label(
    gateway: GatewayProcess, upstream: ScriptedUpstream, admin: AdminListener
) -> None:
    """J3: ten thousand random names of models, paths, methods and keys leave the series as they were."""
    kinds = ("model", "path", "method", "key")
    for kind in kinds * 20:  # each status of each route once
        await answered(gateway, [request_with(kind)])
    before = await admin.present()
    each_time, at_once = 50, 10

    async def ask_on() -> list[int]:
        statuses = []
        for _ in range(RANDOM_REQUESTS // each_time // at_once):
            statuses += await answered(gateway, (request_with(random.choice(kinds)) for _ in range(each_time)))
        return statuses

    statuses = [status for found in await asyncio.gather(*(ask_on() for _ in range(at_once))) for status in found]
    for _ in range(50):
        await send_no_http(gateway)
    wanted = total(before, "ezat_requests_total") + RANDOM_REQUESTS
    after = await admin.once(lambda figures: total(figures, "ezat_requests_total") >= wanted)

    assert RANDOM_REQUESTS == len(statuses)
    assert {401, 404, 405} == set(statuses)
    assert wanted == total(after, "ezat_requests_total")
    assert before.keys() == after.keys()


async def send_no_http(gateway: GatewayProcess) -> None:
    """A method that nobody knows, over a connection of its own, which is closed."""
    reader, writer = await asyncio.open_connection(gateway.host, gateway.port)
    writer.write(f"{random_word().upper()} /{random_word()} HTTP/1.1\r\nhost: a\r\n\r\n".encode())
    assert b" 400 " in await reader.readline()
    writer.close()


# States


async def test_what_is_under_way_goes_up_and_back(
    gateway: GatewayProcess, upstream: ScriptedUpstream, admin: AdminListener
) -> None:
    """Streams, requests, their bodies and those at a deployment are shown while they are under way, and not after."""
    names = ("ezat_open_streams", "ezat_running_requests", "ezat_body_bytes")
    at = {"model": "test/model", "upstream": "up", "deployment": "model-at-upstream"}
    gate = asyncio.Event()
    upstream.replies.extend([gated_stream(gate), gated_stream(gate)])
    length = len(json.dumps(body(stream=True)))

    asking = [asyncio.create_task(ask(gateway, stream=True)) for _ in range(2)]
    try:
        during = await admin.once(lambda figures: figure(figures, "ezat_deployment_running", **at) == 2)
    finally:
        gate.set()
    statuses = await asyncio.gather(*asking)
    after = await admin.once(lambda figures: figure(figures, "ezat_open_streams") == 0)

    assert [2, 2, 2 * length] == [figure(during, name) for name in names]
    assert [200, 200] == statuses
    assert [0, 0, 0] == [figure(after, name) for name in names]
    assert 0 == figure(after, "ezat_deployment_running", **at)


async def test_a_slow_plugin_is_found_by_its_hook(
    gateway: GatewayProcess, upstream: ScriptedUpstream, admin: AdminListener
) -> None:
    """The time that a plugin takes is shown under its name and that of its hook, waiting included."""
    names = ("ezat_plugin_calls_total", "ezat_plugin_seconds_total")
    before = await admin.present()
    upstream.replies.extend([message_reply(), stream_reply(text_events("Hello."))])

    await ask(gateway, x_slow="yes")
    await ask(gateway, x_slow="yes", stream=True)
    calls = total(before, names[0], plugin="slow", hook="on_event")
    after = await admin.once(lambda figures: total(figures, names[0], plugin="slow", hook="on_event") > calls)

    for hook, seconds in SLOW_SECONDS.items():
        made, took = (
            total(after, name, plugin="slow", hook=hook) - total(before, name, plugin="slow", hook=hook)
            for name in names
        )
        times = 1 if hook in ("on_answer", "on_event") else 2
        assert (hook, times) == (hook, made)
        assert took >= times * seconds, hook
        assert took < times * seconds + 1, hook


async def test_the_ledgers_lag_grows_while_the_store_is_locked(
    gateway: GatewayProcess, upstream: ScriptedUpstream, admin: AdminListener, folder: Path
) -> None:
    """While somebody else keeps the database locked, what waits to be written is shown with its age; then nothing."""
    with sqlite3.connect(folder / "ezat.db", isolation_level=None) as locking:
        locking.execute("BEGIN IMMEDIATE")
        asking = asyncio.create_task(ask(gateway))
        try:
            first = await admin.once(lambda figures: figure(figures, "ezat_ledger_lag_seconds") > 0)
            later = await admin.once(
                lambda figures: (
                    figure(figures, "ezat_ledger_lag_seconds") > figure(first, "ezat_ledger_lag_seconds") + 0.5
                )
            )
        finally:
            locking.execute("ROLLBACK")
    locking.close()
    status = await asking
    after = await admin.once(lambda figures: figure(figures, "ezat_ledger_waiting") == 0)

    assert figure(first, "ezat_ledger_waiting") >= 1
    assert figure(later, "ezat_ledger_waiting") >= 1
    assert 200 == status
    assert (0, 1) == (figure(after, "ezat_ledger_lag_seconds"), figure(after, "ezat_store_ready"))


async def test_a_deployment_shows_that_it_cools_and_goes_with_a_reload(
    gateway: GatewayProcess, upstream: ScriptedUpstream, admin: AdminListener
) -> None:
    """A deployment that failed stands at 0 until it is asked again; one that a reload takes away is shown no more."""
    other = {"model": "spare/model", "upstream": "second", "deployment": "model-at-second"}
    assert 1 == figure(await admin.figures(), "ezat_deployment_state", **SPARE)
    upstream.replies.extend([error_reply(503, "api_error", **{"retry-after": "50"}), message_reply()])

    status = await ask(gateway, model="spare/model")
    cooling = await admin.once(lambda figures: figure(figures, "ezat_deployment_state", **SPARE) == 0)
    config = config_for(upstream, SLOW, deployments=["second"])
    rewritten(gateway, config)
    gateway.terminate(signal.SIGHUP)
    after = await admin.once(lambda figures: figure(figures, "ezat_reloads_total", result="applied") == 1)
    gateway.terminate(signal.SIGHUP)
    await admin.once(lambda figures: figure(figures, "ezat_reloads_total", result="unchanged") == 1)

    assert 200 == status
    assert 1 == figure(cooling, "ezat_deployment_state", **other)
    assert 1 <= total(cooling, "ezat_upstream_failures_total", upstream="first", kind="overloaded", alarm="no")
    states = {tuple(sorted(dict(labels).values())) for _, labels in labels_of(after, ["ezat_deployment_state"])}
    assert {("model-at-second", "second", "spare/model"), ("model-at-upstream", "test/model", "up")} == states
    assert 2 == len(labels_of(after, ["ezat_deployment_running"]))


def rewritten(gateway: GatewayProcess, config: Mapping[str, Any]) -> None:
    """Put another configuration in the place of its own, with the ports and the store as they are."""
    path = gateway._folder / "gateway.yaml"
    present = json.loads(path.read_text())
    new = path.with_suffix(".new")
    new.write_text(json.dumps({**config, "store": present["store"], "server": present["server"]}))
    new.replace(path)
