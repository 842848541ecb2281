from ._version import __version__ as __version__
from .config import ConfigError as ConfigError
from .config import GPTConfig as GPTConfig
from .flops import gpt_flops as gpt_flops
from .parameters import parameter_count as parameter_count
from .parameters import parameter_shapes as parameter_shapes
