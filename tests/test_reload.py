"""Reloading, judged from outside: on gateways that run as processes of their own, by their answers and their log.

Nearly all tests share one gateway that reloads on SIGHUP alone, so that what happens is decided by the test and not by
the moment at which a file is noticed; each brings its own configuration, which is a reload, too.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest
import pytest_asyncio

from plugins import BUNDLED
from proxy import reloading
from proxy.loading import load_all
from proxy.server import Gateway
from proxy.testing import Reply, ScriptedUpstream
from tests.contract_plugins import Seen, ending_of, text_of
from tests.noted_plugins import FAILING, FIRST, NOTED, PASSED, SECOND, SERVED_BY
from tests.process import eventually
from tests.reloads import (
    APPLIED,
    KEY,
    LEAVING_KEY,
    NOTICED,
    REFUSED,
    UNCHANGED,
    UPSTREAM_KEY,
    Operated,
    all_open,
    auth,
    beginning,
    completed,
    configured,
    ended,
    lines_of,
    model,
    noted,
    operated,
)
from tests.reloads import (
    text_of as yaml_of,
)
from tests.store.gateways import gated_message, gated_stream

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

CANARY = "canary-of-a-broken-file"
CANARIES = (CANARY, KEY, LEAVING_KEY, UPSTREAM_KEY)
FORMATS = ("openai", "messages")
STOP_IN_TIME = 10.0
"""Seconds in which a gateway with nothing to wait for has stopped, on a busy machine."""


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
def shared_gateway(shared_upstream: ScriptedUpstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operated]:
    with operated(configured(shared_upstream.url), tmp_path_factory.mktemp("gateway")) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def gateway(shared_gateway: Operated, upstream: ScriptedUpstream) -> Operated:
    """The shared gateway, with the usual configuration."""
    await shared_gateway.reload(configured(upstream.url))
    return shared_gateway


def two_models(**of_second: Any) -> list[dict[str, Any]]:
    return [model(), model("test/second", **of_second)]


def changed(config: Mapping[str, Any], number: int = 0) -> dict[str, Any]:
    """The same configuration, but for what concerns no request."""
    return {**config, "models": [*config["models"], model(f"test/further-{number}")]}


def sent_keys(upstream: ScriptedUpstream) -> list[str | None]:
    return [received.headers.get("x-api-key") for received in upstream.received]


class Held:
    """Requests whose answers the upstream holds back, whole and streamed in both formats, until the gate is opened."""

    def __init__(self, gateway: Operated, upstream: ScriptedUpstream) -> None:
        self._gateway = gateway
        self._upstream = upstream
        self._gate = asyncio.Event()
        self._asked: list[tuple[str, asyncio.Task[Seen]]] = []

    async def ask(self, *formats: str, streams: Sequence[bool] = (False, True), **fields: Any) -> Held:
        """Ask in each of the formats, and wait until the upstream has all the requests."""
        for stream in streams:
            for format in formats:
                self._upstream.replies.append(gated_stream(self._gate) if stream else gated_message(self._gate))
                task = asyncio.create_task(self._gateway.ask(format, stream, **fields))
                self._asked.append((format, task))
                await all_open(self._upstream, len(self._asked))
        return self

    async def let_go(self) -> list[Seen]:
        """Open the gate; the answers. Raises AssertionError where one isn't whole."""
        self._gate.set()
        answers = [(format, await task) for format, task in self._asked]
        assert {("whole", "Hello.")} == {(ending_of(seen, format), text_of(seen, format)) for format, seen in answers}
        return [seen for _, seen in answers]


# What is taken over


async def test_a_hangup_takes_over_what_stands_in_the_file(gateway: Operated, upstream: ScriptedUpstream) -> None:
    """With `watch: false` a changed file waits for SIGHUP, which takes it over and tells what was changed."""
    known = len(gateway.told)
    gateway.write(configured(upstream.url, models=two_models()))
    await asyncio.sleep(0.6)  # more than a watched file would need
    before = await gateway.ask(model="second")
    waited = len(gateway.told) == known

    line = await gateway.hang_up()
    after = await gateway.ask(model="second")

    assert waited
    assert (404, 200) == (before.status, after.status)
    assert (APPLIED, ["models.test/second: added"]) == (line["event"], line["changes"])


