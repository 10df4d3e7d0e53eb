"""What a step of any task will cost on a machine, and which config is best there."""

from jaxpar.planning.calibration import HERE, calibrate, find_machine, measure_pieces
from jaxpar.planning.cost import (
    Cost,
    Seconds,
    compare,
    compare_here,
    compiled_cost,
    predict_step,
)
from jaxpar.planning.elastic import fit_devices
from jaxpar.planning.hardware import MACHINES, Hardware, Link, Sample, Work
from jaxpar.planning.planner import Ranking, check_fits, place, plan, plan_here
from jaxpar.planning.shares import measure_groups, propose_shares

__all__ = [
    "Cost",
    "HERE",
    "Hardware",
    "Link",
    "MACHINES",
    "Ranking",
    "Sample",
    "Seconds",
    "Work",
    "calibrate",
    "check_fits",
    "compare",
    "compare_here",
    "compiled_cost",
    "find_machine",
    "fit_devices",
    "measure_groups",
    "measure_pieces",
    "place",
    "plan",
    "plan_here",
    "predict_step",
    "propose_shares",
]
