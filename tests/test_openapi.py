"""GET /openapi.yaml says what the gateway does: its paths, fields, errors and headers, and what is really answered."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import aiohttp
import pytest
import pytest_asyncio
import yaml  # type: ignore[import-untyped]
from jsonschema import Draft202012Validator
from openapi_spec_validator import OpenAPIV31SpecValidator

from plugins import BUNDLED
from plugins.chat_completions.fields import compat
from proxy.dialects import messages, openai
from proxy.headers import WAITING
from proxy.openapi import as_yaml, document
from proxy.openapi.operations import OPERATIONS
from proxy.plugin import Plugin
from proxy.testing import running_gateway

Json = dict[str, Any]

OPEN = [plugin for name, plugin in BUNDLED.items() if name != "auth"]
KEY = "ezat_sk_test"
AUTH = (BUNDLED["auth"], {"keys": [{"name": "test", "key": KEY}]})
CHAT = "/openai/v1/chat/completions"
MESSAGES = "/v1/messages"
KEYED = {
    MESSAGES: ["post"],
    "/v1/messages/count_tokens": ["post"],
    CHAT: ["post"],
    "/v1/models": ["get"],
    "/v1/models/{id}": ["get"],
    "/openai/v1/models": ["get"],
    "/openai/v1/models/{id}": ["get"],
    "/api/key": ["get"],
    "/api/key/requests/{id}": ["get"],
}
KEYLESS = ("/", "/healthz", "/readyz", "/api/models", "/api/compat", "/openapi.yaml")
EVERY_PATH = KEYED | {path: ["get", "head"] for path in KEYLESS}
HTTP_HEADERS = {
    *("content-type", "content-length", "date", "server", "transfer-encoding", "cache-control", "connection"),
    "x-accel-buffering",
}
"""What every server says, and a stream to proxies; not described."""


on_one_gateway = pytest.mark.asyncio(loop_scope="module")


async def description_of(url: str) -> Json:
    """The document, as a client reads it: without a key."""
    async with aiohttp.ClientSession() as session, session.get(url + "/openapi.yaml") as response:
        assert (200, "application/yaml") == (response.status, response.content_type)
        return read_yaml(await response.text())


@cache
def read_yaml(text: str) -> Json:
    """A YAML document; the same one is read once."""
    read: Json = yaml.load(text, yaml.CSafeLoader)
    return read


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[str]:
    async with running_gateway(OPEN) as url:
        yield url


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def described(gateway: str) -> Json:
    return await description_of(gateway)


def with_plugins(*plugins: Plugin) -> Json:
    """The document of a listener with the engine's paths and these plugins'."""
    pages = {path: ["GET"] for plugin in plugins for path in plugin.pages()}
    return document({**{path: ["GET"] for path in OPERATIONS}, **pages}, plugins)


@on_one_gateway
async def test_it_is_an_openapi_document(described: Json) -> None:
    """Tools for OpenAPI 3.1 can read it."""
    assert [] == [error.message for error in OpenAPIV31SpecValidator(described).iter_errors()]
    assert described["openapi"].startswith("3.1.")


def test_every_reference_leads_somewhere_and_nothing_lies_about() -> None:
    """Each reference has its target, and each schema is referred to, but for what is named to be refused."""
    whole = with_plugins(BUNDLED["chat_completions"](None))
    referred = {reference.removeprefix("#/") for reference in references(whole)}
    parts = {
        f"components/{kind}/{name}"
        for kind in ("schemas", "parameters", "headers")
        for name in whole["components"][kind]
    }

    assert set() == {each for each in referred if not at(whole, each)}
    named = {f"components/schemas/{name}" for name in ("ChatPart.input_audio", "ChatTool.custom")}
    assert named == {each for each in parts - referred if "allow" not in each and "anthropic" not in each}


def references(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, member in value.items():
            if name == "$ref":
                yield member
            else:
                yield from references(member)
    elif isinstance(value, list):
        for item in value:
            yield from references(item)


def at(whole: Any, path: str) -> Any:
    for name in path.split("/"):
        whole = whole.get(name, {})
    return whole


YAML_VALUES: dict[str, Json] = {
    "nothing": {},
    "texts that are other things to YAML": {
        name: name
        for name in ("on", "n", "null", "~", "1.0", "0x1", "2026-11-29", "- a", "a: b", "a #b", "", " ", "'", '"', "\\")
    },
    "lines and signs": {"a": "one\ntwo\t\x00\x7f \x85\u2028\ufeff é … 😀"},
    "empty ones": {"a": {}, "b": [], "c": [{}, []], "d": [[1], [[2]]]},
    "numbers and words": {"a": [1, -2.5, True, False, None], "b": 10**15},
    "lists of objects": {"a": [{"b": [{"c": 1, "d": {"e": 2}}], "f": 3}, {"g": {"h": []}}]},
}


@pytest.mark.parametrize("value", YAML_VALUES.values(), ids=YAML_VALUES)
def test_yaml_reads_back_as_it_was(value: Json) -> None:
    """What is written as YAML is the same to a YAML parser."""
    assert value == yaml.safe_load(as_yaml(value))


def test_the_document_reads_back_as_it_was() -> None:
    """Nothing of the document itself is lost in YAML."""
    whole = with_plugins(BUNDLED["chat_completions"](None))

    assert whole == yaml.safe_load(as_yaml(whole))


@on_one_gateway
async def test_every_path_is_described(described: Json) -> None:
    """Every endpoint with its methods is in the document, and no other."""
    assert EVERY_PATH == {path: list(methods) for path, methods in described["paths"].items()}


@on_one_gateway
@pytest.mark.parametrize("path", EVERY_PATH)
async def test_what_is_described_is_there(gateway: str, path: str) -> None:
    """The listener takes the described methods of a path, and says so to any other."""
    async with (
        aiohttp.ClientSession() as session,
        session.delete(gateway + path.replace("{id}", "test/model")) as response,
    ):
        allowed = response.headers["allow"].lower().split(", ")

    assert (405, EVERY_PATH[path]) == (response.status, allowed)


async def test_what_is_switched_off_is_not_described() -> None:
    """Without its translator, OpenAI's endpoint isn't there, nor the translator's page."""
    async with running_gateway([BUNDLED["usage"]]) as url:
        described = await description_of(url)

    assert {CHAT, "/api/compat"} == set(EVERY_PATH) - set(described["paths"])