async def test_a_hangup_without_a_change_changes_nothing(
    gateway: Operated, tmp_path: Path, upstream: ScriptedUpstream
) -> None:
    """SIGHUP says that nothing was changed, and the plugins run on, also where a comment was written."""
    notes = tmp_path / "notes"
    await gateway.reload(configured(upstream.url, {NOTED: {"file": str(notes)}}))
    with gateway.path.open("a") as file:
        file.write("\n# a comment\n")

    line = await gateway.hang_up()

    assert UNCHANGED == line["event"]
    assert 1 == len([note for note in lines_of(notes) if note.startswith("start ")])


ORDERS: dict[str, tuple[list[Any], str | None]] = {
    "added": ([FIRST], "first"),
    "another added": ([FIRST, SECOND], "first second"),
    "reordered": ([SECOND, FIRST], "second first"),
    "switched off": ([{SECOND: {"enabled": False}}, FIRST], "first"),
    "removed": ([], None),
}


async def test_the_list_of_plugins_takes_effect_with_the_next_request(
    gateway: Operated, upstream: ScriptedUpstream
) -> None:
    """Plugins are added, reordered, switched off and removed, on both routes."""
    seen = {}
    for name, (plugins, _) in ORDERS.items():
        await gateway.reload(configured(upstream.url, *plugins))
        seen[name] = {(await gateway.ask(format)).headers.get(PASSED) for format in FORMATS}

    assert {name: {expected} for name, (_, expected) in ORDERS.items()} == seen


async def test_the_last_of_many_reloads_wins(gateway: Operated, tmp_path: Path, upstream: ScriptedUpstream) -> None:
    """Reloads in quick succession end with the last file, and of all plugins made meanwhile one is left."""
    notes = tmp_path / "notes"
    plugin = {NOTED: {"file": str(notes), "start_seconds": 0.02}}
    for number in range(20):
        gateway.exchange(configured(upstream.url, plugin, models=two_models(aliases=[f"number-{number}"])))
        gateway.terminate(signal.SIGHUP)
        await asyncio.sleep(0.02)

    async with asyncio.timeout(NOTICED):
        while (await gateway.hang_up())["event"] != UNCHANGED:
            pass
    status = (await gateway.ask(model="number-19")).status

    def left() -> set[str]:
        lives = [note.split() for note in lines_of(notes)]
        return {number for what, number in lives if what == "start"} - {n for what, n in lives if what == "stop"}

    await eventually(lambda: len(left()) == 1)
    assert 200 == status
    assert left() == {(await gateway.ask()).headers[SERVED_BY]}


# What is refused


class Broken(NamedTuple):
    """A configuration that can't be used: what stands in place of what, and what must be said of which line."""

    old: str
    new: str
    words: str
    line_of: str | None = None
    """What stands on the line that must be named; None: any line."""


