"""The configuration file: what is read, what is refused, and in which words."""

import re
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

import pytest
import yaml  # type: ignore[import-untyped]
from pydantic import BaseModel, Field

from proxy.checking import check
from proxy.config import load
from proxy.settings import Config, Server, UpstreamSettings
from proxy.yaml_source import ConfigError, Problem, read

REPOSITORY = Path(__file__).parents[1]
CONFORMANCE = REPOSITORY / "tests" / "conformance" / "config.yaml"
CONFORMANCE_ENVIRON = {
    "PORT": "8001",
    "ADMIN_PORT": "8002",
    "DATA_DIR": "data",
    "UPSTREAM_PORT": "8003",
    "SPARE_PORT": "8004",
    "DEAD_PORT": "8005",
}
CANARY = "sk-canary-4711"
UPSTREAMS = "upstreams: {up: {base_url: demo}}\n"
MODELS = "models: [{id: a/b, max_output_tokens: 9, price: free, deployments: [{upstream: up, model: m}]}]\n"
VALID = UPSTREAMS + MODELS


def model(settings: str) -> str:
    """A whole configuration whose model, on line 2, has these settings too."""
    return UPSTREAMS + MODELS.replace("id: a/b", f"id: a/b, {settings}")


def deployment(settings: str) -> str:
    return UPSTREAMS + MODELS.replace("model: m", f"model: m, {settings}")


def upstream(settings: str) -> str:
    """A whole configuration whose upstream, on line 1, has these settings too."""
    return f"upstreams: {{up: {{{settings}}}}}\n" + MODELS


def loaded(folder: Path, text: str, environ: dict[str, str] | None = None) -> Config:
    (folder / "gateway.yaml").write_text(text, encoding="utf-8")
    return load(folder / "gateway.yaml", environ or {})


def complaints(folder: Path, text: str | bytes, environ: dict[str, str] | None = None) -> list[str]:
    """What is said about a file, without the folder."""
    path = folder / "gateway.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        load(path, environ or {})
    return str(caught.value).replace(f"{folder}/", "").splitlines()


NOT_OUR_YAML = {
    "empty": ("", ":1: the file is empty"),
    "comments alone": ("# nothing\n", ":1: the file is empty"),
    "a list": ("- a\n", ":1: must be a mapping of settings"),
    "a tab": ("server:\n\tport: 1\n", ":2: a line may not be indented with a tab; use spaces"),
    "an anchor": ("a: 1\nb: &x 2\n", ":2: anchors and aliases (`&`, `*`) are not supported"),
    "an alias": ("a: *x\n", ":1: anchors and aliases (`&`, `*`) are not supported"),
    "an anchor on a mapping": ("a: &x {b: 1}\n", ":1: anchors and aliases (`&`, `*`) are not supported"),
    "a tag": ("a: 1\nb: !!str 2\n", ":2: tags (`!`) are not supported"),
    "an undeclared tag": ("a: !x!y 2\n", ":1: tags (`!`) are not supported"),
    "several documents": ("a: 1\n---\nb: 2\n", ":2: only one document (`---`) is allowed"),
    "an open quote": (
        "a: 1\nb: 'x\n\n\n",
        ":2: is not valid YAML: while scanning a quoted scalar, found unexpected end of stream",
    ),
    "no space after the colon": (
        "a: 1\nb:2\nc: 3\n",
        ":3: is not valid YAML: while scanning a simple key, could not find expected ':'",
    ),
    "a name in braces": (
        "a: {b: ${C}}\n",
        ":1: is not valid YAML: while parsing a flow mapping, expected ',' or '}', but got '{'"
        "; inside [ ] and { } a ${NAME} needs quotes",
    ),
    "a list as a name": ("? [a]\n: 1\n", ":1: a setting's name must be plain text"),
    "too deep": ("[" * 10_000, ":1: is nested too deeply"),
    "a control character": ("a: 1\nb: \x01\n", ":2: holds a control character"),
    "no UTF-8": (b"a: 1\nb: \xff\n", ":2: is not UTF-8 text"),
}