@pytest.mark.parametrize(
    ("plugins", "server", "schemes"),
    [
        pytest.param([AUTH, *OPEN], {"open": False}, [{"bearer": []}, {"api_key": []}], id="with keys"),
        pytest.param(OPEN, {}, [], id="open to all"),
    ],
)
async def test_it_says_where_a_key_is_asked(plugins: list[Any], server: Json, schemes: list[Json]) -> None:
    """The keyed endpoints name both headers for the key, the others none; an open gateway asks for none anywhere."""
    async with running_gateway(plugins, server=server) as url:
        described = await description_of(url)

    asked = {path: [each["security"] for each in methods.values()] for path, methods in described["paths"].items()}
    assert {path: [schemes] for path in KEYED} | {path: [[], []] for path in KEYLESS} == asked


async def test_the_base_path_is_the_servers() -> None:
    """Behind a path the paths stay, and the server's URL holds it."""
    async with running_gateway(OPEN, server={"base_path": "/llm"}) as url:
        described = await description_of(url + "/llm")

    assert [{"url": "/llm"}] == described["servers"]
    assert set(EVERY_PATH) == set(described["paths"])


class Greeter(Plugin):
    """A plugin with two pages, of which it describes one."""

    name = "greeter"

    def pages(self) -> Mapping[str, Any]:
        return {"/hello": {"hello": "world"}, "/silent": 1}

    def describe(self) -> Mapping[str, Any]:
        return {"paths": {"/hello": {"get": {"summary": "Says hello."}}}}


