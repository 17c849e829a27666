"""What a reload would change: the differences of two configurations, for people.

Nothing secret is shown: of what may be a secret only that it was changed. In a plugin's settings that is every text,
since the engine doesn't know which of them are keys, and every number under a name that sounds like one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel, SecretStr

from proxy.settings import Config, DeploymentSettings, ModelSettings, PluginEntry
from proxy.yaml_source import shown

NEEDS_RESTART = (
    "server.host",
    "server.port",
    "server.workers",
    "server.admin",
    "store",
    "limiter",
)
"""What was opened at the start and is not opened again: a reload that would change it is refused."""
_NOT_COMPARED = frozenset({"loc"})
_SECRETIVE = re.compile(r"(key|token|secret|pass\w*|pin|code|credential\w*)s?$", re.IGNORECASE)
"""Ends of paths in a plugin's settings below which a number, too, may be a secret."""


class Change(NamedTuple):
    """One difference: where it is, and what it is in words."""

    path: str
    words: str

    @property
    def needs_restart(self) -> bool:
        return any(self.path == name or self.path.startswith(f"{name}.") for name in NEEDS_RESTART)

    def __str__(self) -> str:
        return f"{self.path}: {self.words}{' (needs a restart)' if self.needs_restart else ''}"


def refusal(found: Iterable[Change]) -> str:
    """Why a reload that changes this is refused; empty where it isn't."""
    return "; ".join(str(change) for change in found if change.needs_restart)


def changes(old: Config, new: Config) -> list[Change]:
    """All differences, in the order of the settings; then the files of which only the content is another."""
    return [*_compared(old, new, "", hidden=False), *_renewed_certificates(old, new)]


def _renewed_certificates(old: Config, new: Config) -> Iterator[Change]:
    """Keys and models in files are compared as settings; of certificates there is only the name of the file."""
    for name, upstream in new.upstreams.items():
        before, file = old.upstreams.get(name), upstream.ca_file
        if before is None or file is None or before.ca_file != file:
            continue
        if old.files.get(file) != new.files.get(file):
            yield Change(f"upstreams.{name}.ca_file", "the file holds something else")


def _compared(old: Any, new: Any, path: str, *, hidden: bool) -> Iterator[Change]:
    if isinstance(old, BaseModel) and type(old) is type(new):
        within = hidden or isinstance(old, PluginEntry)
        for name, field in type(old).model_fields.items():
            if name not in _NOT_COMPARED:
                yield from _compared(
                    getattr(old, name), getattr(new, name), _joined(path, name), hidden=within or not field.repr
                )
        return
    before, after = _by_name(old), _by_name(new)
    if before is not None and after is not None and (before or after):
        yield from _compared_members(before, after, path, hidden=hidden)
    elif old != new:
        yield Change(path, _words(old, new, hidden=hidden, may_be_secret=bool(_SECRETIVE.search(path))))


def _compared_members(
    before: Mapping[str, Any], after: Mapping[str, Any], path: str, *, hidden: bool
) -> Iterator[Change]:
    told = shown if hidden else str
    for name in (*before, *(name for name in after if name not in before)):
        inner = _joined(path, told(name))
        if name not in after:
            yield Change(inner, "removed")
        elif name not in before:
            yield Change(inner, "added")
        else:
            yield from _compared(before[name], after[name], inner, hidden=hidden)
    stayed = [name for name in before if name in after]
    order = [name for name in after if name in before]
    if stayed != order and path.rpartition(".")[2] != "settings":
        yield Change(path, f"order {', '.join(map(told, stayed))} → {', '.join(map(told, order))}")


def _by_name(value: Any) -> dict[str, Any] | None:
    """The members of what has named ones; None for what is compared as a whole."""
    if isinstance(value, Mapping):
        return {str(name): member for name, member in value.items()}
    if isinstance(value, list | tuple):
        names = [_name_of(member) for member in value]
        if None not in names and len(set(names)) == len(names):
            return dict(zip(map(str, names), value, strict=True))
    return None


def _name_of(member: Any) -> str | None:
    if isinstance(member, ModelSettings):
        return member.id
    if isinstance(member, DeploymentSettings):
        return f"{member.upstream}/{member.model}"
    if isinstance(member, PluginEntry):
        return member.name
    if isinstance(member, Mapping) and isinstance(member.get("name"), str):
        return str(member["name"])
    return None


def _words(old: Any, new: Any, *, hidden: bool, may_be_secret: bool) -> str:
    plain = bool | None if hidden and may_be_secret else bool | int | float | None
    if isinstance(old, plain) and isinstance(new, plain):
        return f"{_shown(old)} → {_shown(new)}"
    if hidden or isinstance(old, SecretStr) or isinstance(new, SecretStr):
        return "added" if old is None else "removed" if new is None else "changed"
    return f"{_shown(old)} → {_shown(new)}"


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(map(_shown, value))}]"
    return str(value) or '""'


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
