"""Models of public packages, adopted as they stand: `pip install 'jaxpar[models]'`.

google-tunix needs other versions than ours of some packages, and its models need few of them:

    pip install --no-deps google-tunix einops jaxtyping wadler_lindig
"""

import importlib.util
import sys
import types

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from lib.adopted import MESHES, Adopted, assert_as_plain
from lib.flax_models import DEPTH, TIME, VOCAB, WIDTH, logits_loss, text_loss
from lib.laws import more

from jaxpar import RULES

pytestmark = pytest.mark.law
SIZES = {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": DEPTH}


@pytest.fixture(autouse=True)
def models_of_users_convert_and_broadcast():
    """As JAX does by default."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def in_float64(model):
    """A few gradients of these models are sums that cancel: in float32, rounding is 1e-5 of what is left."""
    state = nnx.state(model)
    is_float = lambda a: jnp.issubdtype(a.dtype, jnp.floating)  # noqa: E731
    nnx.update(model, jax.tree.map(lambda a: a.astype(jnp.float64) if is_float(a) else a, state))
    return model


def mamba(number):
    module = pytest.importorskip(f"mamba{number}_jax")
    config = getattr(module, f"Mamba{number}Config")(
        **SIZES, state_size=8, head_dim=8, chunk_size=4
    )
    make = getattr(module, f"Mamba{number}ForCausalLM")
    return Adopted(lambda rngs: in_float64(make(config, rngs=rngs)), "backbone.layers", logits_loss)


def with_positions(model, batch):
    tokens = batch["x"]
    positions = jnp.broadcast_to(jnp.arange(TIME), tokens.shape)
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((TIME, TIME), bool)), (*tokens.shape, TIME))
    return text_loss(lambda tokens: model(tokens, positions, None, mask)[0], batch)


class OnTensor(Adopted):
    """Its dims are called by other axes."""

    @property
    def rules(self):
        return RULES.replace({"fsdp": None, "tp": "tensor"})


def tunix(family, name):
    """A model of google-tunix, imported without the package's trainers."""
    if "tunix" not in sys.modules:
        spec = importlib.util.find_spec("tunix")
        if spec is None:
            pytest.skip("no google-tunix")
        sys.modules["tunix"] = package = types.ModuleType("tunix")
        package.__path__ = [*spec.submodule_search_locations]
    module = importlib.import_module(f"tunix.models.{family}.model")
    sizes = {
        **{"num_layers": DEPTH, "vocab_size": VOCAB, "num_embed": VOCAB, "embed_dim": WIDTH},
        **{"hidden_dim": 16, "num_heads": 4, "head_dim": 4, "num_kv_heads": 2, "norm_eps": 1e-5},
        **{"rope_theta": 10_000, "sliding_window_size": 4},
        **{"param_dtype": jnp.float32, "dtype": jnp.float32},
    }
    fields = module.ModelConfig.__dataclass_fields__
    config = module.ModelConfig(**{key: own for key, own in sizes.items() if key in fields})
    return OnTensor(lambda rngs: getattr(module, name)(config, rngs=rngs), "layers", with_positions)


PUBLIC = {
    "mamba2-jax": lambda: mamba(2),
    "mamba3-jax": lambda: mamba(3),
    "Llama 3": lambda: tunix("llama3", "Llama3"),
    "Qwen 3": lambda: tunix("qwen3", "Qwen3"),
    "Gemma 3": lambda: tunix("gemma3", "Gemma3"),
}
ROWS = [
    (pytest.param if mesh == own else more)(name, mesh)
    for name, own in zip(
        PUBLIC, ("pp4", "remat", "dp2pp2tp2", "zero-bubble", "interleaved"), strict=True
    )
    for mesh in MESHES
    if mesh != "chunks"
]


@pytest.mark.parametrize(("name", "mesh"), ROWS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_public_model_on_a_mesh_is_the_plain_model(name, mesh):
    with jax.enable_x64(name.startswith("mamba")):
        assert_as_plain(PUBLIC[name](), MESHES[mesh])
