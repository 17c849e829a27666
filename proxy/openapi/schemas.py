"""Words for writing JSON Schema in Python, so that a schema reads like what it describes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any]

STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
COUNT: Schema = {"type": "integer", "minimum": 0}
BOOLEAN: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}
NULL: Schema = {"type": "null"}


def ref(name: str) -> Schema:
    """The schema of this name among the document's components."""
    return {"$ref": f"#/components/schemas/{name}"}


def said(schema: Schema, description: str) -> Schema:
    """The schema with a description; beside a reference too."""
    return {**schema, "description": description}


def fixed(value: str) -> Schema:
    """This text and no other."""
    return {"type": "string", "const": value}


def choice(*values: str) -> Schema:
    """One of these texts."""
    return {"type": "string", "enum": list(values)}


def list_of(items: Schema, **more: Any) -> Schema:
    """A list of such items."""
    return {"type": "array", "items": items, **more}


def map_of(values: Schema) -> Schema:
    """An object of any names and such values."""
    return {"type": "object", "additionalProperties": values}


def record(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None, **more: Any) -> Schema:
    """An object of these members."""
    schema: Schema = {"type": "object", "properties": {**required, **(optional or {})}, **more}
    return {**schema, "required": list(required)} if required else schema


def any_of(*schemas: Schema) -> Schema:
    """What fits one of them."""
    return {"anyOf": list(schemas)}


def nullable(schema: Schema) -> Schema:
    """The same or null."""
    if schema == NULL:
        return schema
    if isinstance(schema.get("type"), str) and "enum" not in schema and "const" not in schema:
        return {**schema, "type": [schema["type"], "null"]}
    if schema.get("anyOf"):
        return {**schema, "anyOf": [*schema["anyOf"], NULL]}
    return any_of(schema, NULL) if schema else schema


def overlaid(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with ``over`` laid on it: objects are joined, whatever else is replaced."""
    joined = dict(base)
    for name, value in over.items():
        below = joined.get(name)
        joined[name] = overlaid(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return joined
