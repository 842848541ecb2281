"""Parameters, floating-point operations and memory of a run, from its configuration alone."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_models import ConfigError, TrainingMemory, parameter_count, training_flops

from megatron_train.config.run_sections import RunSections
from megatron_train.plan.memory import host_memory, micro_batches_in_flight, rank_memory

_GIB = 1 << 30
_UNITS = ((10**18, "E"), (10**15, "P"), (10**12, "T"), (10**9, "G"), (10**6, "M"))


@dataclass(frozen=True)
class Count:
    """Sizes and costs of a run.

    Attributes:
        parameters: Number of parameters without vocabulary padding; tied weights count once.
        active_parameters: Number of parameters that one token uses.
        parts: Number of parameters of each part, by name.
        flops_per_sequence: Floating-point operations of a forward and backward pass of a sample.
        flops_per_step: The same for all samples of a step.
        attention_share: Share of these operations that depends on the length of the sequence.
        memory: Bytes of a rank of the first pipeline stage; None if `memory_unknown` says why.
        micro_batches_in_flight: Micro-batches whose activations are counted.
        memory_unknown: Why there is no formula for the memory; empty if there is one.
        host_memory: Bytes of offloaded optimizer state in host memory, for the same rank.
    """

    parameters: int
    active_parameters: int
    parts: Mapping[str, int]
    flops_per_sequence: int
    flops_per_step: int
    attention_share: float
    memory: TrainingMemory | None
    micro_batches_in_flight: float
    memory_unknown: str = ""
    host_memory: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Returns all numbers as plain JSON values; bytes and operations are integers."""
        values = dataclasses.asdict(self)
        if self.memory is not None:
            values["memory"]["total"] = self.memory.total
        return values


def count(run: RunSections) -> Count:
    """Returns sizes and costs of a run with a resolved layout."""
    model, length = run.model, run.data.seq_length
    pairs = model.multiply_adds_of_pairs(length, length**2)
    tokens = model.multiply_adds.per_token * length
    per_sequence = training_flops(model, length)
    samples = run.batch_sizes.last
    micro_batches = max(1, samples // run.micro_batch_times_data_parallel_size)
    memory, flight, unknown = None, 0.0, ""
    try:
        exact = micro_batches_in_flight(run, micro_batches)
        memory = _memory(run, exact.numerator, exact.denominator)
        flight = float(exact)
    except ConfigError as error:
        unknown = str(error)
    return Count(
        parameters=parameter_count(model),
        active_parameters=parameter_count(model, active=True),
        parts=_parts(run),
        flops_per_sequence=per_sequence,
        flops_per_step=per_sequence * samples,
        attention_share=pairs / (pairs + tokens),
        memory=memory,
        micro_batches_in_flight=flight,
        memory_unknown=unknown,
        host_memory=host_memory(run, _layers(run)) if run.offload.optimizer_cpu_offload else 0,
    )


def _memory(run: RunSections, numerator: int, denominator: int) -> TrainingMemory:
    """Returns the memory of a rank with the activations of a fraction of micro-batches."""
    cut, layers = run.placement.sequence_parallel, _layers(run)
    one = rank_memory(run, seq_length=run.data.seq_length, sequence_parallel=cut, layers=layers)
    return dataclasses.replace(one, activations=one.activations * numerator // denominator)


def _layers(run: RunSections) -> int | None:
    """Returns the number of layers of the first pipeline rank; None if it has the whole model."""
    if run.layout.pp * run.layout.vpp == 1:
        return None
    return sum(len(run.layer_split[stage]) for stage in run.layout.stages(0))


def _parts(run: RunSections) -> dict[str, int]:
    """Returns the number of parameters of each part, in the order of the model."""
    found: dict[str, int] = {}
    parameters = run.model.parameters()
    routed = {_words(name)[0] for name, spec in parameters.items() if spec.sharding.experts}
    for name, spec in parameters.items():
        part, *inner = _words(name)
        if part in routed and inner:  # router, shared experts
            part = inner[0]
        if spec.sharding.experts:
            part = "experts"
        elif "norm" in part:
            part = "norms"
        found[part] = found.get(part, 0) + spec.numel
    return found


def _words(name: str) -> list[str]:
    """Returns the modules of a parameter in its layer, also in one of multi-token prediction."""
    words = name.split(".")[:-1]
    return [w for w in words if not w.isdecimal() and w not in ("layers", "mtp", "layer")]


def format_count(run: RunSections, found: Count) -> Iterator[str]:
    """Yields the lines of a report for people."""
    model, length = run.model, run.data.seq_length
    rows = [("parameters", found.parameters, "")]
    share = {name: f"{size / found.parameters:6.1%}" for name, size in found.parts.items()}
    rows += [(f"  {name}", size, share[name]) for name, size in found.parts.items()]
    if found.active_parameters != found.parameters:
        active = f"{found.active_parameters / found.parameters:6.1%}"
        rows.append(("active for one token", found.active_parameters, active))
    width = max(len(name) for name, _, _ in rows)
    yield f"model of kind {model.kind}, {model.depth} layers"
    for name, size, note in rows:
        yield f"{name:<{width}}  {size:>19,}  {note}".rstrip()
    yield ""
    yield f"operations of a forward and backward pass, sequences of {length:,} tokens"
    yield f"  one token     {_flop(found.flops_per_sequence / length)}"
    yield (
        f"  one sequence  {_flop(found.flops_per_sequence)}, "
        f"{found.attention_share:.1%} of it query-key pairs"
    )
    yield f"  one step      {_flop(found.flops_per_step)}, {run.batch_sizes.last:,} sequences"
    yield ""
    yield from _memory_lines(run, found)


def _memory_lines(run: RunSections, found: Count) -> Iterator[str]:
    if found.memory is None:
        yield f"memory: unknown: {found.memory_unknown}"
        return
    layout = run.layout
    where = "one rank" if layout.world_size == 1 else f"each of {layout.world_size} ranks, {layout}"
    stage = " (first pipeline stage)" if layout.pp > 1 else ""
    precision = "float32" if run.training.float64 else run.training.precision
    flight = f"{found.micro_batches_in_flight:g}"
    yield f"memory of {where}{stage}, {precision}"
    notes = {
        "activations": f"{flight} micro-batch{'es' if flight != '1' else ''} of "
        f"{run.training.micro_batch_size} x {run.data.seq_length:,} tokens in flight",
        "total": "temporary buffers of operations come on top",
    }
    for name in ("parameters", "gradients", "optimizer", "activations", "total"):
        size = getattr(found.memory, name) / _GIB
        note = f"  ({notes[name]})" if name in notes else ""
        yield f"  {name:<11}  {size:>9,.2f} GiB{note}"
    if found.host_memory:
        size = found.host_memory / _GIB
        yield f"  {'on the host':<11}  {size:>9,.2f} GiB  (main weights, gradients and state)"


def _flop(operations: float) -> str:
    for size, unit in _UNITS:
        if operations >= size:
            return f"{operations / size:.4g} {unit}FLOP"
    return f"{operations:.0f} FLOP"
