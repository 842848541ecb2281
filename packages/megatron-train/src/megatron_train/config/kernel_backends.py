"""Backends of operations that the flags of a run choose. Importing this module has no torch."""

from typing import Final

import megatron_models
from megatron_models import ConfigError

from megatron_train.config.run_sections import RunSections
from megatron_train.errors import TrainError

AUTO: Final = "auto"
FLASH: Final = {None: "flash_attn", 2: "flash_attn", 3: "flash_attn_3"}
"""Backends of attention by --flash-attention-version."""

ATTENTION: Final = {"fused": "torch,triton,tiles", "unfused": "reference", "local": "reference"}
"""Backends of attention by --attention-backend, without `auto` and `flash`."""

BLOCKS: Final = {"attention_forward", "attention_backward"}
"""Operations of a ring of context-parallel ranks."""

SEPARATE: Final = "separate"
"""As `megatron_models.fused_operations.SEPARATE`."""

TRANSFORMER_ENGINE: Final = "transformer_engine"
"""As `megatron_kernels.transformer_engine.NAME`."""

TRANSFORMER_IMPL: Final = {
    **dict.fromkeys(("linear", "layer_norm", "rms_norm"), TRANSFORMER_ENGINE),
    **dict.fromkeys(("add_layer_norm", "add_rms_norm"), SEPARATE),
}
"""Backends of --transformer-impl transformer_engine: its norms follow additions of their own."""

FUSIONS: Final[dict[str, dict[str, str]]] = {
    "bias_gelu_fusion": {"bias_gelu": SEPARATE, "gelu": "torch"},
    "bias_swiglu_fusion": {"bias_swiglu": SEPARATE, "swiglu": "torch"},
    "bias_dropout_fusion": {"bias_dropout_add": SEPARATE},
    "rope_fusion": {"rope_qkv": SEPARATE, "rope": "torch"},
    "cross_entropy_loss_fusion": {"vocab_cross_entropy": SEPARATE},
}
"""Backends of operations without a fusion, by its setting."""


def chosen_backends(run: RunSections) -> dict[str, str]:
    """Returns the backends that a run chooses, by operation; those of single operations count.

    Raises:
        TrainError: An entry of --kernel-backends is not OP=BACKEND or given twice, or two flags
            choose the backend of an operation.
    """
    placement = run.placement
    found = {name: each for chosen in _unfused(run).values() for name, each in chosen.items()}
    if placement.transformer_impl != "local":
        used = megatron_models.operations_of(run.model)
        found |= {name: each for name, each in TRANSFORMER_IMPL.items() if name in used}
    name, version = placement.attention_backend, placement.flash_attention_version
    if version is not None and name != "flash":
        raise TrainError(
            f"--flash-attention-version {version} has no effect without --attention-backend flash; "
            "give both or leave it out"
        )
    if name != AUTO:
        found["attention"] = FLASH[version] if name == "flash" else ATTENTION[name]
    single: dict[str, str] = {}
    for entry in placement.kernel_backends:
        operation, equals, backend = entry.partition("=")
        if not (operation and equals and backend):
            raise TrainError(
                f"--kernel-backends {entry!r} is not OP=BACKEND; use for example attention=torch"
            )
        if operation in single:
            raise TrainError(f"--kernel-backends names {operation} twice; give it once")
        single[operation] = backend
    if "attention" in single and name != AUTO:
        raise TrainError(
            f"--kernel-backends attention={single['attention']} and --attention-backend {name} "
            "choose the same backend; leave out one of them"
        )
    for fusion, chosen in _unfused(run).items():
        for twice in single.keys() & chosen:
            raise TrainError(
                f"--kernel-backends {twice}={single[twice]} and --no-{fusion.replace('_', '-')} "
                "choose the same backend; leave out one of them"
            )
    return found | single


def fusions_without_effect(run: RunSections) -> list[str]:
    """Returns the names of the fusions that are off and that no layer of the model has."""
    return [fusion for fusion, chosen in _unfused(run).items() if not chosen]


def _unfused(run: RunSections) -> dict[str, dict[str, str]]:
    """Returns the backends that each fusion that is off chooses for operations of the model."""
    off = [fusion for fusion in FUSIONS if not getattr(run.placement, fusion)]
    if not off:
        return {}
    used = megatron_models.operations_of(run.model)  # builds the model without values
    invariant = run.placement.batch_invariant_mode  # it chooses the backends of the others
    return {
        fusion: {
            name: each
            for name, each in FUSIONS[fusion].items()
            if name in used and (each == SEPARATE or not invariant)
        }
        for fusion in off
    }


def check_kernel_backends(run: RunSections) -> None:
    """Refuses names of operations and backends that do not exist, or that the model does not call.

    Raises:
        TrainError: The message suggests the nearest name.
    """
    chosen = chosen_backends(run)
    if not chosen:
        return
    if run.training.compile and chosen.get("linear") == TRANSFORMER_ENGINE:
        raise TrainError(
            "--compile does not work with linear layers by Transformer Engine, which compiled code "
            "cannot call; leave out --compile, or give --kernel-backends linear=torch"
        )
    if run.layout.cp == 1 and (blocks := sorted(chosen.keys() & BLOCKS)):
        raise TrainError(
            f"--kernel-backends {blocks[0]} has no effect with --context-parallel-size 1; leave it "
            "out"
        )
    try:
        few = megatron_models.low_precision_operations(run.model, run.low_precision)
        megatron_models.check_backends(run.model, chosen, few)
    except ConfigError as error:
        raise TrainError(f"--kernel-backends: {error}") from None