TEXT = """\
server: {watch: false, shutdown_timeout: 5, port: 0, admin: {port: 0}}
store: sqlite:///FOLDER/ezat.db
upstreams:
  test:
    base_url: UPSTREAM
    api_key: canary-key-of-the-upstream
models:
  - id: test/model
    aliases: [model]
    max_output_tokens: 8192
    price: free
    deployments:
      - {upstream: test, model: model-at-test}
plugins:
  - auth:
      keys:
        - {name: stays, key: ezat_sk_of-the-client-that-stays}
  - chat_completions
"""
PLUGINS = "  - chat_completions\n"
BROKEN = {
    "no YAML": Broken("models:\n", "models: [\n", "is not valid YAML"),
    "a setting twice": Broken("    api_key:", f"    api_key: {CANARY}\n    api_key:", "is set twice", UPSTREAM_KEY),
    "an unknown setting": Broken(f"api_key: {UPSTREAM_KEY}", f"api_kye: {CANARY}", "unknown setting", "api_kye"),
    "a wrong type": Broken("8192", CANARY, "must be a whole number", CANARY),
    "a tab": Broken("    api_key", "\tapi_key", "tab", "\tapi_key"),
    "an anchor": Broken("price: free", "price: &free free", "anchors and aliases", "&free"),
    "an alias": Broken("price: free", "price: *free", "anchors and aliases", "*free"),
    "two documents": Broken("plugins:", "---\nplugins:", "only one document", "---"),
    "an unset variable": Broken(UPSTREAM_KEY, "${EZAT_TEST_UNSET}", "EZAT_TEST_UNSET is not set", "api_key"),
    "a key that is none": Broken(KEY, f"{CANARY}", "must begin with ezat_sk_"),
    "a name twice": Broken("aliases: [model]", "aliases: [Test/Model]", "the name is taken", "aliases"),
    "an unknown upstream": Broken("upstream: test", "upstream: tset", "there is no such upstream", "tset"),
    "a file of models that is not there": Broken("models:\n", "models: gone.yaml\nlater:\n", "can't be read", "gone"),
    "a file with a key that is not there": Broken("api_key: ", "api_key_file: gone/", "can't be read", "gone"),
    "no certificates": Broken("    api_key", "    ca_file: gateway.yaml\n    api_key", "no certificates", "ca_file"),
    "an unknown plugin": Broken(PLUGINS, "  - chat_complet\n", "did you mean `chat_completions`", "chat_complet\n"),
    "plugins in a wrong order": Broken(
        PLUGINS, f"  - usage\n{PLUGINS}  - {NOTED}: {{file: n}}\n  - rate_limit: 1\n", "must be a mapping", "rate_limit"
    ),
    "a plugin that can't be imported": Broken(
        PLUGINS, f"{PLUGINS}  - tests.not_there:Plugin\n", "can't be imported: ModuleNotFoundError", "not_there"
    ),
    "a plugin that ends who imports it": Broken(
        PLUGINS, f"{PLUGINS}  - tests.exiting_plugin:Plugin\n", "SystemExit", "exiting_plugin"
    ),
    "a plugin that can't be made": Broken(
        PLUGINS,
        f"{PLUGINS}  - {FAILING}: {{where: constructor, token: {CANARY}}}\n",
        "can't be made: ValueError: no such thing",
        "constructor",
    ),
    "a plugin that can't start": Broken(
        PLUGINS,
        f"{PLUGINS}  - {FAILING}: {{where: start, token: {CANARY}}}\n",
        "can't start: ConnectionError: nobody there",
        "where: start",
    ),
}
WHOLE_FILES: dict[str, tuple[bytes | None, str]] = {
    "no file": (None, "gateway.yaml: the file can't be read (No such file or directory)"),
    "an empty file": (b"", "gateway.yaml:1: the file is empty"),
    "a file of comments": (b"# nothing\n", "gateway.yaml:1: the file is empty"),
    "a file that is no text": (b"server:\n  host: \xff\xfe\n", "gateway.yaml:2: is not UTF-8 text"),
    "a file with control characters": (b"server: {}\nstore: \x01\n", "gateway.yaml:2: holds a control character"),
}


def plain_text(gateway: Operated, upstream: ScriptedUpstream) -> str:
    """A configuration as people write it."""
    return TEXT.replace("FOLDER", str(gateway.path.parent)).replace("UPSTREAM", upstream.url)


