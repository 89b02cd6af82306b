"""Which microbatch sizes a profile measures, where nobody says: 1, 2, 4, … and the largest that fits."""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch

from .sampling import FEWEST_REPEATS

MOST = 1024
"""No larger size is tried."""


@dataclass(frozen=True)
class Grid:
    """Sizes double from 1 on, up to the largest at which a backward task of any one layer fits into ``memory_bytes``,
    and to ``most``. They stop earlier where timing them all would not fit into ``budget_s`` seconds."""

    memory_bytes: int
    budget_s: float
    most: int = MOST

    def after(self, u: int, task_bytes: int, state_bytes: int, round_s: float) -> int | None:
        """The size to follow ``u``; None if u is the last.

        At u, a task of the hungriest layer takes ``task_bytes``, of which ``state_bytes`` do not depend on u, and one
        round of all sizes up to u takes ``round_s``, half of which is u's.
        """
        per_sample = max(1.0, (task_bytes - state_bytes) / u)
        fits = min(self.most, int((self.memory_bytes - state_bytes) / per_sample))
        following = min(2 * u, fits)
        takes_s = round_s * (1 + (following / u) / 2)
        return following if following > u and takes_s * (1 + FEWEST_REPEATS) <= self.budget_s else None


def memory_at_hand(device: torch.device) -> int:
    """What a task may take on a device: the free memory of a CUDA device, or half of what the host has left."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return int(psutil.virtual_memory().available) // 2