@pytest.mark.parametrize(("text", "expected"), NOT_OUR_YAML.values(), ids=NOT_OUR_YAML)
def test_a_file_that_is_not_our_yaml_gets_one_line(text: str | bytes, expected: str, tmp_path: Path) -> None:
    """What can't be read gives one clear problem with its line."""
    assert ["gateway.yaml" + expected] == complaints(tmp_path, text)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """A file that isn't there gives one clear problem, without a line."""
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "none.yaml", {})

    assert f"{tmp_path}/none.yaml: the file can't be read (No such file or directory)" == str(caught.value)


BAD_BASE_URLS = ["x", "ftp://h", "http://", "http://u:p@h", "http://h?q", "http://h#f", "http://h:99999", "http://h h"]

WRONG_SETTINGS = {
    "misspelt": (VALID + "server: {prot: 1}", ":3: server.prot: unknown setting; did you mean `port`?"),
    "misspelt deeply": (
        VALID + "server: {admin: {pord: 1}}",
        ":3: server.admin.pord: unknown setting; did you mean `port`?",
    ),
    "misspelt in a list": (
        deployment("max_paralel: 1"),
        ":2: models[0].deployments[0].max_paralel: unknown setting; did you mean `max_parallel`?",
    ),
    "unknown": (
        VALID + "server:\n  admin: {zzz: 1}",
        ":4: server.admin.zzz: unknown setting; known here: enabled, host, port, token",
    ),
    "unknown at the top": (
        VALID + "xyz: 1",
        ":3: xyz: unknown setting; known here: server, store, limiter, upstreams, models, plugins",
    ),
    "twice": (VALID + "limiter: memory\nlimiter: memory", ":4: limiter: is set twice, first on line 3"),
    "twice inside": (VALID + "server: {port: 1, port: 2}", ":3: server.port: is set twice, first on line 3"),
    "no whole number": (VALID + "server: {port: x}", ":3: server.port: must be a whole number"),
    "a fraction": (VALID + "server: {port: 1.5}", ":3: server.port: must be a whole number"),
    "true is no number": (VALID + "server: {port: true}", ":3: server.port: must be a whole number"),
    "a huge number": (VALID + "server: {port: 1e5000}", ":3: server.port: must be a whole number"),
    "a port too high": (VALID + "server: {port: 65536}", ":3: server.port: must be at most 65535"),
    "no number": (VALID + "server: {idle_timeout: soon}", ":3: server.idle_timeout: must be a number"),
    "true is no time": (VALID + "server: {idle_timeout: true}", ":3: server.idle_timeout: must be a number"),
    "endless": (VALID + "server: {idle_timeout: .inf}", ":3: server.idle_timeout: must be a number"),
    "endless in text": (VALID + 'server: {idle_timeout: "inf"}', ":3: server.idle_timeout: must be a finite number"),
    "no time": (VALID + "server: {idle_timeout: 0}", ":3: server.idle_timeout: must be more than 0"),
    "yes is a text": (VALID + "server: {open: yes}", ":3: server.open: must be true or false"),
    "no text": (VALID + "server: {host: 1}", ":3: server.host: must be text, in quotes if it looks like a number"),
    "empty text": (VALID + 'server: {host: ""}', ":3: server.host: must not be empty"),
    "no mapping": (VALID + "server: 1", ":3: server: must be a mapping"),
    "one port for both": (VALID + "server: {port: 8788}", ":3: server: port and admin.port must differ"),
    "store": (VALID + "store: mysql://x", ":3: store: must be a sqlite:///… URL or a postgresql://… URL"),
    "limiter": (VALID + "limiter: disk", ":3: limiter: must be memory or a redis://… URL or a rediss://… URL"),
    "no upstreams": (MODELS, ":1: upstreams: is required"),
    "no base URL": (upstream("auth: bearer"), ":1: upstreams.up.base_url: is required"),
    **{
        f"base URL {url}": (
            upstream(f'base_url: "{url}"'),
            ":1: upstreams.up.base_url: must be an http:// or https:// URL without user, query and fragment",
        )
        for url in BAD_BASE_URLS
    },
    "key twice": (
        upstream("base_url: demo, api_key: k, api_key_file: key.txt"),
        ":1: upstreams.up: api_key and api_key_file can't both be set",
    ),
    "an empty key": (
        upstream('base_url: demo, api_key: ""'),
        ":1: upstreams.up.api_key: must be printable ASCII without spaces, and not empty",
    ),
    "a key of two lines": (
        upstream('base_url: demo, api_key: "a\\nb"'),
        ":1: upstreams.up.api_key: must be printable ASCII without spaces, and not empty",
    ),
    "no key file": (
        upstream("base_url: demo, api_key_file: none.txt"),
        ":1: upstreams.up.api_key_file: the file can't be read (No such file or directory)",
    ),
    "a key file that is no path": (
        upstream('base_url: demo, api_key_file: "\\0"'),
        ":1: upstreams.up.api_key_file: the file can't be read (Invalid argument)",
    ),
    "an empty key file": (
        upstream("base_url: demo, api_key_file: empty.txt"),
        ":1: upstreams.up.api_key_file: the file is empty",
    ),
    "no certificates": (
        upstream("base_url: demo, ca_file: none.pem"),
        ":1: upstreams.up.ca_file: the file can't be read (No such file or directory)",
    ),
    "auth": (upstream("base_url: demo, auth: basic"), ":1: upstreams.up.auth: must be x-api-key or bearer"),
    "version": (
        upstream("base_url: demo, version: new"),
        ":1: upstreams.up.version: must be a date such as 2023-06-01",
    ),
    "proxy": (upstream("base_url: demo, proxy: h"), ":1: upstreams.up.proxy: must be an http:// or https:// URL"),
    **{
        f"header {name}": (
            upstream(f"base_url: demo, headers: {{{name}: x}}"),
            f":1: upstreams.up.headers.{name}: is set by the gateway itself",
        )
        for name in ("X-Api-Key", "authorization", "Host", "content-length", "Content-Type", "transfer-encoding")
    },
    "a header's name": (
        upstream("base_url: demo, headers: {a b: x}"),
        ":1: upstreams.up.headers.a b: is no valid name of a header",
    ),
    "a header's value": (
        upstream('base_url: demo, headers: {a: "x\\r\\ny"}'),
        ":1: upstreams.up.headers.a: must be printable ASCII without spaces at its ends",
    ),
    "no models": (UPSTREAMS, ":1: models: is required"),
    "an empty list of models": (UPSTREAMS + "models: []", ":2: models: must not be empty"),
    "models of another kind": (UPSTREAMS + "models: 1", ":2: models: must be a list"),
    "no models file": (
        UPSTREAMS + "models: none.yaml",
        ":2: models: the file can't be read (No such file or directory)",
    ),
    "no price": (
        VALID.replace("price: free, ", ""),
        ":2: models[0].price: is required; say `price: free` if it costs nothing",
    ),
    "another word for free": (
        VALID.replace("price: free", "price: gratis"),
        ":2: models[0].price: must be a mapping with input and output, or the word `free`",
    ),
    "half a price": (VALID.replace("free", "{input: 1}"), ":2: models[0].price.output: is required"),
    "a negative price": (
        VALID.replace("free", "{input: -1, output: 1}"),
        ":2: models[0].price.input: must be at least 0",
    ),
    "true is no price": (
        VALID.replace("free", "{input: true, output: 1}"),
        ":2: models[0].price.input: must be a number",
    ),
    "no deployments": (
        VALID.replace("[{upstream: up, model: m}]", "[]"),
        ":2: models[0].deployments: must not be empty",
    ),
    "no weight": (deployment("weight: 0"), ":2: models[0].deployments[0].weight: must be more than 0"),
    "no requests": (deployment("max_parallel: 0"), ":2: models[0].deployments[0].max_parallel: must be at least 1"),
    "an unknown upstream": (
        VALID.replace("upstream: up", "upstream: down"),
        ":2: models[0].deployments[0].upstream: there is no such upstream; known here: up",
    ),
    "no output": (
        VALID.replace("max_output_tokens: 9", "max_output_tokens: 0"),
        ":2: models[0].max_output_tokens: must be at least 1",
    ),
    "an effort": (
        model("capabilities: {effort: [low, top]}"),
        ":2: models[0].capabilities.effort[1]: must be low, medium, high, xhigh or max",
    ),
    "a capability in words": (
        model('capabilities: {images: "no"}'),
        ":2: models[0].capabilities.images: must be true or false",
    ),
    "a long alias": (
        model(f"aliases: [{'x' * 129}]"),
        ":2: models[0].aliases[0]: must have 1 to 128 printable characters, with no spaces at its ends",
    ),
    "an alias with spaces": (
        model('aliases: [" x"]'),
        ":2: models[0].aliases[0]: must have 1 to 128 printable characters, with no spaces at its ends",
    ),
    "an alias like the id": (
        model("aliases: [x, A/B]"),
        ":2: models[0].aliases[1]: the name is taken by models[0].id (letter case doesn't count)",
    ),
    "sampling where the version has none": (
        VALID.replace("base_url: demo", "base_url: demo, version: 2026-10-21"),
        ":2: models[0].deployments[0].upstream: the upstream's version refuses sampling; "
        "say `sampling: false` in the model's capabilities, or give the upstream an older version",
    ),
    "plugins of another kind": (VALID + "plugins: {auth: {}}", ":3: plugins: must be a list"),
    **{
        f"a plugin: {entry}": (
            VALID + f"plugins:\n- auth\n- {entry}\n",
            ":5: plugins[1]: must be a plugin's name, alone or with its settings indented below it",
        )
        for entry in ("1", "", "[usage]", "{usage: {}, auth: {}}", "{}")
    },
    "a plugin's settings": (VALID + "plugins: [usage: [1]]", ":3: plugins[0].usage: must be a mapping"),
    "enabled": (
        VALID + "plugins:\n- usage:\n    enabled: 1",
        ":5: plugins[0].usage.enabled: must be true or false",
    ),
    "a plugin twice": (
        VALID + "plugins:\n- usage\n- auth\n- usage: {}\n",
        ":6: plugins[2].usage: is listed already, at plugins[0]",
    ),
    "not in the environment": (
        VALID + "server:\n  port: ${PORT}",
        ":4: server.port: the environment variable PORT is not set",
    ),
    "part of it not in the environment": (
        upstream('base_url: "http://h:${PORT}"'),
        ":1: upstreams.up.base_url: the environment variable PORT is not set",
    ),
    "no name of a variable": (
        VALID + "store: sqlite:///${a-b}",
        ":3: store: holds a `${` that is not a `${NAME}`; write `$${` for the text",
    ),
}


