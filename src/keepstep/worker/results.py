"""What is kept of the results of steps and sections, for a newcomer that walks past them.

Kept is a copy: without the graph that led to it (which would hold a step's activations until the
next), and untouched by whatever the script does with the original. What could not travel to
another process, or is too large to go along with every fence, is not kept at all.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from keepstep.errors import UsageError
from keepstep.worker import codec
from keepstep.worker.tree import MISSING

RESULT_BYTES_MAX: Final = 64 << 10


def keep(result: Any) -> Any:
    """A copy of `result`, or MISSING."""
    if result is None or type(result) in (bool, int, float):
        return result
    if _bytes_of(result) > RESULT_BYTES_MAX:
        return MISSING
    if type(result) is torch.Tensor and result.layout is torch.strided:
        return result.detach().clone()
    try:
        data = codec.dumps_inline(result)
    except UsageError:
        return MISSING
    return codec.loads_inline(data) if len(data) <= RESULT_BYTES_MAX else MISSING


def _bytes_of(node: Any, depth: int = 0) -> int:
    """Of its tensors, so that nothing large is encoded only to be found too large."""
    if isinstance(node, torch.Tensor):
        return node.numel() * node.element_size()
    if isinstance(node, dict):
        node = list(node.values())
    if not isinstance(node, list | tuple) or depth > codec.DEPTH_MAX:  # the codec refuses that
        return 0
    return sum(_bytes_of(item, depth + 1) for item in node)
