"""Which path answers what. One table, and the words for paths that are not in it.

The router is a dictionary: aiohttp's own answers to an unknown path or method are plain text, and what is to be
judged first is the matched path, never the Host header or an absolute target.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from urllib.parse import unquote

from aiohttp import web

Endpoint = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
Endpoints = Mapping[str, Mapping[str, Endpoint]]
"""Path to method to what answers. A path that ends in a slash stands for all paths below it."""

BASE_URLS = "the base URL is <gateway>/openai/v1 for OpenAI clients and <gateway> for Anthropic clients"
INSTEAD = {
    "/openai/v1/responses": "the Responses API is not offered; use POST /openai/v1/chat/completions "
    "(in the Vercel AI SDK `provider.chat(model)`, in the OpenAI Agents SDK the chat-completions model)",
    "/openai/v1/completions": "the legacy completions API is not offered; use POST /openai/v1/chat/completions",
    "/openai/v1/embeddings": "embeddings are not offered: the providers behind this gateway have none",
    "/openai/v1/files": "files are not offered; send images and PDFs as base64 data URLs in the messages",
    "/openai/v1/batches": "batches are not offered; send the requests one by one",
    "/v1/messages/batches": "batches are not offered; send the requests one by one to POST /v1/messages",
    "/v1/files": "files are not offered; send images and PDFs as base64 in the messages",
    "/v1/complete": "the legacy completions API is not offered; use POST /v1/messages",
    "/v1/chat/completions": f"OpenAI's endpoints are below /openai/v1: {BASE_URLS}",
    "/v1/responses": f"OpenAI's endpoints are below /openai/v1: {BASE_URLS}",
    "/chat/completions": f"OpenAI's endpoints are below /openai/v1: {BASE_URLS}",
    "/openai/chat/completions": f"OpenAI's endpoints are below /openai/v1: {BASE_URLS}",
    "/models": f"the model lists are below /v1 and /openai/v1: {BASE_URLS}",
    "/openai/models": f"OpenAI's endpoints are below /openai/v1: {BASE_URLS}",
    "/messages": f"Anthropic's endpoints are below /v1: {BASE_URLS}",
    "/openai/v1/messages": f"Anthropic's endpoints are below /v1: {BASE_URLS}",
}


def find(endpoints: Endpoints, path: str) -> Mapping[str, Endpoint] | None:
    """What the methods of a path answer, None for an unknown path. Paths are compared as they came, undecoded."""
    own = None if path.endswith("/") and path != "/" else endpoints.get(path)
    return own or _below(endpoints, path)


def _below(endpoints: Endpoints, path: str) -> Mapping[str, Endpoint] | None:
    for prefix, methods in endpoints.items():
        if prefix != "/" and prefix.endswith("/") and path.startswith(prefix) and len(path) > len(prefix):
            return methods
    return None


def below(request: web.BaseRequest, prefix: str) -> str:
    """What stands behind the prefix in the path, slashes raw or percent-encoded."""
    return unquote(request.rel_url.raw_path[len(prefix) :])


def not_found(path: str) -> str:
    """The words for an unknown path: what to use instead, where that can be told."""
    if path in INSTEAD:
        return INSTEAD[path]
    for doubled in ("/v1/v1/", "/openai/v1/v1/", "/openai/v1/openai/", "/openai/openai/", "/v1/openai/"):
        if path.startswith(doubled):
            return f"the path holds its prefix twice: {BASE_URLS}"
    for prefix, words in INSTEAD.items():
        if path.startswith(prefix + "/"):
            return words
    return "there is no such path; see GET /openapi.yaml"


def is_openai(path: str) -> bool:
    """Whether an error about this path is told in OpenAI's envelope."""
    return path.startswith("/openai") or path.endswith("/chat/completions")
