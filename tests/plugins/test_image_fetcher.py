"""The plugin that downloads images given by URL, as a client of the gateway meets it."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from ipaddress import ip_network
from typing import Any

import aiohttp
import orjson
import pytest
from pydantic import ValidationError
from yarl import URL

from plugins.chat_completions import ChatCompletions
from plugins.image_fetcher import ImageFetcher, ImageFetcherSettings
from proxy.errors import GatewayError
from proxy.plugin import Route
from proxy.testing import PluginInList, ScriptedUpstream, ask, make_exchange, running_gateway
from tests.plugins.fake_internet import PNG, PUBLIC, FakeInternet, redirect, reply
from tests.plugins.models import make_model
from tests.process import eventually

CHAT = "/openai/v1/chat/completions"
MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
HOST = "http://public.example"
INLINE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
BY_URL = {"type": "image_url", "image_url": {"url": f"{HOST}/a.png"}}
CALL = {"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "shot"}}]}
SOURCE = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(PNG).decode()}
URL_BLOCK = {"type": "image", "source": {"type": "url", "url": f"{HOST}/a.png"}}


@pytest.fixture
async def internet(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeInternet]:
    internet = FakeInternet(monkeypatch)
    internet.names["public.example"] = [PUBLIC]
    yield internet
    await internet.close()


class Reached:
    """A running gateway, its upstream, and a client."""

    def __init__(self, url: str, upstream: ScriptedUpstream, client: aiohttp.ClientSession) -> None:
        self._url = url
        self.upstream = upstream
        self._client = client

    async def post(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Any:
        """The answer's JSON."""
        async with self._client.post(self._url + path, data=orjson.dumps(body), headers=headers) as response:
            return await response.json()

    @property
    def sent(self) -> list[Any]:
        """The messages of each request that reached the upstream."""
        return [orjson.loads(each.body)["messages"] for each in self.upstream.received]


@asynccontextmanager
async def gateway(internet: FakeInternet, **settings: Any) -> AsyncIterator[Reached]:
    plugins: list[PluginInList] = [ChatCompletions, (internet.fetcher(), settings)]
    async with (
        ScriptedUpstream() as upstream,
        aiohttp.ClientSession() as client,
        running_gateway(plugins, upstream=upstream.url) as url,
    ):
        internet.local |= {("127.0.0.1", URL(local).port or 0) for local in (upstream.url, url)}
        yield Reached(url, upstream, client)


def chat(messages: Sequence[Any]) -> dict[str, Any]:
    return {"model": "model", "messages": messages}


def message(*content: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "model", "max_tokens": 9, "messages": [{"role": "user", "content": [*content]}], **fields}


async def fetch(messages: list[Any], **settings: Any) -> None:
    """Send a request through ``on_request`` of the translation and the plugin."""
    exchange = make_exchange({"model": "m", "messages": messages}, model=make_model())
    await ask(ChatCompletions(ChatCompletions.Settings()), exchange)
    await ask(ImageFetcher(ImageFetcherSettings(**settings)), exchange)


