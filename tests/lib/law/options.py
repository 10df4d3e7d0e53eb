"""What a case of the law chooses: a value of each option, by name. The first value is the plain one.

An option may only choose what goes with the options before it. What jaxpar refuses, with an error that
other tests look at, is not chosen.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxpar import MeshConfig, Parallel, PipelineConfig
from lib.law import language, layers
from lib.law.blocks import BODIES, GIVEN, HOLDS, FlaxTask, How
from lib.law.language import NUM_WORDS, LanguageTask
from lib.law.layers import LAYERS, WRAPS, LayerTask
from lib.law.training import PLAIN_OPTIMIZERS, config_of
from lib.optimizers import READ_SHAPE_OR_PLACE

Case = dict[str, str]
Fields = Mapping[str, Any]

# (data, stage, tensor)
MESHES = {
    "dp1": (1, 1, 1), "dp4": (4, 1, 1), "tp2": (1, 1, 2), "dp2tp2": (2, 1, 2),
    "pp2": (1, 2, 1), "pp4": (1, 4, 1), "dp2pp2": (2, 2, 1), "pp2tp2": (1, 2, 2), "dp2pp2tp2": (2, 2, 2),
}  # fmt: skip
SCHEDULES = {
    "1f1b": {},
    "1f1b, weights with inputs": {"zero_bubble": False},
    "gpipe": {"schedule": "gpipe"},
    "interleaved": {"schedule": "interleaved", "num_groups": 2},
    "v": {"schedule": "v"},
}
MAX_DEVICES = 8


@dataclasses.dataclass(frozen=True)
class Option:
    """Something to choose.

    Attributes:
      of: what its fields belong to: the "pipeline", the "layout", or the "task"; "" where others read the
        choice.
      values: by name, the fields, or a function of the whole case that gives them.
      fits: whether a value goes with the choices before it. The plain value is not asked for.
      is_plain_possible: whether the plain value goes with all choices.
    """

    of: str
    values: Mapping[str, Fields | Callable[[Case], Fields]]
    fits: Callable[[str, Case], bool] = lambda value, case: True
    is_plain_possible: bool = True

    def fitting(self, case: Case) -> list[str]:
        """The values that go with the choices before it."""
        plain, *others = self.values
        found = [value for value in others if self.fits(value, case)]
        return [plain, *found] if self.is_plain_possible or self.fits(plain, case) else found


def choices(*names: str) -> dict[str, Fields]:
    """Values that set no field: others read them."""
    return {name: {} for name in names}


# ---- what follows from choices ----


def sizes(case):
    """(data, stage, tensor) of the mesh."""
    return MESHES[case["mesh"]]


def num_places(case):
    """Places for layers: groups of them on each stage."""
    stage = sizes(case)[1]
    return stage * (1 + (case["schedule"] in ("interleaved", "v") and stage > 1))


def own_axes(case):
    return axes_of(case["axes"])


def axes_of(value):
    return tuple(value.split()) if value != "none" else ()


def is_flax(case):
    return case["form"] == "flax"


def is_language(case):
    return case["form"] == "language"


def is_in_block(name):
    """Whether a language model has this layer in blocks with norms."""
    return language.LAYERS[name.removesuffix(OF_WORDS)][2]


def has_pieces(case):
    return case["form"] == "layers"


def layer_fits(name, case):
    """Whether models of the case may have this piece, body or layer of a language model."""
    if is_language(case):
        return name in WORD_LAYERS and (case["dtype"] == "float32" or not is_in_block(name))
    if is_flax(case):
        return name in BODIES
    piece = LAYERS.get(name)
    return (
        piece is not None
        and (piece.is_stateless or "context" not in own_axes(case))
        and (piece.splits or sizes(case)[2] == 1)
        and (piece.is_any_type or case["dtype"] == "float32")
    )


def names_of(case):
    """Of all pieces or bodies: the layer that was chosen, and those that follow it in the tables."""
    if is_language(case):  # all of one kind
        return (case["layer"],) * len(case["pattern"])
    names = [name for name in (*LAYERS, *BODIES) if layer_fits(name, case)]
    step = {"itself": 0, "next": 1, "second next": 2}[case["beside"]]
    places = [
        names.index(case["layer"]) + step * "abcd".index(letter) for letter in case["pattern"]
    ]
    return (*(names[place % len(names)] for place in places), *own_axes(case))


def chosen_layers(case):
    """The names of its layers, without those that axes of one's own bring."""
    return {*names_of(case)} - {*own_axes(case)}


def pieces_of(case):
    return layers.pieces_of(names_of(case), case["wrap"])


def num_layers(case):
    names = names_of(case)
    return sum(len(piece.makers) for piece in pieces_of(case)) if has_pieces(case) else len(names)


