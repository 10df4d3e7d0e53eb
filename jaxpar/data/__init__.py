"""Batches of arrays in memory, as functions of the seed and the step. No JAX here."""
