"""Secrets stay where they belong (group J): after a sweep over everything that can go wrong, all that was written and
sent anywhere is searched for them, as they are and in the spellings in which something might carry them on.

The sweep runs on a gateway of its own, so that what is searched is known; plugins that break are part of it.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest
import pytest_asyncio

from plugins import BUNDLED
from proxy.config import load
from proxy.loading import load_all
from proxy.yaml_source import ConfigError
from tests.attacks.broken_plugin import LOCAL
from tests.attacks.conftest import config_for, model
from tests.attacks.raw_client import (
    CHAT,
    CLIENT_KEY,
    MESSAGES,
    PROMPT,
    UPSTREAM_KEY,
    Answer,
    asked,
    connected,
    head,
    post,
)
from tests.attacks.raw_upstream import (
    BEGUN,
    CHUNKED,
    ENDING,
    LAST_CHUNK,
    MESSAGE,
    PLAIN,
    Move,
    RawUpstream,
    Step,
    chunk,
    frame,
    http,
)
from tests.process import GatewayProcess, started_gateway, written_config

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

WRONG_KEY = "ezat_sk_canary-Stranger/4716+of?a=key"
CANARIES = {
    "the client's key": CLIENT_KEY,
    "a stranger's key": WRONG_KEY,
    "the upstream's key": UPSTREAM_KEY,
    "the prompt": PROMPT,
    "a plugin's variable": LOCAL,
}
FIXED_SENTENCES = {
    "the gateway failed to answer this request",
    "the provider failed to answer this request",
    "the provider's answer can't be read",
    "the provider's answer broke off",
    "the provider sent an event that can't be read",
}
"""All that a 500 may say."""
IN_STREAM = re.compile(rb'"error":\{[^{}]*?"message":"([^"]*)"')


def spellings(secret: str) -> list[str]:
    """The ways in which a secret might be written: as it is, escaped, quoted, in base64 at any offset, in hex."""
    raw = secret.encode()
    in_base64 = [base64.b64encode(b"\0" * offset + raw).decode()[4 if offset else 0 : -4] for offset in range(3)]
    return [
        secret,
        secret[8:-1],
        json.dumps(secret)[1:-1],
        json.dumps(secret)[1:-1].replace("/", "\\/"),
        quote(secret),
        quote(secret, safe=""),
        quote_plus(secret),
        raw.hex(),
        *in_base64,
        *(text.replace("+", "-").replace("/", "_") for text in in_base64),
    ]


def found_in(text: str) -> set[str]:
    """Which canaries a text holds."""
    return {name for name, secret in CANARIES.items() if any(each in text for each in spellings(secret))}


@dataclass
class Swept:
    """All that came out of the sweep."""

    gateway: GatewayProcess
    upstream: RawUpstream
    answers: dict[str, Answer] = field(default_factory=dict)
    """What clients got, by the name of what they did."""


def quoting(text: str) -> bytes:
    return json.dumps({"type": "error", "error": {"type": "invalid_request_error", "message": text}}).encode()


MESSAGE_JSON = json.dumps(MESSAGE).encode()
QUOTED = f"bad key {UPSTREAM_KEY}"
UPSTREAM_DOES: dict[str, list[Step]] = {
    "answer": [PLAIN],
    "stream": [CHUNKED, chunk(BEGUN), chunk(ENDING), LAST_CHUNK],
    "refuse": [http(quoting(QUOTED), status="400 Bad")],
    "refuse the key": [http(quoting(QUOTED), status="401 No")],
    "refuse in HTML": [http(f"<p>{QUOTED}".encode(), status="403 No", type="text/html")],
    "fail": [http(quoting(QUOTED), status="500 Oops")],
    "be busy": [http(quoting(QUOTED), f"retry-after: {UPSTREAM_KEY}", status="529 Busy")],
    "redirect": [http(b"", f"location: /{UPSTREAM_KEY}", status="307 Elsewhere")],
    "send headers": [http(MESSAGE_JSON, f"x-api-key: {UPSTREAM_KEY}", f"set-cookie: {UPSTREAM_KEY}")],
    "send a broken header": [http(b"{}", f"x\0: {UPSTREAM_KEY}")],
    "send garbage": [UPSTREAM_KEY.encode() + b"\r\n\r\n", Move.CLOSE],
    "send no message": [http(json.dumps({"key": UPSTREAM_KEY}).encode())],
    "send an error event": [CHUNKED, chunk(frame({"type": "error", "error": {"message": QUOTED}})), LAST_CHUNK],
    "send an error event later": [
        CHUNKED,
        chunk(BEGUN + frame({"type": "error", "error": {"message": QUOTED}})),
        LAST_CHUNK,
    ],
    "send no event": [CHUNKED, chunk(f"event: message_start\ndata: {UPSTREAM_KEY}\n\n".encode()), LAST_CHUNK],
    "reset": [CHUNKED, chunk(BEGUN), 0.05, Move.RESET],
    "hang up": [Move.CLOSE],
}
HOOKS = ["on_headers", "on_request", "on_send", "on_answer", "on_event", "on_complete", "on_close"]
BODIES: dict[str, bytes] = {
    "no JSON": f'{{"messages": "{PROMPT}'.encode(),
    "bad UTF-8": PROMPT.encode() + b"\xff",
    "a wrong type": json.dumps(asked(max_tokens=PROMPT)).encode(),
    "a wrong model": json.dumps(asked(model="no/model")).encode(),
    "too deep": json.dumps(asked()).encode()[:-1] + b',"metadata":' + b"[" * 300 + b"]" * 300 + b"}",
    "no messages": json.dumps(asked(messages=[])).encode(),
    "an unreachable model": json.dumps(asked(model="gone/model")).encode(),
    "the key in the body": json.dumps(asked(api_key=CLIENT_KEY, metadata={"key": CLIENT_KEY})).encode(),
}
MALFORMED: dict[str, bytes] = {
    "a control byte behind a key": head(CHAT, f"x-api-key: {CLIENT_KEY}\x01"),
    "a key without a colon": head(CHAT, CLIENT_KEY),
    "a key in a long header": head(CHAT, "x-api-key: " + CLIENT_KEY * 300),
    "a key in the target": head(f"/{CLIENT_KEY}"),
    "a key in the query": head(f"{CHAT}?api_key={CLIENT_KEY}", key=None),
    "a key in a cookie": head(CHAT, f"cookie: key={CLIENT_KEY}", key=None),
    "a key as the method": head(CHAT, method=CLIENT_KEY),
    "a key in an id": post(MESSAGES, asked(), f"x-request-id: {CLIENT_KEY}"),
    "a key as a chunk": head(CHAT, "transfer-encoding: chunked") + CLIENT_KEY.encode() + b"\r\n",
    "a key of a stranger": head(CHAT, "content-length: 2", key=WRONG_KEY) + b"{}",
    "both headers": head(MESSAGES, f"x-api-key: {WRONG_KEY}", "content-length: 2") + b"{}",
    "a basic login": head(MESSAGES, f"authorization: Basic {base64.b64encode(CLIENT_KEY.encode()).decode()}", key=None),
    "another method": head(CHAT, method="PATCH"),
}
QUOTES_ITSELF = {f"body, {path}: {name}" for path in (CHAT, MESSAGES) for name in BODIES}
"""A refusal may quote to a client what it has just sent."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def own_upstream() -> AsyncIterator[RawUpstream]:
    async with RawUpstream() as started:
        yield started


