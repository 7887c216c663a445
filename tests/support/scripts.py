"""Where the programs are that tests start: training scripts, and plain.py, which runs them as
torchrun does."""

from __future__ import annotations

from pathlib import Path

SUPPORT = Path(__file__).parent
TESTS = SUPPORT.parent
ROOT = TESTS.parent
CHAOS = TESTS / "chaos"
PLAIN = SUPPORT / "plain.py"

SCRIPT = CHAOS / "train.py"
SHAPES = CHAOS / "shapes.py"
LAYOUTS = CHAOS / "layouts.py"
DATA_ORDER = CHAOS / "data_order.py"