def by_url(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


NO_USER = "could not download the image (its URL holds a user name or password)"
NOT_VALID = "could not download the image (its URL is not valid)"
TOO_LONG = "could not download the image (its URL is longer than 8192 characters)"
TOO_MANY = "at most 20 images of a request may be given by URL"
REFUSED: dict[str, tuple[list[Any], str, str]] = {
    "too many": ([{"role": "user", "content": [BY_URL] * 21}], "messages[0].content[20].image_url.url", TOO_MANY),
    "too many over two messages": (
        [{"role": "system", "content": "S"}, *[{"role": "user", "content": [INLINE, *[BY_URL] * 11]}] * 2],
        "messages[2].content[10].image_url.url",
        TOO_MANY,
    ),
    "with a password": (
        [{"role": "user", "content": [INLINE, BY_URL, by_url("https://u:p@host.example/")]}],
        "messages[0].content[2].image_url.url",
        NO_USER,
    ),
    "in a result": (
        [
            {"role": "user", "content": "Go."},
            CALL,
            {"role": "tool", "tool_call_id": "c1", "content": [by_url("http://host.example:99999/")]},
        ],
        "messages[2].content[0].image_url.url",
        NOT_VALID,
    ),
    "too long": (
        [{"role": "user", "content": [by_url("http://host.example/" + "a" * 9000)]}],
        "messages[0].content[0].image_url.url",
        TOO_LONG,
    ),
}


@pytest.mark.parametrize(("messages", "path", "text"), REFUSED.values(), ids=REFUSED)
async def test_what_needs_no_download_is_judged_first(messages: list[Any], path: str, text: str) -> None:
    """Number and form of the URLs are judged with the request, before any budget is touched."""
    with pytest.raises(GatewayError) as caught:
        await fetch(messages)
    assert (f"{path}: {text}", path) == (caught.value.message, caught.value.param)


async def test_how_many_urls_is_a_setting() -> None:
    """The operator's limit counts, and is told."""
    with pytest.raises(GatewayError, match="at most 1 images of a request"):
        await fetch([{"role": "user", "content": [BY_URL, BY_URL]}], max_urls=1)


async def test_as_many_as_allowed_pass() -> None:
    """Inline images are not counted, twenty URLs are no more than allowed."""
    await fetch([{"role": "user", "content": [*[INLINE] * 30, *[BY_URL] * 20]}])


def test_networks_are_read_from_text() -> None:
    """Networks are written as in the YAML; what is none is refused at start."""
    settings = ImageFetcherSettings.model_validate({"allow_networks": ["127.0.0.2/32", "fd00::/8"]})
    assert (ip_network("127.0.0.2/32"), ip_network("fd00::/8")) == settings.allow_networks
    with pytest.raises(ValidationError):
        ImageFetcherSettings.model_validate({"allow_networks": ["everything"]})


async def test_images_are_put_in_the_place_of_their_urls(internet: FakeInternet) -> None:
    """Images in user messages and in tool results go up inline, each with its own, all else as it was."""
    await internet.serve(reply())
    result = {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "Here"}, BY_URL]}
    marked = {**BY_URL, "cache_control": {"type": "ephemeral"}}

    async with gateway(internet) as reached:
        await reached.post(CHAT, chat([{"role": "user", "content": [marked, INLINE]}, CALL, result]))

        [[first, _, last]] = reached.sent
    inline = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
    image = {"type": "image", "source": SOURCE}
    assert [{**image, "cache_control": {"type": "ephemeral"}}, inline] == first["content"]
    assert [{"type": "text", "text": "Here"}, image] == last["content"][0]["content"]
    assert 1 == len(internet.visits)


async def test_one_failure_is_the_answer(internet: FakeInternet) -> None:
    """The part that failed is named as the client counts, and nothing goes upstream."""
    await internet.serve(lambda visit: reply(b"", "404 Not Found") if visit.target == "/b.png" else reply())
    parts = [{"type": "text", "text": "Look."}, BY_URL, by_url(f"{HOST}/b.png")]

    async with gateway(internet) as reached:
        answer = await reached.post(
            CHAT, chat([{"role": "system", "content": "S"}, {"role": "user", "content": parts}])
        )

        path = "messages[1].content[2].image_url.url"
        error = {"message": f"{path}: could not download the image (HTTP 404)", "param": path}
        assert {**error, "type": "invalid_request_error", "code": None} == answer["error"]
        assert [] == reached.sent


async def test_hosts_get_nothing_of_the_clients(internet: FakeInternet) -> None:
    """No header of the client or of the upstream reaches an image host."""
    await internet.serve(reply())
    secrets = {
        "authorization": "Bearer ezat_sk_canary",
        "x-api-key": "ezat_sk_canary",
        "cookie": "canary=1",
        "x-request-id": "canary",
        "referer": "http://canary/",
        "x-ezat-session": "canary",
    }

    async with gateway(internet) as reached:
        await reached.post(CHAT, chat([{"role": "user", "content": [BY_URL]}]), secrets)

    [visit] = internet.visits
    assert {"host", "accept", "accept-encoding", "user-agent", "connection"} == visit.headers.keys()
    assert "canary" not in repr(visit)
    assert "upstream-secret" not in repr(visit)


async def test_a_client_that_leaves_takes_its_downloads_with_it(internet: FakeInternet) -> None:
    """The connections to image hosts end with the request, and nothing goes upstream."""
    await internet.serve([asyncio.Event()])
    parts = [by_url(f"{HOST}/{number}") for number in range(4)]

    async with gateway(internet) as reached:
        asking = asyncio.create_task(reached.post(CHAT, chat([{"role": "user", "content": parts}])))
        await eventually(lambda: len(internet.visits) == 4)
        asking.cancel()

        await eventually(lambda: internet.open == 0)
        assert (True, []) == (internet.left.is_set(), reached.sent)


