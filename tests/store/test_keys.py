"""Who may come in (group A of the fault cases): keys of the YAML and of the store, in every spelling of the headers."""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest

from plugins import auth as auth_module
from proxy.store import store as store_module
from proxy.store.administration import create_key
from proxy.store.database import path_of
from proxy.store.directory import Directory, read_if_newer
from proxy.store.store import Store
from proxy.testing import ScriptedUpstream, stream_reply, text_events
from tests.store.gateways import PATHS, body, configured, from_store, in_store, ledger, serving

ONE = "ezat_sk_one"
TWO = "ezat_sk_two"
AUTH: dict[str, Any] = {
    "organizations": [{"name": "gone", "suspended": True}],
    "keys": [
        {"name": "one", "key": ONE},
        {"name": "two", "key": TWO},
        {"name": "revoked", "key": "ezat_sk_revoked", "revoked": True},
        {"name": "expired", "key": "ezat_sk_expired", "expires_at": "2020-01-01T00:00:00Z"},
        {"name": "suspended", "key": "ezat_sk_suspended", "organization": "gone"},
        {"name": "of-2100", "key": "ezat_sk_2100", "expires_at": "2100-01-01T00:00:00Z"},
    ],
}


class World(NamedTuple):
    url: str
    store: str
    upstream: ScriptedUpstream
    stored: str
    """A key of the store."""


