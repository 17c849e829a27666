"""The whole contract for plugin authors.

A ``Plugin`` is one step of the pipeline: made once for a configuration, shared by all requests, so nothing about a
request stands on it. What happens on the way back is an ``OutputPlugin``, made for one answer, its state in its fields.
Inputs run in the order of the list, outputs in the reverse order. A method that a class doesn't define is never
called, so a plugin costs only what it does.

A plugin sees on the way back the format that it saw on the way in. Reading is not changing: ``exchange.body``,
``answer.data`` and ``event.data`` are for reading, ``change()`` gives the same for writing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from aiohttp import ClientSession

    from proxy.answer import Answer
    from proxy.document import Event
    from proxy.exchange import Exchange
    from proxy.limits import Limiter
    from proxy.models import ModelTable
    from proxy.store.store import Store

Format = Literal["openai", "messages"]
Sees = Literal["openai", "messages", "either"]


class Route(Enum):
    """What a request is for."""

    CHAT_COMPLETIONS = "chat_completions"
    MESSAGES = "messages"
    COUNT_TOKENS = "count_tokens"
    """A Messages body whose tokens are to be counted; plain and not billed."""
    MODELS = "models"
    """The keyed GETs of the model lists: ``on_headers`` alone runs."""


class Outcome(Enum):
    """How an exchange ended."""

    COMPLETED = "completed"
    FAILED = "failed"
    ABANDONED = "abandoned"
    """The client left."""


class Settings(BaseModel):
    """A plugin's options in the YAML. Subclass it and give each option a type, a default and a docstring."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, use_attribute_docstrings=True)


@dataclass(frozen=True, slots=True)
class Services:
    """What the server lends to plugins, given to ``start``."""

    models: ModelTable
    limiter: Limiter
    store: Store
    session: ClientSession
    """For requests of the plugin's own. It carries no key and keeps no cookies."""


class Plugin:
    """One step of the pipeline."""

    name: ClassVar[str]
    """As written in the YAML."""
    routes: ClassVar[frozenset[Route]] = frozenset(Route)
    """Whose requests it concerns."""
    sees: ClassVar[Sees | None] = None
    """The format of the body at its place; None: it never looks at it."""
    turns_into: ClassVar[Format | None] = None
    """For translators: the format of the body behind it."""
    authenticates: ClassVar[bool] = False
    """Whether it sets ``exchange.key``. Without such a plugin the server starts only with ``server.open: true``."""
    opens_leaves: ClassVar[bool] = True
    """Whether it may edit leaves of the body in place: tool schemas, arguments, a schema of the answer. A translator
    hands them on unopened, so that they are the client's own too; where no plugin opens them, that needs no copy."""
    completes: ClassVar[bool] = False
    """Whether its output has an ``on_complete``; one that isn't announced here is refused."""
    completes_last: ClassVar[bool] = False
    """Whether no ``on_complete`` may run after its own: then none that completes may stand before it in the list."""
    Settings: ClassVar[type[BaseModel]] = Settings

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    def needs(self) -> Iterable[tuple[str, str]]:
        """The names of plugins without which this one can't keep its word, each with the reason."""
        return ()

    def problems(self, models: ModelTable) -> Iterable[tuple[tuple[str | int, ...], str]]:
        """What of the settings can't work with these models: the path in the settings, and what is wrong."""
        return ()

    def pages(self) -> Mapping[str, Any]:
        """GETs that it adds to the public listener, for which no key is asked: path to JSON value."""
        return {}

    def describe(self) -> Mapping[str, Any]:
        """What it adds to ``GET /openapi.yaml``: an OpenAPI 3.1 fragment (``paths``, ``components``), laid over the
        engine's. A page that isn't described stands there without details."""
        return {}

    async def start(self, services: Services) -> None:
        """Open what lives as long as the plugin. The constructor opens nothing: some are made that never start."""

    async def stop(self) -> None:
        """Close it again; called also where ``start`` raised."""

    async def on_headers(self, exchange: Exchange) -> None:
        """Who is it, may it come in? Runs before the body is read. Raise GatewayError to refuse."""

    async def on_request(self, exchange: Exchange) -> OutputPlugin | Answer | None:
        """The body is there, the model found. Change the request, refuse it by raising GatewayError, answer it
        with an Answer (the rest of the input side is skipped), or return the mirror image for the way back."""

    async def on_send(self, exchange: Exchange) -> None:
        """After every ``on_request``, in the order of the list: what takes from a budget or reaches out.

        It has no time limit but its own, and is left out where a plugin answered.
        """


class OutputPlugin:
    """A plugin's mirror image, for one answer."""

    events: ClassVar[frozenset[str] | None] = None
    """The kinds of events that it wants; None: all. The rest pass by it as bytes."""

    async def on_answer(self, answer: Answer) -> None:
        """A whole answer passes by; not the count of ``count_tokens``. Change it by ``answer.change()`` or
        ``answer.replace(…)``."""

    def on_event(self, event: Event) -> Sequence[Event]:
        """One event of a stream passes by. Return what goes on: usually ``[event]``, ``[]`` to drop it."""
        return (event,)

    async def on_complete(self) -> None:
        """Only after a whole answer, before its tail (or a plain body) goes out; 10 s at most.

        It runs in a task of its own: a client that leaves meanwhile changes nothing. A raise turns the ending into
        an error.
        """

    def on_close(self, outcome: Outcome) -> None:
        """Exactly once, last, whatever happened. It can't change the ending."""
