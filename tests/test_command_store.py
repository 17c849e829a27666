"""The command line for what is stored, as an operator uses it."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import click
import pytest
from click.testing import CliRunner, Result

from plugins import BUNDLED
from proxy.command import main
from proxy.command_store import add_store_commands
from proxy.store.directory import Directory, StoredKey, read_if_newer
from proxy.store.ledger import Record, record_all
from proxy.testing import ScriptedUpstream
from tests.process import run
from tests.store import servers
from tests.store.gateways import ask, configured, from_store, in_store
from tests.store.processes import started
from tests.store.rows import row


class World(NamedTuple):
    """A configuration with a store of its own, and the commands."""

    config: Path
    store: str

    def command(self, *arguments: str) -> Result:
        cli = click.Group()
        add_store_commands(cli)
        return CliRunner().invoke(cli, arguments, obj=self.config)

    def output(self, *arguments: str) -> str:
        """What a command says that succeeds."""
        result = self.command(*arguments)
        assert 0 == result.exit_code, result.output
        return result.stdout

    def rows(self, *arguments: str) -> list[dict[str, Any]]:
        """The rows that a command prints as JSON lines."""
        return [json.loads(line) for line in self.output(*arguments, "--format", "jsonl").splitlines()]

    def keys(self) -> dict[str, StoredKey]:
        directory = from_store(self.store, read_if_newer(Directory()))
        return {key.name: key for key in directory.keys.values()}


@pytest.fixture(params=["sqlite", "postgresql"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    path = tmp_path / "gateway.yaml"
    if request.param == "sqlite":
        yield _world(path, f"sqlite:///{tmp_path}/ezat.db")
        return
    with servers.postgres().lent_database() as url:
        yield _world(path, url)


@pytest.fixture
def on_sqlite(tmp_path: Path) -> World:
    """For what the database has no say in."""
    return _world(tmp_path / "gateway.yaml", f"sqlite:///{tmp_path}/ezat.db")


def _world(path: Path, store: str) -> World:
    path.write_text(json.dumps(configured(store, "http://127.0.0.1:1")))  # JSON is YAML
    return World(path, store)


# Keys


async def test_a_key_is_made_and_shown_once(world: World) -> None:
    """The key alone stands on standard output, so that a script can take it; a list shows only its last four."""
    result = world.command("keys", "create", "ann")
    key = result.stdout.strip()

    assert re.fullmatch(r"ezat_sk_[A-Za-z0-9_-]{43}", key)
    assert "shown only once" in result.stderr
    [listed] = world.rows("keys", "list")
    assert ("ann", f"ezat_sk_…{key[-4:]}") == (listed["name"], listed["key"])
    assert key not in world.output("keys", "list") + world.output("keys", "list", "--format", "csv")


OPTIONS: dict[str, tuple[Sequence[str], dict[str, Any]]] = {
    "--organization": (["--organization", "acme"], {"organization": "acme"}),
    "--model": (["--model", "a", "--model", "b"], {"models": ("a", "b")}),
    "--spend-limit": (["--spend-limit", "12.5"], {"spend_limit": 12_500_000_000_000}),
    "--period": (["--spend-limit", "1", "--period", "week"], {"spend_period": "week"}),
    "--expires, a day": (["--expires", "2027-01-31"], {"expires_at": datetime(2027, 1, 31, tzinfo=UTC).timestamp()}),
    "--expires, a moment": (
        ["--expires", "2027-01-31T12:00:00+01:00"],
        {"expires_at": datetime(2027, 1, 31, 11, tzinfo=UTC).timestamp()},
    ),
    "no limits": ([], {"models": None, "spend_limit": None, "expires_at": None, "revoked_at": None}),
}


@pytest.mark.parametrize(("options", "expected"), OPTIONS.values(), ids=OPTIONS)
def test_a_key_is_made_with(on_sqlite: World, options: Sequence[str], expected: dict[str, Any]) -> None:
    """What a key may do is said when it is made."""
    on_sqlite.output("orgs", "create", "acme")

    on_sqlite.output("keys", "create", "ann", *options)

    key = on_sqlite.keys()["ann"]
    assert expected == {name: getattr(key, name) for name in expected}


def test_limits_of_a_key_are_changed_and_taken_away(world: World) -> None:
    """What isn't named stays; ``none`` takes a limit away."""
    limits = ("--requests-per-minute", "5", "--input-tokens-per-minute", "1000", "--parallel-requests", "2")
    more = ("--spend-limit", "3", "--period", "day", "--model", "m", "--expires", "2027-01-01")
    world.output("keys", "create", "ann", *limits, *more)

    assert "changed requests_per_minute" in world.output("keys", "limit", "ann", "--requests-per-minute", "7")
    first = world.keys()["ann"]
    nothing = [part for name in (*limits[::2], *more[::2]) for part in (name, "none")]
    world.output("keys", "limit", "ann", *nothing)
    last = world.keys()["ann"]

    assert (7, 1000, 2) == (
        first.limits.requests_per_minute,
        first.limits.input_tokens_per_minute,
        first.limits.parallel_requests,
    )
    assert (3 * 10**12, "day", ("m",)) == (first.spend_limit, first.spend_period, first.models)
    assert [None] * 3 == [getattr(last.limits, name) for name in last.limits.__slots__]
    assert [None] * 4 == [last.spend_limit, last.spend_period, last.models, last.expires_at]


