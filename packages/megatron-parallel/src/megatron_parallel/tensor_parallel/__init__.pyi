from .cross_entropy import IGNORED_TARGET as IGNORED_TARGET
from .cross_entropy import vocab_parallel_cross_entropy as vocab_parallel_cross_entropy
from .layers import ColumnParallelLinear as ColumnParallelLinear
from .layers import RowParallelLinear as RowParallelLinear
from .layers import VocabParallelEmbedding as VocabParallelEmbedding
from .layers import column_parallel_linear as column_parallel_linear
