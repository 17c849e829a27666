"""The operator's listener, judged from outside: who may ask it, what it answers, and that it disturbs no request."""

from __future__ import annotations

import asyncio
import hashlib
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import hdrs
from yarl import URL

from proxy.testing import ScriptedUpstream
from tests.admin_listener import AdminListener, admin_of, tokens_in
from tests.process import GatewayProcess, eventually, run, started_gateway, written_config
from tests.store.gateways import KEY, PATHS, body, configured

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

UPSTREAM_KEY = "upstream-secret"
WRONG = "ezat_admin_wrong-0123456789abcdefghijklmnopqrstuvwxyz"
PROTECTED = {"GET /metrics": ("GET", "/metrics"), "POST /plan": ("POST", "/plan")}
PATIENCE = 15.0
UNDISTURBED = 2.0
"""Seconds that a request may take at the most while others busy the admin listener, on a busy machine."""


def config_for(upstream: ScriptedUpstream, **admin: Any) -> dict[str, Any]:
    config = configured("sqlite://", upstream.url, server={"admin": {"port": 0, **admin}, "shutdown_timeout": 1})
    return {name: value for name, value in config.items() if name != "store"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def upstream() -> AsyncIterator[ScriptedUpstream]:
    async with ScriptedUpstream() as started:
        yield started


@pytest.fixture(scope="module")
def gateway(upstream: ScriptedUpstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    with started_gateway(config_for(upstream), tmp_path_factory.mktemp("gateway")) as running:
        yield running


@pytest.fixture
def admin(gateway: GatewayProcess) -> AdminListener:
    return admin_of(gateway)


class Told(NamedTuple):
    """An answer, read to its end."""

    status: int
    headers: dict[str, str]
    text: str
    json: Any


async def told(method: str, url: str, **more: Any) -> Told:
    timeout = aiohttp.ClientTimeout(total=PATIENCE)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.request(method, URL(url, encoded=True), **more) as answer,
    ):
        headers = {name.lower(): value for name, value in answer.headers.items()}
        text = await answer.text()
        return Told(answer.status, headers, text, await answer.json() if "json" in headers["content-type"] else None)


# Who may ask


REFUSED: dict[str, dict[str, str]] = {
    "no token": {},
    "a wrong token": {"authorization": f"Bearer {WRONG}"},
    "a client's key": {"authorization": f"Bearer {KEY}"},
    "a client's key, as clients may send it": {"x-api-key": KEY},
    "an upstream's key": {"authorization": f"Bearer {UPSTREAM_KEY}"},
    "another scheme": {"authorization": "Basic TOKEN"},
    "no scheme": {"authorization": "TOKEN"},
    "another header": {"x-api-key": "TOKEN"},
    "a cookie": {"cookie": "token=TOKEN; authorization=Bearer TOKEN"},
    "the beginning of the token": {"authorization": "Bearer ezat_admin_"},
    "more than the token": {"authorization": "Bearer TOKENx"},
    "an empty token": {"authorization": "Bearer "},
    "what is no text": {"authorization": "Bearer \xe4\xff"},
}


@pytest.mark.parametrize(("method", "path"), PROTECTED.values(), ids=PROTECTED)
@pytest.mark.parametrize("headers", REFUSED.values(), ids=REFUSED)
async def test_nobody_without_the_token_is_told_anything(
    admin: AdminListener, headers: dict[str, str], method: str, path: str
) -> None:
    """Only the token, as a bearer token in its header, opens the listener; all else is a 401 in JSON."""
    sent = {name: value.replace("TOKEN", admin.token) for name, value in headers.items()}

    answer = await told(method, admin.url + path, headers=sent)

    assert (401, "Bearer") == (answer.status, answer.headers["www-authenticate"])
    assert ("error", "authentication_error") == (answer.json["type"], answer.json["error"]["type"])
    assert "ezat_requests" not in answer.text


@pytest.mark.parametrize(("method", "path"), PROTECTED.values(), ids=PROTECTED)
async def test_a_token_in_the_address_opens_nothing(admin: AdminListener, method: str, path: str) -> None:
    """Addresses are written into logs everywhere, so the token is not read from there."""
    query = f"?token={admin.token}&access_token={admin.token}&authorization=Bearer%20{admin.token}"

    answer = await told(method, f"{admin.url}{path}{query}")

    assert 401 == answer.status


async def test_the_token_opens_the_listener(admin: AdminListener) -> None:
    """Whoever has it gets the metrics as Prometheus reads them, and the plan, in whatever case the scheme."""
    metrics = await told("GET", f"{admin.url}/metrics", headers=admin.headers)
    in_lower_case = await told("GET", f"{admin.url}/metrics", headers={"authorization": f"bearer {admin.token}"})
    plan = await told("POST", f"{admin.url}/plan", headers=admin.headers)

    assert (200, "text/plain; version=0.0.4; charset=utf-8") == (metrics.status, metrics.headers["content-type"])
    assert "\nezat_store_ready 1.0\n" in metrics.text
    assert 200 == in_lower_case.status
    assert (200, {"refused": None, "changes": []}) == (plan.status, plan.json)


async def test_health_needs_no_token_and_tells_nothing(admin: AdminListener) -> None:
    """Whoever looks whether it runs learns that alone."""
    answer = await told("GET", f"{admin.url}/healthz")

    assert (200, {"status": "ok"}) == (answer.status, answer.json)


# The token


async def test_the_token_is_shown_once(upstream: ScriptedUpstream, tmp_path: Path) -> None:
    """The first start on a store makes a token and prints it; a second start prints none, and takes the same."""
    with started_gateway(config_for(upstream), tmp_path) as first:
        shown = tokens_in(first.written)
        log = first._log()
    with started_gateway(config_for(upstream), tmp_path) as second:
        again = tokens_in(second.written)
        figures = await admin_of(second, shown[0]).figures()

    assert (1, 0) == (len(shown), len(again))
    assert figures
    assert len(shown[0]) >= 43 + len("ezat_admin_"), "256 bits"
    assert shown[0] not in log


async def test_a_start_that_fails_makes_no_token(upstream: ScriptedUpstream, tmp_path: Path) -> None:
    """A token that nobody was shown would be lost: the first start that comes to its end makes it."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = config_for(upstream)
        config["server"]["port"] = taken.getsockname()[1]
        ended = await run("--config", str(written_config(config, tmp_path)))
    with started_gateway(config_for(upstream), tmp_path) as gateway:
        shown = tokens_in(gateway.written)

    assert (1, []) == (ended.code, tokens_in(ended.output))
    assert 1 == len(shown)


async def test_a_token_of_the_configuration_is_the_token(upstream: ScriptedUpstream, tmp_path: Path) -> None:
    """One that is set counts alone, is printed nowhere, and none is made."""
    own = "a-token-of-the-operator"
    with started_gateway(config_for(upstream, token=own), tmp_path) as gateway:
        figures = await admin_of(gateway, own).figures()
        written = gateway.written

    assert figures
    assert [] == tokens_in(written)
    assert own not in written
    assert own not in gateway.stored


async def test_without_an_admin_listener(upstream: ScriptedUpstream, tmp_path: Path) -> None:
    """Switched off, it listens nowhere, and no token is made; a taken port is nobody's concern."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with started_gateway(config_for(upstream, enabled=False, port=port), tmp_path) as gateway:
            written = gateway.written

    assert "For the operator" not in written
    assert [] == tokens_in(written)


# What is where


@pytest.mark.parametrize("path", ["/metrics", "/plan", "/metrics/", "/v1/metrics", "/admin", "/openai/v1/metrics"])
@pytest.mark.parametrize("method", ["GET", "POST", "HEAD"])
async def test_the_public_listener_has_nothing_for_the_operator(
    gateway: GatewayProcess, admin: AdminListener, method: str, path: str
) -> None:
    """A23: whoever asks the public port for it, with whatever token, learns that there is nothing."""
    with_token = await told(method, gateway.url + path, headers=admin.headers)
    with_key = await told(method, gateway.url + path, headers={"x-api-key": KEY})

    assert (404, 404) == (with_token.status, with_key.status)
    assert "ezat_requests" not in with_token.text


PUBLIC = ["/", "/readyz", "/v1/messages", "/openai/v1/chat/completions", "/v1/models", "/api/models", "/openapi.yaml"]
ODD = [
    "/metrics/",
    "/Metrics",
    "/%6detrics",
    "//metrics",
    "/metrics/..",
    "/healthz/../metrics",
    "/metrics;a=b",
    "/plan/",
]


@pytest.mark.parametrize("path", [*PUBLIC, *ODD])
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_the_admin_listener_has_nothing_for_clients(admin: AdminListener, method: str, path: str) -> None:
    """It has its three paths, written as they are, and no others."""
    answer = await told(method, admin.url + path, headers=admin.headers)

    assert (404, "not_found_error") == (answer.status, answer.json["error"]["type"])


METHODS = [
    *(("/metrics", method, "GET, HEAD") for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH")),
    *(("/plan", method, "POST") for method in ("GET", "PUT", "DELETE", "OPTIONS")),
    *(("/healthz", method, "GET, HEAD") for method in ("POST", "DELETE")),
]


@pytest.mark.parametrize(("path", "method", "allowed"), METHODS)
async def test_another_method_is_a_405(admin: AdminListener, path: str, method: str, allowed: str) -> None:
    """What a path does not take is refused with what it takes."""
    answer = await told(method, admin.url + path, headers=admin.headers)

    assert (405, allowed) == (answer.status, answer.headers["allow"])
    assert "invalid_request_error" == answer.json["error"]["type"]


async def test_a_head_is_a_get_without_its_body(admin: AdminListener) -> None:
    """Whoever only looks whether it is there transfers nothing."""
    answer = await told("HEAD", f"{admin.url}/metrics", headers=admin.headers)

    assert (200, "") == (answer.status, answer.text)


# Odd requests


async def exchanged(url: str, sent: bytes) -> bytes:
    """All that comes back until the listener closes the connection."""
    where = URL(url)
    reader, writer = await asyncio.open_connection(where.host, where.port)
    received = b""
    with suppress(ConnectionResetError, BrokenPipeError):
        writer.write(sent)
        async with asyncio.timeout(PATIENCE):
            while data := await reader.read(2**16):
                received += data
    writer.close()
    return received


MALFORMED = {
    "no HTTP": b"hello\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 100,
    "an unknown method": b"FROBNICATE /metrics HTTP/1.1\r\nhost: a\r\n\r\n",
    "a header without a name": b"GET /metrics HTTP/1.1\r\nhost: a\r\n: x\r\n\r\n",
    "a huge header": b"GET /metrics HTTP/1.1\r\nhost: a\r\nx: " + b"a" * 100_000 + b"\r\n\r\n",
    "two lengths": b"POST /plan HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab",
}


@pytest.mark.parametrize("sent", MALFORMED.values(), ids=MALFORMED)
async def test_what_is_no_http_is_answered_and_forgotten(
    gateway: GatewayProcess, admin: AdminListener, sent: bytes
) -> None:
    """It is refused in JSON, and neither quoted nor a reason to end."""
    received = await exchanged(admin.url, sent.replace(b"host: a", b"host: a\r\nx-quoted: canary-of-a-header"))

    assert received.startswith((b"HTTP/1.0 400", b"HTTP/1.1 400"))
    assert b'"invalid_request_error"' in received
    assert b"canary" not in received
    assert "canary-of-a-header" not in gateway.written
    assert "ezat_store_ready" in await admin.text()


OLD = {
    "HTTP/1.0": "GET /metrics HTTP/1.0\r\nauthorization: Bearer {}\r\n\r\n",
    "the address in absolute form": "GET http://elsewhere/metrics HTTP/1.1\r\nhost: elsewhere\r\n"
    "authorization: Bearer {}\r\nconnection: close\r\n\r\n",
}


@pytest.mark.parametrize("sent", OLD.values(), ids=OLD)
async def test_odd_but_right_http_is_served(admin: AdminListener, sent: str) -> None:
    """What a proxy or an old client writes is understood."""
    received = await exchanged(admin.url, sent.format(admin.token).encode())

    assert b" 200 " in received.partition(b"\r\n")[0] + b" "
    assert b"\nezat_store_ready 1.0\n" in received


@pytest.mark.parametrize("target", ["OPTIONS * HTTP/1.1", "CONNECT metrics:80 HTTP/1.1"])
async def test_what_asks_for_no_path_gets_a_404(admin: AdminListener, target: str) -> None:
    """A request for the server as a whole, or for another one, finds nothing here."""
    received = await exchanged(admin.url, f"{target}\r\nhost: a\r\nconnection: close\r\n\r\n".encode())

    assert received.startswith((b"HTTP/1.1 404", b"HTTP/1.1 400"))
    assert b'"error"' in received


async def test_a_body_that_is_too_large_is_refused(admin: AdminListener) -> None:
    """Nothing here needs a large body, so none is taken, with or without the token."""
    stranger = await told("POST", f"{admin.url}/plan", data=b"x" * 2**20)
    operator = await told("POST", f"{admin.url}/plan", headers=admin.headers, data=b"x" * 2**20)

    assert (401, 413) == (stranger.status, operator.status)
    assert "request_too_large" == operator.json["error"]["type"]


# Requests go on


async def slowest_request(gateway: GatewayProcess, number: int) -> float:
    """The seconds that the slowest of so many requests took, one after the other; all of them succeed."""
    slowest = 0.0
    async with aiohttp.ClientSession() as session:
        for _ in range(number):
            began = time.monotonic()
            async with session.post(gateway.url + PATHS["messages"], json=body(), headers={"x-api-key": KEY}) as answer:
                assert 200 == answer.status
                await answer.read()
            slowest = max(slowest, time.monotonic() - began)
    return slowest


async def test_a_hundred_scrapes_at_once_disturb_no_request(gateway: GatewayProcess, admin: AdminListener) -> None:
    """P18: scrapers that all come at once are all served, and requests as if they weren't there."""
    scraping = [asyncio.create_task(admin.text()) for _ in range(100)]

    slowest = await slowest_request(gateway, 20)
    texts = await asyncio.gather(*scraping)

    assert slowest < UNDISTURBED
    assert all("ezat_store_ready 1.0" in text for text in texts)


@contextmanager
def scrapers_that_never_read(admin: AdminListener, number: int) -> Iterator[None]:
    """Each asks a thousand times over one connection, and takes none of the answers."""
    where = URL(admin.url)
    request = f"GET /metrics HTTP/1.1\r\nhost: a\r\n{hdrs.AUTHORIZATION}: Bearer {admin.token}\r\n\r\n".encode()
    stuck = []
    try:
        for _ in range(number):
            one = socket.socket()
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            one.connect((where.host, where.port))
            one.setblocking(False)
            stuck.append(one)
            with suppress(BlockingIOError):
                one.send(request * 1000)
        yield
    finally:
        for one in stuck:
            one.close()


def resident_bytes(gateway: GatewayProcess) -> int:
    return int(Path(f"/proc/{gateway._process.pid}/statm").read_text().split()[1]) * 4096


async def test_scrapers_that_never_read_disturb_no_request(gateway: GatewayProcess, admin: AdminListener) -> None:
    """P18: who asks and doesn't take the answers fills no memory, and stands in nobody's way."""
    await admin.text()
    before = resident_bytes(gateway)
    with scrapers_that_never_read(admin, 20):
        slowest = await slowest_request(gateway, 20)
        other = await asyncio.wait_for(admin.text(), UNDISTURBED)
        grown = resident_bytes(gateway) - before

    assert slowest < UNDISTURBED
    assert "ezat_store_ready 1.0" in other
    assert grown < 20 * 2**20


# The start


async def test_a_taken_admin_port_is_one_clear_sentence(upstream: ScriptedUpstream, tmp_path: Path) -> None:
    """P22: where it can't listen, the start is refused with the address and the setting, and nothing is served."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = await run("--config", str(written_config(config_for(upstream, port=port), tmp_path)))

    assert 1 == ended.code
    [sentence] = ended.errors.splitlines()
    assert sentence.startswith(f"the gateway can't start: can't listen on 127.0.0.1:{port}, server.admin.port: ")
    assert "EZAT Router listens" not in ended.output


@pytest.mark.skipif(not socket.has_ipv6, reason="this system has no IPv6")
async def test_it_listens_on_ipv6(upstream: ScriptedUpstream, tmp_path: Path) -> None:
    """An IPv6 address works, and stands in brackets where it is printed."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("IPv6 is off here")
    with started_gateway(config_for(upstream, host="::1"), tmp_path) as gateway:
        admin = admin_of(gateway)
        text = await admin.text()

    assert admin.url.startswith("http://[::1]:")
    assert "ezat_store_ready 1.0" in text


async def test_the_token_is_never_in_the_log(gateway: GatewayProcess, admin: AdminListener) -> None:
    """After all of the above the log holds neither the token, nor what was sent in its place."""
    await eventually(lambda: gateway.log_lines)
    log = gateway._log()

    assert "request" in {line["event"] for line in gateway.log_lines}
    for secret in (admin.token, WRONG, KEY, UPSTREAM_KEY):
        assert secret not in log
    assert 1 == gateway.written.count(admin.token)


async def test_a_new_token_ends_the_old_one(gateway: GatewayProcess, admin: AdminListener) -> None:
    """`run.py admin-token` prints a token that opens the running gateway within a few seconds, and ends the old one:
    that of the tests above. The store keeps digests alone."""
    command = await run("admin-token", "--config", str(gateway._folder / "gateway.yaml"))
    new = AdminListener(admin.url, command.output.strip())

    deadline = time.monotonic() + 5
    while (opened := await told("GET", f"{new.url}/metrics", headers=new.headers)).status != 200:
        assert time.monotonic() < deadline, opened.text
        await asyncio.sleep(0.05)
    closed = await told("GET", f"{admin.url}/metrics", headers=admin.headers)

    assert (0, 1) == (command.code, len(command.output.split()))
    assert new.token not in command.errors
    assert new.token != admin.token
    assert 401 == closed.status
    for token in (admin.token, new.token):
        assert token.removeprefix("ezat_admin_") not in gateway.stored
    assert hashlib.sha256(new.token.encode()).digest().decode("latin-1") in gateway.stored
    assert new.token not in gateway.written
