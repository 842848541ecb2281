from ._version import __version__ as __version__
from .detokenize import TextStream as TextStream
from .errors import InferError as InferError
from .params import SamplingParams as SamplingParams
from .sampling import Sampler as Sampler
from .sampling import probabilities as probabilities
