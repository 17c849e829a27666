"""Which path answers what, through the real server: its parser decides what a path is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

import pytest

from plugins.auth import Auth
from plugins.chat_completions import ChatCompletions
from proxy.dialects import Dialect
from proxy.endpoints import BASE_URLS, INSTEAD, find, not_found
from proxy.handler import DIALECTS
from proxy.testing import PluginInList, ScriptedUpstream, running_gateway

KEY = "ezat_sk_alice"
LIMITED = "ezat_sk_limited"
AUTH = {"keys": [{"name": "alice", "key": KEY}, {"name": "limited", "key": LIMITED, "models": []}]}
BODY = json.dumps({"model": "model", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}).encode()


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def envelope(self) -> str:
        """Whose envelope an error has; anything else raises."""
        if set(self.json) == {"error"}:
            assert {"message", "type", "param", "code"} == set(self.json["error"])
            return "openai"
        assert {"type", "error", "request_id"} == set(self.json)
        assert {"type", "message"} == set(self.json["error"])
        return "messages"


class Server(NamedTuple):
    """A running gateway, spoken to in bytes: no client library tidies paths up."""

    runner: asyncio.Runner
    upstream: ScriptedUpstream
    port: int

    def ask(self, method: str, target: str, body: bytes = b"", key: str | None = KEY, **headers: str) -> Answer:
        lines = {"host": "gateway", "content-length": str(len(body)), "connection": "close", **headers}
        if key is not None:
            lines["x-api-key"] = key
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        return self.runner.run(self._exchange(f"{method} {target} HTTP/1.1\r\n{head}\r\n".encode() + body))

    async def _exchange(self, sent: bytes) -> Answer:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(sent)
        head, _, body = (await reader.read(-1)).partition(b"\r\n\r\n")
        writer.close()
        await writer.wait_closed()
        first, *lines = head.decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        return Answer(int(first.split()[1]), headers, body)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        stack = AsyncExitStack()

        async def started() -> Server:
            upstream = await stack.enter_async_context(ScriptedUpstream())
            plugins: list[PluginInList] = [(Auth, AUTH), ChatCompletions]
            url = await stack.enter_async_context(running_gateway(plugins, upstream=upstream.url))
            return Server(runner, upstream, int(url.rpartition(":")[2]))

        yield runner.run(started())
        runner.run(stack.aclose())


MESSAGES, CHAT = "/v1/messages", "/openai/v1/chat/completions"
POSTED = (MESSAGES, CHAT)


@pytest.mark.parametrize("path", [*POSTED, f"{MESSAGES}?beta=true", f"{CHAT}?a=b&c"])
def test_a_post_is_answered(server: Server, path: str) -> None:
    """The endpoints answer, with a query as well, which is not forwarded."""
    answer = server.ask("POST", path, BODY)

    assert 200 == answer.status
    assert "/v1/messages" == server.upstream.received[-1].path


KEYLESS = ("/", "/healthz", "/readyz", "/api/models")


@pytest.mark.parametrize("path", KEYLESS)
def test_some_pages_need_no_key(server: Server, path: str) -> None:
    """GET and HEAD are answered without a key, with both id headers."""
    got, head = server.ask("GET", path, key=None), server.ask("HEAD", path, key=None)

    assert (200, 200, b"") == (got.status, head.status, head.body)
    assert isinstance(got.json, dict)
    assert got.headers["request-id"] == got.headers["x-request-id"]


ODD_PATHS = {
    "doubled slash": "//v1/messages",
    "doubled slash inside": "/v1//messages",
    "a dot": "/v1/./messages",
    "two dots": "/v1/x/../messages",
    "a trailing slash": "/v1/messages/",
    "a trailing slash, chat": "/openai/v1/chat/completions/",
    "capitals": "/V1/messages",
    "an escaped letter": "/v1/%6dessages",
    "an escaped slash": "/v1%2Fmessages",
    "an escaped dot": "/v1/%2e/messages",
    "an escaped NUL": "/v1/messages%00",
    "a semicolon": "/v1/messages;a=b",
    "a space": "/v1/messages%20",
    "a backslash": "/v1\\messages",
    "a host in the path": "//evil/v1/messages",
    "no slash": "v1/messages",
    "an absolute target of another page": "http://gateway/v2/messages",
}


@pytest.mark.parametrize("target", ODD_PATHS.values(), ids=ODD_PATHS)
def test_an_odd_path_is_no_way_in(server: Server, target: str) -> None:
    """A path that is not exactly an endpoint's is answered with an error, and nothing goes upstream."""
    before = len(server.upstream.received)

    for key in (None, KEY):
        answer = server.ask("POST", target, BODY, key=key)

        assert answer.status in (400, 404)
        if answer.status == 404:
            assert answer.envelope in DIALECTS
    assert before == len(server.upstream.received)


