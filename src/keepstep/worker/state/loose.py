"""Parameters that an optimizer updates and no attached model has, such as a temperature that is
learned, or the weights of losses. They are kept as a model of their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn
from torch.optim import Optimizer

from keepstep.errors import UsageError

NAME = "in no model"


class Loose(nn.Module):
    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._parameters.update(parameters)  # type: ignore[arg-type]  # plain tensors, too


def parameters(
    models: Iterable[nn.Module], optimizers: Mapping[str, Optimizer]
) -> dict[str, Tensor]:
    """By names that every rank gives them."""
    seen = {id(parameter) for model in models for parameter in model.parameters()}
    found: dict[str, Tensor] = {}
    for name, optimizer in optimizers.items():
        own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for index, parameter in enumerate(own):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                found[f"{name} {index}"] = parameter
    return found


def refuse(models: Iterable[nn.Module], optimizers: Mapping[str, Optimizer]) -> None:
    """Those that have been added since."""
    found = parameters(models, optimizers)
    if found:
        name, parameter = next(iter(found.items()))
        raise UsageError(
            f"optimizer {name.split()[0]} was given a parameter of shape {list(parameter.shape)} "
            "that no attached model has",
            hint="attach the model that has it, or give it to the optimizer before attach",
        )
