"""Reads a YAML file into plain values that remember their lines.

It builds from ruamel.yaml's parser events, not from its loaded objects: an anchor, alias or tag is refused before
anything is made of it, a number keeps its text (a fraction becomes an exact Decimal), and ``${NAME}`` is replaced
before a plain scalar gets its type. No message holds a value from the file: it may be a secret.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

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
    """The configuration can't be used; ``problems`` holds every reason.

    ``files`` are those that it names, as far as they are known: also one that isn't there yet.
    """

    def __init__(self, problems: list[Problem], files: Iterable[Path] = ()) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = problems
        self.files = tuple(files)


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
