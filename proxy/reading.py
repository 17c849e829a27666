"""Reading a request: its body within limits of size and time, the fields that decide, the model's name."""

from __future__ import annotations

import re

from aiohttp import web

from proxy.bounded import bounded
from proxy.document import RequestDocument
from proxy.errors import GatewayError, Kind, refused
from proxy.exchange import Exchange
from proxy.jsonbytes import top_level
from proxy.jsontext import Float, JsonError, deeper_than
from proxy.plugin import Route

MOST_BYTES = 32 * 2**20
DEEPEST = 200
LONGEST_MODEL_NAME = 128
_EMPTY_LIST = re.compile(rb"\[[ \t\r\n]*\]")
DECISIVE = ("model", "max_tokens", "messages", "stream")
"""Fields that may stand only once: the gateway would judge one of the two, the upstream read the other."""


def check_headers(request: web.BaseRequest) -> None:
    """What the headers alone tell about the body. Raises GatewayError."""
    encodings = ",".join(request.headers.getall("content-encoding", ())).lower().split(",")
    if any(each.strip() not in ("identity", "") for each in encodings):
        raise refused("content-encoding", "compressed requests are not accepted; send the body as it is")
    if request.content_length is not None and request.content_length > MOST_BYTES:
        raise too_large()


def too_large() -> GatewayError:
    """The refusal of a body over the limit."""
    return GatewayError(Kind.TOO_LARGE, f"the request is larger than {MOST_BYTES // 2**20} MB")


async def read_body(request: web.BaseRequest, seconds: float) -> bytes:
    """The whole body. Raises GatewayError for one that is too large, too slow or broken."""
    if request.headers.get("expect", "").lower() == "100-continue" and request.version >= (1, 1):
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0
    try:
        return await bounded(request.read(), seconds)
    except web.HTTPRequestEntityTooLarge:
        raise too_large() from None
    except TimeoutError:
        raise GatewayError(Kind.INVALID_REQUEST, f"the body did not arrive within {seconds:g} seconds") from None
    except (web.RequestPayloadError, web.HTTPException, ValueError):
        raise GatewayError(Kind.INVALID_REQUEST, "the body could not be read") from None


def parse(raw: bytes, route: Route) -> RequestDocument:
    """The body as a document that is known to be a JSON object. Raises GatewayError."""
    if not raw.strip():
        raise GatewayError(Kind.INVALID_REQUEST, "the body is empty; a JSON object is expected")
    if not raw.lstrip(b" \t\r\n").startswith(b"{"):
        raise GatewayError(Kind.INVALID_REQUEST, "the body must be a JSON object")
    try:
        document = RequestDocument(raw, top_level(raw))
        if route is Route.CHAT_COMPLETIONS and deeper_than(document.data, DEEPEST):
            raise JsonError(f"is nested more than {DEEPEST} levels deep")
    except JsonError as error:
        raise GatewayError(Kind.INVALID_REQUEST, f"the body is not valid JSON: {error}") from None
    keys = [member.key for member in document.members]
    for name in DECISIVE:
        if keys.count(name) > 1:
            raise refused(name, "stands more than once")
    return document


def model_name(document: RequestDocument) -> str:
    """The name of the model as it was sent. Raises GatewayError."""
    name = document.value("model")
    if name is None:
        raise refused("model", "is required")
    if not isinstance(name, str):
        raise refused("model", "must be a string")
    if not 1 <= len(name.strip()) <= LONGEST_MODEL_NAME or len(name) > 2 * LONGEST_MODEL_NAME:
        raise refused("model", f"must have 1 to {LONGEST_MODEL_NAME} characters")
    return name


def check_messages_request(exchange: Exchange, document: RequestDocument) -> None:
    """What is checked of a body in Messages format; all else is the provider's to judge. Raises GatewayError."""
    keys = {member.key for member in document.members}
    if exchange.route is Route.MESSAGES:
        _check_max_tokens(document, keys)
    if "messages" not in keys:
        raise refused("messages", "is required")
    messages = next(member for member in document.members if member.key == "messages")
    raw = document.unchanged or b""
    if not raw.startswith(b"[", messages.at):
        raise refused("messages", "must be a list")
    if _EMPTY_LIST.match(raw, messages.at):
        raise refused("messages", "must not be empty")
    if exchange.route is Route.MESSAGES and "stream" in keys and type(document.value("stream")) is not bool:
        raise refused("stream", "must be true or false")


def _check_max_tokens(document: RequestDocument, keys: set[str]) -> None:
    if "max_tokens" not in keys:
        raise refused("max_tokens", "is required")
    try:
        value = document.value("max_tokens")
    except JsonError:
        value = None
    whole = type(value) is int or (type(value) is Float and value.is_integer())
    if not whole or value < 1:
        raise refused("max_tokens", "must be an integer of at least 1")
