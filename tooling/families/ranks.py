"""Families on several ranks: layouts and decoding equal one rank. transformers is not needed."""

import zlib
from collections.abc import Mapping
from dataclasses import replace

import torch
from layouts.case import Case
from layouts.proof import prove
from megatron_ckpt.families import find_family
from megatron_models import ModelConfig, Placement, StaticKVCache, find_kind
from megatron_parallel import Mesh, ParallelLayout, collect_shardings, parameter_views
from megatron_parallel.testing import WorkerPool
from megatron_train.prove.compare import Differences
from torch import Tensor, nn

from families.case import FamilyCase
from families.comparison import Comparison, text
from families.parity import error

DECODE_LIMIT = 1e-9
"""Of logits with a cache in float64; see `families.parity.error`."""

AXES = ("tp", "pp", "cp", "ep", "mixed")
PASSES = (7, 8, 10, 11, 24)
"""Ends of the passes of decoding: a prompt, then one token or several at a time."""


def config_of(case: FamilyCase) -> ModelConfig:
    """Returns our configuration of the case's settings, read without transformers."""
    config: ModelConfig = find_family(case.family).config_from_hf(case.hf_config)
    return config


def decodes(case: FamilyCase) -> bool:
    """Returns whether models of the family generate token by token."""
    return find_kind(find_family(case.family).kind).supports_decoding


def layouts(case: FamilyCase) -> Mapping[str, Case]:
    """Returns a layout for each axis that is not refused, and one of four ranks.

    ``ep`` is only for experts.
    """
    found = every_layout(case)
    return {axis: each for axis, each in found.items() if axis not in case.refused_axes}


def every_layout(case: FamilyCase) -> Mapping[str, Case]:
    """Returns all layouts, also those that are refused."""
    config = replace(config_of(case), **case.trained)

    def one(
        micro_batch: int, *, sp: bool = False, dispatcher: str = "allgather", **degrees: int
    ) -> Case:
        layout = ParallelLayout(**{"dp": 1, **degrees})
        return Case(
            layout, case.family, sp, False, micro_batch, dispatcher=dispatcher, other=config
        )

    found = {"tp": one(2, sp=True, tp=2), "pp": one(2, pp=2), "cp": one(4, cp=2)}
    if config.expert_parallel:
        more = {"dispatcher": "alltoall", "dp": 2, "ep": 2}
        return found | {"ep": one(2, **more), "mixed": one(2, sp=True, tp=2, **more)}
    return found | {"mixed": one(2, sp=True, tp=2, pp=2)}


def layout(pool: WorkerPool, case: FamilyCase, axis: str, steps: int) -> Differences:
    """Trains in one of `every_layout` and on one rank in float64; returns the differences."""
    return prove(pool, every_layout(case)[axis], steps=steps)


def decoding(pool: WorkerPool, case: FamilyCase) -> float | None:
    """Returns the largest error of cached decoding, on one rank and on two tensor-parallel ones.

    The reference is one pass without a cache on one rank. None if the family does not decode.
    """
    if not decodes(case):
        return None
    config = config_of(case)
    size = config.embedding.vocab_size
    tokens = text(size, 2, PASSES[-1])
    model = random_model(Mesh.single(), config)
    with torch.no_grad():
        expected = case.kind.continued(model, tokens)
    ranks = pool.run_mesh(ParallelLayout(tp=2, dp=1), decoded, config, case.kind, tokens)
    found = (decoded(Mesh.single(), config, case.kind, tokens), torch.cat(ranks, -1))
    # Two ranks may pad the vocabulary to another size.
    return max(error(each[..., :size], expected[..., :size]) for each in found)


def decoded(mesh: Mesh, config: ModelConfig, kind: Comparison, tokens: Tensor) -> Tensor:
    """Returns this rank's columns of the logits, computed with a cache in several passes."""
    model = random_model(mesh, config)
    cache = StaticKVCache(config, mesh, len(tokens), PASSES[-1], dtype=torch.float64)
    starts = (0, *PASSES[:-1])
    with torch.no_grad():
        parts = [
            kind.continued(model, tokens[:, a:b], cache)
            for a, b in zip(starts, PASSES, strict=True)
        ]
    return torch.cat(parts)


def random_model(mesh: Mesh, config: ModelConfig) -> nn.Module:
    """Returns a model in float64 whose weights got noise, the same on all ranks."""
    (model,) = find_kind(config.kind).build(config, Placement(mesh, dtype=torch.float64))
    model.eval()
    for name, views in parameter_views(model, collect_shardings(model), mesh).items():
        for view in views:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            noise = torch.randn(view.global_shape, generator=generator, dtype=torch.float64)
            ends = zip(view.offsets, view.lengths, strict=True)
            with torch.no_grad():
                view.tensor.add_(0.3 * noise[tuple(slice(o, o + n) for o, n in ends)])
    return model
