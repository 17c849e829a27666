"""Keys and organizations of the store: changes take effect in running gateways, and what is known may pass for a
while when the store is gone."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from sqlalchemy import Connection

from proxy.exchange import Limits
from proxy.store import administration as admin
from proxy.store import store as store_module
from proxy.store.database import open_engine
from proxy.store.directory import Directory, StoredKey, read_if_newer
from proxy.store.migrations import migrate
from proxy.store.store import REFRESH, STALE, Store
from proxy.testing import ScriptedUpstream
from tests.process import eventually
from tests.store.gateways import ask, configured, from_store, in_store, look, serving

Change = Callable[[Connection], Any]
PATIENCE = 30.0


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time between two looks, in tests; the real one is judged below."""
    monkeypatch.setattr(store_module, "REFRESH", 0.02)


def test_a_change_takes_effect_within_five_seconds() -> None:
    """What the documentation says: a running gateway looks often enough, and knows for how long it may rely on it."""
    assert 5 > REFRESH * 2
    assert 10 == STALE


FIELDS = {
    "nothing but a name": {},
    "everything": {
        "organization": "acme",
        "models": ["test/model", "other"],
        "requests_per_minute": 3,
        "input_tokens_per_minute": 10**10,
        "parallel_requests": 2,
        "spend_limit": 9 * 10**18,
        "spend_period": "week",
        "expires_at": 1_900_000_000.5,
    },
    "no model at all": {"models": []},
}


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
async def test_a_key_is_known_as_it_was_made(store: Store, fields: dict[str, Any]) -> None:
    """All that was said of a key comes back; of the key itself only its digest, its beginning and its last four."""
    await store.write(lambda connection: admin.create_organization(connection, "acme"))
    new = await store.write(lambda connection: admin.create_key(connection, "one", **fields))

    directory = await store.read(read_if_newer(Directory()))

    limits = Limits(*(fields.get(name) for name in Limits.__slots__))
    named = {name: value for name, value in fields.items() if name not in Limits.__slots__ and name != "models"}
    models = None if "models" not in fields else tuple(fields["models"])
    digest = hashlib.sha256(new.text.encode()).digest()
    shown = f"ezat_sk_…{new.text[-4:]}"
    assert {digest: StoredKey(new.id, "one", digest, shown, limits=limits, models=models, **named)} == directory.keys


async def test_keys_are_long_and_never_the_same(store: Store) -> None:
    """A key begins as all do and can't be guessed: 256 bits."""
    made = [await store.write(lambda c, n=n: admin.create_key(c, f"key {n}")) for n in range(5)]  # type: ignore[misc]

    assert 5 == len({new.text for new in made}) == len({new.id for new in made})
    assert all(new.text.startswith("ezat_sk_") and len(new.text) == len("ezat_sk_") + 43 for new in made)


async def test_an_organization_is_known_as_it_was_made(store: Store) -> None:
    """Its credit, its limits and whether it is suspended."""
    await store.write(lambda c: admin.create_organization(c, "acme", credit=5, requests_per_minute=7))
    await store.write(lambda c: admin.create_organization(c, "free"))
    await store.write(lambda c: admin.change_organization(c, "acme", {"suspended": True}))

    known = (await store.read(read_if_newer(Directory()))).organizations

    assert ("acme", True, 5, Limits(7)) == (
        known["acme"].name,
        known["acme"].suspended,
        known["acme"].credit,
        known["acme"].limits,
    )
    assert (False, None, Limits()) == (known["free"].suspended, known["free"].credit, known["free"].limits)


REFUSED: dict[str, tuple[Change, type[Exception]]] = {
    "a key of the same name": (lambda c: admin.create_key(c, "there"), admin.Taken),
    "a key of an unknown organization": (lambda c: admin.create_key(c, "new", organization="none"), admin.NotThere),
    "an organization of the same name": (lambda c: admin.create_organization(c, "there"), admin.Taken),
    "a change of an unknown key": (lambda c: admin.change_key(c, "none", {"revoked_at": 1.0}), admin.NotThere),
    "a change of an unknown organization": (
        lambda c: admin.change_organization(c, "none", {"suspended": True}),
        admin.NotThere,
    ),
    "credit for an unknown organization": (lambda c: admin.add_credit(c, "none", 1), admin.NotThere),
    "more credit than can be counted": (lambda c: admin.add_credit(c, "there", 9 * 10**18), admin.TooMuch),
}


@pytest.mark.parametrize(("change", "expected"), REFUSED.values(), ids=REFUSED)
async def test_what_cannot_be_done_changes_nothing(
    store: Store, store_url: str, change: Change, expected: type[Exception]
) -> None:
    """A refused change leaves everything as it was, and no gateway has to look."""

    def there(connection: Connection) -> None:
        admin.create_key(connection, "there")
        admin.create_organization(connection, "there", credit=1)

    in_store(store_url, there)
    before = from_store(store_url, read_if_newer(Directory()))

    with pytest.raises(expected):
        in_store(store_url, change)

    assert before == from_store(store_url, read_if_newer(Directory()))


async def test_credit_adds_up(store: Store) -> None:
    """Credit is added to what was paid in before; an organization that wasn't prepaid is from then on."""
    await store.write(lambda c: admin.create_organization(c, "acme"))

    assert 5 == await store.write(lambda c: admin.add_credit(c, "acme", 5))
    assert 12 == await store.write(lambda c: admin.add_credit(c, "acme", 7))


async def test_what_has_not_changed_is_not_read_again(store: Store) -> None:
    """A look costs one short question while nothing changes."""
    await store.write(lambda c: admin.create_key(c, "one"))
    known = await store.read(read_if_newer(Directory()))

    assert known is await store.read(read_if_newer(known))


