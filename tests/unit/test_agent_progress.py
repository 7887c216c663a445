from __future__ import annotations

import msgspec
import pytest

from keepstep.adapters.transport.tls import is_loopback
from keepstep.agent.workers import TAIL_BYTES, check_name, log_tail
from keepstep.core.agent.rate import Rate
from keepstep.errors import UsageError
from keepstep.model.page import Sample

S = 1_000_000_000
BASE = Sample(
    heartbeat_ns=0,
    progress_ns=0,
    marks=0,
    version=0,
    tick=0,
    generation=1,
    where="compute",
    stepping=True,
    commit_ns=0,
    step_ns=0,
    hold=False,
)


def at(version: int, commit_s: float, generation: int = 1) -> Sample:
    return msgspec.structs.replace(
        BASE, version=version, commit_ns=int(commit_s * S), generation=generation
    )


def test_rate_follows_the_workers_own_clock() -> None:
    rate = Rate()
    shown = [rate.observe((100 + n) * S, at(10 + 4 * n, 100 + n)) for n in range(30)]
    assert shown[0] == 0 and shown[1:] == [4.0] * 29


def test_rate_moves_towards_a_new_speed_smoothly() -> None:
    rate = Rate()
    for n in range(10):
        rate.observe((100 + n) * S, at(4 * n, 100 + n))
    first = rate.observe(110 * S, at(44, 110))
    assert 4 < first < 8
    for n in range(1, 30):
        last = rate.observe((110 + n) * S, at(44 + 8 * n, 110 + n))
    assert last == pytest.approx(8, abs=0.1)


def test_rate_falls_when_nothing_is_committed() -> None:
    rate = Rate()
    rate.observe(100 * S, at(0, 100))
    assert rate.observe(101 * S, at(10, 101)) == 10
    assert rate.observe(102 * S, at(10, 101)) == 10
    assert rate.observe(111 * S, at(10, 101)) == pytest.approx(0.1)


def test_a_newcomers_jump_is_not_a_speed() -> None:
    rate = Rate()
    rate.observe(100 * S, at(0, 0, generation=1))
    assert rate.observe(101 * S, at(5000, 101, generation=2)) == 0
    assert rate.observe(102 * S, at(5004, 102, generation=2)) == 4


def test_log_tail_is_bounded_in_lines_and_bytes(tmp_path) -> None:  # type: ignore[no-untyped-def]
    log = tmp_path / "w.log"
    assert log_tail(log) == ""
    log.write_text("".join(f"line {n}\n" for n in range(1000)))
    assert log_tail(log).splitlines() == [f"line {n}" for n in range(960, 1000)]
    assert log_tail(log, "because").splitlines()[-1].endswith("killed this process: because")
    log.write_bytes(b"\xff\xc3\xa9" * 20_000)
    assert len(log_tail(log, "because").encode()) <= TAIL_BYTES
    assert len(log_tail(log, "b" * 100_000).encode()) <= TAIL_BYTES


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "a\n", "-x", "x" * 200])
def test_names_that_are_no_file_names_are_refused(name: str) -> None:
    with pytest.raises(UsageError):
        check_name(name)


def test_loopback() -> None:
    hosts = ["127.0.0.1", "127.1.2.3", "::1", "localhost", "10.0.0.1", "example.org", ""]
    assert [is_loopback(host) for host in hosts] == [True] * 4 + [False] * 3
