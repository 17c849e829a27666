"""The messages of a request: joining, merging, dropping, images, calls and results, and the way back of paths."""

from __future__ import annotations

from typing import Any

import pytest

from plugins.chat_completions.content import PlacedUrl
from plugins.chat_completions.request import Translation, translate
from proxy.errors import GatewayError
from proxy.jsontext import encode
from tests.plugins.models import make_model

HI = {"role": "user", "content": "Hi"}
PNG = "iVBORw0KGgo="
JPEG = "/9j/4AAQSkZJRgABAQAAAQABAAA="
MARK = {"type": "ephemeral", "ttl": "1h"}


def translated(*messages: Any, **fields: Any) -> Translation:
    """What becomes of a conversation."""
    return translate({"model": "m", "messages": list(messages), **fields}, make_model())


def refusal(*messages: Any) -> str:
    """How a conversation is refused."""
    with pytest.raises(GatewayError) as caught:
        translated(*messages)
    return caught.value.message


def text(words: str, **more: Any) -> dict[str, Any]:
    """A text part, which is a text block too."""
    return {"type": "text", "text": words, **more}


def image(url: str = f"data:image/png;base64,{PNG}", **more: Any) -> dict[str, Any]:
    """An image part."""
    return {"type": "image_url", "image_url": {"url": url}, **more}


def image_block(media_type: str = "image/png", data: str = PNG) -> dict[str, Any]:
    """An image block."""
    return {"type": "image", "source": {"type": "base64", "media_type": media_type, "data": data}}


