"""A Flax model as it stands: its own code, traced and cut where its blocks are called."""
