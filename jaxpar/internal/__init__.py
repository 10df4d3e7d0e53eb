"""Machinery that layers and the pipeline use, and that you can skip at first.

You don't need it to read a layer, a schedule or a training step. Each module has one purpose:

- `residuals` saves little of a forward pass for its backward pass.
- `split` divides the backward pass of a layer into that of its inputs and that of its weights.
- `hoisting` takes products out of a loop over time steps; `step_program` and `in_place_scan` are parts of it.
- `products` has the matrix products of layers, in the order that XLA computes fastest.
"""