def is_in_windows(case):
    """Whether time can be cut into chunks."""
    if is_flax(case):
        recurrent = all(BODIES[name].is_recurrent for name in names_of(case))
        return (
            recurrent and case["given"] in ("nothing", "mask") and case["calls"] != "remat inside"
        )
    return not has_pieces(case) or not any(piece.is_whole for piece in pieces_of(case))


def numbers_of_layers(case, first):
    """On each place: so many on the first one, the others on the last one."""
    places, number = num_places(case), num_layers(case)
    first = min(first, number)
    if places == 1:
        return (number,)
    return (first, *[0] * (places - 2), number - first)


def in_words(case, has_first, has_last):
    """A placement by name: one layer on the first place, the others on the last one."""
    begin, words = 0, []
    for number in numbers_of_layers(case, 1):
        numbers = f"{begin}-{begin + number - 1}" if number > 1 else f"{begin}"
        words.append([numbers] if number else [])
        begin += number
    words[0] = ["first"] * has_first + words[0]
    words[-1] = words[-1] + ["last"] * has_last
    return {"placement": " | ".join(map(", ".join, words))}


# ---- what fits ----


def mixes_rows(case):
    return any(piece.rows_together > 1 for piece in pieces_of(case))


def axes_fit(value, case):
    data, stage, tensor = sizes(case)
    axes = axes_of(value)
    return (
        has_pieces(case)
        and data * stage * tensor * 2 ** len(axes) <= MAX_DEVICES
        and ("context" not in axes or tensor == 1)
    )


def only_layers(value, case):
    return has_pieces(case)


def only_flax(value, case):
    return is_flax(case)


def only_language(value, case):
    return is_language(case)


def not_flax(value, case):
    return not is_flax(case)


def wrap_fits(value, case):
    can_be = has_pieces(case) and case["dtype"] == "float32"
    can_be = can_be and any(value in LAYERS[name].wraps for name in chosen_layers(case))
    if value == "both ways":  # reads all of time, and is cut across what `tensor` would split
        can_be = can_be and case["axes"] == "none" and sizes(case)[2] == 1
    return can_be


def tied_fits(value, case):
    # A table of small numbers before a norm has gradients that leave nothing to compare after an update.
    return not (is_language(case) and is_in_block(case["layer"]))


def given_fits(value, case):
    # One block's value of parameters alone would go through `first`, whose outputs have rows.
    return is_flax(case) and (value != "table" or len(case["pattern"]) > 1)


def shares_fit(value, case):
    return sizes(case)[0] == 2 and "expert" not in own_axes(case)


def pattern_fits(value, case):
    return len(value) >= num_places(case) or not is_flax(case)


def has_linear_head(case):
    return not is_flax(case) or case["tied"] == "no"


def placement_fits(value, case):
    if value == "even":
        return num_layers(case) % num_places(case) == 0
    if is_language(case) and case["tied"] == "yes" and "in parts" in value:
        return False  # both ends have one table
    if is_flax(case) and value == "in words, first in parts":
        return False  # what reads an embedding as an array has all of it
    if value == "in words, head in parts" and not has_linear_head(case):
        return False
    return sizes(case)[1] > 1


def head_fits(value, case):
    if "words" in case["placement"]:
        return False
    return value != "sharded" or has_linear_head(case)


def unroll_fits(value, case):
    is_one_kind = len({*names_of(case)}) == 1 and case["backward"] == "plainly"
    if has_pieces(case):
        is_one_kind = is_one_kind and all(
            piece.is_one_kind and len(piece.makers) == 1 for piece in pieces_of(case)
        )
    return is_one_kind and num_places(case) == sizes(case)[1]


def update_fits(value, case):
    if case["result"] != "updates":
        return False
    if value == "sharded":
        return sizes(case)[0] > 1
    return case["optimizer"] not in READ_SHAPE_OR_PLACE


def holds_fits(value, case):
    is_plain = (case["given"], case["returns"], case["calls"], case["residual"]) == (
        "nothing", "x", "plainly", "inside",
    )  # fmt: skip
    return is_flax(case) and (value != "sequential" or is_plain)


def frozen_fits(value, case):
    if value == "w_x":  # of these layers
        own = [name for name in names_of(case) if name.startswith(("lstm", "gru", "slstm"))]
        return bool(own) and has_pieces(case)
    if is_language(case):
        return value in FROZEN_LANGUAGE
    return value in (FROZEN_FLAX if is_flax(case) else FROZEN_LAYERS)


FROZEN_LAYERS = ("scale", "words", "up", "layers", "kernel", "w_x")
FROZEN_FLAX = ("embed", "body")
FROZEN_LANGUAGE = ("layers", "embedding")
SWITCH = ("no", "yes")
OF_WORDS = " of words"
WORD_LAYERS = tuple(f"{name}{OF_WORDS}" for name in language.LAYERS)
PATTERNS = ("abab", "a", "ab", "aab", "abcd")