async def test_a_redirect_inside_ends_the_request(internet: FakeInternet) -> None:
    """Through the whole gateway, only the public address is dialled."""
    await internet.serve(redirect("http://169.254.169.254/latest/meta-data/"))

    async with gateway(internet) as reached:
        answer = await reached.post(CHAT, chat([{"role": "user", "content": [BY_URL]}]))

    reason = "its host has no public address, or its port is neither 80 nor 443"
    path = "messages[0].content[0].image_url.url"
    assert f"{path}: could not download the image ({reason})" == answer["error"]["message"]
    assert [(PUBLIC, 80)] == internet.dialled


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
async def test_messages_pass_unread_by_default(internet: FakeInternet, path: str) -> None:
    """Without the setting a Messages body goes up with its URLs, byte for byte."""
    async with gateway(internet) as reached:
        await reached.post(path, message(URL_BLOCK, model="test/model"))

        expected = orjson.dumps(message(URL_BLOCK, model="model-at-upstream"))
        assert [expected] == [each.body for each in reached.upstream.received]
    assert [] == internet.dialled


def test_the_routes_are_those_of_the_settings() -> None:
    """A plugin that is not to look at Messages bodies is not in the chains of their routes."""
    on, off = (ImageFetcher(ImageFetcherSettings(messages=messages)) for messages in (True, False))

    assert {Route.CHAT_COMPLETIONS} == off.routes
    assert {Route.CHAT_COMPLETIONS, Route.MESSAGES, Route.COUNT_TOKENS} == on.routes


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
async def test_messages_are_fetched_where_that_is_wished(internet: FakeInternet, path: str) -> None:
    """With the setting, images by URL go up inline on the Messages routes too, in tool results as well."""
    await internet.serve(reply())
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [URL_BLOCK]}
    document = {"type": "document", "source": {"type": "url", "url": f"{HOST}/a.pdf"}}
    text = {"type": "text", "text": "Look."}

    async with gateway(internet, messages=True) as reached:
        await reached.post(path, message(result, text, URL_BLOCK, document))

        [[sent]] = reached.sent
    image = {"type": "image", "source": SOURCE}
    assert [{**result, "content": [image]}, text, image, document] == sent["content"]
    assert 1 == len(internet.visits)


MESSAGE_FAILURES: dict[str, tuple[list[Any], str]] = {
    "of a message": (
        [{"type": "text", "text": "x"}, URL_BLOCK],
        "messages[0].content[1].source.url: could not download the image (HTTP 404)",
    ),
    "in a result": (
        [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "x"}, URL_BLOCK]}],
        "messages[0].content[0].content[1].source.url: could not download the image (HTTP 404)",
    ),
    "of another scheme": (
        [{"type": "image", "source": {"type": "url", "url": "file:///etc/passwd"}}],
        "messages[0].content[0].source.url: could not download the image (only http and https URLs are visited)",
    ),
    "too many": (
        [URL_BLOCK] * 21,
        "messages[0].content[20].source.url: at most 20 images of a request may be given by URL",
    ),
}


@pytest.mark.parametrize(("content", "text"), MESSAGE_FAILURES.values(), ids=MESSAGE_FAILURES)
async def test_a_failure_on_messages_names_its_path(internet: FakeInternet, content: list[Any], text: str) -> None:
    """The error is in the Messages format and names the place in the Messages body."""
    await internet.serve(reply(b"", "404 Not Found"))

    async with gateway(internet, messages=True) as reached:
        answer = await reached.post(MESSAGES, message(*content))

        assert {"type": "invalid_request_error", "message": text} == answer["error"]
        assert [] == reached.sent


ODD_CONTENTS: dict[str, Any] = {
    "a text": "Hello",
    "no object": [1, None, "x", []],
    "an image without a source": [{"type": "image"}],
    "an image whose source is a text": [{"type": "image", "source": "x"}],
    "a URL that is none": [{"type": "image", "source": {"type": "url", "url": 5}}],
    "a file": [{"type": "image", "source": {"type": "file", "file_id": "f"}}],
    "a result without content": [{"type": "tool_result", "tool_use_id": "t"}],
    "a result of text": [{"type": "tool_result", "tool_use_id": "t", "content": "x"}],
    "nothing": None,
}


@pytest.mark.parametrize("content", ODD_CONTENTS.values(), ids=ODD_CONTENTS)
async def test_odd_messages_are_left_to_the_provider(internet: FakeInternet, content: Any) -> None:
    """What holds no image by URL goes up byte for byte, whatever its shape."""
    body = {"model": "test/model", "max_tokens": 9, "messages": [{"role": "user", "content": content}, 7]}

    async with gateway(internet, messages=True) as reached:
        await reached.post(MESSAGES, body)

        expected = orjson.dumps({**body, "model": "model-at-upstream"})
        assert [expected] == [each.body for each in reached.upstream.received]
