"""One request and its answer, as plugins see it."""

import re
from collections.abc import Iterable
from typing import Any

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from proxy.errors import GatewayError, Kind
from proxy.exchange import Exchange, Key
from proxy.models import ModelTable
from proxy.plugin import Route
from proxy.testing import MODEL, make_exchange

UUID7 = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
OURS, OTHER = "ezat_sk_alice", "sk-ant-other"


def exchange_with(*headers: tuple[str, str]) -> Exchange:
    return Exchange(Route.MESSAGES, CIMultiDictProxy(CIMultiDict(headers)), ModelTable([MODEL]))


CREDENTIALS: dict[str, tuple[Iterable[tuple[str, str]], str | None]] = {
    "none": ([], None),
    "x-api-key": ([("x-api-key", OURS)], OURS),
    "x-api-key in capitals": ([("X-API-KEY", OURS)], OURS),
    "x-api-key with spaces around": ([("x-api-key", f"  {OURS} ")], OURS),
    "an empty x-api-key": ([("x-api-key", "")], None),
    "another kind of key": ([("x-api-key", OTHER)], OTHER),
    "Bearer": ([("authorization", f"Bearer {OURS}")], OURS),
    "bearer in small letters": ([("authorization", f"bearer {OURS}")], OURS),
    "bearer in capitals": ([("Authorization", f"BEARER {OURS}")], OURS),
    "Bearer with two spaces": ([("authorization", f"Bearer  {OURS}")], OURS),
    "Bearer with a tab": ([("authorization", f"Bearer\t{OURS}")], None),
    "Bearer alone": ([("authorization", "Bearer")], None),
    "Bearer and spaces": ([("authorization", "Bearer   ")], None),
    "the key alone": ([("authorization", OURS)], None),
    "no space": ([("authorization", f"Bearer{OURS}")], None),
    "Basic": ([("authorization", f"Basic {OURS}")], None),
    "Token": ([("authorization", f"Token {OURS}")], None),
    "something behind it": ([("authorization", f"Bearer {OURS} extra")], None),
    "a comma belongs to it": ([("authorization", f"Bearer {OURS},")], f"{OURS},"),
    "quotes belong to it": ([("authorization", f'Bearer "{OURS}"')], f'"{OURS}"'),
    "both the same": ([("authorization", f"Bearer {OURS}"), ("x-api-key", OURS)], OURS),
    "both ours": ([("authorization", f"Bearer {OURS}"), ("x-api-key", "ezat_sk_bob")], "ezat_sk_bob"),
    "ours as bearer": ([("authorization", f"Bearer {OURS}"), ("x-api-key", OTHER)], OURS),
    "ours in x-api-key": ([("authorization", f"Bearer {OTHER}"), ("x-api-key", OURS)], OURS),
    "neither ours": ([("authorization", f"Bearer {OTHER}"), ("x-api-key", "sk-ant-third")], "sk-ant-third"),
    "ours beside an empty one": ([("authorization", f"Bearer {OURS}"), ("x-api-key", "")], OURS),
    "ours beside a broken one": ([("authorization", "Bearer"), ("x-api-key", OURS)], OURS),
    "ours in another letter case": ([("authorization", "Bearer EZAT_SK_X"), ("x-api-key", OTHER)], OTHER),
    "an underscore in the name": ([("x_api_key", OURS)], None),
    "a cookie": ([("cookie", f"x-api-key={OURS}")], None),
    "another header": ([("api-key", OURS), ("proxy-authorization", f"Bearer {OURS}")], None),
}


@pytest.mark.parametrize(("headers", "expected"), CREDENTIALS.values(), ids=CREDENTIALS)
def test_the_credential(headers: Iterable[tuple[str, str]], expected: str | None) -> None:
    """Of two keys the gateway's own kind counts, of two of these the one in x-api-key; a scheme other than Bearer
    is none."""
    assert expected == exchange_with(*headers).credential()


def test_plugins_see_no_keys() -> None:
    """The headers that plugins see hold what the client sent but for keys and cookies, however they are spelt."""
    secrets = [
        ("Authorization", "a"),
        ("X-Api-Key", "b"),
        ("x-api-key", "c"),
        ("COOKIE", "d"),
        ("proxy-authorization", "e"),
    ]

    exchange = exchange_with(("anthropic-beta", "x"), *secrets, ("Anthropic-Beta", "y"))

    assert [("anthropic-beta", "x"), ("Anthropic-Beta", "y")] == list(exchange.headers.items())
    assert "b" == exchange.credential()


REQUEST_IDS = {
    "a word": ("my-id", True),
    "every sign": ("aZ0._:-", True),
    "the longest": ("x" * 128, True),
    "too long": ("x" * 129, False),
    "nothing": ("", False),
    "a space": ("a b", False),
    "a slash": ("a/b", False),
    "a letter beyond ASCII": ("é", False),
    "a digit beyond ASCII": ("²", False),
    "a line end behind it": ("a\n", False),
    "a quote": ('a"', False),
}


@pytest.mark.parametrize(("sent", "taken"), REQUEST_IDS.values(), ids=REQUEST_IDS)
def test_the_request_id(sent: str, taken: bool) -> None:
    """The client's own id is kept where it is a proper one; the gateway's own is a UUIDv7 in any case."""
    exchange = exchange_with(("x-request-id", sent))

    assert UUID7.fullmatch(exchange.id)
    assert (sent if taken else exchange.id) == exchange.request_id


