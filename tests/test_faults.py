"""What an upstream's failure means for the client."""

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest

from proxy.errors import Kind
from proxy.jsontext import encode
from proxy.upstream.faults import (
    LONGEST_MESSAGE,
    MESSAGES,
    UpstreamFault,
    client_path,
    cut_off,
    fault_of_event,
    fault_of_status,
    no_messages_answer,
    retry_after,
    timed_out,
    unreachable,
)

SECRET = "upstream-secret"


def envelope(message: Any, type: Any = "some_error", **more: Any) -> bytes:
    return encode({"type": "error", "error": {"type": type, "message": message, **more}, "request_id": "theirs"})


def of_status(status: int, body: bytes = b"", **headers: str) -> UpstreamFault:
    return fault_of_status(status, body, {name.replace("_", "-"): value for name, value in headers.items()}, SECRET)


# status: the kind, whether the operator is alarmed, whether the client reads the provider's own words
STATUSES = {
    301: (Kind.INTERNAL, False, False),
    302: (Kind.INTERNAL, False, False),
    307: (Kind.INTERNAL, False, False),
    400: (Kind.INVALID_REQUEST, False, True),
    401: (Kind.INTERNAL, True, False),
    402: (Kind.INTERNAL, True, False),
    403: (Kind.INTERNAL, True, False),
    404: (Kind.INTERNAL, True, False),
    405: (Kind.INTERNAL, False, False),
    408: (Kind.TIMEOUT, False, True),
    409: (Kind.INTERNAL, False, False),
    413: (Kind.TOO_LARGE, False, True),
    418: (Kind.INTERNAL, False, False),
    422: (Kind.INVALID_REQUEST, False, True),
    429: (Kind.RATE_LIMIT, False, True),
    451: (Kind.INTERNAL, False, False),
    500: (Kind.INTERNAL, False, False),
    501: (Kind.INTERNAL, False, False),
    502: (Kind.INTERNAL, False, False),
    503: (Kind.OVERLOADED, False, True),
    504: (Kind.TIMEOUT, False, True),
    520: (Kind.INTERNAL, False, False),
    529: (Kind.OVERLOADED, False, True),
}


@pytest.mark.parametrize(("status", "expected"), STATUSES.items(), ids=map(str, STATUSES))
def test_a_status(status: int, expected: tuple[Kind, bool, bool]) -> None:
    """A status becomes the kind of the table; words about the gateway's own account are kept from the client."""
    fault = of_status(status, envelope("their words"))

    assert expected == (fault.kind, fault.alarm, fault.message == "their words")
    assert expected[2] == (fault.provider is not None)
    assert fault.message == ("their words" if expected[2] else MESSAGES[fault.kind])
    assert f"status {status}" == fault.cause


NO_ENVELOPES = {
    "nothing": b"",
    "HTML": b"<html><body>502 Bad Gateway</body></html>",
    "a text": b"upstream connect error",
    "a JSON text": b'"their words"',
    "a list": b'["their words"]',
    "null": b"null",
    "no error in it": b'{"detail":"their words"}',
    "an error that is null": b'{"error":null}',
    "an error that is a list": b'{"error":["their words"]}',
    "an error without a message": b'{"error":{"type":"overloaded_error"}}',
    "an empty message": b'{"error":{"message":""}}',
    "a message that is null": b'{"error":{"message":null}}',
    "a message that is an object": b'{"error":{"message":{"a":1}}}',
    "cut off": b'{"error":{"message":"their wor',
    "no UTF-8": b'{"error":{"message":"\xff"}}',
    "very deep": b'{"error":' + b"[" * 100_000,
}


@pytest.mark.parametrize("status", [400, 413, 429, 500, 503, 504, 529])
@pytest.mark.parametrize("body", NO_ENVELOPES.values(), ids=NO_ENVELOPES)
def test_a_body_that_is_no_envelope(body: bytes, status: int) -> None:
    """Where the provider says nothing readable, the kind's own words are told, and nothing of the body."""
    fault = of_status(status, body)

    assert (MESSAGES[fault.kind], None) == (fault.message, fault.provider)


ENVELOPES: dict[str, tuple[bytes, dict[str, Any]]] = {
    "Anthropic's": (
        envelope("max_tokens: too large", "invalid_request_error"),
        {"type": "invalid_request_error", "message": "max_tokens: too large"},
    ),
    "with details": (
        envelope("no", "invalid_request_error", details={"path": [1.10]}),
        {"type": "invalid_request_error", "message": "no", "details": {"path": [1.10]}},
    ),
    "with a code": (
        b'{"error":{"code":400,"message":"no","type":"invalid_request_error"}}',
        {"code": 400, "message": "no", "type": "invalid_request_error"},
    ),
    "OpenAI's": (
        b'{"error":{"message":"no","type":"invalid_request_error","param":null,"code":null}}',
        {"message": "no", "type": "invalid_request_error", "param": None, "code": None},
    ),
    "a text alone": (b'{"error":"no"}', {"message": "no"}),
    "a lone surrogate": (b'{"error":{"message":"\\ud800"}}', {"message": "\ufffd"}),
}


