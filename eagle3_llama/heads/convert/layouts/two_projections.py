"""Two projections: fc fuses the features, fc2 combines them with the token, then decoder layers follow."""

from __future__ import annotations

from ..config import Config
from .base import NAMES, Layout


def _matches(config: Config, names: set[str]) -> bool:
    return "fc2.weight" in {n.removeprefix("model.") for n in names}


TWO_PROJECTIONS = Layout(
    "two projections",
    _matches,
    ("midlayer", "layers.{i}"),
    names={**NAMES, "fc2.weight": "fc2.weight", "fc2.bias": "fc2.bias"},
)
