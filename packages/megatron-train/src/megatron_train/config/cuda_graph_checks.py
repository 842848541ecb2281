"""Where layers can be captured as CUDA graphs."""

from collections.abc import Iterator

from megatron_train.config.run_sections import RunSections
from megatron_train.config.sections import GRAPH_WARMUP_STEPS
from megatron_train.errors import TrainError

FLAG = "--cuda-graph-impl local"


def check_cuda_graphs(run: RunSections) -> None:
    """Refuses CUDA graphs where what a layer does may change, or reads memory that others change.

    Raises:
        TrainError: The message names the flags.
    """
    training = run.training
    if training.cuda_graph_impl == "none":
        if training.cuda_graph_warmup_steps != GRAPH_WARMUP_STEPS:
            raise TrainError(
                f"--cuda-graph-warmup-steps has no effect without {FLAG}; give both or leave it out"
            )
        return
    if training.cuda_graph_warmup_steps < 1:
        raise TrainError(
            f"--cuda-graph-warmup-steps {training.cuda_graph_warmup_steps} is less than 1: the "
            "first step compiles and tunes kernels, which a graph cannot; use 1 or more"
        )
    if not training.compile or training.compile_scope != "layer":
        raise TrainError(
            f"{FLAG} needs --compile --compile-scope layer, whose graphs have all tensors of a "
            "layer as inputs; give all of them"
        )
    for setting, reason in _unsafe(run):
        raise TrainError(f"{FLAG} does not work with {setting}: {reason}; leave out one of them")


def _unsafe(run: RunSections) -> Iterator[tuple[str, str]]:
    """Yields settings that exclude CUDA graphs, with the reason."""
    layout, shared = run.layout, run.data_parallel
    if run.training.device == "cpu":
        yield "--device cpu", "a CPU has no CUDA graphs"
    if layout.pp > 1:
        reason = "several micro-batches are in flight, and a graph holds the activations of one"
        yield f"--pipeline-model-parallel-size {layout.pp}", reason
    in_layers = "graphs with communication were never tried"
    if layout.tp > 1:
        yield f"--tensor-model-parallel-size {layout.tp}", in_layers
    if layout.cp > 1 or layout.hybrid_cp:
        yield "context parallelism", in_layers
    if run.model.expert_parallel:
        yield "--num-experts", "the number of rows of an expert changes"
    if shared.use_torch_fsdp2:
        yield "--use-torch-fsdp2", "the weights of a layer are gathered to other addresses"
    if shared.overlap_param_gather:
        yield "--overlap-param-gather", "replays beside gathers were never tried"
    if run.recompute.granularity == "full":
        reason = "a graph holds all activations of its layer, so nothing is saved"
        yield "--recompute-granularity full", reason
    if run.low_precision.enabled:
        yield "products in few bits", "they change their scales in place"
