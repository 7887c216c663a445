"""The layouts of layouts.py as tests start them."""

from __future__ import annotations

# ranks, and whether another rank has the same shards
SHAPES = {
    "ddp-groups": (4, True),
    "hsdp": (4, True),
    "fsdp": (3, False),
    "tp": (4, False),
    "fsdp-tp": (4, False),
    "pipeline": (3, False),
}
