"""One training step: what it is made from, its state, the way through the model, and the update."""
