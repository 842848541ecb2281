from .failures import Failure as Failure
from .failures import WorkerError as WorkerError
from .pool import WorkerPool as WorkerPool
from .worker import Rank as Rank
