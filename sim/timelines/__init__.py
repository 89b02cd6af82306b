"""When everything happened, predicted or measured: Timeline, its files, figures, comparison and critical path."""
