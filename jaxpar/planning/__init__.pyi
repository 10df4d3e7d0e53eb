"""What a step of any task will cost on a machine, and which config is best there."""

from jaxpar.planning.cost import StepCost as StepCost
from jaxpar.planning.cost import estimate_step as estimate_step
from jaxpar.planning.elastic import fit_devices as fit_devices
from jaxpar.planning.machine import Machine as Machine
from jaxpar.planning.machine import find_machine as find_machine
from jaxpar.planning.planner import Ranking as Ranking
from jaxpar.planning.planner import check_fits as check_fits
from jaxpar.planning.planner import compare as compare
from jaxpar.planning.planner import plan as plan
from jaxpar.planning.planner import plan_in_steps as plan_in_steps
from jaxpar.planning.running import propose_shares as propose_shares
from jaxpar.planning.running import time_steps as time_steps
from jaxpar.planning.search import describe as describe
from jaxpar.planning.parallelisms import Parallelisms as Parallelisms
from jaxpar.planning.parallelisms import compare_parallelisms as compare_parallelisms
