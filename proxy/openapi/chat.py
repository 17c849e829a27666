"""The answers of Chat Completions, as ``proxy.dialects.openai`` makes them; the translator describes the request."""

from __future__ import annotations

from proxy.openapi.schemas import COUNT, INTEGER, NULL, STRING, Schema, fixed, list_of, nullable, record, ref, said


def schemas() -> dict[str, Schema]:
    """Completions and chunks."""
    id = {**STRING, "pattern": "^chatcmpl-"}
    return {
        "ChatCompletion": record(
            {
                "id": said(id, "`chatcmpl-` and the request-id."),
                "object": fixed("chat.completion"),
                "created": INTEGER,
                "model": said(STRING, "The name that was sent."),
                "choices": list_of(ref("ChatChoice"), minItems=1, maxItems=1),
                "usage": ref("ChatUsage"),
            }
        ),
        "ChatChoice": record(
            {
                "index": {"const": 0},
                "message": record(
                    {
                        "role": fixed("assistant"),
                        "content": said(nullable(STRING), "Null where there are only tool calls."),
                        "refusal": NULL,
                    },
                    {"tool_calls": list_of(ref("ChatToolCall"), minItems=1)},
                ),
                "logprobs": NULL,
                "finish_reason": ref("ChatFinishReason"),
            }
        ),
        "ChatFinishReason": STRING,
        "ChatToolCall": record(
            {
                "id": STRING,
                "type": fixed("function"),
                "function": record({"name": STRING, "arguments": said(STRING, "A JSON object as text.")}),
            }
        ),
        "ChatUsage": record(
            {
                "prompt_tokens": said(COUNT, "What was read from the prompt cache and written to it included."),
                "completion_tokens": COUNT,
                "total_tokens": COUNT,
                "prompt_tokens_details": record({"cached_tokens": COUNT, "cache_write_tokens": COUNT}),
                "completion_tokens_details": record({"reasoning_tokens": COUNT}),
            }
        ),
        "ChatCompletionChunk": record(
            {
                "id": id,
                "object": fixed("chat.completion.chunk"),
                "created": INTEGER,
                "model": STRING,
                "choices": said(list_of(ref("ChatChunkChoice"), maxItems=1), "Empty in the chunk of the usage."),
            },
            {
                "usage": said(
                    nullable(ref("ChatUsage")),
                    "Only with stream_options.include_usage: null, and the counts in a last chunk.",
                )
            },
            description="The data of one event; behind the last one stands `data: [DONE]`. After a time of silence "
            "comes the comment `: ping`, after a failure an event of the error's envelope.",
        ),
        "ChatChunkChoice": record(
            {
                "index": {"const": 0},
                "delta": record(
                    {},
                    {
                        "role": fixed("assistant"),
                        "content": STRING,
                        "tool_calls": list_of(ref("ChatToolCallDelta"), minItems=1),
                    },
                ),
                "logprobs": NULL,
                "finish_reason": nullable(ref("ChatFinishReason")),
            }
        ),
        "ChatToolCallDelta": record(
            {"index": COUNT, "function": record({"arguments": STRING}, {"name": STRING})},
            {"id": STRING, "type": fixed("function")},
            description="`id`, `type` and the name come once, the arguments in pieces.",
        ),
    }