@pytest.fixture
async def world(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(store_module, "REFRESH", 0.02)
    async with ScriptedUpstream() as upstream, serving(configured(sqlite_url, upstream.url, auth=AUTH)) as url:
        stored = in_store(sqlite_url, lambda connection: create_key(connection, "stored")).text
        yield World(url, sqlite_url, upstream, stored)


Headers = dict[str, str]
ENTERS: dict[str, tuple[Headers, str]] = {
    "A2 a bearer token": ({"authorization": f"Bearer {ONE}"}, "one"),
    "A2 x-api-key": ({"x-api-key": ONE}, "one"),
    "A4 both, the same": ({"authorization": f"Bearer {ONE}", "x-api-key": ONE}, "one"),
    "A5 both, two of ours": ({"authorization": f"Bearer {ONE}", "x-api-key": TWO}, "two"),
    "A5 both, a provider's in x-api-key": ({"authorization": f"Bearer {ONE}", "x-api-key": "sk-ant-1"}, "one"),
    "A5 both, a provider's as a bearer": ({"authorization": "Bearer sk-proj-1", "x-api-key": ONE}, "one"),
    "A7 two spaces": ({"authorization": f"Bearer  {ONE}"}, "one"),
    "A7 small letters": ({"authorization": f"bearer {ONE}"}, "one"),
    "A7 capitals": ({"authorization": f"BEARER {ONE}"}, "one"),
    "a key that ends in time": ({"x-api-key": "ezat_sk_2100"}, "of-2100"),
}
STAYS_OUT: dict[str, Headers] = {
    "A1 no key": {},
    "A1 an empty key": {"x-api-key": ""},
    "A5 both, two of ours, the first unknown": {"authorization": f"Bearer {ONE}", "x-api-key": "ezat_sk_unknown"},
    "A5 both, neither ours": {"authorization": "Bearer sk-proj-1", "x-api-key": "sk-ant-1"},
    "A7 Basic": {"authorization": f"Basic {ONE}"},
    "A7 Token": {"authorization": f"Token {ONE}"},
    "A7 the key alone": {"authorization": ONE},
    "A7 Bearer alone": {"authorization": "Bearer"},
    "A7 a tab": {"authorization": f"Bearer\t{ONE}"},
    "A8 a comma": {"authorization": f"Bearer {ONE},"},
    "A8 more": {"authorization": f"Bearer {ONE} extra"},
    "A8 in quotes": {"authorization": f'Bearer "{ONE}"'},
    "A8 a beginning": {"x-api-key": ONE[:-1]},
    "A8 a beginning and more": {"x-api-key": ONE + "e"},
    "another case": {"x-api-key": ONE.upper()},
    "A10 8000 bytes": {"x-api-key": "ezat_sk_" + "x" * 8000},
    "A11 SQL": {"x-api-key": "' OR '1'='1"},
    "A11 a template": {"x-api-key": "{{7*7}}"},
    "A11 a look-up": {"x-api-key": "${jndi:ldap://127.0.0.1/a}"},
    "A11 a path": {"x-api-key": "../../x"},
    "A11 an encoded NUL": {"x-api-key": "%00"},
    "not ASCII": {"x-api-key": "ezat_sk_é"},
    "A17 an underscore": {"X_Api_Key": ONE},
    "revoked": {"x-api-key": "ezat_sk_revoked"},
    "expired": {"x-api-key": "ezat_sk_expired"},
}


async def status(world: World, session: aiohttp.ClientSession, path: str, headers: Headers) -> tuple[int, str]:
    async with session.post(world.url + path, json=body(), headers=headers) as answer:
        return answer.status, await answer.text()


async def test_a_key_opens_in_every_spelling_that_clients_use(world: World, session: aiohttp.ClientSession) -> None:
    """A2, A4, A5, A7: on both endpoints; and the ledger says whose key it was."""
    for path in PATHS.values():
        answers = {name: (await status(world, session, path, headers))[0] for name, (headers, _) in ENTERS.items()}
        assert dict.fromkeys(ENTERS, 200) == answers

    assert [f"yaml:{name}" for _, name in ENTERS.values()] * 2 == [row["key_id"] for row in ledger(world.store)]


async def test_whoever_has_no_key_stays_out(world: World, session: aiohttp.ClientSession) -> None:
    """A1, A5, A7, A8, A10, A11, A17: 401 in the envelope of the path, with one text for every wrong key, and nothing
    reaches the upstream."""
    for path, of_no_key in (
        (PATHS["openai"], '"code":"invalid_api_key"'),
        (PATHS["messages"], '"type":"authentication_error"'),
    ):
        answers = {name: await status(world, session, path, headers) for name, headers in STAYS_OUT.items()}
        assert dict.fromkeys(STAYS_OUT, 401) == {name: code for name, (code, _) in answers.items()}
        assert all(of_no_key in text for _, text in answers.values())
        texts = {
            text.partition('"request_id"')[0]
            for name, (_, text) in answers.items()
            if name.startswith(("A8 a beginning", "A10", "A11", "revoked", "expired"))
        }
        assert 1 == len(texts), "a wrong key looks like any other"

    assert [] == world.upstream.received


async def test_a_key_of_9000_bytes_is_refused_by_the_parser(world: World, session: aiohttp.ClientSession) -> None:
    """A10: longer than any line may be."""
    code, text = await status(world, session, PATHS["messages"], {"x-api-key": "ezat_sk_" + "x" * 9000})

    assert 400 == code
    assert "xxxx" not in text


async def test_a_suspended_organization_is_refused_before_the_body(
    world: World, session: aiohttp.ClientSession
) -> None:
    """403, though the body is no JSON; and so is a wrong key's 401."""
    for key, expected in (("ezat_sk_suspended", 403), ("ezat_sk_unknown", 401)):
        async with session.post(world.url + "/v1/messages", data=b"{", headers={"x-api-key": key}) as answer:
            assert expected == answer.status


async def test_a_key_that_ends_during_a_stream_lets_it_end(
    world: World, session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A13: the running answer is whole and recorded; the next request is a 401."""
    world.upstream.replies.append(stream_reply([*text_events("a", stop_reason=None), 0.1, *text_events("b")[3:]]))
    headers = {"x-api-key": "ezat_sk_2100"}
    async with session.post(world.url + "/v1/messages", json=body(stream=True), headers=headers) as answer:
        await answer.content.readany()

        class InTheYear2101:
            time = staticmethod(lambda: time.time() + 75 * 366 * 86400)

        monkeypatch.setattr(auth_module, "time", InTheYear2101)
        assert b"message_stop" in await answer.read()
    code, _ = await status(world, session, PATHS["messages"], headers)

    assert 401 == code
    assert ["yaml:of-2100"] == [row["key_id"] for row in ledger(world.store)]


async def test_a_key_is_found_by_its_digest(store: Store) -> None:
    """A14: keys are looked up by digest, so what a comparison takes says nothing about a key; nothing that is kept in
    memory holds the key itself."""
    made = [await store.write(partial(create_key, name=name)) for name in ("one", "other")]

    directory = await store.read(read_if_newer(Directory()))

    assert {hashlib.sha256(new.text.encode()).digest() for new in made} == set(directory.keys)
    assert [] == [new for new in made if new.text[8:] in repr(directory)]


async def test_the_database_holds_no_key_and_no_prompt(world: World, session: aiohttp.ClientSession) -> None:
    """J7: digests alone, in the file and in its journal; and of a request neither its text nor that of its answer."""
    deadline = time.monotonic() + 30
    world.upstream.replies.append(stream_reply(text_events("CANARY-ANSWER")))
    fields = {"stream": True, "messages": [{"role": "user", "content": "CANARY-PROMPT"}], "system": "CANARY-SYSTEM"}
    headers = {"x-api-key": world.stored}
    answered = 0
    while answered != 200:  # until the gateway has seen the key
        assert time.monotonic() < deadline
        async with session.post(world.url + "/v1/messages", json=body(**fields), headers=headers) as answer:
            answered = answer.status
            assert answered != 200 or b"CANARY-ANSWER" in await answer.read()

    written = b"".join(path.read_bytes() for path in sorted(path_of(world.store).parent.glob("ezat.db*")))
    assert b"test/model" in written, "the row is there"
    found = [text for text in (ONE, world.stored, "CANARY-", "upstream-secret") if text.encode() in written]
    assert [] == found


async def test_a_key_is_shown_by_its_last_four(world: World) -> None:
    """J4: what is kept for display is the common beginning and the last four characters."""
    shown = [key.shown for key in from_store(world.store, read_if_newer(Directory())).keys.values()]

    assert [f"ezat_sk_…{world.stored[-4:]}"] == shown


def test_files_are_where_the_url_says() -> None:
    """``sqlite:///`` and a path, from the working directory."""
    assert [Path("data/x.db"), Path("/data/x.db")] == [path_of("sqlite:///data/x.db"), path_of("sqlite:////data/x.db")]
