"""Who asks, and may it come in?"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from multidict import CIMultiDict, CIMultiDictProxy
from pydantic import BaseModel, SecretStr, ValidationError

from plugins.auth import Auth, AuthSettings
from proxy.errors import GatewayError, Kind
from proxy.exchange import Exchange, Key, Limits
from proxy.limits import open_limiter
from proxy.models import ModelTable
from proxy.plugin import Route, Services
from proxy.store.administration import change_key, change_organization, create_key, create_organization
from proxy.store.money import UNITS_PER_USD
from proxy.store.store import Store
from proxy.testing import MODEL, ScriptedUpstream, message_reply, running_gateway

Json = dict[str, Any]
SECRET = "ezat_sk_alice"
MODELS = ModelTable([MODEL])


@asynccontextmanager
async def services_of(url: str = "sqlite:///:memory:") -> AsyncIterator[Services]:
    store = Store(url)
    await store.start()
    async with aiohttp.ClientSession() as session:
        yield Services(MODELS, open_limiter("memory"), store, session)
    await store.stop(5)


@asynccontextmanager
async def auth_of(settings: Mapping[str, Any], url: str = "sqlite:///:memory:") -> AsyncIterator[Auth]:
    async with services_of(url) as services:
        plugin = Auth(AuthSettings.model_validate(settings))
        await plugin.start(services)
        yield plugin


def exchange_with(key: str | None) -> Exchange:
    headers = {} if key is None else {"x-api-key": key}
    return Exchange(Route.MESSAGES, CIMultiDictProxy(CIMultiDict(headers)), MODELS)


async def judged(plugin: Auth, key: str | None = SECRET) -> Key | GatewayError:
    """Who asks, or why it may not come in."""
    exchange = exchange_with(key)
    try:
        await plugin.on_headers(exchange)
    except GatewayError as refusal:
        assert exchange.key is None
        return refusal
    assert exchange.key is not None
    return exchange.key


def one_key(**fields: Any) -> Json:
    organizations = [{"name": "acme"}, {"name": "frozen", "suspended": True}]
    return {"organizations": organizations, "keys": [{"name": "alice", "key": SECRET, **fields}]}


def at(**difference: float) -> str:
    return (datetime.now(UTC) + timedelta(**difference)).isoformat()


INVALID = (Kind.AUTHENTICATION, "the API key is not valid")
ENTERING: dict[str, tuple[Json, str | None, tuple[Kind, str] | None]] = {
    "a key": ({}, SECRET, None),
    "a key of an organization": ({"organization": "acme"}, SECRET, None),
    "none": ({}, None, (Kind.AUTHENTICATION, "no API key was sent; send it as `Authorization: Bearer …`")),
    "an unknown one": ({}, "ezat_sk_bob", INVALID),
    "the beginning of one": ({}, SECRET[:-1], INVALID),
    "more than one": ({}, SECRET + "x", INVALID),
    "another letter case": ({}, SECRET.upper(), INVALID),
    "a provider's": ({}, "sk-ant-x", INVALID),
    "an attack on a database": ({}, "' OR '1'='1", INVALID),
    "an attack on a template": ({}, "${jndi:ldap://x}{{7*7}}", INVALID),
    "signs beyond ASCII": ({}, "ezat_sk_é\udcff", INVALID),
    "a very long one": ({}, "ezat_sk_" + "x" * 8000, INVALID),
    "the prefix alone": ({}, "ezat_sk_", INVALID),
    "a revoked one": ({"revoked": True}, SECRET, INVALID),
    "one that ended": ({"expires_at": at(seconds=-1)}, SECRET, INVALID),
    "one that ended long ago": ({"expires_at": "1970-01-01T00:00:00Z"}, SECRET, INVALID),
    "one that ended, in another time zone": ({"expires_at": "2020-01-01T00:00:00+14:00"}, SECRET, INVALID),
    "one that will end": ({"expires_at": at(days=1)}, SECRET, None),
    "one that will end in a hundred years": ({"expires_at": at(days=36525)}, SECRET, None),
    "one of a suspended organization": (
        {"organization": "frozen"},
        SECRET,
        (Kind.PERMISSION, "the organization of this key is suspended"),
    ),
    "a revoked one of a suspended organization": ({"organization": "frozen", "revoked": True}, SECRET, INVALID),
}


@pytest.mark.parametrize(("fields", "key", "expected"), ENTERING.values(), ids=ENTERING)
async def test_who_may_come_in(fields: Json, key: str | None, expected: tuple[Kind, str] | None) -> None:
    """A known key comes in unless it is revoked, over or suspended; all that are not valid are told the same."""
    async with auth_of(one_key(**fields)) as plugin:
        found = await judged(plugin, key)

    assert expected == ((found.kind, found.message) if isinstance(found, GatewayError) else None)


async def test_a_key_ends_at_its_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key is good up to its moment and not from it on; who is in already isn't asked again."""
    ends = datetime(2026, 11, 1, tzinfo=UTC).timestamp()

    found = []
    async with auth_of(one_key(expires_at="2026-11-01T00:00:00Z")) as plugin:
        for now in (ends - 0.001, ends, ends + 1):
            monkeypatch.setattr("plugins.auth.time", SimpleNamespace(time=lambda now=now: now))
            found.append(isinstance(await judged(plugin), Key))

    assert [True, False, False] == found


