"""Plays the cases of one client and prints what came of each, one JSON object a line.

A script reads its task on standard input (``task_for`` in ``tests/clients/playing.py`` makes it) and runs in an
environment of its own client, which has none of the gateway's packages: it knows the gateway by its address alone.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Case = Callable[[], Any]

TASK: dict[str, Any] = json.load(sys.stdin) if not sys.stdin.isatty() else {}
PARALLEL = "Ask in parallel about Lisbon."
PORTO = "Tell me about Porto."


def play(cases: Mapping[str, Case]) -> None:
    """Play every case, whatever becomes of the others."""
    for name, case in cases.items():
        try:
            told = {"result": case()}
        except Exception:
            told = {"broken": traceback.format_exc()}
        print(json.dumps({"case": name, **told}), flush=True)


def failures(ask: Callable[[str, str, str], Any]) -> dict[str, Case]:
    """A case for each failure of the task: ``ask(key, model, text)`` has to raise."""
    return {name: _failing(ask, asked) for name, asked in TASK.get("failures", {}).items()}


def raised_by(case: Case) -> dict[str, Any]:
    """What a call raises: class, status where it has one, request id where it has one, and words."""
    try:
        case()
    except Exception as error:
        status = getattr(error, "status_code", None)
        request_id = getattr(error, "request_id", None)
        return {"raised": type(error).__name__, "status": status, "request_id": request_id, "message": str(error)}
    return {"raised": None}


def broken_off(stream: Iterator[str]) -> dict[str, Any]:
    """What a stream that breaks raises, and how many pieces of text came before."""
    pieces: list[str] = []
    return {**raised_by(lambda: pieces.extend(stream)), "pieces": len(pieces)}


def result_of_tool(name: str, arguments: Mapping[str, Any]) -> str:
    """What the tools of these scripts answer."""
    return f"{name} of {arguments['city']}: fine"


def _failing(ask: Callable[[str, str, str], Any], asked: Mapping[str, str]) -> Case:
    return lambda: raised_by(lambda: ask(asked["key"], asked["model"], asked["text"]))