@pytest.mark.parametrize(("text", "expected"), WRONG_SETTINGS.values(), ids=WRONG_SETTINGS)
def test_a_wrong_setting_is_named_with_line_and_path(text: str, expected: str, tmp_path: Path) -> None:
    """Each wrong setting gives exactly one problem, in plain English, where it stands."""
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "key.txt").write_text("k")

    assert ["gateway.yaml" + expected] == complaints(tmp_path, text)


def test_all_problems_come_at_once(tmp_path: Path) -> None:
    """Whatever is wrong is told together, in the order of the lines, names and references too."""
    text = """\
server: {port: high}
upstreams:
  up: {base_url: nowhere}
  other: {base_url: demo, api_key_file: none}
models:
  - id: m
    deployments: [{upstream: u, model: m}]
  - id: M
    price: ${PRICE}
    max_output_tokens: 1
plugins: [usage, {usage: {enabled: "${ON}"}}, {a: , b: }]
"""
    expected = """\
gateway.yaml:1: server.port: must be a whole number
gateway.yaml:3: upstreams.up.base_url: must be an http:// or https:// URL without user, query and fragment
gateway.yaml:4: upstreams.other.api_key_file: the file can't be read (No such file or directory)
gateway.yaml:6: models[0].max_output_tokens: is required
gateway.yaml:6: models[0].price: is required; say `price: free` if it costs nothing
gateway.yaml:7: models[0].deployments[0].upstream: there is no such upstream; known here: up, other
gateway.yaml:8: models[1].deployments: is required
gateway.yaml:8: models[1].id: the name is taken by models[0].id (letter case doesn't count)
gateway.yaml:9: models[1].price: the environment variable PRICE is not set
gateway.yaml:11: plugins[1].usage.enabled: the environment variable ON is not set
gateway.yaml:11: plugins[2]: must be a plugin's name, alone or with its settings indented below it
"""

    assert expected.splitlines() == complaints(tmp_path, text)


