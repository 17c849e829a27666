"""What each path of the public listener does, in a table. A path that ends in a slash stands for those below it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from proxy.catalogue import DEFAULT_LIMIT, LARGEST_LIMIT
from proxy.errors import Kind
from proxy.openapi.errors import errors_of
from proxy.openapi.headers import answer_headers_of, parameters_of
from proxy.openapi.schemas import INTEGER, OBJECT, STRING, Schema, choice, fixed, record, ref
from proxy.plugin import Format, Route

JSON = "application/json"
EVENTS = "text/event-stream"
YAML = "application/yaml"

_KEYED = (Kind.AUTHENTICATION, Kind.PERMISSION, Kind.RATE_LIMIT, Kind.INTERNAL, Kind.UNAVAILABLE)
_EXCHANGE = (
    *(*_KEYED, Kind.INVALID_REQUEST, Kind.BILLING, Kind.MODEL_NOT_FOUND),
    *(Kind.TOO_LARGE, Kind.OVERLOADED, Kind.TIMEOUT),
)
_PAGE = {
    "limit": ({**INTEGER, "minimum": 1, "maximum": LARGEST_LIMIT, "default": DEFAULT_LIMIT}, "Models of a page."),
    "after_id": (STRING, "The models behind this one."),
    "before_id": (STRING, "The models ahead of this one."),
}


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path."""

    summary: str
    answer: Mapping[str, Schema]
    """Content type to schema."""
    route: Route | None = None
    """None: no key is asked."""
    format: Format = "messages"
    """Whose envelope an error has."""
    request: Schema | None = None
    query: Mapping[str, tuple[Schema, str]] | None = None
    errors: tuple[Kind, ...] = (Kind.INTERNAL,)
    below: str = "An id or an alias; the slash of an id may stand as it is."
    """What stands below a path that ends in a slash."""
    more: Mapping[str, tuple[str, Schema]] | None = None
    """Further statuses that are no errors of the envelope: description and schema."""


def _status(*words: str) -> Schema:
    return record({"status": choice(*words)})


OPERATIONS: Mapping[str, Operation] = {
    "/v1/messages": Operation(
        "Ask a model, in Messages format.",
        {JSON: ref("Message"), EVENTS: ref("MessageEvent")},
        Route.MESSAGES,
        request=ref("MessagesRequest"),
        errors=_EXCHANGE,
    ),
    "/v1/messages/count_tokens": Operation(
        "Count the tokens of a request in Messages format; not billed.",
        {JSON: ref("TokenCount")},
        Route.COUNT_TOKENS,
        request=ref("CountTokensRequest"),
        errors=_EXCHANGE,
    ),
    "/openai/v1/chat/completions": Operation(
        "Ask a model, in OpenAI's format.",
        {JSON: ref("ChatCompletion"), EVENTS: ref("ChatCompletionChunk")},
        Route.CHAT_COMPLETIONS,
        "openai",
        request=OBJECT,
        errors=_EXCHANGE,
    ),
    "/v1/models": Operation(
        "The models that the key may use, in the Messages API's shape.",
        {JSON: ref("MessagesModelList")},
        Route.MODELS,
        query=_PAGE,
        errors=(*_KEYED, Kind.INVALID_REQUEST),
    ),
    "/v1/models/": Operation(
        "One model, in the Messages API's shape.",
        {JSON: ref("MessagesModel")},
        Route.MODELS,
        errors=(*_KEYED, Kind.MODEL_NOT_FOUND),
    ),
    "/openai/v1/models": Operation(
        "The models that the key may use, in OpenAI's shape.",
        {JSON: ref("OpenAIModelList")},
        Route.MODELS,
        "openai",
        errors=_KEYED,
    ),
    "/openai/v1/models/": Operation(
        "One model, in OpenAI's shape.",
        {JSON: ref("OpenAIModel")},
        Route.MODELS,
        "openai",
        errors=(*_KEYED, Kind.MODEL_NOT_FOUND),
    ),
    "/api/key": Operation(
        "What is left of the key's budgets and limits, and the models that it may use.",
        {JSON: ref("Key")},
        Route.MODELS,
        errors=_KEYED,
    ),
    "/api/key/requests/": Operation(
        "What one of the key's own requests used and cost.",
        {JSON: ref("RequestCost")},
        Route.MODELS,
        errors=(*_KEYED, Kind.PATH_NOT_FOUND),
        below="The request-id of the answer.",
    ),
    "/api/models": Operation("All models, with what they can do and cost.", {JSON: ref("Catalogue")}),
    "/openapi.yaml": Operation("This description.", {YAML: OBJECT}),
    "/healthz": Operation("Whether the gateway runs.", {JSON: _status("ok")}),
    "/readyz": Operation(
        "Whether the gateway takes requests.",
        {JSON: _status("ready")},
        more={"503": ("It is about to stop, or its store is down.", _status("draining", "unavailable"))},
    ),
    "/": Operation("Who answers here.", {JSON: record({"name": fixed("EZAT Router"), "models": STRING})}),
}
"""Every path of the engine. What a path of a plugin does, the plugin says."""

PAGE = Operation("A page of a plugin.", {JSON: {}})
"""A page that its plugin doesn't describe."""


def described(path: str, method: str, operation: Operation) -> dict[str, Any]:
    """The operation as OpenAPI says it, without its security."""
    parameters = [_query(name, *each) for name, each in (operation.query or {}).items()]
    if path.endswith("/") and path != "/":
        said_below = {"description": operation.below, "schema": STRING}
        parameters.append({"name": "id", "in": "path", "required": True, **said_below})
    headers = answer_headers_of(operation.route)
    content = {} if method == "head" else {kind: {"schema": schema} for kind, schema in operation.answer.items()}
    responses = {"200": {"description": "The answer.", "headers": headers, "content": content}}
    for status, (description, schema) in (operation.more or {}).items():
        responses[status] = {"description": description, "headers": headers, "content": {JSON: {"schema": schema}}}
    said: dict[str, Any] = {
        "summary": operation.summary,
        "parameters": [*parameters, *parameters_of(operation.route)],
        "responses": {**responses, **errors_of(operation.format, operation.errors)},
    }
    if operation.request is not None:
        said["requestBody"] = {"required": True, "content": {JSON: {"schema": operation.request}}}
    return said


def _query(name: str, schema: Schema, description: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "description": description, "schema": schema}
