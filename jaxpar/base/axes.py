"""Names: the axes of the mesh, and the dims of jaxpar's own layers. No string literals of these elsewhere.

An *axis* belongs to the mesh, a *dim* to an array. `sharding.Rules` maps the one to the other; its table
says which dims exist, and yours may have others.
"""

# Mesh axes, outermost first: `data` may cross hosts, `tensor` stays inside one.
DATA = "data"
STAGE = "stage"
TENSOR = "tensor"
MESH_AXES = (DATA, STAGE, TENSOR)

# Dims of parameters.
LAYERS = "layers"  # stacked layers of one kind
INPUT = "input"  # what a matrix multiplication contracts
GATES = "gates"  # the gates of a recurrent layer
HIDDEN = "hidden"  # its units
HEADS = "heads"  # its parts that do not read each other
EMBED = "embed"  # width of the token embedding
VOCAB = "vocab"  # what a head predicts
TOKENS = "tokens"  # rows of an embedding table that is not a head as well
POOL_ROWS = "pool rows"  # of layers that lie in a pool

# Dims of activations.
BATCH = "batch"
TIME = "time"