def test_problems_in_the_file_of_the_models_name_that_file(tmp_path: Path) -> None:
    """The models may stand in a file of their own, whose name and lines its problems carry."""
    (tmp_path / "models.yaml").write_text("- id: m\n  max_output_tokens: 1\n  price: ${PRICE}\n  alias: [x]\n")

    found = complaints(tmp_path, UPSTREAMS + "models: models.yaml\nserver: {port: -1}\n")

    expected = [
        "gateway.yaml:3: server.port: must be at least 0",
        "models.yaml:1: models[0].deployments: is required",
        "models.yaml:3: models[0].price: the environment variable PRICE is not set",
        "models.yaml:4: models[0].alias: unknown setting; did you mean `aliases`?",
    ]
    assert expected == found


def test_a_broken_file_of_the_models_does_not_hide_the_rest(tmp_path: Path) -> None:
    """A models file that is no YAML gives one problem, beside those of the configuration itself."""
    (tmp_path / "models.yaml").write_text("- id: m\n\tprice: free\n")

    found = complaints(tmp_path, UPSTREAMS + "models: models.yaml\nserver: {port: -1}\n")

    expected = [
        "gateway.yaml:3: server.port: must be at least 0",
        "models.yaml:2: a line may not be indented with a tab; use spaces",
    ]
    assert expected == found