async def test_what_a_key_stands_for() -> None:
    """What was set for a key and its organization is what other plugins see; never the key itself."""
    organization = {"name": "acme", "balance_usd": "12.5", "requests_per_minute": 9, "parallel_requests": 8}
    key = {
        "name": "alice",
        "key": SECRET,
        "organization": "acme",
        "models": ["MODEL"],
        "requests_per_minute": 7,
        "input_tokens_per_minute": 6,
        "spend_limit_usd": "0.000001",
        "spend_period": "day",
    }

    async with auth_of({"organizations": [organization], "keys": [key]}) as plugin:
        found = await judged(plugin)

    expected = Key(
        id="yaml:alice",
        name="alice",
        organization="acme",
        models=frozenset({"test/model"}),
        limits=Limits(requests_per_minute=7, input_tokens_per_minute=6),
        organization_limits=Limits(requests_per_minute=9, parallel_requests=8),
        spend_limit=UNITS_PER_USD // 1_000_000,
        spend_period="day",
        credit=UNITS_PER_USD * 25 // 2,
    )
    assert expected == found


ALLOWED: dict[str, tuple[list[str] | None, frozenset[str] | None]] = {
    "all": (None, None),
    "an id": (["test/model"], frozenset({"test/model"})),
    "an alias, in capitals": ([" MODEL "], frozenset({"test/model"})),
    "both names of one": (["model", "test/model"], frozenset({"test/model"})),
    "none": ([], frozenset()),
}


@pytest.mark.parametrize(("models", "expected"), ALLOWED.values(), ids=ALLOWED)
async def test_the_models_of_a_key(models: list[str] | None, expected: frozenset[str] | None) -> None:
    """The models of a key may be named by any of their names."""
    async with auth_of(one_key(models=models)) as plugin:
        found = await judged(plugin)

    assert isinstance(found, Key)
    assert expected == found.models


def _held_by(value: Any, seen: dict[int, Any]) -> Iterator[str]:
    """Every text that can be reached from a value, keys of settings included."""
    if id(value) in seen or isinstance(value, type | ModelTable | Store):
        return
    seen[id(value)] = value
    if isinstance(value, SecretStr):
        yield value.get_secret_value()
    elif isinstance(value, str):
        yield value
    elif isinstance(value, bytes):
        yield value.decode("latin-1")
    elif isinstance(value, Mapping):
        for each in (*value, *value.values()):
            yield from _held_by(each, seen)
    elif isinstance(value, list | tuple | set | frozenset):
        for each in value:
            yield from _held_by(each, seen)
    else:
        slots = [name for base in type(value).__mro__ for name in getattr(base, "__slots__", ())]
        own = {name: getattr(value, name) for name in slots if hasattr(value, name)}
        yield from _held_by({**own, **getattr(value, "__dict__", {})}, seen)


async def test_only_digests_are_kept() -> None:
    """Once started, the plugin holds the digest of a key and nothing that contains the key."""
    async with auth_of(one_key()) as plugin:
        held = list(_held_by(plugin, {}))

    assert "alice" in held
    assert [] == [text for text in held if SECRET in text]


def test_settings_show_no_key() -> None:
    """Neither printing the settings nor an error about them shows a key."""
    settings = AuthSettings.model_validate(one_key())
    with pytest.raises(ValidationError) as raised:
        AuthSettings.model_validate(one_key(expires_at=SECRET, spend_limit_usd=SECRET))

    assert SECRET not in repr(settings)
    assert SECRET not in settings.model_dump_json()
    assert SECRET not in str(raised.value)


