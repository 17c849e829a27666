"""Checks values of a YAML file with pydantic, and says in plain English what is wrong and where.

No message holds a value from the file: it may be a secret.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from proxy.yaml_source import Loc, Problem, Source

M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class WhenMissing:
    """Stands in a field's Annotated: what to say after "is required"."""

    advice: str


MESSAGES: dict[str, str] = {
    **dict.fromkeys(("int_type", "int_parsing", "int_parsing_size", "int_from_float"), "must be a whole number"),
    **dict.fromkeys(("float_type", "float_parsing", "decimal_type", "decimal_parsing"), "must be a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false"),
    **dict.fromkeys(("list_type", "tuple_type", "set_type", "frozen_set_type"), "must be a list"),
    **dict.fromkeys(("dict_type", "model_type", "mapping_type", "model_attributes_type"), "must be a mapping"),
    **dict.fromkeys(("ip_any_network", "ip_v4_network", "ip_v6_network"), "must be a network such as 10.0.0.0/8"),
    **dict.fromkeys(("ip_any_address", "ip_v4_address", "ip_v6_address"), "must be an IP address"),
    **dict.fromkeys(
        ("datetime_type", "datetime_parsing", "datetime_from_date_parsing", "timezone_aware"),
        'must be a time such as "2027-01-31T00:00:00Z"',
    ),
    **dict.fromkeys(("path_type", "string_sub_type"), "must be text"),
    "string_type": "must be text, in quotes if it looks like a number",
    "finite_number": "must be a finite number",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "string_too_long": "must have at most {max_length} characters",
    "string_pattern_mismatch": "must match {pattern}",
    "too_long": "must have at most {max_length} entries",
    "literal_error": "must be {expected}",
    "enum": "must be {expected}",
}


def check(cls: type[M], data: Any, loc: Loc, source: Source) -> tuple[M | None, list[Problem]]:
    """``data``, which stands at ``loc`` of ``source``, as an instance of ``cls``; or None with every problem."""
    found = dict(_wrong_kinds(cls, data))
    instance: M | None = None
    try:
        instance = cls.model_validate(data, extra="forbid")
    except ValidationError as error:
        for each in error.errors(include_url=False, include_input=False):
            inner = _loc_in(data, each["loc"], keep_last=each["type"] == "missing")
            if each["type"] == "too_short" and any(other[: len(inner)] == inner for other in found):
                continue  # pydantic doesn't count the entries that it refused
            found.setdefault(inner, _message(each["type"], each.get("ctx", {}), cls, inner))
    problems = [source.problem(loc + inner, text) for inner, text in found.items() if source.is_readable(loc + inner)]
    return (None if found else instance), problems


def _wrong_kinds(cls: type[BaseModel], data: Any, loc: Loc = ()) -> Iterator[tuple[Loc, str]]:
    """What pydantic takes in silence: true as the number 1, the text "no" as false."""
    if isinstance(data, dict | list):
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from _wrong_kinds(cls, value, (*loc, key))
        return
    wanted = _type_at(cls, loc)
    if isinstance(data, bool) and wanted in (int, float, Decimal):
        yield loc, "must be a whole number" if wanted is int else "must be a number"
    if wanted is bool and data is not None and not isinstance(data, bool):
        yield loc, "must be true or false"


def _loc_in(data: Any, loc: Loc, *, keep_last: bool) -> Loc:
    """pydantic's place without the parts that it adds for unions and dict keys, which are not in the file."""
    out: list[str | int] = []
    for number, part in enumerate(loc):
        inside = part in data if isinstance(data, dict) else isinstance(data, list) and isinstance(part, int)
        if inside:
            data = data[part]
        elif not keep_last or number < len(loc) - 1:
            continue
        out.append(part)
    return tuple(out)


def _message(kind: str, context: Mapping[str, Any], cls: type[BaseModel], loc: Loc) -> str:
    if kind == "extra_forbidden":
        return _unknown_setting(_type_at(cls, loc[:-1]), str(loc[-1]))
    if kind == "missing":
        return "; ".join(("is required", *_advice(_type_at(cls, loc[:-1]), str(loc[-1]))))
    if kind in ("value_error", "assertion_error"):
        return str(context["error"])
    if kind in ("too_short", "string_too_short"):
        least = context["min_length"]
        return "must not be empty" if least == 1 else f"must have at least {least} entries or characters"
    if kind not in MESSAGES:
        return f"is not valid ({kind})"
    return MESSAGES[kind].format_map({name: _said(value) for name, value in context.items()})


def _said(value: Any) -> str:
    if isinstance(value, float | Decimal) and value == int(value):
        return str(int(value))
    return str(value).replace("'", "")


def _unknown_setting(model: Any, name: str) -> str:
    known = list(_fields(model))
    if near := difflib.get_close_matches(name, known, n=1):
        return f"unknown setting; did you mean `{near[0]}`?"
    return f"unknown setting; known here: {', '.join(known)}" if known else "unknown setting; there are none here"


def _advice(model: Any, name: str) -> list[str]:
    field = _fields(model).get(name)
    return [each.advice for each in field.metadata if isinstance(each, WhenMissing)] if field else []


def _fields(model: Any) -> dict[str, Any]:
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        return {}
    return {field.alias or name: field for name, field in model.model_fields.items()}


def _type_at(annotation: Any, loc: Loc) -> Any:
    """The type that a model's annotations give for a place in it; None where they leave it open."""
    annotation = _bare(annotation)
    if not loc:
        return annotation
    if isinstance(loc[0], str) and loc[0] in (fields := _fields(annotation)):
        return _type_at(fields[loc[0]].annotation, loc[1:])
    origin, arguments = get_origin(annotation), get_args(annotation)
    if not (isinstance(origin, type) and arguments):
        return None
    return _type_at(arguments[-1 if issubclass(origin, Mapping) else 0], loc[1:])


def _bare(annotation: Any) -> Any:
    """Without Annotated and ``| None``; None for a union of several."""
    if get_origin(annotation) is Annotated:
        return _bare(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        real = [each for each in get_args(annotation) if each is not type(None)]
        return _bare(real[0]) if len(real) == 1 else None
    return annotation