@pytest.mark.parametrize("name", BROKEN)
async def test_a_broken_file_leaves_everything_as_it_was(
    gateway: Operated, tmp_path: Path, upstream: ScriptedUpstream, name: str
) -> None:
    """The log says what is wrong on which line, without a secret; a right file is taken over afterwards."""
    old, new, words, line_of = BROKEN[name]
    await gateway.reload(configured(upstream.url, {NOTED: {"file": str(tmp_path / "notes")}}))
    text = plain_text(gateway, upstream)
    assert old in text
    broken = text.replace(old, new)

    gateway.path.write_text(broken)
    line = await gateway.hang_up()
    seen = await gateway.ask("openai")

    place = r"\d+" if line_of is None else str(broken[: broken.rindex(line_of)].count("\n") + 1)
    assert REFUSED == line["event"]
    assert re.search(rf"gateway\.yaml:{place}: .*{re.escape(words)}", line["reason"]), line["reason"]
    assert [] == secrets_in(gateway)
    assert "whole" == ending_of(seen, "openai")
    assert SERVED_BY in seen.headers
    await judge_right_file(gateway, upstream)


@pytest.mark.parametrize("name", WHOLE_FILES)
async def test_a_file_that_holds_no_configuration_leaves_everything_as_it_was(
    gateway: Operated, upstream: ScriptedUpstream, name: str
) -> None:
    """So does one that is gone, empty, or no text."""
    content, words = WHOLE_FILES[name]

    if content is None:
        gateway.path.unlink()
    else:
        gateway.path.write_bytes(content)
    line = await gateway.hang_up()
    seen = await gateway.ask()

    assert (REFUSED, 200) == (line["event"], seen.status)
    assert words in line["reason"]
    await judge_right_file(gateway, upstream)


def secrets_in(gateway: Operated) -> list[str]:
    """The canaries that the log holds."""
    log = json.dumps(gateway.log_lines)
    return [canary for canary in CANARIES if canary in log]


async def judge_right_file(gateway: Operated, upstream: ScriptedUpstream) -> None:
    """A right file is taken over."""
    await gateway.reload(configured(upstream.url, models=two_models()))
    assert 200 == (await gateway.ask(model="second")).status


async def test_a_file_as_another_system_writes_it_is_taken_over(gateway: Operated, upstream: ScriptedUpstream) -> None:
    """A byte-order mark and line ends with a carriage return are no mistakes."""
    text = plain_text(gateway, upstream).replace("aliases: [model]", "aliases: [model, windows]")
    gateway.path.write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())

    line = await gateway.hang_up()

    assert APPLIED == line["event"]
    assert 200 == (await gateway.ask(model="windows")).status


async def test_reloads_are_counted(gateway: Operated, upstream: ScriptedUpstream) -> None:
    """The metric counts what reloads came to."""
    before = await gateway.reloads()
    await gateway.reload(configured(upstream.url, models=two_models()))
    await gateway.hang_up()
    gateway.path.write_text("")
    await gateway.hang_up()
    expected = {result: count + 1 for result, count in before.items()}

    async with asyncio.timeout(10):
        while await gateway.reloads() != expected:  # noqa: ASYNC110 - they are rendered once a second
            await asyncio.sleep(0.1)

    assert {"applied", "refused", "unchanged"} == expected.keys()


async def test_what_fails_late_is_taken_back_whole(gateway: Operated, upstream: ScriptedUpstream) -> None:
    """Where the last plugin can't start, nothing of the file is in force, not even a number."""
    config = configured(upstream.url, models=[model()])
    limited = {**model(), "deployments": [{"upstream": "test", "model": "model-at-test", "max_parallel": 1}]}
    await gateway.reload(config)

    gateway.write(configured(upstream.url, {FAILING: {"where": "start"}}, models=[limited]))
    line = await gateway.hang_up()
    held = await Held(gateway, upstream).ask("messages", streams=[False])
    second = await gateway.ask()
    await held.let_go()

    assert (REFUSED, 200) == (line["event"], second.status)


