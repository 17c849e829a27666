"""What answers mean: a verdict on each row of the table, and the profile that the verdicts make.

A field that was taken is not yet one that works, since many servers drop what they don't know. So wherever an effect
can be seen, it is looked for; where none can be, a second request with nonsense in the same field tells whether the
field is read at all (see ``Control`` in requests.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from proxy.errors import GatewayError
from proxy.jsontext import JsonError, decode
from proxy.models import EFFORT_LEVELS
from proxy.probe.asking import Answered, Outcome
from proxy.sse import Splitter

MORE_TOKENS = 30
"""What a picture or a page costs at the least, beyond what two short questions may differ by."""
_CUT_SHORT = ("max_tokens", "model_context_window_exceeded")


class Verdict(Enum):
    """Whether something is supported."""

    YES = "yes"
    NO = "no"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of the table. ``seen``: its effect was, so nothing is left to doubt."""

    verdict: Verdict
    evidence: str
    seen: bool = True


Json = dict[str, Any]
Judge = Callable[[Answered, int], Finding]
"""What an answer of status 200 shows; the number is that of the plain question's input tokens, 0 where not told."""


def finding(answered: Answered, judge: Judge, plain_tokens: int) -> Finding:
    """What an answer means for what was asked."""
    match answered.outcome:
        case Outcome.REFUSED:
            return Finding(Verdict.NO, answered.evidence)
        case Outcome.UNKNOWN:
            return Finding(Verdict.UNKNOWN, answered.evidence)
    return judge(answered, plain_tokens)


def doubted(found: Finding, nonsense: str) -> Finding:
    """A finding of which no more was seen than that a field is taken, once nonsense in that field was taken, too."""
    if found.seen or found.verdict is not Verdict.YES:
        return found
    return replace(found, verdict=Verdict.UNKNOWN, evidence=f"taken, but so is {nonsense}: it may be ignored")


def message_of(answered: Answered) -> Json | None:
    """The message of an answer, None where it is none."""
    data = answered.data
    content = data.get("content") if isinstance(data, dict) else None
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        return None
    return data if isinstance(data, dict) else None


def input_tokens(message: Json) -> int:
    """Of the whole prompt, from a cache or not."""
    return sum(
        counted(message, name) for name in ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    )


def counted(message: Json, name: str) -> int:
    """A count of the usage, 0 where there is none."""
    usage = message.get("usage")
    value = usage.get(name) if isinstance(usage, dict) else None
    return value if isinstance(value, int) else 0


def text_of(message: Json) -> str:
    """The blocks of text, joined."""
    blocks = [block.get("text") for block in message["content"] if block.get("type") == "text"]
    return "".join(text for text in blocks if isinstance(text, str))


def on_message(judge: Callable[[Json, int], Finding]) -> Judge:
    """A judge of answers from one of messages."""

    def judged(answered: Answered, plain_tokens: int) -> Finding:
        message = message_of(answered)
        if message is None:
            return Finding(Verdict.UNKNOWN, "200, but the answer is no message")
        return judge(message, plain_tokens)

    return judged


@on_message
def taken(message: Json, _: int) -> Finding:
    """The field was taken; more can't be seen."""
    return Finding(Verdict.YES, "taken", seen=False)


@on_message
def plain_answer(message: Json, _: int) -> Finding:
    return Finding(Verdict.YES, f"200, {input_tokens(message)} input tokens")


def count_of_tokens(answered: Answered, _: int) -> Finding:
    data = answered.data
    tokens = data.get("input_tokens") if isinstance(data, dict) else None
    if not isinstance(tokens, int):
        return Finding(Verdict.NO, "200, but without input_tokens")
    return Finding(Verdict.YES, f"200, {tokens} tokens")


def stream(answered: Answered, _: int) -> Finding:
    if answered.content_type != "text/event-stream":
        return Finding(Verdict.NO, f"200, but no stream: {answered.content_type or 'no content type'}")
    try:
        events = [decode(frame.data) for frame in Splitter().feed(answered.raw) if frame.data[:1] == b"{"]
    except (JsonError, GatewayError):
        return Finding(Verdict.UNKNOWN, "200, but its events can't be read")
    kinds = [event.get("type") for event in events]
    if "error" in kinds:
        return Finding(Verdict.UNKNOWN, "200, but it ended with an error event")
    if "message_start" not in kinds:
        return Finding(Verdict.NO, "200, but its events are none of a message")
    if "message_delta" not in kinds:
        return Finding(Verdict.UNKNOWN, "200, but it broke off")
    return Finding(Verdict.YES, f"200, {len(kinds)} events" + ("" if "message_stop" in kinds else ", no message_stop"))