@pytest.mark.parametrize("path", POSTED)
def test_an_absolute_target_is_judged_by_its_path(server: Server, path: str) -> None:
    """A host in the request line, or an odd Host header, opens no way around the key."""
    without_key = server.ask("POST", f"http://other{path}", BODY, key=None, host="x")
    healthy = server.ask("POST", f"http://other/healthz{path}", BODY, key=None)

    assert (401, 404) == (without_key.status, healthy.status)
    assert 200 == server.ask("POST", f"http://other{path}", BODY).status


METHODS = {
    MESSAGES: "POST",
    "/v1/messages/count_tokens": "POST",
    CHAT: "POST",
    "/v1/models": "GET",
    "/v1/models/test/model": "GET",
    "/openai/v1/models": "GET",
    "/openai/v1/models/test/model": "GET",
    **dict.fromkeys(KEYLESS, "GET, HEAD"),
}


OTHER_METHODS = [
    (method, path, allowed)
    for path, allowed in METHODS.items()
    for method in ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "QUERY")
    if method not in allowed
]


@pytest.mark.parametrize(("method", "path", "allowed"), OTHER_METHODS)
def test_another_method_is_refused(server: Server, method: str, path: str, allowed: str) -> None:
    """A method that a path doesn't take is a 405 that names those that it takes, in the path's envelope, without a
    key."""
    answer = server.ask(method, path, key=None)

    assert (405, allowed) == (answer.status, answer.headers["allow"])
    assert "application/json" == answer.headers["content-type"]
    if method != "HEAD":
        assert ("openai" if path.startswith("/openai") else "messages") == answer.envelope
        assert "invalid_request_error" == answer.json["error"]["type"]


# path: whose envelope, and a part of the words
HINTS = {
    "/v1/v1/messages": ("messages", BASE_URLS),
    "/v1/v1/models": ("messages", BASE_URLS),
    "/openai/v1/v1/chat/completions": ("openai", BASE_URLS),
    "/openai/v1/v1/models": ("openai", BASE_URLS),
    "/openai/v1/openai/v1/chat/completions": ("openai", BASE_URLS),
    "/openai/openai/v1/chat/completions": ("openai", BASE_URLS),
    "/v1/chat/completions": ("openai", BASE_URLS),
    "/chat/completions": ("openai", BASE_URLS),
    "/openai/chat/completions": ("openai", BASE_URLS),
    "/openai/models": ("openai", BASE_URLS),
    "/messages": ("messages", BASE_URLS),
    "/models": ("messages", BASE_URLS),
    "/openai/v1/messages": ("openai", BASE_URLS),
    "/openai/v1/responses": ("openai", "POST /openai/v1/chat/completions"),
    "/openai/v1/responses/resp_1": ("openai", "POST /openai/v1/chat/completions"),
    "/openai/v1/completions": ("openai", "POST /openai/v1/chat/completions"),
    "/openai/v1/embeddings": ("openai", "embeddings are not offered"),
    "/openai/v1/files/file_1": ("openai", "base64"),
    "/v1/messages/batches": ("messages", "POST /v1/messages"),
    "/v1/messages/batches/b_1/results": ("messages", "POST /v1/messages"),
    "/v1/files": ("messages", "base64"),
    "/v1/complete": ("messages", "POST /v1/messages"),
    "/v1/messages/other": ("messages", "/openapi.yaml"),
    "/openai/v1/assistants": ("openai", "/openapi.yaml"),
    "/favicon.ico": ("messages", "/openapi.yaml"),
    "/metrics": ("messages", "/openapi.yaml"),
}


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize(("path", "expected"), HINTS.items(), ids=HINTS)
def test_an_unknown_path_says_what_to_use(server: Server, path: str, expected: tuple[str, str], method: str) -> None:
    """An unknown path is a 404 without a key, in its format's envelope, with the way out where there is one."""
    answer = server.ask(method, path, key=None)

    envelope, words = expected
    assert (404, envelope) == (answer.status, answer.envelope)
    assert words in answer.json["error"]["message"]
    assert ("not_found_error" if envelope == "messages" else "invalid_request_error") == answer.json["error"]["type"]
    assert "nosniff" == answer.headers["x-content-type-options"]


