"""A JAX sharding framework for models too big or too slow for one device, deep recurrent networks first.

Its names are imported when they are used: this module costs nothing, and needs no JAX.
"""

from jaxpar.base.lazy import lazily
from jaxpar.base.versions import check_jax_version

check_jax_version()  # before anything of JAX is imported

__version__ = "0.2.0"

__getattr__, __dir__, __all__ = lazily(__name__, __file__)
