"""What the property tests draw: JSON as text in every form that the grammar allows, bodies of requests, messages as
providers send them, and pieces of bytes; and texts that are no JSON.

JSON is drawn as text and not as values, since what is promised is about its bytes: digits, escapes, order, spaces.
`reading` is the slow parser that the engine's own walks are compared with.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

from hypothesis import strategies as st

Json = dict[str, Any]
Texts = st.SearchStrategy[str]

_ESCAPES = (r"\"", r"\\", r"\/", r"\b\f\n\r\t", r"\u0041", r"\u0000", r"\u001F", r"\u2028", r"\ud83d\uDE00", r"\\ud800")
_LONE_SURROGATES = (r"\ud800", r"\uDFFF", r"\udc00\uD800", r"\ud83d\ud83d\ude00")
_ODD_NUMBERS = (
    *("0", "-0", "-0.0", "1.10", "1E5", "1e-07", "0e0", "1e400", "-1e-400", "9007199254740993"),
    *("18446744073709551616", "0.1000000000000000055511151231257827", "1" + "0" * 30, "-" + "7" * 4400),
)

spaces: Texts = st.sampled_from(("", "", "", " ", "\n", "\t", "\r\n  "))
characters = st.characters(exclude_categories=["Cs", "Cc"], exclude_characters='"\\') | st.sampled_from("\x7f\u2028é😀")
number_texts: Texts = st.one_of(
    st.sampled_from(_ODD_NUMBERS),
    st.integers().map(str),
    st.from_regex(r"-?(0|[1-9][0-9]{0,20})(\.[0-9]{1,20})?([eE][+-]?[0-9]{1,3})?", fullmatch=True),
)
string_literals: Texts = st.lists(
    st.text(characters, max_size=6) | st.sampled_from((*_ESCAPES, *_LONE_SURROGATES)), max_size=4
).map(lambda pieces: '"' + "".join(pieces) + '"')
scalar_texts: Texts = st.one_of(st.sampled_from(("true", "false", "null")), number_texts, string_literals)


def list_texts(items: Texts) -> Texts:
    """JSON texts of lists of these items."""
    each = st.tuples(spaces, items, spaces).map("".join)
    return st.tuples(spaces, st.lists(each, max_size=3)).map(
        lambda drawn: f"[{','.join(drawn[1])}]" if drawn[1] else f"[{drawn[0]}]"
    )


def object_texts(keys: Texts, values: Texts) -> Texts:
    """JSON texts of objects with these keys, some of them several times, and values."""
    each = st.tuples(spaces, keys, spaces, st.just(":"), spaces, values, spaces).map("".join)
    return st.tuples(spaces, st.lists(each, max_size=4)).map(lambda drawn: "{" + (",".join(drawn[1]) or drawn[0]) + "}")


# Few keys, so that they come doubled; one of them is spelt in two ways.
key_texts: Texts = st.sampled_from(('"a"', r'"\u0061"', '"b"', '"type"', '"model_"', '"é"')) | string_literals
json_texts: Texts = st.recursive(
    scalar_texts, lambda inner: list_texts(inner) | object_texts(key_texts, inner), max_leaves=8
)
json_objects: Texts = object_texts(key_texts, json_texts)


MALFORMED = {
    "nothing": b"",
    "spaces": b" \n",
    "a word": b"tru",
    "NaN": b"NaN",
    "Infinity": b"[Infinity]",
    "minus Infinity": b"-Infinity",
    "NaN behind a long number": b"[" + b"1" * 5000 + b",NaN]",
    "a leading zero": b"01",
    "a plus sign": b"+1",
    "no digit before the point": b".5",
    "no digit behind the point": b"1.",
    "no digit in the exponent": b"1e+",
    "a trailing comma": b"[1,]",
    "a trailing comma in an object": b'{"a":1,}',
    "two values": b"1 2",
    "single quotes": b"['a']",
    "an unknown escape": b'"\\q"',
    "half an escape": b'"\\u12"',
    "a raw control character": b'"\x01"',
    "a raw line end": b'"a\nb"',
    "bytes that are no UTF-8": b'"\xff"',
    "an overlong form": b'"\xc0\x80"',
    "a raw surrogate": b'"\xed\xa0\x80"',
    "a cut character": b'"\xf0\x9f\x98"',
    "bytes that are no UTF-8 beside a lone surrogate": b'["\\ud800","\xff"]',
    "a vertical tab as space": b"\x0b1",
    "a BOM": b"\xef\xbb\xbf1",
    "cut off": b'{"a": [1, 2',
    "too deep": b"[" * 100_000 + b"]" * 100_000,
    "too deep and cut off": b"[" * 100_000,
    "too deep behind a lone surrogate": b'["\\ud800",' + b"[" * 100_000 + b"]" * 100_000 + b"]",
    "too deep behind a long number": b"[" + b"1" * 5000 + b"," + b"[" * 100_000 + b"]" * 100_000 + b"]",
}
"""Texts that are no JSON, or that no parser takes."""


class Body(NamedTuple):
    """A native request, cut around the model's name."""

    head: bytes
    name: bytes
    tail: bytes

    @property
    def sent(self) -> bytes:
        return b"".join(self)

    def with_name(self, name: bytes) -> bytes:
        """The same body under another name for the model."""
        return self.head + name + self.tail


