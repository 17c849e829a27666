"""What real clients were seen to send, replayed as it was: every request is answered, or stands in a table here.

``recordings/`` holds one request a line, by client. Long texts are shortened in it, and the pictures that it names by
URL lie on loopback, so that no test looks any further.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.clients.gateway import clients_gateway
from tests.process import GatewayProcess

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parent / "recordings"


class Recording(NamedTuple):
    """A request as a client sent it."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: dict[str, Any] | None

    @property
    def is_openai(self) -> bool:
        return self.target.startswith("/openai/")


class Refusal(NamedTuple):
    """What the contract refuses though a client sends it."""

    applies: Callable[[Recording], bool]
    status: int
    words: str


def field(name: str) -> Callable[[Recording], Any]:
    """What a request has in a field of its body."""
    return lambda recording: (recording.body or {}).get(name)


def forces_call(recording: Recording) -> bool:
    """Whether a call is forced, in OpenAI's format. All of these were sent to a model that can't be."""
    return recording.is_openai and field("tool_choice")(recording) not in (None, "auto", "none")


def names_picture_by_url(recording: Recording) -> bool:
    return recording.is_openai and '"url": "https://' in json.dumps(recording.body)


REFUSALS = {
    "the Responses API is not offered": Refusal(
        lambda recording: recording.target == "/openai/v1/responses", 404, "/openai/v1/chat/completions"
    ),
    "an answer can only follow a schema": Refusal(
        lambda recording: recording.is_openai and field("response_format")(recording) == {"type": "json_object"},
        400,
        'response_format: type "json_object" is not supported; use "json_schema"',
    ),
    "this model can't be forced to call a tool": Refusal(forces_call, 400, "tool_choice: this model can't be forced"),
    "pictures are fetched from public addresses alone": Refusal(
        names_picture_by_url, 400, "could not download the image"
    ),
}


def recorded() -> Iterator[tuple[str, Recording]]:
    """Every recorded request, named by its client and its line."""
    for path in sorted(FOLDER.glob("*.jsonl")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            told = json.loads(line)
            headers = [(name, value) for name, value in told["headers"]]
            yield f"{path.stem}:{number}", Recording(told["method"], told["target"], headers, told["body"])


RECORDINGS = dict(recorded())


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    with clients_gateway(tmp_path_factory.mktemp("recordings")) as running:
        yield running


class Replayed(NamedTuple):
    """What came back."""

    status: int
    headers: dict[str, str]
    body: bytes


def replayed(recording: Recording, gateway: GatewayProcess) -> Replayed:
    """Send a request with its own headers, in their order and spelling, and nothing else."""
    body = b"" if recording.body is None else json.dumps(recording.body, ensure_ascii=False).encode()
    connection = http.client.HTTPConnection(gateway.host, gateway.port, timeout=30)
    try:
        connection.putrequest(recording.method, recording.target, skip_accept_encoding=True)
        for name, value in recording.headers:
            connection.putheader(name, value)
        if body:
            connection.putheader("content-length", str(len(body)))
        connection.endheaders(body)
        answer = connection.getresponse()
        headers = {name.lower(): value for name, value in answer.getheaders()}
        return Replayed(answer.status, headers, answer.read())
    finally:
        connection.close()


def refusal_of(recording: Recording) -> Refusal | None:
    return next((each for each in REFUSALS.values() if each.applies(recording)), None)


@pytest.mark.parametrize("recording", RECORDINGS.values(), ids=RECORDINGS)
def test_a_recorded_request_is_answered(recording: Recording, gateway: GatewayProcess) -> None:
    """What a client sends unasked is answered whole, unless the contract refuses it, and then in words that help."""
    refusal = refusal_of(recording)

    answer = replayed(recording, gateway)

    assert (refusal.status if refusal else 200) == answer.status, answer.body.decode()
    assert {"request-id", "x-request-id"} <= answer.headers.keys()
    assert "content-encoding" not in answer.headers
    if refusal:
        assert refusal.words in json.loads(answer.body)["error"]["message"]
    elif field("stream")(recording):
        check_stream(recording, answer)
    else:
        check_whole(recording, json.loads(answer.body))


def check_whole(recording: Recording, told: dict[str, Any]) -> None:
    """A plain answer is of the kind that was asked for, under the model's name as it was sent."""
    if "/models" in recording.target:
        assert "model" == (told["data"][0] if "data" in told else told)["object" if recording.is_openai else "type"]
        return
    if "count_tokens" in recording.target:
        assert 0 < told["input_tokens"]
        return
    assert field("model")(recording) == told["model"]
    if recording.is_openai:
        assert ("chat.completion", 1) == (told["object"], len(told["choices"]))
    else:
        assert ("message", True) == (told["type"], bool(told["content"]))


def check_stream(recording: Recording, answer: Replayed) -> None:
    """A stream ends as its format says, and holds no error."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.body.decode().removesuffix("\n\n").split("\n\n")
    if recording.is_openai:
        assert "data: [DONE]" == events[-1]
        assert [] == [event for event in events if event.startswith('data: {"error"')]
        assert [] == [event for event in events if not event.startswith((":", "data: "))]
        return
    kinds = [event.partition("\n")[0] for event in events]
    assert ("event: message_start", "event: message_stop") == (kinds[0], kinds[-1])
    assert "event: error" not in kinds


FORCED = {name: recording for name, recording in RECORDINGS.items() if forces_call(recording)}


@pytest.mark.parametrize("recording", FORCED.values(), ids=FORCED)
def test_a_forced_call_is_made_by_a_model_that_can(recording: Recording, gateway: GatewayProcess) -> None:
    """The same request is answered with the call by a model that can be forced to it."""
    asked = recording._replace(body={**(recording.body or {}), "model": "claude-haiku-4-5"})

    answer = replayed(asked, gateway)

    assert 200 == answer.status, answer.body.decode()
    assert "tool_calls" == json.loads(answer.body)["choices"][0]["finish_reason"]


@pytest.mark.parametrize("refusal", REFUSALS.values(), ids=REFUSALS)
def test_every_refusal_is_met(refusal: Refusal) -> None:
    """No row of the table outlives the recordings that it excuses."""
    assert any(refusal.applies(recording) for recording in RECORDINGS.values())
