"""Which deployment a conversation goes to. Stateless, so that every process and machine chooses alike.

Rendezvous hashing: each deployment gets a score from the conversation's name and its own, and the highest wins; one
that comes or goes moves only the conversations that it wins or loses.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Any

from proxy.document import RequestDocument
from proxy.exchange import Exchange
from proxy.jsonbytes import items
from proxy.jsontext import decode, encode
from proxy.marks import MARK
from proxy.models import Deployment
from proxy.plugin import Route

_SYSTEM = ("system", "developer")


def by_preference(deployments: Iterable[Deployment], name: bytes) -> list[Deployment]:
    """The deployments in the order in which a conversation asks them: by priority, then by score."""
    return sorted(deployments, key=lambda each: (each.priority, -score(each, name)))


def score(deployment: Deployment, name: bytes) -> float:
    """The weighted score of a deployment for a conversation, above 0."""
    own = f"{deployment.upstream}\0{deployment.model}\0".encode()
    number = int.from_bytes(hashlib.blake2b(own + name, digest_size=7).digest(), "big")
    return deployment.weight / -math.log((number + 0.5) / 2**56)


def conversation_name(exchange: Exchange) -> bytes:
    """What a conversation is known by: the client's own name for it, else its organization, model, system messages
    before the first other one, and that one, as the client sent them but for cache marks, which move. A mark makes a
    block of a text, so a text counts as the block that it becomes."""
    organization = exchange.key.organization or exchange.key.id if exchange.key is not None else ""
    if exchange.session is not None:
        return encode([organization, exchange.session])
    document = exchange.client_document
    if exchange.route is Route.CHAT_COMPLETIONS or not isinstance(document, RequestDocument):
        beginning = _beginning_of_chat(exchange.client_body.get("messages"))
    else:
        beginning = _beginning_of_messages(document)
    digest = hashlib.blake2b(encode(_without_marks(beginning)), digest_size=16).hexdigest()
    return encode([organization, exchange.model.id, digest])


def _beginning_of_chat(messages: Any) -> list[Any]:
    beginning: list[Any] = []
    for message in messages if isinstance(messages, Sequence) else ():
        beginning.append(_in_blocks(message))
        if not (isinstance(message, dict) and message.get("role") in _SYSTEM):
            break
    return beginning


def _beginning_of_messages(document: RequestDocument) -> list[Any]:
    raw = document.unchanged or b""
    beginning = [_blocks(document.value("system"))]
    for member in document.members:
        if member.key == "messages":
            for at, end in items(raw, member.at):
                beginning.append(_in_blocks(decode(raw[at:end])))
                break
    return beginning


def _in_blocks(message: Any) -> Any:
    return {**message, "content": _blocks(message.get("content"))} if isinstance(message, dict) else message


def _blocks(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _without_marks(value: Any) -> Any:
    try:
        return _copy_without_marks(value)
    except RecursionError:  # a native request may be nested more deeply than that goes
        return value


def _copy_without_marks(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy_without_marks(item) for key, item in value.items() if key != MARK}
    return [_copy_without_marks(item) for item in value] if isinstance(value, list) else value
