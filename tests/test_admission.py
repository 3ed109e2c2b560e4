"""How many may wait, and for how long the others should stay away."""

from __future__ import annotations

import pytest

from engine.admission import Backlog
from engine.request import QueueFull, Request


def request(tokens: int) -> Request:
    return Request("r", [1] * tokens)


def refusal(backlog: Backlog, now: float, tokens: int = 50, live: int = 1) -> QueueFull:
    with pytest.raises(QueueFull) as refused:
        backlog.check(request(tokens), live, now)
    return refused.value


def test_a_request_alone_may_have_any_number_of_tokens() -> None:
    backlog = Backlog(10, 100)
    backlog.check(request(1000), 0, 0.0)
    backlog.add(request(1000), 0.0)
    assert "1000 prompt tokens wait already" in str(refusal(backlog, 0.0))


def test_tokens_wait_up_to_the_bound() -> None:
    backlog = Backlog(10, 100)
    backlog.add(first := request(60), 0.0)
    backlog.check(request(40), 1, 0.0)
    refusal(backlog, 0.0, 41)
    backlog.remove(first, 1.0, served=True)
    backlog.check(request(41), 1, 1.0)
    assert backlog.tokens == 0


def test_requests_up_to_the_bound() -> None:
    backlog = Backlog(10, 100)
    backlog.check(request(1), 9, 0.0)
    assert "10 requests" in str(refusal(backlog, 0.0, 1, live=10))


def test_what_an_earlier_attempt_generated_is_computed_again() -> None:
    backlog = Backlog(10, 100)
    backlog.add(Request("r", [1] * 30, generated=[2] * 40), 0.0)
    assert backlog.tokens == 70


def test_come_back_when_what_waits_now_is_through() -> None:
    """100 tokens a second while somebody waited; idle time does not count."""
    backlog = Backlog(10, 1000)
    now = 0.0
    for _ in range(5):
        backlog.add(each := request(200), now)
        backlog.remove(each, now + 2.0, served=True)
        now += 1000.0
    backlog.add(request(900), now)
    assert refusal(backlog, now, 200).retry_after == pytest.approx(9.0, rel=0.01)
    assert refusal(backlog, now, 1, live=10).retry_after == pytest.approx(9.0, rel=0.01)


def test_time_in_which_nobody_is_served_makes_it_longer() -> None:
    backlog = Backlog(10, 100)
    backlog.add(each := request(100), 0.0)
    backlog.remove(each, 1.0, served=True)
    backlog.add(request(100), 1.0)
    found = [refusal(backlog, now).retry_after or 0.0 for now in (1.0, 3.0, 9.0)]
    assert found == sorted(found)
    assert found[0] == pytest.approx(1.0) and found[2] > 5


@pytest.mark.parametrize("asked", [1, 3600])
def test_an_hour_in_which_nobody_is_served_counts_as_an_hour(asked: int) -> None:
    """And no more, however often somebody asked meanwhile."""
    backlog = Backlog(10, 100)
    backlog.add(each := request(100), 0.0)
    backlog.remove(each, 1.0, served=True)
    backlog.add(request(100), 1.0)
    for i in range(1, asked + 1):
        found = refusal(backlog, 1.0 + 3600 / asked * i).retry_after
    assert found == pytest.approx(3601)


def test_requests_that_were_given_up_are_not_served() -> None:
    backlog = Backlog(10, 100)
    for served in (True, False):
        backlog.add(each := request(100), 0.0)
        backlog.remove(each, 10.0, served=served)
        backlog.remove(each, 10.0, served=served)  # only the first output counts
        backlog._since = 0.0
    backlog.add(request(100), 0.0)
    assert refusal(backlog, 0.0).retry_after == pytest.approx(20.0, rel=0.2)


def test_a_rate_of_long_ago_is_forgotten() -> None:
    backlog = Backlog(10, 10_000)
    now = 0.0
    for rate, seconds in ((1000, 600), (100, 600)):
        for _ in range(seconds):
            backlog.add(each := request(rate), now)
            now += 1.0
            backlog.remove(each, now, served=True)
    backlog.add(request(10_000), now)
    assert refusal(backlog, now).retry_after == pytest.approx(100, rel=0.05)


def test_without_a_measurement_come_back_soon() -> None:
    backlog = Backlog(10, 100)
    backlog.add(request(100), 0.0)
    assert refusal(backlog, 5.0).retry_after == 1.0
