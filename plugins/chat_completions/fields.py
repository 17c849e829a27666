"""Every top-level field of a Chat Completions request, and what becomes of it: the one table.

The refusals, the names in ``x-ezat-ignored`` and ``GET /api/compat`` all come from it. The rows with a refusal stand
in the order in which they are judged. A field that a later plugin sends on (``_later``) counts as ignored until that
plugin takes its name off the list, so that each of them can be left out of the pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from plugins.chat_completions.tables import (
    EFFORTS,
    NO_LEGACY_CALL,
    NO_LEGACY_ROLE,
    ONLY_FUNCTIONS,
    PARTS,
    TOOLS,
    Class,
    Entry,
)
from plugins.chat_completions.values import KINDS, one_of
from proxy.errors import GatewayError, refused

Refusal = Callable[[Any], GatewayError | None]


@dataclass(frozen=True, slots=True)
class Field:
    """One row. ``refusal`` judges a value that isn't null; ``lost`` says whether a value that isn't null asked for
    something that the translation leaves out."""

    entry: Entry
    refusal: Refusal | None
    lost: Callable[[Any], bool]


def refusals(body: Mapping[str, Any]) -> GatewayError | None:
    """The first refusal among the top-level fields, in the table's order; null is refused nowhere."""
    for name, refusal in _REFUSALS:
        value = body.get(name)
        if value is not None and (error := refusal(value)) is not None:
            return error
    return None


def ignored(body: Mapping[str, Any]) -> set[str]:
    """The names of the top-level fields that asked for something and don't get it from the translation."""
    names = set()
    for name, value in body.items():
        if value is not None:
            field = FIELDS.get(name)
            if field is None or field.lost(value):
                names.add(name)
    return names


def compat() -> dict[str, dict[str, dict[str, str]]]:
    """All tables, for ``GET /api/compat``: ``{"fields": {NAME: {"class", "message"?, "note"?}}, "parts", "tools"}``."""
    return {
        "fields": {name: field.entry.described() for name, field in FIELDS.items()},
        "parts": {name: entry.described() for name, entry in PARTS.items()},
        "tools": {name: entry.described() for name, entry in TOOLS.items()},
    }


def _never(value: Any) -> bool:
    return False


def _field(kind: Class, note: str | None, message: str | None, refusal: Refusal | None) -> Field:
    lost = _never if refusal is None else lambda value: refusal(value) is not None
    return Field(Entry(kind, message=message, note=note), refusal, lost)


def _honoured(note: str | None = None, message: str | None = None, refusal: Refusal | None = None) -> Field:
    return _field("honoured", note, message, refusal)


def _later(
    note: str, harmless: tuple[Any, ...] = (), message: str | None = None, refusal: Refusal | None = None
) -> Field:
    without_effect = one_of(*harmless)
    return Field(Entry("honoured", message=message, note=note), refusal, lambda value: not without_effect(value))


def _ignored(note: str, *harmless: Any) -> Field:
    without_effect = one_of(*harmless)
    return Field(Entry("ignored", note=note), None, lambda value: not without_effect(value))


def _refused(message: str, note: str | None = None, *, unless: tuple[Any, ...] = (), kind: str | None = None) -> Field:
    path, text = message.split(": ", 1)
    harmless = one_of(*unless)

    def refusal(value: Any) -> GatewayError | None:
        if kind is not None and not KINDS[kind](value):
            return refused(path, f"must be {kind}")
        return None if harmless(value) else refused(path, text)

    return _field("refused", note, message, refusal)


def _json_object(value: Any) -> GatewayError | None:
    if isinstance(value, dict) and value.get("type") == "json_object":
        return refused("response_format", _JSON_OBJECT)
    return None


def _foreign_tool(tools: Any) -> GatewayError | None:
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        if isinstance(tool, dict) and tool.get("type") not in (None, "function"):
            return refused(f"tools[{index}].type", ONLY_FUNCTIONS)
    return None


def _unknown_effort(value: Any) -> GatewayError | None:
    return None if isinstance(value, str) and value in EFFORTS else refused("reasoning_effort", _USE_EFFORT)


_JSON_OBJECT = (
    'type "json_object" is not supported; use "json_schema" with a schema (objects need "additionalProperties": false)'
)
_USE_EFFORT = f"use one of {', '.join(EFFORTS)}"
_LEGACY = f"functions: {NO_LEGACY_CALL}"
_MODALITIES = "modalities: only text output is supported"

