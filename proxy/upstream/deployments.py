"""Where a request goes, and what comes back from there.

Plugins see only the model; what differs per upstream (address, key, version, its name for the model) is added here.
The body is encoded once, with a slot for the name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import structlog

from proxy.answer import Answer
from proxy.document import RequestDocument
from proxy.errors import GatewayError, Kind
from proxy.exchange import Exchange
from proxy.jsonbytes import replaced, top_level
from proxy.jsontext import JsonError, decode, encode
from proxy.marks import remove_marks, without_marks
from proxy.models import Deployment, Model
from proxy.plugin import Route
from proxy.progress import Progress
from proxy.upstream.choice import by_preference, conversation_name
from proxy.upstream.client import Upstream, UpstreamClient
from proxy.upstream.faults import UpstreamFault, no_messages_answer, timed_out
from proxy.upstream.health import Health
from proxy.upstream.stream import MessageStream

PATHS = {Route.COUNT_TOKENS: "/v1/messages/count_tokens"}
USUAL_PATH = "/v1/messages"
OnFailure = Callable[[Deployment, UpstreamFault], None]
T = TypeVar("T")

_log = structlog.get_logger("ezat.upstream")


class Deployments:
    """Sends exchanges to the deployments of their models, to the next one where one fails before its first event."""

    def __init__(
        self,
        models: Iterable[Model],
        upstreams: Mapping[str, Upstream],
        client: UpstreamClient,
        request_timeout: float,
        *,
        on_failure: OnFailure | None = None,
        before: Deployments | None = None,
    ) -> None:
        """``before`` are those of the configuration until now: a deployment that stays keeps its health."""
        self._upstreams = upstreams
        self._client = client
        self._request_timeout = request_timeout
        """Seconds for a whole answer, whichever deployment gives it; after them no further one is asked."""
        self._on_failure = on_failure
        self._by_identity: dict[tuple[str, ...], Health] = {}
        self._health: dict[tuple[str, Deployment], Health] = {}
        known = before._by_identity if before is not None else {}
        for model in models:
            for deployment in model.deployments:
                identity = (model.id, deployment.model, *upstreams[deployment.upstream].identity)
                health = known.get(identity) or self._by_identity.get(identity) or Health()
                self._by_identity[identity] = self._health[model.id, deployment] = health

    def health(self) -> Iterator[tuple[str, Deployment, Health]]:
        """Each deployment with its model's id and its health."""
        for (model, deployment), health in self._health.items():
            yield model, deployment, health

    async def whole(self, exchange: Exchange) -> Answer:
        """A whole answer. Raises UpstreamFault."""
        path = PATHS.get(exchange.route, USUAL_PATH)
        deadline = self._deadline()

        async def ask(upstream: Upstream, body: bytes) -> Answer:
            try:
                async with asyncio.timeout_at(deadline):
                    raw = await self._client.whole(upstream, path, body, _beta(exchange))
            except TimeoutError:
                words = (
                    f"the answer took longer than {self._request_timeout:g} seconds; ask for a stream (stream: true)"
                )
                raise timed_out("the time of a whole request is over", words) from None
            return _count(raw) if exchange.route is Route.COUNT_TOKENS else message_answer(raw, exchange)

        return await self._ask_in_turn(exchange, ask, deadline)

    async def stream(self, exchange: Exchange, progress: Progress) -> MessageStream | Answer:
        """A streamed answer whose first events are there, or the whole one that came instead. Raises UpstreamFault."""

        async def ask(upstream: Upstream, body: bytes) -> MessageStream | Answer:
            opened = await self._client.stream(
                upstream, USUAL_PATH, body, _beta(exchange), progress, exchange.asked_model
            )
            if not isinstance(opened, MessageStream):
                return message_answer(opened, exchange)
            try:
                await opened.wait_for_first_event()
            except BaseException:
                opened.close()
                raise
            return opened

        return await self._ask_in_turn(exchange, ask, self._deadline())

    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + self._request_timeout

    async def _ask_in_turn(
        self, exchange: Exchange, ask: Callable[[Upstream, bytes], Awaitable[T]], deadline: float
    ) -> T:
        head, rest = body_around_name(exchange)
        faults: list[UpstreamFault] = []
        clock = asyncio.get_running_loop().time
        for deployment in self._in_turn(exchange):
            health = self._health[exchange.model.id, deployment]
            if health.is_full(deployment.max_parallel) or (faults and clock() >= deadline):
                continue
            exchange.deployment = deployment
            attempt = health.begin()
            try:
                body = b"".join((head, encode(deployment.model), rest))
                answer = await ask(self._upstreams[deployment.upstream], body)
            except UpstreamFault as fault:
                health.end()
                if fault.is_final:
                    health.succeeded(attempt)
                    raise
                health.failed(attempt, fault.retry_after)
                faults.append(fault)
                _log_fault(exchange, deployment, fault)
                if self._on_failure is not None:
                    self._on_failure(deployment, fault)
                continue
            except BaseException:
                health.end()
                health.left(attempt)
                raise
            exchange.defer(health.end)
            health.succeeded(attempt)
            return answer
        raise worst(faults)

    def _in_turn(self, exchange: Exchange) -> Iterator[Deployment]:
        """The deployments in the order to ask them: the cooling ones last, as they are when the turn comes."""
        model = exchange.model
        deployments = model.deployments
        if exchange.route is Route.COUNT_TOKENS:
            deployments = tuple(each for each in deployments if each.counts_tokens)
            if not deployments:
                raise GatewayError(Kind.PATH_NOT_FOUND, f"no upstream of the model `{model.id}` counts tokens")
        if len(deployments) == 1:
            yield deployments[0]
            return
        waiting = by_preference(deployments, conversation_name(exchange))
        while waiting:
            found = next((each for each in waiting if not self._health[model.id, each].is_cooling), waiting[0])
            waiting.remove(found)
            yield found


def worst(faults: Sequence[UpstreamFault]) -> UpstreamFault:
    """What the client is told when nothing is left to try."""
    if not faults:
        return UpstreamFault(Kind.OVERLOADED, "every deployment is full", retry_after=1)
    kinds = {fault.kind for fault in faults}
    if kinds == {Kind.RATE_LIMIT}:
        kind = Kind.RATE_LIMIT
    else:
        kind = next((kind for kind in (Kind.OVERLOADED, Kind.TIMEOUT) if kind in kinds), Kind.INTERNAL)
    told = next(fault for fault in faults if fault.kind is kind)
    waits = [fault.retry_after for fault in faults if fault.kind is kind and fault.retry_after is not None]
    told.retry_after = min(waits) if waits else told.retry_after
    return told


def _log_fault(exchange: Exchange, deployment: Deployment, fault: UpstreamFault) -> None:
    log = _log.error if fault.alarm else _log.warning
    event = "the upstream refuses the gateway itself" if fault.alarm else "an upstream failed"
    log(
        event,
        request_id=exchange.id,
        model=exchange.model.id,
        upstream=deployment.upstream,
        deployment=deployment.model,
        cause=fault.cause,
    )


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
    answer = Answer(raw=raw)
    taken_apart = exchange.stream or exchange.route is Route.CHAT_COMPLETIONS
    if taken_apart and not all(isinstance(block, dict) for block in answer.data["content"]):
        raise no_messages_answer("a block that is no object")
    return answer


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
