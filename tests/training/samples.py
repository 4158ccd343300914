"""Drawn samples for chains of products."""

from __future__ import annotations

from typing import Any

import numpy as np


def samples(seed: int, size: int = 64) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    return {
        "x": draw.standard_normal((size, 16)).astype(np.float32),
        "labels": draw.integers(0, 4, size),
    }
