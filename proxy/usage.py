"""What an answer used, as the provider counts it.

In a stream the counts are cumulative and the latest wins, but 0 or null never replaces a count already given: some
providers repeat the input counts at the end, some send 0 or null there, some send them only there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TOO_MANY = 2**53


class Usage:
    """Token counts of one answer. ``reported`` says whether the provider gave any."""

    __slots__ = (
        "cache_read",
        "cache_write_1h",
        "cache_write_5m",
        "delta_bytes",
        "final",
        "input",
        "output",
        "raw",
        "reported",
        "thinking",
        "unreadable",
    )

    def __init__(self) -> None:
        self.input = 0
        """Input tokens neither read from the cache nor written to it."""
        self.cache_read = 0
        self.cache_write_5m = 0
        self.cache_write_1h = 0
        self.output = 0
        """Output tokens, thinking included."""
        self.thinking = 0
        self.delta_bytes = 0
        """Bytes of the deltas so far, from which the output of an answer left early is estimated."""
        self.reported = False
        self.final = False
        """Whether the counts are those of the whole answer, though the rest of it may be missing."""
        self.unreadable: set[str] = set()
        """Names of counts that are no numbers of tokens."""
        self.raw: dict[str, Any] = {}
        """The provider's own object, merged over the events of a stream."""

    @property
    def cache_write(self) -> int:
        """All tokens written to the cache."""
        return self.cache_write_5m + self.cache_write_1h

    def take(self, usage: object) -> None:
        """Merge a provider's ``usage`` object; anything else is passed over."""
        if not isinstance(usage, Mapping):
            return
        self.reported = True
        self.raw.update({key: value for key, value in usage.items() if value or key not in self.raw})
        self.input = self._count(usage, "input_tokens") or self.input
        self.output = self._count(usage, "output_tokens") or self.output
        self.cache_read = self._count(usage, "cache_read_input_tokens") or self.cache_read
        details = usage.get("output_tokens_details")
        if isinstance(details, Mapping):
            self.thinking = self._count(details, "thinking_tokens") or self.thinking
        self._take_written(usage)

    def _take_written(self, usage: Mapping[str, Any]) -> None:
        lifetimes = usage.get("cache_creation")
        lifetimes = lifetimes if isinstance(lifetimes, Mapping) else {}
        hour = self._count(lifetimes, "ephemeral_1h_input_tokens") or self.cache_write_1h
        minutes = self._count(lifetimes, "ephemeral_5m_input_tokens") or self.cache_write_5m
        written = self._count(usage, "cache_creation_input_tokens")
        if written:  # a sum alone says nothing of lifetimes
            hour = min(hour, written)
            minutes = written - hour
        self.cache_write_1h, self.cache_write_5m = hour, minutes

    def _count(self, counts: Mapping[str, Any], name: str) -> int:
        """A count, 0 where there is none; one that can't be read is taken note of."""
        value = counts.get(name)
        if value is None:
            return 0
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is int and 0 <= value < _TOO_MANY:
            return value
        self.unreadable.add(name)
        return 0
