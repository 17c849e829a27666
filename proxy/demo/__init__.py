"""The embedded demo upstream: a server that speaks the Messages format with no model behind it.

It answers by rule and not by chance, so that a first request, a failure, a tool call or a cached prompt can be tried
without a provider's key, and the same request gives the same answer again. `prompt.py` reads a request, `checks.py` and
`content_checks.py` refuse it, `prompt_cache.py` counts what is cached, `answers.py` and `tool_calls.py` compose the
answer, `stream.py` makes events of it, `faults.py` breaks it, `server.py` serves it.
"""

from proxy.demo.server import DemoUpstream

__all__ = ["DemoUpstream"]