@pytest.mark.parametrize(("body", "expected"), ENVELOPES.values(), ids=ENVELOPES)
def test_the_words_of_any_envelope(body: bytes, expected: dict[str, Any]) -> None:
    """A 400 is told in the provider's own words, whatever server it is, and its error object is kept whole."""
    fault = of_status(400, body)

    assert (expected["message"], expected) == (fault.message, fault.provider)


ACCOUNT = {
    "credit": "Your credit balance is too low to access the Anthropic API.",
    "spend limit": "You have reached your specified API spend limit",
    "usage limit": "You have reached your specified API usage limits.",
    "capitals": "CREDIT BALANCE too low",
}


@pytest.mark.parametrize("message", ACCOUNT.values(), ids=ACCOUNT)
def test_a_400_about_the_account(message: str) -> None:
    """What is about the gateway's own account alarms the operator, and the client is not told of it."""
    fault = of_status(400, envelope(message, "invalid_request_error"))

    expected = (Kind.INTERNAL, True, MESSAGES[Kind.INTERNAL], None)
    assert expected == (fault.kind, fault.alarm, fault.message, fault.provider)


def test_a_message_is_cut_at_its_longest() -> None:
    """No provider fills a client's error with megabytes."""
    fault = of_status(400, envelope("x" * (LONGEST_MESSAGE + 1)))

    assert "x" * LONGEST_MESSAGE + "…" == fault.message
    assert {"type": "some_error", "message": fault.message} == fault.provider
    assert "x" * LONGEST_MESSAGE == of_status(400, envelope("x" * LONGEST_MESSAGE)).message


REDACTED = {
    "in the message": (SECRET, envelope(f"bad key {SECRET}.")),
    "twice": (SECRET, envelope(f"{SECRET}{SECRET}")),
    "in a detail": (SECRET, envelope("no", details={"key": [SECRET]})),
    "as a key": (SECRET, envelope("no", **{SECRET: 1})),
    "in the type": (SECRET, envelope("no", SECRET)),
    "as the error": (SECRET, encode({"error": f"bad key {SECRET}"})),
    "with escaped slashes": ("up/stream/secret", rb'{"error":{"message":"bad key up\/stream\/secret"}}'),
    "with escaped letters": (SECRET, rb'{"error":{"message":"bad key \u0075pstream-secret"}}'),
}


@pytest.mark.parametrize(("secret", "body"), REDACTED.values(), ids=REDACTED)
def test_the_upstreams_key_is_redacted(secret: str, body: bytes) -> None:
    """The upstream's key reaches no client, wherever and however a provider quotes it."""
    for fault in (fault_of_status(400, body, {}, secret), fault_of_event(body, secret)):
        told = encode({"message": fault.message, "provider": fault.provider, "cause": fault.cause}).decode()
        assert secret not in told.replace(r"\/", "/")


def test_without_a_key_nothing_is_redacted() -> None:
    """An upstream without a key has nothing to hide."""
    assert "their words" == fault_of_status(400, envelope("their words"), {}, None).message


WAITS = {
    "a number": ("7", 7),
    "a fraction": ("1.2", 2),
    "spaces": (" 7 ", 7),
    "0": ("0", 1),
    "negative": ("-5", 1),
    "huge": ("86400", 60),
    "beyond all numbers": ("9" * 400, 60),
    "an exponent": ("1e400", 60),
    "inf": ("inf", 60),
    "-inf": ("-inf", 2),
    "nan": ("nan", 2),
    "nothing in it": ("", 2),
    "a word": ("soon", 2),
    "a date long ago": ("Wed, 21 Oct 2015 07:28:00 GMT", 1),
    "a date far away": ("Fri, 31 Dec 9999 23:59:59 GMT", 60),
    "a date far away without a zone": ("Fri, 31 Dec 2999 23:59:59 -0000", 60),
    "a year beyond all dates": ("Fri, 31 Dec 99999 23:59:59 GMT", 2),
    "a year beyond all numbers": ("Fri, 31 Dec 99999999999999999999 23:59:59 GMT", 2),
    "no date": ("Fri, 99 Dec 2026 23:59:59 GMT", 2),
    "half a date": ("Fri, 31 Dec", 2),
}


@pytest.mark.parametrize(("value", "expected"), WAITS.values(), ids=WAITS)
def test_retry_after(value: str, expected: int) -> None:
    """The wait is in whole seconds, 1 to 60, whatever stands in the header."""
    assert expected == retry_after(value)


