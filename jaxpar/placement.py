"""Which layers stand on which pipeline stage."""

from collections.abc import Sequence


def place_evenly(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """The same number of layers on every stage.

    Raises:
      ValueError: `num_stages` does not divide `num_layers`.
    """
    if num_layers % num_stages:
        below, above = (
            num_layers // num_stages * num_stages,
            -(-num_layers // num_stages) * num_stages,
        )
        layers = " or ".join(str(n) for n in (below, above) if n)
        stages = ", ".join(str(s) for s in range(1, num_layers + 1) if num_layers % s == 0)
        raise ValueError(
            f"num_layers={num_layers} does not split evenly over stage={num_stages}; use {layers} layers, "
            f"stage={stages}, or a placement such as {_nearly_even(num_layers, num_stages)}"
        )
    return (num_layers // num_stages,) * num_stages


def resolve_placement(
    placement: str | Sequence[int], num_layers: int, num_stages: int
) -> tuple[int, ...]:
    """The number of layers on each stage.

    Args:
      placement: "even" (the stages must divide the layers), "balanced" (the larger shares on the first
        stages, so that the last, which may hold the head, is not among them), or the numbers themselves,
        e.g. (2, 3, 3).
    Raises:
      ValueError: the numbers do not fit the layers and stages.
    """
    if num_stages > num_layers:
        raise ValueError(
            f"stage={num_stages} is more than num_layers={num_layers}; use stage={num_layers} or fewer, "
            f"or {num_stages} layers"
        )
    if placement == "even":
        return place_evenly(num_layers, num_stages)
    if placement == "balanced":
        return _nearly_even(num_layers, num_stages)
    if isinstance(placement, str):
        raise ValueError(
            f'placement={placement!r}; use "balanced", "even" or numbers such as (2, 3, 3)'
        )
    if len(placement) != num_stages or sum(placement) != num_layers or min(placement) < 1:
        raise ValueError(
            f"placement={tuple(placement)} places {sum(placement)} layers on {len(placement)} stages; "
            f"num_layers={num_layers} on stage={num_stages} needs {num_stages} numbers from 1 that add "
            f"up to {num_layers}, such as {_nearly_even(num_layers, num_stages)}"
        )
    return tuple(placement)


def slots(placement: Sequence[int], num_groups: int = 1) -> tuple[int, ...]:
    """The layer in each slot of the stacked parameters, -1 in empty slots.

    Every group of layers has as many slots as the fullest needs, so that the stacked dim splits evenly
    over the `stage` axis: (1, 2) gives (0, -1, 1, 2). With several groups on a stage, group v of stage s
    comes at place v S + s in the order of the layers, and the groups of a stage lie side by side: four
    layers on two stages in two groups, (1, 1, 1, 1), give (0, 2, 1, 3).

    Args:
      placement: layers of each group, in the order of the layers.
    """
    firsts = [sum(placement[:place]) for place in range(len(placement))]
    num_stages = len(placement) // num_groups
    layer_ids = []
    for stage in range(num_stages):
        for place in range(stage, len(placement), num_stages):
            first, count = firsts[place], placement[place]
            layer_ids += [*range(first, first + count), *[-1] * (max(placement) - count)]
    return tuple(layer_ids)


def _nearly_even(num_layers: int, num_stages: int) -> tuple[int, ...]:
    share, rest = divmod(num_layers, num_stages)
    return (share + 1,) * rest + (share,) * (num_stages - rest)
