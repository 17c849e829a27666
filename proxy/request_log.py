"""What the log says of an exchange: one line for each, and what went wrong. Never a key or a prompt."""

from __future__ import annotations

import structlog

from proxy.errors import GatewayError, PluginFault
from proxy.exchange import Exchange
from proxy.plugin import Outcome
from proxy.upstream.faults import UpstreamFault

_log = structlog.get_logger("ezat.request")


def log_request(
    exchange: Exchange,
    outcome: Outcome,
    status: int,
    error: GatewayError | None,
    client: str | None,
    seconds: float,
) -> None:
    """The line of one request."""
    usage = exchange.usage
    _log.info(
        "request",
        request_id=exchange.id,
        client_request_id=exchange.request_id if exchange.request_id != exchange.id else None,
        client=client,
        route=exchange.route.value,
        key=exchange.key.name if exchange.key else None,
        model=exchange.model_or_none.id if exchange.model_or_none else None,
        upstream=exchange.deployment.upstream if exchange.deployment else None,
        stream=exchange.stream,
        outcome=outcome.value,
        status=status or None,
        error=error.kind.value if error else None,
        cause=error.cause if isinstance(error, UpstreamFault) else None,
        input=usage.input,
        cache_read=usage.cache_read,
        cache_write=usage.cache_write,
        output=usage.output,
        seconds=round(seconds, 3),
    )


def log_fault(error: PluginFault, exchange: Exchange) -> None:
    """Name the plugin that broke, and where."""
    _log.error("plugin failed", plugin=error.plugin, hook=error.hook, request_id=exchange.id, exc_info=error.__cause__)


def log_lost_record(error: BaseException, exchange: Exchange) -> None:
    """The client has left, and its answer could not be recorded: nobody else is told."""
    _log.error("an answer could not be recorded", request_id=exchange.id, error=str(error))


def log_bug(exchange: Exchange) -> None:
    """The engine itself raised something; to be called while it is handled."""
    _log.exception("the gateway failed", request_id=exchange.id)
