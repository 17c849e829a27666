"""From the list of plugins in the YAML to plugins that are made, and chains that join up.

All complaints come at once, each with file, line and path.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from proxy.checking import check
from proxy.config import load
from proxy.models import ModelTable
from proxy.pipeline import Chain, compile_chain
from proxy.plugin import Plugin, Route
from proxy.settings import Config, PluginEntry
from proxy.store.money import unit_prices
from proxy.timing import PluginTime, Timed
from proxy.yaml_source import ConfigError, Problem, Source

Bundled = Mapping[str, type[Plugin]]


class Pipeline:
    """The plugins in their order, and the chain of each route. A route without a chain is switched off."""

    def __init__(self, timed: Sequence[Timed], chains: dict[Route, Chain]) -> None:
        self.plugins = tuple(each.plugin for each in timed)
        self.chains = chains
        self.timed = timed
        """The plugins, with how long each took."""

    def purposes(self) -> list[tuple[str, str]]:
        """Name and purpose of each plugin."""
        return [(plugin.name, (type(plugin).__doc__ or "").strip().partition("\n")[0]) for plugin in self.plugins]

    def described(self) -> str:
        """Both ways through the chains, for people."""
        lines = []
        for route, chain in self.chains.items():
            names = [plugin.name for plugin in chain.plugins]
            if route is not Route.MODELS:
                lines.append(f"{route.value:17} client ─► {' ─► '.join(names)} ─► upstream")
                lines.append(f"{'':17} client ◄─ {' ◄─ '.join(names)} ◄─ upstream")
        return "\n".join(lines)


def load_all(
    path: Path, bundled: Bundled, environ: Mapping[str, str] | None = None
) -> tuple[Config, ModelTable, Pipeline]:
    """Configuration, models and pipeline of a file. Raises ConfigError with all problems."""

    def judge(entries: Sequence[PluginEntry], source: Source) -> list[Problem]:
        return [problem for entry in entries for problem in _checked(entry, source, bundled)[2]]

    config = load(path, environ, judge)
    models = ModelTable.from_settings(config.models)
    return config, models, build(config, models, bundled)


def build(config: Config, models: ModelTable, bundled: Bundled) -> Pipeline:
    """Make every enabled plugin and check that they fit together. Raises ConfigError with all problems."""
    problems: list[Problem] = []
    made: list[tuple[PluginEntry, Plugin]] = []
    for entry in config.plugins:
        cls, settings, wrong = _checked(entry, config.source, bundled)
        problems += wrong
        if cls is not None and settings is not None and entry.enabled:
            plugin, told = _made(cls, settings, models)
            problems += [config.source.problem((*entry.loc, *path), text) for path, text in told]
            if plugin is not None:
                made.append((entry, plugin))
    problems += [config.source.problem(loc, text) for loc, text in _misfits(config, made)]
    problems += _inexact_prices(config, models)
    if problems:
        raise ConfigError(sorted(problems, key=lambda problem: problem.line), config.files)
    plugins = tuple(plugin for _, plugin in made)
    routes = [route for route in Route if route is not Route.CHAT_COMPLETIONS or _translator(plugins) is not None]
    timed = [Timed(plugin, PluginTime()) for plugin in plugins]
    return Pipeline(timed, {route: compile_chain(route, timed, config.server.plugin_timeout) for route in routes})


def _made(
    cls: type[Plugin], settings: BaseModel, models: ModelTable
) -> tuple[Plugin | None, list[tuple[tuple[str | int, ...], str]]]:
    """The plugin, and what is wrong with it."""
    try:
        plugin = cls(settings)
        tuple(plugin.needs())
        return plugin, list(plugin.problems(models))
    except (Exception, SystemExit) as error:
        return None, [((), f"can't be made: {type(error).__name__}: {error}")]


def _inexact_prices(config: Config, models: ModelTable) -> Iterator[Problem]:
    for number, model in enumerate(models):
        try:
            unit_prices(model.price)
        except ValueError as error:
            yield config.source.problem(("models", number, "price"), str(error))


def _checked(
    entry: PluginEntry, source: Source, bundled: Bundled
) -> tuple[type[Plugin] | None, BaseModel | None, list[Problem]]:
    """The class of an entry and its settings, as far as they are right, and what is wrong."""
    cls = _class_of(entry.name, bundled)
    if isinstance(cls, str):
        return None, None, [source.problem(entry.loc[:2], cls)]
    settings, problems = check(cls.Settings, entry.settings, entry.loc, source)
    return cls, settings, problems


def _class_of(name: str, bundled: Bundled) -> type[Plugin] | str:
    """The class of a bundled plugin, or of one by import path (``package.module:Class``); else what is wrong."""
    if name in bundled:
        return bundled[name]
    module_name, colon, class_name = name.partition(":")
    if not colon:
        near = difflib.get_close_matches(name, bundled, 1)
        hint = f"did you mean `{near[0]}`?" if near else f"bundled are {', '.join(bundled)}."
        return f"there is no plugin {name!r}; {hint} A plugin of your own is written package.module:Class"
    try:
        found: Any = getattr(importlib.import_module(module_name), class_name)
    except (Exception, SystemExit) as error:
        return f"{name!r} can't be imported: {type(error).__name__}: {error}"
    if not (isinstance(found, type) and issubclass(found, Plugin)):
        return f"{name!r} is no subclass of proxy.plugin.Plugin"
    if not isinstance(getattr(found, "name", None), str):
        return f"{name!r} has no name; give the class a `name`"
    return _wrong_hook(name, found) or found


def _wrong_hook(name: str, cls: type[Plugin]) -> str | None:
    """What is wrong with the hooks of a class: a misspelt one would never be called, and nobody would notice."""
    known = [hook for hook in vars(Plugin) if hook.startswith("on_")]
    for hook in dir(cls):
        if not hook.startswith("on_"):
            continue
        if hook not in known:
            near = difflib.get_close_matches(hook, known, 1)
            return f"{name!r} has a hook {hook} that nobody calls; {f'did you mean {near[0]}?' if near else ''}".rstrip(
                "; "
            )
        if not inspect.iscoroutinefunction(getattr(cls, hook)):
            return f"{name!r}: {hook} must be `async def`"
    if cls.sees not in (None, "openai", "messages", "either"):
        return f"{name!r}: `sees` must be one of openai, messages, either, or None"
    return None


def _translator(plugins: tuple[Plugin, ...]) -> Plugin | None:
    for plugin in plugins:
        if plugin.turns_into == "messages" and Route.CHAT_COMPLETIONS in plugin.routes:
            return plugin
    return None


def _misfits(config: Config, made: list[tuple[PluginEntry, Plugin]]) -> Iterator[tuple[tuple[str | int, ...], str]]:
    plugins = tuple(plugin for _, plugin in made)
    names = {plugin.name for plugin in plugins}
    if not config.server.open and not any(plugin.authenticates for plugin in plugins):
        yield (
            ("plugins",),
            "no plugin asks for a key (auth is off); whoever reaches the port could spend your money. "
            "If that is meant, set server.open: true",
        )
    for entry, plugin in made:
        for needed, reason in plugin.needs():
            if needed not in names:
                yield entry.loc, f"{reason}, which needs the plugin {needed}; it is off or not in the list"
    yield from _doubled(made)
    yield from _late_completions(made)
    for route in Route:
        if route is not Route.MODELS and (route is not Route.CHAT_COMPLETIONS or _translator(plugins)):
            yield from _format_misfits(route, made)


def _doubled(made: list[tuple[PluginEntry, Plugin]]) -> Iterator[tuple[tuple[str | int, ...], str]]:
    seen: set[str] = set()
    for entry, plugin in made:
        if plugin.name in seen:
            yield entry.loc[:2], f"the plugin {plugin.name!r} stands in the list already"
        seen.add(plugin.name)


def _late_completions(made: list[tuple[PluginEntry, Plugin]]) -> Iterator[tuple[tuple[str | int, ...], str]]:
    for place, (_, last) in enumerate(made):
        if last.completes_last:
            for entry, plugin in made[:place]:
                if plugin.completes:
                    yield (
                        entry.loc[:2],
                        f"{plugin.name} completes after {last.name}, which must be the last to; move it behind",
                    )


def _format_misfits(
    route: Route, made: list[tuple[PluginEntry, Plugin]]
) -> Iterator[tuple[tuple[str | int, ...], str]]:
    spoken = "openai" if route is Route.CHAT_COMPLETIONS else "messages"
    for entry, plugin in made:
        if route not in plugin.routes:
            continue
        if plugin.sees not in (None, "either", spoken):
            yield (
                entry.loc[:2],
                f"{plugin.name} sees bodies in {plugin.sees} format, but on the route {route.value} they are in "
                f"{spoken} format here; move it, or name its routes",
            )
        spoken = plugin.turns_into or spoken
    if spoken != "messages":
        yield ("plugins",), f"on the route {route.value} bodies would reach the upstream in {spoken} format"
