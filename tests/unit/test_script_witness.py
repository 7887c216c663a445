"""What a step reads, that changes, and that is not carried, is named; nothing else is."""

from __future__ import annotations

import os
import queue
import socket
import time
from collections.abc import Callable
from typing import Any

import numpy
import torch

from keepstep.worker.script import frames
from keepstep.worker.script.variables import Variables


def told(script: Callable[[Callable[..., Any]], None]) -> list[str]:
    variables = Variables(lambda thing: isinstance(thing, Variables))

    def call(function: Callable[..., Any], *args: Any) -> Any:
        variables.begin(frames.script_frames(script.__code__)[:-1], function, args)
        result = function(*args)
        variables.capture()
        variables.late()
        variables.end()
        return result

    script(call)
    found = variables.unknown()
    assert variables.unknown() == []  # each once
    return found


def test_a_closure_variable_that_is_bound_to_other_objects_is_named() -> None:
    def script(call: Callable[..., Any]) -> None:
        handle: Any = None

        def train_step() -> Any:
            return handle

        for _ in range(6):
            handle = object()
            call(train_step)

    (text,) = told(script)
    assert "handle" in text
    assert "train_step" in text
    assert "hint:" in text


def test_a_large_container_that_changes_is_named() -> None:
    def script(call: Callable[..., Any]) -> None:
        replay = list(range(5000))

        def train_step() -> int:
            return len(replay)

        for i in range(6):
            call(train_step)
            replay.append(i)

    assert any("replay" in text for text in told(script))


def test_a_file_that_the_step_reads_is_named(tmp_path: Any) -> None:
    path = tmp_path / "data"
    path.write_text("abc\n" * 100)

    def script(call: Callable[..., Any]) -> None:
        with path.open() as lines:

            def train_step() -> str:
                return lines.readline()

            for _ in range(6):
                call(train_step)

    assert any("lines" in text and "position" in text for text in told(script))


def test_a_branch_by_the_clock_is_named_and_a_timing_is_not() -> None:
    def script(call: Callable[..., Any]) -> None:
        def impatient() -> bool:
            begun = time.perf_counter()
            spent = time.perf_counter() - begun
            return spent > 1.0

        def timed() -> float:
            begun = time.monotonic()
            return time.monotonic() - begun

        for _ in range(3):
            call(impatient)
            call(timed)

    (text,) = told(script)
    assert "impatient" in text
    assert "clock" in text


def test_the_place_is_named() -> None:
    def script(call: Callable[..., Any]) -> None:
        def train_step() -> Any:
            return socket.gethostname(), os.environ.get("LOCAL_RANK")

        for _ in range(5):
            call(train_step)

    texts = told(script)
    assert any("gethostname" in text for text in texts)
    assert any("LOCAL_RANK" in text for text in texts)


def test_an_ordinary_script_is_not_bothered() -> None:
    def script(call: Callable[..., Any]) -> None:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen, total, losses = 0, 0.0, []

        def train_step(x: torch.Tensor) -> torch.Tensor:
            nonlocal seen
            seen += 1
            loss = model(x).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        for _ in range(6):
            loss = call(train_step, torch.randn(3, 2))
            total += loss.item()
            losses.append(total)

    assert told(script) == []


def test_what_is_not_looked_into_is_named() -> None:
    def script(call: Callable[..., Any]) -> None:
        waiting: Any = queue.SimpleQueue()
        table = numpy.array([[None, 2], [1, "x"]], dtype=object)
        weights = numpy.ma.masked_array([1.0, 2.0], mask=[False, True])
        large = bytearray(1 << 20)
        shown = numpy.zeros(4)

        def train_step() -> float:
            return float(weights[0] + table.size + large[0] + shown[0] + waiting.qsize())

        for _ in range(6):
            call(train_step)

    texts = told(script)
    named = [
        name for name in ("waiting", "table", "weights", "large") if f".{name} is" in str(texts)
    ]
    assert named == ["waiting", "table", "weights", "large"], texts
    assert len(texts) == len(named)
    assert all("is not looked into" in text for text in texts)