LEAKS = {
    "each setting of a section": VALID + "server:\n" + "".join(f"  {name}: {CANARY}\n" for name in Server.model_fields),
    "each setting of an upstream": upstream(
        ", ".join(f'{name}: " {CANARY} "' for name in UpstreamSettings.model_fields)
    ),
    "each setting of a model": model(
        f"capabilities: {CANARY}, aliases: {CANARY}, created: {CANARY}, owned_by: [{CANARY}]"
    ),
    "each section": "\n".join(f"{name}: {CANARY}" for name in Config.model_fields),
    "as a setting": f"{CANARY}: 1",
    "glued to a setting": upstream(f"base_url: demo, api_key:{CANARY}"),
    "as a plugin's settings": VALID + f"plugins: [auth: {CANARY}]",
    "as a name of the environment": VALID + "store: ${" + CANARY + "}",
    "twice": VALID + f"store: {CANARY}\nstore: {CANARY}",
    "as an alias": f"a: *{CANARY}",
    "as an anchor": f"a: &{CANARY} 1",
    "as a tag": f"a: !{CANARY}!x",
    "after a tab": f"a:\n\t{CANARY}",
    "without a space": f"a: 1\nb:{CANARY}\nc: 1",
    "in an open quote": f"a: '{CANARY}",
    "after a sign": f"a: @{CANARY}",
    "behind an escape": f'a: "\\q{CANARY}"',
    "as no UTF-8": CANARY.encode() + b"\xff",
    "behind a control character": f"a: \x01{CANARY}",
}


@pytest.mark.parametrize("text", LEAKS.values(), ids=LEAKS)
def test_no_problem_tells_a_value(text: str | bytes, tmp_path: Path) -> None:
    """What stands in the file may be a secret, wherever a slip has put it; no message repeats it."""
    found = complaints(tmp_path, text)

    assert "canary" not in "\n".join(found)


def test_no_secret_shows_in_the_configuration(tmp_path: Path) -> None:
    """A configuration that is printed, by a log or a traceback, shows no key and no password."""
    key_file = tmp_path / "key.txt"
    key_file.write_text(CANARY)
    upstreams = f"""
  a: {{base_url: demo, api_key: {CANARY}, headers: {{x-token: {CANARY}}}, proxy: "http://u:{CANARY}@h"}}
  b: {{base_url: demo, api_key_file: key.txt}}
"""
    text = f"upstreams:{upstreams}  up: {{base_url: demo}}\n" + MODELS
    text += f"store: postgresql://u:{CANARY}@h/d\nlimiter: redis://:{CANARY}@h\nplugins: [auth: {{key: {CANARY}}}]\n"

    config = loaded(tmp_path, text)

    assert "canary" not in repr(config) + str(config) + repr(config.source)


