"""What ``run.py probe`` finds out about upstreams that refuse, ignore or fail at single things. Over real sockets."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import orjson
import pytest
from aiohttp import web

from proxy.config import load
from proxy.demo import DemoUpstream
from proxy.demo.checks import check_request
from proxy.probe import asking, material
from proxy.probe.asking import Answered, Outcome, asker_for
from proxy.probe.findings import Findings, Verdict, finding, profile_of
from proxy.probe.probing import ROWS, KeyRefused, Probe, Probed
from proxy.probe.requests import QUESTIONS
from proxy.settings import ProfileSettings
from proxy.testing import CheckingUpstream
from tests.configured import AT_UPSTREAM, config_for
from tests.process import written_config
from tests.test_docs import column, rows

KEY = "provider-key-4711"
Json = dict[str, Any]
Odd = Callable[[str, Json], web.StreamResponse | None]
"""What an upstream answers to a body at a path; None: as it would."""
YES, NO, UNKNOWN = Verdict.YES, Verdict.NO, Verdict.UNKNOWN
ALL = {
    "sampling": True,
    "sampling_exclusive": False,
    "prompt_caching": True,
    "effort": ["low", "medium", "high", "xhigh", "max"],
    "thinking": True,
    "forced_tool_choice": True,
    "images": True,
    "pdfs": True,
    "structured_outputs": True,
    "count_tokens": True,
}


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "PAUSE", 0.0)


class OddUpstream(CheckingUpstream):
    """As strict as the Messages API, and able to do everything, but for what ``odd`` says."""

    def __init__(self, odd: Odd) -> None:
        super().__init__()
        self.odd = odd
        self.asked = Counter[str]()
        """How often each body came."""
        self.headers: list[Mapping[str, str]] = []

    def app(self) -> web.Application:
        app = super().app()
        app.middlewares.insert(0, self._oddly)
        return app

    @web.middleware
    async def _oddly(self, request: web.Request, handler: Any) -> web.StreamResponse:
        raw = await request.read()
        self.asked[raw.decode()] += 1
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        response = self.odd(request.path, orjson.loads(raw))
        return response if response is not None else await handler(request)


class IgnoringUpstream(DemoUpstream):
    """Drops what ``ignores`` makes of a body, and doesn't mind nonsense."""

    def __init__(self, ignores: Callable[[Json], Json]) -> None:
        super().__init__()
        self._ignores = ignores

    async def _read(self, request: web.Request, *, counting: bool = False) -> Json:
        return check_request(self._ignores(await request.json()), counting=counting)


def refusal(status: int, message: str = "Not here.", **headers: str) -> web.Response:
    error = {"type": "error", "error": {"type": "invalid_request_error", "message": message}}
    return web.json_response(error, status=status, headers=headers)


def never(_: str, __: Json) -> None:
    """Nothing is odd."""


@asynccontextmanager
async def probe_of(url: str, folder: Path, **settings: Any) -> AsyncIterator[Probe]:
    config = load(written_config(config_for({"own": {"base_url": url, **settings}}), folder), {})
    async with asker_for(config, "own") as asker:
        yield Probe(asker, lambda model, row: None)


async def probed(upstream: DemoUpstream, folder: Path, **settings: Any) -> Probed:
    """What is found out about an upstream's model."""
    url = await upstream.start()
    try:
        async with probe_of(url, folder, **settings) as probe:
            return await probe.ask_about(AT_UPSTREAM)
    finally:
        await upstream.stop()


def verdicts(findings: Findings) -> dict[str, Verdict]:
    return {row: findings[row].verdict for row in ROWS}


def holds(body: Json, kind: str) -> bool:
    """Whether a block of this kind is in the messages."""
    return any(
        block["type"] == kind
        for message in body["messages"]
        if isinstance(message["content"], list)
        for block in message["content"]
    )


def effort(body: Json) -> Any:
    return body.get("output_config", {}).get("effort")


# What there is