@pytest.fixture(scope="module")
def own_gateway(own_upstream: RawUpstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    config = config_for(own_upstream, {"tests.attacks.broken_plugin:Broken": {}})
    config["upstreams"]["gone"] = {"base_url": "http://127.0.0.1:9", "api_key": UPSTREAM_KEY}
    config["models"].append(model("gone/model", "gone"))
    with started_gateway(config, tmp_path_factory.mktemp("canaries")) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def swept(own_gateway: GatewayProcess, own_upstream: RawUpstream) -> Swept:
    """Everything has been done once, on both endpoints, plain and streamed."""
    done = Swept(own_gateway, own_upstream)

    async def do(name: str, sent: bytes) -> None:
        async with connected(own_gateway) as client:
            client.send(sent)
            done.answers[name] = await client.answer()

    for path in (CHAT, MESSAGES):
        for stream in (False, True):
            for name, steps in UPSTREAM_DOES.items():
                own_upstream.play(*steps)
                await do(f"upstream, {path}, {stream}: {name}", post(path, asked(stream=stream)))
                own_upstream.scripts.clear()
            for hook in HOOKS:
                sent = post(path, asked(stream=stream), f"x-ezat-session: {hook}")
                await do(f"plugin, {path}, {stream}: {hook}", sent)
        for name, body in BODIES.items():
            await do(f"body, {path}: {name}", post(path, body))
    for name, sent in MALFORMED.items():
        await do(f"malformed: {name}", sent)
    return done


async def test_j1_the_sweep_reached_everything(swept: Swept) -> None:
    """The canaries were there to be leaked: the upstream has its key and the prompts, the broken plugin broke."""
    wire = b"".join(swept.upstream.wire).decode("latin-1")
    hooks = {line["hook"] for line in swept.gateway.log_lines if line["event"] == "plugin failed"}

    assert UPSTREAM_KEY in wire
    assert json.dumps(PROMPT)[1:-1] in wire
    assert set(HOOKS) == hooks


async def test_j1_a_clients_key_reaches_nobody(swept: Swept) -> None:
    """Neither an upstream nor another client gets it; in a body of his own the client may send it to the provider."""
    heads = [piece.decode("latin-1") for piece in swept.upstream.wire if piece.startswith(b"POST ")]
    bodies = [each.body.decode() for each in swept.upstream.asked if b"api_key" not in each.body]

    assert set() == found_in("".join(heads)) - {"the upstream's key"}
    assert set() == found_in("".join(bodies)) - {"the prompt"}
    assert [] == [name for name, answer in swept.answers.items() if _leaks(name, answer)]


def _leaks(name: str, answer: Answer) -> bool:
    found = found_in(f"{answer.line} {answer.headers!r} {answer.body.decode()}")
    return bool(found - {"the prompt"} if name in QUOTES_ITSELF else found)


async def test_j1_nothing_is_written_down(swept: Swept) -> None:
    """No canary stands in what the gateway wrote, be it in an exception, nor in its database."""
    assert [] == [line for line in swept.gateway.written.splitlines() if found_in(line)]
    assert set() == found_in(swept.gateway.stored)


async def test_j1_a_configuration_shows_no_secret(own_upstream: RawUpstream, tmp_path: Path) -> None:
    """A configuration that is printed, and the complaints about one with every key in a wrong place, hold no key."""
    path = written_config(config_for(own_upstream), tmp_path)
    printed = repr(load(path, {}))
    path.write_text(path.read_text().replace('"key": ', '"keey": ').replace('"api_key": ', '"api_keey": '))
    with pytest.raises(ConfigError) as complaints:
        load_all(path, BUNDLED, {})

    assert set() == found_in(printed)
    assert set() == found_in(f"{complaints.value} {complaints.value!r}")
    assert "keey" in str(complaints.value)


async def test_j4_a_key_is_shown_by_name_and_end_alone(swept: Swept) -> None:
    """Not more than the last four characters of a key stand anywhere, and its beginning not beyond its prefix."""
    secret = CLIENT_KEY.removeprefix("ezat_sk_")
    written = swept.gateway.written + swept.gateway.stored

    assert secret[:5] not in written
    assert secret[-5:] not in written


async def test_j6_a_500_is_one_of_a_few_sentences(swept: Swept) -> None:
    """Whatever went wrong inside, the client reads a fixed sentence, and the id under which it is logged."""
    told = set()
    for name, answer in swept.answers.items():
        if "error event" in name:
            continue  # what a provider says in an event of its own is passed on
        if answer.status == 500:
            told.add(answer.data["error"]["message"])
        told |= {text.decode() for text in IN_STREAM.findall(answer.body) if answer.status == 200}

    assert {"the gateway failed to answer this request"} < told
    assert told <= FIXED_SENTENCES
