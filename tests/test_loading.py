"""From the list of plugins to chains: what is refused at start, in which words, and what it means that one is off."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import orjson
import pytest

from plugins import BUNDLED
from proxy.config import load
from proxy.loading import Pipeline, build, load_all
from proxy.models import ModelTable
from proxy.plugin import Plugin, Route, Settings
from proxy.testing import ScriptedUpstream, running_gateway
from proxy.yaml_source import ConfigError
from tests.contract_plugins import client, request_of

OPEN = """\
upstreams: {up: {base_url: demo}}
models: [{id: a/b, max_output_tokens: 9, price: free, deployments: [{upstream: up, model: m}]}]
server: {open: true}
"""
CLOSED = OPEN.replace("open: true", "open: false")
CHAT = frozenset({Route.CHAT_COMPLETIONS})


class SeesOpenai(Plugin):
    name: ClassVar[str] = "sees_openai"
    sees: ClassVar = "openai"


class SeesOpenaiOfChat(Plugin):
    name: ClassVar[str] = "sees_openai_of_chat"
    sees: ClassVar = "openai"
    routes: ClassVar = CHAT


class SeesMessages(Plugin):
    name: ClassVar[str] = "sees_messages"
    sees: ClassVar = "messages"


class SeesEither(Plugin):
    name: ClassVar[str] = "sees_either"
    sees: ClassVar = "either"


class LooksAtNothing(Plugin):
    name: ClassVar[str] = "looks_at_nothing"


class Completes(Plugin):
    name: ClassVar[str] = "completes"
    completes: ClassVar[bool] = True


class CompletesLast(Plugin):
    name: ClassVar[str] = "completes_last"
    completes: ClassVar[bool] = True
    completes_last: ClassVar[bool] = True


class UnmakeableSettings(Settings):
    size: int = 1


class Unmakeable(Plugin):
    name: ClassVar[str] = "unmakeable"
    Settings = UnmakeableSettings

    def __init__(self, settings: UnmakeableSettings) -> None:
        raise ValueError("no such size")


class Nameless(Plugin):
    """A plugin that nobody gave a name."""


class NoPlugin:
    """Not a subclass."""


KNOWN: dict[str, type[Plugin]] = {
    **BUNDLED,
    **{
        plugin.name: plugin
        for plugin in (
            SeesOpenai,
            SeesOpenaiOfChat,
            SeesMessages,
            SeesEither,
            LooksAtNothing,
            Completes,
            CompletesLast,
            Unmakeable,
        )
    },
}


def built(folder: Path, text: str) -> Pipeline:
    (folder / "gateway.yaml").write_text(text, encoding="utf-8")
    config = load(folder / "gateway.yaml", {})
    return build(config, ModelTable.from_settings(config.models), KNOWN)


def complaints(folder: Path, text: str) -> list[str]:
    """What is said about a file, without the folder."""
    with pytest.raises(ConfigError) as caught:
        built(folder, text)
    return str(caught.value).replace(f"{folder}/", "").splitlines()


def listed(*entries: str, head: str = OPEN) -> str:
    """A configuration whose plugins stand from line 5 on, one a line."""
    return head + "plugins:\n" + "".join(f"  - {entry}\n" for entry in entries)


MESSAGES_TOO_EARLY = (
    "sees_messages sees bodies in messages format, but on the route chat_completions they are in openai format here; "
    "move it, or name its routes"
)
OPENAI_TOO_LATE = (
    "sees_openai_of_chat sees bodies in openai format, but on the route chat_completions they are in messages format "
    "here; move it, or name its routes"
)


def openai_on(route: str) -> str:
    return (
        f"sees_openai sees bodies in openai format, but on the route {route} they are in messages format here; "
        "move it, or name its routes"
    )


MISFITS = {
    "messages before the translator": (
        ("sees_messages", "chat_completions"),
        [f":5: plugins[0]: {MESSAGES_TOO_EARLY}"],
    ),
    "openai behind the translator": (
        ("chat_completions", "sees_openai_of_chat"),
        [f":6: plugins[1]: {OPENAI_TOO_LATE}"],
    ),
    "openai on routes that don't speak it": (
        ("sees_openai", "chat_completions"),
        [f":5: plugins[0]: {openai_on('messages')}", f":5: plugins[0]: {openai_on('count_tokens')}"],
    ),
    "two translators": (
        ("chat_completions", "looks_at_nothing", "plugins.chat_completions:ChatCompletions"),
        [
            ":7: plugins[2]: the plugin 'chat_completions' stands in the list already",
            ":7: plugins[2]: chat_completions sees bodies in openai format, but on the route chat_completions they are "
            "in messages format here; move it, or name its routes",
        ],
    ),
    "one twice": (
        ("rate_limit", "looks_at_nothing", "rate_limit"),
        [":7: plugins[2].rate_limit: is listed already, at plugins[0]"],
    ),
    "one twice, once by its import path": (
        ("rate_limit", "plugins.rate_limit:RateLimit"),
        [":6: plugins[1]: the plugin 'rate_limit' stands in the list already"],
    ),
    "a slip in a name": (
        ("looks_at_nothing", "cach_breakpoint"),
        [
            ":6: plugins[1]: there is no plugin 'cach_breakpoint'; did you mean `cache_breakpoints`? "
            "A plugin of your own is written package.module:Class"
        ],
    ),
    "a module that isn't there": (
        ("nowhere.at_all:Mine",),
        [":5: plugins[0]: 'nowhere.at_all:Mine' can't be imported: ModuleNotFoundError: No module named 'nowhere'"],
    ),
    "a class that isn't there": (
        (f"{__name__}:Mine",),
        [
            f":5: plugins[0]: '{__name__}:Mine' can't be imported: AttributeError: "
            f"module '{__name__}' has no attribute 'Mine'"
        ],
    ),
    "a class that is no plugin": (
        (f"{__name__}:NoPlugin",),
        [f":5: plugins[0]: '{__name__}:NoPlugin' is no subclass of proxy.plugin.Plugin"],
    ),
    "a class without a name": (
        (f"{__name__}:Nameless",),
        [f":5: plugins[0]: '{__name__}:Nameless' has no name; give the class a `name`"],
    ),
    "an unknown option": (
        ("image_fetcher: {timeot: 3}",),
        [":5: plugins[0].image_fetcher.timeot: unknown setting; did you mean `timeout`?"],
    ),
    "an option of a plugin that has none": (
        ("sampling: {x: 3}",),
        [":5: plugins[0].sampling.x: unknown setting; there are none here"],
    ),
    "an option of the wrong kind": (
        ("image_fetcher: {max_urls: many}",),
        [":5: plugins[0].image_fetcher.max_urls: must be a whole number"],
    ),
    "completing before the one that is to be the last": (
        ("completes", "completes_last"),
        [":5: plugins[0]: completes completes after completes_last, which must be the last to; move it behind"],
    ),
    "a key for a model that isn't there": (
        ("auth: {keys: [{name: k, key: ezat_sk_1, models: [a/b, a/c]}]}",),
        [":5: plugins[0].auth.keys[0].models[1]: 'a/c' is not among the models"],
    ),
}


@pytest.mark.parametrize(("entries", "expected"), MISFITS.values(), ids=MISFITS)
def test_a_list_that_does_not_fit_together_is_refused(
    entries: Sequence[str], expected: list[str], tmp_path: Path
) -> None:
    """The complaint has file, line and path, and says what to do."""
    assert [f"gateway.yaml{text}" for text in expected] == complaints(tmp_path, listed(*entries))


def test_a_name_that_resembles_none_gets_all_names(tmp_path: Path) -> None:
    """Where no plugin can be meant, the complaint lists those that there are."""
    [complaint] = complaints(tmp_path, listed("zzz"))

    assert complaint.startswith("gateway.yaml:5: plugins[0]: there is no plugin 'zzz'; bundled are auth, ")


def test_a_module_that_breaks_while_it_is_imported_is_a_complaint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whatever a stranger's module does, the operator reads a line and no traceback."""
    (tmp_path / "module_that_breaks.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)

    [complaint] = complaints(tmp_path, listed("module_that_breaks:Mine"))

    expected = "'module_that_breaks:Mine' can't be imported: ZeroDivisionError: division by zero"
    assert f"gateway.yaml:5: plugins[0]: {expected}" == complaint


def test_a_plugin_that_can_not_be_made_is_a_complaint(tmp_path: Path) -> None:
    """A plugin that raises when it is made is named with its line, beside all other complaints."""
    found = complaints(tmp_path, listed("unmakeable: {size: 3}", "sampling: {x: 3}"))

    assert 2 == len(found)
    assert found[0].startswith("gateway.yaml:5: plugins[0].unmakeable: ")
    assert "no such size" in found[0]


def test_a_plugin_of_ones_own_is_found_by_its_import_path(tmp_path: Path) -> None:
    """A class stands in the list as package.module:Class, with settings as any other."""
    pipeline = built(tmp_path, listed(f"{__name__}:SeesEither", "plugins.image_fetcher:ImageFetcher: {timeout: 3}"))

    assert ["sees_either", "image_fetcher"] == [plugin.name for plugin in pipeline.plugins]
    assert 3 == pipeline.plugins[1].settings.timeout


FITTING = {
    "none": (),
    "either, on both sides of the translator": ("sees_either", "chat_completions"),
    "either, behind the translator": ("chat_completions", "sees_either"),
    "openai before the translator": ("sees_openai_of_chat", "chat_completions"),
    "messages behind the translator": ("chat_completions", "sees_messages"),
    "messages without a translator": ("sees_messages",),
    "completing behind the last": ("completes_last", "completes"),
    "all that are bundled": tuple(BUNDLED),
}


@pytest.mark.parametrize("entries", FITTING.values(), ids=FITTING)
def test_a_list_that_fits_together_is_taken_in_its_order(entries: Sequence[str], tmp_path: Path) -> None:
    """The pipeline has the plugins of the list, in its order."""
    text = listed(*entries) if entries else OPEN

    assert list(entries) == [plugin.name for plugin in built(tmp_path, text).plugins]


AUTH_OFF = (
    "gateway.yaml:4: plugins: no plugin asks for a key (auth is off); whoever reaches the port could spend your money. "
    "If that is meant, set server.open: true"
)
PREPAID = "auth: {organizations: [{name: o, balance_usd: 5}]}"
SPEND_LIMIT = "auth: {keys: [{name: k, key: ezat_sk_1, spend_limit_usd: 5}]}"
PER_MINUTE = "auth: {keys: [{name: k, key: ezat_sk_1, requests_per_minute: 5}]}"


def needed(reason: str, name: str) -> str:
    return f"gateway.yaml:5: plugins[0].auth: {reason}, which needs the plugin {name}; it is off or not in the list"


OFF_AND_NEEDED = {
    "auth missing": (("rate_limit",), [AUTH_OFF]),
    "auth off": (("auth: {enabled: false}", "rate_limit"), [AUTH_OFF]),
    "usage missing and a prepaid organization": (
        (PREPAID, "rate_limit"),
        [needed("the organization 'o' is prepaid", "usage")],
    ),
    "usage off and a prepaid organization": (
        (PREPAID, "usage: {enabled: false}"),
        [needed("the organization 'o' is prepaid", "usage")],
    ),
    "usage off and a key with a spend limit": (
        (SPEND_LIMIT, "usage: {enabled: false}"),
        [needed("the key 'k' has a spend limit", "usage")],
    ),
    "rate_limit off and a key with a limit": (
        (PER_MINUTE, "rate_limit: {enabled: false}"),
        [needed("the key 'k' has limits", "rate_limit")],
    ),
}


@pytest.mark.parametrize(("entries", "expected"), OFF_AND_NEEDED.values(), ids=OFF_AND_NEEDED)
def test_a_plugin_that_is_off_though_it_is_needed_refuses_the_start(
    entries: Sequence[str], expected: list[str], tmp_path: Path
) -> None:
    """What the configuration promises with one plugin may not be lost with another one."""
    assert expected == complaints(tmp_path, listed(*entries, head=CLOSED))


NOT_NEEDED = {
    "auth off, and open": (OPEN, ("auth: {enabled: false}",)),
    "usage off, and no budget": (CLOSED, ("auth", "usage: {enabled: false}")),
    "rate_limit off, and no limit": (CLOSED, ("auth", "rate_limit: {enabled: false}")),
    "a plugin of one's own in its place": (OPEN, ("auth: {enabled: false}", "completes")),
}


@pytest.mark.parametrize(("head", "entries"), NOT_NEEDED.values(), ids=NOT_NEEDED)
def test_a_plugin_that_is_off_and_not_needed_is_left_out(head: str, entries: Sequence[str], tmp_path: Path) -> None:
    """``enabled: false`` is as if the plugin weren't in the list."""
    on = [entry for entry in entries if "enabled: false" not in entry]

    assert on == [plugin.name for plugin in built(tmp_path, listed(*entries, head=head)).plugins]


def test_all_complaints_come_at_once(tmp_path: Path) -> None:
    """One start tells everything that is wrong with the list, from top to bottom."""
    text = listed(
        PREPAID, "sees_messages", "completes", "zzz", "completes_last", "chat_completions", "sampling: {x: 1}"
    )

    found = [complaint.partition(": ")[0] for complaint in complaints(tmp_path, text)]

    assert [f"gateway.yaml:{line}" for line in (5, 6, 7, 8, 11)] == found


def test_complaints_about_the_file_and_about_its_plugins_come_together(tmp_path: Path) -> None:
    """A slip among the server's settings hides none in the list of plugins."""
    text = listed("rate_limt", "sampling: {x: 1}").replace("open: true", "opne: true")
    (tmp_path / "gateway.yaml").write_text(text, encoding="utf-8")

    with pytest.raises(ConfigError) as caught:
        load_all(tmp_path / "gateway.yaml", KNOWN, {})

    assert [3, 5, 6] == [problem.line for problem in caught.value.problems]


def test_the_chains_are_described_both_ways(tmp_path: Path) -> None:
    """People see each route's way in and its way back, with the plugins that concern the route."""
    described = built(tmp_path, listed("looks_at_nothing", "field_refusal", "chat_completions", "sees_either"))

    assert [
        "chat_completions  client ─► looks_at_nothing ─► field_refusal ─► chat_completions ─► sees_either ─► upstream",
        "                  client ◄─ looks_at_nothing ◄─ field_refusal ◄─ chat_completions ◄─ sees_either ◄─ upstream",
        "messages          client ─► looks_at_nothing ─► sees_either ─► upstream",
        "                  client ◄─ looks_at_nothing ◄─ sees_either ◄─ upstream",
        "count_tokens      client ─► looks_at_nothing ─► sees_either ─► upstream",
        "                  client ◄─ looks_at_nothing ◄─ sees_either ◄─ upstream",
    ] == described.described().splitlines()


# ---- what a plugin's absence means to clients

KEY = "ezat_sk_test"
AUTH_SETTINGS: dict[str, Any] = {"keys": [{"name": "k", "key": KEY}]}
OFF = {"enabled": False}


class Answered(NamedTuple):
    status: int
    ignored: set[str]
    data: Any
    sent: Any
    """What went up; None where nothing did."""


async def answered(
    settings: Mapping[str, Mapping[str, Any]],
    fields: Mapping[str, Any],
    path: str = "/openai/v1/chat/completions",
    key: str | None = None,
) -> Answered:
    """A request to a gateway with all bundled plugins, some of them with these settings."""
    order: list[Any] = [(plugin, {**settings.get(name, {})}) for name, plugin in BUNDLED.items()]
    headers = {"x-api-key": key} if key is not None else {}
    async with (
        ScriptedUpstream() as upstream,
        running_gateway(order, upstream=upstream.url) as url,
        client() as session,
        session.post(url + path, json=request_of(False, **fields), headers=headers) as response,
    ):
        ignored = response.headers.get("x-ezat-ignored", "")
        sent = orjson.loads(upstream.received[0].body) if upstream.received else None
        return Answered(response.status, set(filter(None, ignored.split(","))), await response.json(), sent)


async def test_without_auth_nobody_needs_a_key() -> None:
    """auth off, and server.open: whoever comes is served."""
    on = await answered({"auth": AUTH_SETTINGS}, {})
    with_key = await answered({"auth": AUTH_SETTINGS}, {}, key=KEY)
    off = await answered({"auth": OFF}, {})

    assert (401, 200, 200) == (on.status, with_key.status, off.status)


async def test_without_rate_limit_and_usage_requests_are_served() -> None:
    """rate_limit and usage off, where no key has a limit or budget: nothing is counted, all are served."""
    off = await answered({"auth": AUTH_SETTINGS, "rate_limit": OFF, "usage": OFF}, {}, key=KEY)

    assert 200 == off.status


async def test_without_chat_completions_its_path_says_so() -> None:
    """chat_completions off: its path answers 404 in OpenAI's envelope and says why; the other route goes on."""
    settings = {"auth": OFF, "chat_completions": OFF}
    off = await answered(settings, {})
    other = await answered(settings, {}, path="/v1/messages")

    assert (404, None, "invalid_request_error", True) == (
        off.status,
        off.sent,
        off.data["error"]["type"],
        "chat_completions" in off.data["error"]["message"],
    )
    assert (200, "message") == (other.status, other.data["type"])


REFUSED_FIELDS: dict[str, Any] = {
    "n": 2,
    "logprobs": True,
    "top_logprobs": 3,
    "logit_bias": {"50256": -100},
    "modalities": ["text", "audio"],
    "web_search_options": {},
    "functions": [{"name": "f"}],
    "reasoning_effort": "enormous",
    "response_format": {"type": "json_object"},
}


@pytest.mark.parametrize(("name", "value"), REFUSED_FIELDS.items(), ids=REFUSED_FIELDS)
async def test_without_field_refusal_refused_fields_are_ignored_and_named(name: str, value: Any) -> None:
    """field_refusal off: what would be refused is ignored, and the answer names it."""
    on = await answered({"auth": OFF}, {name: value})
    off = await answered({"auth": OFF, "field_refusal": OFF}, {name: value})

    assert (400, 200, {name}) == (on.status, off.status, off.ignored)


async def test_without_image_fetcher_the_provider_fetches() -> None:
    """image_fetcher off: the address of an image goes up as it is."""
    address = "https://example.com/cat.png"
    content = [{"type": "image_url", "image_url": {"url": address}}]
    off = await answered({"auth": OFF, "image_fetcher": OFF}, {"messages": [{"role": "user", "content": content}]})

    assert 200 == off.status
    assert {"type": "url", "url": address} == off.sent["messages"][0]["content"][0]["source"]


def marks_in(body: Any) -> int:
    return orjson.dumps(body).count(b"cache_control")


SENT_OTHERWISE: dict[str, tuple[dict[str, Any], Callable[[Any], Any], Any, Any]] = {
    "cache_breakpoints": ({}, marks_in, 1, 0),
    "reasoning": (
        {"reasoning_effort": "high"},
        lambda body: (body.get("output_config"), body.get("thinking")),
        ({"effort": "high"}, {"type": "adaptive"}),
        (None, None),
    ),
    "sampling": (
        {"temperature": 0.5, "top_p": 0.5},
        lambda body: (body.get("temperature"), body.get("top_p")),
        (0.5, 0.5),
        (None, None),
    ),
}


@pytest.mark.parametrize(
    ("name", "fields", "sent", "with_it", "without_it"),
    [(name, *row) for name, row in SENT_OTHERWISE.items()],
    ids=SENT_OTHERWISE,
)
async def test_without_a_plugin_its_fields_are_dropped_and_named(
    name: str, fields: dict[str, Any], sent: Callable[[Any], Any], with_it: Any, without_it: Any
) -> None:
    """cache_breakpoints, reasoning or sampling off: what it adds is not sent, and dropped fields are named."""
    on = await answered({"auth": OFF}, fields)
    off = await answered({"auth": OFF, name: OFF}, fields)

    assert (with_it, set()) == (sent(on.sent), on.ignored)
    assert (without_it, set(fields)) == (sent(off.sent), off.ignored)
