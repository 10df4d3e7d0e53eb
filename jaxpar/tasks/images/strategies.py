"""Ways for the devices to split a network of convolutions and dense layers: tables of rules."""

from jaxpar.base.axes import BATCH, DATA, INPUT, TENSOR
from jaxpar.sharding import Rules
from jaxpar.tasks.images.model import CHANNELS, DENSE_BATCH, FEATURES, UNITS

# What all devices of a mesh split of a network with convolutions below and dense layers above. The hybrid
# ("one weird trick", arXiv:1404.5997) splits the images of the convolutions, which have many activations,
# and the weights of the dense layers, which have many parameters. Between them activations change their
# layout: by an all-to-all if the first dense layer is row-parallel, by an all-gather if it is
# column-parallel.
ALL_DEVICES = (DATA, TENSOR)
_WHOLE = Rules.make(
    dict.fromkeys((BATCH, DENSE_BATCH, INPUT, CHANNELS, FEATURES, UNITS))  # no axis splits any
)
STRATEGIES = {
    "hybrid": _WHOLE.replace({BATCH: ALL_DEVICES, FEATURES: ALL_DEVICES}),
    "hybrid-gather": _WHOLE.replace({BATCH: ALL_DEVICES, UNITS: ALL_DEVICES}),
    "data": _WHOLE.replace({BATCH: ALL_DEVICES, DENSE_BATCH: ALL_DEVICES}),
    "model": _WHOLE.replace({CHANNELS: ALL_DEVICES, FEATURES: ALL_DEVICES}),
}
