"""What the Messages API checks of a request before it answers, in the basics; each miss is a 400 in the API's style.

Only rules that hold for every model stand here: what one model can and another can't is the gateway's configuration.
"""

import re
from typing import Any, cast

from proxy.demo.content_checks import check_content, check_messages
from proxy.demo.prompt import Json, Piece, pieces
from proxy.demo.refusal import Refusal, need

MOST_MARKS = 4
TTLS = ("5m", "1h")
TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")
CHOICES = ("auto", "any", "tool", "none")
EFFORTS = ("low", "medium", "high", "xhigh", "max")


def check_request(body: Any, *, counting: bool = False) -> Json:
    """The body of a Messages request, checked; `counting` for count_tokens, which has no `max_tokens`.

    Raises Refusal naming the first field that is wrong.
    """
    need(isinstance(body, dict), "Input should be a valid dictionary")
    request = cast(Json, body)
    _check_model(request)
    if not counting:
        _check_max_tokens(request)
    check_messages(_required(request, "messages"))
    _check_system(request.get("system"))
    tools = request.get("tools")
    _check_tools([] if tools is None else tools)
    _check_tool_choice(request.get("tool_choice"), tools or [])
    _check_stop_sequences(request.get("stop_sequences"))
    need(isinstance(request.get("stream", False), bool), "stream: Input should be a valid boolean")
    _check_sampling(request)
    _check_output_config(request.get("output_config"))
    _check_marks(request.get("cache_control"), pieces(request))
    return request


def _required(body: Json, field: str) -> Any:
    need(field in body, f"{field}: Field required")
    return body[field]


def _check_model(body: Json) -> None:
    model = _required(body, "model")
    need(isinstance(model, str), "model: Input should be a valid string")
    need(model != "", "model: String should have at least 1 character")


def _check_max_tokens(body: Json) -> None:
    limit = _required(body, "max_tokens")
    is_integer = not isinstance(limit, bool) and (
        isinstance(limit, int) or (isinstance(limit, float) and limit % 1 == 0)
    )
    need(is_integer, "max_tokens: Input should be a valid integer")
    need(limit >= 1, "max_tokens: Input should be greater than or equal to 1")


def _check_system(system: Any) -> None:
    if system is None or isinstance(system, str):
        return
    check_content(system, "system", "system")


def _check_tools(tools: Any) -> None:
    need(isinstance(tools, list), "tools: Input should be a valid list")
    names: set[str] = set()
    for number, tool in enumerate(tools):
        at = f"tools.{number}"
        need(isinstance(tool, dict), f"{at}: Input should be a valid dictionary")
        if tool.get("type") not in (None, "custom"):
            continue  # a tool that the provider runs itself; the demo counts it and never calls it
        need("name" in tool, f"{at}.custom.name: Field required")
        name, schema = tool["name"], tool.get("input_schema")
        matches = isinstance(name, str) and TOOL_NAME.fullmatch(name) is not None
        need(matches, f"{at}.custom.name: String should match pattern '^[a-zA-Z0-9_-]{{1,128}}$'")
        need(name not in names, "tools: Tool names must be unique.")
        need(isinstance(schema, dict), f"{at}.custom.input_schema: Field required")
        need(cast(Json, schema).get("type") == "object", f"{at}.custom.input_schema.type: Input should be 'object'")
        names.add(name)


def _check_tool_choice(choice: Any, tools: list[Json]) -> None:
    if choice is None:
        return
    need(isinstance(choice, dict), "tool_choice: Input should be a valid dictionary")
    expected = "'auto', 'any', 'tool' or 'none'"
    need(choice.get("type") in CHOICES, f"tool_choice.type: Input should be {expected}")
    need(bool(tools), "tool_choice: may only be specified while providing tools")
    if choice["type"] != "tool":
        return
    need(isinstance(choice.get("name"), str), "tool_choice.tool.name: Field required")
    known = any(tool.get("name") == choice["name"] for tool in tools)
    need(known, f"tool_choice: Tool '{choice['name']}' not found in provided tools")


def _check_stop_sequences(stops: Any) -> None:
    if stops is None:
        return
    need(isinstance(stops, list), "stop_sequences: Input should be a valid list")
    for number, stop in enumerate(stops):
        need(isinstance(stop, str), f"stop_sequences.{number}: Input should be a valid string")
        need(stop.strip() != "", f"stop_sequences.{number}: each stop sequence must contain non-whitespace")


def _check_sampling(request: Json) -> None:
    for field in ("temperature", "top_p"):
        value = request.get(field)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        need(value is None or is_number, f"{field}: Input should be a valid number")
        need(value is None or value >= 0, f"{field}: Input should be greater than or equal to 0")
        need(value is None or value <= 1, f"{field}: Input should be less than or equal to 1")


def _check_output_config(output_config: Any) -> None:
    if output_config is None:
        return
    need(isinstance(output_config, dict), "output_config: Input should be a valid dictionary")
    effort = output_config.get("effort")
    expected = ", ".join(f"'{level}'" for level in EFFORTS)
    need(effort is None or effort in EFFORTS, f"output_config.effort: Input should be one of {expected}")
    form = output_config.get("format")
    if form is None:
        return
    is_schema = isinstance(form, dict) and form.get("type") == "json_schema"
    need(is_schema, "output_config.format.type: Input should be 'json_schema'")
    need(isinstance(form.get("schema"), dict), "output_config.format.schema: Field required")


def _check_marks(automatic: Any, prompt: list[Piece]) -> None:
    """At most 4 marks, the automatic one included; on blocks that can carry one; 1h before 5m."""
    marks: list[tuple[str, Any]] = []
    for piece in prompt:
        found = piece.marks()
        if found and not piece.can_carry_mark():
            raise Refusal(f"{piece.path}.cache_control: cannot be set on this block")
        marks += found
    if automatic is not None:
        marks.append(("", automatic))
    need(
        len(marks) <= MOST_MARKS,
        f"A maximum of {MOST_MARKS} blocks with cache_control may be provided. Found {len(marks)}.",
    )
    seen_5m = False
    for path, mark in marks:
        at = f"{path}.cache_control".lstrip(".")
        is_ephemeral = isinstance(mark, dict) and mark.get("type") == "ephemeral"
        need(is_ephemeral, f"{at}.type: Input should be 'ephemeral'")
        ttl = mark.get("ttl") or "5m"
        need(ttl in TTLS, f"{at}.ttl: Input should be '5m' or '1h'")
        need(not (seen_5m and ttl == "1h"), f"{at}.ttl: a '1h' mark must not come after a '5m' mark")
        seen_5m = seen_5m or ttl == "5m"
