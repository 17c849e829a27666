"""The API as an OpenAPI 3.1 document, for ``GET /openapi.yaml``.

It is made from what answers: the paths are those of the running listener, the errors those of the dialects' tables,
the fields of a Chat Completions request those of the translator, which lays them over the engine's part by
``Plugin.describe``. What is switched off isn't in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from proxy.openapi import chat, errors, headers, keys, messages, models
from proxy.openapi.operations import OPERATIONS, PAGE, described
from proxy.openapi.schemas import overlaid
from proxy.openapi.yaml_text import as_yaml
from proxy.plugin import Plugin

__all__ = ["as_yaml", "document"]

VERSION = "1"
"""Of the API: it counts changes that break clients."""
_ABOUT = (
    "A gateway between clients of two formats and providers of models. OpenAI clients take `<gateway>/openai/v1` as "
    "their base URL, Anthropic clients `<gateway>`. An unknown path answers 404, another method 405 with `allow`, in "
    "the envelope of the path's format. A model's ids hold a slash, which may stand as it is in a path."
)


def document(
    paths: Mapping[str, Iterable[str]],
    plugins: Iterable[Plugin] = (),
    *,
    base_path: str = "",
    asks_for_key: bool = True,
) -> dict[str, Any]:
    """The document for these paths, each with its methods, of a listener with these plugins."""
    security: list[dict[str, Any]] = [{"bearer": []}, {"api_key": []}] if asks_for_key else []
    whole: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "EZAT Router", "version": VERSION, "description": _ABOUT},
        "servers": [{"url": base_path or "/"}],
        "paths": {_template(path): _path_item(path, methods, security) for path, methods in paths.items()},
        "components": {
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "api_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
            **headers.components(),
            "responses": errors.responses(),
            "schemas": {
                **errors.schemas(),
                **messages.schemas(),
                **chat.schemas(),
                **models.schemas(),
                **keys.schemas(),
            },
        },
    }
    for plugin in plugins:
        whole = overlaid(whole, plugin.describe())
    return whole


def _template(path: str) -> str:
    return path + "{id}" if path.endswith("/") and path != "/" else path


def _path_item(path: str, methods: Iterable[str], security: list[dict[str, Any]]) -> dict[str, Any]:
    operation = OPERATIONS.get(path, PAGE)
    asked = security if operation.route is not None else []
    return {method.lower(): {**described(path, method.lower(), operation), "security": asked} for method in methods}