def when_training(value, case):
    return case["result"] == "updates"


def resume_fits(value, case):
    on = case | {"mesh": value}
    return (
        when_training(value, case)
        and all(layer_fits(name, on) for name in chosen_layers(case))
        and all(case[name] in OPTIONS[name].fitting(on) for name in ("axes", "wrap"))
    )


OPTIONS = {
    "mesh": Option("", choices(*MESHES)),
    "schedule": Option("pipeline", SCHEDULES),
    "form": Option(
        "",
        choices("layers", "flax", "language"),
        lambda value, case: value != "flax" or num_places(case) <= max(map(len, PATTERNS)),
    ),
    "result": Option("", choices("updates", "gradients")),
    "axes": Option("", choices("none", "context", "expert", "context expert"), axes_fit),
    "dtype": Option(
        "task",
        {"float32": {}, "bfloat16": {"dtype": "bfloat16"}},
        lambda value, case: not is_flax(case) and case["axes"] == "none",
    ),
    "layer": Option(
        "", choices(*LAYERS, *BODIES, *WORD_LAYERS), layer_fits, is_plain_possible=False
    ),
    "beside": Option(
        "",
        choices("itself", "next", "second next"),
        lambda value, case: not is_language(case),
    ),
    "pattern": Option("", choices(*PATTERNS), pattern_fits),
    "wrap": Option("task", {name: {"wrap": name} for name in WRAPS} | {"nothing": {}}, wrap_fits),
    "given": Option("", choices("nothing", *GIVEN), given_fits),
    "returns": Option("", choices("x", "first", "pair"), only_flax),
    "calls": Option("", choices("plainly", "remat", "jit", "remat inside"), only_flax),
    "residual": Option(
        "",
        choices("inside", "outside"),
        lambda value, case: is_flax(case) and case["returns"] != "pair",
    ),
    "holds": Option("", choices(*HOLDS), holds_fits),
    "backward": Option("", choices("plainly", "by depth"), only_flax),
    "tied": Option("", choices(*SWITCH), tied_fits),
    "ends": Option("", choices("plainly", "deep", "twice", "array", "loop"), only_layers),
    "static": Option("", choices(*SWITCH), only_layers),
    "resets": Option("", choices(*SWITCH), not_flax),
    "embedding": Option(
        "task",
        {"wide": {}, "narrow": {"embed_size": 6}},
        lambda value, case: is_language(case) and case["tied"] == "no",
    ),
    "words": Option("task", {"all": {}, "padded": {"vocab_size": 32}}, only_language),
    "lengths": Option(
        "",
        choices(*SWITCH),
        lambda value, case: has_pieces(case) and not mixes_rows(case),
    ),
    "dropout": Option("", choices("0.2", "0"), not_flax),
    "frozen": Option(
        "task",
        {"nothing": {}}
        | {
            name: {"frozen_name": name} for name in (*FROZEN_LAYERS, *FROZEN_FLAX, *FROZEN_LANGUAGE)
        },
        frozen_fits,
    ),
    "microbatches": Option("pipeline", {n: {"num_microbatches": int(n)} for n in ("1", "2", "3")}),
    "chunks": Option(
        "pipeline",
        {n: {"num_chunks": int(n)} for n in ("1", "2", "4")},
        lambda value, case: is_in_windows(case),
    ),
    "remat": Option(
        "pipeline",
        {
            "no": {},
            "device": {"remat": True},
            "host": {"remat": True, "remat_keeps": "host"},
            "carries": {"remat": True, "remat_keeps": "carries"},
        },
        lambda value, case: value != "carries" or case["chunks"] == "4",
    ),
    "placement": Option(
        "pipeline",
        {
            "balanced": {},
            "even": {"placement": "even"},
            "all on the last": lambda case: {"placement": numbers_of_layers(case, 0)},
            "uneven": lambda case: {"placement": numbers_of_layers(case, 1)},
            "in words": lambda case: in_words(case, True, True),
            "in words, head in parts": lambda case: in_words(case, True, False),
            "in words, first in parts": lambda case: in_words(case, False, True),
        },
        placement_fits,
    ),
    "head": Option(
        "pipeline",
        {name: {"head": name} for name in ("auto", "last", "sharded")},
        head_fits,
    ),
    "unroll": Option("pipeline", {"no": {}, "yes": {"unroll": True}}, unroll_fits),
    "shares": Option(
        "layout",
        {"equal": {}, "3 1": {"shares": (3, 1)}, "1 2": {"shares": (1, 2)}},
        shares_fit,
    ),
    "speeds": Option(
        "layout",
        {
            "equal": {},
            "unequal": lambda case: {"speeds": tuple(1.0 + n % 2 for n in range(sizes(case)[1]))},
        },
        lambda value, case: case["placement"] != "even" and "words" not in case["placement"],
    ),
    "fsdp": Option(
        "layout",
        {"no": {}, "yes": {"fsdp": True}},
        lambda value, case: sizes(case)[0] > 1,
    ),
    "optimizer": Option(
        "task",
        {name: {"optimizer_name": name} for name in PLAIN_OPTIMIZERS},
        when_training,
    ),
    "update": Option(
        "layout",
        {name: {"update": name} for name in ("replicated", "sharded", "host")},
        update_fits,
    ),
    "clip": Option("", choices(*SWITCH), when_training),
    "resume on": Option("", choices("no", "dp1", "dp4", "pp4", "dp2pp2tp2"), resume_fits),
    "rows": Option("", choices("few", "many")),
    "steps": Option("task", {n: {"seq_len": int(n)} for n in ("8", "4")}),
    "large": Option("", choices(*SWITCH)),
    "predicts": Option("", choices(*SWITCH)),
}


