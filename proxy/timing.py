"""How long plugins take: a count and a sum for each hook, added to without a lock and taken when somebody looks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from proxy.plugin import Plugin

HOOKS = ("on_headers", "on_request", "on_send", "on_answer", "on_event", "on_complete")


class HookTime:
    """The calls of one hook of one plugin."""

    __slots__ = ("calls", "seconds")

    def __init__(self) -> None:
        self.calls = 0
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        """One call took so long."""
        self.calls += 1
        self.seconds += seconds

    def take(self) -> tuple[int, float]:
        """What has come together since the last time: calls, and seconds."""
        taken = self.calls, self.seconds
        self.calls, self.seconds = 0, 0.0
        return taken


class PluginTime:
    """The hooks of one plugin, by their names."""

    __slots__ = HOOKS

    on_headers: HookTime
    on_request: HookTime
    on_send: HookTime
    on_answer: HookTime
    on_event: HookTime
    on_complete: HookTime

    def __init__(self) -> None:
        for hook in HOOKS:
            setattr(self, hook, HookTime())

    def take(self) -> Iterator[tuple[str, int, float]]:
        """Of each hook that was called: its name, calls and seconds since the last time."""
        for hook in HOOKS:
            calls, seconds = getattr(self, hook).take()
            if calls:
                yield hook, calls, seconds


class Timed(NamedTuple):
    """A plugin, with its time."""

    plugin: Plugin
    time: PluginTime
