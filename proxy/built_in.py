"""The upstreams that run with the gateway, under the words that stand for their base URLs.

One runs as long as any generation uses it: it outlives a reload.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Mapping

from proxy.demo import DemoUpstream
from proxy.local_llm import LocalLlm
from proxy.setting_types import DEMO, LOCAL_LLM

_CLASS_OF_WORD: Mapping[str, type[DemoUpstream | LocalLlm]] = {DEMO: DemoUpstream, LOCAL_LLM: LocalLlm}


class BuiltIn:
    """Those that run, with how many use them."""

    def __init__(self) -> None:
        self._running: dict[str, DemoUpstream | LocalLlm] = {}
        self._urls: dict[str, str] = {}
        self._users: Counter[str] = Counter()
        self._one_at_a_time = asyncio.Lock()

    async def take(self, base_urls: Collection[str]) -> Mapping[str, str]:
        """The real base URL for each of these that is a word; its upstream is started where it doesn't run.

        Whatever this raises, ``give_back`` is still to be called. Raises CannotStart.
        """
        self._users.update(base_urls)
        async with self._one_at_a_time:
            for word in base_urls:
                if word in _CLASS_OF_WORD and word not in self._urls:
                    upstream = self._running[word] = _CLASS_OF_WORD[word]()
                    self._urls[word] = await upstream.start()
            return dict(self._urls)

    async def give_back(self, base_urls: Collection[str]) -> None:
        """One user less; the last one ends an upstream."""
        self._users.subtract(base_urls)
        async with self._one_at_a_time:
            for word in [word for word in self._running if self._users[word] <= 0]:
                self._urls.pop(word, None)
                await self._running.pop(word).stop()
