"""Runs schedules on devices, and measures models and machines."""
