"""What a reload would change: the differences of two configurations, and `run.py plan`, told by a running gateway."""

from __future__ import annotations

import copy
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from proxy.command_plan import admin_url
from proxy.config import load
from proxy.plan import changes
from proxy.testing import ScriptedUpstream
from tests.noted_plugins import FAILING, FIRST
from tests.process import Ended, run
from tests.reloads import KEY, UPSTREAM_KEY, Operated, auth, configured, model, operated

CANARY = "canary-of-a-secret"
OTHER_KEY = f"ezat_sk_{CANARY}"
Change = Callable[[dict[str, Any]], object]


def base() -> dict[str, Any]:
    """A configuration with something to change everywhere."""
    return {
        "server": {"port": 8787},
        "store": "sqlite:///data/ezat.db",
        "upstreams": {
            "a": {"base_url": "http://a", "api_key": f"{CANARY}-a", "headers": {"x-team": f"{CANARY}-team"}},
            "b": {"base_url": "http://b", "proxy": f"http://user:{CANARY}@proxy", "ca_file": "ca.pem"},
        },
        "models": [
            {
                "id": "test/one",
                "aliases": ["one"],
                "max_output_tokens": 100,
                "price": {"input": 1, "output": 5},
                "deployments": [{"upstream": "a", "model": "x"}, {"upstream": "b", "model": "y", "weight": 2}],
            },
            {
                "id": "test/two",
                "max_output_tokens": 100,
                "price": "free",
                "deployments": [{"upstream": "a", "model": "z"}],
            },
        ],
        "plugins": [
            {
                "auth": {
                    "keys": [
                        {"name": "first", "key": f"ezat_sk_{CANARY}-1", "requests_per_minute": 60},
                        {"name": "second", "key": f"ezat_sk_{CANARY}-2"},
                    ],
                    "secrets": {f"sk-{CANARY}": 1, "plain": f"{CANARY}-plain"},
                }
            },
            "usage",
            {"sampling": {"enabled": True}},
        ],
    }


