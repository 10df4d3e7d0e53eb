"""Programs as JAX traces them: their parts, what they compute and move."""
