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

# Logical dims of activations.
BATCH = "batch"
TIME = "time"

DIMS = (LAYERS, INPUT, GATES, HIDDEN, EMBED, VOCAB, TOKENS, BATCH, TIME)
