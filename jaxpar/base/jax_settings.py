"""Settings of JAX for debugging that jaxpar can't work under."""

from typing import Any

import jax

from jaxpar.base.checks import require

_TRANSFERS = ("host_to_device", "device_to_host", "device_to_device")


def check_settings_of_jax() -> None:
    """Raises a ValueError if a setting of JAX forbids what every run does."""
    config: Any = jax.config
    require(
        not config.jax_disable_jit,
        "jax_disable_jit is on, but jaxpar only trains with compiled programs.\n"
        "Fix: leave out jax.disable_jit(), and print values with jax.debug.print.",
    )
    require(
        not config.jax_check_tracer_leaks,
        "jax_check_tracer_leaks is on, but jaxpar keeps arrays of a model while it traces it.\n"
        "Fix: leave out jax.checking_leaks(), or use it where you call your layers without jaxpar.",
    )
    for direction in _TRANSFERS:
        name = f"jax_transfer_guard_{direction}"
        level = getattr(config, name)
        require(
            level not in ("disallow", "disallow_explicit"),
            f"{name}={level!r}, but jaxpar moves batches and losses between host and devices.\n"
            f"Fix: call jaxpar in `with jax.transfer_guard('allow'):`.",
        )