async def test_a_plugin_describes_its_pages() -> None:
    """What a plugin says of its page stands beside what the engine says; a silent one's page is there all the same."""
    async with running_gateway([Greeter]) as url:
        described = await description_of(url)

    hello, silent = described["paths"]["/hello"]["get"], described["paths"]["/silent"]["get"]
    assert ("Says hello.", "A page of a plugin.") == (hello.pop("summary"), silent.pop("summary"))
    assert hello == silent


def entry(schema: Json) -> dict[str, str]:
    """Class, refusal and note of a schema, as /api/compat has them."""
    names = {"class": "x-ezat-class", "message": "x-ezat-refusal", "note": "description"}
    return {name: schema[keyword] for name, keyword in names.items() if keyword in schema}


@on_one_gateway
async def test_every_field_stands_in_the_request_with_its_class(described: Json) -> None:
    """The request's fields, their classes, refusals and notes are those of the table, and so are parts and tools."""
    schemas = described["components"]["schemas"]
    found = {
        "fields": {name: entry(each) for name, each in schemas["ChatCompletionRequest"]["properties"].items()},
        "parts": {name[9:]: entry(each) for name, each in schemas.items() if name.startswith("ChatPart.")},
        "tools": {name[9:]: entry(each) for name, each in schemas.items() if name.startswith("ChatTool.")},
    }

    assert compat() == found


@on_one_gateway
@pytest.mark.parametrize(
    ("prefix", "wordings"), [("OpenAI", openai.WORDINGS), ("Messages", messages.WORDINGS)], ids=["openai", "messages"]
)
async def test_every_error_is_described(described: Json, prefix: str, wordings: Mapping[Any, Any]) -> None:
    """Each kind of error stands under its status, with type, code and, where one has to wait, retry-after."""
    responses = {
        name.removeprefix(prefix): response
        for name, response in described["components"]["responses"].items()
        if name.startswith(prefix)
    }
    found = {
        (int(status), kind): (worded["type"], worded.get("code"))
        for status, response in responses.items()
        for kind, worded in response["x-ezat-kinds"].items()
    }
    waiting = {str(wordings[kind].status) for kind in WAITING}

    assert {(each.status, kind.value): (each.type, each.code) for kind, each in wordings.items()} == found
    assert waiting == {status for status, response in responses.items() if "retry-after" in response["headers"]}


# What a field may hold


SAMPLES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, 3, -1, 0.5, 1.0, 1.5, 64.0, 10**30),
    *("", "x", "auto", "low", "LOW", "k" * 257, "text"),
    *([], [1], ["x"], ["text"], {}, {"a": 1}, [[]], [None], {"type": "function"}, {"type": "text"}),
    *(
        {"include_usage": True},
        {"include_usage": 1},
        {"type": "json_schema", "json_schema": {}},
        {"type": "json_object"},
    ),
    {"type": "json_schema", "json_schema": {"schema": {"type": "object", "properties": {}}}},
    {"type": "function", "function": {"name": "now"}},
    *([{"type": "function", "function": {"name": "now"}}], [{"function": {}}], [{"type": "custom", "custom": {}}]),
    [{"function": {"name": "now", "strict": 1}}],
    *([{"role": "user", "content": "Hi"}], [{"role": "user", "content": 1}], [{"role": "tool", "content": "x"}]),
    *(
        [{"role": "function", "name": "f", "content": "x"}],
        [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
    ),
    [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}],
    "model",
)
FREE = {name for name, each in compat()["fields"].items() if each["class"] == "ignored"}
"""What nobody reads may be anything."""


@on_one_gateway
@pytest.mark.parametrize("field", sorted(set(compat()["fields"]) - FREE))
async def test_a_value_fits_the_schema_if_it_is_taken(gateway: str, described: Json, field: str) -> None:
    """For each field, what the schema allows the gateway answers, and what it forbids is refused, naming the field."""
    usual = {
        "model": "model",
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [{"type": "function", "function": {"name": "now"}}],
    }
    judge = validator(described, "#/components/schemas/ChatCompletionRequest")
    by_schema, by_gateway = {}, {}

    async with aiohttp.ClientSession() as session:
        for sample in SAMPLES:
            body = {**usual, field: sample}
            name = json.dumps(sample)
            by_schema[name] = judge.is_valid(body)
            async with session.post(gateway + CHAT, json=body) as response:
                by_gateway[name] = response.status == 200 or (field, response.status) == ("model", 404)
                if not by_gateway[name]:
                    said = (await response.json())["error"]["message"]
                    assert said.startswith(("functions" if field == "function_call" else field, "modalities"))

    assert by_schema == by_gateway