async def test_an_upstream_that_can_do_all_is_found_to(tmp_path: Path) -> None:
    """Every request of the probe is one that the API takes, and every effect is seen."""
    upstream = OddUpstream(never)

    found = await probed(upstream, tmp_path)

    assert dict.fromkeys(ROWS, YES) == verdicts(found.findings)
    assert ALL == profile_of(found.findings)
    assert found.stopped is None
    assert ["temperature", "output_config.effort"] == [each.partition(":")[0] for each in upstream.refusals]  # nonsense


async def test_a_profile_is_one_of_the_settings(tmp_path: Path) -> None:
    """What is found out can be written, field by field, in the order of the settings."""
    found = profile_of((await probed(OddUpstream(never), tmp_path)).findings)

    assert list(ProfileSettings.model_fields) == list(found)
    assert found == ProfileSettings.model_validate(found).model_dump(mode="json")


async def test_no_two_probes_share_a_prefix(tmp_path: Path) -> None:
    """What an earlier probe left in the cache is not taken for what this one wrote."""
    upstream = OddUpstream(never)

    await probed(upstream, tmp_path)
    await probed(upstream, tmp_path)

    prefixes = [body for body in upstream.asked if '"cache_control"' in body]
    assert [2, 2] == [upstream.asked[body] for body in prefixes]


# What is refused

REFUSED: dict[str, tuple[Callable[[str, Json], bool], list[str], Json]] = {
    "sampling": (
        lambda _, body: bool({"temperature", "top_p"} & body.keys()),
        ["temperature", "top_p", "temperature with top_p"],
        {"sampling": False, "sampling_exclusive": None},
    ),
    "top_p": (
        lambda _, body: "top_p" in body,
        ["top_p", "temperature with top_p"],
        {"sampling": False, "sampling_exclusive": None},
    ),
    "both of sampling": (
        lambda _, body: {"temperature", "top_p"} <= body.keys(),
        ["temperature with top_p"],
        {"sampling_exclusive": True},
    ),
    "effort max": (
        lambda _, body: effort(body) == "max",
        ["effort max"],
        {"effort": ["low", "medium", "high", "xhigh"]},
    ),
    "effort": (
        lambda _, body: effort(body) is not None,
        ["effort low", "effort medium", "effort high", "effort xhigh", "effort max"],
        {"effort": []},
    ),
    "thinking": (lambda _, body: "thinking" in body, ["adaptive thinking"], {"thinking": False}),
    "marks": (lambda _, body: "cache_control" in str(body), ["prompt caching"], {"prompt_caching": False}),
    "a forced call": (
        lambda _, body: body.get("tool_choice", {}).get("type") == "any",
        ["forced tool call"],
        {"forced_tool_choice": False},
    ),
    "images": (lambda _, body: holds(body, "image"), ["images"], {"images": False}),
    "PDFs": (lambda _, body: holds(body, "document"), ["PDFs"], {"pdfs": False}),
    "schemas": (
        lambda _, body: "format" in body.get("output_config", {}),
        ["structured output"],
        {"structured_outputs": False},
    ),
    "streams": (lambda _, body: body.get("stream") is True, ["stream"], {}),
    "stop sequences": (lambda _, body: "stop_sequences" in body, ["stop sequences"], {}),
    "count_tokens": (lambda path, _: path.endswith("count_tokens"), ["count_tokens"], {"count_tokens": False}),
}


@pytest.mark.parametrize("status", [400, 404, 422])
@pytest.mark.parametrize(("refuses", "refused", "profile"), REFUSED.values(), ids=REFUSED)
async def test_what_is_refused_is_not_supported(
    refuses: Callable[[str, Json], bool], refused: list[str], profile: Json, status: int, tmp_path: Path
) -> None:
    """A refusal is told with its status and words, and nothing else is laid to its charge."""
    odd = OddUpstream(lambda path, body: refusal(status) if refuses(path, body) else None)

    found = (await probed(odd, tmp_path)).findings

    assert {row: NO if row in refused else YES for row in ROWS} == verdicts(found)
    assert {f"{status}: Not here."} == {found[row].evidence for row in refused}
    expected = {**ALL, **profile}
    assert {name: value for name, value in expected.items() if value is not None} == profile_of(found)


