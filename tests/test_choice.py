"""Which deployment a conversation goes to: by what it is recognised, and how the conversations are shared out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plugins.chat_completions import ChatCompletions
from proxy.exchange import Key
from proxy.models import Deployment
from proxy.plugin import Route
from proxy.testing import MODEL, ask, make_exchange
from proxy.upstream.choice import by_preference, conversation_name
from tests.configured import NAMES, World, world
from tests.contract_plugins import BOTH_ROUTES, ask_for, request_of

# Conversations stay


@pytest.mark.parametrize("named_by", ["the header", "prompt_cache_key", "its beginning"])
@pytest.mark.parametrize("format", BOTH_ROUTES)
async def test_a_conversation_stays_with_one_deployment(tmp_path: Path, format: str, named_by: str) -> None:
    """All turns of a conversation find the same deployment, and different conversations share them out."""
    if (format, named_by) == ("messages", "prompt_cache_key"):
        pytest.skip("the Messages format has no such field")
    same_priority = {name: {"priority": 0} for name in NAMES}
    async with world(tmp_path, [], [], [], options=same_priority) as running:
        homes = [[await turn_of(running, format, named_by, each, turn) for turn in range(2)] for each in range(20)]

    assert [1] * 20 == [len(set(turns)) for turns in homes]
    assert {0, 1, 2} == {turns[0] for turns in homes}


async def turn_of(running: World, format: str, named_by: str, conversation: int, turn: int) -> int:
    """Which upstream a turn of a conversation goes to."""
    first = f"conversation {conversation}" if named_by == "its beginning" else f"turn {turn}"
    later = [{"role": "assistant", "content": "Hi."}, {"role": "user", "content": "And?"}] * turn
    body = request_of(False, messages=[{"role": "user", "content": first}, *later])
    headers = {"x-ezat-session": f"conversation {conversation}"} if named_by == "the header" else {}
    if named_by == "prompt_cache_key":
        body["prompt_cache_key"] = f"conversation {conversation}"
    before = running.asked
    await ask_for(running.url, format, body=body, headers=headers)
    return [after - earlier for after, earlier in zip(running.asked, before, strict=True)].index(1)


USER = {"role": "user", "content": "Hello!"}
MARK = {"type": "ephemeral"}
BEGINNING: dict[str, Any] = {"system": "Be brief.", "messages": [USER]}


def in_blocks(text: str, **more: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text, **more}]


def begins(system: Any = "Be brief.", content: Any = "Hello!", *later: Any, **fields: Any) -> dict[str, Any]:
    """A request of the Messages format."""
    return {"system": system, "messages": [{"role": "user", "content": content}, *later], **fields}


def chat(*messages: tuple[str, Any], **fields: Any) -> dict[str, Any]:
    """A request of OpenAI's format."""
    return {"messages": [{"role": role, "content": content} for role, content in messages], **fields}


# Another request of the same conversation as ``begins()``
SAME_MESSAGES = {
    "a later turn": begins("Be brief.", "Hello!", {"role": "assistant", "content": "Hi."}, USER),
    "other settings": begins(max_tokens=7, temperature=0.5, metadata={"user_id": "x"}, tools=[]),
    "a mark on the message": begins("Be brief.", in_blocks("Hello!", cache_control=MARK)),
    "a mark on the system prompt": begins(in_blocks("Be brief.", cache_control=MARK)),
    "marks that moved on": begins(in_blocks("Be brief."), in_blocks("Hello!")),
    "a mark at the top": begins(cache_control=MARK),
    "a stream": begins(stream=True),
}
OTHER_MESSAGES = {
    "another first message": begins("Be brief.", "Hello"),
    "another system prompt": begins("Be brief"),
    "no system prompt": begins(None),
    "a system prompt in two blocks": begins([*in_blocks("Be "), *in_blocks("brief.")]),
    "a first message of the other side": {**begins(), "messages": [{"role": "assistant", "content": "Hello!"}]},
}
# … and as ``chat(("system", "Be brief."), ("user", "Hello!"))``
BRIEF, HELLO = ("system", "Be brief."), ("user", "Hello!")
SAME_CHAT = {
    "a later turn": chat(BRIEF, HELLO, ("assistant", "Hi."), ("user", "And?")),
    "other settings": chat(BRIEF, HELLO, max_tokens=7, user="x", seed=1),
    "a mark on the message": chat(BRIEF, ("user", in_blocks("Hello!", cache_control=MARK))),
    "a mark on the system prompt": chat(("system", in_blocks("Be brief.", cache_control=MARK)), HELLO),
    "marks that moved on": chat(("system", in_blocks("Be brief.")), ("user", in_blocks("Hello!"))),
    "a system message later": chat(BRIEF, HELLO, ("system", "Now be verbose."), ("user", "And?")),
}
OTHER_CHAT = {
    "another first message": chat(BRIEF, ("user", "Hello")),
    "another system prompt": chat(("system", "Be brief"), HELLO),
    "no system prompt": chat(HELLO),
    "a second system prompt": chat(BRIEF, ("developer", "In English."), HELLO),
    "another image": chat(BRIEF, ("user", [{"type": "image_url", "image_url": {"url": "https://a.example/1.png"}}])),
}
RECOGNISED = [
    pytest.param(route, first, other, expected, id=f"{route.value}: {name}")
    for route, first, table, expected in (
        (Route.MESSAGES, begins(), SAME_MESSAGES, True),
        (Route.MESSAGES, begins(), OTHER_MESSAGES, False),
        (Route.COUNT_TOKENS, begins(), SAME_MESSAGES, True),
        (Route.CHAT_COMPLETIONS, chat(BRIEF, HELLO), SAME_CHAT, True),
        (Route.CHAT_COMPLETIONS, chat(BRIEF, HELLO), OTHER_CHAT, False),
    )
    for name, other in table.items()
]


