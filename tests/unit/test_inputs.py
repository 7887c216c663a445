"""Digests of a step's arguments tell what differs by name, wherever it lies."""

from __future__ import annotations

import dataclasses
from collections import UserDict
from typing import Any

import numpy
import pytest
import torch

from keepstep.worker.state import step_inputs
from keepstep.worker.state.step_inputs import Inputs, differences, inputs_of, summed, words_of


def test_inputs_are_told_apart_by_content_and_named_by_path() -> None:
    batch = {"x": torch.arange(6.0), "ids": [torch.tensor([1, 2]), 3]}
    first = inputs_of({"0": batch, "rate": 0.5})
    assert set(first) == {"0['x']", "0['ids'][0]", "0['ids'][1]", "rate"}
    again = inputs_of(
        {"0": {"x": torch.arange(6.0), "ids": [torch.tensor([1, 2]), 3]}, "rate": 0.5}
    )
    assert differences(first, again) == []
    batch["x"][3] = 9.0
    (found,) = differences(first, inputs_of({"0": batch, "rate": 0.5}))
    assert found.startswith("0['x'] is ")


@dataclasses.dataclass
class Sample:
    image: Any
    path: str = ""


def test_inputs_inside_objects_count() -> None:
    def batch(number: float, path: str) -> dict[str, Any]:
        encoding = UserDict({"ids": torch.full((3,), number)})
        sample = Sample({"pixels": numpy.full((2, 2), number), "paths": [path]}, path)
        return {"0": encoding, "1": [sample]}

    first = inputs_of(batch(1.0, "/here"))
    assert set(first) == {"0['ids']", "1[0].image['pixels']"}
    assert differences(first, inputs_of(batch(1.0, "/there"))) == []
    assert len(differences(first, inputs_of(batch(2.0, "/here")))) == 2


def test_a_large_input_is_read_at_its_beginning_and_its_end() -> None:
    one = torch.zeros(1 << 20)
    before = inputs_of({"x": one})
    for place in (0, -1):
        other = one.clone()
        other[place] = 1.0
        assert differences(before, inputs_of({"x": other}))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(7, dtype=torch.uint8),
        torch.arange(9, dtype=torch.int64)[1:],
        torch.randn(5, dtype=torch.bfloat16)[1:],
        torch.randn(4, 6)[:, 1:3],
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.tensor([True, False, True]),
        torch.randn(1000, 1000),
    ],
    ids=lambda tensor: f"{tensor.dtype}{list(tensor.shape)}",
)
def test_sums_see_a_changed_element_and_an_exchange(tensor: torch.Tensor) -> None:
    words = words_of(tensor)
    assert words is not None and words.numel() <= step_inputs.SUMMED_MAX
    before = summed(words)
    changed = tensor.clone(memory_format=torch.preserve_format)
    again = words_of(changed)
    assert again is not None and summed(again) == before
    first = changed[(0,) * changed.dim()]
    first.copy_(~first if tensor.dtype is torch.bool else first + 1)
    assert summed(words_of(changed)) != before
    swapped = words_of(tensor.flip(0))
    assert swapped is not None and (
        torch.equal(tensor, tensor.flip(0)) or summed(swapped) != before
    )


def test_what_would_take_a_large_copy_is_left_out() -> None:
    assert words_of(torch.zeros(1 << 10, 1 << 10)[:, 1:]) is None
    assert words_of(torch.zeros(0)) is None


class Later:
    """Stands for an event of a device."""

    def __init__(self) -> None:
        self.over = False

    def query(self) -> bool:
        return self.over

    def synchronize(self) -> None:
        self.over = True


def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of float64 are taken for ones of a device."""
    collect = step_inputs._collect

    def collected(node: Any, path: str, found: Any, depth: int, kept: bool, *more: Any) -> None:
        if isinstance(node, torch.Tensor) and node.dtype is torch.float64:
            more[0][path] = node
        else:
            collect(node, path, found, depth, kept, *more)

    monkeypatch.setattr(step_inputs, "_collect", collected)


def test_the_note_is_completed_when_the_device_has_come_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_device(monkeypatch)
    here, there = torch.arange(3.0), torch.arange(3.0, dtype=torch.float64)
    noted = Inputs()
    noted.enter({"here": here, "there": there})
    assert noted._coming is not None
    noted._coming._event = later = Later()
    assert not noted.complete()
    assert set(noted.note()["inputs"]) == {"here"} and not noted.note()["complete"]
    assert step_inputs.other(noted.note(), {"here": here, "there": there + 1}) == []
    later.over = True
    assert noted.complete() and not noted.complete()
    assert step_inputs.other(noted.note(), {"here": here, "there": there}) == []
    (found,) = step_inputs.other(noted.note(), {"here": here, "there": there + 1})
    assert found.startswith("there is torch.float64(3,)")


def test_a_retry_finds_what_was_changed_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    on_device(monkeypatch)
    arguments = {"here": torch.arange(3.0), "there": torch.arange(3.0, dtype=torch.float64)}
    noted = Inputs()
    noted.enter(arguments)
    assert noted.changed(arguments) == ""
    arguments["there"].data[1] = 5.0
    assert noted.changed(arguments) == "there"
