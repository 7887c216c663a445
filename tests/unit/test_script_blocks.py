"""Large tensors and arrays of the script: carried if changed in place, or read by a step."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy
import pytest
import torch

from keepstep.errors import UsageError
from keepstep.worker.script import blocks
from tests.support.variables import Rank, check, nothing, run

ROWS, WIDTH = 64, 512  # 128 KiB of float32


def logged(tensor: Any) -> list[float]:
    return [float(x) for x in tensor[:8].sum(1)]


class Bank:
    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def write(self, at: int, value: float) -> None:
        self.rows[at % ROWS] += value

    def push(self, value: float) -> None:
        self.rows = torch.cat([torch.full((1, WIDTH), value), self.rows])[:ROWS]


def test_a_bank_that_is_changed_in_place_between_steps() -> None:
    def script(ks: Rank) -> None:
        bank = Bank(torch.zeros(ROWS, WIDTH))
        for i in range(5):
            ks.step(nothing)
            bank.write(i, i + 1.0)
            ks.log.append(logged(bank.rows))

    check(script)


@pytest.mark.parametrize("kind", ["tensor", "array", "data", "bfloat16"])
def test_a_bank_that_a_step_changes_in_place(kind: str) -> None:
    def script(ks: Rank) -> None:
        dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
        rows: Any = torch.zeros(ROWS, WIDTH, dtype=dtype)
        bank = Bank(rows.numpy() if kind == "array" else rows)

        def step(i: int) -> None:
            if kind == "data":
                bank.rows.data.numpy()[i] += i + 1.0
            else:
                bank.write(i, i + 1.0)

        for i in range(5):
            ks.step(step, i)
            ks.log.append(logged(bank.rows))

    undisturbed = check(script)
    assert undisturbed.trees[-1], "it is carried"


def test_a_queue_that_is_bound_anew_and_read_by_the_step() -> None:
    def script(ks: Rank) -> None:
        bank = Bank(torch.zeros(ROWS, WIDTH))
        queue = torch.zeros(ROWS, WIDTH)
        array = numpy.zeros((ROWS, WIDTH))

        def step(i: int) -> None:
            nonlocal queue, array
            bank.push(float(i))
            queue = torch.cat([queue[1:], queue[:1] + i])
            array = numpy.roll(array, 1, 0) + i

        for i in range(5):
            ks.step(step, i)
            ks.log.append(logged(bank.rows) + logged(queue) + logged(array))

    check(script)


def test_what_never_changes_and_what_comes_and_goes_is_not_carried() -> None:
    def script(ks: Rank) -> None:
        data = torch.arange(float(ROWS * WIDTH)).reshape(ROWS, WIDTH)
        array = data.numpy().copy()

        def step() -> float:
            return float(data[0].sum()) + float(array[0].sum())

        for _ in range(4):
            batch = data * 2
            ks.log.append(ks.step(step))
        assert batch is not None

    rank = run(script)
    assert not any(b"\x00" * 64 in tree for tree in rank.trees)
    assert all(len(tree) < 4096 for tree in rank.trees), [len(tree) for tree in rank.trees]
    assert not rank.variables.heavy()


def test_nothing_is_kept_alive_between_steps() -> None:
    def script(ks: Rank) -> None:
        bank = Bank(torch.zeros(ROWS, WIDTH))
        for i in range(4):
            ks.step(bank.write, i, 1.0)
            ref = weakref.ref(bank.rows)
            bank.rows = bank.rows.clone()
            gc.collect()
            ks.log.append(ref() is None)

    assert run(script).log == [True] * 4


def test_a_retry_finds_it_as_it_was() -> None:
    def script(ks: Rank) -> None:
        bank = Bank(torch.zeros(ROWS, WIDTH))
        array = Bank(numpy.zeros((ROWS, WIDTH), dtype=numpy.float32))

        def step(i: int) -> None:
            bank.write(i, 1.0)
            array.write(i, 1.0)
            bank.push(float(i))

        for i in range(5):
            ks.retries = 2
            ks.step(step, i)
            ks.log.append(logged(bank.rows) + logged(array.rows))

    disturbed = run(script)
    calm = Rank(script.__code__)
    calm.calm = True
    script(calm)
    assert disturbed.log == calm.log


def test_a_first_change_that_nobody_expected_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(blocks, "COPIED_BYTES_MAX", 0)

    def script(ks: Rank) -> None:
        bank = Bank(torch.zeros(ROWS, WIDTH))
        ks.retries = 1
        ks.step(bank.write, 0, 1.0)

    with pytest.raises(UsageError, match=r"rows .*was changed in place for the first time"):
        run(script)


def test_it_is_told_once_with_its_size() -> None:
    def script(ks: Rank) -> None:
        bank = Bank(torch.zeros(ROWS, WIDTH))
        for i in range(4):
            ks.step(bank.write, i, 1.0)
            ks.log.append(ks.variables.warnings())

    told = [text for texts in run(script).log for text in texts]
    assert len(told) == 1 and "rows changes, and all of it (0.1 MiB)" in told[0]


def test_a_large_container_that_a_step_reads_is_not_left_behind_silently() -> None:
    def script(ks: Rank) -> None:
        replay: list[int] = list(range(5000))
        log: list[int] = list(range(5000))

        def step(i: int) -> int:
            log.append(i)
            replay.append(i)
            return replay[i]

        for i in range(4):
            ks.log.append(ks.step(step, i))

    rank = run(script)
    with pytest.raises(UsageError, match=r"replay changes from step to step and is read"):
        run(script, rank.trees[-1])


def test_a_log_that_steps_only_append_to_stops_nobody() -> None:
    def script(ks: Rank) -> None:
        log: list[int] = list(range(5000))

        def step(i: int) -> None:
            log.append(i)

        for i in range(4):
            ks.step(step, i)
            ks.log.append(i)

    check(script)


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize(
    "array",
    [
        numpy.zeros((ROWS, WIDTH), dtype=">f4"),
        numpy.zeros((ROWS, WIDTH), dtype=numpy.float32)[::-1],
        numpy.zeros((WIDTH, ROWS), dtype=numpy.complex64).T,
        numpy.zeros((ROWS, WIDTH), dtype=bool),
    ],
    ids=["big-endian", "reversed", "transposed", "bool"],
)
def test_contents_of_arrays_of_any_layout(array: Any, full: bool) -> None:
    before = blocks._content(array, full)
    array[3] = 1
    after = blocks._content(array, full)
    array[3] = 0
    assert before != after and blocks._content(array, full) == before