@pytest.mark.parametrize("path", INSTEAD)
def test_what_is_offered_instead_of_a_path_holds_below_it(path: str) -> None:
    """The words for a path are those for all paths below it."""
    assert INSTEAD[path] == not_found(path) == not_found(f"{path}/x/y")


def test_a_path_is_never_quoted(server: Server) -> None:
    """What a client wrote into a path doesn't come back from the error."""
    answer = server.ask("GET", "/<script>alert(1)</script>", key=None)

    assert answer.status in (400, 404)
    assert b"script" not in answer.body


NAMES = {
    "an id with its slash": ("test/model", 200),
    "an escaped slash": ("test%2Fmodel", 200),
    "an escaped slash in small letters": ("test%2fmodel", 200),
    "an alias": ("model", 200),
    "capitals": ("TEST/Model", 200),
    "escaped letters": ("%6Dodel", 200),
    "spaces around": ("%20model%20", 200),
    "a query": ("test/model?beta=true", 200),
    "unknown": ("gpt-9", 404),
    "a part of an id": ("test", 404),
    "a trailing slash": ("test/model/", 404),
    "dots": ("../messages", 404),
    "escaped twice": ("test%252Fmodel", 404),
    "a broken escape": ("%zz", 404),
    "bytes that are no UTF-8": ("%ff", 404),
    "a NUL": ("model%00", 404),
}


@pytest.mark.parametrize("prefix", ["/v1/models/", "/openai/v1/models/"])
@pytest.mark.parametrize(("name", "expected"), NAMES.values(), ids=NAMES)
def test_a_models_name_in_a_path(server: Server, prefix: str, name: str, expected: int) -> None:
    """A model is found under all of its names, slashes raw or escaped; any other name is a 404 in the envelope."""
    answer = server.ask("GET", prefix + name)

    assert expected == answer.status
    if expected == 200:
        assert "test/model" == answer.json["id"]
    else:
        assert ("openai" if prefix.startswith("/openai") else "messages") == answer.envelope


@pytest.mark.parametrize("prefix", ["/v1/models", "/openai/v1/models"])
def test_the_model_lists_need_a_key_and_show_what_it_may_use(server: Server, prefix: str) -> None:
    """Without a key a list is a 401; a key sees its models, and those that it may not use are not there."""
    assert (401, 401) == (
        server.ask("GET", prefix, key=None).status,
        server.ask("GET", f"{prefix}/model", key=None).status,
    )
    assert ["test/model"] == [model["id"] for model in server.ask("GET", prefix).json["data"]]
    assert [] == server.ask("GET", prefix, key=LIMITED).json["data"]
    assert 404 == server.ask("GET", f"{prefix}/model", key=LIMITED).status


QUERIES = {
    "limit=1": 200,
    "limit=0": 400,
    "limit=1001": 400,
    "limit=x": 400,
    "limit=%C2%B2": 400,
    "limit=": 400,
    "limit=" + "9" * 5000: 400,
    "after_id=gone": 400,
    "before_id=gone": 400,
    "after_id=test/model": 200,
    "unknown=1": 200,
}


@pytest.mark.parametrize(("query", "expected"), QUERIES.items(), ids=[f"{query:.20}" for query in QUERIES])
def test_a_bad_query_of_the_model_list(server: Server, query: str, expected: int) -> None:
    """A parameter that can't be is a 400 that names it."""
    answer = server.ask("GET", f"/v1/models?{query}")

    assert expected == answer.status
    if expected == 400:
        assert answer.json["error"]["message"].startswith(query.partition("=")[0] + ": ")


async def _endpoint(request: Any) -> Any:
    raise NotImplementedError


TABLE = {"/a": {"GET": _endpoint}, "/b/": {"POST": _endpoint}, "/": {"HEAD": _endpoint}}
FOUND = {
    "/a": "GET",
    "/a/": None,
    "/ab": None,
    "/b": None,
    "/b/": None,
    "/b/c": "POST",
    "/b/c/d": "POST",
    "/": "HEAD",
    "/c": None,
    "": None,
}


@pytest.mark.parametrize(("path", "expected"), FOUND.items(), ids=[path or "nothing" for path in FOUND])
def test_finding_a_path(path: str, expected: str | None) -> None:
    """A path is found exactly; one that ends in a slash stands for those below it, but for the root."""
    found = find(TABLE, path)

    assert expected == (found and next(iter(found)))


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
def test_both_dialects_are_there(dialect: Dialect) -> None:
    """Each format has its rim under its own name."""
    assert dialect is DIALECTS[dialect.format]
