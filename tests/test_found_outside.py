"""Right values for what attacks from outside found: each was once wrong."""

from __future__ import annotations

from typing import Any

import aiohttp
import orjson
import pytest

from plugins import BUNDLED
from proxy.document import Event
from proxy.jsontext import decode
from proxy.plugin import Plugin
from proxy.progress import Progress, bytes_of_delta
from proxy.testing import Reply, ScriptedUpstream, message_reply, running_gateway, stream_reply, text_events
from proxy.usage import Usage

LISTED: list[type[Plugin]] = [cls for name, cls in BUNDLED.items() if name != "auth"]
CHAT = {"model": "model", "messages": [{"role": "user", "content": "Hi"}]}

DELTAS = {
    "text": (b'{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"a b"}}', 3),
    "text with spaces around": (b'{"delta": {"type": "text_delta", "text": "a b"}}', 3),
    "an escape": (b'{"delta":{"type":"text_delta","text":"\\u00e9"}}', 2),
    "its own field's name": (b'{"delta":{"type":"text_delta","text":"say \\"text\\": x"}}', 13),
    "arguments": (b'{"delta":{"type":"input_json_delta","partial_json":"{}"}}', 2),
    "thinking": (b'{"delta":{"type":"thinking_delta","thinking":"hm"}}', 2),
    "a signature": (b'{"delta":{"type":"signature_delta","signature":"abc"}}', 0),
}


@pytest.mark.parametrize(("raw", "size"), DELTAS.values(), ids=DELTAS)
def test_an_estimate_counts_the_text_alone(raw: bytes, size: int) -> None:
    """What a stream that was left is billed by is the bytes of its text, not of the events around it."""
    assert size == bytes_of_delta(raw)


WRITTEN: dict[str, tuple[list[dict[str, Any]], tuple[int, int]]] = {
    "one lifetime grows": (
        [{"ephemeral_5m_input_tokens": 4, "ephemeral_1h_input_tokens": 6}, {"ephemeral_1h_input_tokens": 8}],
        (4, 8),
    ),
    "a zero beside it": (
        [
            {"ephemeral_5m_input_tokens": 4, "ephemeral_1h_input_tokens": 6},
            {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 8},
        ],
        (4, 8),
    ),
}


@pytest.mark.parametrize(("parts", "expected"), WRITTEN.values(), ids=WRITTEN)
def test_lifetimes_are_merged_one_by_one(parts: list[dict[str, Any]], expected: tuple[int, int]) -> None:
    """0 or a missing count never replaces one that was given, for each lifetime by itself."""
    usage = Usage()
    for part in parts:
        usage.take({"cache_creation": part})
    assert expected == (usage.cache_write_5m, usage.cache_write_1h)


def test_counts_with_a_point_are_counts_and_others_are_taken_note_of() -> None:
    """1000.0 is 1000; what is no count makes the cost inexact, and is named."""
    usage = Usage()
    usage.take(decode(b'{"input_tokens": 1000.0, "output_tokens": "10"}'))
    assert (1000, 0, {"output_tokens"}) == (usage.input, usage.output, usage.unreadable)


def test_the_final_count_is_known_before_the_last_event() -> None:
    """With the stop_reason comes the count of the whole answer: nothing is left to estimate."""
    usage = Usage()
    progress = Progress(usage)
    for data in text_events("Hello")[:-1]:
        progress.observe(Event(data["type"], raw=orjson.dumps(data)))
    assert (True, 7) == (usage.final, usage.output)


async def asked(url: str, **fields: Any) -> tuple[int, str, dict[str, str]]:
    """Status, text and headers of an answer."""
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/openai/v1/chat/completions", json={**CHAT, **fields}) as answer,
    ):
        return answer.status, await answer.text(), dict(answer.headers)


async def test_a_stream_without_a_stop_reason_is_no_whole_answer() -> None:
    """A message_stop alone proves nothing: the stream ends in an error, without finish and usage."""
    events = [event for event in text_events("Hello") if event["type"] != "message_delta"]
    async with (
        ScriptedUpstream(stream_reply(events)) as upstream,
        running_gateway(LISTED, upstream=upstream.url) as url,
    ):
        _, text, _ = await asked(url, stream=True, stream_options={"include_usage": True})
    assert (True, False, False) == ('"error"' in text, '"finish_reason":"stop"' in text, "prompt_tokens" in text)


async def test_an_answer_with_a_block_that_is_none_is_the_providers_fault() -> None:
    """It is told in the words for an answer that can't be read, and blamed on no plugin."""
    async with (
        ScriptedUpstream(message_reply(content=[None])) as upstream,
        running_gateway(LISTED, upstream=upstream.url) as url,
    ):
        status, text, _ = await asked(url)
    assert (500, "the provider's answer can't be read") == (status, orjson.loads(text)["error"]["message"])


async def test_bytes_that_are_no_utf_8_end_a_translated_stream_in_an_error() -> None:
    """No client of OpenAI's format gets a chunk that it can't decode."""
    pieces = list(stream_reply(text_events("aXb")).pieces)
    broken = [piece.replace(b"aXb", b"a\xffb") if isinstance(piece, bytes) else piece for piece in pieces]
    async with (
        ScriptedUpstream(Reply(broken, content_type="text/event-stream")) as upstream,
        running_gateway(LISTED, upstream=upstream.url) as url,
    ):
        _, text, _ = await asked(url, stream=True)
    assert ('"error"' in text, "\ufffd" in text) == (True, False)


async def test_a_refusal_names_no_ignored_fields() -> None:
    """Of a request that was refused nothing had an effect."""
    async with running_gateway(LISTED) as url:
        status, _, headers = await asked(url, temperature=5, seed=1)
    assert (400, None) == (status, headers.get("x-ezat-ignored"))


async def test_a_mark_on_a_blank_part_is_a_plan_of_its_own() -> None:
    """The part is dropped, but no automatic marks are added."""
    content = [{"type": "text", "text": " ", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "x"}]
    async with ScriptedUpstream() as upstream, running_gateway(LISTED, upstream=upstream.url) as url:
        await asked(url, messages=[{"role": "user", "content": content}])
    assert b"cache_control" not in upstream.received[0].body
