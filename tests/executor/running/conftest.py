from __future__ import annotations

from functools import partial

import pytest

from executor.devices.processor import YARDSTICK_NS, SteadyClock


@pytest.fixture(autouse=True)
def _steady_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests are not about time: spare them the yardstick."""
    monkeypatch.setattr("executor.devices.emulated.SteadyClock", partial(SteadyClock, lambda: YARDSTICK_NS))