async def test_a_long_text_that_is_refused_says_nothing_of_caching(tmp_path: Path) -> None:
    """A model with a small context is not said to lack a cache."""
    odd = OddUpstream(lambda _, body: refusal(400, "prompt is too long") if "system" in body else None)

    found = (await probed(odd, tmp_path)).findings

    assert UNKNOWN is found["prompt caching"].verdict
    assert "so long a text is refused without a mark, too: 400: prompt is too long" == found["prompt caching"].evidence


# What is ignored


def without(*fields: str) -> Callable[[Json], Json]:
    return lambda body: {name: value for name, value in body.items() if name not in fields}


def without_blocks(kind: str) -> Callable[[Json], Json]:
    def kept(body: Json) -> Json:
        [message] = body["messages"]
        if isinstance(message["content"], str):
            return body
        content = [block for block in message["content"] if block["type"] != kind]
        return {**body, "messages": [{**message, "content": content}]}

    return kept


def without_marks(body: Json) -> Json:
    if isinstance(body.get("system"), list):
        return {**body, "system": [{"type": "text", "text": block["text"]} for block in body["system"]]}
    return body


IGNORED: dict[str, tuple[Callable[[Json], Json], str, Verdict, str]] = {
    "marks": (without_marks, "prompt caching", NO, "taken, but nothing is read back (0 tokens were written)"),
    "a forced call": (
        without("tools", "tool_choice"),
        "forced tool call",
        NO,
        "taken, but ignored: the answer has no call",
    ),
    "tools": (without("tools"), "parallel tool calls", UNKNOWN, "the model made no call"),
    "schemas": (without("output_config"), "structured output", NO, "taken, but ignored: the answer is no JSON"),
    "stop sequences": (without("stop_sequences"), "stop sequences", NO, "taken, but ignored: the answer goes on"),
    "images": (
        without_blocks("image"),
        "images",
        NO,
        "taken, but ignored: no tokens, and the answer does not say “orange”",
    ),
    "PDFs": (
        without_blocks("document"),
        "PDFs",
        NO,
        "taken, but ignored: no tokens, and the answer does not say “heron”",
    ),
    "effort": (
        without("output_config"),
        "effort high",
        UNKNOWN,
        "taken, but so is a level that does not exist: it may be ignored",
    ),
    "thinking": (
        without("thinking"),
        "adaptive thinking",
        UNKNOWN,
        "taken, but so is a kind of thinking that does not exist: it may be ignored",
    ),
    "sampling": (
        without("temperature"),
        "temperature",
        UNKNOWN,
        "taken, but so is a temperature that is no number: it may be ignored",
    ),
}


@pytest.mark.parametrize(("ignores", "row", "verdict", "evidence"), IGNORED.values(), ids=IGNORED)
async def test_what_is_ignored_is_not_supported(
    ignores: Callable[[Json], Json], row: str, verdict: Verdict, evidence: str, tmp_path: Path
) -> None:
    """A field that is taken and dropped in silence is told apart from one that works."""
    found = (await probed(IgnoringUpstream(ignores), tmp_path)).findings

    assert (verdict, evidence) == (found[row].verdict, found[row].evidence)


async def test_thinking_that_is_taken_without_a_thought_is_supported(tmp_path: Path) -> None:
    """A model may find a question too easy to think about; that nonsense is refused shows that the field is read."""
    upstream = OddUpstream(never)
    upstream._answer = lambda body: DemoUpstream._answer(upstream, without("thinking")(body))  # type: ignore[method-assign]

    found = (await probed(upstream, tmp_path)).findings["adaptive thinking"]

    assert (YES, "taken, though it did not think") == (found.verdict, found.evidence)


# What says nothing


def at_images(answer: Callable[[], web.StreamResponse | None]) -> Odd:
    return lambda _, body: answer() if holds(body, "image") else None


PASSING = {
    "429": lambda: refusal(429),
    "529": lambda: refusal(529),
    "500": lambda: refusal(500),
    "503 in HTML": lambda: web.Response(status=503, text="<html>busy</html>", content_type="text/html"),
    "408": lambda: refusal(408),
}
OTHERS = {
    "an account": (lambda: refusal(400, "Your credit balance is too low."), 1),
    "401": (lambda: refusal(401), 1),
    "402": (lambda: refusal(402), 1),
    "a redirect": (lambda: web.Response(status=302, headers={"location": "/elsewhere"}), 1),
    "HTML": (lambda: web.Response(text="<html></html>", content_type="text/html"), 1),
    "JSON that is no message": (lambda: web.json_response({"ok": True}), 1),
    "an overload that asks for a minute": (lambda: refusal(529, **{"retry-after": "60"}), 1),
    **{name: (answer, 2) for name, answer in PASSING.items()},
}


