from ._version import __version__ as __version__
from .config import OptimizerConfig as OptimizerConfig
from .errors import OptimError as OptimError
from .schedule import LearningRateSchedule as LearningRateSchedule
from .schedule import WeightDecaySchedule as WeightDecaySchedule
