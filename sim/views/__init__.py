"""What people look at: the grid of a schedule, pictures and Chrome traces of timelines."""
