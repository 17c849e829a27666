"""Reloading the configuration while the gateway serves: on SIGHUP, and when one of its files is changed.

All or nothing: a file that can't be used leaves everything as it is, and the log says why. The folders are watched and
not the files, or a file that is exchanged for another (by an editor, by a mounted volume) would be lost sight of; what
counts is not that something happened there but whether a file holds something else than what was read last.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, TypeVar

import structlog
from watchfiles import awatch

from proxy.config import digests
from proxy.loading import Pipeline
from proxy.models import ModelTable
from proxy.plan import Change, changes, refusal
from proxy.server import CannotReload, Gateway
from proxy.settings import Config
from proxy.yaml_source import ConfigError

SETTLED = 0.2
"""Seconds for which a file must have stayed the same, so that it is not read while it is written."""
TURN = 5.0
"""Seconds after which the files are looked at though nothing was heard of them."""
T = TypeVar("T")
LONGEST = 300.0
"""Seconds for a whole reload: a plugin that hangs in its start would else be the end of all reloads, unheard."""
Loaded = tuple[Config, ModelTable, Pipeline]
Load = Callable[[], Loaded]

_log = structlog.get_logger("ezat.reload")


class Reloader:
    """Reloads one gateway. ``load`` reads its configuration, and raises ConfigError."""

    def __init__(self, gateway: Gateway, load: Load) -> None:
        self._gateway = gateway
        self._load = load
        self._one_at_a_time = asyncio.Lock()
        self._another_waits = False
        self._seen = gateway.config.files
        """The files to watch, each with the digest of what was read last, whatever came of it."""

    async def reload(self) -> None:
        """Take over what stands in the files now, if that can be used."""
        if self._another_waits:
            return  # it will read the files as they are by then
        self._another_waits = True
        async with self._one_at_a_time:
            self._another_waits = False
            await self._reload()

    async def _reload(self) -> None:
        try:
            async with asyncio.timeout(LONGEST):
                loaded = await self._read()
                found = changes(self._gateway.config, loaded[0])
                if found:
                    await self._gateway.reload(*loaded)
        except (ConfigError, CannotReload) as error:
            self._refused(str(error))
        except TimeoutError:
            self._refused(f"it took longer than {LONGEST:g} seconds; a plugin may hang while it is made or starts")
        except Exception as error:
            self._refused(f"the gateway failed: {type(error).__name__}", is_bug=True)
        else:
            self._gateway.metrics.reloaded("applied" if found else "unchanged")
            if found:
                _log.info("the configuration was reloaded", changes=[str(change) for change in found])
            else:
                _log.info("the configuration is as it was")

    def _refused(self, reason: str, *, is_bug: bool = False) -> None:
        self._gateway.metrics.reloaded("refused")
        _log.error("the configuration was not reloaded, the present one stays", reason=reason, exc_info=is_bug)

    async def _read(self) -> Loaded:
        """Load, and take note of the files. Of what is written meanwhile the next look will find that it is news."""
        before = self._seen = await asyncio.to_thread(digests, self._seen)
        try:
            loaded = await _in_thread(self._load)
        except ConfigError as error:
            self._seen = {**await asyncio.to_thread(digests, error.files), **before}
            raise
        self._seen = {file: before.get(file, digest) for file, digest in loaded[0].files.items()}
        return loaded

    async def plan(self) -> Mapping[str, Any]:
        """What a reload would change now, or why it would be refused."""
        try:
            async with asyncio.timeout(LONGEST), self._one_at_a_time:
                config, _, _ = await _in_thread(self._load)
        except ConfigError as error:
            return {"refused": str(error), "changes": []}
        except TimeoutError:
            return {"refused": "the configuration can't be read in time; a plugin may hang", "changes": []}
        found = changes(self._gateway.config, config)
        return {"refused": refusal(found) or None, "changes": [_told(change) for change in found]}

    async def note(self) -> None:
        """Read the files for the watch alone: somebody else judges them."""
        with suppress(ConfigError):
            await self._read()

    async def watch(self, changed: Callable[[], Awaitable[None]]) -> None:
        """Call ``changed`` whenever one of the files holds something else; to be cancelled."""
        while True:
            folders = folders_of(self._seen)
            async with aclosing(_happenings(folders)) as happenings:
                async for _ in happenings:
                    if self._gateway.config.server.watch and await self._is_news():
                        await changed()
                    if folders_of(self._seen) != folders:
                        break

    async def _is_news(self) -> bool:
        """Whether a file holds something else than what was read last; waits until it is written to its end."""
        present = await asyncio.to_thread(digests, self._seen)
        while present != self._seen:
            await asyncio.sleep(SETTLED)
            before, present = present, await asyncio.to_thread(digests, self._seen)
            if present == before and present != self._seen:
                self._seen = present
                return True
        return False


async def _happenings(folders: Iterable[Path]) -> AsyncGenerator[None, None]:
    """Something happened in a folder, or some seconds went by: where a file system tells nothing, that has to do."""
    try:
        async for _ in awatch(
            *folders,
            recursive=False,
            watch_filter=None,
            debounce=round(SETTLED * 1000),
            rust_timeout=round(TURN * 1000),
            yield_on_timeout=True,
        ):
            yield
    except Exception as error:
        _log.warning("folders can't be watched, files are looked at now and then", reason=str(error))
    while True:
        await asyncio.sleep(TURN)
        yield


def folders_of(files: Iterable[Path]) -> set[Path]:
    """Where files stand, and where they really stand if they are links."""
    folders = {os.path.dirname(find(file)) for file in files for find in (os.path.abspath, os.path.realpath)}
    return {Path(folder) for folder in folders if os.path.isdir(folder)}


async def _in_thread(work: Callable[[], T]) -> T:
    """What ``work`` gives, from a thread for which a stop doesn't wait: a plugin may take long to be made."""
    result: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        if not result.set_running_or_notify_cancel():
            return
        try:
            result.set_result(work())
        except Exception as error:
            result.set_exception(error)
        except BaseException as error:  # an exit, which would end the gateway
            failure = RuntimeError(type(error).__name__)
            failure.__cause__ = error
            result.set_exception(failure)

    threading.Thread(target=run, name="reload", daemon=True).start()
    return await asyncio.wrap_future(result)


def _told(change: Change) -> dict[str, Any]:
    return {"path": change.path, "change": change.words, "needs_restart": change.needs_restart}
