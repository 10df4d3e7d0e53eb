"""The command line. What a command runs is imported when it runs: help and mistakes need no JAX."""
