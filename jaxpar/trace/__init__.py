"""Programs as JAX traces them: their parts, what is kept of a forward pass, what they compute and move."""
