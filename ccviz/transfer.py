"""Between the device and the host: one transfer for many small tensors, and times read without waiting.

Knows devices; knows nothing of what the numbers mean.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class Mark:
    """A moment on the device's own clock: read without waiting for it, subtracted after the next transfer."""

    def __init__(self, device: torch.device) -> None:
        self.event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record()
        self.time = time.perf_counter()

    def until(self, later: Mark) -> float:
        """Seconds between two marks."""
        if self.event is not None and later.event is not None:
            return float(self.event.elapsed_time(later.event)) / 1000
        return later.time - self.time


def fetch(tensors: list[Tensor]) -> list[npt.NDArray[Any]]:
    """Several small 1-D tensors to the host in one transfer: integers as int32, floats as float32."""
    if not tensors:
        return []
    as_words = [t.float().view(torch.int32) if t.is_floating_point() else t.int() for t in tensors]
    gathered = torch.cat([t.to(as_words[0].device, non_blocking=True) for t in as_words])
    words = gathered.cpu().numpy()
    parts = np.split(words, np.cumsum([t.shape[0] for t in tensors])[:-1])
    return [p.view(np.float32) if t.is_floating_point() else p for p, t in zip(parts, tensors, strict=True)]