_MODEL_KEYS = ('"model"', r'"mod\u0065l"')
_MODEL_NAMES = ('"test/model"', '"MODEL"', '" model "', r'"test\/model"', r'"\u006dodel"')
_OWN_KEYS = {"model", "max_tokens", "messages", "stream"}
_extra_keys = key_texts.filter(lambda literal: json.loads(literal) not in _OWN_KEYS)
_member_texts: Texts = st.tuples(_extra_keys, spaces, st.just(":"), spaces, json_texts).map("".join)
_messages = st.tuples(spaces, json_texts, spaces).map(
    lambda drawn: f'[{drawn[0]}{{"role":"user","content":{drawn[1]}}}{drawn[2]}]'
)


@st.composite
def bodies(draw: st.DrawFn) -> Body:
    """Native requests that the gateway passes: its own fields, any others, in any order and spelling."""
    members = draw(st.lists(_member_texts, max_size=4))
    members.append(r'"max_tokens":' + draw(st.sampled_from(("1", "64.0", "1E3", "4096"))))
    members.append(draw(st.sampled_from(('"messages"', r'"mess\u0061ges"'))) + ":" + draw(_messages))
    members = draw(st.permutations(members))
    place = draw(st.integers(0, len(members)))
    comma = "," + draw(spaces)
    before, behind = (
        "".join(each + comma for each in members[:place]),
        "".join(comma + each for each in members[place:]),
    )
    head = draw(spaces) + "{" + draw(spaces) + before + draw(st.sampled_from(_MODEL_KEYS)) + draw(spaces) + ":"
    name = draw(st.sampled_from(_MODEL_NAMES))
    tail = draw(spaces) + behind + draw(spaces) + "}" + draw(spaces)
    return Body((head + draw(spaces)).encode(), name.encode(), tail.encode())


class Number(str):
    """A number by its digits, so that 1.10 is not 1.1."""


class Pairs(list[tuple[str, Any]]):
    """An object with its doubled members."""


def reading(raw: bytes) -> Any:
    """What a JSON text says: numbers by their digits, objects as pairs, lone surrogates as U+FFFD.

    Raises ValueError.
    """

    def constant(text: str) -> NoReturn:
        raise ValueError(f"{text} is no JSON")

    def pairs(members: list[tuple[str, Any]]) -> Pairs:
        return Pairs((_without_surrogates(key), value) for key, value in members)

    read = json.loads(
        raw.decode(), parse_int=Number, parse_float=Number, parse_constant=constant, object_pairs_hook=pairs
    )
    return _without_surrogates(read)


def last_members(read: Any) -> Any:
    """A reading as parsers without pairs see it: of doubled members the last one counts."""
    if isinstance(read, Pairs):
        return {key: last_members(value) for key, value in read}
    return [last_members(item) for item in read] if isinstance(read, list) else read


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, list) and not isinstance(value, Pairs):
        return [_without_surrogates(item) for item in value]
    if isinstance(value, Pairs):
        return Pairs((key, _without_surrogates(item)) for key, item in value)
    if isinstance(value, str) and not isinstance(value, Number):
        return re.sub("[\ud800-\udfff]", "\ufffd", value)
    return value


