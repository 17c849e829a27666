"""What is counted and measured, for Prometheus.

Every label has a closed set of values: routes, outcomes, kinds of errors, statuses, and names from the configuration.
Nothing that a client sends becomes one, or its requests could fill the memory. What is counted on every request is
counted at once; what is a state (streams, deployments, what waits for the ledger) is looked at when somebody asks.

Several worker processes share their figures through files (prometheus-client's multiprocess mode): ``share_through``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
    values,
)
from prometheus_client.multiprocess import MultiProcessCollector

from proxy.errors import GatewayError
from proxy.exchange import Exchange
from proxy.models import Deployment
from proxy.store import UsageRow
from proxy.store.money import UNITS_PER_USD
from proxy.timing import Timed
from proxy.upstream.faults import UpstreamFault
from proxy.upstream.health import Health

if TYPE_CHECKING:
    from proxy.plugin import Outcome

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"  # the library's own
NONE = "none"
"""The route of what asks for no model, and the model of what names none that is known."""
_FIRST_EVENT = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_WHOLE = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Described(NamedTuple):
    """A metric: its class, what it says, its labels, and further arguments."""

    make: type[Any]
    text: str
    labels: tuple[str, ...] = ()
    more: Mapping[str, Any] = {}


def _state(text: str, *labels: str, over: str = "livesum") -> Described:
    """``over``: what several workers' figures come to."""
    return Described(Gauge, text, labels, {"multiprocess_mode": over})


_AT = ("model", "upstream", "deployment")
METRICS: Mapping[str, Described] = {
    "ezat_requests_total": Described(Counter, "Requests that are over.", ("route", "model", "outcome", "status"), {}),
    "ezat_errors_total": Described(Counter, "Errors that clients were told, by kind.", ("route", "kind")),
    "ezat_tokens_total": Described(Counter, "Tokens, as providers count them.", ("model", "kind")),
    "ezat_cost_usd_total": Described(Counter, "What the ledger recorded, in USD; the ledger is exact.", ("model",)),
    "ezat_first_event_seconds": Described(
        Histogram, "From a request to the first event of its stream.", ("route", "model"), {"buckets": _FIRST_EVENT}
    ),
    "ezat_request_seconds": Described(Histogram, "From a request to its end.", ("route", "model"), {"buckets": _WHOLE}),
    "ezat_plugin_seconds_total": Described(Counter, "Time within plugins, waiting included.", ("plugin", "hook")),
    "ezat_plugin_calls_total": Described(Counter, "Calls of plugins.", ("plugin", "hook")),
    "ezat_upstream_failures_total": Described(
        Counter, "Failed requests to upstreams; alarm: the operator must act.", ("upstream", "kind", "alarm")
    ),
    "ezat_reloads_total": Described(Counter, "Reloads of the configuration.", ("result",)),
    "ezat_log_lines_dropped_total": Described(Counter, "Log lines that could not be written."),
    "ezat_open_streams": _state("Streamed answers under way."),
    "ezat_running_requests": _state("Requests under way."),
    "ezat_body_bytes": _state("Bytes of the bodies of requests under way."),
    "ezat_deployment_state": _state("1: asked as usual, 0: cooling down after a failure.", *_AT, over="livemin"),
    "ezat_deployment_running": _state("Requests under way at a deployment.", *_AT),
    "ezat_ledger_waiting": _state("What waits to be written to the store."),
    "ezat_ledger_lag_seconds": _state("For how long the oldest of it has waited.", over="livemax"),
    "ezat_store_ready": _state("1: the store can be read and written.", over="livemin"),
    "ezat_build_info": _state("The version that runs.", "version", over="livemax"),
}
DESCRIPTIONS: Mapping[str, tuple[str, ...]] = {name: each.labels for name, each in METRICS.items()}
"""The labels of each metric."""
TOKENS = ("input", "output", "cache_read", "cache_write_5m", "cache_write_1h")
REFUSED = "refused"
RELOADS = ("applied", REFUSED, "unchanged")


def share_through(folder: str) -> None:
    """Let the metrics that are made from now on be part of those of all processes that share the folder."""
    os.environ[FOLDER_VARIABLE] = folder
    values.ValueClass = values.MultiProcessValue()  # type: ignore[no-untyped-call]  # was chosen at the import


def refused_reloads() -> Any:
    """The counter of those alone, for a process without other metrics."""
    each = METRICS["ezat_reloads_total"]
    return each.make("ezat_reloads_total", each.text, each.labels, registry=None).labels(REFUSED)


