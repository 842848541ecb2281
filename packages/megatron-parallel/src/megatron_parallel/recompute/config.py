"""Settings of activation recomputation, as plain data.

By default everything that autograd needs is saved. `selective` recomputation discards what is large
and cheap to recompute (Korthikanti et al. 2022, section 5). `full` saves the input of a layer, or
of several layers, and recomputes them. Names and meanings are Megatron-LM's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

from megatron_parallel.errors import LayoutError
from megatron_parallel.mesh.layout import ParallelLayout

Granularity = Literal["selective", "full"]
Method = Literal["uniform", "block"]

RECOMPUTED_MODULES: Final = ("core_attn", "mlp", "moe", "layernorm", "mla_up_proj")
"""Parts of a layer that selective recomputation supports.

| module | what is saved |
|---|---|
| `core_attn` | queries, keys and values; scores, probabilities and dropout are recomputed |
| `mlp` | the normalised input of the feed-forward layer |
| `moe` | the same for a layer with experts; tokens are dispatched again, too |
| `layernorm` | the input of each norm; its output is recomputed for the layer that reads it |
| `mla_up_proj` | the latents of multi-latent attention; queries, keys and values are recomputed |
"""


def _flag(flag: str, text: str, **more: Any) -> dict[str, Any]:
    return {"flag": flag, "help": text, **more}


class LayerGroup(NamedTuple):
    """Consecutive layers that run together; if `checkpointed`, only their input is saved."""

    layers: tuple[int, ...]
    checkpointed: bool


@dataclass(frozen=True)
class RecomputeConfig:
    """Which activations a forward pass saves, and where.

    Raises:
        LayoutError: Settings contradict one another.
    """

    granularity: Granularity | None = field(
        default=None,
        metadata=_flag(
            "--recompute-granularity",
            "what is recomputed in the backward pass: parts of a layer, or whole layers",
        ),
    )
    method: Method | None = field(
        default=None,
        metadata=_flag(
            "--recompute-method",
            "full: save the input of each group of --recompute-num-layers layers, or recompute "
            "the first --recompute-num-layers layers of each stage, one by one",
        ),
    )
    num_layers: int | None = field(
        default=None,
        metadata=_flag(
            "--recompute-num-layers",
            "full: layers in a group (uniform), or recomputed in a stage (block)",
            unit="layers",
        ),
    )
    modules: tuple[str, ...] = field(
        default=("core_attn",),
        metadata=_flag(
            "--recompute-modules",
            "selective: parts of a layer that are recomputed",
            choices=RECOMPUTED_MODULES,
        ),
    )
    distribute_saved_activations: bool = field(
        default=False,
        metadata=_flag(
            "--distribute-saved-activations",
            "full: each tensor parallel rank saves its shard of the saved inputs",
        ),
    )
    cpu_offloading_num_layers: int = field(
        default=0,
        metadata=_flag(
            "--cpu-offloading-num-layers",
            "layers of each stage, from the first, whose saved activations are in host memory",
            unit="layers",
        ),
    )

    def __post_init__(self) -> None:
        if self.granularity == "full":
            if self.method is None or (self.num_layers or 0) < 1:
                given = [n for n in ("method", "num_layers") if getattr(self, n) is not None]
                got = " and ".join(f"{{{name}}}" for name in given) or "neither"
                raise self._error(
                    "{granularity} needs {method:name} and {num_layers:name} of at least 1, got "
                    f"{got}"
                )
        else:
            self._refuse_what_is_about_whole_layers()
        for module in self.modules:
            if module not in RECOMPUTED_MODULES:
                known = ", ".join(RECOMPUTED_MODULES)
                raise self._error(f"{{modules:name}} {module} is unknown: use {known}")
        if self.cpu_offloading_num_layers < 0:
            raise self._error("{cpu_offloading_num_layers} is negative: use 0 or more")
        discards = self._discarding
        if self.cpu_offloading_num_layers and discards:
            raise self._error(
                f"{{cpu_offloading_num_layers:name}} cannot offload what {{modules:name}} "
                f"{discards} saves: leave out one of them"
            )

    def _refuse_what_is_about_whole_layers(self) -> None:
        given = {
            "{method}": self.method is not None,
            "{num_layers}": self.num_layers is not None,
            "{distribute_saved_activations:name}": self.distribute_saved_activations,
        }
        for text, is_set in given.items():
            if is_set:
                raise self._error(f"{text} needs whole layers: add {{granularity:name}} full")

    def _error(self, message: str) -> LayoutError:
        return LayoutError(message, vars(self))

    @property
    def hooks_field(self) -> str | None:
        """The field that needs hooks on saved tensors, which compiled code ignores; or None."""
        hooks = {
            "modules": self._discarding is not None,
            "distribute_saved_activations": self.distribute_saved_activations,
            "cpu_offloading_num_layers": self.cpu_offloading_num_layers > 0,
        }
        return next((field for field, given in hooks.items() if given), None)

    @property
    def _discarding(self) -> str | None:
        """The first selected module that discards tensors which other operations save, or None."""
        return next((name for name in ("layernorm", "mla_up_proj") if self.selects(name)), None)

    def selects(self, module: str) -> bool:
        """Returns whether selective recomputation applies to a part of a layer."""
        return self.granularity == "selective" and module in self.modules

    def groups(self, layers: Sequence[int]) -> tuple[LayerGroup, ...]:
        """Returns the layers of one stage in the groups in which they run, in order.

        `uniform` makes groups of `num_layers`, the last one smaller if they do not divide, and
        saves the input of each. `block` recomputes each of the first `num_layers` layers by itself,
        and saves everything that autograd needs of the others.
        """
        if self.granularity != "full":
            return tuple(LayerGroup((layer,), checkpointed=False) for layer in layers)
        count = self.num_layers or 1
        if self.method == "block":
            return tuple(
                LayerGroup((layer,), checkpointed=index < count)
                for index, layer in enumerate(layers)
            )
        starts = range(0, len(layers), count)
        return tuple(LayerGroup(tuple(layers[i : i + count]), checkpointed=True) for i in starts)

    def check(self, layout: ParallelLayout, *, sequence_parallel: bool) -> None:
        """Raises `LayoutError` for settings that have no effect in a layout."""
        name = "{distribute_saved_activations:name}"
        if self.distribute_saved_activations and layout.tp == 1:
            raise self._error(f"{name} needs at least 2 tensor parallel ranks; leave it out")
        if self.distribute_saved_activations and sequence_parallel:
            raise self._error(
                f"{name}: with sequence parallelism every rank has only its slice of them; leave "
                "it out"
            )
