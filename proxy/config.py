"""Loading the configuration: ``load``, which reports all problems at once.

What needs more than one setting to judge (names, upstreams, files) is judged on the raw values, so that it is reported
even where another setting is wrong. The settings of a plugin are checked by whoever knows the plugin.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from proxy.checking import check
from proxy.models import name_key
from proxy.profiles import misfits
from proxy.setting_types import FIRST_VERSION_WITHOUT_SAMPLING, VERSION, secret_text
from proxy.settings import Config, PluginEntry
from proxy.yaml_source import (
    ConfigError,
    Loc,
    Problem,
    Source,
    content_of,
    parse,
    path_of,
    read,
    shown,
    unreadable,
)

JudgePlugins = Callable[[Sequence[PluginEntry], Source], list[Problem]]
"""What is wrong with the entries of the list of plugins, told by whoever knows the plugins."""


def load(path: Path, environ: Mapping[str, str] | None = None, judge: JudgePlugins | None = None) -> Config:
    """The configuration in the file, ``${NAME}`` replaced from ``environ`` (the process's own by default).

    Raises ConfigError with all problems at once, those that ``judge`` finds among the plugins included; a file that
    isn't YAML stops at its first.
    """
    environ = os.environ if environ is None else environ
    source = read(path, environ)
    if not isinstance(source.data, dict):
        raise ConfigError([*source.problems, source.problem((), "must be a mapping of settings")])
    problems = list(source.problems)
    models = source.data.get("models")
    problems += _insert_models_file(source, path.parent, environ)
    data = dict(source.data)
    data["plugins"], plugin_problems = _plugin_entries(data.get("plugins", []), source)
    config, setting_problems = check(Config, data, (), source)
    files, file_problems = _upstream_files(data, source, path.parent)
    if judge is not None and isinstance(data["plugins"], list):
        plugin_problems += judge(data["plugins"], source)
    problems += plugin_problems + setting_problems + file_problems
    problems += [*_names_taken(data, source), *_unknown_upstreams(data, source), *_unable_deployments(data, source)]
    if config is not None:
        problems += [source.problem(loc, text) for loc, text in (*misfits(config), *_unshared(config))]
    if config is None or problems:
        problems.sort(key=lambda problem: (problem.file != source.file, problem.line))
        raise ConfigError(problems, _files_of(path, models, data))
    upstreams = {name: each.model_copy(update=files.get(name, {})) for name, each in config.upstreams.items()}
    config = config.model_copy(update={"upstreams": upstreams})
    config._source = source
    config._files = digests(_files_of(path, models, data))
    return config


def digests(files: Iterable[Path]) -> dict[Path, bytes | None]:
    """The digest of what each file holds; None for one that can't be read."""
    return {file: _digest(file) for file in files}


def _digest(file: Path) -> bytes | None:
    try:
        return hashlib.sha256(file.read_bytes()).digest()
    except OSError:
        return None


def _files_of(path: Path, models: Any, data: Any) -> Iterator[Path]:
    yield path
    upstreams = [raw for _, raw in _items(data.get("upstreams"))]
    names = [models, *(_at(raw, setting) for raw in upstreams for setting in ("api_key_file", "ca_file"))]
    yield from (path.parent / name for name in names if isinstance(name, str) and name)


def _insert_models_file(source: Source, folder: Path, environ: Mapping[str, str]) -> list[Problem]:
    name = source.data.get("models")
    if not isinstance(name, str) or not name or not source.is_readable(("models",)):
        return []
    try:
        inner = parse(content_of(folder / name), str(folder / name), environ, within=("models",))
    except (OSError, ConfigError) as error:
        source.mark_unreadable(("models",))
        return error.problems if isinstance(error, ConfigError) else [source.problem(("models",), unreadable(error))]
    source.insert(("models",), inner)
    return inner.problems


def _plugin_entries(entries: Any, source: Source) -> tuple[Any, list[Problem]]:
    """The list of plugins, each as a PluginEntry; what isn't a list is left to the check of the whole."""
    if not isinstance(entries, list):
        return entries, []
    good: list[PluginEntry] = []
    problems: list[Problem] = []
    for index, raw in enumerate(entries):
        entry = _plugin_entry(raw, ("plugins", index))
        if isinstance(entry, PluginEntry):
            problems += [
                source.problem(entry.loc, f"is listed already, at {path_of(other.loc[:2])}")
                for other in good
                if other.name == entry.name
            ]
            good.append(entry)
        elif source.is_readable(entry[0]):
            problems.append(source.problem(*entry))
    return good, problems


def _plugin_entry(raw: Any, loc: Loc) -> PluginEntry | tuple[Loc, str]:
    """The entry, or the place and the words of what is wrong with it."""
    entry = {raw: None} if isinstance(raw, str) else raw
    if not isinstance(entry, dict) or len(entry) != 1 or not next(iter(entry)):
        return loc, "must be a plugin's name, alone or with its settings indented below it"
    [(name, settings)] = entry.items()
    if not isinstance(settings, dict | None):
        return (*loc, name), "must be a mapping"
    settings = dict(settings or {})
    enabled = settings.pop("enabled", True)
    if not isinstance(enabled, bool):
        return (*loc, name, "enabled"), "must be true or false"
    return PluginEntry(name=name, settings=settings, enabled=enabled, loc=(*loc, name))


def _upstream_files(data: Any, source: Source, folder: Path) -> tuple[dict[str, dict[str, Any]], list[Problem]]:
    """Per upstream, what its files turn its settings into."""
    found: dict[str, dict[str, Any]] = {}
    problems: list[Problem] = []
    for name, raw in _items(data.get("upstreams")):
        for setting in ("api_key_file", "ca_file"):
            place: Loc = ("upstreams", name, setting)
            file = _at(raw, setting)
            if not isinstance(file, str) or not file or not source.is_readable(place):
                continue
            update = found.setdefault(str(name), {})
            update[setting] = folder / file
            try:
                content = content_of(folder / file).strip()
                if not content:
                    raise ValueError("the file is empty")
                if setting == "api_key_file":
                    update["api_key"] = secret_text(SecretStr(content.decode("utf-8", "replace")))
            except OSError as error:
                problems.append(source.problem(place, unreadable(error)))
            except ValueError as error:
                problems.append(source.problem(place, str(error)))
    return found, problems


def _names_taken(data: Any, source: Source) -> Iterator[Problem]:
    owners: dict[str, Loc] = {}
    for index, model in _items(data.get("models")):
        loc: Loc = ("models", index)
        names = [((*loc, "id"), _at(model, "id"))]
        names += [((*loc, "aliases", number), alias) for number, alias in _items(_at(model, "aliases"))]
        for place, name in names:
            if isinstance(name, str) and source.is_readable(place):
                owner = owners.setdefault(name_key(name), place)
                if owner != place:
                    yield source.problem(place, f"the name is taken by {path_of(owner)} (letter case doesn't count)")


def _unknown_upstreams(data: Any, source: Source) -> Iterator[Problem]:
    known = data.get("upstreams")
    if not isinstance(known, dict):
        return
    for place, _, deployment in _deployments(data):
        name = _at(deployment, "upstream")
        if isinstance(name, str) and name and name not in known and source.is_readable(place):
            names = ", ".join(map(shown, known)) or "none"
            yield source.problem(place, f"there is no such upstream; known here: {names}")


def _unable_deployments(data: Any, source: Source) -> Iterator[Problem]:
    """Deployments that can't do what their model claims."""
    for place, model, deployment in _deployments(data):
        version = _at(_at(data.get("upstreams"), _at(deployment, "upstream")), "version")
        if not isinstance(version, str) or not VERSION.fullmatch(version) or version < FIRST_VERSION_WITHOUT_SAMPLING:
            continue
        if _at(_at(model, "capabilities"), "sampling") in (None, True):
            advice = "say `sampling: false` in the model's capabilities, or give the upstream an older version"
            yield source.problem(place, f"the upstream's version refuses sampling; {advice}")


def _unshared(config: Config) -> Iterator[tuple[Loc, str]]:
    """What several workers can't have each for themselves."""
    if config.server.workers > 1:
        if config.limiter == "memory":
            words = "each worker would count its limits alone; set limiter: redis://… for several workers"
            yield ("server", "workers"), words
        if config.store.startswith("sqlite:"):
            words = "an SQLite file is for one process alone; set store: postgresql://… for several workers"
            yield ("server", "workers"), words


def _deployments(data: Any) -> Iterator[tuple[Loc, Any, Any]]:
    """The place of each deployment's upstream, its model, and itself."""
    for index, model in _items(data.get("models")):
        for number, deployment in _items(_at(model, "deployments")):
            yield ("models", index, "deployments", number, "upstream"), model, deployment


def _at(value: Any, key: Any) -> Any:
    return value.get(key) if isinstance(value, dict) and isinstance(key, str) else None


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        yield from value.items()
    if isinstance(value, list):
        yield from enumerate(value)