async def test_a_reload_that_hangs_is_given_up(
    tmp_path: Path, upstream: ScriptedUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plugin that hangs in its start is refused in the end, and stopped; the next reload is taken over."""
    monkeypatch.setattr(reloading, "LONGEST", 0.5)
    notes, path = tmp_path / "notes", tmp_path / "gateway.yaml"

    def write(*plugins: Any, models: Any = None) -> None:
        path.write_text(yaml_of(completed(configured(upstream.url, *plugins, models=models), tmp_path)))

    write()
    running = Gateway(*load_all(path, BUNDLED))
    try:
        await running.start()
        reloader = reloading.Reloader(running, lambda: load_all(path, BUNDLED))
        write({NOTED: {"file": str(notes), "start_seconds": 60}})
        await reloader.reload()
        still = [plugin.name for plugin in running.pipeline.plugins]
        await eventually(lambda: len(lines_of(notes)) == 2)
        life = [note.split()[0] for note in lines_of(notes)]
        write(models=two_models())
        await reloader.reload()
        models = [each.id for each in running.config.models]
    finally:
        await running.stop()

    assert "noted" not in still
    assert ["starting", "stop"] == life
    assert ["test/model", "test/second"] == models


RESTARTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "the port": ({"server": {"port": 1}}, ("server.port: 0 → 1",)),
    "the host": ({"server": {"host": "127.0.0.2"}}, ("server.host: 127.0.0.1 → 127.0.0.2",)),
    "the admin port": ({"server": {"admin": {"port": 1}}}, ("server.admin.port: 0 → 1",)),
    "the admin host": ({"server": {"admin": {"host": "::1", "port": 0}}}, ("server.admin.host: 127.0.0.1 → ::1",)),
    "the store": ({"store": f"postgresql://user:{CANARY}@127.0.0.1/ezat"}, ("store: changed",)),
    "the limiter": ({"limiter": f"redis://:{CANARY}@127.0.0.1/0"}, ("limiter: changed",)),
    "the workers": (
        {"server": {"workers": 2}, "store": "postgresql://127.0.0.1/ezat", "limiter": "redis://127.0.0.1/0"},
        ("server.workers: 1 → 2", "store: changed", "limiter: changed"),
    ),
}


@pytest.mark.parametrize("name", RESTARTS)
async def test_what_needs_a_restart_is_refused_as_a_whole(
    gateway: Operated, upstream: ScriptedUpstream, name: str
) -> None:
    """What can't be changed while it serves is named, and nothing else of that file is taken over."""
    more, words = RESTARTS[name]
    config = configured(upstream.url, FIRST, models=two_models(), server=more.get("server"))

    gateway.write({**config, **{part: value for part, value in more.items() if part != "server"}})
    line = await gateway.hang_up()
    seen = await gateway.ask()

    assert REFUSED == line["event"]
    assert "; ".join(f"{each} (needs a restart)" for each in words) == line["reason"]
    assert (200, None) == (seen.status, seen.headers.get(PASSED))
    assert 404 == (await gateway.ask(model="second")).status
    assert [] == secrets_in(gateway)


# What runs


async def test_running_requests_finish_though_all_they_need_is_removed(
    gateway: Operated, tmp_path: Path, upstream: ScriptedUpstream
) -> None:
    """What runs ends as it began, whole, though its model, its key and a plugin are gone; new requests are refused."""
    notes = tmp_path / "notes"
    leaving = {"name": "leaves", "key": LEAVING_KEY}
    await gateway.reload(
        configured(upstream.url, {NOTED: {"file": str(notes)}}, models=two_models(), asks=auth(leaving))
    )
    held = await Held(gateway, upstream).ask(*FORMATS, model="second", key=LEAVING_KEY)

    await gateway.reload(configured(upstream.url))
    refused = {
        format: [(await gateway.ask(format, model="second", key=key)).status for key in (KEY, LEAVING_KEY)]
        for format in FORMATS
    }
    stopped_early = "stop 1" in lines_of(notes)
    answers = await held.let_go()

    assert {format: [404, 401] for format in FORMATS} == refused
    assert not stopped_early
    assert 1 == len({seen.headers[SERVED_BY] for seen in answers})


async def test_a_plugin_starts_before_its_first_exchange_and_stops_after_its_last(
    gateway: Operated, tmp_path: Path, upstream: ScriptedUpstream
) -> None:
    """A slow start keeps requests with the one before; that one stops when the last of its answers is complete."""
    old, new = tmp_path / "old", tmp_path / "new"
    await gateway.reload(configured(upstream.url, {NOTED: {"file": str(old)}}))
    held = await Held(gateway, upstream).ask(*FORMATS)

    known = len(gateway.told)
    gateway.write(configured(upstream.url, {NOTED: {"file": str(new), "start_seconds": 0.5}}))
    gateway.terminate(signal.SIGHUP)
    await eventually(lambda: lines_of(new))
    meanwhile = await gateway.ask()
    await gateway.next_told(known)
    afterwards = await gateway.ask()
    [seen_by] = {seen.headers[SERVED_BY] for seen in await held.let_go()}
    await noted(old, f"stop {seen_by}")

    number = afterwards.headers[SERVED_BY]
    life = [f"starting {number}", f"start {number}", f"see {number}", f"completing {number}", f"complete {number}"]
    assert seen_by == meanwhile.headers[SERVED_BY]
    assert life == lines_of(new)
    assert 5 == lines_of(old).count(f"complete {seen_by}")
    assert f"stop {seen_by}" == lines_of(old)[-1]


async def test_an_answer_that_is_still_recorded_counts_as_running(
    gateway: Operated, tmp_path: Path, upstream: ScriptedUpstream
) -> None:
    """A client that leaves while its answer is being completed doesn't let the plugin stop before that is done."""
    notes = tmp_path / "notes"
    await gateway.reload(configured(upstream.url, {NOTED: {"file": str(notes), "complete_seconds": 3}}))
    asking = asyncio.create_task(gateway.ask())
    number = (await eventually(lambda: lines_of(notes)))[0].split()[1]
    await noted(notes, f"completing {number}")

    known = len(gateway.requests())
    asking.cancel()
    await eventually(lambda: len(gateway.requests()) > known)
    await gateway.reload(configured(upstream.url))
    await noted(notes, f"stop {number}")

    assert [f"complete {number}", f"stop {number}"] == lines_of(notes)[-2:]


async def test_a_built_in_upstream_outlives_what_runs_on_it(gateway: Operated, upstream: ScriptedUpstream) -> None:
    """An answer of the built-in upstream comes whole, though two reloads have put another one in its place."""
    await gateway.reload(configured("demo"))
    slow = {"messages": [{"role": "user", "content": "Be slow, and say a few words."}]}
    opened = asyncio.Event()
    asking = asyncio.create_task(streamed(gateway, opened, **slow))
    await opened.wait()

    await gateway.reload(configured(upstream.url))
    await gateway.reload(changed(configured(upstream.url)))
    text = await asking

    assert text.rstrip().endswith('data: {"type":"message_stop"}')


async def streamed(gateway: Operated, opened: asyncio.Event, **fields: Any) -> str:
    """The text of a stream on /v1/messages; ``opened`` is set when it has begun."""
    body = {"model": "model", "max_tokens": 100, "stream": True, **fields}
    async with (
        aiohttp.ClientSession(headers={"x-api-key": KEY}) as session,
        session.post(f"{gateway.url}/v1/messages", json=body) as answer,
    ):
        got = await answer.content.readany()
        opened.set()
        return (got + await answer.content.read()).decode()


async def test_a_built_in_upstream_is_not_stopped_by_the_end_of_others(
    gateway: Operated, tmp_path: Path, upstream: ScriptedUpstream
) -> None:
    """What ends while the next configuration is starting takes nothing away from it."""
    notes = tmp_path / "notes"
    await gateway.reload(configured(upstream.url, {NOTED: {"file": str(tmp_path / "old")}}))
    held = await Held(gateway, upstream).ask("messages")
    await gateway.reload(changed(configured(upstream.url)))

    known = len(gateway.told)
    gateway.write(configured("demo", {NOTED: {"file": str(notes), "start_seconds": 1}}))
    gateway.terminate(signal.SIGHUP)
    await eventually(lambda: lines_of(notes))
    [number] = {seen.headers[SERVED_BY] for seen in await held.let_go()}
    await noted(tmp_path / "old", f"stop {number}")
    line = await gateway.next_told(known)

    assert APPLIED == line["event"]
    assert 200 == (await gateway.ask()).status


# What survives


class Survivor(NamedTuple):
    """What is used up by a first request: by whom, what it is held back for, and what a second one is told."""

    key: Mapping[str, Any]
    model: Mapping[str, Any]
    runs: bool
    """Whether the first request must be running still."""
    status: int
    organizations: Sequence[Mapping[str, Any]] = ()


ACME = {"name": "acme", "balance_usd": "0.000001"}
PRICE = {"input": 1, "output": 5}
SURVIVORS = {
    "the minute's requests": Survivor({"requests_per_minute": 1}, {}, runs=False, status=429),
    "the minute's tokens": Survivor({"input_tokens_per_minute": 8}, {}, runs=False, status=429),
    "a key's places": Survivor({"parallel_requests": 1}, {}, runs=True, status=429),
    "a deployment's places": Survivor(
        {}, {"deployments": [{"upstream": "test", "model": "m", "max_parallel": 1}]}, runs=True, status=529
    ),
    "what is reserved": Survivor({"organization": "acme"}, {"price": PRICE}, True, 429, [ACME]),
    "what is spent": Survivor({"organization": "acme"}, {"price": PRICE}, False, 402, [ACME]),
    "what a key has spent": Survivor({"spend_limit_usd": "0.000001"}, {"price": PRICE}, False, 402),
}


@pytest.mark.parametrize("name", SURVIVORS)
async def test_what_was_counted_survives_a_reload(gateway: Operated, upstream: ScriptedUpstream, name: str) -> None:
    """Windows, places, reservations and budgets are as they were after a reload that changes something else."""
    row = SURVIVORS[name]
    key = {"name": name, "key": f"ezat_sk_{name.replace(' ', '-')}", **row.key}
    organizations = [{**each, "name": name} for each in row.organizations]
    if organizations:
        key["organization"] = name
    config = configured(upstream.url, models=[model(**row.model)], asks=auth(key, organizations=organizations))
    await gateway.reload(config)
    held = await Held(gateway, upstream).ask("messages", streams=[True], key=key["key"])
    if not row.runs:
        await held.let_go()

    async def told() -> int:
        return (await gateway.ask(key=key["key"])).status

    before = await told()
    await gateway.reload(changed(config))
    after = await told()
    await held.let_go()

    assert (row.status, row.status) == (before, after)
    if row.runs and not row.organizations:
        assert 200 == await told()


def cooling_config(upstreams: Sequence[ScriptedUpstream], **of_first: Any) -> dict[str, Any]:
    """A model at two upstreams, one after the other."""
    first, second = upstreams
    return configured(
        second.url,
        upstreams={
            "first": {"base_url": first.url, "api_key": "first-key", **of_first},
            "second": {"base_url": second.url, "api_key": "second-key"},
        },
        models=[model("test/model", "first", "second")],
    )


async def test_a_cooling_deployment_cools_on(gateway: Operated, upstream: ScriptedUpstream) -> None:
    """What was learned of a deployment survives a reload, but for one whose key was changed: it is asked at once."""
    overloaded = Reply([b"{}"], status=529, headers={"retry-after": "60"})
    async with ScriptedUpstream(overloaded) as first:
        config = cooling_config([first, upstream])
        await gateway.reload(config)

        async def asked_first() -> bool:
            known = len(first.received)
            assert 200 == (await gateway.ask()).status
            return len(first.received) > known

        failed = await asked_first()
        cooling = await asked_first()
        await gateway.reload(changed(config))
        cooling_on = await asked_first()
        await gateway.reload(changed(cooling_config([first, upstream], api_key="another-key")))
        asked_at_once = await asked_first()

    assert (True, False, False, True) == (failed, cooling, cooling_on, asked_at_once)
    assert ["first-key", "another-key"] == sent_keys(first)


async def test_a_changed_number_of_places_takes_effect_at_once(gateway: Operated, upstream: ScriptedUpstream) -> None:
    """`max_parallel` counts what runs already, whether it is raised or lowered."""

    def config(most: int) -> dict[str, Any]:
        return configured(
            upstream.url, models=[model(deployments=[{"upstream": "test", "model": "m", "max_parallel": most}])]
        )

    await gateway.reload(config(1))
    held = await Held(gateway, upstream).ask("messages", streams=[False])
    statuses = []
    for most in (1, 2, 1):
        await gateway.reload(config(most))
        statuses.append((await gateway.ask()).status)
    await held.let_go()

    assert [529, 200, 529] == statuses


# The start and the stop


async def test_a_hangup_during_a_stop_is_ignored(tmp_path: Path, upstream: ScriptedUpstream) -> None:
    """SIGHUP while running requests may still end neither reloads nor cuts anything off."""
    config = configured(upstream.url)
    with operated(config, tmp_path) as gateway:
        held = await Held(gateway, upstream).ask(*FORMATS)
        gateway.terminate()
        await eventually(lambda: not listens(gateway))

        gateway.write(changed(config))
        gateway.terminate(signal.SIGHUP)
        await asyncio.sleep(0.3)
        answers = await held.let_go()
        code = await ended(gateway, STOP_IN_TIME)

    assert (4, 0) == (len(answers), code)
    assert [] == gateway.told


def listens(gateway: Operated) -> bool:
    with socket.socket() as client:
        return client.connect_ex((gateway.host, gateway.port)) == 0


LONG_RELOADS: dict[str, Callable[[Path], Any]] = {
    "a slow start": lambda notes: {NOTED: {"file": str(notes), "start_seconds": 60}},
    "a slow constructor": lambda notes: {FAILING: {"file": str(notes), "where": "a long constructor"}},
}


@pytest.mark.parametrize("name", LONG_RELOADS)
async def test_a_stop_does_not_wait_for_a_reload(tmp_path: Path, upstream: ScriptedUpstream, name: str) -> None:
    """SIGTERM while a reload takes its time ends the process in time, with what was started stopped."""
    notes = tmp_path / "notes"
    with operated(configured(upstream.url), tmp_path) as gateway:
        gateway.write(configured(upstream.url, LONG_RELOADS[name](notes)))
        gateway.terminate(signal.SIGHUP)
        await eventually(lambda: lines_of(notes))
        answered = (await gateway.ask()).status

        gateway.terminate()
        code = await ended(gateway, STOP_IN_TIME)

    assert (200, 0) == (answered, code)
    assert lines_of(notes) in (["starting 1", "stop 1"], ["making"])
    assert "Traceback" not in gateway.written


async def test_a_stop_does_not_wait_for_the_start(tmp_path: Path, upstream: ScriptedUpstream) -> None:
    """During the start SIGHUP is ignored, and SIGTERM ends the process in time, with an exit code of 0."""
    notes = tmp_path / "notes"
    with beginning(configured(upstream.url, {NOTED: {"file": str(notes), "start_seconds": 60}}), tmp_path) as gateway:
        await noted(notes, "starting 1", 30)

        gateway.terminate(signal.SIGHUP)
        await asyncio.sleep(0.2)
        survived = gateway.exit_code is None
        gateway.terminate()
        code = await ended(gateway, STOP_IN_TIME)

    assert (True, 0) == (survived, code)
    assert ["starting 1", "stop 1"] == lines_of(notes)
    assert "Traceback" not in gateway.written
