import math
import time

import pytest

from onnxgc.planning.deadline import Deadline


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_shares_are_of_the_whole_limit(clock: list[float]):
    deadline = Deadline(20.0, clock[0])
    clock[0] = 104.0
    assert deadline.elapsed() == 4.0
    assert deadline.share(0.5) == 10.0
    assert (deadline.left(), deadline.left(0.5), deadline.left(0.1)) == (16.0, 6.0, 0.0)
    assert deadline.phase(0.5) == Deadline(10.0, 104.0)
    assert not deadline.is_over()
    clock[0] = 120.0
    assert deadline.is_over()
    assert deadline.extended(5.0).left() == 5.0


def test_without_a_limit_there_is_no_end(clock: list[float]):
    deadline = Deadline(None, clock[0])
    clock[0] = 1e9
    assert (deadline.share(0.5), deadline.left()) == (None, None)
    assert deadline.end == math.inf
    assert not deadline.phase(0.5).is_over()
    assert deadline.extended(5.0) == deadline
