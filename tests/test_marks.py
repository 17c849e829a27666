"""Removing cache_control where the API allows it, for models without a prompt cache."""

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.jsontext import decode, encode
from proxy.marks import remove_marks, without_marks
from tests.strategies import Pairs, Texts, json_objects, json_texts, object_texts, reading, spaces

MARK = '"cache_control":{"type":"ephemeral"}'

# Where a mark may be put in: before a member, behind the last one, or as the only one.
BEFORE, BEHIND, ALONE = "\ue000", "\ue001", "\ue002"

_keys = st.sampled_from(('"cache_control"', r'"cache\u005fcontrol"', r'"\u0063ache_control"'))
_marks = st.tuples(_keys, spaces, st.just(":"), spaces, json_texts).map("".join)
_free = json_texts.filter(lambda text: not re.search("[\ue000-\ue002]", text))
# What may stand in a request and is never touched: the marks in it are the user's own data.
_own_objects = object_texts(st.sampled_from(('"cache_control"', '"a"', '"content"', '"system"')), _free)


@st.composite
def objects(draw: st.DrawFn, /, **members: Texts) -> str:
    """An object that may hold marks, with some of these members."""
    texts = [f'"{name}":{draw(spaces)}{draw(value)}' for name, value in members.items() if draw(st.booleans())]
    if not texts:
        return "{" + draw(spaces) + ALONE + draw(spaces) + "}"
    written = [f"{draw(spaces)}{BEFORE}{text}" for text in texts]
    return "{" + f"{draw(spaces)},".join(written) + BEHIND + draw(spaces) + "}"


def lists(items: Texts) -> Texts:
    return st.lists(items, max_size=2).map(lambda texts: f"[{','.join(texts)}]")


_texts = objects(type=st.just('"text"'), text=st.just('"cache_control"'), extra=_own_objects)
_document_source = lists(_texts).map(lambda content: f'{{"type":"content","cache_control":1,"content":{content}}}')
_documents = objects(type=st.just('"document"'), source=_document_source, title=_free)
_results = objects(content=lists(_texts | _documents) | st.just('"text"'), is_error=_free)
_calls = objects(type=st.just('"tool_use"'), input=_own_objects)
_blocks = _texts | _documents | _results | _calls
_message_texts = lists(_blocks).map(lambda blocks: f'{{"role":"user","cache_control":1,"content":{blocks}}}')
_tools = objects(name=st.just('"f"'), input_schema=_own_objects)
_requests = objects(
    model=st.just('"m"'),
    system=lists(_texts),
    tools=lists(_tools),
    messages=lists(_message_texts),
    metadata=_own_objects,
)


@settings(max_examples=50)
@given(_requests, st.data())
def test_marks_go_and_nothing_else(text: str, data: st.DataObject) -> None:
    """Marks put anywhere that the API allows are cut out again to the byte; other cache_control members stay."""
    marked = re.sub("[\ue000-\ue002]", lambda slot: _mark_at(slot.group(), data), text)
    unmarked = re.sub("[\ue000-\ue002]", "", text)

    assert unmarked == without_marks(marked.encode()).decode()
    assert unmarked == without_marks(unmarked.encode()).decode()


def _mark_at(slot: str, data: st.DataObject) -> str:
    marks = data.draw(st.lists(_marks, max_size=2))
    space = data.draw(spaces)
    if slot == ALONE:
        return f"{space},".join(marks)
    return "".join(f"{mark},{space}" if slot == BEFORE else f"{space},{space}{mark}" for mark in marks)


# Requests of any shape: where a list is due there may be anything.
_any_keys = st.sampled_from(("system", "tools", "messages", "content", "source", "cache_control", "input")).map(
    lambda name: f'"{name}"'
)
_any_requests = object_texts(
    _any_keys,
    st.recursive(
        st.sampled_from(("1", '"cache_control"', "[]", "{}")),
        lambda inner: object_texts(_any_keys, inner) | lists(inner) | lists(object_texts(_any_keys, inner)),
        max_leaves=12,
    ),
)


@given(_any_requests | json_objects)
def test_marks_are_removed_by_the_rule(text: str) -> None:
    """In a request of any shape exactly what the rule names is gone."""
    raw = text.encode()

    assert _by_the_rule(reading(raw)) == reading(without_marks(raw))