def test_a_key_is_revoked(world: World) -> None:
    """It stays in the list, with the time at which it ended."""
    world.output("keys", "create", "ann")

    assert "ann is revoked" in world.output("keys", "revoke", "ann")

    [listed] = world.rows("keys", "list")
    assert listed["revoked"].startswith(f"{datetime.now(UTC):%Y}")


# Organizations


def test_an_organization_is_made_and_pays_in(world: World) -> None:
    """Credit adds up, exactly; an organization made without any isn't prepaid."""
    world.output("orgs", "create", "acme", "--credit", "0.1")
    world.output("orgs", "create", "free")

    assert "has paid in 0.300000000001 USD" in world.output("orgs", "credit", "acme", "0.200000000001")

    assert {"acme": "0.300000000001", "free": None} == {
        each["name"]: each["credit"] for each in world.rows("orgs", "list")
    }


def test_an_organization_is_suspended_and_resumed(world: World) -> None:
    """The list says so."""
    world.output("orgs", "create", "acme")

    suspended = []
    for act in ("suspend", "resume"):
        world.output("orgs", act, "acme")
        suspended += [bool(each["suspended"]) for each in world.rows("orgs", "list")]

    assert [True, False] == suspended


def test_limits_of_an_organization_are_changed(world: World) -> None:
    """As those of a key."""
    world.output("orgs", "create", "acme", "--requests-per-minute", "5", "--parallel-requests", "3")

    world.output("orgs", "limit", "acme", "--requests-per-minute", "none", "--input-tokens-per-minute", "9")

    [listed] = world.rows("orgs", "list")
    assert [None, 9, 3] == [listed[name] for name in ("requests/min", "tokens/min", "parallel")]


# What can't be done