@st.composite
def pieces_of(draw: st.DrawFn, whole: bytes) -> list[bytes]:
    """The bytes, cut at any places; often each byte by itself."""
    if draw(st.booleans()):
        return [whole[at : at + 1] for at in range(len(whole))]
    cuts = sorted(draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    return [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]


# Messages of a provider, and the events that they may come as

_texts = st.text(max_size=12)
_names = st.text("abcdefgh_-0", min_size=1, max_size=8)
_inputs: st.SearchStrategy[Json] = st.dictionaries(
    st.text(max_size=4),
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**70), 2**70) | _texts,
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_texts, inner, max_size=2),
        max_leaves=4,
    ),
    max_size=3,
)
_blocks: st.SearchStrategy[Json] = st.one_of(
    st.fixed_dictionaries({"type": st.just("text"), "text": _texts}),
    st.fixed_dictionaries({"type": st.just("tool_use"), "id": _names, "name": _names, "input": _inputs}),
    st.fixed_dictionaries({"type": st.just("tool_use"), "id": _names, "name": _names, "input": st.just({})}),
    st.fixed_dictionaries({"type": st.just("thinking"), "thinking": _texts, "signature": _names}),
    st.sampled_from(
        (
            {"type": "redacted_thinking", "data": "xxx"},
            {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
            {"type": "of_tomorrow", "text": "must not be shown", "input": {"neither": 1}},
        )
    ),
)
_counts = st.integers(0, 10**6)
STOP_REASONS = (
    "end_turn",
    "stop_sequence",
    "pause_turn",
    "max_tokens",
    "model_context_window_exceeded",
    "tool_use",
    "refusal",
    "of_tomorrow",
)
messages: st.SearchStrategy[Json] = st.fixed_dictionaries(
    {
        "id": st.just("msg_1"),
        "type": st.just("message"),
        "role": st.just("assistant"),
        "model": st.just("model-at-upstream"),
        "content": st.lists(_blocks, max_size=5),
        "stop_reason": st.sampled_from(STOP_REASONS),
        "stop_sequence": st.none(),
        "usage": st.fixed_dictionaries(
            {
                "input_tokens": _counts,
                "output_tokens": st.integers(1, 10**6),
                "cache_read_input_tokens": _counts | st.none(),
                "cache_creation_input_tokens": _counts | st.none(),
            },
            optional={"output_tokens_details": st.fixed_dictionaries({"thinking_tokens": _counts})},
        ),
    }
)


@st.composite
def events_of(draw: st.DrawFn, message: Json) -> list[Json]:
    """The events of a message, as some provider might send them.

    Texts come in pieces or in the block's start; the arguments of calls likewise. A block may be left open while the
    next ones come, so pieces of several calls mix; texts keep their order, since nothing else tells it.
    """
    in_order: list[Json] = []
    late: list[list[Json]] = []
    for index, block in enumerate(message["content"]):
        opened, pieces = draw(_opened(block))
        in_order.append({"type": "content_block_start", "index": index, "content_block": opened})
        deltas = [{"type": "content_block_delta", "index": index, "delta": piece} for piece in pieces]
        stop = {"type": "content_block_stop", "index": index}
        if block["type"] == "text":
            in_order += deltas
            late.append([stop])
        else:
            late.append([*deltas, stop])
    usage = message["usage"]
    start = {**message, "content": [], "stop_reason": None, "usage": {**usage, "output_tokens": 1}}
    events = [{"type": "message_start", "message": start}]
    begun = 0
    while in_order or any(late):
        open_ones = [each for each in late[:begun] if each]
        if in_order and (not open_ones or draw(st.booleans())):
            event = in_order.pop(0)
            begun += event["type"] == "content_block_start"
            events.append(event)
        elif open_ones:
            events.append(draw(st.sampled_from(open_ones)).pop(0))
        if draw(st.integers(0, 9)) == 0:
            events.append(draw(st.sampled_from(({"type": "ping"}, {"type": "of_tomorrow", "text": "?"}))))
    ending = {"stop_reason": message["stop_reason"], "stop_sequence": None}
    return [*events, {"type": "message_delta", "delta": ending, "usage": usage}, {"type": "message_stop"}]


@st.composite
def _opened(draw: st.DrawFn, block: Json) -> tuple[Json, list[Json]]:
    """A block as it is opened, and the deltas that fill it."""
    kind = block["type"]
    if kind == "text":
        first, *rest = draw(_cut(block["text"]))
        return {**block, "text": first}, [{"type": "text_delta", "text": piece} for piece in rest]
    if kind == "thinking":
        deltas = [{"type": "thinking_delta", "thinking": piece} for piece in draw(_cut(block["thinking"]))]
        return {**block, "thinking": "", "signature": ""}, [
            *deltas,
            {"type": "signature_delta", "signature": block["signature"]},
        ]
    if kind == "tool_use":
        if draw(st.booleans()):
            return block, draw(st.sampled_from(([], [{"type": "input_json_delta", "partial_json": ""}])))
        text = json.dumps(block["input"], ensure_ascii=draw(st.booleans()), separators=(",", ":"))
        deltas = [{"type": "input_json_delta", "partial_json": piece} for piece in draw(_cut(text))]
        return {**block, "input": {}}, deltas
    return block, [{"type": "delta_of_tomorrow", "text": "must not be shown"}] if draw(st.booleans()) else []


@st.composite
def _cut(draw: st.DrawFn, text: str) -> Sequence[str]:
    """A text in up to four pieces, some of them empty; the first is for the block's start."""
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=3)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
