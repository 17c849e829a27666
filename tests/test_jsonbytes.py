"""Where things stand in a JSON text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.jsonbytes import Member, cuts_of, items, members, replaced, skip, top_level, without
from proxy.jsontext import JsonError
from tests.strategies import MALFORMED, Pairs, json_objects, json_texts, key_texts, list_texts, object_texts, reading


def as_pairs(raw: bytes, found: list[Member]) -> Pairs:
    """The members as they stand at their places."""
    return Pairs((member.key, reading(raw[member.at : member.end])) for member in found)


@given(json_objects)
def test_top_level_finds_what_a_parser_finds(text: str) -> None:
    """The members of an object come in order, doubled ones and escaped keys too, each value at its exact place."""
    raw = text.encode()

    found = top_level(raw)

    assert reading(raw) == as_pairs(raw, found)


@given(json_objects)
def test_a_members_place_begins_with_its_key(text: str) -> None:
    """From `key_at` on stand the key as it was written, a colon and the value, and nothing else."""
    raw = text.encode()

    for member in top_level(raw):
        key_end = skip(raw, member.key_at)
        assert reading(raw[member.key_at : key_end]) == member.key
        assert b":" == raw[key_end : member.at].strip()


@given(st.lists(key_texts, min_size=2, max_size=4), st.lists(json_texts, min_size=1, max_size=3), st.data())
def test_doubled_members_keep_their_own_values(keys: list[str], values: list[str], data: st.DataObject) -> None:
    """Where a key stands several times, each member has its own value, though one begins like another."""
    drawn = [
        (key, data.draw(st.sampled_from([*values, *(value + ".5" for value in values if value.isdigit())])))
        for key in [*keys, *keys]
    ]
    raw = ("{" + ",".join(f"{key}:{value}" for key, value in drawn) + "}").encode()

    expected = [(key, value.encode()) for key, value in drawn]
    assert expected == [(raw[m.key_at : skip(raw, m.key_at)].decode(), raw[m.at : m.end]) for m in top_level(raw)]


DOUBLED = {
    "a shorter number first": (b'{"a":1,"a":12}', [b"1", b"12"]),
    "a longer number first": (b'{"a":12,"a":1}', [b"12", b"1"]),
    "a number with a point": (b'{"a":1.5,"a":1}', [b"1.5", b"1"]),
    "spelt in two ways": (b'{"a":12,"\\u0061":1}', [b"12", b"1"]),
    "both replaced surrogates": (b'{"\\ud800":12,"\\udc00":1}', [b"12", b"1"]),
    "an empty key": (b'{"":[],"":[[]]}', [b"[]", b"[[]]"]),
    "the same value": (b'{"a":{"b":1},"a":{"b":1}}', [b'{"b":1}', b'{"b":1}']),
    "a value that looks like a member": (b'{"a":"\\",\\"a\\":1","a":1}', [b'"\\",\\"a\\":1"', b"1"]),
}


@pytest.mark.parametrize(("raw", "expected"), DOUBLED.values(), ids=DOUBLED)
def test_doubled_members(raw: bytes, expected: list[bytes]) -> None:
    """Doubled members are told apart by their places."""
    assert expected == [raw[member.at : member.end] for member in top_level(raw)]


@pytest.mark.parametrize("raw", MALFORMED.values(), ids=MALFORMED)
def test_a_value_that_is_no_json_is_refused(raw: bytes) -> None:
    """The whole text is checked, the values that nobody reads included."""
    with pytest.raises(JsonError):
        top_level(b'{"a":1,"b":[' + raw + b"]}" if raw.strip() else raw)


NO_OBJECTS = {
    "a list": b"[1]",
    "a text": b'"a"',
    "null": b"null",
    "a key that is no text": b"{1:2}",
    "no colon": b'{"a" 1}',
    "no comma": b'{"a":1 "b":2}',
    "a trailing comma": b'{"a":1,}',
    "something behind it": b'{"a":1} {}',
    "a comma behind it": b'{"a":1},',
    "a broken key": b'{"\xff":1}',
    "a broken key beside a lone surrogate": b'{"\\ud800":1,"\xff":1}',
}


@pytest.mark.parametrize("raw", NO_OBJECTS.values(), ids=NO_OBJECTS)
def test_what_is_no_object_is_refused(raw: bytes) -> None:
    """A text that is not one valid object raises JsonError, and nothing else."""
    with pytest.raises(JsonError):
        top_level(raw)


@given(json_objects, st.data())
def test_a_broken_text_is_refused_or_read_as_a_parser_reads_it(text: str, data: st.DataObject) -> None:
    """Where a byte is changed, the text is taken exactly if a strict parser takes it for an object."""
    raw = bytearray(text.encode())
    raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.sampled_from(b'{}[]",:\\ \n0-.eu\x00\xff\xc3'))
    try:
        expected = reading(bytes(raw))
    except (ValueError, RecursionError):
        expected = None

    try:
        found = as_pairs(bytes(raw), top_level(bytes(raw)))
    except JsonError:
        found = None

    assert (expected if isinstance(expected, Pairs) else None) == found


@given(json_objects, json_texts)
def test_members_of_an_object_within_a_text(text: str, before: str) -> None:
    """An object anywhere in a text is walked like one by itself."""
    raw = f"[{before},{text}]".encode()
    at = raw.index(text.encode(), len(before.encode()) + 2)

    assert reading(text.encode()) == as_pairs(raw, list(members(raw, at)))


@given(list_texts(json_texts))
def test_items_of_a_list(text: str) -> None:
    """The items of a list are found at their exact places."""
    raw = f'{{"a":{text}}}'.encode()

    assert reading(text.encode()) == [reading(raw[at:end]) for at, end in items(raw, 5)]


@pytest.mark.parametrize("text", ["1", '"[{"', "null", "true"])
def test_what_holds_nothing_has_neither_members_nor_items(text: str) -> None:
    """A value that is no object has no members, and one that is no list no items."""
    raw = text.encode()

    assert ([], []) == (list(members(raw, 0)), list(items(raw, 0)))
    assert ([], []) == (list(members(b"[1]", 0)), list(items(b'{"a":1}', 0)))


@given(json_texts, st.sampled_from(["", " ", ",", "]", "}", "\n"]))
def test_skipping_a_value(text: str, behind: str) -> None:
    """The end of a value is found whatever follows it."""
    raw = (text + behind).encode()

    assert len(text.encode()) == skip(raw, 0)


def test_replacing_and_leaving_out() -> None:
    """What stands around the stretches stays as it is."""
    raw = b"0123456789"

    assert b"012XY6789" == replaced(raw, 3, 6, b"XY")
    assert b"01XY23456789" == replaced(raw, 2, 2, b"XY")
    assert b"1678" == without(raw, [(0, 1), (2, 6), (9, 10)])
    assert raw == without(raw, [])


CUTS = {
    "none": ('{"a":1}', '{"a":1}'),
    "of nothing": ("{ }", "{ }"),
    "the only one": ('{ "x" : 1 }', "{  }"),
    "the first": ('{ "x" : 1 , "a":1 }', '{ "a":1 }'),
    "the last": ('{ "a":1 , "x" : 1 }', '{ "a":1 }'),
    "in the middle": ('{"a":1 , "x":[1] , "b":1}', '{"a":1 , "b":1}'),
    "several": ('{"x":1,"a":1,"x":2,"x":3,"b":1,"x":4,"x":5}', '{"a":1,"b":1}'),
    "all": ('{"x":1,"x":2,"x":3}', "{}"),
    "spelt otherwise": (r'{"a":1,"\u0078":2}', '{"a":1}'),
    "deeper ones stay": ('{"a":{"x":1},"x":1}', '{"a":{"x":1}}'),
    "a value of this name stays": ('{"a":"x","x":1}', '{"a":"x"}'),
}


@pytest.mark.parametrize(("text", "expected"), CUTS.values(), ids=CUTS)
def test_cutting_members_out(text: str, expected: str) -> None:
    """A member goes with one comma and the spaces beside it; what is left is valid and otherwise as it was."""
    assert expected == without(text.encode(), cuts_of(text.encode(), 0, "x")).decode()


@given(object_texts(st.sampled_from(('"x"', r'"\u0078"', '"a"')), json_texts))
def test_cutting_members_out_of_any_object(text: str) -> None:
    """Exactly the members of the name are gone, doubled ones too, and the text is still valid."""
    raw = text.encode()

    left = without(raw, cuts_of(raw, 0, "x"))

    assert Pairs(pair for pair in reading(raw) if pair[0] != "x") == reading(left)
