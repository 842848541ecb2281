from ._version import __version__ as __version__
from .auxiliary_losses import AuxiliaryLosses as AuxiliaryLosses
from .collectives.operations import all_gather as all_gather
from .collectives.operations import all_reduce as all_reduce
from .collectives.operations import broadcast as broadcast
from .collectives.operations import reduce_scatter as reduce_scatter
from .data_parallel.buffers import GradientBuffers as GradientBuffers
from .data_parallel.config import DataParallelConfig as DataParallelConfig
from .data_parallel.fully_sharded import FullySharded as FullySharded
from .data_parallel.parameters import ParameterBuffers as ParameterBuffers
from .data_parallel.trainable import TrainableParameters as TrainableParameters
from .dropout import DropoutKey as DropoutKey
from .dropout import keyed_dropout as keyed_dropout
from .dropout import keyed_uniform as keyed_uniform
from .errors import CollectiveError as CollectiveError
from .errors import LayoutError as LayoutError
from .mesh.abstract_mesh import AbstractMesh as AbstractMesh
from .mesh.axes import Axis as Axis
from .mesh.layout import ParallelLayout as ParallelLayout
from .mesh.mesh import Mesh as Mesh
from .mesh.mesh import bind_meshes as bind_meshes
from .pipeline.contract import TensorSpec as TensorSpec
from .pipeline.engine import PipelineEngine as PipelineEngine
from .pipeline.failure import PeerError as PeerError
from .pipeline.trainable import TrainableChunks as TrainableChunks
from .recompute.config import RecomputeConfig as RecomputeConfig
from .sharding.initialization import initialize_parameters as initialize_parameters
from .sharding.sharding import Sharding as Sharding
from .sharding.step_state import StepState as StepState
from .sharding.views import View as View
from .sharding.views import collect_shardings as collect_shardings
from .sharding.views import parameter_views as parameter_views
from .tensor_parallel.cross_entropy import (
    vocab_parallel_cross_entropy as vocab_parallel_cross_entropy,
)
from .tensor_parallel.layers import ColumnParallelLinear as ColumnParallelLinear
from .tensor_parallel.layers import RowParallelLinear as RowParallelLinear
from .tensor_parallel.layers import VocabParallelEmbedding as VocabParallelEmbedding
