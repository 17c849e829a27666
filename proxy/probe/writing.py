"""Writing what was found out into the files of the configuration.

A file is only replaced by one that reads as the old one does but for the new values: whatever its text looks like,
nothing else can change. It is replaced at once: a reader, such as a gateway that watches it, sees the old or the new.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from proxy.probe.yaml_edit import NoPlace, Value, with_values
from proxy.settings import Config
from proxy.yaml_source import ConfigError, Loc, content_of, parse, path_of

Differences = dict[str, tuple[Any, Any]]
"""The old and the new value of each setting that was changed."""

_BOM = b"\xef\xbb\xbf"


class CannotWrite(Exception):
    """A file can't be written, or not safely."""


@dataclass(frozen=True, slots=True)
class Change:
    """Values for the mapping at ``loc`` of ``file``; ``within`` is where that file stands in the configuration."""

    file: Path
    within: Loc
    loc: Loc
    values: Mapping[str, Value]
    beside: Mapping[str, str] = field(default_factory=dict)
    """What must stand in the mapping around it: else the file is no longer the one that was read."""

    @property
    def path(self) -> str:
        """``models[0].deployments[0].profile``."""
        return path_of(self.within + self.loc)


def change_at(config: Config, loc: Loc, values: Mapping[str, Value], beside: Mapping[str, str]) -> Change:
    """A change at a place of the configuration, in whichever of its files that stands."""
    file = config.source.problem(loc, "").file
    within: Loc = () if file == config.source.file else ("models",)
    return Change(Path(file), within, loc[len(within) :], values, beside)


def write(changes: Sequence[Change], environ: Mapping[str, str]) -> Iterator[tuple[Change, Differences]]:
    """Write them, file by file, and tell for each what it changed. Raises CannotWrite."""
    for file in dict.fromkeys(change.file for change in changes):
        yield from _written(file, [change for change in changes if change.file == file], environ)


def _written(file: Path, changes: Sequence[Change], environ: Mapping[str, str]) -> list[tuple[Change, Differences]]:
    try:
        content = content_of(file)
        data = parse(content, str(file), environ).data
        differences = [(change, _set(data, change)) for change in changes]
        text = content.removeprefix(_BOM).decode("utf-8")
        for change, different in differences:
            new = {name: change.values[name] for name in different}
            text = with_values(text, change.loc, new) if new else text
        new_content = (_BOM if content.startswith(_BOM) else b"") + text.encode()
        if parse(new_content, str(file), environ).data != data:
            raise NoPlace
        if new_content != content:
            _replace(file.resolve(), new_content)
    except OSError as error:
        raise CannotWrite(f"{file}: {error.strerror or type(error).__name__}") from None
    except (ConfigError, NoPlace, LookupError, TypeError):
        raise CannotWrite(f"{file}: its text is not one that can be changed safely; change it by hand") from None
    return differences


def _set(data: Any, change: Change) -> Differences:
    """Set the values in the data. Raises NoPlace, LookupError."""
    *outer, last = change.loc
    for part in outer:
        data = data[part]
    if any(data[name] != value for name, value in change.beside.items()):
        raise NoPlace
    if data.get(last) is None:
        data[last] = {}
    old = dict(data[last])
    data[last].update(change.values)
    return {name: (old.get(name), value) for name, value in change.values.items() if old.get(name) != value}


def _replace(file: Path, content: bytes) -> None:
    descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with open(descriptor, "wb") as new:
            new.write(content)
            new.flush()
            os.fsync(new.fileno())
        shutil.copymode(file, name)
        owner = file.stat()
        os.chown(name, owner.st_uid, owner.st_gid)
        os.replace(name, file)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
