"""Flax models as they stand."""
