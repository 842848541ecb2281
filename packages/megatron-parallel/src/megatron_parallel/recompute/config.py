"""What is computed again in the backward pass, as plain data.

Kept for the backward pass is by default whatever autograd asks for. `selective` recomputation
throws away what is large and cheap to compute again (Korthikanti et al. 2022, section 5); `full`
keeps the input of a layer, or of several, and runs them again. The names and their meaning are
Megatron-LM's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

from megatron_parallel.errors import LayoutError
from megatron_parallel.mesh.layout import ParallelLayout

Granularity = Literal["selective", "full"]
Method = Literal["uniform", "block"]

RECOMPUTED_MODULES: Final = ("core_attn", "mlp", "moe", "layernorm")
"""What selective recomputation knows.

| module | kept instead of what is computed again |
|---|---|
| `core_attn` | queries, keys and values: scores, probabilities and dropout are computed again |
| `mlp` | the normalised input of the feed-forward layer |
| `moe` | likewise, where the layer has experts: tokens are sent again, too |
| `layernorm` | the input of each norm: its output is made again for the layer that reads it |
"""


def _flag(flag: str, text: str, **more: Any) -> dict[str, Any]:
    return {"flag": flag, "help": text, **more}


class LayerGroup(NamedTuple):
    """Neighbouring layers that are run together; `checkpointed`: only their input is kept."""

    layers: tuple[int, ...]
    checkpointed: bool


@dataclass(frozen=True)
class RecomputeConfig:
    """What is kept of a forward pass, and where.

    Raises:
        LayoutError: settings that contradict one another.
    """

    granularity: Granularity | None = field(
        default=None,
        metadata=_flag(
            "--recompute-granularity",
            "what is computed again in the backward pass: parts of a layer, or whole layers",
        ),
    )
    method: Method | None = field(
        default=None,
        metadata=_flag(
            "--recompute-method",
            "full: keep the input of each group of --recompute-num-layers layers, or compute the "
            "first --recompute-num-layers layers of each stage again, one by one",
        ),
    )
    num_layers: int | None = field(
        default=None,
        metadata=_flag(
            "--recompute-num-layers",
            "full: layers in a group (uniform), or computed again in a stage (block)",
            unit="layers",
        ),
    )
    modules: tuple[str, ...] = field(
        default=("core_attn",),
        metadata=_flag(
            "--recompute-modules",
            "selective: parts of a layer that are computed again",
            choices=RECOMPUTED_MODULES,
        ),
    )
    distribute_saved_activations: bool = field(
        default=False,
        metadata=_flag(
            "--distribute-saved-activations",
            "full: each tensor parallel rank keeps its part of the inputs that are kept",
        ),
    )
    cpu_offloading_num_layers: int = field(
        default=0,
        metadata=_flag(
            "--cpu-offloading-num-layers",
            "layers of each stage, from the first, whose kept activations wait in host memory",
            unit="layers",
        ),
    )

    def __post_init__(self) -> None:
        if self.granularity == "full":
            if self.method is None or (self.num_layers or 0) < 1:
                raise self._error(
                    "{granularity} needs {method:name} and {num_layers:name} of at least 1, got "
                    "{method:repr} and {num_layers:repr}"
                )
        else:
            self._refuse_what_is_about_whole_layers()
        for module in self.modules:
            if module not in RECOMPUTED_MODULES:
                known = ", ".join(RECOMPUTED_MODULES)
                raise self._error(f"{{modules:name}} {module} is none of {known}")
        if self.cpu_offloading_num_layers < 0:
            raise self._error("{cpu_offloading_num_layers} is negative")
        if self.cpu_offloading_num_layers and self.selects("layernorm"):
            raise self._error(
                "{cpu_offloading_num_layers:name} cannot move what {modules:name} layernorm keeps: "
                "leave out one of them"
            )

    def _refuse_what_is_about_whole_layers(self) -> None:
        given = {
            "{method}": self.method is not None,
            "{num_layers}": self.num_layers is not None,
            "{distribute_saved_activations:name}": self.distribute_saved_activations,
        }
        for text, there in given.items():
            if there:
                raise self._error(
                    f"{text} is about whole layers: give {{granularity:name}} full with it"
                )

    def _error(self, message: str) -> LayoutError:
        return LayoutError(message, vars(self))

    @property
    def hooks_field(self) -> str | None:
        """The field that hooks into what autograd keeps, which compiled code never asks."""
        hooks = {
            "modules": self.selects("layernorm"),
            "distribute_saved_activations": self.distribute_saved_activations,
            "cpu_offloading_num_layers": self.cpu_offloading_num_layers > 0,
        }
        return next((field for field, given in hooks.items() if given), None)

    def selects(self, module: str) -> bool:
        """Returns whether a part of a layer is computed again by itself."""
        return self.granularity == "selective" and module in self.modules

    def groups(self, layers: Sequence[int]) -> tuple[LayerGroup, ...]:
        """Returns the layers of one stage in the groups they are run in, in order.

        `uniform` makes groups of `num_layers`, the last one smaller where they do not divide; each
        keeps its input. `block` computes the first `num_layers` again, each by itself, and keeps
        what autograd asks for of the others.
        """
        if self.granularity != "full":
            return tuple(LayerGroup((layer,), checkpointed=False) for layer in layers)
        count = self.num_layers or 1
        if self.method == "block":
            return tuple(
                LayerGroup((layer,), checkpointed=place < count)
                for place, layer in enumerate(layers)
            )
        starts = range(0, len(layers), count)
        return tuple(LayerGroup(tuple(layers[i : i + count]), checkpointed=True) for i in starts)

    def check(self, layout: ParallelLayout, *, sequence_parallel: bool) -> None:
        """Raises `LayoutError` for what a layout has no use for."""
        name = "{distribute_saved_activations:name}"
        if self.distribute_saved_activations and layout.tp == 1:
            raise self._error(f"{name} needs tensor parallel ranks; leave it out")
        if self.distribute_saved_activations and sequence_parallel:
            raise self._error(
                f"{name}: with sequence parallelism every rank has only its part of them anyway; "
                "leave it out"
            )
