"""The SDKs offer each call twice, plain and awaited: these make one test of the two."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterable, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

Client = Any
"""A client of an SDK, of either kind: the two have no type in common."""


async def arrived(answer: Any) -> Any:
    """What a call gives, awaited where that is needed."""
    return await answer if inspect.isawaitable(answer) else answer


async def kept(found: list[Any], stream: Any) -> None:
    """Keep all that a stream gives in the list, what came before it broke too."""
    if isinstance(stream, AsyncIterable):
        async for each in stream:
            found.append(each)
    else:
        found.extend(stream)


async def every(stream: Any) -> list[Any]:
    """All that a stream gives."""
    found: list[Any] = []
    await kept(found, stream)
    return found


async def first(stream: Any) -> Any:
    """The first thing that a stream gives."""
    return await anext(aiter(stream)) if isinstance(stream, AsyncIterable) else next(iter(stream))


@asynccontextmanager
async def entered(manager: Any) -> AsyncIterator[Any]:
    """What a helper of an SDK manages, left at the end."""
    if hasattr(manager, "__aenter__"):
        async with manager as managed:
            yield managed
        return
    with manager as managed:
        yield managed