_IGNORED_TOGETHER = {
    "Kept in the ledger, not sent on.": "user safety_identifier",
    "The Messages API has no counterpart.": "seed prediction moderation min_p top_a repetition_penalty "
    "logprob_start_len best_of suffix echo ignore_eos min_tokens length_penalty use_beam_search early_stopping "
    "bad_words grammar",
    "Use cache_control on parts and tools, or prompt_cache_key.": "prompt_cache_options prompt_cache_retention "
    "cache_control caching",
    "The operator's configuration decides where a request goes.": "models provider route fallbacks num_retries "
    "context_window_fallbacks transforms plugins preset api_base base_url api_key api_version custom_llm_provider "
    "headers extra_headers extra_query default_headers timeout request_timeout max_retries stream_timeout "
    "mock_response drop_params additional_drop_params allowed_openai_params tags guardrails callbacks betas "
    "anthropic_beta anthropic_version",
    "An SDK merges it into the body; as a field it means nothing.": "extra_body",
    "Use reasoning_effort.": "reasoning include_reasoning reasoning_format thinking output_config enable_thinking "
    "thinking_budget chat_template_kwargs think",
    "Use stream_options.include_usage.": "usage",
    "Use messages with the role system.": "system",
    "Use stop.": "stop_sequences",
    "Use response_format.": "guided_json guided_regex guided_choice guided_grammar format",
    "A field of the Messages format; send it to /v1/messages.": "top_k mcp_servers container context_management "
    "inference_geo speed",
    "A field of another API.": "input instructions previous_response_id include truncation background conversation "
    "keep_alive options prompt",
}

FIELDS: dict[str, Field] = {
    "model": _honoured("An id or alias of the model list; comes back as sent."),
    "messages": _honoured(
        'Roles system, developer, user, assistant and tool. "name" and unknown keys of a message are ignored.',
        f"messages[i].role: {NO_LEGACY_ROLE}",
    ),
    "stream": _honoured(),
    "stream_options": _honoured("include_usage; without effect when not streaming."),
    "max_completion_tokens": _honoured("Above the model's maximum it is sent as the maximum."),
    "max_tokens": _honoured("max_completion_tokens wins. Above the model's maximum it is sent as the maximum."),
    "stop": _honoured("Empty strings are dropped."),
    "tool_choice": _honoured('"auto", "none", "required" or a named function; ignored without tools.'),
    "parallel_tool_calls": _honoured("Ignored without tools."),
    "prompt_cache_key": _honoured("Names the conversation; at most 256 characters. The header x-ezat-session wins."),
    "temperature": _later(
        "0 to 2, sent as 1 above 1. Dropped for models without sampling and where thinking is requested.", (1,)
    ),
    "top_p": _later("0 to 1, sent below 1. Dropped for models without sampling and where thinking is requested.", (1,)),
    # From here on in the order of judgement.
    "n": _refused(
        "n: only 1 choice per request is supported", "Send several requests.", unless=(1,), kind="an integer"
    ),
    "logprobs": _refused("logprobs: log probabilities are not available", unless=(False,), kind="a boolean"),
    "top_logprobs": _refused("top_logprobs: log probabilities are not available", unless=(0,), kind="an integer"),
    "logit_bias": _refused("logit_bias: is not supported", unless=({},), kind="an object"),
    "audio": _refused(_MODALITIES),
    "modalities": _refused(_MODALITIES, unless=(["text"],), kind="a list"),
    "web_search_options": _refused("web_search_options: is not supported"),
    "functions": _refused(_LEGACY, "Use tools."),
    "function_call": _refused(_LEGACY, "Use tool_choice."),
    "response_format": _honoured("text or json_schema.", f"response_format: {_JSON_OBJECT}", _json_object),
    "tools": _honoured("Functions.", f"tools[i].type: {ONLY_FUNCTIONS}", _foreign_tool),
    "reasoning_effort": _later(
        "none and minimal ask for low effort without thinking, the others for adaptive thinking.",
        message=f"reasoning_effort: {_USE_EFFORT}",
        refusal=_unknown_effort,
    ),
    # Ignored.
    "presence_penalty": _ignored("The Messages API has no penalties.", 0),
    "frequency_penalty": _ignored("The Messages API has no penalties.", 0),
    "store": _ignored("Completions are not stored.", False),
    "metadata": _ignored("Completions are not stored.", {}),
    "service_tier": _ignored("There is one tier.", "auto", "default"),
    "verbosity": _ignored("The Messages API has no counterpart; say it in the system prompt.", "medium"),
    **{name: _ignored(note) for note, names in _IGNORED_TOGETHER.items() for name in names.split()},
}

_REFUSALS = [(name, field.refusal) for name, field in FIELDS.items() if field.refusal is not None]
