"""Types of JSON values, as the OpenAI format means them.

``64.0`` is an integer, ``true`` is no number, and an integer of thousands of digits arrives as an infinite float,
which is neither. Fields of the wrong type are refused under their own path.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from proxy.errors import GatewayError, refused


def is_integer(value: object) -> bool:
    """Whether it is a whole number, written with or without a point."""
    return type(value) is int or (isinstance(value, float) and value.is_integer())


def is_number(value: object) -> bool:
    """Whether it is any number."""
    return type(value) is int or isinstance(value, float)


KINDS: dict[str, Callable[[Any], bool]] = {
    "an integer": is_integer,
    "a boolean": lambda value: isinstance(value, bool),
    "a list": lambda value: isinstance(value, list),
    "an object": lambda value: isinstance(value, dict),
}
"""The words of the messages, each with its test."""


def wrong(path: str, value: object, kind: str) -> GatewayError:
    """The refusal of a value that isn't of the kind wanted, e.g. ``tools: must be a list``."""
    return refused(path, "is required" if value is None else f"must be {kind}")


def limit(value: Any, path: str) -> int | None:
    """An integer of at least 1; None for null. Raises GatewayError."""
    if value is None:
        return None
    if not is_integer(value):
        raise wrong(path, value, "an integer")
    if value < 1:
        raise refused(path, "must be at least 1")
    return int(value)


def number(value: Any, path: str, most: int) -> int | float | None:
    """A number from 0 to ``most``, with the digits that it came with; None for null. Raises GatewayError."""
    if value is None:
        return None
    if not is_number(value):
        raise wrong(path, value, "a number")
    if not 0 <= value <= most:
        raise refused(path, f"must be between 0 and {most}")
    checked: int | float = value
    return checked


def boolean(value: Any, path: str) -> bool | None:
    """True or false; None for null. Raises GatewayError."""
    if value is None or isinstance(value, bool):
        return value
    raise wrong(path, value, "a boolean")


def one_of(*wanted: Any) -> Callable[[Any], bool]:
    """The test whether a value is one of these, ``1`` being ``1.0`` but not ``true``."""

    def test(value: Any) -> bool:
        return value in wanted and isinstance(value, bool) == isinstance(wanted[wanted.index(value)], bool)

    return test
