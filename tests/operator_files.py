"""Reads what an operator starts the gateway with: a Dockerfile, a .dockerignore, and YAML with variables in it.

Where no builder is at hand, ``copy_into`` does what the COPY instructions do.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ruamel.yaml import YAML

from proxy.settings import Server
from proxy.workers import MORE_THAN_SHUTDOWN
from tests.process import REPOSITORY

PAGE = "docs/operating.md"
REFERENCE = re.compile(r"\$\{(\w+)(?:(:[-?])([^}]*))?\}")
LONGEST_STOP = Server().shutdown_timeout + MORE_THAN_SHUTDOWN
"""Seconds that a stop may take: running requests, then what is still to be recorded."""


def yaml_of(path: str) -> Any:
    """A file of the checkout, variables and all."""
    return YAML(typ="safe", pure=True).load(REPOSITORY / path)


def references(path: str) -> dict[str, str | None]:
    """The variables that a file takes from the environment, each with its default; None where it must be set."""
    text = re.sub(r"^\s*#.*$", "", (REPOSITORY / path).read_text(), flags=re.MULTILINE)
    return {name: rest if mark == ":-" else None for name, mark, rest in REFERENCE.findall(text)}


class Instruction(NamedTuple):
    """One instruction: ``COPY``, its flags, and its words (of a shell form: one word, the whole line)."""

    name: str
    flags: dict[str, str]
    words: list[str]


def stages_of(text: str) -> list[list[Instruction]]:
    """The stages of a Dockerfile, each with its FROM at the beginning."""
    lines = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE)
    stages: list[list[Instruction]] = []
    for line in re.sub(r"\\\n\s*", " ", lines).splitlines():
        if line.strip():
            instruction = _instruction(line)
            if instruction.name == "FROM":
                stages.append([])
            stages[-1].append(instruction)
    return stages


def _instruction(line: str) -> Instruction:
    name, rest = line.split(maxsplit=1)
    flags = {}
    while found := re.match(r"--([\w-]+)=(\S+)\s+", rest):
        flags[found[1]] = found[2]
        rest = rest[found.end() :]
    if name == "HEALTHCHECK":
        rest = rest.removeprefix("CMD").strip()
    if rest.startswith("["):
        return Instruction(name, flags, json.loads(rest))
    return Instruction(name, flags, rest.split() if name in ("COPY", "EXPOSE", "FROM") else [rest])


def environment_of(stage: Sequence[Instruction]) -> dict[str, str]:
    """What its ENV instructions set."""
    lines = [instruction.words[0] for instruction in stage if instruction.name == "ENV"]
    pairs = [pair for line in lines for pair in re.findall(r'(\w+)="?([^"\s]*)"?', line)]
    return dict(pairs)


def is_sent(path: str, ignore: str) -> bool:
    """Whether a path below the checkout reaches the builder: the last pattern for it or a folder above decides."""
    names = [path, *(str(parent) for parent in Path(path).parents if str(parent) != ".")]
    sent = True
    for line in ignore.splitlines():
        pattern = line.strip()
        if not pattern or pattern.startswith("#"):
            continue
        fits = _expression(pattern.removeprefix("!").rstrip("/"))
        if any(fits.fullmatch(name) for name in names):
            sent = pattern.startswith("!")
    return sent


def _expression(pattern: str) -> re.Pattern[str]:
    pieces = re.split(r"(\*\*/|\*)", pattern)
    return re.compile("".join({"**/": "(?:.*/)?", "*": "[^/]*"}.get(piece, re.escape(piece)) for piece in pieces))


def sources_of(stage: Sequence[Instruction]) -> list[tuple[str, str]]:
    """What its COPY instructions take from the checkout, each with the place that it goes to."""
    copies = [each for each in stage if each.name == "COPY" and "from" not in each.flags]
    return [(source, copy.words[-1]) for copy in copies for source in copy.words[:-1]]


def copy_into(folder: Path, checkout: Path, stage: Sequence[Instruction]) -> None:
    """Put into the folder, which stands for the WORKDIR, what the COPY instructions of a stage put there."""
    ignore = (checkout / ".dockerignore").read_text()
    for source, target in sources_of(stage):
        for path in _files(checkout / source):
            name = str(path.relative_to(checkout))
            if is_sent(name, ignore):
                below = path.relative_to(checkout / source) if (checkout / source).is_dir() else Path(path.name)
                place = folder / target / below
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, place)


def _files(path: Path) -> Iterator[Path]:
    return iter([path]) if path.is_file() else (below for below in sorted(path.rglob("*")) if below.is_file())