MISTAKES: dict[str, tuple[Sequence[str], int, str]] = {
    "a name that is taken": (["keys", "create", "there"], 1, "there is a key named 'there' already"),
    "an organization that is taken": (["orgs", "create", "there"], 1, "there is an organization named 'there' already"),
    "an unknown organization": (["keys", "create", "new", "--organization", "none"], 1, "there is no organization"),
    "an unknown key": (["keys", "revoke", "nobody"], 1, "there is no key named 'nobody'"),
    "an unknown organization to suspend": (["orgs", "suspend", "nobody"], 1, "there is no organization named 'nobody'"),
    "no limit": (["keys", "limit", "there"], 2, "name at least one limit"),
    "no limit of an organization": (["orgs", "limit", "there"], 2, "name at least one limit"),
    "a limit of zero": (["keys", "limit", "there", "--parallel-requests", "0"], 2, "a whole number of at least 1"),
    "half a request": (["keys", "limit", "there", "--requests-per-minute", "1.5"], 2, "a whole number of at least 1"),
    "a negative amount": (["keys", "limit", "there", "--spend-limit", "-1"], 2, "must be an amount"),
    "no amount": (["orgs", "credit", "there", "lots"], 2, "must be an amount in USD"),
    "no number": (["orgs", "credit", "there", "NaN"], 2, "must be an amount"),
    "none as an amount": (["orgs", "credit", "there", "none"], 2, "must be an amount in USD"),
    "more than can be counted": (["orgs", "credit", "there", "9000001"], 2, "must be an amount from 0 to 9000000"),
    "more than can be counted together": (["orgs", "credit", "there", "9000000"], 1, "more than 9000000 USD"),
    "an unknown period": (["keys", "limit", "there", "--period", "year"], 2, "is not one of"),
    "no time": (["keys", "limit", "there", "--expires", "soon"], 2, "must be a time such as"),
    "a file that isn't there": (["usage", "reconcile", "nowhere.csv"], 2, "does not exist"),
}


