"""Labels of nodes, as people and features of Slurm write them."""

from __future__ import annotations

import pytest

from keepstep.adapters.schedule import slurm_cli
from keepstep.cli.main import invoke
from keepstep.errors import UsageError
from keepstep.model import labels


def test_labels_are_read_as_they_are_written() -> None:
    given = {"rack": "r1", "nvlink": "pod-2/d3"}
    assert labels.parse(labels.joined(given).split(",")) == given
    assert labels.parse([]) == {}


@pytest.mark.parametrize("words", [["rack"], ["rack="], ["=r1"], ["rack=r1", "rack=r2"], ["a b=c"]])
def test_what_is_no_label_is_refused(words: list[str]) -> None:
    with pytest.raises(UsageError, match="not NAME=VALUE, or twice"):
        labels.parse(words)
    options = [part for word in words for part in ("--label", word)]
    assert invoke(["agent", *options]) == 2


@pytest.mark.parametrize(
    ("features", "found"),
    [
        ("h200,rack:r1,nvlink:d3", {"rack": "r1", "nvlink": "d3"}),
        ("switch=s1", {"switch": "s1"}),
        ("(null)", {}),
        ("", {}),
        ("racks:r1,rack:,color:red", {}),
    ],
)
def test_features_of_slurm_that_are_labels(features: str, found: dict[str, str]) -> None:
    assert slurm_cli.labels(features) == found