# ---- the case itself ----


def plain_case() -> Case:
    """The first value of each option."""
    return {name: next(iter(option.values)) for name, option in OPTIONS.items()}


@dataclasses.dataclass(frozen=True)
class Built:
    """A case as jaxpar takes it.

    Attributes:
      then: the layout on which a run is resumed; None if it isn't.
      clip_norm: of gradients; 0 clips none.
      is_large: whether small models are cut as large ones are.
      predicts: whether predictions are compared as well.
    """

    task: LayerTask | FlaxTask | LanguageTask
    parallel: Parallel
    then: Parallel | None
    clip_norm: float
    is_large: bool
    predicts: bool


def build(case: Case) -> Built:
    """Task and layouts of a case that chooses all options."""
    fields = {"pipeline": {}, "layout": {}, "task": {}, "": {}}
    for name, option in OPTIONS.items():
        value = option.values[case[name]]
        fields[option.of] |= value(case) if callable(value) else value
    pipeline, layout = PipelineConfig(**fields["pipeline"]), fields["layout"]
    axes = tuple((axis, 2) for axis in own_axes(case))
    parallel = Parallel(mesh_of(case["mesh"], axes), pipeline, **layout)

    of_rows = 2 if "expert" in own_axes(case) else 1
    together = max(piece.rows_together for piece in pieces_of(case)) if has_pieces(case) else 1
    rows = sum(layout.get("shares") or [sizes(case)[0]]) * int(case["microbatches"])
    rows *= of_rows * together * (1 + (case["rows"] == "many"))

    then = None
    if case["resume on"] != "no":
        then = Parallel(mesh_of(case["resume on"], axes))
        rows *= MESHES[case["resume on"]][0]
    is_clipped = case["clip"] == "yes"
    return Built(
        task=_task(case, fields["task"] | {"batch_size": rows}),
        parallel=parallel,
        then=then,
        clip_norm=0.05 if is_clipped else 0.0,
        is_large=case["large"] == "yes",
        predicts=case["predicts"] == "yes",
    )


def mesh_of(name: str, axes: tuple[tuple[str, int], ...]) -> MeshConfig:
    """A mesh of the first devices, as many as it needs."""
    mesh = MeshConfig(*MESHES[name], axes=axes)
    return dataclasses.replace(mesh, devices=tuple(range(mesh.num_devices)))


def _task(case, fields):
    if is_language(case):
        fields = {"embed_size": 8, "vocab_size": NUM_WORDS + 1} | fields
        return LanguageTask(
            num_layers=len(case["pattern"]),
            hidden_size=8,
            num_words=NUM_WORDS,
            layer=case["layer"].removesuffix(OF_WORDS),
            dropout=float(case["dropout"]),
            tie_embedding=case["tied"] == "yes",
            packed=case["resets"] == "yes",
            optimizer=config_of(case["optimizer"]),
            **fields,
        )
    if has_pieces(case):
        has = tuple(name for name in ("resets", "lengths", "static") if case[name] == "yes")
        how = f"{case['ends']} {'tied' * (case['tied'] == 'yes')}"
        rate = float(case["dropout"])
        return LayerTask(
            names=names_of(case), how=how, has=has, rate=rate, own_axes=own_axes(case), **fields
        )
    how = How(
        names_of(case),
        given="" if case["given"] == "nothing" else case["given"],
        returns=case["returns"],
        holds=case["holds"],
        calls=case["calls"],
        is_outside=case["residual"] == "outside",
        is_tied=case["tied"] == "yes",
        backward=case["backward"],
    )
    return FlaxTask(how=how, splits=sizes(case)[2] > 1, **fields)
