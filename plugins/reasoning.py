"""``reasoning_effort`` becomes an effort, and from low on a request for adaptive thinking.

Thinking is not requested where a tool call is forced: providers refuse the two together. The translation has put the
field among the ignored ones; here it is taken off again.
"""

from __future__ import annotations

from typing import ClassVar

from plugins.chat_completions.tables import EFFORTS, WITHOUT_THINKING
from proxy.errors import refused
from proxy.exchange import Exchange
from proxy.plugin import Plugin, Route, Sees

_FORCED = ("any", "tool")


class Reasoning(Plugin):
    """Sends reasoning_effort on as effort and adaptive thinking."""

    name: ClassVar[str] = "reasoning"
    opens_leaves: ClassVar[bool] = False
    routes: ClassVar[frozenset[Route]] = frozenset({Route.CHAT_COMPLETIONS})
    sees: ClassVar[Sees] = "messages"

    async def on_request(self, exchange: Exchange) -> None:
        """Add effort and thinking. Raises GatewayError for an effort that the model doesn't know."""
        asked = exchange.client_body.get("reasoning_effort")
        effort = EFFORTS.get(asked) if isinstance(asked, str) else None
        if effort is None:  # absent, or let through because field_refusal is off: then it stays named as ignored
            return
        levels = exchange.model.capabilities.effort
        if effort not in levels:
            known = f"knows only the efforts {', '.join(levels)}" if levels else "knows no effort"
            raise refused("reasoning_effort", f"this model {known}")
        body = exchange.change()
        body["output_config"] = {**(body.get("output_config") or {}), "effort": effort}
        forced = (body.get("tool_choice") or {}).get("type") in _FORCED
        if asked not in WITHOUT_THINKING and not forced:
            body["thinking"] = {"type": "adaptive"}
        exchange.ignored.discard("reasoning_effort")
