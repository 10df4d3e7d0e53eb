"""A run: the loop around a step, its folder, its checkpoints, and what a person sees of it."""
