"""Parameters that an optimizer has and no attached model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from keepstep.errors import UsageError
from keepstep.worker.state import loose


def test_they_are_found_once_and_named_alike_on_every_rank() -> None:
    model, temperature, margin = nn.Linear(2, 1), torch.ones(1, requires_grad=True), torch.zeros(3)
    margin.requires_grad_()
    first = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)
    second = torch.optim.SGD([temperature, margin], lr=0.1)
    found = loose.parameters([model], {"a": first, "b": second})
    assert list(found) == ["a 2", "b 1"]
    assert found["a 2"] is temperature
    assert found["b 1"] is margin
    own = dict(loose.Loose(found).named_parameters())
    assert own["a 2"] is temperature
    assert loose.parameters([model, loose.Loose(found)], {"a": first, "b": second}) == {}


def test_one_that_is_added_later_is_refused() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loose.refuse([model], {"0": optimizer})
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(5))]})
    with pytest.raises(UsageError, match=r"shape \[5\] that no attached model has"):
        loose.refuse([model], {"0": optimizer})