class _Series(dict[tuple[str, ...], Any]):
    """The series of one metric by the values of its labels: a look-up without the library's lock."""

    def __init__(self, metric: Any) -> None:
        super().__init__()
        self.metric = metric

    def __missing__(self, values: tuple[str, ...]) -> Any:
        found = self[values] = self.metric.labels(*values) if values else self.metric
        return found

    def forget(self) -> None:
        """Take away all series: of what is looked at, those that are gone."""
        for labels in self:
            self.metric.remove(*labels)
        self.clear()


class Metrics:
    """The metrics of one process."""

    def __init__(self, version: str) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._series = {
            name: _Series(each.make(name, each.text, each.labels, registry=self._registry, **each.more))
            for name, each in METRICS.items()
        }
        self.open_streams = 0
        self._is_shared = FOLDER_VARIABLE in os.environ
        if not self._is_shared:
            ProcessCollector(registry=self._registry)
        self._series["ezat_build_info"][version,].set(1)
        for result in RELOADS:
            self._series["ezat_reloads_total"][result,]
        self.lines_dropped: Callable[[], int] = int
        """How many lines of the log were dropped so far."""
        self._known_to_be_dropped = 0
        self.counts_every_reload = True
        """Whether it counts those that were not refused, too; of several workers one does."""

    def request_ended(
        self, exchange: Exchange, outcome: Outcome, status: int, error: GatewayError | None, seconds: float
    ) -> None:
        """One request is over."""
        route, usage = exchange.route.value, exchange.usage
        model = exchange.model_or_none.id if exchange.model_or_none is not None else NONE
        self._series["ezat_requests_total"][route, model, outcome.value, str(status)].inc()
        self._series["ezat_request_seconds"][route, model].observe(seconds)
        if error is not None:
            self._series["ezat_errors_total"][route, error.kind.value].inc()
        if usage.reported:
            tokens = self._series["ezat_tokens_total"]
            for kind in TOKENS:
                if count := getattr(usage, kind):
                    tokens[model, kind].inc(count)

    def refused(self, status: int, error: GatewayError) -> None:
        """A request was refused that is no exchange: an unknown path, one that comes during a stop …"""
        self._series["ezat_requests_total"][NONE, NONE, "failed", str(status)].inc()
        self._series["ezat_errors_total"][NONE, error.kind.value].inc()

    def first_event(self, exchange: Exchange, seconds: float) -> None:
        """The first event of a stream is there."""
        self._series["ezat_first_event_seconds"][exchange.route.value, exchange.model.id].observe(seconds)

    def upstream_failed(self, deployment: Deployment, fault: UpstreamFault) -> None:
        """A request to a deployment failed."""
        alarm = "yes" if fault.alarm else "no"
        self._series["ezat_upstream_failures_total"][deployment.upstream, fault.kind.value, alarm].inc()

    def recorded(self, row: UsageRow) -> None:
        """A row is in the ledger."""
        self._series["ezat_cost_usd_total"][row.model,].inc(row.cost / UNITS_PER_USD)

    def reloaded(self, result: str) -> None:
        """A reload has come to its end: one of RELOADS."""
        if self.counts_every_reload or result == REFUSED:
            self._series["ezat_reloads_total"][result,].inc()

    def take_times(self, timed: Iterable[Timed]) -> None:
        """Add what plugins took since the last time."""
        seconds_of, calls_of = self._series["ezat_plugin_seconds_total"], self._series["ezat_plugin_calls_total"]
        for plugin, time in timed:
            for hook, calls, seconds in time.take():
                seconds_of[plugin.name, hook].inc(seconds)
                calls_of[plugin.name, hook].inc(calls)

    def look_at(self, states: Mapping[str, float]) -> None:
        """Take note of states, by the name of their metric."""
        for name, value in states.items():
            self._series[name][()].set(value)
        self._series["ezat_open_streams"][()].set(self.open_streams)
        dropped = self.lines_dropped()
        self._series["ezat_log_lines_dropped_total"][()].inc(dropped - self._known_to_be_dropped)
        self._known_to_be_dropped = dropped

    def look_at_deployments(self, found: Iterable[tuple[str, Deployment, Health]]) -> None:
        """Take note of the deployments' states. Those that are gone are shown no more; with several workers, whose
        files keep what was there once, as healthy and idle."""
        state, running = self._series["ezat_deployment_state"], self._series["ezat_deployment_running"]
        if not self._is_shared:
            state.forget()
            running.forget()
        for labels in state:
            state[labels].set(1)
            running[labels].set(0)
        for model, deployment, health in found:
            labels = (model, deployment.upstream, deployment.model)
            state[labels].set(0 if health.is_cooling else 1)
            running[labels].set(health.active)

    def text(self) -> bytes:
        """All of it, of all workers, as Prometheus reads it."""
        if not self._is_shared:
            return generate_latest(self._registry)
        whole = CollectorRegistry()
        MultiProcessCollector(whole)  # type: ignore[no-untyped-call]
        return generate_latest(whole)
