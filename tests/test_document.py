"""A JSON value that came as bytes."""

from typing import Any

import pytest

from proxy.document import Document, Event
from proxy.jsontext import JsonError

RAW = b'{ "a" : 1.10, "a": [1E5] }'


def test_what_nobody_changed_goes_on_as_it_came() -> None:
    """Reading a value changes no byte of it."""
    document = Document(raw=RAW)

    assert {"a": [100000.0]} == document.data
    assert (RAW, RAW) == (document.encoded(), document.unchanged)


def test_what_nobody_reads_is_not_parsed() -> None:
    """Bytes that are no JSON pass where nobody looks, and are an error for who does."""
    document = Document(raw=b"{")

    assert b"{" == document.encoded()
    with pytest.raises(JsonError):
        _ = document.data


def test_the_same_value_is_given_to_all() -> None:
    """A value is parsed once, and `change` gives the one that readers have."""
    document = Document(raw=RAW)

    assert document.data is document.data
    assert document.data is document.change()


def test_a_change_goes_on() -> None:
    """What is edited after `change` is encoded, and what was not edited keeps its digits."""
    document = Document(raw=RAW)

    document.change()["b"] = None

    assert (b'{"a":[1E5],"b":null}', None) == (document.encoded(), document.unchanged)


def test_a_change_marks_even_without_an_edit() -> None:
    """Who asks for writing takes the bytes away: from then on the value counts."""
    document = Document(raw=RAW)

    document.change()

    assert (b'{"a":[1E5]}', None) == (document.encoded(), document.unchanged)


def test_another_value_in_its_place() -> None:
    """A replaced value is what is read and encoded."""
    document = Document(raw=RAW)

    document.replace([1])

    assert ([1], b"[1]", None) == (document.data, document.encoded(), document.unchanged)


VALUES: dict[str, tuple[Any, bytes]] = {
    "an object": ({"a": 1}, b'{"a":1}'),
    "null": (None, b"null"),
    "an empty object": ({}, b"{}"),
    "false": (False, b"false"),
}


@pytest.mark.parametrize(("value", "raw"), VALUES.values(), ids=VALUES)
def test_a_value_that_came_without_bytes(value: Any, raw: bytes) -> None:
    """A value made here is read as it is and encoded when it goes on."""
    document = Document(value)

    assert (value, raw, None) == (document.data, document.encoded(), document.unchanged)


def test_an_event_has_a_kind() -> None:
    """An event is a document with a kind, and shows both."""
    event = Event("ping", raw=b'{"type": "ping"}')

    assert ("ping", {"type": "ping"}, b'{"type": "ping"}') == (event.kind, event.data, event.unchanged)
    assert """Event('ping', b'{"type": "ping"}')""" == repr(event)
    assert b'{"x":1}' == Event("made", {"x": 1}).encoded()
