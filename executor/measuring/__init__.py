"""What schedules are planned from: profiles of models, calibrated machines."""