def settings_of_auth(config: dict[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = config["plugins"][0]["auth"]
    return settings


CHANGES: dict[str, tuple[Change, list[str]]] = {
    "nothing": (lambda new: None, []),
    "a default that is written out": (lambda new: new["server"].update(watch=True), []),
    "a number": (lambda new: new["server"].update(plugin_timeout=5), ["server.plugin_timeout: 30 → 5"]),
    "a yes or no": (lambda new: new["server"].update(watch=False), ["server.watch: true → false"]),
    "a text": (lambda new: new["server"].update(base_path="/llm"), ['server.base_path: "" → /llm']),
    "a list": (
        lambda new: new["server"].update(trusted_proxies=["10.0.0.0/8", "::1/128"]),
        ["server.trusted_proxies: [] → [10.0.0.0/8, ::1/128]"],
    ),
    "the port": (lambda new: new["server"].update(port=1), ["server.port: 8787 → 1 (needs a restart)"]),
    "the admin host": (
        lambda new: new["server"].update(admin={"host": "::1"}),
        ["server.admin.host: 127.0.0.1 → ::1 (needs a restart)"],
    ),
    "the store": (
        lambda new: new.update(store=f"postgresql://user:{CANARY}@db/ezat"),
        ["store: changed (needs a restart)"],
    ),
    "the limiter": (
        lambda new: new.update(limiter=f"redis://:{CANARY}@redis"),
        ["limiter: changed (needs a restart)"],
    ),
    "an upstream's address": (
        lambda new: new["upstreams"]["a"].update(base_url="http://c"),
        ["upstreams.a.base_url: http://a → http://c"],
    ),
    "an upstream's key": (lambda new: new["upstreams"]["a"].update(api_key="x"), ["upstreams.a.api_key: changed"]),
    "a key that is gone": (lambda new: new["upstreams"]["a"].pop("api_key"), ["upstreams.a.api_key: removed"]),
    "a key that is new": (lambda new: new["upstreams"]["b"].update(api_key="x"), ["upstreams.b.api_key: added"]),
    "a header": (
        lambda new: new["upstreams"]["a"].update(headers={"x-team": "x"}),
        ["upstreams.a.headers.x-team: changed"],
    ),
    "an HTTP proxy": (lambda new: new["upstreams"]["b"].update(proxy="http://p"), ["upstreams.b.proxy: changed"]),
    "no HTTP proxy": (lambda new: new["upstreams"]["b"].pop("proxy"), ["upstreams.b.proxy: removed"]),
    "an upstream that is new": (
        lambda new: new["upstreams"].update(c={"base_url": "http://c", "api_key": CANARY}),
        ["upstreams.c: added"],
    ),
    "a model that is new": (
        lambda new: new["models"].append({**new["models"][1], "id": "test/three"}),
        ["models.test/three: added"],
    ),
    "a model that is gone": (lambda new: new["models"].pop(0), ["models.test/one: removed"]),
    "models in another order": (
        lambda new: new["models"].reverse(),
        ["models: order test/one, test/two → test/two, test/one"],
    ),
    "a price": (
        lambda new: new["models"][0].update(price={"input": "1.25", "output": 5}),
        ["models.test/one.price.input: 1 → 1.25"],
    ),
    "aliases": (
        lambda new: new["models"][0].update(aliases=["one", "uno"]),
        ["models.test/one.aliases: [one] → [one, uno]"],
    ),
    "a capability": (
        lambda new: new["models"][1].update(capabilities={"effort": False}),
        ["models.test/two.capabilities.effort: [low, medium, high, xhigh, max] → []"],
    ),
    "a deployment's weight": (
        lambda new: new["models"][0]["deployments"][1].update(weight=3),
        ["models.test/one.deployments.b/y.weight: 2 → 3"],
    ),
    "a deployment's bound": (
        lambda new: new["models"][0]["deployments"][1].update(max_parallel=3),
        ["models.test/one.deployments.b/y.max_parallel: none → 3"],
    ),
    "a deployment that is gone": (
        lambda new: new["models"][0]["deployments"].pop(1),
        ["models.test/one.deployments.b/y: removed"],
    ),
    "a client's key": (
        lambda new: settings_of_auth(new)["keys"][0].update(key=OTHER_KEY),
        ["plugins.auth.settings.keys.first.key: changed"],
    ),
    "a client's limit": (
        lambda new: settings_of_auth(new)["keys"][0].update(requests_per_minute=90),
        ["plugins.auth.settings.keys.first.requests_per_minute: 60 → 90"],
    ),
    "a client that is gone": (
        lambda new: settings_of_auth(new)["keys"].pop(1),
        ["plugins.auth.settings.keys.second: removed"],
    ),
    "a secret as a setting's name": (
        lambda new: settings_of_auth(new)["secrets"].update({f"sk-{CANARY}": 2}),
        ["plugins.auth.settings.secrets.…: 1 → 2"],
    ),
    "a text of a plugin": (
        lambda new: settings_of_auth(new)["secrets"].update(plain=CANARY),
        ["plugins.auth.settings.secrets.plain: changed"],
    ),
    "a text of a plugin in place of a number": (
        lambda new: settings_of_auth(new)["secrets"].update({f"sk-{CANARY}": CANARY}),
        ["plugins.auth.settings.secrets.…: changed"],
    ),
    "a plugin that is new": (lambda new: new["plugins"].insert(1, "reasoning"), ["plugins.reasoning: added"]),
    "a plugin that is gone": (lambda new: new["plugins"].pop(1), ["plugins.usage: removed"]),
    "a plugin that is off": (
        lambda new: new["plugins"].__setitem__(2, {"sampling": {"enabled": False}}),
        ["plugins.sampling.enabled: true → false"],
    ),
    "plugins in another order": (
        lambda new: new["plugins"].append(new["plugins"].pop(0)),
        ["plugins: order auth, usage, sampling → usage, sampling, auth"],
    ),
    "many at once, in the order of the settings": (
        lambda new: (new["plugins"].pop(1), new["models"].pop(1), new["server"].update(watch=False)),
        ["server.watch: true → false", "models.test/two: removed", "plugins.usage: removed"],
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_difference_has_its_path_and_no_secret(tmp_path: Path, name: str) -> None:
    """A difference is told with its path and, where that is no secret, with both values."""
    change, expected = CHANGES[name]
    (tmp_path / "ca.pem").write_text("certificates")
    path = tmp_path / "gateway.yaml"
    data = base()
    path.write_text(json.dumps(data))  # JSON is YAML
    old = load(path, {})
    change(data)
    path.write_text(json.dumps(data))

    found = [str(each) for each in changes(old, load(path, {}))]

    assert expected == found
    assert CANARY not in "".join(found)


def test_renewed_certificates_are_a_difference(tmp_path: Path) -> None:
    """A file of certificates that holds others is told, though its name is the same; a key in a file as the key."""
    certificates, key = tmp_path / "ca.pem", tmp_path / "key"
    certificates.write_text("certificates")
    key.write_text(CANARY)
    path = tmp_path / "gateway.yaml"
    data = base()
    data["upstreams"]["b"]["api_key_file"] = "key"
    path.write_text(json.dumps(data))
    old = load(path, {})

    certificates.write_text("others")
    key.write_text(f"{CANARY}-2")
    found = [str(each) for each in changes(old, load(path, {}))]

    assert ["upstreams.b.api_key: changed", "upstreams.b.ca_file: the file holds something else"] == found


def test_two_loads_of_one_file_do_not_differ(tmp_path: Path) -> None:
    """The same text is the same configuration, also with another comment and other quotes."""
    path = tmp_path / "gateway.yaml"
    (tmp_path / "ca.pem").write_text("certificates")
    path.write_text(json.dumps(base()))
    old = load(path, {})
    path.write_text(f"# a comment\n{json.dumps(copy.deepcopy(base()), indent=2)}\n")

    assert [] == changes(old, load(path, {}))


ADMIN_URLS = {
    "nothing said": ("server: {}", "http://127.0.0.1:8788"),
    "no file": (None, "http://127.0.0.1:8788"),
    "a file that can't be read": ("server: [", "http://127.0.0.1:8788"),
    "nothing of a server": ("- 1", "http://127.0.0.1:8788"),
    "an empty section": ("server: {admin: }", "http://127.0.0.1:8788"),
    "a port": ("server: {admin: {port: 9}}\nwrong: yes", "http://127.0.0.1:9"),
    "a variable": ('server: {admin: {port: "${EZAT_TEST_ADMIN_PORT}"}}', "http://127.0.0.1:10"),
    "a host": ("server: {admin: {host: localhost}}", "http://localhost:8788"),
    "a host of IPv6": ('server: {admin: {host: "::1"}}', "http://[::1]:8788"),
}


@pytest.mark.parametrize("name", ADMIN_URLS)
def test_the_admin_listener_is_found_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Where the listener is stands in the file, also in one that is wrong otherwise."""
    text, expected = ADMIN_URLS[name]
    monkeypatch.setenv("EZAT_TEST_ADMIN_PORT", "10")
    path = tmp_path / "gateway.yaml"
    if text is not None:
        path.write_text(text)

    assert expected == admin_url(path)


# The command


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def upstream() -> AsyncIterator[ScriptedUpstream]:
    async with ScriptedUpstream() as started:
        yield started


@pytest.fixture(scope="module")
def gateway(upstream: ScriptedUpstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operated]:
    with operated(configured(upstream.url), tmp_path_factory.mktemp("gateway")) as running:
        yield running


async def plan(gateway: Operated, *arguments: str) -> Ended:
    """`run.py plan` with the file of the gateway."""
    return await run("plan", "--config", str(gateway.path), *(arguments or ("--admin", gateway.admin)))


PLANS: dict[str, tuple[Callable[[str], dict[str, Any]], int, tuple[str, ...], tuple[str, ...]]] = {
    "nothing": (lambda url: configured(url), 0, ("a reload would change nothing",), ()),
    "much": (
        lambda url: configured(
            url,
            FIRST,
            upstreams={
                "test": {
                    "base_url": url,
                    "api_key": CANARY,
                    "headers": {"x-secret": CANARY},
                    "proxy": f"http://user:{CANARY}@127.0.0.1:1",
                }
            },
            models=[model(max_output_tokens=100), model("test/new")],
            asks=auth({"name": "stays", "key": f"{KEY}-{CANARY}"}, {"name": "new", "key": OTHER_KEY}),
        ),
        0,
        (
            "upstreams.test.api_key: changed",
            "upstreams.test.headers.x-secret: added",
            "upstreams.test.proxy: added",
            "models.test/model.max_output_tokens: 8192 → 100",
            "models.test/new: added",
            "plugins.auth.settings.keys.stays.key: changed",
            "plugins.auth.settings.keys.new: added",
            f"plugins.{FIRST}: added",
        ),
        (),
    ),
    "what needs a restart": (
        lambda url: {**configured(url, FIRST), "store": f"postgresql://user:{CANARY}@127.0.0.1/ezat"},
        1,
        ("store: changed (needs a restart)", f"plugins.{FIRST}: added"),
        ("a reload would be refused:", "store: changed (needs a restart)"),
    ),
    "what can't be used": (
        lambda url: configured(url, {FAILING: {"where": "constructor", "token": CANARY}}),
        1,
        (),
        ("a reload would be refused:", "gateway.yaml:", "can't be made: ValueError: no such thing; **********"),
    ),
}


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", PLANS)
async def test_a_plan_tells_what_a_reload_would_change(
    gateway: Operated, upstream: ScriptedUpstream, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The plan names every difference to what runs, and reloads nothing; its exit code says if it would be refused."""
    config, code, output, errors = PLANS[name]
    monkeypatch.setenv("EZAT_ADMIN_TOKEN", gateway.admin_token)
    gateway.write(config(upstream.url))

    told = await plan(gateway)

    assert (code, list(output)) == (told.code, told.output.splitlines())
    assert [] == [word for word in errors if word not in told.errors]
    assert bool(errors) == bool(told.errors)
    assert [] == [each for each in (CANARY, KEY, UPSTREAM_KEY, OTHER_KEY) if each in told.output + told.errors]
    assert [] == gateway.told


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stranger() -> AsyncIterator[str]:
    """The URL of a server that is no gateway, and answers JSON to everything."""

    async def answer(request: web.BaseRequest) -> web.Response:
        return web.json_response({"error": "no such page"})

    runner = web.ServerRunner(web.Server(answer))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


REFUSALS = {
    "a wrong token": (
        ("--token", f"ezat_admin_{CANARY}"),
        "admin",
        "the gateway refuses to tell: send the admin token",
    ),
    "a token that no header takes": (("--token", f"ezat_admin_\n{CANARY}"), "admin", "no gateway answers on its admin"),
    "nobody there": ((), "http://127.0.0.1:1", "no gateway answers on its admin listener, http://127.0.0.1:1"),
    "no URL": ((), "127.0.0.1", "no gateway answers on its admin listener, 127.0.0.1"),
    "clients' own listener": ((), "public", "the gateway refuses to tell: there is no "),
    "another server": ((), "stranger", "is no gateway's admin listener"),
}


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", REFUSALS)
async def test_a_plan_that_nobody_tells_is_an_error(
    gateway: Operated, stranger: str, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Where no gateway answers, or it refuses, that is an exit code of 1 and one line that says so."""
    arguments, where, words = REFUSALS[name]
    monkeypatch.setenv("EZAT_ADMIN_TOKEN", gateway.admin_token)
    url = {"admin": gateway.admin, "public": gateway.url, "stranger": stranger}.get(where, where)

    told = await plan(gateway, "--admin", url, *arguments)

    assert (1, "") == (told.code, told.output)
    assert words in told.errors
    assert 1 == len(told.errors.splitlines())
    assert CANARY not in told.errors


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_a_plan_needs_a_token(gateway: Operated, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a token the command says where it is taken from."""
    monkeypatch.delenv("EZAT_ADMIN_TOKEN", raising=False)

    told = await plan(gateway)

    assert 2 == told.code
    assert "EZAT_ADMIN_TOKEN" in told.errors