@pytest.mark.parametrize(("arguments", "code", "expected"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_clear_sentence(on_sqlite: World, arguments: Sequence[str], code: int, expected: str) -> None:
    """No traceback, an exit code that isn't 0, and nothing is changed."""
    on_sqlite.output("keys", "create", "there")
    on_sqlite.output("orgs", "create", "there", "--credit", "1")
    before = from_store(on_sqlite.store, read_if_newer(Directory()))

    result = on_sqlite.command(*arguments)

    assert code == result.exit_code
    assert expected in result.stderr
    assert "Traceback" not in result.output
    assert before == from_store(on_sqlite.store, read_if_newer(Directory()))


def test_a_store_that_cannot_be_reached_is_one_clear_sentence(tmp_path: Path) -> None:
    """Exit code 1, and no password in the text."""
    world = _world(tmp_path / "gateway.yaml", "postgresql://me:CANARY@127.0.0.1:1/none")

    result = world.command("keys", "list")

    assert 1 == result.exit_code
    assert "the store can't be used now: OperationalError" in result.stderr
    assert "CANARY" not in result.output


@pytest.mark.parametrize("place", [0, 1, 2], ids=["before the command", "within it", "behind it"])
@pytest.mark.parametrize("written", ["--config {}", "--config={}"])
def test_the_configuration_may_be_named_anywhere(
    on_sqlite: World, place: int, written: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever forgets where an option belongs gets what he asked for, not what the default file holds."""
    on_sqlite.output("keys", "create", "ann")
    words = ["keys", "list"]
    words[place:place] = written.format(on_sqlite.config).split(" ")

    with pytest.raises(SystemExit) as ended:
        main(BUNDLED, words)

    assert not ended.value.code
    assert "ann" in capsys.readouterr().out


def test_a_configuration_that_cannot_be_used_is_explained(tmp_path: Path) -> None:
    """With the line, as everywhere else."""
    path = tmp_path / "gateway.yaml"
    path.write_text("store: nowhere\n")

    result = World(path, "").command("keys", "list")

    assert 1 == result.exit_code
    assert "gateway.yaml:1: store: must be" in result.stderr


# Usage


def fill(world: World) -> None:
    rows = [
        row(at=datetime(2026, 11, day, 12, tzinfo=UTC).timestamp(), cost=day * 10**9, model=model, end_user=user)
        for day, model, user in ((1, "a/small", "ann"), (2, "a/large", "bob"), (2, "a/large", None))
    ]
    world.rows("keys", "list")  # makes the tables
    in_store(world.store, lambda connection: record_all(connection, [Record(each, []) for each in rows]))


USAGE: dict[str, tuple[Sequence[str], list[tuple[Any, int, str]]]] = {
    "by model": ([], [("a/large", 2, "0.004"), ("a/small", 1, "0.001")]),
    "by day": (["--by", "day"], [("2026-11-01", 1, "0.001"), ("2026-11-02", 2, "0.004")]),
    "by end user": (["--by", "end-user"], [("bob", 1, "0.002"), (None, 1, "0.002"), ("ann", 1, "0.001")]),
    "by key": (["--by", "key"], [("key-1", 3, "0.005")]),
    "by organization": (["--by", "organization"], [("acme", 3, "0.005")]),
    "since a day": (["--since", "2026-11-02"], [("a/large", 2, "0.004")]),
    "until a day": (["--until", "2026-11-02"], [("a/small", 1, "0.001")]),
    "of nothing": (["--since", "2027-01-01"], []),
}


@pytest.mark.parametrize(("options", "expected"), USAGE.values(), ids=USAGE)
def test_usage_is_reported(on_sqlite: World, options: Sequence[str], expected: list[tuple[Any, int, str]]) -> None:
    """By whatever one asks for; cost in USD, exactly, as text."""
    fill(on_sqlite)

    rows = on_sqlite.rows("usage", *options)

    by_cost = {(next(iter(each.values())), each["requests"], each["cost"]) for each in rows}
    assert set(expected) == by_cost
    assert len(expected) == len(rows)


def test_every_format_tells_the_same(world: World) -> None:
    """A table for people, CSV and JSON lines for programs."""
    fill(world)

    lines = world.rows("usage")
    table = world.output("usage")
    read = list(csv.DictReader(io.StringIO(world.output("usage", "--format", "csv"))))

    assert [{name: str(value) for name, value in each.items()} for each in lines] == read
    assert all(str(each["model"]) in table and each["cost"] in table for each in lines)
    assert "nothing there" in world.output("usage", "--since", "2027-01-01")


def test_an_export_that_agrees(world: World, tmp_path: Path) -> None:
    """Exit code 0; a byte-order mark, as spreadsheets write it, is no matter."""
    fill(world)
    file = tmp_path / "export.csv"
    file.write_text(
        "date,model,input_tokens,output_tokens\n2026-11-01,model-at-upstream,10,2\n2026-11-02,model-at-upstream,20,4\n",
        encoding="utf-8-sig",
    )

    assert "agree" in world.output("usage", "reconcile", str(file))


def test_an_export_that_differs(world: World, tmp_path: Path) -> None:
    """Exit code 1, and what differs by how much."""
    fill(world)
    file = tmp_path / "export.csv"
    file.write_text("date,model,input_tokens,output_tokens\n2026-11-02,model-at-upstream,21,4\n")

    result = world.command("usage", "reconcile", str(file), "--format", "jsonl")

    assert 1 == result.exit_code
    assert {
        "day": "2026-11-02",
        "model": "model-at-upstream",
        "tokens": "input",
        "provider": 21,
        "ledger": 20,
        "difference": -1,
    } == json.loads(result.stdout)


def test_a_file_that_is_no_export(on_sqlite: World, tmp_path: Path) -> None:
    """It is said what is missing."""
    file = tmp_path / "export.csv"
    file.write_text("a,b\n1,2\n")

    result = on_sqlite.command("usage", "reconcile", str(file))

    assert 1 == result.exit_code
    assert "no column for day" in result.stderr


@pytest.mark.slow
async def test_a_change_takes_effect_beside_a_running_gateway(tmp_path: Path) -> None:
    """run.py makes a key, and the running gateway lets it in within five seconds."""
    async with ScriptedUpstream() as upstream, aiohttp.ClientSession() as session:
        config = configured(f"sqlite:///{tmp_path}/ezat.db", upstream.url)
        with started(config, tmp_path / "gateway") as gateway:
            made = await run("--config", str(tmp_path / "gateway" / "gateway.yaml"), "keys", "create", "ann")
            since = datetime.now()
            while (answer := await ask(session, gateway.url, key=made.output.strip())).status != 200:
                assert 401 == answer.status
                assert (datetime.now() - since).total_seconds() < 5

    assert answer.is_whole
