"""The upstreams that run with the gateway, under the words that stand for their base URLs. They outlive a reload."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

from proxy.demo import DemoUpstream
from proxy.local_llm import LocalLlm
from proxy.setting_types import DEMO, LOCAL_LLM

_CLASS_OF_WORD: Mapping[str, type[DemoUpstream | LocalLlm]] = {DEMO: DemoUpstream, LOCAL_LLM: LocalLlm}


class BuiltIn:
    """Those that run."""

    def __init__(self) -> None:
        self._running: dict[str, DemoUpstream | LocalLlm] = {}
        self._urls: dict[str, str] = {}

    async def urls(self, words: Iterable[str]) -> Mapping[str, str]:
        """The real base URL of each word that stands for a built-in upstream, which is started where it doesn't run.

        Raises CannotStart.
        """
        for word in words:
            if word in _CLASS_OF_WORD and word not in self._urls:
                upstream = self._running[word] = _CLASS_OF_WORD[word]()
                self._urls[word] = await upstream.start()
        return self._urls

    async def keep(self, words: Set[str]) -> None:
        """Stop those that nobody uses any more."""
        for word in self._running.keys() - words:
            self._urls.pop(word, None)
            await self._running.pop(word).stop()
