"""Logs: one JSON line per event on standard error, never with local variables, which may hold prompts or keys.

Everything goes through one queue, what Python itself says included: whoever writes to standard error directly waits
as long as nobody reads there.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, cast

import orjson
import structlog
from structlog.processors import ExceptionRenderer, TimeStamper
from structlog.stdlib import ProcessorFormatter, add_log_level
from structlog.tracebacks import ExceptionDictTransformer
from structlog.typing import EventDict, Processor

from proxy.log_queue import LogQueue

LONGEST_LINE = 65_536
"""Bytes. In a longer line, which an exception that quotes a whole body can make, long fields are cut."""
LONGEST_FIELD = 1000
LAST_SECONDS = 2.0
"""For so long the end of the process waits for what is left in the queue."""


class _Logger:
    """What structlog hands lines to. There is one, since loggers keep it: after a fork it has another queue."""

    queue: LogQueue

    def info(self, line: bytes) -> None:
        self.queue.put(line)

    def error(self, line: bytes) -> None:
        self.queue.put_urgent(line)

    debug = info
    warning = critical = error


class _Handler(logging.Handler):
    """What the standard library's logging hands records to."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            _logger.queue.put_urgent(self.format(record).encode(errors="replace"))
        except Exception:  # the library's own way is to print the record's arguments
            _log.error("a record could not be logged", logger=record.name)


_logger = _Logger()
_log = structlog.get_logger("ezat.log")


def set_up(*, pretty: bool, quiet: bool = False, worker: int | None = None) -> LogQueue:
    """Configure structlog and the standard library's logging alike. ``pretty`` is for a terminal, ``quiet`` leaves
    out what is no warning, ``worker`` is this process among several.

    To be called once in each process, after a fork. The queue is closed at the end of the process, or by whoever ends
    it earlier or otherwise.
    """
    shared: list[Processor] = [add_log_level, TimeStamper(fmt="iso", utc=True)]
    if worker is not None:
        shared.append(_of_worker(worker))
    rendered = _for_a_terminal() if pretty else _for_machines()
    _logger.queue = LogQueue(_standard_error(), _notice([*shared, *rendered]))
    atexit.register(_logger.queue.close, LAST_SECONDS)
    structlog.configure(
        processors=[*shared, *rendered],
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING if quiet else logging.INFO),
        logger_factory=lambda *_: _logger,
        cache_logger_on_first_use=True,
    )
    _configure_standard_library(shared, rendered)
    return _logger.queue


def on_terminal() -> bool:
    """Whether a person reads the log. Python has no standard error where it was closed at the start."""
    return sys.__stderr__ is not None and sys.__stderr__.isatty()


def _standard_error() -> int:
    """Where it was closed at the start, its number belongs to whatever was opened first since then."""
    return os.open(os.devnull, os.O_WRONLY) if sys.__stderr__ is None else sys.__stderr__.fileno()


def _for_a_terminal() -> list[Processor]:
    return [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback), _text_line]


def _for_machines() -> list[Processor]:
    return [ExceptionRenderer(ExceptionDictTransformer(show_locals=False)), _json_line]


def _of_worker(number: int) -> Processor:
    def add(_: object, __: str, event: EventDict) -> EventDict:
        event["worker"] = number
        return event

    return add


def _notice(processors: list[Processor]) -> Callable[[int], bytes]:
    def line(dropped: int) -> bytes:
        event: Any = {"event": "log lines were dropped", "lines": dropped}
        for processor in processors:
            event = processor(None, "warning", event)
        return cast(bytes, event)

    return line


def _configure_standard_library(shared: list[Processor], rendered: list[Processor]) -> None:
    handler = _Handler()
    processors = [ProcessorFormatter.remove_processors_meta, *rendered, _decoded]
    handler.setFormatter(ProcessorFormatter(foreign_pre_chain=shared, processors=processors))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.captureWarnings(True)
    sys.unraisablehook = _log_unraisable
    threading.excepthook = _log_end_of_thread


def _log_unraisable(unraisable: sys.UnraisableHookArgs) -> None:
    """What a finalizer raised, for one."""
    _log.error("an exception was ignored", where=type(unraisable.object).__name__, exc_info=unraisable.exc_value)


def _log_end_of_thread(ended: threading.ExceptHookArgs) -> None:
    _log.error("a thread failed", thread=ended.thread.name if ended.thread else None, exc_info=ended.exc_value)


def _json_line(_: object, __: str, event: EventDict) -> bytes:
    try:
        line = orjson.dumps(event, default=repr, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError:  # a lone surrogate, an integer beyond 64 bits
        line = b""
    if line and len(line) <= LONGEST_LINE:
        return line
    short = {name: _short(value) for name, value in event.items()}
    return orjson.dumps(short, default=repr, option=orjson.OPT_APPEND_NEWLINE)


def _short(value: object) -> object:
    """The value, if it can be written as it is and is not long, else the beginning of its text."""
    try:
        text = orjson.dumps(value, default=repr).decode()
    except TypeError:
        value = text = ascii(value)
    return value if len(text) <= LONGEST_FIELD else f"{text[:LONGEST_FIELD]}…"


def _text_line(_: object, __: str, text: Any) -> bytes:
    return cast(str, text).encode(errors="backslashreplace")[:LONGEST_LINE] + b"\n"


def _decoded(_: object, __: str, line: Any) -> str:
    return cast(bytes, line).decode(errors="replace")
