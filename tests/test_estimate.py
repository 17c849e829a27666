"""The estimate of a request's input tokens: of the right size, and quick whatever is sent."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.estimate import TOKENS_PER_IMAGE, input_tokens

ESTIMATES: dict[str, tuple[Any, int]] = {
    "nothing": ({}, 0),
    "four bytes a token": ("x" * 400, 100),
    "rounded up": ("x" * 401, 101),
    "bytes, not characters": ("é" * 400, 200),
    "a lone surrogate": ("\ud800" * 4, 3),
    "keys count": ({"abcd": ""}, 1),
    "numbers, booleans and null": ([1, 1.5, True, None], 4),
    "lists": (["abcd", ["abcd"]], 2),
    "an image": ({"type": "image", "source": {"type": "base64", "data": "x" * 10**6}}, TOKENS_PER_IMAGE),
    "an image by URL": ({"type": "image", "source": {"type": "url", "url": "http://a"}}, TOKENS_PER_IMAGE),
    "a small PDF": ({"type": "document", "source": {"type": "base64", "data": "x" * 100}}, TOKENS_PER_IMAGE),
    "a large PDF": ({"type": "document", "source": {"type": "base64", "data": "x" * 4_000_000}}, 100_000),
    "a PDF that is none": ({"type": "document", "source": {"type": "base64", "data": 7}}, TOKENS_PER_IMAGE),
    "a PDF by URL": ({"type": "document", "source": {"type": "url", "url": "http://a"}}, TOKENS_PER_IMAGE),
    "a document of text": (
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x" * 4000}},
        -(-(4000 + len("typedocumentsourcetypetextmedia_typetext/plaindata")) // 4),
    ),
    "an image in a tool's result": (
        {"type": "tool_result", "content": [{"type": "image", "source": {"type": "base64", "data": "x" * 10**6}}]},
        TOKENS_PER_IMAGE + -(-len("typetool_resultcontent") // 4),
    ),
    "what only looks like an image": ({"type": "image", "source": "x" * 400}, 104),
    "a type that is no text": ({"type": ["image"], "source": {"data": "x" * 400}}, 105),
}


@pytest.mark.parametrize(("body", "expected"), ESTIMATES.values(), ids=ESTIMATES)
def test_input_tokens_are_estimated(body: Any, expected: int) -> None:
    """Text by its bytes, an image as a fixed number, a PDF by its size."""
    assert expected == input_tokens(body)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@given(json_values)
def test_any_body_has_an_estimate(body: Any) -> None:
    """Whatever JSON is sent: a whole number, and never less than none."""
    estimate = input_tokens(body)

    assert type(estimate) is int
    assert estimate >= 0


@given(st.lists(st.text(), max_size=5), st.text(min_size=1))
def test_more_text_is_never_less(texts: list[str], more: str) -> None:
    """A longer request is not estimated as a shorter one."""
    assert input_tokens(texts) <= input_tokens([*texts, more])


def test_depth_is_no_matter() -> None:
    """A body nested more deeply than Python's calls may go is estimated all the same."""
    deep: Any = "abcd"
    for _ in range(100_000):
        deep = [deep]

    assert 1 == input_tokens(deep)
