"""Logs: one JSON line per event on standard error, never with local variables, which may hold prompts or keys."""

from __future__ import annotations

import logging
import sys
from typing import Any

import orjson
import structlog
from structlog.processors import ExceptionRenderer, JSONRenderer, TimeStamper
from structlog.stdlib import ProcessorFormatter, add_log_level
from structlog.tracebacks import ExceptionDictTransformer
from structlog.typing import Processor


def set_up(*, pretty: bool, quiet: bool = False) -> None:
    """Configure structlog and the standard library's logging alike. ``pretty`` is for a terminal, ``quiet`` leaves
    out what is no warning."""
    level = logging.WARNING if quiet else logging.INFO
    shared: list[Processor] = [add_log_level, TimeStamper(fmt="iso", utc=True)]
    if pretty:
        console: list[Processor] = [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
        _configure([*shared, *console], structlog.PrintLoggerFactory(sys.stderr), level)
        _configure_standard_library(shared, console)
        return
    exceptions = ExceptionRenderer(ExceptionDictTransformer(show_locals=False))
    lines: list[Processor] = [*shared, exceptions, JSONRenderer(serializer=_bytes)]
    _configure(lines, structlog.BytesLoggerFactory(sys.stderr.buffer), level)
    _configure_standard_library(shared, [exceptions, JSONRenderer(serializer=_text)])


def _configure(processors: list[Processor], factory: Any, level: int) -> None:
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=factory,
        cache_logger_on_first_use=True,
    )


def _configure_standard_library(shared: list[Processor], rendered: list[Processor]) -> None:
    handler = logging.StreamHandler(sys.stderr)
    processors = [ProcessorFormatter.remove_processors_meta, *rendered]
    handler.setFormatter(ProcessorFormatter(foreign_pre_chain=shared, processors=processors))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)


def _bytes(value: object, **_: object) -> bytes:
    return orjson.dumps(value, default=repr)


def _text(value: object, **_: object) -> str:
    return _bytes(value).decode()
