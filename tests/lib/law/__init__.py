"""The law: any mesh, schedule and options give what one device gives.

    options.py      what can be chosen, and what goes with what
    draw.py         cases, so that all pairs of choices occur
    layers.py       models in the layer form
    blocks.py       models of Flax
    language.py     the language model
    training.py     optimizers, by jaxpar's names and in optax
    plain.py        what one device computes, in plain JAX and Flax
    check.py        a case on its mesh, and plainly

A new layer is an entry in `layers.LAYERS`, a new schedule one in `options.SCHEDULES`, and a new option of
`Parallel` one in `options.OPTIONS`.
"""
