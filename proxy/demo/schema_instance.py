"""An instance of a JSON schema, filled from the user's words: tool arguments and structured output.

It knows the keywords that such schemas use and makes an instance, not every instance: `pattern` and the like are not
solved. Depth and size are bounded, since a schema may call itself.
"""

import re
from typing import Any

from proxy.demo.prompt import Json
from proxy.demo.refusal import Refusal

MOST_DEPTH = 32
MOST_VALUES = 1000
ROOMY_VALUES = 100  # after so many values only what is required is filled
MOST_ITEMS = 20
STRINGS_BY_FORMAT = {
    "date": "2026-01-31",
    "date-time": "2026-01-31T12:00:00Z",
    "time": "12:00:00Z",
    "duration": "P1D",
    "email": "demo@example.com",
    "hostname": "example.com",
    "ipv4": "192.0.2.1",
    "ipv6": "2001:db8::1",
    "uri": "https://example.com/",
    "uuid": "00000000-0000-4000-8000-000000000000",
}
WORD = re.compile(r"\w+(?:['’-]\w+)*")
QUOTED = re.compile(r"[\"“]([^\"”]+)[\"”]")
NAMES = re.compile(r"(?<=\w )[A-Z]\w*(?: [A-Z]\w*)*")  # capitalised words that don't begin the text
MOST_WORDS = 8


def schema_instance(schema: Json, user_text: str, *, path: str, optional_too: bool = False) -> Any:
    """A value that fits `schema`; objects get their required properties, with `optional_too` all of them.

    Raises Refusal naming `path` where the schema is none.
    """
    try:
        return _Filler(schema, subject(user_text), optional_too).fill(schema, 0)
    except (TypeError, ValueError, AttributeError) as error:
        raise Refusal(f"{path}: JSON schema is invalid") from error


def subject(user_text: str) -> str:
    """What the user speaks of: a quotation, else a name, else the first words.

    Words alone, without any other characters: an agent may run what it is given.
    """
    quoted, named = QUOTED.search(user_text), NAMES.search(user_text)
    chosen = quoted.group(1) if quoted else named.group() if named else user_text
    return " ".join(WORD.findall(chosen)[:MOST_WORDS]) or "demo"


class _Filler:
    def __init__(self, root: Json, words: str, optional_too: bool) -> None:
        self._root = root
        self._words = words
        self._optional_too = optional_too
        self._values = 0

    def fill(self, schema: Any, depth: int) -> Any:
        self._values += 1
        if not isinstance(schema, dict):
            return self._words
        if depth > MOST_DEPTH or self._values > MOST_VALUES:
            return None
        for keyword in ("const", "default"):
            if keyword in schema:
                return schema[keyword]
        for keyword in ("enum", "examples"):
            if isinstance(schema.get(keyword), list) and schema[keyword]:
                return schema[keyword][0]
        another = self._another_schema(schema)
        if another is not None:
            return self.fill(another, depth + 1)
        return self._by_type(schema, depth)

    def _another_schema(self, schema: Json) -> Any:
        """The schema that this one refers to, or the first of its choices, or all its parts as one."""
        if isinstance(schema.get("$ref"), str):
            return self._resolve(schema["$ref"])
        for keyword in ("anyOf", "oneOf"):
            choices = schema.get(keyword)
            if isinstance(choices, list) and choices:
                return next((choice for choice in choices if not _is_null(choice)), choices[0])
        parts = schema.get("allOf")
        if isinstance(parts, list) and parts:
            return self._merged([{key: schema[key] for key in schema if key != "allOf"}, *parts])
        return None

    def _resolve(self, reference: str) -> Any:
        found: Any = self._root
        for step in reference.removeprefix("#").split("/")[1:]:
            found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
        return found if isinstance(found, dict) else {}

    def _merged(self, parts: list[Any]) -> Json:
        merged: Json = {}
        for part in parts:
            if not isinstance(part, dict):
                continue
            whole = self._resolve(part["$ref"]) if isinstance(part.get("$ref"), str) else part
            properties = {**merged.get("properties", {}), **whole.get("properties", {})}
            required = [*merged.get("required", []), *whole.get("required", [])]
            merged = {**merged, **whole, "properties": properties, "required": required}
        return {key: value for key, value in merged.items() if value or key not in ("properties", "required")}

    def _by_type(self, schema: Json, depth: int) -> Any:
        match _type_of(schema):
            case "object":
                return self._object(schema, depth)
            case "array":
                return self._array(schema, depth)
            case "integer" | "number":
                return _number(schema)
            case "boolean":
                return True
            case "null":
                return None
        return self._string(schema)

    def _object(self, schema: Json, depth: int) -> Json:
        properties, required = schema.get("properties") or {}, schema.get("required") or []
        roomy = self._optional_too and self._values < ROOMY_VALUES
        names = [name for name in properties if roomy or name in required]
        return {name: self.fill(properties[name], depth + 1) for name in names}

    def _array(self, schema: Json, depth: int) -> list[Any]:
        least = schema.get("minItems", 0)
        count = max(least, 1 if self._values < ROOMY_VALUES else 0)
        return [self.fill(schema.get("items", {}), depth + 1) for _ in range(min(count, MOST_ITEMS))]

    def _string(self, schema: Json) -> str:
        text = STRINGS_BY_FORMAT.get(schema.get("format", ""), self._words)
        least, most = min(schema.get("minLength", 0), 1000), schema.get("maxLength", len(text))
        return text[:most].ljust(least, ".")


def _is_null(schema: Any) -> bool:
    return isinstance(schema, dict) and schema.get("type") == "null"


def _type_of(schema: Json) -> str:
    kind = schema.get("type")
    if isinstance(kind, list):
        return str(next((name for name in kind if name != "null"), "null"))
    if kind is None and "properties" in schema:
        return "object"
    return str(kind)


def _number(schema: Json) -> int | float:
    """1, or what the bounds make of it."""
    least = max(schema.get("minimum", 1), schema.get("exclusiveMinimum", 0) + 1, schema.get("multipleOf", 1))
    number: int | float = min(least, schema.get("maximum", least), schema.get("exclusiveMaximum", least + 1) - 1)
    return number
