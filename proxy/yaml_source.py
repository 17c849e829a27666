"""Reads a YAML file into plain values that remember their lines, and checks them with pydantic in plain English.

It builds from ruamel.yaml's parser events, not from its loaded objects: an anchor, alias or tag is refused before
anything is made of it, a number keeps its text (a fraction becomes an exact Decimal), and ``${NAME}`` is replaced
before a plain scalar gets its type. No message holds a value from the file: it may be a secret.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
)
from ruamel.yaml.reader import ReaderError

Loc = tuple[str | int, ...]
"""Where something stands: ``("models", 0, "price")``."""
M = TypeVar("M", bound=BaseModel)

DEEPEST = 50
LONGEST_NUMBER = 40
"""Longer or larger numbers are read as text: no setting takes them, and Python is slow to turn them into integers."""
LARGEST_EXPONENT = 300

# YAML 1.2's core schema. Its infinities and not-a-numbers are left out and so are text: no setting takes them.
CONSTANTS: dict[str, bool | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
INTEGER = re.compile(r"[-+]?[0-9]+", re.ASCII)
OCTAL_OR_HEXADECIMAL = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+", re.ASCII)
FRACTION = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]{1,4})?", re.ASCII)
REFERENCE = re.compile(r"\$\$\{|\$\{(?:([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\})?")
SECRET_IN_NAME = re.compile(r"(?<![A-Za-z0-9])(?:ezat_sk_|sk-)|[^\w.\-/ ]")


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with the configuration. ``line`` counts from 1; 0 stands for the whole file."""

    file: str
    line: int
    path: str
    message: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return ": ".join(filter(None, (place, self.path, self.message)))


class ConfigError(Exception):
    """The configuration can't be used; ``problems`` holds every reason."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = problems


class Source:
    """A file's values with their places; another file's may be hung in with ``insert``."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.data: Any = None
        self.problems: list[Problem] = []
        """What was wrong while reading, though the file could be read to its end."""
        self._places: dict[Loc, tuple[str, int]] = {(): (file, 1)}
        self._unreadable: set[Loc] = set()

    def problem(self, loc: Loc, message: str) -> Problem:
        """A problem at ``loc``, with the line of the nearest place that is in the file."""
        nearest = next(loc[:length] for length in range(len(loc), -1, -1) if loc[:length] in self._places)
        file, line = self._places[nearest]
        return Problem(file, line, path_of(loc), message)

    def place(self, loc: Loc, line: int) -> None:
        self._places[loc] = (self.file, line)

    def mark_unreadable(self, loc: Loc) -> None:
        """The value at ``loc`` is not known, and what it lacks is no news."""
        self._unreadable.add(loc)

    def is_readable(self, loc: Loc) -> bool:
        return not any(loc[:length] in self._unreadable for length in range(len(loc) + 1))

    def insert(self, loc: Loc, other: Source) -> None:
        """Puts the values of ``other`` at ``loc``, a key of the root, whose problems then name that file."""
        self.data[loc[0]] = other.data
        self._places.update({loc + inner: place for inner, place in other._places.items()})
        self._unreadable.update(loc + inner for inner in other._unreadable)


def path_of(loc: Loc) -> str:
    """``models[0].price.input``."""
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{shown(part)}" if text else shown(part)
    return text


def shown(name: str) -> str:
    """A name from the file as it may be printed: ``key:sk-123``, a typing slip, becomes ``key…``."""
    hidden = SECRET_IN_NAME.search(name)
    return name[: min(hidden.start(), 64)] + "…" if hidden else name[:64]


def read(path: Path, environ: Mapping[str, str]) -> Source:
    """The values of a YAML file, ``${NAME}`` replaced. Raises ConfigError with one problem, as ``parse`` does."""
    try:
        content = content_of(path)
    except OSError as error:
        raise ConfigError([Problem(str(path), 0, "", unreadable(error))]) from None
    return parse(content, str(path), environ)


def content_of(path: Path) -> bytes:
    """What a file holds. Raises OSError and nothing else."""
    try:
        return path.read_bytes()
    except ValueError:  # a NUL in the path
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL)) from None


def unreadable(error: OSError) -> str:
    """What to say of a file, without its name."""
    return f"the file can't be read ({error.strerror})"


def parse(content: bytes, file: str, environ: Mapping[str, str], within: Loc = ()) -> Source:
    """The values of a YAML text, ``${NAME}`` replaced. ``within``: where they will be inserted, for messages.

    Raises ConfigError with one problem when it isn't YAML of the kind that we take.
    """
    source = Source(file)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError([Problem(file, content[: error.start].count(b"\n") + 1, "", "is not UTF-8 text")]) from None
    try:
        _Builder(source, text, environ, within).document()
    except ReaderError as error:
        line = text[: error.position].count("\n") + 1
        raise ConfigError([Problem(file, line, "", "holds a control character")]) from None
    except MarkedYAMLError as error:
        raise ConfigError([Problem(file, *_syntax_problem(error))]) from None
    except YAMLError:
        raise ConfigError([Problem(file, 0, "", "is not valid YAML")]) from None
    return source