BOB = {"name": "bob", "key": "ezat_sk_bob"}
BAD_KEY = "keys.0.key\n  Value error, must begin with ezat_sk_ and go on"
INCONSISTENT: dict[str, tuple[Json, str]] = {
    "a key's name twice": ({"keys": [BOB, {**BOB, "key": "ezat_sk_2"}]}, "the key 'bob' stands twice"),
    "a key twice": ({"keys": [BOB, {**BOB, "name": "b"}]}, "two keys are the same"),
    "an organization twice": (
        {"organizations": [{"name": "a"}, {"name": "a"}], "keys": [BOB]},
        "the organization 'a' stands twice",
    ),
    "an unknown organization": (
        {"keys": [{**BOB, "organization": "a"}]},
        "keys[0].organization: 'a' is not among the organizations",
    ),
    "another prefix": ({"keys": [{**BOB, "key": "sk-bob"}]}, BAD_KEY),
    "the prefix alone": ({"keys": [{**BOB, "key": "ezat_sk_"}]}, BAD_KEY),
    "beyond ASCII": ({"keys": [{**BOB, "key": "ezat_sk_é"}]}, BAD_KEY),
}


@pytest.mark.parametrize(("settings", "message"), INCONSISTENT.values(), ids=INCONSISTENT)
def test_inconsistent_settings(settings: Json, message: str) -> None:
    """What can't be meant is refused at start, and no key is shown."""
    with pytest.raises(ValidationError) as raised:
        AuthSettings.model_validate(settings)

    assert message in str(raised.value)
    assert "ezat_sk_bob" not in str(raised.value)


WRONG = {
    "a time without a zone": {"expires_at": "2030-01-01T00:00:00"},
    "no requests": {"requests_per_minute": 0},
    "a negative limit": {"spend_limit_usd": "-1"},
    "an unknown period": {"spend_period": "year"},
    "an unknown setting": {"expire_at": "2030-01-01T00:00:00Z"},
    "an empty name": {"name": ""},
}


@pytest.mark.parametrize("fields", WRONG.values(), ids=WRONG)
def test_wrong_settings(fields: Json) -> None:
    """A setting that can't be is refused at start."""
    assert issubclass(AuthSettings, BaseModel)
    with pytest.raises(ValidationError):
        AuthSettings.model_validate(one_key(**fields))


def test_a_model_that_is_not_there_is_a_problem() -> None:
    """A key's model is looked up at start, and the place in the settings is told."""
    plugin = Auth(AuthSettings.model_validate(one_key(models=["model", "gpt-9"])))

    assert [(("keys", 0, "models", 1), "'gpt-9' is not among the models")] == list(plugin.problems(MODELS))


NEEDS: dict[str, tuple[Json, list[str]]] = {
    "nothing": ({"keys": [BOB]}, []),
    "a spend limit": ({"keys": [{**BOB, "spend_limit_usd": 1}]}, ["usage"]),
    "a prepaid organization": ({"organizations": [{"name": "a", "balance_usd": 0}]}, ["usage"]),
    "requests a minute": ({"keys": [{**BOB, "requests_per_minute": 1}]}, ["rate_limit"]),
    "tokens a minute": ({"keys": [{**BOB, "input_tokens_per_minute": 1}]}, ["rate_limit"]),
    "an organization's parallel requests": ({"organizations": [{"name": "a", "parallel_requests": 1}]}, ["rate_limit"]),
}


@pytest.mark.parametrize(("settings", "expected"), NEEDS.values(), ids=NEEDS)
def test_what_settings_need(settings: Json, expected: list[str]) -> None:
    """A budget needs the plugin that keeps it, a limit the one that counts."""
    assert expected == [name for name, _ in Auth(AuthSettings.model_validate(settings)).needs()]


# Keys of the store


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/ezat.db"


async def test_a_key_of_the_store(url: str) -> None:
    """A key that was made by an operator comes in with what was set for it."""
    async with services_of(url) as services:
        await services.store.write(lambda c: create_organization(c, "acme", credit=5, parallel_requests=2))
        made = await services.store.write(
            lambda c: create_key(c, "bob", organization="acme", models=["model"], spend_limit=3, requests_per_minute=4)
        )

    async with auth_of({}, url) as plugin:
        found = await judged(plugin, made.text)
        unknown = await judged(plugin, made.text + "x")

    expected = Key(
        id=made.id,
        name="bob",
        organization="acme",
        models=frozenset({"test/model"}),
        limits=Limits(requests_per_minute=4),
        organization_limits=Limits(parallel_requests=2),
        spend_limit=3,
        credit=5,
    )
    assert expected == found
    assert isinstance(unknown, GatewayError)
    assert INVALID == (unknown.kind, unknown.message)