# In a running gateway


async def test_a_gateway_sees_a_new_key_and_its_end(session: aiohttp.ClientSession, store_url: str) -> None:
    """A key made beside a running gateway is let in shortly after, and kept out when it is revoked."""
    async with ScriptedUpstream() as upstream, serving(configured(store_url, upstream.url)) as url:
        new = in_store(store_url, lambda connection: admin.create_key(connection, "new"))
        await comes_to(session, url, new.text, 200)

        in_store(store_url, lambda connection: admin.change_key(connection, "new", {"revoked_at": 1.0}))
        await comes_to(session, url, new.text, 401)


async def test_a_gateway_sees_an_organization_suspended_and_resumed(
    session: aiohttp.ClientSession, store_url: str
) -> None:
    """A suspended organization's keys are answered with 403 until it is resumed."""

    def made(connection: Connection) -> str:
        admin.create_organization(connection, "acme")
        return admin.create_key(connection, "new", organization="acme").text

    async with ScriptedUpstream() as upstream, serving(configured(store_url, upstream.url)) as url:
        key = in_store(store_url, made)
        await comes_to(session, url, key, 200)

        in_store(store_url, lambda connection: admin.change_organization(connection, "acme", {"suspended": True}))
        await comes_to(session, url, key, 403)
        in_store(store_url, lambda connection: admin.change_organization(connection, "acme", {"suspended": False}))
        await comes_to(session, url, key, 200)


async def test_a_gateway_sees_new_credit(session: aiohttp.ClientSession, store_url: str) -> None:
    """An organization that has used up what it paid in is served again when it pays in more."""

    def made(connection: Connection) -> str:
        admin.create_organization(connection, "acme", credit=1)
        return admin.create_key(connection, "new", organization="acme").text

    async with ScriptedUpstream() as upstream:
        key = in_store_that_is_new(store_url, made)
        async with serving(configured(store_url, upstream.url)) as url:
            assert 200 == (await ask(session, url, key=key)).status
            assert 402 == (await ask(session, url, key=key)).status
            in_store(store_url, lambda connection: admin.add_credit(connection, "acme", 10**12))
            await comes_to(session, url, key, 200)


async def test_a_gateway_sees_new_limits_and_models(session: aiohttp.ClientSession, store_url: str) -> None:
    """A key's limits and models are changed while it is in use."""
    async with ScriptedUpstream() as upstream, serving(configured(store_url, upstream.url)) as url:
        new = in_store(store_url, lambda connection: admin.create_key(connection, "new"))
        await comes_to(session, url, new.text, 200)

        in_store(store_url, lambda connection: admin.change_key(connection, "new", {"models": ["elsewhere"]}))
        await comes_to(session, url, new.text, 403)
        change = {"models": ["MODEL"], "requests_per_minute": 10**6}
        in_store(store_url, lambda connection: admin.change_key(connection, "new", change))
        await comes_to(session, url, new.text, 200)

        assert "1000000" == (await ask(session, url, key=new.text)).headers["x-ratelimit-limit-requests"]


def in_store_that_is_new(url: str, job: Change) -> Any:
    """The same, where no gateway has made the tables yet."""
    engine = open_engine(url)
    migrate(engine)
    engine.dispose()
    return in_store(url, job)


async def comes_to(session: aiohttp.ClientSession, url: str, key: str, status: int) -> None:
    """Return when a request with this key gets this status."""
    deadline = time.monotonic() + PATIENCE
    while (await ask(session, url, key=key)).status != status:
        assert time.monotonic() < deadline, f"not {status} in time"


# When the store is gone


async def test_what_is_known_counts_for_as_long_as_is_said(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys read last are relied on for ten seconds after the last look that succeeded, and no longer."""
    loop = asyncio.get_running_loop()
    read_at = loop.time()
    monkeypatch.setattr(store_module, "REFRESH", 10**6)

    monkeypatch.setattr(loop, "time", lambda: read_at + STALE - 0.5)
    assert store.is_fresh
    monkeypatch.setattr(loop, "time", lambda: read_at + STALE + 0.5)
    assert not store.is_fresh


async def test_a_known_key_passes_while_the_store_is_gone_and_no_longer(
    session: aiohttp.ClientSession, sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stored key opens the model list though the store can't be read, within the stated time; then it is a 503 with
    retry-after, as for a key that nobody knows; a static key passes all the same."""
    monkeypatch.setattr(store_module, "STALE", 1.0)
    async with ScriptedUpstream() as upstream, serving(configured(sqlite_url, upstream.url)) as url:
        new = in_store(sqlite_url, lambda connection: admin.create_key(connection, "new"))
        await comes_to(session, url, new.text, 200)
        path = sqlite_url.removeprefix("sqlite:///")
        moved(path)

        within = await look(session, url, "/v1/models", new.text)
        deadline = time.monotonic() + PATIENCE
        while (after := await look(session, url, "/v1/models", new.text)).status == 200:
            assert time.monotonic() < deadline, "it is let in for ever"
        unknown = await look(session, url, "/v1/models", "ezat_sk_nobody")
        static = await look(session, url, "/v1/models")

    assert [200, 503, 503, 200] == [each.status for each in (within, after, unknown, static)]
    assert "5" == after.headers["retry-after"] == unknown.headers["retry-after"]


def moved(path: str) -> None:
    os.rename(path, path + ".away")
    os.mkdir(path)  # nothing can be opened there


async def test_a_gateway_finds_out_that_the_store_is_back(store: Store) -> None:
    """It looks again and again; when it can read, what it knows is fresh."""
    await eventually(lambda: store.is_fresh)
    assert store.is_ready