def test_an_unreadable_key_file_is_not_repeated(tmp_path: Path) -> None:
    """A key that was written where its file should be named is not printed."""
    found = complaints(tmp_path, upstream(f"base_url: demo, api_key_file: {CANARY}"))

    assert ["gateway.yaml:1: upstreams.up.api_key_file: the file can't be read (No such file or directory)"] == found


def test_the_defaults() -> None:
    """A section that says nothing has the documented defaults."""
    expected = {
        "host": "127.0.0.1",
        "port": 8787,
        "open": False,
        "ping_interval": 15,
        "request_timeout": 590,
        "first_event_timeout": 300,
        "idle_timeout": 300,
        "connect_timeout": 10,
        "body_timeout": 120,
        "plugin_timeout": 30,
        "most_body_bytes": 512 * 2**20,
        "shutdown_delay": 0,
        "shutdown_timeout": 30,
        "keepalive_timeout": 75,
        "base_path": "",
        "trusted_proxies": (),
        "cors_origins": (),
        "workers": 1,
        "watch": True,
        "admin": {"enabled": True, "host": "127.0.0.1", "port": 8788, "token": None},
    }
    assert expected == Server().model_dump()


SCALARS: dict[str, tuple[str, Any]] = {
    "null": ("~", None),
    "nothing": ("", None),
    "true": ("True", True),
    "yes": ("yes", "yes"),
    "whole": ("-12", -12),
    "leading zero": ("010", 10),
    "octal": ("0o17", 15),
    "hexadecimal": ("0xfF", 255),
    "fraction": ("0.30", Decimal("0.30")),
    "many digits": ("0.1000000000000000055511151231257827", Decimal("0.1000000000000000055511151231257827")),
    "exponent": ("1e-3", Decimal("0.001")),
    "exponent too large": ("1e999", "1e999"),
    "too many digits": ("1" * 41, "1" * 41),
    "other digits": ("\u0661", "\u0661"),
    "quoted number": ('"1"', "1"),
    "quoted null": ("''", ""),
    "a time": ("2026-01-01", "2026-01-01"),
    "sexagesimal": ("12:30:45", "12:30:45"),
    "infinity": (".inf", ".inf"),
    "from the environment": ("${ONE}", 1),
    "from the environment, quoted": ('"${ONE}"', "1"),
    "within text": ("a${ONE}b${TWO:-2}", "a1b2"),
    "a default": ("${TWO:-2.50}", Decimal("2.50")),
    "a default for the empty": ("${EMPTY:-3}", 3),
    "an empty default": ("${TWO:-}", None),
    "empty": ("${EMPTY}", None),
    "not replaced twice": ("${NESTED}", "${ONE}"),
    "an escaped dollar": ("$${ONE} $ONE $", "${ONE} $ONE $"),
    "a block": ("|\n  ${ONE}\n  2\n", "1\n2\n"),
    "a comment": ("1 # ${NONE}", 1),
}


@pytest.mark.parametrize(("text", "expected"), SCALARS.values(), ids=SCALARS)
def test_scalars_are_those_of_yaml_1_2(text: str, expected: Any, tmp_path: Path) -> None:
    """A plain scalar gets its type after the environment was put in, a quoted one is text, fractions are exact."""
    path = tmp_path / "one.yaml"
    path.write_text(f"value: {text}", encoding="utf-8")

    source = read(path, {"ONE": "1", "EMPTY": "", "NESTED": "${ONE}"})

    assert ([], expected, type(expected)) == (source.problems, source.data["value"], type(source.data["value"]))


def test_a_byte_order_mark_is_no_harm(tmp_path: Path) -> None:
    """A file that an editor began with a byte order mark is read like any other."""
    assert 8787 == loaded(tmp_path, "\ufeff" + VALID).server.port


