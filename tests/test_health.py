"""Which deployments may be asked now, by a clock that the test turns.

The machine does to one deployment what gateways do, in any order: requests begin, answer, fail and are left, at the
same time as others. It keeps its own account, in the words of the contract, and compares.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from proxy.upstream.health import Attempt, Health


class Clock:
    """Time stands still unless a test turns it on."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Deployment:
    """A deployment with the clock that it lives by."""

    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.health = Health(self.clock)

    def fail(self, retry_after: float | None = None) -> None:
        """One request that fails."""
        attempt = self.health.begin()
        self.health.end()
        self.health.failed(attempt, retry_after)

    def answer(self) -> None:
        """One request that is answered."""
        attempt = self.health.begin()
        self.health.end()
        self.health.succeeded(attempt)

    def cooling_seconds(self) -> float:
        """How long it goes on cooling, to a tenth of a second; time goes on so far."""
        began = self.clock.now
        while self.health.is_cooling:
            self.clock.now += 0.1
        return round(self.clock.now - began, 1)


def test_cooling_grows_from_one_second_to_a_minute() -> None:
    """Each failed probe doubles the time until the next one."""
    deployment = Deployment()
    seconds = []

    for _ in range(9):
        deployment.fail()
        seconds.append(deployment.cooling_seconds())

    assert seconds == pytest.approx([1, 2, 4, 8, 16, 32, 60, 60, 60], abs=0.11)


def test_an_answer_ends_the_growth() -> None:
    """A deployment that has answered since begins at one second again."""
    deployment = Deployment()
    for _ in range(5):
        deployment.fail()
        deployment.cooling_seconds()

    deployment.answer()
    deployment.fail()

    assert pytest.approx(1, abs=0.11) == deployment.cooling_seconds()


ASKED_FOR = {
    "what it asks for": (17, 17),
    "nothing below a second": (0, 1),
    "nothing above a minute": (3600, 60),
}


@pytest.mark.parametrize(("retry_after", "expected"), ASKED_FOR.values(), ids=ASKED_FOR)
def test_a_wish_to_wait_is_obeyed(retry_after: float, expected: float) -> None:
    """A deployment that says how long to wait is left alone for so long, at most a minute."""
    deployment = Deployment()

    deployment.fail(retry_after)

    assert pytest.approx(expected, abs=0.11) == deployment.cooling_seconds()


def test_failures_at_the_same_time_are_one() -> None:
    """Twenty requests that fail together cost a second, not a minute."""
    deployment = Deployment()
    attempts = [deployment.health.begin() for _ in range(20)]

    for attempt in attempts:
        deployment.health.end()
        deployment.health.failed(attempt, None)

    assert pytest.approx(1, abs=0.11) == deployment.cooling_seconds()


def test_the_longest_wish_of_several_failures_counts() -> None:
    """Of failures at the same time, the one that asks for the longest wait is obeyed."""
    deployment = Deployment()
    attempts = [deployment.health.begin() for _ in range(3)]

    for attempt, retry_after in zip(attempts, (None, 30, 5), strict=True):
        deployment.health.failed(attempt, retry_after)

    assert pytest.approx(30, abs=0.11) == deployment.cooling_seconds()


def test_an_answer_that_was_under_way_ends_no_cooling() -> None:
    """A deployment that asked to be left alone is left alone, though an older request of it is answered."""
    deployment = Deployment()
    older = deployment.health.begin()
    deployment.fail(retry_after=30)

    deployment.health.succeeded(older)

    assert pytest.approx(30, abs=0.11) == deployment.cooling_seconds()


def test_a_failure_that_was_under_way_is_obeyed_where_it_asks_for_time() -> None:
    """A deployment that answered again and then asks an older request to wait is left alone."""
    deployment = Deployment()
    older = deployment.health.begin()
    deployment.fail()
    deployment.answer()

    deployment.health.failed(older, 30)

    assert pytest.approx(30, abs=0.11) == deployment.cooling_seconds()