@on_message
def thinking(message: Json, _: int) -> Finding:
    kinds = [block.get("type") for block in message["content"]]
    if "thinking" in kinds or "redacted_thinking" in kinds:
        return Finding(Verdict.YES, "the answer has a block of thinking")
    return Finding(Verdict.YES, "taken, though it did not think", seen=False)


def looked_at(word: str) -> Judge:
    """Whether something that holds ``word`` was: the answer says it, or the tokens of the prompt do."""

    @on_message
    def judged(message: Json, plain_tokens: int) -> Finding:
        tokens = input_tokens(message)
        if word in text_of(message).lower():
            return Finding(Verdict.YES, f"the answer says “{word}”")
        if not tokens or not plain_tokens:
            return Finding(Verdict.UNKNOWN, f"taken, but the answer does not say “{word}”, and no tokens are told")
        if tokens >= plain_tokens + MORE_TOKENS:
            return Finding(Verdict.YES, f"it counts for {tokens - plain_tokens} input tokens")
        return Finding(Verdict.NO, f"taken, but ignored: no tokens, and the answer does not say “{word}”")

    return judged


@on_message
def forced_call(message: Json, _: int) -> Finding:
    if calls_in(message):
        return Finding(Verdict.YES, "the answer is a call")
    return _without_effect(message, "the answer has no call")


@on_message
def parallel_calls(message: Json, _: int) -> Finding:
    calls = calls_in(message)
    if calls > 1:
        return Finding(Verdict.YES, f"{calls} calls in one answer")
    return Finding(Verdict.UNKNOWN, f"the model made {('no call', 'one call')[calls]}")


def calls_in(message: Json) -> int:
    return sum(block.get("type") == "tool_use" for block in message["content"])


def fits(schema: Json) -> Judge:
    """Whether the answer is an object of a flat schema of whole numbers and texts."""
    types = {name: {"integer": int, "string": str}[each["type"]] for name, each in schema["properties"].items()}

    @on_message
    def judged(message: Json, _: int) -> Finding:
        try:
            value = decode(text_of(message).encode())
        except JsonError:
            return _without_effect(message, "the answer is no JSON")
        if not isinstance(value, dict) or {name: type(each) for name, each in value.items()} != types:
            return _without_effect(message, "the answer is JSON of another shape")
        return Finding(Verdict.YES, "the answer fits the schema")

    return judged


def stopped_before(word: str, earlier: str) -> Judge:
    """Whether an answer that would say ``earlier`` and then ``word`` ended between the two."""

    @on_message
    def judged(message: Json, _: int) -> Finding:
        text = text_of(message).lower()
        if message.get("stop_reason") == "stop_sequence":
            return Finding(Verdict.YES, "the answer stopped there")
        if word in text:
            return Finding(Verdict.NO, "taken, but ignored: the answer goes on")
        if earlier in text:
            return Finding(Verdict.YES, f"the answer stopped there, with stop_reason {message.get('stop_reason')}")
        return Finding(Verdict.UNKNOWN, "taken, but the answer has not come to the word")

    return judged


def _without_effect(message: Json, what: str) -> Finding:
    """``what`` was expected otherwise: the field was ignored, unless the answer did not come to it."""
    reason, text = message.get("stop_reason"), text_of(message).lstrip()
    if reason == "refusal" or (reason in _CUT_SHORT and text[:1] in ("", "{")):
        return Finding(Verdict.UNKNOWN, f"{what}: it ended with {reason}")
    return Finding(Verdict.NO, f"taken, but ignored: {what}")


Findings = Mapping[str, Finding]
"""By the names of the rows."""

_FIELD_OF_ROW = {
    "prompt caching": "prompt_caching",
    "adaptive thinking": "thinking",
    "forced tool call": "forced_tool_choice",
    "images": "images",
    "PDFs": "pdfs",
    "structured output": "structured_outputs",
    "count_tokens": "count_tokens",
}


def profile_of(findings: Findings) -> dict[str, bool | list[str]]:
    """The fields of a profile that were really found out, in the order of ProfileSettings."""
    verdicts = {name: each.verdict for name, each in findings.items() if each.verdict is not Verdict.UNKNOWN}
    found: dict[str, bool | list[str]] = {}
    alone = [verdicts.get(name) for name in ("temperature", "top_p")]
    if Verdict.NO in alone:
        found["sampling"] = False
    elif None not in alone:
        found["sampling"] = True
        if (together := verdicts.get("temperature with top_p")) is not None:
            found["sampling_exclusive"] = together is Verdict.NO
    levels = {level: verdicts.get(f"effort {level}") for level in EFFORT_LEVELS}
    for row, field in _FIELD_OF_ROW.items():
        if row == "adaptive thinking" and None not in levels.values():
            found["effort"] = [level for level, verdict in levels.items() if verdict is Verdict.YES]
        if row in verdicts:
            found[field] = verdicts[row] is Verdict.YES
    return found
