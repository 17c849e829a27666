"""A request's prompt as one flat list of pieces: tools, then system, then the messages' blocks.

That order is the one in which a prompt is cached, so checks, token counts and the prompt cache all walk the same list.
Messages have no border of their own in it: consecutive messages of one role are one turn to the API.
"""

from dataclasses import dataclass
from typing import Any

import orjson

Json = dict[str, Any]

BYTES_PER_TOKEN = 4
FLAT_TOKENS = {"image": 1000, "document": 2000}  # whatever their size; a document of plain text counts as text
UNMARKABLE = ("thinking", "redacted_thinking")  # blocks that can't carry a cache_control mark


def count_tokens(text: str | bytes) -> int:
    """The demo's estimate: 1 token is 4 bytes of UTF-8, rounded up."""
    size = len(text.encode() if isinstance(text, str) else text)
    return -(-size // BYTES_PER_TOKEN)


def first_tokens(text: str, tokens: int) -> str:
    """As much of `text` as fits into `tokens`, never half a character."""
    return text.encode()[: max(tokens, 0) * BYTES_PER_TOKEN].decode(errors="ignore")


@dataclass(frozen=True, slots=True)
class Piece:
    """One tool, system block or content block; `path` as errors name it, `role` whose it is (`tools`, `system`, …)."""

    path: str
    role: str
    block: Json

    def marks(self) -> list[tuple[str, Any]]:
        """Path and value of each `cache_control` that isn't null, those in the content of a tool result included."""
        inner = [(f"{self.path}.content.{number}", part) for number, part in enumerate(_inner_blocks(self.block))]
        blocks = [*inner, (self.path, self.block)]
        return [(path, block["cache_control"]) for path, block in blocks if block.get("cache_control") is not None]

    def can_carry_mark(self) -> bool:
        return self.block.get("type") not in UNMARKABLE and self.block.get("text") != ""

    def tokens(self) -> int:
        return _block_tokens(self.block)

    def canonical(self) -> bytes:
        """What the cache compares: no marks, a block's own keys sorted; `input` and schemas keep their order."""
        return orjson.dumps(_without_marks(self.block))


def pieces(body: Json) -> list[Piece]:
    """The prompt of a checked request; a string stands for one text block."""
    found = [Piece(f"tools.{number}", "tools", tool) for number, tool in enumerate(body.get("tools") or [])]
    found += content_pieces(body.get("system") or [], "system", "system")
    for number, message in enumerate(body["messages"]):
        found += content_pieces(message["content"], f"messages.{number}.content", message["role"])
    return found


def content_pieces(content: str | list[Json], path: str, role: str) -> list[Piece]:
    """The blocks of one `content` or `system`; an empty string has none."""
    if isinstance(content, str):
        return [Piece(path, role, {"type": "text", "text": content})] if content else []
    return [Piece(f"{path}.{number}", role, block) for number, block in enumerate(content)]


def newest_user_text(body: Json) -> str:
    """What the user typed last: the last text block of the newest user message, "" if it has none.

    Not the whole message: agents put reminders of their own before the user's words.
    """
    newest = newest_user_message(body)
    if newest is None:
        return ""
    blocks = [piece.block for piece in content_pieces(newest["content"], "", "user")]
    return next((str(block["text"]) for block in reversed(blocks) if block["type"] == "text"), "")


def newest_user_message(body: Json) -> Json | None:
    return next((message for message in reversed(body["messages"]) if message["role"] == "user"), None)


def _inner_blocks(block: Json) -> list[Json]:
    inner = block.get("content")
    return [part for part in inner if isinstance(part, dict)] if isinstance(inner, list) else []


def _without_marks(block: Json) -> Json:
    bare = {key: block[key] for key in sorted(block) if key != "cache_control"}
    inner = _inner_blocks(bare)
    if inner:
        bare["content"] = [_without_marks(part) for part in inner]
    return bare


def _block_tokens(block: Json) -> int:
    kind, source = block.get("type"), block.get("source")
    if kind == "document" and isinstance(source, dict) and source.get("type") == "text":
        return count_tokens(str(source.get("data", "")))
    if kind in FLAT_TOKENS:
        return FLAT_TOKENS[kind]
    if kind in ("text", "thinking"):
        return count_tokens(str(block.get(kind, "")))
    if kind == "tool_result":
        content = block.get("content")
        return count_tokens(content) if isinstance(content, str) else sum(map(_block_tokens, _inner_blocks(block)))
    return count_tokens(orjson.dumps(_without_marks(block)))
