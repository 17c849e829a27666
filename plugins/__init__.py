"""The bundled plugins, in the recommended order."""

from __future__ import annotations

from plugins.auth import Auth
from plugins.cache_breakpoints import CacheBreakpoints
from plugins.chat_completions import ChatCompletions
from plugins.field_refusal import FieldRefusal
from plugins.image_fetcher import ImageFetcher
from plugins.rate_limit import RateLimit
from plugins.reasoning import Reasoning
from plugins.sampling import Sampling
from plugins.usage import Usage
from proxy.plugin import Plugin

BUNDLED: dict[str, type[Plugin]] = {
    plugin.name: plugin
    for plugin in (
        Auth,
        RateLimit,
        Usage,
        FieldRefusal,
        ChatCompletions,
        ImageFetcher,
        CacheBreakpoints,
        Reasoning,
        Sampling,
    )
}