@given(_any_requests)
def test_dicts_lose_the_same_marks_as_bytes(text: str) -> None:
    """A request that is a dict already comes out as if its bytes had been cut."""
    request = decode(text.encode())
    undoubled = encode(request)

    remove_marks(request)

    assert decode(without_marks(undoubled)) == request


def _by_the_rule(request: Pairs) -> Pairs:
    """What the top of proxy/marks.py says, on values."""
    left = Pairs()
    for key, value in request:
        if key in ("system", "tools"):
            left.append((key, _blocks_by_the_rule(value, 3)))
        elif key == "messages" and _is_list(value):
            left.append((key, [_message_by_the_rule(message) for message in value]))
        elif key != "cache_control":
            left.append((key, value))
    return left


def _message_by_the_rule(message: Any) -> Any:
    if not isinstance(message, Pairs):
        return message
    return Pairs((key, _blocks_by_the_rule(value, 3) if key == "content" else value) for key, value in message)


def _blocks_by_the_rule(blocks: Any, depth: int) -> Any:
    if not _is_list(blocks) or depth == 0:
        return blocks
    return [_block_by_the_rule(block, depth) if isinstance(block, Pairs) else block for block in blocks]


def _block_by_the_rule(block: Pairs, depth: int) -> Pairs:
    left = Pairs()
    for key, value in block:
        if key == "content":
            left.append((key, _blocks_by_the_rule(value, depth - 1)))
        elif key == "source" and isinstance(value, Pairs):
            inner = Pairs((k, _blocks_by_the_rule(v, depth - 1) if k == "content" else v) for k, v in value)
            left.append((key, inner))
        elif key != "cache_control":
            left.append((key, value))
    return left


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and not isinstance(value, Pairs)


PLACES = {
    "top level": ('{"model":"m",%s}', True),
    "system": ('{"system":[{"type":"text",%s}]}', True),
    "a tool": ('{"tools":[{"name":"f",%s}]}', True),
    "a block": ('{"messages":[{"content":[{"type":"text",%s}]}]}', True),
    "an image": ('{"messages":[{"content":[{"type":"image","source":{},%s}]}]}', True),
    "a tool_result": ('{"messages":[{"content":[{"type":"tool_result",%s}]}]}', True),
    "a block of a tool_result": (
        '{"messages":[{"content":[{"type":"tool_result","content":[{"text":"",%s}]}]}]}',
        True,
    ),
    "a block of a document": ('{"messages":[{"content":[{"source":{"content":[{"text":"",%s}]}}]}]}', True),
    "a document in a tool_result": (
        '{"messages":[{"content":[{"content":[{"source":{"content":[{"text":"",%s}]}}]}]}]}',
        True,
    ),
    "a message of the role system": ('{"messages":[{"role":"system","content":[{"text":"",%s}]}]}', True),
    "a tool's schema": ('{"tools":[{"input_schema":{"type":"object",%s}}]}', False),
    "a property of a schema": ('{"tools":[{"input_schema":{"properties":{"a":1,%s}}}]}', False),
    "the input of a call": ('{"messages":[{"content":[{"type":"tool_use","input":{"a":1,%s}}]}]}', False),
    "deep in the input of a call": ('{"messages":[{"content":[{"input":{"content":[{"a":1,%s}]}}]}]}', False),
    "metadata": ('{"metadata":{"a":1,%s}}', False),
    "a text": ('{"system":[{"text":"%s"}]}', False),
}


@pytest.mark.parametrize(("template", "removed"), PLACES.values(), ids=PLACES)
def test_where_a_mark_is_removed(template: str, removed: bool) -> None:
    """A mark is removed where the Messages API allows one, and is the user's own data elsewhere."""
    mark = MARK.replace('"', r"\"") if '"%s"' in template else MARK
    marked = template % mark

    expected = template.replace(",%s", "") if removed else marked
    assert expected == without_marks(marked.encode()).decode()


def test_a_request_without_a_mark_is_the_same_object() -> None:
    """What holds no mark is not even copied."""
    raw = b'{"model":"m","messages":[]}'

    assert raw is without_marks(raw)
