"""A newcomer that would compute otherwise than its predecessor is found."""

from __future__ import annotations

import pytest
import torch

from keepstep.errors import UsageError
from keepstep.worker.device import alike
from keepstep.worker.state import codec


def test_facts_travel_and_agree_with_themselves() -> None:
    mine = alike.facts()
    assert codec.loads_inline(codec.dumps_inline(mine)) == mine
    assert alike.compare(mine, alike.facts()) == []
    alike.require(mine, rank=0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("torch", "1.0"),
        ("CPU capability", "of another kind"),
        ("torch threads", "96"),
        ("OMP_NUM_THREADS", "96"),
        ("deterministic algorithms", "True"),
        ("default dtype", "torch.float64"),
        ("GPU", "NVIDIA B200"),
        ("NVIDIA driver branch", "999"),
    ],
)
def test_what_changes_numbers_is_refused_by_name(name: str, value: str) -> None:
    mine = alike.facts()
    (said,) = alike.compare({**mine, name: value}, mine)
    assert said.startswith(f"{name} {value} there and ") and alike.changes_numbers(said)
    with pytest.raises(UsageError, match=name) as refused:
        alike.require({**mine, name: value}, rank=3)
    assert "spares of the same kind" in refused.value.hint


def test_what_may_be_harmless_is_only_said(capsys: pytest.CaptureFixture[str]) -> None:
    theirs = {**alike.facts(), "NVIDIA driver": "580.1.2"}
    alike.require(theirs, rank=3)
    assert "rank 3: NVIDIA driver 580.1.2 there" in capsys.readouterr().err


def test_resumed_job_is_told_and_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    alike.require({**alike.facts(), "torch": "1.0"}, rank=3, resumed=True)
    assert "rank 3: torch 1.0 there" in capsys.readouterr().err
    alike.require({}, rank=3)  # a record that says nothing about it


def test_flags_are_seen() -> None:
    before = alike.facts()
    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("medium")
    try:
        found = alike.compare(before, alike.facts())
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision("highest")
    assert {text.split(" there")[0] for text in found} >= {
        "float32_matmul_precision highest",
        "deterministic algorithms False",
    }


def test_compilation_is_named_as_what_may_choose_other_kernels() -> None:
    model = torch.nn.Linear(2, 2)
    assert alike.may_choose([model]) == []
    (said,) = alike.may_choose([torch.compile(model)])
    assert "shapes" in said
    tuned, _ = alike.may_choose([torch.compile(model, mode="max-autotune")])
    assert "autotun" in tuned
    model.compile()
    assert len(alike.may_choose([model])) == 1