def test_one_probe_of_twenty_requests() -> None:
    """When the time is over one request may pass, and the others see a cooling deployment until it is answered."""
    deployment = Deployment()
    deployment.fail()
    deployment.cooling_seconds()
    passed = []

    for _ in range(20):
        if not deployment.health.is_cooling:
            passed.append(deployment.health.begin())
    [probe] = passed
    deployment.health.succeeded(probe)

    assert not deployment.health.is_cooling


def test_a_probe_that_its_client_left_makes_room_for_the_next() -> None:
    """A client that leaves a probe tells nothing: the next request is the probe, with no further wait."""
    deployment = Deployment()
    deployment.fail()
    deployment.cooling_seconds()
    probe = deployment.health.begin()
    was_cooling = deployment.health.is_cooling

    deployment.health.left(probe)

    assert (True, False) == (was_cooling, deployment.health.is_cooling)
    deployment.health.begin()
    assert deployment.health.is_cooling


@pytest.mark.parametrize(("most", "expected"), [(1, [True, True]), (2, [False, True]), (None, [False, False])])
def test_a_cap_on_parallel_requests(most: int | None, expected: list[bool]) -> None:
    """A deployment is full with as many requests as it may have, and no longer when one of them is over."""
    deployment = Deployment()
    full = []

    for _ in range(2):
        deployment.health.begin()
        full.append(deployment.health.is_full(most))
    deployment.health.end()
    deployment.health.end()

    assert expected == full
    assert not deployment.health.is_full(most)


class Open(NamedTuple):
    """A request that is being answered, and after how many failures it began."""

    attempt: Attempt
    failures: int


class Machine(RuleBasedStateMachine):
    """Anything that can happen to one deployment, with an account of its own beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.open: list[Open] = []
        self.probe: Open | None = None
        self.left_alone_until = 0.0
        self.failures = 0
        self.in_a_row = 0
        """Failures since the last answer; with none it doesn't cool down."""

    @initialize(most=st.none() | st.integers(1, 4))
    def make(self, most: int | None) -> None:
        self.most = most
        self.health = Health(self.clock)

    @rule(seconds=st.sampled_from((0.5, 1.0, 2.0, 30.0, 60.0)) | st.floats(0, 70))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule()
    def begin(self) -> None:
        request = Open(self.health.begin(), self.failures)
        self.open.append(request)
        if self.in_a_row and self.probe is None and self.clock.now >= self.left_alone_until:
            self.probe = request

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.health.left(self.taken(data).attempt)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def succeed(self, data: st.DataObject) -> None:
        request = self.taken(data)
        self.health.succeeded(request.attempt)
        if request.failures == self.failures:
            self.in_a_row, self.left_alone_until, self.probe = 0, 0.0, None

    @precondition(lambda self: self.open)
    @rule(data=st.data(), retry_after=st.none() | st.integers(0, 100))
    def fail(self, data: st.DataObject, retry_after: int | None) -> None:
        request = self.taken(data)
        self.health.failed(request.attempt, retry_after)
        if request.failures == self.failures:
            self.failures += 1
            self.in_a_row += 1
        elif retry_after is None:
            return
        self.in_a_row = max(1, self.in_a_row)
        grown = min(60.0, 2.0 ** (self.in_a_row - 1))
        wait = grown if retry_after is None else min(60, max(1, retry_after))
        self.left_alone_until = max(self.left_alone_until, self.clock.now + wait)

    def taken(self, data: st.DataObject) -> Open:
        request = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        self.health.end()
        if request is self.probe:
            self.probe = None
        return request

    @invariant()
    def it_cools_down_as_accounted(self) -> None:
        waits = self.probe is not None or self.clock.now < self.left_alone_until
        assert (self.in_a_row > 0 and waits) == self.health.is_cooling

    @invariant()
    def places_are_as_accounted(self) -> None:
        assert len(self.open) == self.health.active
        assert (self.most is not None and len(self.open) >= self.most) == self.health.is_full(self.most)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