def test_an_upstream_as_written(tmp_path: Path) -> None:
    """The key comes from its file, stripped; paths start at the configuration's folder; no slash ends the URL."""
    (tmp_path / "key.txt").write_text(f"\n{CANARY}\n")
    (tmp_path / "ca.pem").write_text("certificates")
    settings = 'base_url: "https://h/v/", api_key_file: key.txt, ca_file: ca.pem, headers: {anthropic-beta: a}'

    up = loaded(tmp_path, upstream(settings)).upstreams["up"]

    assert up.api_key is not None
    assert ("https://h/v", CANARY, tmp_path / "ca.pem") == (up.base_url, up.api_key.get_secret_value(), up.ca_file)
    assert ({"anthropic-beta": "a"}, "x-api-key", "2023-06-01", False) == (up.headers, up.auth, up.version, up.is_demo)


EFFORTS = {
    "absent": ("{}", ("low", "medium", "high", "xhigh", "max")),
    "all": ("{effort: true}", ("low", "medium", "high", "xhigh", "max")),
    "none": ("{effort: false}", ()),
    "some, in their own order": ("{effort: [high, low, high]}", ("low", "high")),
}


@pytest.mark.parametrize(("capabilities", "expected"), EFFORTS.values(), ids=EFFORTS)
def test_effort_levels(capabilities: str, expected: tuple[str, ...], tmp_path: Path) -> None:
    """Effort is a list of levels, or true or false for all or none; absent means yes."""
    config = loaded(tmp_path, model(f"capabilities: {capabilities}"))

    assert expected == config.models[0].capabilities.effort


def test_sections_whose_settings_are_all_commented_out(tmp_path: Path) -> None:
    """A section without a setting left is as if it weren't there."""
    config = loaded(tmp_path, VALID + "server:\n  admin:\n  # port: 1\nplugins:\n- auth:\n    # keys: []\n- usage\n")

    assert Server() == config.server
    assert [("auth", {}), ("usage", {})] == [(entry.name, entry.settings) for entry in config.plugins]


def test_a_plugin_that_is_switched_off_stays_in_the_list(tmp_path: Path) -> None:
    """`enabled` is the list's own word and no setting of the plugin."""
    config = loaded(tmp_path, VALID + "plugins: [usage, {auth: {enabled: false, keys: []}}]")

    expected: list[tuple[Any, ...]] = [
        ("usage", {}, True, ("plugins", 0, "usage")),
        ("auth", {"keys": []}, False, ("plugins", 1, "auth")),
    ]
    assert expected == [(entry.name, entry.settings, entry.enabled, entry.loc) for entry in config.plugins]


class Limit(BaseModel):
    requests: Annotated[int, Field(ge=1)]


class FetcherSettings(BaseModel):
    timeout: float = 15
    limits: dict[str, Limit] = {}
    either: int | list[int] = 0


PLUGIN_SETTINGS = {
    "a number": ("timeout: soon", "5: plugins[0].image_fetcher.timeout: must be a number"),
    "true is no number": ("timeout: true", "5: plugins[0].image_fetcher.timeout: must be a number"),
    "unknown, though the class allows it": (
        "timeuot: 1",
        "5: plugins[0].image_fetcher.timeuot: unknown setting; did you mean `timeout`?",
    ),
    "within a mapping": (
        "limits: {a: {requests: 0}}",
        "5: plugins[0].image_fetcher.limits.a.requests: must be at least 1",
    ),
    "missing within a mapping": ("limits: {a: {}}", "5: plugins[0].image_fetcher.limits.a.requests: is required"),
    "unknown within a mapping": (
        "limits: {a: {requests: 1, z: 1}}",
        "5: plugins[0].image_fetcher.limits.a.z: unknown setting; known here: requests",
    ),
    "one of two kinds": ("either: x", "5: plugins[0].image_fetcher.either: must be a whole number"),
}


@pytest.mark.parametrize(("setting", "expected"), PLUGIN_SETTINGS.values(), ids=PLUGIN_SETTINGS)
def test_a_plugins_settings_are_checked_in_the_same_words(setting: str, expected: str, tmp_path: Path) -> None:
    """Whoever knows a plugin checks its settings with the file's lines, by any pydantic model."""
    config = loaded(tmp_path, VALID + f"plugins:\n- image_fetcher:\n    {setting}\n")
    [entry] = config.plugins

    instance, problems = check(FetcherSettings, entry.settings, entry.loc, config.source)

    assert (None, [f"{tmp_path}/gateway.yaml:{expected}"]) == (instance, [str(problem) for problem in problems])