# What is really answered


def closed(schema: Any) -> Any:
    """The same schema, with no room for members that it doesn't name, unless it says that it has."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {name: closed(each) for name, each in schema.items()}
    if "required" in inner and "properties" in inner:
        inner.setdefault("additionalProperties", False)
    return inner


def validator(described: Json, pointer: str) -> Any:
    """The judge of values by the schema that stands there."""
    return Draft202012Validator({"$ref": pointer, "components": described["components"]})


def complaints(described: Json, schema: Json, *values: Any) -> list[str]:
    """What is wrong with these values, by the closed schema."""
    judge = Draft202012Validator({"allOf": [closed(schema)], "components": closed(described["components"])})
    return [f"{error.json_path}: {error.message}" for value in values for error in judge.iter_errors(value)]


class Ask(NamedTuple):
    """A request, and the status that it gets."""

    path: str
    body: Json | None = None
    status: int = 200
    method: str = "POST"
    described_as: str | None = None


def chat(text: str = "Hi", **more: Any) -> Json:
    return {"model": "model", "messages": [{"role": "user", "content": text}], **more}


def ask_messages(text: str = "Hi", **more: Any) -> Json:
    return {**chat(text), "max_tokens": 2000, **more}


FUNCTIONS = [{"type": "function", "function": {"name": name}} for name in ("now", "then")]
TOOLS = [{"name": name, "input_schema": {"type": "object"}} for name in ("now", "then")]
WITH_USAGE: Json = {"stream": True, "stream_options": {"include_usage": True}}

ASKED: dict[str, Ask] = {
    "a completion": Ask(CHAT, chat()),
    "a completion, ignored and adjusted": Ask(CHAT, chat(seed=7, max_tokens=10**6)),
    "a completion of calls": Ask(CHAT, chat("in parallel", tools=FUNCTIONS)),
    "a completion cut off": Ask(CHAT, chat(max_tokens=1)),
    "a completion with thinking": Ask(CHAT, chat(reasoning_effort="high")),
    "a streamed completion": Ask(CHAT, chat(stream=True)),
    "a streamed completion with usage": Ask(CHAT, chat(**WITH_USAGE)),
    "streamed calls": Ask(CHAT, chat("in parallel", tools=FUNCTIONS, **WITH_USAGE)),
    "a refused field": Ask(CHAT, chat(n=2), 400),
    "no body": Ask(CHAT, None, 400),
    "an unknown model": Ask(CHAT, chat(model="nobody"), 404),
    "a refusal of the provider": Ask(CHAT, chat("fault 400"), 400),
    "too much for the provider": Ask(CHAT, chat("fault 413"), 413),
    "a provider's limit": Ask(CHAT, chat("fault 429"), 429),
    "a provider's failure": Ask(CHAT, chat("fault 500"), 500),
    "a provider without capacity": Ask(CHAT, chat("fault 529"), 503),
    "a provider that is late": Ask(CHAT, chat("fault 504"), 504),
    "a message": Ask(MESSAGES, ask_messages()),
    "a message of calls": Ask(MESSAGES, ask_messages("in parallel", tools=TOOLS, thinking={"type": "adaptive"})),
    "a streamed message": Ask(MESSAGES, ask_messages(stream=True)),
    "streamed calls of a message": Ask(MESSAGES, ask_messages("in parallel", tools=TOOLS, stream=True)),
    "a message without a limit": Ask(MESSAGES, chat(), 400),
    "a message to an unknown model": Ask(MESSAGES, ask_messages(model="nobody"), 404),
    "a provider's own error": Ask(MESSAGES, ask_messages("fault 400"), 400),
    "a message to a provider without capacity": Ask(MESSAGES, ask_messages("fault 529"), 529),
    "a message to a provider's limit": Ask(MESSAGES, ask_messages("fault 429"), 429),
    "a count": Ask("/v1/messages/count_tokens", chat()),
    "a count without messages": Ask("/v1/messages/count_tokens", {"model": "model"}, 400),
    "OpenAI's models": Ask("/openai/v1/models", method="GET"),
    "one of OpenAI's models": Ask("/openai/v1/models/test/model", method="GET", described_as="/openai/v1/models/{id}"),
    "none of OpenAI's models": Ask("/openai/v1/models/x", None, 404, "GET", described_as="/openai/v1/models/{id}"),
    "the key": Ask("/api/key", method="GET"),
    "no request": Ask("/api/key/requests/x", None, 404, "GET", described_as="/api/key/requests/{id}"),
    "the models": Ask("/v1/models?limit=1", method="GET", described_as="/v1/models"),
    "a wrong page of models": Ask("/v1/models?limit=x", None, 400, "GET", described_as="/v1/models"),
    "one of the models": Ask("/v1/models/model", method="GET", described_as="/v1/models/{id}"),
    "none of the models": Ask("/v1/models/x", None, 404, "GET", described_as="/v1/models/{id}"),
    **{f"GET {path}": Ask(path, method="GET") for path in KEYLESS if path != "/openapi.yaml"},
    **{f"HEAD {path}": Ask(path, method="HEAD") for path in KEYLESS},
}


def events_in(text: str) -> list[Any]:
    """The data of a stream's events, without OpenAI's last word."""
    data = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    return [json.loads(each) for each in data if each != "[DONE]"]


@on_one_gateway
@pytest.mark.parametrize("ask", ASKED.values(), ids=ASKED)
async def test_an_answer_is_what_the_description_says(gateway: str, described: Json, ask: Ask) -> None:
    """Status, content type, headers and body of a real answer are described, with no member more or less."""
    operation = described["paths"][ask.described_as or ask.path][ask.method.lower()]
    async with (
        aiohttp.ClientSession() as session,
        session.request(ask.method, gateway + ask.path, json=ask.body) as response,
    ):
        text = await response.text()
    headers = {name.lower() for name in response.headers} - HTTP_HEADERS
    assert ask.status == response.status
    said = resolved(described, operation["responses"][str(ask.status)])
    content = said["content"].get(response.content_type, {}).get("schema", {})
    bodies = events_in(text) if response.content_type == "text/event-stream" else [json.loads(text or "null")]

    assert {"request-id", "x-request-id"} <= headers <= set(said["headers"])
    assert ("retry-after" in said["headers"]) == ("retry-after" in headers)
    assert [] != bodies
    assert [] == complaints(described, content, *bodies)
    assert (ask.method == "HEAD") == (content == {})


def resolved(described: Json, response: Json) -> Json:
    if "$ref" not in response:
        return response
    found: Json = at(described, response["$ref"].removeprefix("#/"))
    return found


@on_one_gateway
async def test_the_cost_of_a_request_is_what_the_description_says(gateway: str, described: Json) -> None:
    """A request that was answered is found by its id, and what it cost is told as described."""
    async with aiohttp.ClientSession() as session:
        async with session.post(gateway + CHAT, json=chat()) as answered:
            id = answered.headers["request-id"]
        async with session.get(f"{gateway}/api/key/requests/{id}") as response:
            cost = await response.json()

    assert [] == complaints(described, {"$ref": "#/components/schemas/RequestCost"}, cost)
    assert id == cost["request_id"]


async def test_an_unknown_key_gets_the_described_error() -> None:
    """The 401 of both formats is the described one."""
    async with running_gateway([AUTH, *OPEN], server={"open": False}) as url, aiohttp.ClientSession() as session:
        described = await description_of(url)
        for path, body in ((CHAT, chat()), (MESSAGES, ask_messages())):
            async with session.post(url + path, json=body) as response:
                answer = await response.json()
            said = resolved(described, described["paths"][path]["post"]["responses"]["401"])
            schema = said["content"]["application/json"]["schema"]

            assert (401, []) == (response.status, complaints(described, schema, answer))