def test_every_exchange_has_its_own_id() -> None:
    """Two requests under one id of a client's are told apart."""
    one, other = exchange_with(("x-request-id", "same")), exchange_with(("x-request-id", "same"))

    assert one.id != other.id
    assert "same" == one.request_id == other.request_id


SESSIONS = {
    "none": (None, None),
    "a name": ("chat 1", "chat 1"),
    "nothing in it": ("", None),
    "the longest": ("x" * 256, "x" * 256),
    "longer": ("x" * 256 + "y", "x" * 256),
}


@pytest.mark.parametrize(("sent", "expected"), SESSIONS.values(), ids=SESSIONS)
def test_the_session(sent: str | None, expected: str | None) -> None:
    """The first 256 characters of the header name the conversation."""
    assert expected == exchange_with(*([("x-ezat-session", sent)] if sent is not None else [])).session


MODELS: dict[str, tuple[str, frozenset[str] | None, Kind | None]] = {
    "its id": ("test/model", None, None),
    "its alias": (" MODEL ", None, None),
    "allowed": ("model", frozenset({"test/model"}), None),
    "unknown": ("gpt-9", None, Kind.MODEL_NOT_FOUND),
    "unknown to a key of other models": ("gpt-9", frozenset({"other"}), Kind.MODEL_NOT_FOUND),
    "not allowed": ("model", frozenset({"other"}), Kind.PERMISSION),
    "none allowed": ("test/model", frozenset(), Kind.PERMISSION),
}


@pytest.mark.parametrize(("name", "allowed", "expected"), MODELS.values(), ids=MODELS)
def test_using_a_model(name: str, allowed: frozenset[str] | None, expected: Kind | None) -> None:
    """A model is found by all of its names, and whether the key may use it is judged by its id."""
    exchange = exchange_with()
    exchange.key = Key("k", "k", models=allowed)

    try:
        exchange.use_model(name)
    except GatewayError as error:
        refusal: GatewayError | None = error
    else:
        refusal = None

    assert expected == (refusal and refusal.kind)
    assert (None if expected else MODEL) == exchange.model_or_none
    if refusal is not None:
        assert "model" == refusal.param


def test_the_words_for_an_unknown_model() -> None:
    """A client reads OpenAI's words, with the name that it sent."""
    with pytest.raises(GatewayError) as raised:
        exchange_with().use_model("gpt-9")

    assert "The model `gpt-9` does not exist or you do not have access to it." == raised.value.message


def test_a_refused_model_changes_nothing() -> None:
    """Where another model is refused, the one that was found stays."""
    exchange = exchange_with()
    exchange.use_model("model")

    with pytest.raises(GatewayError):
        exchange.use_model("gpt-9")

    assert MODEL is exchange.model


def test_no_model_before_the_body_is_read() -> None:
    """Asking for the model too early is a plugin's mistake, told as such."""
    with pytest.raises(RuntimeError):
        _ = exchange_with().model


BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "metadata": {"a": [1]}}
SENT = {"model": "test/model", **BODY}


def test_a_change_leaves_what_the_client_sent() -> None:
    """Edits go into the body at the plugin's place; `client_body` stays, deep inside too."""
    exchange = make_exchange(BODY)

    exchange.change()["messages"][0]["content"] = "Ho"
    exchange.change()["metadata"]["a"].append(2)

    assert {"messages": [{"role": "user", "content": "Ho"}], "metadata": {"a": [1, 2]}} == {
        name: exchange.body[name] for name in BODY
    }
    assert SENT == exchange.client_body


def test_a_change_after_reading_leaves_what_the_client_sent() -> None:
    """It makes no difference that the body was read before."""
    exchange = make_exchange(BODY)
    assert exchange.body is exchange.client_body

    exchange.change()["metadata"]["a"].append(2)

    assert ([1, 2], [1]) == (exchange.body["metadata"]["a"], exchange.client_body["metadata"]["a"])


def test_changes_add_up() -> None:
    """Each plugin goes on from what the ones before it made."""
    exchange = make_exchange(BODY)

    exchange.change()["a"] = 1
    exchange.change()["b"] = 2

    assert SENT | {"a": 1, "b": 2} == exchange.body


def test_another_body_in_its_place() -> None:
    """A replaced body is what is read and changed from then on."""
    exchange = make_exchange(BODY)

    exchange.replace({"max_tokens": 1})
    exchange.change()["a"] = 1

    assert {"max_tokens": 1, "a": 1} == exchange.body
    assert SENT == exchange.client_body


def test_reading_keeps_the_bytes() -> None:
    """What nobody changed is still the client's bytes."""
    exchange = make_exchange(BODY)

    assert exchange.body == exchange.client_body
    assert exchange.document is exchange.client_document
    assert exchange.document.unchanged is not None


def test_what_is_deferred_comes_back_once_and_the_last_first() -> None:
    """Taken things are given back in reverse order, and a second time there are none."""
    exchange, undone = exchange_with(), list[str]()
    exchange.defer(lambda: undone.append("first"))
    exchange.defer(lambda: undone.append("second"))

    for undo in [*exchange.take_defers(), *exchange.take_defers()]:
        undo()

    assert ["second", "first"] == undone