def call(id: str = "c1", arguments: Any = "{}") -> dict[str, Any]:
    """An assistant message that is one call."""
    function = {"name": "run", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": id, "type": "function", "function": function}]}


def result(content: Any = "done", id: str = "c1") -> dict[str, Any]:
    """A tool message."""
    return {"role": "tool", "tool_call_id": id, "content": content}


def user(*blocks: Any) -> dict[str, Any]:
    """A user message as it is sent."""
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    """An assistant message as it is sent."""
    return {"role": "assistant", "content": list(blocks)}


USE = {"type": "tool_use", "id": "c1", "name": "run", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": "done"}

CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "one side's messages are merged": (
        [HI, {"role": "user", "content": [text("A"), text("B")]}, {"role": "assistant", "content": "C"}, HI],
        [user(text("Hi"), text("A"), text("B")), assistant(text("C")), user(text("Hi"))],
    ),
    "text keeps its white space": ([{"role": "user", "content": " a\n "}], [user(text(" a\n "))]),
    "blank text is dropped": (
        [{"role": "user", "content": [text(" \n"), image(), text("")]}],
        [user(image_block())],
    ),
    "an empty message is dropped and its neighbours merged": (
        [HI, {"role": "assistant", "content": ""}, {"role": "assistant", "content": None}, {"role": "assistant"}, HI],
        [user(text("Hi"), text("Hi"))],
    ),
    "refusal parts are dropped": (
        [HI, {"role": "assistant", "content": [text("Well."), {"type": "refusal", "refusal": "No."}]}, HI],
        [user(text("Hi")), assistant(text("Well.")), user(text("Hi"))],
    ),
    "a final assistant message loses its last white space": (
        [HI, {"role": "assistant", "content": [text("a "), text(" b \n\t"), text(" ")]}],
        [user(text("Hi")), assistant(text("a "), text(" b"))],
    ),
    "final is what is last when the empty is gone": (
        [
            HI,
            {"role": "assistant", "content": "a "},
            {"role": "user", "content": ""},
            {"role": "system", "content": "S"},
        ],
        [user(text("Hi")), assistant(text("a"))],
    ),
    "other messages keep theirs": (
        [{"role": "user", "content": "a "}, {"role": "assistant", "content": "b "}, HI],
        [user(text("a ")), assistant(text("b ")), user(text("Hi"))],
    ),
    "text stands before calls": (
        [HI, {**call(), "content": "Wait. "}, result()],
        [user(text("Hi")), assistant(text("Wait. "), USE), user(RESULT)],
    ),
    "results come first": (
        [HI, call(), {"role": "user", "content": "Hurry."}, result(), {"role": "user", "content": "Thanks."}],
        [user(text("Hi")), assistant(USE), user(RESULT, text("Hurry."), text("Thanks."))],
    ),
    "results keep their order": (
        [HI, result("1", "a"), HI, result("2", "b")],
        [
            user(
                {"type": "tool_result", "tool_use_id": "a", "content": "1"},
                {"type": "tool_result", "tool_use_id": "b", "content": "2"},
                text("Hi"),
                text("Hi"),
            )
        ],
    ),
    "an SDK's own reply object": (
        [
            {**HI, "name": None, "cache_control": {"type": "ephemeral"}},
            {
                "role": "assistant",
                "content": "Hello",
                "refusal": None,
                "annotations": [],
                "audio": None,
                "function_call": None,
                "tool_calls": None,
                "reasoning_content": "Hm.",
            },
            {**HI, "name": "bob"},
        ],
        [user(text("Hi")), assistant(text("Hello")), user(text("Hi"))],
    ),
    "a result of parts": (
        [HI, call(), result([text("Here"), image(), text("")])],
        [
            user(text("Hi")),
            assistant(USE),
            user({"type": "tool_result", "tool_use_id": "c1", "content": [text("Here"), image_block()]}),
        ],
    ),
}


@pytest.mark.parametrize(("messages", "sent"), CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_a_conversation(messages: list[dict[str, Any]], sent: list[dict[str, Any]]) -> None:
    """Each rule of merging, ordering and dropping, by itself."""
    assert sent == translated(*messages).body["messages"]


def test_system_and_developer_messages_are_joined() -> None:
    """They are lifted out of wherever they stand, one block for each text that isn't blank."""
    body = translated(
        {"role": "system", "content": "One."},
        HI,
        {"role": "developer", "content": [text("Two."), text(" "), text("Three.", cache_control=MARK)]},
        {"role": "system", "content": ""},
        HI,
    ).body
    assert [text("One."), text("Two."), text("Three.", cache_control=MARK)] == body["system"]
    assert [user(text("Hi"), text("Hi"))] == body["messages"]


@pytest.mark.parametrize("content", ["", " \n", None, [], [text(" ")]], ids=repr)
def test_a_result_without_content(content: Any) -> None:
    """A tool that prints nothing has a result without content."""
    last = translated(HI, call(), result(content)).body["messages"][-1]
    assert [{"type": "tool_result", "tool_use_id": "c1"}] == last["content"]


ARGUMENTS: dict[str, tuple[Any, bytes]] = {
    "null": (None, b"{}"),
    "empty": ("", b"{}"),
    "blank": (" \n", b"{}"),
    "an object": (' {"a": 1}', b'{"a":1}'),
    "digits": ('{"a":12345678901234567890123,"b":1.10,"c":1E2}', b'{"a":12345678901234567890123,"b":1.10,"c":1E2}'),
    "half a surrogate pair": ('{"a":"\\ud83d"}', '{"a":"\ufffd"}'.encode()),
}


@pytest.mark.parametrize(("arguments", "sent"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_arguments_become_the_input(arguments: Any, sent: bytes) -> None:
    """Arguments are read, their digits kept; nothing at all stands for an empty object."""
    assert sent == encode(translated(HI, call(arguments=arguments)).body["messages"][1]["content"][0]["input"])


@pytest.mark.parametrize(
    "arguments", ['{"a": ', "[1]", "null", '"{}"', '{"a": NaN}', 5, {}, '{"a":' * 201 + "1" + "}" * 201], ids=repr
)
def test_arguments_that_are_no_object_are_refused(arguments: Any) -> None:
    """Guessing would make the model see a call that it never made."""
    assert refusal(HI, call(arguments=arguments)).startswith("messages[1].tool_calls[0].function.arguments: ")


def test_an_odd_id_is_the_same_in_call_and_result() -> None:
    """Two odd ids stay two, and a call stays with its result; a proper id is left alone."""
    sent = translated(HI, call("a.b"), call("a:b"), result(id="a.b"), result(id="a:b"), call("a_b")).body["messages"]
    calls = [block["id"] for block in sent[1]["content"]]
    assert calls == [block["tool_use_id"] for block in sent[2]["content"]]
    assert 2 == len(set(calls))
    assert "a_b" == sent[3]["content"][0]["id"]


MARKS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "it stays with its block": (
        [text("A", cache_control=MARK), image(cache_control=MARK), text("B", cache_control=None)],
        [text("A", cache_control=MARK), {**image_block(), "cache_control": MARK}, text("B")],
    ),
    "from a dropped part it moves back": (
        [text("A"), text("B"), text(" ", cache_control=MARK)],
        [text("A"), text("B", cache_control=MARK)],
    ),
    "it does not take another's place": (
        [text("A", cache_control={"type": "ephemeral"}), text("", cache_control=MARK)],
        [text("A", cache_control={"type": "ephemeral"})],
    ),
    "with nothing before it it is lost": ([text("", cache_control=MARK), text("A")], [text("A")]),
}


@pytest.mark.parametrize(("parts", "sent"), MARKS.values(), ids=MARKS)
def test_a_breakpoint_of_the_clients(parts: list[dict[str, Any]], sent: list[dict[str, Any]]) -> None:
    """A client's breakpoint stays as near as it can to where it was set."""
    assert sent == translated({"role": "user", "content": parts}).body["messages"][0]["content"]


@pytest.mark.parametrize("part", [text("R", cache_control=MARK), text("", cache_control=MARK)], ids=["kept", "dropped"])
def test_a_breakpoint_in_a_result_moves_to_the_result(part: dict[str, Any]) -> None:
    """Inside of the result the provider refuses it."""
    block = translated(HI, call(), result([text("Q"), part])).body["messages"][-1]["content"][0]
    assert MARK == block["cache_control"]
    assert all("cache_control" not in inner for inner in block["content"])


IMAGES: dict[str, tuple[str, str, str]] = {
    "png": (f"data:image/png;base64,{PNG}", "image/png", PNG),
    "another name of jpeg": (f"data:image/jpg;base64,{JPEG}", "image/jpeg", JPEG),
    "any letter case": (f"DATA:Image/PNG;BASE64,{PNG}", "image/png", PNG),
    "a parameter": (f"data:image/png;charset=x;base64,{PNG}", "image/png", PNG),
    "the bytes decide": (f"data:image/jpeg;base64,{PNG}", "image/png", PNG),
    "bytes that tell nothing": ("data:image/webp;base64,AAAA", "image/webp", "AAAA"),
    "webp": (
        "data:image/png;base64,UklGRiQAAABXRUJQVlA4IBgAAAA=",
        "image/webp",
        "UklGRiQAAABXRUJQVlA4IBgAAAA=",
    ),
    "white space": (f"data:image/png;base64, {PNG[:4]}\r\n{PNG[4:]}\n", "image/png", PNG),
}


@pytest.mark.parametrize(("url", "media_type", "data"), IMAGES.values(), ids=IMAGES)
def test_a_data_url_becomes_an_image(url: str, media_type: str, data: str) -> None:
    """The declared type counts where the bytes don't tell another."""
    sent = translated({"role": "user", "content": [image(url)]}).body["messages"][0]["content"]
    assert [image_block(media_type, data)] == sent


@pytest.mark.parametrize("url", ["https://host/a.png", "HTTP://host/a.png"])
def test_an_image_by_url_remembers_its_place(url: str) -> None:
    """Who downloads it can name the client's own path."""
    body = translated({"role": "system", "content": "S"}, {"role": "user", "content": [text("A"), image(url)]}).body
    source = body["messages"][0]["content"][1]["source"]
    assert {"type": "url", "url": url} == source
    assert isinstance(source["url"], PlacedUrl)
    assert "messages[1].content[1].image_url.url" == source["url"].path


def test_a_pdf_becomes_a_document() -> None:
    """The file's name is not sent; a null file_id is none."""
    file = {"file_data": "data:application/pdf;base64,JVBERi0xLjQK", "filename": "a.pdf", "file_id": None}
    sent = translated({"role": "user", "content": [{"type": "file", "file": file}]}).body["messages"][0]["content"]
    source = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0xLjQK"}
    assert [{"type": "document", "source": source}] == sent


NO_USER = "messages: must contain at least one user message"
NEEDS_IMAGE = "messages[0].content[0].image_url.url: must be an http(s) URL or a base64 data URL of a"
NOT_BASE64 = "messages[0].content[0].image_url.url: is not valid base64"
NEEDS_PDF = "messages[0].content[0].file.file_data: must be a PDF as a base64 data URL"
REFUSED: dict[str, tuple[list[Any], str]] = {
    "no messages": ([], NO_USER),
    "system messages alone": ([{"role": "system", "content": "S"}, {"role": "developer", "content": "D"}], NO_USER),
    "nothing left": ([{"role": "user", "content": " "}], NO_USER),
    "a string": (["Hi"], "messages[0]: must be an object"),
    "null": ([HI, None], "messages[1]: must be an object"),
    "no role": ([{"content": "Hi"}], "messages[0].role: is required"),
    "an unknown role": ([{"role": "wizard"}], "messages[0].role: must be one of system, developer, user, assistant, "),
    "a role of another type": ([{"role": ["user"]}], "messages[0].role: must be one of "),
    "the function role": (
        [HI, {"role": "function", "name": "f", "content": "x"}],
        'messages[1].role: the legacy "function" role is not supported; use tools',
    ),
    "a legacy call": (
        [HI, {"role": "assistant", "function_call": {"name": "f"}}],
        "messages[1].function_call: the legacy functions API is not supported; use tools",
    ),
    "a number": ([{"role": "user", "content": 5}], "messages[0].content: must be a string or a list of parts"),
    "a part that is a string": ([{"role": "user", "content": ["Hi"]}], "messages[0].content[0]: must be an object"),
    "a text part without text": (
        [{"role": "user", "content": [{"type": "text"}]}],
        "messages[0].content[0].text: is required",
    ),
    "text of another type": (
        [{"role": "user", "content": [{"type": "text", "text": 5}]}],
        "messages[0].content[0].text: must be a string",
    ),
    "a part without type": ([{"role": "user", "content": [{}]}], "messages[0].content[0].type: is required"),
    "an unknown part": (
        [{"role": "user", "content": [{"type": "hologram"}]}],
        "messages[0].content[0].type: use one of text, image_url, file",
    ),
    "audio": (
        [HI, {"role": "user", "content": [text("Hear"), {"type": "input_audio"}]}],
        "messages[1].content[1]: audio input is not supported",
    ),
    "an image in a system message": (
        [{"role": "system", "content": [image()]}, HI],
        "messages[0].content[0]: only text is supported in system messages",
    ),
    "an image of the assistant's": (
        [{"role": "assistant", "content": [image()]}],
        "messages[0].content[0]: only text is supported in assistant messages",
    ),
    "a breakpoint of another type": (
        [{"role": "user", "content": [text("A", cache_control=True)]}],
        "messages[0].content[0].cache_control: must be an object",
    ),
    "an image without image_url": (
        [{"role": "user", "content": [{"type": "image_url"}]}],
        "messages[0].content[0].image_url: is required",
    ),
    "an image_url of another type": (
        [{"role": "user", "content": [{"type": "image_url", "image_url": "https://host/a.png"}]}],
        "messages[0].content[0].image_url: must be an object",
    ),
    "a url of another type": (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": 5}}]}],
        "messages[0].content[0].image_url.url: must be a string",
    ),
    "another scheme": ([{"role": "user", "content": [image("file:///etc/passwd")]}], NEEDS_IMAGE),
    "data that is not base64": ([{"role": "user", "content": [image("data:image/png,hello")]}], NEEDS_IMAGE),
    "data of another type": ([{"role": "user", "content": [image("data:image/bmp;base64,Qk0=")]}], NEEDS_IMAGE),
    "data without an end of its header": ([{"role": "user", "content": [image("data:" + "a" * 999)]}], NEEDS_IMAGE),
    "a wrong sign": ([{"role": "user", "content": [image("data:image/png;base64,iVBORw0KGgo*")]}], NOT_BASE64),
    "a sign beyond ASCII": ([{"role": "user", "content": [image("data:image/png;base64,iVBORw0KGgoé")]}], NOT_BASE64),
    "no data": ([{"role": "user", "content": [image("data:image/png;base64,")]}], NOT_BASE64),
    "cut data": ([{"role": "user", "content": [image("data:image/png;base64,iVBOR")]}], NOT_BASE64),
    "padding in the middle": ([{"role": "user", "content": [image("data:image/png;base64,iV==Rw0K")]}], NOT_BASE64),
    "too much padding": ([{"role": "user", "content": [image("data:image/png;base64,A===")]}], NOT_BASE64),
    "a file by id": (
        [{"role": "user", "content": [{"type": "file", "file": {"file_id": "file-1"}}]}],
        "messages[0].content[0].file: send the PDF as file_data (a base64 data URL); file_id is not supported",
    ),
    "a file of another type": (
        [{"role": "user", "content": [{"type": "file", "file": "data"}]}],
        "messages[0].content[0].file: must be an object",
    ),
    "a file without data": (
        [{"role": "user", "content": [{"type": "file", "file": {"filename": "a.pdf"}}]}],
        "messages[0].content[0].file.file_data: is required",
    ),
    "a file that is no PDF": (
        [{"role": "user", "content": [{"type": "file", "file": {"file_data": "data:text/plain;base64,SGk="}}]}],
        NEEDS_PDF,
    ),
    "a file that is no data URL": (
        [{"role": "user", "content": [{"type": "file", "file": {"file_data": "JVBERi0xLjQK"}}]}],
        NEEDS_PDF,
    ),
    "calls of another type": ([HI, {"role": "assistant", "tool_calls": {}}], "messages[1].tool_calls: must be a list"),
    "a call of another type": (
        [HI, {"role": "assistant", "tool_calls": [5]}],
        "messages[1].tool_calls[0]: must be an object",
    ),
    "a call without id": (
        [HI, {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f"}}]}],
        "messages[1].tool_calls[0].id: is required",
    ),
    "a call without function": (
        [HI, {"role": "assistant", "tool_calls": [{"id": "a", "type": "function"}]}],
        "messages[1].tool_calls[0].function: is required",
    ),
    "a call without name": (
        [HI, {"role": "assistant", "tool_calls": [{"id": "a", "function": {}}]}],
        "messages[1].tool_calls[0].function.name: is required",
    ),
    "a custom call": (
        [HI, {"role": "assistant", "tool_calls": [{"id": "a", "type": "custom", "custom": {}}]}],
        "messages[1].tool_calls[0].type: only function tools are supported",
    ),
    "a result without id": ([HI, {"role": "tool", "content": "x"}], "messages[1].tool_call_id: is required"),
    "a result of another type": ([HI, result({})], "messages[1].content: must be a string or a list of parts"),
}


@pytest.mark.parametrize(("messages", "message"), REFUSED.values(), ids=REFUSED)
def test_a_fault_in_the_messages_is_refused_at_its_place(messages: list[Any], message: str) -> None:
    """Indexes point into the client's own messages."""
    assert refusal(*messages).startswith(message)


@pytest.mark.parametrize(
    ("messages", "message"), [(None, "is required"), ("Hi", "must be a list"), ({}, "must be a list")]
)
def test_messages_must_be_a_list(messages: Any, message: str) -> None:
    """Anything but a list is refused under the field's name."""
    with pytest.raises(GatewayError, match=f"^messages: {message}$"):
        translate({"messages": messages}, make_model())


PATHS: dict[str, tuple[str, str | None]] = {
    "the messages": ("messages", "messages"),
    "a message": ("messages.1", "messages[4]"),
    "a role": ("messages.1.role", "messages[4].role"),
    "a part": ("messages.0.content.1", "messages[2].content[1]"),
    "the text of a part": ("messages.0.content.1.text", "messages[2].content[1].text"),
    "an image's source": ("messages.0.content.2.image.source.base64.data", "messages[2].content[2].image_url.url"),
    "a PDF's source": ("messages.0.content.3.document.source", "messages[2].content[3].file.file_data"),
    "a breakpoint": ("messages.0.content.1.cache_control.ttl", "messages[2].content[1].cache_control.ttl"),
    "a text": ("messages.0.content.0", "messages[1].content"),
    "the text of a text": ("messages.0.content.0.text", "messages[1].content"),
    "a call": ("messages.1.content.0", "messages[4].tool_calls[0]"),
    "the id of a call": ("messages.1.content.0.tool_use.id", "messages[4].tool_calls[0].id"),
    "the input of a call": ("messages.1.content.1.tool_use.input.a", "messages[4].tool_calls[1].function.arguments"),
    "a result": ("messages.2.content.0", "messages[6]"),
    "the id of a result": ("messages.2.content.0.tool_result.tool_use_id", "messages[6].tool_call_id"),
    "the content of a result": ("messages.2.content.1.content", "messages[7].content"),
    "a block of a result": (
        "messages.2.content.1.tool_result.content.0.image.source",
        "messages[7].content[1].image_url.url",
    ),
    "what a result stood behind": ("messages.2.content.2", "messages[5].content"),
    "the system prompt": ("system", "messages[0]"),
    "a system block": ("system.0", "messages[0].content"),
    "a system part": ("system.1.text", "messages[3].content[0].text"),
    "the tools": ("tools", "tools"),
    "a tool": ("tools.1", "tools[1]"),
    "a tool's name": ("tools.0.custom.name", "tools[0].function.name"),
    "a tool's schema": ("tools.0.input_schema", "tools[0].function.parameters"),
    "in a tool's schema": ("tools.0.custom.input_schema.anyOf.0.type", "tools[0].function.parameters.anyOf[0].type"),
    "the limit": ("max_tokens", "max_completion_tokens"),
    "the stops": ("stop_sequences", "stop"),
    "a stop": ("stop_sequences.0", "stop[1]"),
    "the answer's schema": (
        "output_config.format.schema.properties.a",
        "response_format.json_schema.schema.properties.a",
    ),
    "the effort": ("output_config.effort", "reasoning_effort"),
    "thinking": ("thinking.type", "reasoning_effort"),
    "the choice": ("tool_choice.name", "tool_choice.function.name"),
    "an index that isn't there": ("messages.9.content.0", None),
    "a block that isn't there": ("messages.0.content.9", "messages[1]"),
    "a tool that isn't there": ("tools.9", None),
    "no index": ("messages.x", None),
    "an unknown field": ("betas", None),
    "nothing": ("", None),
}


@pytest.mark.parametrize(("path", "own"), PATHS.values(), ids=PATHS)
def test_a_path_of_the_providers_is_found_in_the_clients_request(path: str, own: str | None) -> None:
    """What a provider names is named to the client as the client wrote it."""
    pdf = {"type": "file", "file": {"file_data": "data:application/pdf;base64,JVBERi0xLjQK"}}
    two_calls = call()
    two_calls["tool_calls"].append({"id": "c2", "function": {"name": "run", "arguments": '{"a": 1}'}})
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
    tool = {"type": "function", "function": {"name": "run", "parameters": {"anyOf": [{}]}}}
    translation = translated(
        {"role": "system", "content": "S"},
        HI,
        {"role": "user", "content": [text(" "), text("A", cache_control=MARK), image(), pdf]},
        {"role": "developer", "content": [text("D")]},
        two_calls,
        {"role": "user", "content": "Hurry."},
        result(),
        result([text(""), image()], "c2"),
        tools=[tool, tool],
        stop=["", "END"],
        max_completion_tokens=5,
        response_format=schema,
    )
    assert own == translation.path_of(path)


def test_the_prefix_of_the_next_turn_is_the_same_text() -> None:
    """The provider's cache is read only if earlier messages are written exactly as they were."""
    turns = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Go."},
        call("a.b:1", '{"b": "x", "a": 1.10}'),
        result(id="a.b:1"),
        {"role": "assistant", "content": "It is done. "},
        {"role": "user", "content": "Thanks."},
    ]
    whole = encode(translated(*turns).body["messages"])
    for length in (2, 4):
        assert whole.startswith(encode(translated(*turns[:length]).body["messages"])[:-1])