def test_right_settings_of_a_plugin_become_an_instance(tmp_path: Path) -> None:
    """Settings without a problem come back as the plugin's own class."""
    config = loaded(tmp_path, VALID + "plugins: [image_fetcher: {timeout: 2.5}]")
    [entry] = config.plugins

    assert (FetcherSettings(timeout=2.5), []) == check(FetcherSettings, entry.settings, entry.loc, config.source)


def test_a_problem_without_a_line_names_the_file_alone() -> None:
    """A problem reads as file, line, path and message, less what it doesn't have."""
    assert "f.yaml: gone" == str(Problem("f.yaml", 0, "", "gone"))


def test_the_conformance_configuration_loads(tmp_path: Path) -> None:
    """The configuration of the black-box cases loads as it stands, and as their runner writes it out again."""
    again = yaml.safe_dump(yaml.safe_load(CONFORMANCE.read_text()), sort_keys=False, allow_unicode=True)

    as_it_stands = load(CONFORMANCE, CONFORMANCE_ENVIRON)
    written_again = loaded(tmp_path, again, CONFORMANCE_ENVIRON)

    assert (8001, 8002, 0.4) == (
        as_it_stands.server.port,
        as_it_stands.server.admin.port,
        as_it_stands.server.ping_interval,
    )
    assert "sqlite:///data/ezat.db" == as_it_stands.store
    assert "http://127.0.0.1:8003" == as_it_stands.upstreams["main"].base_url
    assert {"timeout": 2, "allow_networks": ["127.0.0.2/32"]} == as_it_stands.plugins[5].settings
    assert as_it_stands.model_dump() == written_again.model_dump()


def test_the_default_configuration_asks_for_its_keys() -> None:
    """Without the two keys in the environment the default configuration says which are missing, and nothing else."""
    path = REPOSITORY / "config" / "gateway.yaml"

    with pytest.raises(ConfigError) as caught:
        load(path, {})

    expected = [
        ("upstreams.anthropic.api_key", "the environment variable ANTHROPIC_API_KEY is not set"),
        ("plugins[0].auth.keys[0].key", "the environment variable EZAT_KEY is not set"),
    ]
    assert expected == [(problem.path, problem.message) for problem in caught.value.problems]


PLUGINS = [
    "auth",
    "rate_limit",
    "usage",
    "field_refusal",
    "chat_completions",
    "image_fetcher",
    "cache_breakpoints",
    "reasoning",
    "sampling",
]


@pytest.mark.parametrize("name", ["gateway.yaml", "demo.yaml"])
def test_the_shipped_configurations_load(name: str) -> None:
    """What we ship loads, with every plugin in its place."""
    config = load(REPOSITORY / "config" / name, {"ANTHROPIC_API_KEY": "k", "EZAT_KEY": "ezat_sk_x"})

    assert PLUGINS == [entry.name for entry in config.plugins if entry.enabled]


def test_the_default_configuration_shows_every_setting_with_its_default(tmp_path: Path) -> None:
    """The default configuration names each setting of the gateway, and what it shows as a default is the default."""
    text = (REPOSITORY / "config" / "gateway.yaml").read_text()
    (tmp_path / "models.yaml").write_text((REPOSITORY / "config" / "models.yaml").read_text())
    until_upstreams, upstreams = text.split("\nupstreams:\n")
    shown = re.sub(r"(?m)^( *)# (\w+: [^ ]+)(?=  +#|$)", r"\1\2", until_upstreams)

    config = loaded(tmp_path, f"{shown}\nupstreams:\n{upstreams}", {"ANTHROPIC_API_KEY": "k", "EZAT_KEY": "e"})

    assert {*Server.model_fields} == config.server.model_fields_set
    assert {*Config.model_fields} == config.model_fields_set
    assert (Server(), "sqlite:///data/ezat.db", "memory") == (config.server, config.store, config.limiter)
    assert [] == [name for name in UpstreamSettings.model_fields if not re.search(rf"(?m)^ +(# )?{name}: ", upstreams)]