@pytest.mark.parametrize(("seconds", "least", "most"), [(30, 28, 30), (0.4, 1, 1), (600, 60, 60)])
def test_retry_after_a_date(seconds: float, least: int, most: int) -> None:
    """A date is the time until then."""
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=seconds), usegmt=True)

    assert least <= retry_after(date) <= most


@pytest.mark.parametrize(("status", "expected"), {429: 7, 503: 7, 529: 7, 400: None, 500: None, 504: None}.items())
def test_only_who_waits_is_told_how_long(status: int, expected: int | None) -> None:
    """retry-after survives where waiting helps."""
    assert expected == of_status(status, retry_after="7").retry_after
    assert of_status(status).retry_after is None


FINAL = {400: True, 413: True, 422: True, 401: False, 404: False, 408: False, 429: False, 500: False, 529: False}


@pytest.mark.parametrize(("status", "expected"), FINAL.items())
def test_what_is_final(status: int, expected: bool) -> None:
    """Only what is about the request itself is final; with all else another deployment may be luckier."""
    assert expected == of_status(status, envelope("no")).is_final


def test_a_400_about_the_account_is_not_final() -> None:
    """Another deployment may have an account with credit."""
    assert not of_status(400, envelope("Your credit balance is too low")).is_final


PATHS = {
    "a field": ("max_tokens: must be less", "max_tokens"),
    "a path": ("messages.0.content.1.image.source.base64: invalid", "messages.0.content.1.image.source.base64"),
    "with capitals": ("tools.0.input_schema.properties.aB: invalid", "tools.0.input_schema.properties.aB"),
    "words": ("prompt is too long: 7 tokens", None),
    "a word with a colon": ("Error: no", None),
    "a path that isn't the beginning": ("in messages.0: no", None),
    "nothing": ("", None),
}


@pytest.mark.parametrize(("message", "expected"), PATHS.values(), ids=PATHS)
def test_the_path_that_a_message_begins_with(message: str, expected: str | None) -> None:
    """A provider's message that begins with a path is about that field."""
    assert (expected and f"theirs {expected}") == client_path(message, lambda path: f"theirs {path}")
    assert client_path(message, lambda path: None) is None


# type: the kind, whether the operator is alarmed, whether the client reads the provider's own words
TYPES: dict[Any, tuple[Kind, bool, bool]] = {
    "invalid_request_error": (Kind.INVALID_REQUEST, False, True),
    "request_too_large": (Kind.TOO_LARGE, False, True),
    "rate_limit_error": (Kind.RATE_LIMIT, False, True),
    "overloaded_error": (Kind.OVERLOADED, False, True),
    "timeout_error": (Kind.TIMEOUT, False, True),
    "authentication_error": (Kind.INTERNAL, True, False),
    "billing_error": (Kind.INTERNAL, True, False),
    "permission_error": (Kind.INTERNAL, True, False),
    "not_found_error": (Kind.INTERNAL, True, False),
    "api_error": (Kind.INTERNAL, False, False),
    "of_tomorrow": (Kind.INTERNAL, False, False),
    None: (Kind.INTERNAL, False, False),
    7: (Kind.INTERNAL, False, False),
}


@pytest.mark.parametrize(("type", "expected"), TYPES.items(), ids=map(str, TYPES))
def test_an_error_event(type: Any, expected: tuple[Kind, bool, bool]) -> None:
    """An error event counts as the status of its type."""
    fault = fault_of_event(envelope("their words", type), SECRET)

    assert expected == (fault.kind, fault.alarm, fault.message == "their words")
    assert ({"type": type, "message": "their words"} if not expected[1] else None) == fault.provider


@pytest.mark.parametrize("raw", NO_ENVELOPES.values(), ids=NO_ENVELOPES)
def test_an_error_event_that_says_nothing(raw: bytes) -> None:
    """An error event is an error though nothing in it can be read."""
    fault = fault_of_event(raw, SECRET)

    assert MESSAGES[fault.kind] == fault.message


OWN = {
    "unreachable": (unreachable("ClientOSError"), Kind.INTERNAL, MESSAGES[Kind.INTERNAL]),
    "timed out": (timed_out("silence"), Kind.TIMEOUT, MESSAGES[Kind.TIMEOUT]),
    "timed out, with advice": (timed_out("silence", "ask for a stream"), Kind.TIMEOUT, "ask for a stream"),
    "no answer": (no_messages_answer("HTML"), Kind.INTERNAL, "the provider's answer can't be read"),
    "cut off": (cut_off("reset"), Kind.INTERNAL, "the provider's answer broke off"),
}


@pytest.mark.parametrize(("fault", "kind", "message"), OWN.values(), ids=OWN)
def test_faults_of_the_connection(fault: UpstreamFault, kind: Kind, message: str) -> None:
    """What broke is for the log; the client reads plain words, and no overload is claimed."""
    assert (kind, message, False, None) == (fault.kind, fault.message, fault.alarm, fault.retry_after)
    assert fault.cause not in fault.message
