"""Where a request goes, and what comes back from there.

Plugins see only the model; what differs per upstream (address, key, version, its name for the model) is added here.
The body is encoded once, with a slot for the name.
"""

from __future__ import annotations

from collections.abc import Mapping

from proxy.answer import Answer
from proxy.exchange import Exchange
from proxy.jsonbytes import replaced, top_level
from proxy.jsontext import JsonError, decode, encode
from proxy.marks import remove_marks, without_marks
from proxy.models import Deployment, Model
from proxy.plugin import Route
from proxy.progress import Progress
from proxy.reading import RequestDocument
from proxy.upstream.client import Upstream, UpstreamClient
from proxy.upstream.faults import no_messages_answer
from proxy.upstream.stream import MessageStream

PATHS = {Route.COUNT_TOKENS: "/v1/messages/count_tokens"}
USUAL_PATH = "/v1/messages"


class Deployments:
    """Sends exchanges to the deployments of their models."""

    def __init__(self, upstreams: Mapping[str, Upstream], client: UpstreamClient) -> None:
        self._upstreams = upstreams
        self._client = client

    async def whole(self, exchange: Exchange) -> Answer:
        """A whole answer. Raises UpstreamFault."""
        deployment = self._choose(exchange)
        head, rest = body_around_name(exchange)
        body = b"".join((head, encode(deployment.model), rest))
        path = PATHS.get(exchange.route, USUAL_PATH)
        raw = await self._client.whole(self._upstreams[deployment.upstream], path, body, _beta(exchange))
        return _count(raw) if exchange.route is Route.COUNT_TOKENS else message_answer(raw, exchange)

    async def stream(self, exchange: Exchange, progress: Progress) -> MessageStream | Answer:
        """A streamed answer, or the whole one that came instead. Raises UpstreamFault."""
        deployment = self._choose(exchange)
        head, rest = body_around_name(exchange)
        body = b"".join((head, encode(deployment.model), rest))
        upstream = self._upstreams[deployment.upstream]
        opened = await self._client.stream(upstream, USUAL_PATH, body, _beta(exchange), progress, exchange.asked_model)
        return opened if isinstance(opened, MessageStream) else message_answer(opened, exchange)

    def _choose(self, exchange: Exchange) -> Deployment:
        exchange.deployment = best(exchange.model)
        return exchange.deployment


def best(model: Model) -> Deployment:
    """The deployment to ask: the first of the lowest priority."""
    return min(model.deployments, key=lambda deployment: deployment.priority)


def body_around_name(exchange: Exchange) -> tuple[bytes, bytes]:
    """What stands before and behind the model's name in the body that goes up.

    Bytes that nobody changed stay as they came. Marks are taken out for a model without a prompt cache.
    """
    document = exchange.document
    caching = exchange.model.capabilities.prompt_caching
    raw = document.unchanged
    if raw is not None:
        if isinstance(document, RequestDocument) and caching:
            members = document.members
        else:
            raw = raw if caching else without_marks(raw)
            members = top_level(raw)
        name = next(member for member in members if member.key == "model")
        return raw[: name.at], raw[name.end :]
    if not caching:
        remove_marks(exchange.change())
    rest = encode({name: value for name, value in exchange.body.items() if name != "model"})
    return b'{"model":', b"," + rest[1:] if len(rest) > 2 else b"}"


def message_answer(raw: bytes, exchange: Exchange) -> Answer:
    """A provider's whole message, under the client's name for the model; its usage is taken note of."""
    try:
        members = {member.key: member for member in top_level(raw)} if raw.lstrip().startswith(b"{") else {}
    except JsonError:
        members = {}
    if not {"type", "content"} <= members.keys() or decode(raw[members["type"].at : members["type"].end]) != "message":
        raise no_messages_answer("no message")
    if not raw.startswith(b"[", members["content"].at):
        raise no_messages_answer("a message whose content is no list")
    if "usage" in members:
        exchange.usage.take(decode(raw[members["usage"].at : members["usage"].end]))
    if "model" in members:
        raw = replaced(raw, members["model"].at, members["model"].end, encode(exchange.asked_model))
    return Answer(raw=raw)


def _count(raw: bytes) -> Answer:
    try:
        counted = decode(raw)
    except JsonError:
        counted = None
    if not isinstance(counted, dict) or "input_tokens" not in counted:
        raise no_messages_answer("no count of tokens")
    return Answer(raw=raw)


def _beta(exchange: Exchange) -> str | None:
    """The client's anthropic-beta headers as one, on the routes of its own format alone."""
    if exchange.route is Route.CHAT_COMPLETIONS:
        return None
    values = [
        value for value in exchange.headers.getall("anthropic-beta", ()) if value.isascii() and value.isprintable()
    ]
    return ",".join(values) or None
