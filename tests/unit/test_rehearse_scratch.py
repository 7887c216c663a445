"""Which folders a rehearsal keeps apart, and what it looks at in a script."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from keepstep.cli.scratch import mount_script, protected
from keepstep.worker.state import value_text


def test_protected_are_the_folders_that_a_script_may_write_to(tmp_path: Path) -> None:
    project, home, data, cache = (tmp_path / name for name in ("project", "home", "data", "c"))
    for folder in (project / "src", home, data, cache):
        folder.mkdir(parents=True)
    (project / "checkpoints").symlink_to(data)
    environ = {"HOME": str(home), "HF_HOME": str(cache), "KEEPSTEP_HOME": str(tmp_path / "k")}
    found = protected(project, project / "src", ["--lr", "3e-4"], environ)
    assert found.protected == sorted([project, home, data, cache]), "src is inside project"
    assert found.open == []


def test_arguments_that_name_folders_are_protected_or_told(tmp_path: Path) -> None:
    project, out = tmp_path / "project", tmp_path / "out"
    for folder in (project, out):
        folder.mkdir()
    given = [f"--out={out}/new/run1", "/tmp/best.pt", "/dev/null", "relative/path"]
    found = protected(project, project, given, {})
    assert found.protected == sorted([project, out])
    assert found.open == ["/tmp/best.pt"]


def test_mounts_below_a_protected_folder_stay_there_read_only(tmp_path: Path) -> None:
    text = mount_script(
        [Path("/a b")], [Path("/"), Path("/a b"), Path("/a b/data")], tmp_path, Path("/a b")
    )
    assert f"mount --rbind '{tmp_path}/0/under/data'" in text or (
        f"mount --rbind {tmp_path}/0/under/data '/a b/data'" in text
    )
    assert "remount,bind,ro '/a b/data'" in text
    assert text.endswith("cd '/a b'\nexec \"$@\"")


# --------------------------------------------------------------------------- values of a script


class Holder:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 3


class Trainer:
    def __init__(self) -> None:
        self.best, self.stream = 0.5, random.Random(1)


def test_values_are_equal_exactly_when_the_value_is() -> None:
    a = torch.arange(6.0).reshape(2, 3)
    assert value_text.of_tensor(a) == value_text.of_tensor(a.clone())
    assert value_text.of_tensor(a) != value_text.of_tensor(a.reshape(3, 2))
    b = a.clone()
    b[1, 2] = torch.nextafter(b[1, 2], torch.tensor(9.0))
    assert value_text.of_tensor(a) != value_text.of_tensor(b)
    assert value_text.of_tensor(torch.tensor(0.1)) == repr(torch.tensor(0.1).item())
    assert value_text.of_tensor(torch.empty(0)) == value_text.of_tensor(torch.empty(0))


def test_parts_of_a_batch_have_names() -> None:
    found = value_text.parts("batch", {"x": torch.ones(2), "ids": [1, 2], "who": object()})
    assert list(found) == ["batch['x']", "batch['ids']", "batch['who']"]
    assert value_text.parts("result", (0.5, torch.tensor(2))) == {
        "result[0]": "0.5",
        "result[1]": "2",
    }
    assert value_text.parts("a", np.ones(3)) == value_text.parts("a", np.ones(3))


def test_variables_of_the_script_are_found_in_frames_closures_and_objects() -> None:
    holder, trainer, total, tensor = Holder(), Trainer(), 7, torch.ones(1)
    stream = np.random.default_rng(0)

    def step() -> Any:
        return total, tensor

    plain, streams = value_text.variables(sys._getframe(), step)
    mine = "test_variables_of_the_script_are_found_in_frames_closures_and_objects."
    assert plain[f"{mine}total"] == "7" and plain["step.total"] == "7"
    assert plain[f"{mine}holder.count"] == "3" and plain[f"{mine}trainer.best"] == "0.5"
    assert f"{mine}tensor" not in plain
    assert {f"{mine}trainer.stream", f"{mine}stream"} <= set(streams)
    before = streams[f"{mine}stream"]
    stream.random()
    trainer.stream.random()
    holder.count += 1
    plain, streams = value_text.variables(sys._getframe(), step)
    assert plain[f"{mine}holder.count"] == "4"
    assert streams[f"{mine}stream"] != before


def test_long_data_becomes_a_digest_and_huge_data_is_left_out() -> None:
    assert value_text.of_plain([1.0] * 1000) == value_text.of_plain([1.0] * 1000)
    assert value_text.of_plain([1.0] * 1000) != value_text.of_plain([1.0] * 999 + [2.0])
    assert value_text.of_plain(list(range(100_000))) is None
    assert value_text.of_plain({3, 1, 2}) == value_text.of_plain({2, 3, 1})