CHANGES: dict[str, tuple[Json, Json, Kind | None]] = {
    "revoked": ({"revoked_at": 1.0}, {}, Kind.AUTHENTICATION),
    "over": ({"expires_at": 1.0}, {}, Kind.AUTHENTICATION),
    "not over": ({"expires_at": 10.0**10}, {}, None),
    "suspended": ({"organization": "acme"}, {"suspended": True}, Kind.PERMISSION),
}


@pytest.mark.parametrize(("key", "organization", "expected"), CHANGES.values(), ids=CHANGES)
async def test_what_stands_against_a_key_of_the_store(
    url: str, key: Json, organization: Json, expected: Kind | None
) -> None:
    """Keys of the store are judged like those of the YAML."""
    async with services_of(url) as services:
        await services.store.write(lambda c: create_organization(c, "acme"))
        await services.store.write(lambda c: change_organization(c, "acme", {"suspended": False, **organization}))
        made = await services.store.write(lambda c: create_key(c, "bob"))
        await services.store.write(lambda c: change_key(c, "bob", key))

    async with auth_of({}, url) as plugin:
        found = await judged(plugin, made.text)

    assert expected == (found.kind if isinstance(found, GatewayError) else None)


async def test_the_file_of_the_store_holds_no_key(url: str, tmp_path: Path) -> None:
    """Only the digest of a key is written, and its last four characters."""
    async with services_of(url) as services:
        made = await services.store.write(lambda c: create_key(c, "bob"))

    written = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"bob" in written
    assert made.text.encode() not in written
    assert made.text[len("ezat_sk_") : -4].encode() not in written


async def test_a_store_that_can_not_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where keys can't be looked up, nobody is told that a key is wrong; keys of the YAML are known all the same."""
    async with auth_of(one_key()) as plugin:
        monkeypatch.setattr("proxy.store.store.STALE", -1.0)
        known, unknown = await judged(plugin), await judged(plugin, "ezat_sk_bob")

    assert isinstance(known, Key)
    assert isinstance(unknown, GatewayError)
    assert (Kind.UNAVAILABLE, 5) == (unknown.kind, unknown.retry_after)


# Through the gateway

PLACES: dict[str, tuple[Json, int]] = {
    "x-api-key": ({"headers": {"x-api-key": SECRET}}, 200),
    "bearer": ({"headers": {"authorization": f"Bearer {SECRET}"}}, 200),
    "beside a provider's key": ({"headers": {"authorization": f"Bearer {SECRET}", "x-api-key": "sk-ant-x"}}, 200),
    "in the query": ({"params": {"api_key": SECRET}}, 401),
    "in a cookie": ({"headers": {"cookie": f"x-api-key={SECRET}"}}, 401),
    "with an underscore": ({"headers": {"x_api_key": SECRET}}, 401),
    "named in Connection": ({"headers": {"x-api-key": SECRET, "connection": "x-api-key, close"}}, 200),
}


@pytest.mark.parametrize(("how", "expected"), PLACES.values(), ids=PLACES)
async def test_where_a_key_may_stand(how: Json, expected: int) -> None:
    """A key in one of the two headers comes in, elsewhere it is none; and it goes no further."""
    body = {"model": "model", "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]}
    async with (
        ScriptedUpstream(message_reply()) as upstream,
        running_gateway([(Auth, one_key())], upstream=upstream.url, server={"open": False}) as url,
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/messages", json=body, **how) as answer,
    ):
        text = await answer.text()

    assert expected == answer.status
    sent = "".join(f"{each.path}{each.headers}{each.body!r}" for each in upstream.received)
    assert (expected == 200) == bool(upstream.received)
    assert SECRET not in sent + text + str(answer.headers)


async def test_nothing_is_read_before_the_key_is_judged() -> None:
    """Without a key a body is not even looked at."""
    async with (
        running_gateway([(Auth, one_key())], server={"open": False}) as url,
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/messages", data=b"{", headers={"content-encoding": "x"}) as answer,
    ):
        assert 401 == answer.status