@pytest.mark.parametrize(("answer", "times"), OTHERS.values(), ids=OTHERS)
async def test_what_is_no_refusal_says_nothing(
    answer: Callable[[], web.StreamResponse], times: int, tmp_path: Path
) -> None:
    """What is about the moment or the account is unknown, and stays out of the profile; it is tried at most twice."""
    upstream = OddUpstream(at_images(answer))

    found = (await probed(upstream, tmp_path)).findings

    assert {row: UNKNOWN if row == "images" else YES for row in ROWS} == verdicts(found)
    assert without("images")(ALL) == profile_of(found)
    assert times == next(count for body, count in upstream.asked.items() if '"image"' in body)


@pytest.mark.parametrize("answer", PASSING.values(), ids=PASSING)
async def test_what_passes_is_tried_once_more(answer: Callable[[], web.StreamResponse], tmp_path: Path) -> None:
    """A moment's overload hides nothing."""
    answers = iter([answer()])
    upstream = OddUpstream(at_images(lambda: next(answers, None)))

    assert ALL == profile_of((await probed(upstream, tmp_path)).findings)


@pytest.mark.slow
async def test_an_upstream_is_given_the_time_that_it_asks_for(tmp_path: Path) -> None:
    """Who says when to come again is not asked earlier."""
    times: list[float] = []

    def busy_once() -> web.Response | None:
        times.append(monotonic())
        return refusal(429, **{"retry-after": "1"}) if len(times) == 1 else None

    found = (await probed(OddUpstream(at_images(busy_once)), tmp_path)).findings

    assert YES is found["images"].verdict
    assert 1.0 <= times[1] - times[0] < 3.0


async def test_an_effort_that_is_unknown_leaves_all_of_them_out(tmp_path: Path) -> None:
    """A level that nobody could try is not said to be missing."""
    odd = OddUpstream(lambda _, body: refusal(529) if effort(body) == "high" else None)

    assert without("effort")(ALL) == profile_of((await probed(odd, tmp_path)).findings)