class _Builder:
    """Turns parser events into values, by recursion."""

    def __init__(self, source: Source, text: str, environ: Mapping[str, str], within: Loc) -> None:
        self.source = source
        self.text = text
        self.environ = environ
        self.within = within

    def document(self) -> None:
        self.events = YAML(typ="safe", pure=True).parse(self.text)
        documents = 0
        for event in self.events:
            if isinstance(event, DocumentStartEvent):
                documents += 1
                if documents > 1:
                    self._stop(event, "only one document (`---`) is allowed")
                self.source.data = self._value(next(self.events), ())
        if not documents:
            raise ConfigError([Problem(self.source.file, 1, "", "the file is empty")])

    def _value(self, event: Any, loc: Loc) -> Any:
        if isinstance(event, AliasEvent) or event.anchor is not None:
            self._stop(event, "anchors and aliases (`&`, `*`) are not supported")
        if event.tag is not None:
            self._stop(event, "tags (`!`) are not supported")
        if len(loc) > DEEPEST:
            self._stop(event, "is nested too deeply")
        if isinstance(event, MappingStartEvent):
            return self._mapping(loc)
        if isinstance(event, SequenceStartEvent):
            return self._sequence(loc)
        text = self._filled(event.value, loc)
        return typed(text) if event.style is None else text

    def _mapping(self, loc: Loc) -> dict[str, Any]:
        values: dict[str, Any] = {}
        lines: dict[str, int] = {}
        while not isinstance(event := next(self.events), MappingEndEvent):
            if not isinstance(event, ScalarEvent) or event.anchor is not None or event.tag is not None:
                self._stop(event, "a setting's name must be plain text")
            key, line = event.value, event.start_mark.line + 1
            if key not in values:
                self.source.place((*loc, key), line)
                lines[key] = line
                values[key] = self._value(next(self.events), (*loc, key))
                continue
            self._problem(line, (*loc, key), f"is set twice, first on line {lines[key]}")
            self._skip_value()
        return values

    def _skip_value(self) -> None:
        kept, self.source = self.source, Source(self.source.file)
        self._value(next(self.events), ())
        self.source = kept

    def _sequence(self, loc: Loc) -> list[Any]:
        values: list[Any] = []
        while not isinstance(event := next(self.events), SequenceEndEvent):
            inner = (*loc, len(values))
            self.source.place(inner, event.start_mark.line + 1)
            values.append(self._value(event, inner))
        return values

    def _filled(self, text: str, loc: Loc) -> str:
        def replacement(match: re.Match[str]) -> str:
            if match[0] == "$${":
                return "${"
            name, default = match[1], match[2]
            if name is None:
                return self._unfilled(loc, "holds a `${` that is not a `${NAME}`; write `$${` for the text")
            value = self.environ.get(name)
            if value is None and default is None:
                return self._unfilled(loc, f"the environment variable {shown(name)} is not set")
            return value or default or ""

        return REFERENCE.sub(replacement, text)

    def _unfilled(self, loc: Loc, message: str) -> str:
        self._problem(self.source.problem(loc, "").line, loc, message)
        self.source.mark_unreadable(loc)
        return ""

    def _problem(self, line: int, loc: Loc, message: str) -> None:
        self.source.problems.append(Problem(self.source.file, line, path_of(self.within + loc), message))

    def _stop(self, event: Any, message: str) -> None:
        raise ConfigError([Problem(self.source.file, event.start_mark.line + 1, "", message)])


def typed(text: str) -> bool | int | Decimal | str | None:
    """A plain scalar's value by YAML 1.2's core schema."""
    if text in CONSTANTS:
        return CONSTANTS[text]
    if len(text) > LONGEST_NUMBER:
        return text
    if INTEGER.fullmatch(text):
        return int(text)
    if OCTAL_OR_HEXADECIMAL.fullmatch(text):
        return int(text, 0)
    if FRACTION.fullmatch(text) and abs((number := Decimal(text)).adjusted()) <= LARGEST_EXPONENT:
        return number
    return text


def _syntax_problem(error: MarkedYAMLError) -> tuple[int, str, str]:
    """Line, (empty) path and message. ruamel's own texts name tokens and single characters, with one exception."""
    what, during = error.problem or "", error.context or ""
    began, noticed = error.context_mark, error.problem_mark
    mark = (began or noticed) if "end of stream" in what else (noticed or began)
    line = mark.line + 1 if mark else 0
    if what.startswith("found undefined tag handle"):  # it would print the tag
        return line, "", "tags (`!`) are not supported"
    if "'\\t'" in what:
        return line, "", "a line may not be indented with a tab; use spaces"
    advice = "; inside [ ] and { } a ${NAME} needs quotes" if what.endswith("but got '{'") else ""
    return line, "", "is not valid YAML: " + ", ".join(filter(None, (during, what))) + advice


# --- Checking ---------------------------------------------------------------------------------------------------


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