@pytest.mark.parametrize(("route", "first", "other", "expected"), RECOGNISED)
async def test_what_a_conversation_is_recognised_by(
    route: Route, first: dict[str, Any], other: dict[str, Any], expected: bool
) -> None:
    """Without a name of its own a conversation is known by its system prompt and first message; cache marks, which
    move from turn to turn, and the texts that they turn into blocks, make no difference."""
    assert expected == (await name_of(first, route) == await name_of(other, route))


async def name_of(body: dict[str, Any], route: Route = Route.CHAT_COMPLETIONS, **exchange: Any) -> bytes:
    """The name of a conversation, as it is when the request goes up."""
    made = make_exchange(body, route=route, **exchange)
    if route is Route.CHAT_COMPLETIONS:
        await ask(ChatCompletions(None), made)
    return conversation_name(made)


def key(id: str, organization: str | None = None) -> Key:
    return Key(id, id, organization)


# Two requests with the same beginning: what else they have, and whether they are of one conversation
NAMED: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "two organizations": ({"key": key("a", "acme")}, {"key": key("a", "other")}, False),
    "two keys of an organization": ({"key": key("a", "acme")}, {"key": key("b", "acme")}, True),
    "two keys without one": ({"key": key("a")}, {"key": key("b")}, False),
    "a session of two organizations": (
        {"key": key("a", "acme"), "headers": {"x-ezat-session": "s"}},
        {"key": key("a", "other"), "headers": {"x-ezat-session": "s"}},
        False,
    ),
    "two sessions": ({"headers": {"x-ezat-session": "s"}}, {"headers": {"x-ezat-session": "t"}}, False),
    "a session that differs late": (
        {"headers": {"x-ezat-session": "s" * 256 + "a"}},
        {"headers": {"x-ezat-session": "s" * 256 + "b"}},
        True,
    ),
    "two models": ({"model": MODEL}, {"model": replace(MODEL, id="test/other")}, False),
    "a session and none": ({"headers": {"x-ezat-session": "s"}}, {}, False),
}


@pytest.mark.parametrize(("one", "other", "expected"), NAMED.values(), ids=NAMED)
async def test_whose_conversation_it_is(one: dict[str, Any], other: dict[str, Any], expected: bool) -> None:
    """Organizations and models share nothing, organizations not even a name that both chose; the client's own name
    counts before all else."""
    body = chat(BRIEF, HELLO)

    assert expected == (await name_of(body, **one) == await name_of(body, **other))


async def test_the_header_wins_over_the_field() -> None:
    """Of both names the header's counts, and the field names the same conversation as the header would."""
    by_header = await name_of(chat(HELLO), headers={"x-ezat-session": "s"})
    by_field = await name_of(chat(BRIEF, HELLO, prompt_cache_key="s"))
    by_both = await name_of(chat(HELLO, prompt_cache_key="t"), headers={"x-ezat-session": "s"})

    assert by_header == by_field == by_both


# Shares

CONVERSATIONS = [f"conversation {number}".encode() for number in range(2000)]


def homes(deployments: Iterable[Deployment]) -> list[Deployment]:
    """Where each of the conversations goes."""
    each = list(deployments)
    return [by_preference(each, name)[0] for name in CONVERSATIONS]


WEIGHTS = {
    "alike": (1, 1),
    "one to three": (1, 3),
    "three of them": (1, 2, 5),
    "a little one": (0.05, 1),
    "large numbers": (1e6, 3e6),
    "one alone": (7,),
}


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
def test_weights_are_respected(weights: Sequence[float]) -> None:
    """Of 2,000 conversations each deployment gets its share, within four standard deviations."""
    deployments = [Deployment(f"upstream {number}", "model", weight=weight) for number, weight in enumerate(weights)]

    counts = Counter(homes(deployments))

    for deployment in deployments:
        share = deployment.weight / sum(weights)
        deviation = math.sqrt(len(CONVERSATIONS) * share * (1 - share))
        assert counts[deployment] == pytest.approx(len(CONVERSATIONS) * share, abs=4 * deviation)


@pytest.mark.parametrize("removed", range(3))
def test_a_deployment_that_goes_moves_only_its_own_conversations(removed: int) -> None:
    """Every other conversation keeps its deployment and with it its cache; those that move share out the rest."""
    deployments = [Deployment(f"upstream {number}", "model", weight=number + 1) for number in range(3)]
    rest = [each for each in deployments if each is not deployments[removed]]

    before, after = homes(deployments), homes(rest)

    moved = [(one, other) for one, other in zip(before, after, strict=True) if one is not other]
    assert {deployments[removed]} == {one for one, _ in moved}
    assert set(rest) == {other for _, other in moved}
    assert before.count(deployments[removed]) == len(moved)


def test_the_order_of_the_list_does_not_matter() -> None:
    """Two gateways whose files list the deployments in another order choose alike."""
    deployments = [Deployment(f"upstream {number}", "model") for number in range(4)]

    assert homes(deployments) == homes(reversed(deployments))


def test_priority_comes_before_weight() -> None:
    """However heavy a deployment of a later priority is, it is asked only after all of an earlier one."""
    later = Deployment("later", "model", priority=1, weight=1e9)
    earlier = [Deployment(f"upstream {number}", "model") for number in range(2)]

    orders = [by_preference([later, *earlier], name) for name in CONVERSATIONS]

    assert {later} == {order[-1] for order in orders}
