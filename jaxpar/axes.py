"""Names: the axes of the mesh and the logical dims of arrays. No string literals of these elsewhere.

An *axis* belongs to the mesh, a *dim* to an array. `sharding.Rules` maps the one to the other.
"""

# Mesh axes, outermost first: `data` may cross hosts, `tensor` stays inside one.
DATA = "data"
STAGE = "stage"
TENSOR = "tensor"
MESH_AXES = (DATA, STAGE, TENSOR)

# Logical dims of parameters.
LAYERS = "layers"  # stacked layers of one kind
INPUT = "input"  # what a matrix multiplication contracts
GATES = "gates"  # the four gates of an LSTM, in the order i, f, g, o
HIDDEN = "hidden"  # LSTM units
EMBED = "embed"  # width of the token embedding
VOCAB = "vocab"  # what a head predicts
TOKENS = "tokens"  # rows of an embedding table that is not a head as well
CHANNELS = "channels"  # what a convolution computes
FEATURES = "features"  # widths of dense layers, in turn: what enters the first of them is features,
UNITS = "units"  # what it computes is units, what the next computes is features again

# Logical dims of activations.
BATCH = "batch"
DENSE_BATCH = "dense_batch"  # the batch again, in the dense layers that follow convolutions
TIME = "time"

DIMS = (
    LAYERS, INPUT, GATES, HIDDEN, EMBED, VOCAB, TOKENS, CHANNELS, FEATURES, UNITS,
    BATCH, DENSE_BATCH, TIME,
)  # fmt: skip
