"""Training with schedules, and going on from where it stopped."""
