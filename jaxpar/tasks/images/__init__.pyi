from jaxpar.tasks.images.task import Images as Images
from jaxpar.tasks.images.strategies import STRATEGIES as STRATEGIES
from jaxpar.tasks.images.model import HybridConvNet as HybridConvNet
from jaxpar.tasks.images.digits import load_digits as load_digits

__all__: list[str]
