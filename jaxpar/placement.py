"""Which layers stand on which pipeline stage."""

from collections.abc import Sequence


def resolve_placement(
    placement: str | Sequence[int], num_layers: int, num_stages: int, num_groups: int = 1
) -> tuple[int, ...]:
    """The number of layers on each stage; with several groups a stage, of each group, in the layers' order.

    Args:
      placement: "even" (the same number everywhere), "balanced" (the larger shares on the first stages, so
        that the last, which may hold the head, is not among them), or the numbers themselves, e.g.
        (2, 3, 3).
    Raises:
      ValueError: the numbers do not fit the layers and stages.
    """
    num_places = num_stages * num_groups
    places = f"stage={num_stages}"
    if num_groups > 1:
        places += f" x num_groups={num_groups} = {num_places}"
    if num_places > num_layers:
        fewer = num_layers // num_groups
        fits = f"stage={fewer}" if fewer else f"num_groups={num_layers}"
        raise ValueError(
            f"{places} is more than num_layers={num_layers}; use {fits} or fewer, or {num_places} layers"
        )
    balanced = _nearly_even(num_layers, num_places)
    if placement == "even" and num_layers % num_places:
        below = num_layers // num_places * num_places
        stages = [s for s in range(1, num_layers + 1) if num_layers % (s * num_groups) == 0]
        raise ValueError(
            f"num_layers={num_layers} does not split evenly over {places}; use {below} or "
            f"{below + num_places} layers, "
            + (f"stage={', '.join(map(str, stages))}, " if stages else "")
            + f"or a placement such as {balanced}"
        )
    if placement in ("even", "balanced"):
        return balanced
    if isinstance(placement, str):
        raise ValueError(
            f'placement={placement!r}; use "balanced", "even" or numbers such as (2, 3, 3)'
        )
    if len(placement) != num_places or sum(placement) != num_layers or min(placement) < 1:
        raise ValueError(
            f"placement={tuple(placement)} is {len(placement)} numbers with the sum {sum(placement)}; "
            f"num_layers={num_layers} on {places} needs {num_places} numbers from 1 with the sum "
            f"{num_layers}, such as {balanced}"
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


def _nearly_even(num_layers: int, num_places: int) -> tuple[int, ...]:
    share, rest = divmod(num_layers, num_places)
    return (share + 1,) * rest + (share,) * (num_places - rest)
