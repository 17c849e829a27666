"""The demo's prompt cache: what a request reads from it, and what it writes.

It keeps no prompts, only hashes of prefixes: a prefix is everything up to a breakpoint, so one running hash over the
prompt's pieces gives the key of every prefix in one pass. The minimum of 64 tokens is far below that of real models
(512 and more), so that caching shows in a short conversation.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from proxy.demo.prompt import Json, Piece, pieces

MINIMUM_TOKENS = 64  # shorter prefixes are neither written nor read, and no error
LOOK_BACK = 20  # blocks at which an earlier entry is searched, per breakpoint, the breakpoint's own included
LIFETIMES = {"5m": 300.0, "1h": 3600.0}  # seconds, begun anew by each read
CAPACITY = 10_000  # prefixes; beyond it the one unused for longest goes


@dataclass(frozen=True, slots=True)
class CountedPrompt:
    """A request's pieces, the tokens up to and with each, the running hash after each, and ttl by breakpoint."""

    pieces: list[Piece]
    totals: list[int]
    digests: list[bytes]
    breakpoints: dict[int, str]

    @property
    def tokens(self) -> int:
        return self.totals[-1] if self.totals else 0


@dataclass(frozen=True, slots=True)
class InputTokens:
    """A prompt's tokens by price: read from the cache, written for 5 minutes or an hour, and the rest."""

    rest: int
    read: int = 0
    written_5m: int = 0
    written_1h: int = 0

    @property
    def all(self) -> int:
        return self.rest + self.read + self.written_5m + self.written_1h


@dataclass(slots=True)
class _Entry:
    lifetime: float
    expires_at: float


def count_prompt(body: Json) -> CountedPrompt:
    """Count and hash the prompt of a checked request. A prefix belongs to its model: the name is hashed first."""
    prompt = pieces(body)
    running = hashlib.sha256(body["model"].encode())
    digests = []
    for piece in prompt:
        canonical = piece.canonical()
        running.update(f"\0{piece.role} {len(canonical)}\0".encode())
        running.update(canonical)
        digests.append(running.digest())
    totals = list(accumulate(piece.tokens() for piece in prompt))
    return CountedPrompt(prompt, totals, digests, _breakpoints(prompt, body.get("cache_control")))


def _breakpoints(prompt: list[Piece], automatic: Json | None) -> dict[int, str]:
    """Ttl by place of each marked piece; the automatic mark stands on the last piece that can carry one."""
    found = {}
    for place, piece in enumerate(prompt):
        for _, mark in piece.marks():
            found[place] = mark.get("ttl") or "5m"
    if automatic is not None:
        last = next((place for place in reversed(range(len(prompt))) if prompt[place].can_carry_mark()), None)
        if last is not None:
            found.setdefault(last, automatic.get("ttl") or "5m")
    return found


class PromptCache:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._next_sweep = 0.0

    def __len__(self) -> int:
        return len(self._entries)

    def use(self, prompt: CountedPrompt) -> InputTokens:
        """Read the longest cached prefix, write one at every breakpoint after it, and say what each cost."""
        now = self._clock()
        self._drop_expired(now)
        hit = self._longest_hit(prompt, now)
        read = 0 if hit is None else prompt.totals[hit]
        written = {"5m": 0, "1h": 0}
        known = read
        for place, ttl in sorted(prompt.breakpoints.items()):
            if prompt.totals[place] < MINIMUM_TOKENS:
                continue
            self._keep(prompt.digests[place], LIFETIMES[ttl], now)
            if prompt.totals[place] > known:
                written[ttl] += prompt.totals[place] - known
                known = prompt.totals[place]
        if hit is not None:
            self._keep(prompt.digests[hit], LIFETIMES["5m"], now)
        return InputTokens(prompt.tokens - known, read, written["5m"], written["1h"])

    def _longest_hit(self, prompt: CountedPrompt, now: float) -> int | None:
        for breakpoint_place in sorted(prompt.breakpoints, reverse=True):
            for place in range(breakpoint_place, max(breakpoint_place - LOOK_BACK, -1), -1):
                entry = self._entries.get(prompt.digests[place])
                if entry is not None and entry.expires_at > now:
                    return place
        return None

    def _keep(self, digest: bytes, lifetime: float, now: float) -> None:
        """Begin an entry's lifetime anew, or write it; one still there keeps the lifetime it was written with."""
        entry = self._entries.get(digest)
        if entry is None or entry.expires_at <= now:
            entry = self._entries[digest] = _Entry(lifetime, 0.0)
        entry.expires_at = now + entry.lifetime
        self._entries.move_to_end(digest)
        if len(self._entries) > CAPACITY:
            self._entries.popitem(last=False)

    def _drop_expired(self, now: float) -> None:
        """Once in a minute at most, so that no request pays for a walk over all entries."""
        if now < self._next_sweep:
            return
        self._next_sweep = now + 60.0
        for digest in [digest for digest, entry in self._entries.items() if entry.expires_at <= now]:
            del self._entries[digest]