async def test_an_upstream_that_falls_silent_is_not_waited_for_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After two rows without an answer the probe ends, and what it has found out stands."""
    monkeypatch.setattr(asking, "TIME_LIMIT", 0.1)

    class Silent(OddUpstream):
        async def _messages(self, request: web.Request) -> web.StreamResponse:
            body = await request.json()
            return await (self._hang(request) if "thinking" in body or "tools" in body else super()._messages(request))

    found = await probed(Silent(never), tmp_path)

    assert f"{AT_UPSTREAM} has ceased to answer: no whole answer within 0.1 s" == found.stopped
    assert {"sampling": True, "sampling_exclusive": False, "effort": ALL["effort"], "count_tokens": True} == profile_of(
        found.findings
    )
    assert "not tried" == found.findings["images"].evidence


def streamed(*kinds: str) -> Answered:
    raw = b"".join(b'event: %b\ndata: {"type":"%b"}\n\n' % (kind.encode(), kind.encode()) for kind in kinds)
    return Answered(Outcome.TAKEN, 200, "", raw, "text/event-stream")


def message(text: str, stop_reason: str) -> Answered:
    whole = {"content": [{"type": "text", "text": text}] if text else [], "stop_reason": stop_reason}
    return Answered(Outcome.TAKEN, 200, "", orjson.dumps(whole), "application/json")


SHOWN: dict[str, tuple[str, Answered, Verdict, str]] = {
    "no stream": ("stream", message("Hello.", "end_turn"), NO, "200, but no stream: application/json"),
    "no message in the stream": ("stream", streamed("chunk"), NO, "200, but its events are none of a message"),
    "a stream that broke off": ("stream", streamed("message_start"), UNKNOWN, "200, but it broke off"),
    "a stream that failed": (
        "stream",
        streamed("message_start", "error"),
        UNKNOWN,
        "200, but it ended with an error event",
    ),
    "a stream without its last event": (
        "stream",
        streamed("message_start", "message_delta"),
        YES,
        "200, 2 events, no message_stop",
    ),
    "a stream that is none": (
        "stream",
        Answered(Outcome.TAKEN, 200, "", b"data: {oh\n\n", "text/event-stream"),
        UNKNOWN,
        "200, but its events can't be read",
    ),
    "a call that was cut short": (
        "forced tool call",
        message("", "max_tokens"),
        UNKNOWN,
        "the answer has no call: it ended with max_tokens",
    ),
    "talk instead of a call": (
        "forced tool call",
        message("Hello, and", "max_tokens"),
        NO,
        "taken, but ignored: the answer has no call",
    ),
    "a refusal instead of a call": (
        "forced tool call",
        message("No.", "refusal"),
        UNKNOWN,
        "the answer has no call: it ended with refusal",
    ),
    "JSON that was cut short": (
        "structured output",
        message('{"waves": 1', "max_tokens"),
        UNKNOWN,
        "the answer is no JSON: it ended with max_tokens",
    ),
    "JSON of another shape": (
        "structured output",
        message('{"sea": "blue"}', "end_turn"),
        NO,
        "taken, but ignored: the answer is JSON of another shape",
    ),
    "JSON with a wrong type": (
        "structured output",
        message('{"waves": true, "harbour": "old"}', "end_turn"),
        NO,
        "taken, but ignored: the answer is JSON of another shape",
    ),
    "JSON that fits": (
        "structured output",
        message('{"harbour": "old", "waves": 3}', "end_turn"),
        YES,
        "the answer fits the schema",
    ),
    "a stop with another reason": (
        "stop sequences",
        message("Apple pear ", "end_turn"),
        YES,
        "the answer stopped there, with stop_reason end_turn",
    ),
    "no way to the stop": (
        "stop sequences",
        message("Fruit!", "end_turn"),
        UNKNOWN,
        "taken, but the answer has not come to the word",
    ),
    "a colour without counts": ("images", message("It is Orange.", "end_turn"), YES, "the answer says “orange”"),
    "no colour and no counts": (
        "images",
        message("It is blue.", "end_turn"),
        UNKNOWN,
        "taken, but the answer does not say “orange”, and no tokens are told",
    ),
    "no count of tokens": ("count_tokens", message("Hello.", "end_turn"), NO, "200, but without input_tokens"),
}


@pytest.mark.parametrize(("row", "answered", "verdict", "evidence"), SHOWN.values(), ids=SHOWN)
def test_an_answer_shows_what_it_shows(row: str, answered: Answered, verdict: Verdict, evidence: str) -> None:
    """An effect is seen where there is one, and doubt remains where an answer has not come to it."""
    [judge] = [question.judge for question in QUESTIONS if question.row == row]

    found = finding(answered, judge, 0)

    assert (verdict, evidence) == (found.verdict, found.evidence)


def test_the_pdf_finds_its_own_parts() -> None:
    """A provider that reads PDFs by the book can read this one: every offset in it is right."""
    file = material.pdf()
    table = int(file.rpartition(b"startxref\n")[2].split()[0])
    offsets = [int(entry) for entry in re.findall(rb"(\d{10}) 00000 n ", file)]

    assert file[table:].startswith(b"xref\n0 6\n")
    assert [b"%d 0 obj\n" % number for number in range(1, 6)] == [file[offset : offset + 8] for offset in offsets]
    assert all(len(entry) == 20 for entry in re.findall(rb"\d{10} \d{5} [nf] \n", file))
    assert 6 == len(re.findall(rb"\d{10} \d{5} [nf] \n", file))


# Where nothing can be asked


def everywhere(answer: Callable[[], web.StreamResponse]) -> Odd:
    return lambda _, __: answer()


CLOSED = {
    "403": (lambda: refusal(403, "No access."), "403: No access.", 1),
    "404": (lambda: refusal(404, "No such model."), "404: No such model.", 1),
    "400": (lambda: refusal(400, "model: unknown"), "400: model: unknown", 1),
    "529": (lambda: refusal(529, "Overloaded"), "529: Overloaded", 2),
    "HTML": (
        lambda: web.Response(text="<html></html>", content_type="text/html"),
        "200, but the answer is no message",
        1,
    ),
    "HTML of an error": (
        lambda: web.Response(status=404, text="<html></html>", content_type="text/html"),
        "404: an HTML page",
        1,
    ),
}


@pytest.mark.parametrize(("answer", "why", "times"), CLOSED.values(), ids=CLOSED)
async def test_a_model_that_can_t_be_asked_ends_the_probe(
    answer: Callable[[], web.StreamResponse], why: str, times: int, tmp_path: Path
) -> None:
    """Without a plain answer no refusal means anything: it is told why there is none, and nothing more is asked."""
    upstream = OddUpstream(everywhere(answer))

    found = await probed(upstream, tmp_path)

    assert f"{AT_UPSTREAM} can't be asked: {why}" == found.stopped
    assert times == upstream.asked.total()
    assert {} == profile_of(found.findings)
    assert {UNKNOWN} == set(verdicts({**found.findings, "plain answer": found.findings["images"]}).values())


async def test_an_upstream_that_is_not_there_ends_the_probe(tmp_path: Path, unused_tcp_port: int) -> None:
    """A wrong address is told as one."""
    async with probe_of(f"http://127.0.0.1:{unused_tcp_port}", tmp_path) as probe:
        found = await probe.ask_about(AT_UPSTREAM)

    assert f"{AT_UPSTREAM} can't be asked: no answer (ClientConnectorError)" == found.stopped


@pytest.mark.parametrize(
    ("key", "why"), [(KEY, "it refuses the key, sent as x-api-key "), (None, "it asks for a key, ")]
)
async def test_a_key_that_is_refused_ends_the_probe(key: str | None, why: str, tmp_path: Path) -> None:
    """Both ways of sending the key are tried, and nothing more is asked."""
    upstream = OddUpstream(everywhere(lambda: refusal(401, f"No, {KEY}.")))

    with pytest.raises(KeyRefused) as raised:
        await probed(upstream, tmp_path, **({"api_key": key} if key else {}))

    assert str(raised.value).startswith(why)
    assert (key is None) == (KEY in str(raised.value))
    assert (2 if key else 1) == upstream.asked.total()


@pytest.mark.parametrize(("configured", "works"), [("x-api-key", "bearer"), ("bearer", "x-api-key")])
async def test_the_other_way_of_sending_the_key_is_found(configured: str, works: str, tmp_path: Path) -> None:
    """An upstream that takes the key only in the way that isn't configured is asked in that way."""
    header = {"bearer": "authorization", "x-api-key": "x-api-key"}[works]

    class Choosy(OddUpstream):
        def odd_for(self, _: str, __: Json) -> web.StreamResponse | None:
            return None if header in self.headers[-1] else refusal(401)

    upstream = Choosy(never)
    upstream.odd = upstream.odd_for
    url = await upstream.start()
    try:
        async with probe_of(url, tmp_path, api_key=KEY, auth=configured) as probe:
            found = await probe.ask_about(AT_UPSTREAM)
            again = await probe.ask_about(AT_UPSTREAM)
    finally:
        await upstream.stop()

    assert works == probe.other_auth
    assert (NO, YES) == (found.findings[f"auth: {configured}"].verdict, found.findings[f"auth: {works}"].verdict)
    assert ALL == profile_of(found.findings) == profile_of(again.findings)
    assert 1 == sum(header not in headers for headers in upstream.headers)


def test_the_docs_list_every_row() -> None:
    """Whoever reads the table of a probe finds each of its rows explained, and where it goes."""
    listed = rows("docs/upstreams.md", "Probing an upstream")
    fields = {field for row in listed for field in re.findall(r"`(\w+)`", row[2])}

    assert sorted(ROWS) == sorted(column("docs/upstreams.md", "Probing an upstream"))
    assert set(ProfileSettings.model_fields) == fields


def test_a_row_has_one_question() -> None:
    """The findings go by the names of the rows."""
    assert len(ROWS) == len(set(ROWS)) == len(QUESTIONS) + 2
