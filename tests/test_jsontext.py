"""JSON text to values and back."""

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.jsontext import Float, JsonError, decode, deeper_than, encode, without_lone_surrogates
from tests.strategies import MALFORMED, json_texts, last_members, list_texts, number_texts, reading, string_literals

NUMBERS = {
    "a trailing zero": "1.10",
    "a capital exponent": "1E5",
    "a sign in the exponent": "1e+05",
    "a negative zero": "-0.0",
    "a negative zero without a point": "-0",
    "beyond 53 bits": "9007199254740993",
    "beyond 64 bits": "18446744073709551616",
    "a negative one beyond 64 bits": "-9223372036854775809",
    "thirty zeros": "1" + "0" * 30,
    "more digits than a float has": "3.14159265358979323846264338327950288",
    "beyond the largest float": "1e400",
    "below the smallest float": "-1e-400",
    "as many digits as Python converts": "9" * 4300,
    "more digits than Python converts": "9" * 5000,
    "the same below zero": "-" + "9" * 5000,
}


@pytest.mark.parametrize("text", NUMBERS.values(), ids=NUMBERS)
def test_a_number_keeps_its_digits(text: str) -> None:
    """A number goes out as it came in, alone and beside others, whatever Python makes of it."""
    assert text == encode(decode(text.encode())).decode()
    assert f'{{"a":[{text},1.50]}}' == encode(decode(f'{{"a":[{text},1.50]}}'.encode())).decode()


@given(json_texts)
def test_decoding_and_encoding_change_nothing_that_counts(text: str) -> None:
    """What a text says is the same after decoding and encoding: digits, order, characters; doubled members apart."""
    raw = text.encode()

    assert last_members(reading(raw)) == last_members(reading(encode(decode(raw))))


@given(st.lists(number_texts, max_size=5).map(lambda texts: f"[{','.join(texts)}]"))
def test_numbers_in_a_list_keep_their_digits(text: str) -> None:
    """Numbers of every form stand in each other's company without loss."""
    assert text == encode(decode(text.encode())).decode()


READ = {
    "an integer": ("12", int, 12),
    "a point": ("12.0", Float, 12.0),
    "an exponent": ("12e2", Float, 1200.0),
    "infinite": ("1e400", Float, float("inf")),
    "too long": ("-" + "1" * 5000, Float, float("-inf")),
    "true": ("true", bool, True),
    "null": ("null", type(None), None),
    "text": ('"\\u00e9"', str, "é"),
}


@pytest.mark.parametrize(("text", "kind", "expected"), READ.values(), ids=READ)
def test_values_are_pythons_own(text: str, kind: type, expected: object) -> None:
    """A value has the type that a reader expects; a number with a point also knows how it was written."""
    value = decode(text.encode())

    assert (kind, expected) == (type(value), value)
    if isinstance(value, Float):
        assert text == value.text


@pytest.mark.parametrize("raw", MALFORMED.values(), ids=MALFORMED)
def test_what_is_no_json_is_refused(raw: bytes) -> None:
    """Whatever is not valid JSON raises JsonError, and nothing else."""
    with pytest.raises(JsonError):
        decode(raw)


SURROGATES = {
    "none": ('"abc"', '"abc"'),
    "a pair": (r'"\ud83d\ude00"', r'"\ud83d\ude00"'),
    "a pair in capitals": (r'"\uD83D\uDE00"', r'"\uD83D\uDE00"'),
    "high alone": (r'"a\ud800b"', r'"a\ufffdb"'),
    "low alone": (r'"\uDC00"', r'"\ufffd"'),
    "the wrong way round": (r'"\ude00\ud83d"', r'"\ufffd\ufffd"'),
    "high before a pair": (r'"\ud83d\ud83d\ude00"', r'"\ufffd\ud83d\ude00"'),
    "high before another escape": (r'"\ud800\n"', r'"\ufffd\n"'),
    "high before a character": (r'"\ud800A"', r'"\ufffdA"'),
    "behind an escaped backslash": (r'"\\ud800"', r'"\\ud800"'),
    "behind two escaped backslashes": (r'"\\\\ud800"', r'"\\\\ud800"'),
    "behind a backslash and an escape": (r'"\\\ud800"', r'"\\\ufffd"'),
    "a neighbour of the range": (r'"\ud7ff\ue000"', r'"\ud7ff\ue000"'),
}


@pytest.mark.parametrize(("text", "expected"), SURROGATES.values(), ids=SURROGATES)
def test_lone_surrogates_are_replaced_in_place(text: str, expected: str) -> None:
    """Each lone surrogate becomes U+FFFD as an escape of the same length; pairs and backslashes stay."""
    found = without_lone_surrogates(text.encode()).decode()

    assert expected == found
    assert len(text) == len(found)
    assert json.loads(expected) == decode(text.encode())


@given(list_texts(string_literals))
def test_no_text_holds_a_surrogate(text: str) -> None:
    """Whatever escapes a text holds, what is read from it can be written as UTF-8 by anyone."""
    assert reading(text.encode()) == orjson.loads(encode(decode(text.encode())))


def test_a_plugins_own_lone_surrogate_is_replaced() -> None:
    """A value made in Python may hold lone surrogates in keys and texts; they go out as U+FFFD."""
    assert {"a\ufffd": ["\ufffdb", "😀"]} == orjson.loads(encode({"a\ud800": ["\udc00b", "\ud83d\ude00"]}))


LARGE: dict[str, Any] = {
    "an integer beyond 64 bits": {"a": 2**64, "b": [Float("1.10")]},
    "deep": json.loads("[" * 300 + "]" * 300),
    "deep, with a number": json.loads("[" * 300 + "12345678901234567890123" + "]" * 300),
}


@pytest.mark.parametrize("value", LARGE.values(), ids=LARGE)
def test_what_one_writer_refuses_is_written_all_the_same(value: Any) -> None:
    """Integers of any size and nesting beyond 254 levels are written like all else."""
    assert value == json.loads(encode(value))


@pytest.mark.parametrize("levels", [254, 255, 400, 600])
def test_what_can_be_read_can_be_written(levels: int) -> None:
    """No nesting is read that could not be written again."""
    text = '{"a":' * levels + "1.10" + "}" * levels

    assert text == encode(decode(text.encode())).decode()


@pytest.mark.parametrize("value", [object(), {"a": [2j]}], ids=["an object", "a complex number"])
def test_what_is_no_json_value_is_not_written(value: Any) -> None:
    """A value that JSON doesn't know is a mistake of who made it."""
    with pytest.raises(TypeError):
        encode(value)


DEPTHS: dict[str, tuple[Any, int]] = {
    "a number": (1, 0),
    "an empty list": ([], 1),
    "an empty object": ({}, 1),
    "a list in an object": ({"a": [1]}, 2),
    "the deepest counts": ([{}, [[[]]], 1], 4),
}


@pytest.mark.parametrize(("value", "depth"), DEPTHS.values(), ids=DEPTHS)
def test_depth(value: Any, depth: int) -> None:
    """A value is deeper than every smaller number of levels, and than none from its own depth on."""
    assert [levels < depth for levels in range(6)] == [deeper_than(value, levels) for levels in range(6)]


def _depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(_depth, inner), default=0)


@given(st.recursive(st.none() | st.text(max_size=2), lambda v: st.lists(v) | st.dictionaries(st.text(), v)), st.data())
def test_depth_as_recursion_finds_it(value: Any, data: st.DataObject) -> None:
    """Walking level by level finds what plain recursion finds."""
    levels = data.draw(st.integers(0, 8))

    assert (_depth(value) > levels) == deeper_than(value, levels)
