"""What a stranger needs to test a plugin. Public and kept stable.

The hooks of a plugin are called by ``ask`` and ``pass_answer``, ``pass_events``, which fail where it edits what it
may only read. ``running_gateway`` starts a real gateway with the plugin in its list. ``ScriptedUpstream`` is a real
upstream that answers as it is told, ``CheckingUpstream`` one that refuses what the Messages API refuses.
"""

from proxy.testing.checking import CheckingUpstream
from proxy.testing.kit import MODEL, PluginInList, ask, make_exchange, pass_answer, pass_events, running_gateway
from proxy.testing.scripted import (
    CUT,
    Received,
    Reply,
    ScriptedUpstream,
    message_reply,
    stream_reply,
    text_events,
)

__all__ = [
    "CUT",
    "MODEL",
    "CheckingUpstream",
    "PluginInList",
    "Received",
    "Reply",
    "ScriptedUpstream",
    "ask",
    "make_exchange",
    "message_reply",
    "pass_answer",
    "pass_events",
    "running_gateway",
    "stream_reply",
    "text_events",
]
