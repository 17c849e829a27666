"""Reloading the configuration while the gateway serves: on SIGHUP, and when one of its files is changed.

All or nothing: a file that can't be used leaves everything as it is, and the log says why. The folders are watched and
not the files, or a file that is exchanged for another (by an editor, by a mounted volume) would be lost sight of; what
counts is not that something happened there but whether the configuration has become another.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

import structlog
from watchfiles import awatch

from proxy.config import digests
from proxy.loading import Pipeline
from proxy.models import ModelTable
from proxy.plan import Change, changes
from proxy.server import CannotReload, Gateway
from proxy.settings import Config
from proxy.yaml_source import ConfigError

SETTLED = 200
"""Milliseconds for which changes are gathered, so that a file is not read while it is written."""
TURN = 5000
"""Milliseconds after which the files are looked at though nothing was heard of them."""
Loaded = tuple[Config, ModelTable, Pipeline]
Load = Callable[[], Loaded]

_log = structlog.get_logger("ezat.reload")


class Reloader:
    """Reloads one gateway. ``load`` reads its configuration, and raises ConfigError."""

    def __init__(self, gateway: Gateway, load: Load) -> None:
        self._gateway = gateway
        self._load = load
        self._one_at_a_time = asyncio.Lock()

    async def reload(self) -> None:
        """Take over what stands in the files now, if that can be used."""
        async with self._one_at_a_time:
            try:
                loaded = await asyncio.to_thread(self._load)
                found = changes(self._gateway.config, loaded[0])
                if found:
                    await self._gateway.reload(*loaded)
            except (ConfigError, CannotReload) as error:
                self._gateway.metrics.reloaded("refused")
                _log.error("the configuration was not reloaded, the present one stays", reason=str(error))
                return
            self._gateway.metrics.reloaded("applied" if found else "unchanged")
            _log.info("the configuration was reloaded", changes=[str(change) for change in found])

    async def plan(self) -> Mapping[str, Any]:
        """What a reload would change now, or why it would be refused."""
        try:
            config, _, _ = await asyncio.to_thread(self._load)
        except ConfigError as error:
            return {"refused": str(error), "changes": []}
        found = changes(self._gateway.config, config)
        fixed = [str(change) for change in found if change.needs_restart]
        return {"refused": "; ".join(fixed) or None, "changes": [_told(change) for change in found]}

    async def watch(self, changed: Callable[[], Awaitable[None]]) -> None:
        """Call ``changed`` whenever one of the files holds something else; to be cancelled."""
        seen = self._gateway.config.files
        while True:
            folders = folders_of(seen)
            async with aclosing(_happenings(folders)) as happenings:
                async for _ in happenings:
                    present = digests(seen)
                    if present == seen or not self._gateway.config.server.watch:
                        continue
                    await changed()
                    in_force = self._gateway.config.files
                    seen = present if in_force.keys() == seen.keys() else in_force
                    if folders_of(seen) != folders:
                        break


async def _happenings(folders: Iterable[Path]) -> AsyncGenerator[None, None]:
    """Something happened in a folder, or some seconds went by: where a file system tells nothing, that has to do."""
    try:
        async for _ in awatch(
            *folders, recursive=False, watch_filter=None, debounce=SETTLED, rust_timeout=TURN, yield_on_timeout=True
        ):
            yield
    except (OSError, RuntimeError) as error:
        _log.warning("folders can't be watched, files are looked at now and then", reason=str(error))
    while True:
        await asyncio.sleep(TURN / 1000)
        yield


def folders_of(files: Iterable[Path]) -> set[Path]:
    """Where files stand, and where they really stand if they are links."""
    folders = {folder for file in files for folder in (file.absolute().parent, file.resolve().parent)}
    return {folder for folder in folders if folder.is_dir()}


def _told(change: Change) -> dict[str, Any]:
    return {"path": change.path, "change": change.words, "needs_restart": change.needs_restart}
