"""What becomes of message parts, of tools and of an effort; the top-level fields stand in ``fields``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from proxy.models import Effort

Class = Literal["honoured", "refused", "ignored"]

ONLY_FUNCTIONS = "only function tools are supported"
NO_AUDIO = "audio input is not supported"
NO_FILE_ID = "send the PDF as file_data (a base64 data URL); file_id is not supported"
NO_LEGACY_CALL = "the legacy functions API is not supported; use tools"
NO_LEGACY_ROLE = 'the legacy "function" role is not supported; use tools'


@dataclass(frozen=True, slots=True)
class Entry:
    """What becomes of something, for ``GET /api/compat``. ``message`` is the refusal, also of a single value of an
    honoured field; ``note`` is the reason, or what to use instead."""

    kind: Class
    message: str | None = None
    note: str | None = None

    def described(self) -> dict[str, str]:
        """``{"class", "message"?, "note"?}``."""
        texts = {"class": self.kind, "message": self.message, "note": self.note}
        return {name: text for name, text in texts.items() if text is not None}


EFFORTS: Final[dict[str, Effort]] = {
    "none": "low",
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "xhigh",
    "max": "max",
}
"""From ``reasoning_effort`` to the effort of the Messages format."""

WITHOUT_THINKING = frozenset({"none", "minimal"})
"""The efforts for which thinking isn't requested."""

PARTS: Final = {
    "text": Entry("honoured", note="Text that is empty or only white space is dropped."),
    "image_url": Entry(
        "honoured",
        note='A data URL of JPEG, PNG, GIF or WebP, or an http(s) URL, in user and tool messages; "detail" is ignored.',
    ),
    "file": Entry(
        "honoured",
        message=f"messages[i].content[j].file: {NO_FILE_ID}",
        note='A PDF as a data URL, in user and tool messages; "filename" is ignored.',
    ),
    "input_audio": Entry("refused", message=f"messages[i].content[j]: {NO_AUDIO}"),
    "refusal": Entry("ignored", note="The part is dropped from the conversation."),
}
"""The parts of messages, by type. Any other type is refused."""

TOOLS: Final = {
    "function": Entry("honoured", note="name, description, parameters, strict and cache_control."),
    "custom": Entry("refused", message=f"tools[i].type: {ONLY_FUNCTIONS}", note="Use a function with one string."),
}
"""The tools, by type. Any other type is refused like custom."""
