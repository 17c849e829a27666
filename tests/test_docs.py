"""The docs are bound to the code: what they list is what there is, and what they show runs.

A python block runs in the namespace of its page, after the blocks before it, and the tests in it are run; a text block
right behind it is what it prints. A block with a title is the file of that name.
"""

from __future__ import annotations

import inspect
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import aiohttp
import pytest
from pydantic import BaseModel
from ruamel.yaml import YAML

import proxy.testing
from plugins import BUNDLED
from plugins.auth import AuthSettings, KeySettings, OrganizationSettings
from plugins.image_fetcher import ImageFetcherSettings
from plugins.usage import UsageSettings
from proxy.command import main
from proxy.config import load
from proxy.dialects import Wording, messages, openai
from proxy.errors import Kind
from proxy.exchange import Exchange
from proxy.loading import build
from proxy.models import ModelTable
from proxy.plugin import OutputPlugin, Plugin, Route
from proxy.settings import (
    Admin,
    CapabilitySettings,
    Config,
    DeploymentSettings,
    ModelSettings,
    PriceSettings,
    ProfileSettings,
    Server,
    UpstreamSettings,
)
from tests.process import GatewayProcess, eventually, started_gateway, written_config

REPOSITORY = Path(__file__).parents[1]
PAGES = sorted(str(path.relative_to(REPOSITORY)) for path in [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/*.md")])
DEMO_URL = "http://127.0.0.1:8787"
KEY = {"Authorization": "Bearer ezat_sk_demo"}
ENVIRONMENT = {"ANTHROPIC_API_KEY": "provider-key", "EZAT_KEY": "ezat_sk_first"}
FENCE = re.compile(r'^( *)```(\w+)(?: title="([^"]+)")?\n(.*?)^\1```$', re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block of a page; ``line`` is where its text begins."""

    language: str
    title: str
    text: str
    line: int
    end: int


def text_of(page: str) -> str:
    return (REPOSITORY / page).read_text()


def blocks(page: str, language: str) -> list[Block]:
    text, found = text_of(page), []
    for match in FENCE.finditer(text):
        inner = re.sub(rf"^{match[1]}", "", match[4], flags=re.MULTILINE)
        found.append(Block(match[2], match[3] or "", inner, text.count("\n", 0, match.start()) + 2, match.end()))
    return [block for block in found if block.language == language]


def section(page: str, heading: str) -> str:
    """What stands below a heading, down to the next one."""
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#+ |\Z)", text_of(page), re.MULTILINE | re.DOTALL)
    assert found, f"{page} has no section {heading!r}"
    return found[1]


def rows(page: str, heading: str, nth: int = 0) -> list[list[str]]:
    """The cells of the nth table below a heading, without its head."""
    table = re.findall(r"(?:^\|.*\|\n)+", section(page, heading), re.MULTILINE)[nth]
    return [
        [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in table.splitlines()[2:]
    ]


def column(page: str, heading: str, nth: int = 0) -> list[str]:
    """The first column, without backticks."""
    return [name for row in rows(page, heading, nth) for name in re.findall(r"`([^`]+)`", row[0])]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """The demo, started as the README says, but on a free port."""
    demo: dict[str, Any] = YAML(typ="safe", pure=True).load(REPOSITORY / "config" / "demo.yaml")
    del demo["store"]
    with started_gateway(demo, tmp_path_factory.mktemp("gateway")) as started:
        yield started


# What the docs list


@pytest.mark.parametrize("name", BUNDLED)
def test_a_plugin_is_documented(name: str) -> None:
    """Each plugin has a row in the README and a section that says its routes and what it means when it is off."""
    readme = {re.sub(r"\W*(\w+).*", r"\1", row[0]): row for row in rows("README.md", "The way of a request")}
    own, routes = section("docs/plugins.md", name), BUNDLED[name].routes
    names = "all" if routes == frozenset(Route) else ", ".join(each.value for each in Route if each in routes)

    assert names == readme[name][1]
    assert f"\nRoutes: {names}." in own
    assert "\nOff: " in own
    assert bool(BUNDLED[name].Settings.model_fields) == ("It has no settings." not in own)


def test_the_recommended_order_is_everywhere_the_same() -> None:
    """README, page and demo show the plugins in one order."""
    order = list(BUNDLED)
    drawn = re.findall(r"\w+_\w+|\bauth\b|\busage\b|\breasoning\b|\bsampling\b", blocks("README.md", "mermaid")[0].text)
    demo = load(REPOSITORY / "config" / "demo.yaml", {})

    assert order == list(dict.fromkeys(drawn))
    assert order == [entry.name for entry in demo.plugins]
    assert order == re.findall(r"^## (.+)$", text_of("docs/plugins.md"), re.MULTILINE)
    assert order == column("README.md", "The way of a request")


SETTINGS: dict[str, tuple[str, str, int, type[BaseModel]]] = {
    "auth": ("docs/plugins.md", "auth", 0, AuthSettings),
    "organizations": ("docs/plugins.md", "auth", 1, OrganizationSettings),
    "keys": ("docs/plugins.md", "auth", 2, KeySettings),
    "usage": ("docs/plugins.md", "usage", 0, UsageSettings),
    "image_fetcher": ("docs/plugins.md", "image_fetcher", 0, ImageFetcherSettings),
    "server": ("docs/self-hosting.md", "server", 0, Server),
    "server.admin": ("docs/self-hosting.md", "server.admin", 0, Admin),
    "upstreams": ("docs/self-hosting.md", "upstreams", 0, UpstreamSettings),
    "models": ("docs/self-hosting.md", "models", 0, ModelSettings),
    "capabilities": ("docs/self-hosting.md", "models: capabilities", 0, CapabilitySettings),
    "price": ("docs/self-hosting.md", "models: price", 0, PriceSettings),
    "deployments": ("docs/self-hosting.md", "models: deployments", 0, DeploymentSettings),
    "profile": ("docs/self-hosting.md", "models: profile", 0, ProfileSettings),
}


@pytest.mark.parametrize(("page", "heading", "nth", "settings"), SETTINGS.values(), ids=SETTINGS)
def test_a_table_of_settings_is_the_code_s(page: str, heading: str, nth: int, settings: type[BaseModel]) -> None:
    """Name, default and meaning of every setting stand in the docs as they stand in the code."""
    assert settings_rows(settings, settings.model_fields) == rows(page, heading, nth)


def test_store_and_limiter_are_the_code_s() -> None:
    """The two settings at the top of the file are documented as they are."""
    assert settings_rows(Config, ("store", "limiter")) == rows("docs/self-hosting.md", "store and limiter")


def settings_rows(settings: type[BaseModel], names: Iterable[str]) -> list[list[str]]:
    """As the tables write them: name, default, meaning."""
    meanings = {name: settings.model_fields[name].description or "" for name in names}
    return [
        [f"`{name}`", default_of(settings, name), re.sub(r"\s+", " ", meaning).replace("``", "`")]
        for name, meaning in meanings.items()
    ]


def default_of(settings: type[BaseModel], name: str) -> str:
    """As the tables write it."""
    field = settings.model_fields[name]
    if field.is_required():
        return "required"
    match field.get_default(call_default_factory=True):
        case None:
            return "none"
        case BaseModel():
            return "below"
        case bool() as value:
            return f"`{str(value).lower()}`"
        case tuple() | list() as value:
            return f"`[{', '.join(map(str, value))}]`"
        case float() as value:
            return f"`{value:g}`"
        case "":
            return "empty"
        case value:
            return f"`{value}`"


def test_every_plugin_with_settings_has_its_table_checked() -> None:
    """No plugin gets settings without a row above."""
    assert {name for name, plugin in BUNDLED.items() if plugin.Settings.model_fields} <= set(SETTINGS)


@pytest.mark.parametrize(
    ("heading", "wordings", "has_code"),
    [("OpenAI's format", openai.WORDINGS, True), ("The Messages format", messages.WORDINGS, False)],
    ids=["openai", "messages"],
)
def test_an_error_table_is_the_code_s(heading: str, wordings: Mapping[Kind, Wording], has_code: bool) -> None:
    """Clients can rely on the documented statuses, types and codes."""
    expected = [
        [f"`{kind.value}`", str(wording.status), f"`{wording.type}`"]
        + ([f"`{wording.code}`" if wording.code else "null"] if has_code else [])
        for kind, wording in wordings.items()
    ]

    assert expected == [row[:-1] for row in rows("docs/errors.md", heading)]


@pytest.mark.parametrize(("nth", "cls"), [(0, Plugin), (1, OutputPlugin)], ids=["plugin", "output"])
def test_the_hooks_are_listed_with_their_signatures(nth: int, cls: type) -> None:
    """Whoever writes a plugin finds each hook as it is."""
    hooks = {name: hook for name, hook in vars(cls).items() if inspect.isfunction(hook) and name[0] != "_"}

    assert [signature(name, hook) for name, hook in hooks.items()] == column(
        "docs/writing-plugins.md", "The hooks", nth
    )


def signature(name: str, hook: Any) -> str:
    found = inspect.signature(hook)
    start = "async " if inspect.iscoroutinefunction(hook) else ""
    return f"{start}{name}({', '.join(list(found.parameters)[1:])}) -> {found.return_annotation}"


def test_the_attributes_of_the_classes_are_listed() -> None:
    """Whoever writes a plugin finds each attribute with its default."""
    expected = {f"{cls.__name__}.{name}": cls for cls in (Plugin, OutputPlugin) for name in cls.__annotations__}
    listed = rows("docs/writing-plugins.md", "The hooks", 2)
    defaults = {
        row[0].strip("`"): row[1].strip("`") for row in listed if row[1] not in ("required", "all", "none of its own")
    }

    assert list(expected) == column("docs/writing-plugins.md", "The hooks", 2)
    assert {name: str(getattr(expected[name], name.partition(".")[2])) for name in defaults} == defaults


FOR_THE_ENGINE = {
    *(
        "began",
        "billed",
        "client_document",
        "created",
        "document",
        "keeps_apart",
        "model_or_none",
        "path_of",
        "read",
        "started",
        "take_defers",
    ),
}


def test_the_exchange_is_listed() -> None:
    """What a plugin finds on an exchange stands in the docs, but for what the engine alone uses."""
    public = {name for name in dir(Exchange) if name[0] != "_"}
    listed = {name.partition("(")[0] for name in column("docs/writing-plugins.md", "The exchange")}

    assert public - FOR_THE_ENGINE == listed


def test_the_test_kit_is_listed() -> None:
    """Everything public in proxy.testing stands in the docs."""
    assert sorted(proxy.testing.__all__) == sorted(column("docs/writing-plugins.md", "The test kit"))


def test_the_folders_exist() -> None:
    """The map of the code shows no place that isn't there."""
    places = column("docs/architecture.md", "The folders")
    missing = [
        name for name in places if not (REPOSITORY / name).exists() and not (REPOSITORY / "proxy" / name).exists()
    ]

    assert places
    assert [] == missing


# What the docs show


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    """Every link within the docs has its file, and its heading there."""
    broken = []
    for link in re.findall(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)", FENCE.sub("", text_of(page))):
        name, _, anchor = link.partition("#")
        target = (REPOSITORY / page).parent / name if name else REPOSITORY / page
        if not link.startswith("https://") and not (target.exists() and (not anchor or anchor in anchors(target))):
            broken.append(link)

    assert [] == broken


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_examples_are_the_files() -> None:
    """A block with a title shows the file of that name, and every example is shown."""
    shown = {block.title: block.text for page in PAGES for block in blocks(page, "python") if block.title}
    files = {f"examples/{path.name}": path.read_text() for path in REPOSITORY.glob("examples/*.py")}

    assert files == shown
    assert 14 == files["examples/word_guard.py"].count("\n"), "the README says fourteen"


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")])
async def test_the_python_of_a_page_runs(
    page: str, gateway: GatewayProcess, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a reader copies runs and prints what is shown, and the tests in it pass."""
    module = ModuleType(re.sub(r"\W", "_", page))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    printed = {block.line: block.text for block in blocks(page, "text")}
    tested = set()
    for block in blocks(page, "python"):
        source = "\n" * (block.line - 1) + block.text.replace(DEMO_URL, gateway.url)
        exec(compile(source, str(REPOSITORY / page), "exec"), vars(module))
        output = capsys.readouterr().out
        following = text_of(page).count("\n", 0, block.end) + 4
        assert printed.get(following, "") == output
        for name, test in list(vars(module).items()):
            if name.startswith("test_") and name not in tested:
                tested.add(name)
                result = test()
                if inspect.isawaitable(result):
                    await result
        capsys.readouterr()  # the log of gateways that the tests started


def test_every_yaml_block_is_a_configuration_that_works(tmp_path: Path) -> None:
    """A whole configuration loads as it stands, a part of one within the demo's."""
    demo: dict[str, Any] = YAML(typ="safe", pure=True).load(REPOSITORY / "config" / "demo.yaml")
    (tmp_path / "key.txt").write_text("provider-key")
    shown = [block for page in PAGES for block in blocks(page, "yaml")]
    assert shown
    for block in shown:
        part = YAML(typ="safe", pure=True).load(block.text)
        whole = {"upstreams", "models"} <= part.keys()
        path = tmp_path / "shown.yaml"
        if whole:
            path.write_text(block.text)
        else:
            part["upstreams"] = {**demo["upstreams"], **part.get("upstreams", {})}
            path = written_config({**demo, **part}, tmp_path)
        config = load(path, ENVIRONMENT)
        build(config, ModelTable.from_settings(config.models), BUNDLED)


def commands(page: str) -> list[list[str]]:
    """The words of each command of a page's shell blocks, without the variables set before it."""
    lines = [line for block in blocks(page, "sh") for line in block.text.replace("\\\n", " ").splitlines()]
    return [list(drop_variables(shlex.split(line))) for line in lines]


def drop_variables(words: list[str]) -> list[str]:
    return words[1:] and drop_variables(words[1:]) if re.match(r"[A-Z_]+=", words[0]) else words


def test_every_command_exists(capsys: pytest.CaptureFixture[str]) -> None:
    """Targets, subcommands and files in the shell blocks are there."""
    with pytest.raises(SystemExit):
        main(BUNDLED, ["--help"])
    known = capsys.readouterr().out.partition("Commands:")[2]
    targets = re.findall(r"^([a-z-]+):", text_of("Makefile"), re.MULTILINE)
    wrong = []
    for words in [words for page in PAGES for words in commands(page)]:
        match words:
            case ["make", target]:
                good = target in targets
            case [".venv/bin/python", "run.py", *rest]:
                at = rest.index("--config")
                names = [*rest[:at], *rest[at + 2 : at + 3]]
                good = (REPOSITORY / rest[at + 1]).exists() and all(f"\n  {name} " in known for name in names)
            case ["export", assignment]:
                good = assignment.partition("=")[0] in ENVIRONMENT
            case _:
                good = words[0] == "curl"
        wrong += [] if good else [words]

    assert [] == wrong


ON_THE_DEMO = [page for page in PAGES if page != "docs/local-model.md"]


@pytest.mark.slow
@pytest.mark.parametrize("words", [words for page in ON_THE_DEMO for words in commands(page) if words[0] == "curl"])
async def test_a_printed_request_is_answered(words: list[str], gateway: GatewayProcess) -> None:
    """The first thing that a reader pastes works."""
    _, url, option, header, data_option, data = words
    name, _, value = header.partition(": ")
    assert ("-H", "-d") == (option, data_option)

    async with aiohttp.ClientSession() as client:
        sent = {name: value, "content-type": "application/x-www-form-urlencoded"}  # as curl does
        async with client.post(url.replace(DEMO_URL, gateway.url), headers=sent, data=data) as answer:
            text = await answer.text()

    assert 200 == answer.status
    assert "You said: “Hello!”." in text


@pytest.mark.slow
def test_the_greeting_shows_the_readme_s_request(gateway: GatewayProcess) -> None:
    """What is printed at start is what the README shows, and the docs' order of plugins."""
    request = " ".join(blocks("README.md", "sh")[1].text.split())
    greeting = " ".join(gateway.written.replace(gateway.url, DEMO_URL).split())

    assert request in greeting
    assert f"client ─► {' ─► '.join(BUNDLED)} ─► upstream" in greeting


class Answered(NamedTuple):
    """An answer that has been read; its headers go by their names in lower case."""

    status: int
    headers: dict[str, str]
    text: str


async def sent(url: str, body: dict[str, Any]) -> Answered:
    """The answer to a request with the demo's key."""
    async with aiohttp.ClientSession(headers=KEY) as client, client.post(url, json=body) as answer:
        headers = {name.lower(): value for name, value in answer.headers.items()}
        return Answered(answer.status, headers, await answer.text())


def asked(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "claude-sonnet-5-5", "messages": [{"role": "user", "content": text}], **fields}


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
TRIED: dict[str, tuple[dict[str, Any], str]] = {
    "`fault 529` in the message": (asked("fault 529"), "^503 .*retry-after"),
    "`fault cut`, with `stream`": (asked("fault cut", stream=True), r'^200 .*"error":.*\[DONE\]'),
    "`slow`, with `stream`": (asked("slow", stream=True, max_tokens=2), r'^200 .*"finish_reason":"length"'),
    "a tool": (asked("What time is it?", tools=[tool("get_time")]), '^200 .*"name":"get_time"'),
    "several tools, and the word `parallel`": (
        asked("Both in parallel.", tools=[tool("get_time"), tool("get_weather")]),
        '^200 .*"get_time".*"get_weather"',
    ),
    "`response_format` with a JSON schema": (
        asked("Paris", response_format=FORMAT),
        r'^200 .*\{\\"city\\":\\"Paris\\"\}',
    ),
    "`n: 2`": (asked("Hello!", n=2), "^400 .*n: only 1 choice per request is supported"),
    "`seed: 1`": (asked("Hello!", seed=1), "^200 .*x-ezat-ignored': 'seed'"),
}


def test_everything_to_try_is_tried() -> None:
    """The README's list of things to try is the one below."""
    assert list(TRIED) == [row[0] for row in rows("README.md", "Try it on the demo")]


@pytest.mark.slow
@pytest.mark.parametrize(("body", "seen"), TRIED.values(), ids=TRIED)
async def test_what_the_readme_says_to_try_is_seen(body: dict[str, Any], seen: str, gateway: GatewayProcess) -> None:
    """The demo does what its table says."""
    whole = await sent(f"{gateway.url}/openai/v1/chat/completions", body)

    assert re.search(seen, f"{whole.status} {whole.headers} {whole.text}", re.DOTALL), whole


OFF: dict[str, tuple[dict[str, Any], int, str | None]] = {
    "field_refusal": (asked("Hello!", n=2, logprobs=True), 200, "logprobs,n"),
    "chat_completions": (asked("Hello!"), 404, None),
    "reasoning": (asked("Hello!", reasoning_effort="low"), 200, "reasoning_effort"),
    "sampling": (asked("Hello!", temperature=0.5, top_p=0.5), 200, "temperature,top_p"),
}


@pytest.mark.parametrize(("name", "body", "status", "ignored"), [(name, *row) for name, row in OFF.items()], ids=OFF)
async def test_a_plugin_that_is_off_is_off_as_its_page_says(
    name: str, body: dict[str, Any], status: int, ignored: str | None
) -> None:
    """Without a plugin its fields are ignored and named, or its path is gone."""
    listed = [plugin for other, plugin in BUNDLED.items() if other not in ("auth", name)]

    async with proxy.testing.running_gateway(listed) as url:
        answer = await sent(f"{url}/openai/v1/chat/completions", {**body, "model": "test/model"})

    assert (status, ignored) == (answer.status, answer.headers.get("x-ezat-ignored"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nth", "path"), [(0, "/openai/v1/chat/completions"), (1, "/v1/messages")], ids=["openai", "messages"]
)
async def test_an_error_within_a_stream_is_as_shown(nth: int, path: str, gateway: GatewayProcess) -> None:
    """A stream that fails ends in the frames that the page shows."""
    shown = blocks("docs/errors.md", "text")[nth].text

    answer = await sent(gateway.url + path, asked("fault error", stream=True, max_tokens=99))

    own_id = answer.headers["request-id"]
    assert answer.text.strip().endswith(re.sub(r'(?<="request_id":")[^"]+', own_id, shown).strip())


@pytest.mark.slow
async def test_the_keyed_and_keyless_endpoints_are_as_listed(gateway: GatewayProcess) -> None:
    """A path asks for a key if and only if the docs say so."""
    found = []
    async with aiohttp.ClientSession() as client:
        listed = rows("docs/self-hosting.md", "The endpoints")
        for endpoint, _, _ in listed:
            for path in re.findall(r"/[\w/.{}]+", endpoint):
                async with client.request(endpoint[1:].split()[0], gateway.url + path) as answer:
                    found.append((path, answer.status))

    expected = [
        (path, 401 if key == "needed" else 200)
        for endpoint, key, _ in listed
        for path in re.findall(r"/[\w/.{}]+", endpoint)
    ]
    assert expected == found


@pytest.mark.slow
async def test_the_log_has_the_listed_fields(gateway: GatewayProcess) -> None:
    """An operator finds every field of a request's line in the docs, and no other."""
    answer = await sent(f"{gateway.url}/v1/messages", asked("Hello!", max_tokens=9))
    line = await eventually(lambda: gateway.requests(request_id=answer.headers["request-id"]))

    assert set(column("docs/self-hosting.md", "The log")) == set(line[0])
