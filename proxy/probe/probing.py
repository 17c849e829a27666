"""The order of the probe: can it be asked at all, then row after row, then what was only taken is doubted.

A refusal counts as one only where the plain question was answered: everything is judged against that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from secrets import token_hex

from proxy.probe.asking import Answered, Asker, Outcome
from proxy.probe.findings import (
    Finding,
    Json,
    Verdict,
    counted,
    doubted,
    finding,
    input_tokens,
    message_of,
    plain_answer,
)
from proxy.probe.requests import CACHING, CONTROLS, MESSAGES, PLAIN, QUESTIONS, body_for, cached_prefix

ROWS = (PLAIN, *(question.row for question in QUESTIONS), CACHING)
"""Without those about the key and the version, whose names differ."""
SILENCES = 2
"""Rows in a row without any answer after which nothing more is asked."""
CACHE_TRIES = 3
"""How often the same text is sent: a cache may need a moment, and be that of another server behind the same name."""

Tell = Callable[[str, str], None]
"""Is told the model and the row that come next."""


@dataclass(slots=True)
class Probed:
    """What was found out about one model of an upstream. ``stopped`` says why no more was."""

    model: str
    findings: dict[str, Finding] = field(default_factory=dict)
    stopped: str | None = None


class KeyRefused(Exception):
    """The upstream lets nobody in with this key: there is nothing to ask it."""


class Probe:
    """Asks one upstream about its models. Where it takes the key only in the other way, it is asked in that way."""

    def __init__(self, asker: Asker, tell: Tell) -> None:
        self._asker = asker
        self._tell = tell
        self.other_auth: str | None = None
        """The way of sending the key that works, where it is not the configured one."""

    async def ask_about(self, model: str) -> Probed:
        """Everything about one model. Raises KeyRefused."""
        probed = Probed(model)
        answered = await self._let_in(probed)
        probed.findings[PLAIN] = finding(answered, plain_answer, 0)
        message = _message(answered)
        if message is None:
            probed.stopped = f"{model} can't be asked: {_why(answered)}"
        else:
            probed.findings[f"version {self._asker.version}"] = Finding(
                Verdict.YES, "sent as anthropic-version, and taken"
            )
            await self._rows(probed, input_tokens(message))
        for row in ROWS:
            probed.findings.setdefault(row, Finding(Verdict.UNKNOWN, "not tried"))
        return probed

    async def _let_in(self, probed: Probed) -> Answered:
        """The answer to the plain question, with the key sent in the other way where it has to be."""
        self._tell(probed.model, PLAIN)
        asker, body = self._asker, body_for(probed.model, {})
        answered = await asker.ask(MESSAGES, body)
        if answered.status == 200:
            evidence = "the key is taken" if asker.has_key else "no key is configured, and none is asked for"
            probed.findings[f"auth: {asker.auth}"] = Finding(Verdict.YES, evidence)
        if answered.status != 401:
            return answered
        if not asker.has_key:
            raise KeyRefused(f"it asks for a key, and none is configured ({answered.evidence})")
        other = asker.sending_otherwise()
        second = await other.ask(MESSAGES, body)
        if second.status != 200:
            tried = f"as {asker.auth} ({answered.evidence}) and as {other.auth} ({second.evidence})"
            raise KeyRefused(f"it refuses the key, sent {tried}")
        probed.findings[f"auth: {asker.auth}"] = Finding(Verdict.NO, answered.evidence)
        probed.findings[f"auth: {other.auth}"] = Finding(Verdict.YES, "the key is taken when it is sent like this")
        self._asker, self.other_auth = other, other.auth
        return second

    async def _rows(self, probed: Probed, plain_tokens: int) -> None:
        silent = 0
        for question in QUESTIONS:
            self._tell(probed.model, question.row)
            answered = await self._asker.ask(question.path, body_for(probed.model, question.body))
            probed.findings[question.row] = finding(answered, question.judge, plain_tokens)
            silent = silent + 1 if answered.status is None else 0
            if silent == SILENCES:
                probed.stopped = f"{probed.model} has ceased to answer: {answered.words}"
                return
        self._tell(probed.model, CACHING)
        probed.findings[CACHING] = await self._caching(probed.model)
        await self._doubt(probed)

    async def _caching(self, model: str) -> Finding:
        run, written = token_hex(8), 0
        marked = body_for(model, cached_prefix(run, marked=True))
        for number in range(CACHE_TRIES):
            answered = await self._asker.ask(MESSAGES, marked)
            if answered.outcome is Outcome.REFUSED:
                return await self._refused_mark(answered, body_for(model, cached_prefix(run, marked=False)))
            message = _message(answered)
            if message is None:
                return Finding(Verdict.UNKNOWN, _why(answered))
            read = counted(message, "cache_read_input_tokens")
            if number and read:
                return Finding(Verdict.YES, f"{read} tokens are read back")
            written = max(written, counted(message, "cache_creation_input_tokens"))
        return Finding(Verdict.NO, f"taken, but nothing is read back ({written} tokens were written)")

    async def _refused_mark(self, refused: Answered, unmarked: Json) -> Finding:
        """Whether it is the mark that was refused, or the long text."""
        answered = await self._asker.ask(MESSAGES, unmarked)
        if answered.outcome is Outcome.TAKEN:
            return Finding(Verdict.NO, refused.evidence)
        return Finding(Verdict.UNKNOWN, f"so long a text is refused without a mark, too: {answered.evidence}")

    async def _doubt(self, probed: Probed) -> None:
        found = probed.findings
        for control in CONTROLS:
            if not any(found[row].verdict is Verdict.YES and not found[row].seen for row in control.rows):
                continue
            self._tell(probed.model, control.rows[0])
            answered = await self._asker.ask(MESSAGES, body_for(probed.model, control.body))
            if answered.outcome is Outcome.TAKEN:
                found.update({row: doubted(found[row], control.nonsense) for row in control.rows})


def _message(answered: Answered) -> Json | None:
    return message_of(answered) if answered.outcome is Outcome.TAKEN else None


def _why(answered: Answered) -> str:
    """Why an answer is of no use."""
    return f"{answered.status}, but the answer is no message" if answered.status == 200 else answered.evidence
