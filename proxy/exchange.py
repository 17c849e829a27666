"""One request and its answer, as plugins see it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import uuid_utils
from multidict import CIMultiDict, CIMultiDictProxy

from proxy.document import Document, RequestDocument
from proxy.errors import GatewayError, Kind
from proxy.estimate import input_tokens
from proxy.plugin import Route
from proxy.store.periods import Period
from proxy.usage import Usage

if TYPE_CHECKING:
    from proxy.models import Deployment, Model, ModelTable

KEY_PREFIX = "ezat_sk_"
_SECRET_HEADERS = ("authorization", "x-api-key", "cookie", "proxy-authorization")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_BEARER = re.compile(r"bearer +(\S+)", re.IGNORECASE)
_SESSION_LENGTH = 256


@dataclass(frozen=True, slots=True)
class Limits:
    """What a key or an organization may do in a minute, and at the same time; None: no limit."""

    requests_per_minute: int | None = None
    input_tokens_per_minute: int | None = None
    parallel_requests: int | None = None


NO_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Key:
    """Who asks. Set by the plugin that authenticates. Money is in units (``proxy.store.money``)."""

    id: str
    name: str
    organization: str | None = None
    models: frozenset[str] | None = None
    """Canonical ids of the models that it may use; None: all."""
    limits: Limits = NO_LIMITS
    organization_limits: Limits = NO_LIMITS
    spend_limit: int | None = None
    spend_period: Period | None = None
    """None: the limit is for all time."""
    credit: int | None = None
    """What its organization has paid in; None: not prepaid."""


class Exchange:
    """One request and its answer.

    ``body`` is the request as it stands at the plugin's place, for reading; ``change()`` gives it for writing;
    ``replace(body)`` puts another in its place. ``client_body`` stays as the client sent it.
    """

    __slots__ = (
        "_defers",
        "_document",
        "_estimated",
        "_headers",
        "_models",
        "_raw_headers",
        "adjusted",
        "answer_headers",
        "asked_model",
        "began",
        "billed",
        "client_document",
        "created",
        "deployment",
        "id",
        "ignored",
        "keeps_apart",
        "key",
        "model_or_none",
        "path_of",
        "request_id",
        "route",
        "session",
        "started",
        "stream",
        "usage",
    )

    def __init__(self, route: Route, headers: CIMultiDictProxy[str], models: ModelTable) -> None:
        self.id = str(uuid_utils.uuid7())
        """The gateway's own id of the request, a UUIDv7."""
        self.route = route
        self._raw_headers = headers
        self._models = models
        own = headers.get("x-request-id", "")
        self.request_id = own if _REQUEST_ID.fullmatch(own) else self.id
        """The client's own id if it is a proper one, else ``id``."""
        self.started = time.monotonic()
        self.began = time.time()
        self.created = int(self.began)
        self.stream = False
        self.key: Key | None = None
        self.asked_model = ""
        """The model's name exactly as the client sent it."""
        self.model_or_none: Model | None = None
        session = headers.get("x-ezat-session")
        self.session: str | None = session[:_SESSION_LENGTH] if session else None
        """The client's own name of the conversation."""
        self.ignored: set[str] = set()
        """Top-level fields of the request that have no effect; named in ``x-ezat-ignored``."""
        self.adjusted: dict[str, str] = {}
        """Fields sent otherwise than asked, with what was sent; named in ``x-ezat-adjusted``."""
        self.answer_headers: dict[str, str] = {}
        """Headers to add to the answer; without effect once it has begun."""
        self.usage = Usage()
        """The provider's counts so far, kept by the engine."""
        self.deployment: Deployment | None = None
        """Where the request went, once that is chosen."""
        self.path_of: Callable[[str], str | None] | None = None
        """Translators: from a path in the translated body to the client's own."""
        self.keeps_apart = False
        """Whether ``client_body`` shares nothing with what a translator puts in its place; for the engine."""
        self.billed = True
        """False where a plugin answered by itself and said that it cost nothing."""
        self._headers: CIMultiDictProxy[str] | None = None
        self._document = self.client_document = Document(None)
        self._estimated: tuple[Document, int] | None = None
        self._defers: list[Callable[[], None]] = []

    @property
    def headers(self) -> CIMultiDictProxy[str]:
        """The client's headers, without keys and cookies."""
        if self._headers is None:
            kept = CIMultiDict(self._raw_headers)
            for name in _SECRET_HEADERS:
                kept.popall(name, None)
            self._headers = CIMultiDictProxy(kept)
        return self._headers

    def credential(self) -> str | None:
        """The key that the client sent, for ``on_headers`` alone. Of two headers the gateway's own kind of key
        counts, of two of these the one in ``x-api-key``."""
        direct = self._raw_headers.get("x-api-key", "").strip()
        found = _BEARER.fullmatch(self._raw_headers.get("authorization", "").strip())
        bearer = found.group(1) if found else ""
        if bearer.startswith(KEY_PREFIX) and not direct.startswith(KEY_PREFIX):
            return bearer
        return direct or bearer or None

    @property
    def model(self) -> Model:
        """The model that the request goes to."""
        if self.model_or_none is None:
            raise RuntimeError("no model is known before the body is read")
        return self.model_or_none

    def use_model(self, name: str) -> None:
        """Send the request to another model; whether the key may use it is judged again.

        Raises GatewayError: 404 for an unknown model, 403 for one that the key may not use.
        """
        model = self._models.find(name)
        if model is None:
            raise model_not_found(name)
        if self.key is not None and self.key.models is not None and model.id not in self.key.models:
            raise GatewayError(Kind.PERMISSION, f"this key may not use the model `{name}`", param="model")
        self.model_or_none = model

    @property
    def client_body(self) -> dict[str, Any]:
        """The request as the client sent it, for reading only."""
        body: dict[str, Any] = self.client_document.data
        return body

    def client_value(self, name: str) -> Any:
        """One top-level field of the client's request, None where it is missing; the rest stays unread."""
        document = self.client_document
        return document.value(name) if isinstance(document, RequestDocument) else self.client_body.get(name)

    @property
    def body(self) -> dict[str, Any]:
        """The request as it stands here, for reading only."""
        body: dict[str, Any] = self._document.data
        return body

    def change(self) -> dict[str, Any]:
        """The request for writing; ``client_body`` stays as it was sent."""
        if self._document is self.client_document:
            self._document = Document(raw=self.client_document.encoded())
        body: dict[str, Any] = self._document.change()
        return body

    def replace(self, body: dict[str, Any]) -> None:
        """Put another request in its place."""
        self._document = Document(body)
        if self.keeps_apart:  # a fresh one, parsed again if somebody looks
            self.client_document = self.client_document.reread()

    @property
    def document(self) -> Document:
        """The request as bytes or value; for the engine."""
        return self._document

    def read(self, document: Document) -> None:
        """The body has been read; for the engine."""
        self._document = self.client_document = document

    def estimated_input(self) -> int:
        """The input tokens of the request as it stands here, by estimate; measured once."""
        if self._estimated is None or self._estimated[0] is not self._document:
            self._estimated = (self._document, input_tokens(self.body))
        return self._estimated[1]

    def defer(self, undo: Callable[[], None]) -> None:
        """Call ``undo`` exactly once when the exchange is over, after every ``on_close``, the last one first.

        From any hook: what was taken is given back on every path.
        """
        self._defers.append(undo)

    def take_defers(self) -> list[Callable[[], None]]:
        """What was deferred, the last first; for the engine. A second call gives nothing."""
        defers, self._defers = self._defers[::-1], []
        return defers


def model_not_found(name: str) -> GatewayError:
    """The 404 of an unknown model, or of one that isn't shown to the key."""
    message = f"The model `{name}` does not exist or you do not have access to it."
    return GatewayError(Kind.MODEL_NOT_FOUND, message, param="model")
