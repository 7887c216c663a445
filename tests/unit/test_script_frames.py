"""Frames of a script: found, named, read and written while they run; iterators of their loops."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import weakref
from typing import Any

from keepstep.worker.script import frames, stack


def test_this_interpreter_is_supported() -> None:
    assert frames.available
    assert stack.available


def test_locals_of_a_running_function_are_set() -> None:
    def counting() -> int:
        count = 1
        frames.write(sys._getframe(), {"count": 41})
        return count + 1

    assert counting() == 42


def test_a_variable_that_is_not_bound_yet_is_bound() -> None:
    def later() -> int:
        frames.write(sys._getframe(), {"stale": 7})
        if not frames.available:
            stale = 0
        return stale

    assert later() == 7


def test_a_cell_is_set_for_everyone_who_shares_it() -> None:
    def outer() -> tuple[int, int]:
        total = 0

        def inner() -> int:
            nonlocal total
            total += 1
            return total

        inner()
        frames.write(sys._getframe(), {"total": 10})
        return inner(), total

    assert outer() == (11, 11)


def test_reading_keeps_nothing_alive() -> None:
    class Batch:
        pass

    def loop() -> Any:
        batch: Batch | None = Batch()
        seen = weakref.ref(batch)
        frames.read(sys._getframe())
        batch = None
        gc.collect()
        return seen()

    assert loop() is None


def test_a_dict_that_the_script_got_from_locals_is_left_alone() -> None:
    def configure() -> dict[str, Any]:
        width = 4
        config = locals()
        frames.read(sys._getframe())
        assert width == 4
        return config

    assert configure()["width"] == 4


def test_frames_run_from_the_root_inward_without_foreign_ones() -> None:
    found: list[str] = []

    def inner() -> int:
        stood = frames.script_frames(outer.__code__)
        found.extend(frames.key(frame, depth) for depth, frame in enumerate(stood))
        return 0

    def outer() -> None:
        sorted([1], key=lambda _: inner())

    outer()
    names = [key.split(":")[1].rsplit(".", 1)[-1] for key in found]
    assert names == ["outer", "<lambda>", "inner"]
    assert found[0].endswith("#0")


def test_the_script_begins_behind_the_launcher(tmp_path: Any) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "from keepstep.worker.script import frames\n"
        "def main():\n"
        "    print([frames.key(f, i) for i, f in enumerate(frames.script_frames())])\n"
        "main()\n"
    )
    start = (
        "import keepstep.worker.__main__ as m, sys;"
        f"m._run_script([{str(script)!r}], lambda text, error: print(text), lambda: None)"
    )
    done = subprocess.run(
        [sys.executable, "-c", start], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "['__main__:<module>:1#0', '__main__:main:2#1']", done.stderr


def test_iterators_of_nested_loops_are_found_in_order() -> None:
    outer, inner = iter([1, 2]), itertools.count()

    def looping() -> list[Any]:
        for _ in outer:
            with memoryview(b""):
                for number in inner:
                    try:
                        if number == 2:
                            return [it for it, _ in stack.loop_iterators(sys._getframe())]
                    finally:
                        del number
        return []

    assert looping() == [outer, inner]


def test_a_finished_loop_is_not_found() -> None:
    def looping() -> list[Any]:
        for _ in range(2):
            pass
        return stack.loop_iterators(sys._getframe())

    assert looping() == []


def test_the_loop_of_a_suspended_generator_is_found() -> None:
    source = iter("abc")

    def letters() -> Any:
        for letter in source:
            yield letter.upper()

    generator = letters()
    next(generator)
    assert [it for it, _ in stack.loop_iterators(generator.gi_frame)] == [source]


def test_a_loop_is_found_while_its_body_calls_with_unpacked_arguments() -> None:
    found: list[Any] = []

    def body(*args: Any, **kwargs: Any) -> None:
        found.extend(it for it, _ in stack.loop_iterators(sys._getframe(1)))

    numbers = iter([1])
    for number in numbers:
        body(*[number], a=number)
    assert found == [numbers]
