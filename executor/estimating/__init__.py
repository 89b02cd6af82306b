"""What a model would cost on a GPU that is not at hand: operators are counted on the meta device, and modelled."""
