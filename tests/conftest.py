"""Settings of all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# Machines are shared and may be slow: no property fails for the time it takes.
settings.register_profile("harmony", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("harmony")
