"""Models as sequences of layers, with their data: what is trained."""
