"""What a step of any task will cost on a machine, and which config is best there."""

from jaxpar.planning.calibration import HERE as HERE
from jaxpar.planning.calibration import calibrate as calibrate
from jaxpar.planning.calibration import find_machine as find_machine
from jaxpar.planning.calibration import measure_pieces as measure_pieces
from jaxpar.planning.cost import Cost as Cost
from jaxpar.planning.cost import Seconds as Seconds
from jaxpar.planning.cost import compare as compare
from jaxpar.planning.cost import compare_here as compare_here
from jaxpar.planning.cost import compiled_cost as compiled_cost
from jaxpar.planning.cost import predict_step as predict_step
from jaxpar.planning.elastic import fit_devices as fit_devices
from jaxpar.planning.hardware import MACHINES as MACHINES
from jaxpar.planning.hardware import Hardware as Hardware
from jaxpar.planning.hardware import Link as Link
from jaxpar.planning.hardware import Sample as Sample
from jaxpar.planning.hardware import Work as Work
from jaxpar.planning.planner import Ranking as Ranking
from jaxpar.planning.planner import check_fits as check_fits
from jaxpar.planning.planner import place as place
from jaxpar.planning.planner import plan as plan
from jaxpar.planning.planner import plan_here as plan_here
from jaxpar.planning.shares import measure_groups as measure_groups
from jaxpar.planning.shares import propose_shares as propose_shares
