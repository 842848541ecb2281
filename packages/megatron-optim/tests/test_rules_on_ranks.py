"""Rules that need matrices or sums compute the same in every layout."""

from collections.abc import Mapping, Sequence

import pytest
import torch
from megatron_optim import (
    AdafactorSettings,
    MuonSettings,
    OptimError,
    Optimizer,
    OptimizerConfig,
    StateFormatConfig,
    state_bytes,
)
from megatron_parallel import (
    DataParallelConfig,
    Mesh,
    ParallelLayout,
    Sharding,
    TrainableChunks,
    TrainableParameters,
)
from megatron_parallel.pipeline import BackwardPass
from megatron_parallel.testing import WorkerPool
from torch import Tensor, nn
from torch.nn import Parameter

TABLE = {
    "word": Sharding((8, 12), "tp", 0, padded=8, vocabulary=True),
    "qkv": Sharding((2, 14, 12), "tp", 0, spill_dim=1, fused_sizes=(6, 4, 4)),
    "up": Sharding((2, 8, 12), "tp", 1, fused_dim=0),
    "down": Sharding((12, 16), "tp", 1),
    "router": Sharding((3, 12)),
    "moe.experts": Sharding((4, 2, 6, 12), "expert_tp", 2, fused_dim=1, experts=True),
    "gain": Sharding((12,)),
}
PARTS: Mapping[str, list[tuple[object, ...]]] = {
    "qkv": [(slice(None), slice(*ends)) for ends in ((0, 6), (6, 10), (10, 14))],
    "up": [(0,), (1,)],
    "moe.experts": [(e, g) for e in range(4) for g in range(2)],
}
SHARDED = DataParallelConfig(use_distributed_optimizer=True, whole_matrices=True)
FLAT = DataParallelConfig(use_distributed_optimizer=True, ddp_bucket_size=150)
FULLY_SHARDED = DataParallelConfig(use_torch_fsdp2=True)
Boxes = dict[str, list[tuple[Tensor, tuple[int, ...], tuple[int, ...]]]]
SETTINGS = {"muon": MuonSettings, "adafactor": AdafactorSettings}
LR, DECAY = 0.1, 0.2


class Weights(nn.Module):
    """Parameters of a table, and a loss of all of them."""

    def __init__(self, table: Mapping[str, Sharding], mesh: Mesh, prefix: str = "") -> None:
        super().__init__()
        self.mesh, self.prefix = mesh, prefix
        self.sharding = {name: cut for name, cut in table.items() if "." not in name}
        for name, sharding in self.sharding.items():
            own = drawn(prefix + name, 0)[sharding.box(mesh).slices].clone()
            self.register_parameter(name, Parameter(own))
        inner = {n.removeprefix("moe."): cut for n, cut in table.items() if "." in n}
        self.moe = Weights(inner, mesh, "moe.") if inner else None  # fully sharded by itself

    def forward(self, sample: int) -> Tensor:
        """Returns a loss whose gradient depends on the sample."""
        terms = [] if self.moe is None else [self.moe(sample)]
        for name, sharding in self.sharding.items():
            for seen in self.samples_of(sharding, sample):
                factor = drawn(self.prefix + name, 1 + seen)[sharding.box(self.mesh).slices]
                terms.append((self.get_parameter(name) * factor).sin().sum())
        return torch.stack(terms).sum()

    def samples_of(self, sharding: Sharding, sample: int) -> list[int]:
        """Returns the samples whose tokens reach a weight: experts see those of all ep ranks."""
        if not sharding.experts:
            return [sample]
        tp, own = self.mesh.layout.tp, self.mesh.rank
        return sorted({sample + rank // tp - own // tp for rank in self.mesh.axis("ep").ranks})


def drawn(name: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * list(TABLE).index(name) + seed)
    return torch.randn(TABLE[name].shape, generator=generator, dtype=torch.float64)


def trained(
    mesh: Mesh,
    data: DataParallelConfig,
    steps: int,
    rule: str = "muon",
    dtype: torch.dtype = torch.float64,
    **settings: object,
) -> Boxes:
    """Trains on four samples a step; returns the boxes of weights and state."""
    chunks = TrainableChunks([Weights(TABLE, mesh).to(dtype)], mesh, data)
    own = SETTINGS[rule](**settings)
    config = OptimizerConfig(optimizer=rule, weight_decay=DECAY, clip_grad=0.0, settings=own)
    optimizer = Optimizer(chunks, config)
    axis = mesh.axis("dp")
    for _ in range(steps):
        samples = range(axis.index, 4, axis.size)
        for sample in samples:
            with chunks.around_backward(BackwardPass(0, sample, last=sample == samples[-1])):
                chunks.modules[0](sample).backward()
        chunks.finish()
        optimizer.step(LR)
        chunks.zero()
    views = {**chunks.views(), **optimizer.views()}
    return {
        n: [(v.tensor.clone(), v.offsets, v.global_shape) for v in found]
        for n, found in views.items()
    }


def whole_tensors(ranks: Sequence[Boxes]) -> dict[str, Tensor]:
    """Returns global tensors from the boxes of all ranks."""
    found: dict[str, Tensor] = {}
    for rank in ranks:
        for name, boxes in rank.items():
            for box, offsets, shape in boxes:
                whole = found.setdefault(name, torch.full(shape, torch.nan).to(box))
                ends = zip(offsets, box.shape, strict=True)
                whole[tuple(slice(o, o + n) for o, n in ends)] = box
    return found


def polar(matrix: Tensor, coefficients: object) -> Tensor:
    """Returns the iterations by their effect on singular values, in float64."""
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.norm()
    for a, b, c in coefficients:  # type: ignore[attr-defined]
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag(s) @ vh


@pytest.mark.parametrize("rule", ["adam", *SETTINGS])
def test_state_has_the_predicted_bytes(rule: str) -> None:
    config = OptimizerConfig(optimizer=rule)
    weights = Weights(TABLE, Mesh.single()).float()
    named = dict(weights.named_parameters())
    optimizer = Optimizer(TrainableParameters(named, TABLE, Mesh.single()), config)
    held = sum(tensor.nbytes for tensor in optimizer.state_tensors())
    predicted = state_bytes(config, StateFormatConfig())
    assert held == pytest.approx(sum(p.numel() * predicted(TABLE[n]) for n, p in named.items()))


def gradient_of(name: str) -> Tensor:
    """Returns the gradient of a parameter in the first step."""
    weight = drawn(name, 0).requires_grad_()
    torch.stack([(weight * drawn(name, 1 + n)).sin().sum() for n in range(4)]).sum().backward()
    assert weight.grad is not None
    return weight.grad


def first_step(matrix: Tensor, gradient: Tensor, settings: MuonSettings) -> Tensor:
    """Returns a matrix after the first step."""
    update = settings.scale(*matrix.shape) * polar(gradient, settings.coefficients())
    return matrix * (1 - LR * DECAY) - LR * update


@pytest.mark.parametrize("split", [False, True])
def test_fused_weights_are_separate_matrices(split: bool) -> None:
    given = {"split_qkv": split, "extra_scale_factor": 0.5}
    found = whole_tensors([trained(Mesh.single(), DataParallelConfig(), 1, **given)])
    for name, sharding in TABLE.items():
        if not sharding.hidden_matrix:
            assert f"{name}.exp_avg" in found
            continue
        gradient, weight = gradient_of(name), drawn(name, 0)
        for part in PARTS.get(name, [()]) if split or name != "qkv" else [()]:
            as_matrix = (-1, weight.shape[-1])
            matrices = (weight[part].reshape(as_matrix), gradient[part].reshape(as_matrix))
            expected = first_step(*matrices, MuonSettings(**given)).view(weight[part].shape)
            torch.testing.assert_close(found[name][part], expected, rtol=0, atol=1e-10, msg=name)
        torch.testing.assert_close(found[f"{name}.momentum_buffer"], 0.05 * gradient)


LAYOUTS = {
    "dp2": (ParallelLayout(dp=2), SHARDED, "distributed"),
    "tp2": (ParallelLayout(tp=2, dp=1), DataParallelConfig(), "distributed"),
    "tp2 duplicated": (ParallelLayout(tp=2, dp=1), DataParallelConfig(), "duplicated"),
    "tp4 ep4": (ParallelLayout(tp=4, dp=1, ep=4, etp=1), DataParallelConfig(), "distributed"),
    "tp2 dp2": (ParallelLayout(tp=2, dp=2), SHARDED, "distributed"),
    "ep2 etp2": (ParallelLayout(tp=2, dp=2, ep=2, etp=2), SHARDED, "distributed"),
    "ep2 etp1": (ParallelLayout(tp=2, dp=1, ep=2, etp=1), SHARDED, "distributed"),
    "fsdp4": (ParallelLayout(dp=4), FULLY_SHARDED, "distributed"),
    "tp2 fsdp2": (ParallelLayout(tp=2, dp=2), FULLY_SHARDED, "distributed"),
    "ep2 fsdp4": (ParallelLayout(dp=4, ep=2), FULLY_SHARDED, "distributed"),
}


ADAFACTOR = {
    "dp4": (ParallelLayout(dp=4), FLAT),
    "tp2 dp2": (ParallelLayout(tp=2, dp=2), FLAT),
    "tp4 ep4": (ParallelLayout(tp=4, dp=1, ep=4, etp=1), DataParallelConfig()),
    "ep2 etp2": (ParallelLayout(tp=2, dp=2, ep=2, etp=2), FLAT),
    "fsdp4": (ParallelLayout(dp=4), FULLY_SHARDED),
    "tp2 fsdp2": (ParallelLayout(tp=2, dp=2), FULLY_SHARDED),
    "ep2 fsdp4": (ParallelLayout(dp=4, ep=2), FULLY_SHARDED),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_muon_equals_one_rank(worker_pool: WorkerPool, name: str) -> None:
    layout, data, mode = LAYOUTS[name]
    check_equal(worker_pool, layout, data, "muon", tp_mode=mode)


@pytest.mark.parametrize("name", ["dp2", "tp2", "ep2 etp1", "fsdp4"])
def test_a_single_update_in_fp32_is_close_to_one_rank(worker_pool: WorkerPool, name: str) -> None:
    layout, data, mode = LAYOUTS[name]
    single = torch.float32
    whole = whole_tensors([trained(Mesh.single(), DataParallelConfig(), 1, dtype=single)])
    found = whole_tensors(
        worker_pool.run_mesh(
            layout, lambda mesh: trained(mesh, data, 1, dtype=single, tp_mode=mode)
        )
    )
    for tensor, sharding in TABLE.items():
        if sharding.hidden_matrix:
            start = drawn(tensor, 0).float() * (1 - LR * DECAY)
            update = whole[tensor] - start
            assert (found[tensor] - whole[tensor]).norm() <= 1e-4 * update.norm(), tensor


@pytest.mark.parametrize("name", ADAFACTOR)
def test_adafactor_equals_one_rank(worker_pool: WorkerPool, name: str) -> None:
    check_equal(worker_pool, *ADAFACTOR[name], "adafactor")


def check_equal(
    pool: WorkerPool,
    layout: ParallelLayout,
    data: DataParallelConfig,
    rule: str,
    **settings: object,
) -> None:
    """Checks weights and state after three steps."""
    whole = whole_tensors([trained(Mesh.single(), DataParallelConfig(), 3, rule)])
    ranks = pool.run_mesh(layout, lambda mesh: trained(mesh, data, 3, rule, **settings))
    found = whole_tensors(ranks)
    assert found.keys() == whole.keys()
    for tensor, expected in whole.items():
        torch.testing.assert_close(found[tensor], expected, rtol=0, atol=1e-11, msg=tensor)


def _trained(mesh: Mesh, data: DataParallelConfig, steps: int, mode: str) -> object:
    return trained(mesh, data, steps, tp_mode=mode)


def test_blockwise_updates_depend_on_the_layout(worker_pool: WorkerPool) -> None:
    layout = ParallelLayout(tp=2, dp=1)
    found = whole_tensors(
        worker_pool.run_mesh(layout, _trained, DataParallelConfig(), 1, "blockwise")
    )
    for half in (slice(0, 8), slice(8, 16)):
        shards = drawn("down", 0)[:, half], gradient_of("down")[:, half]
        expected = first_step(*shards, MuonSettings())
        torch.testing.assert_close(found["down"][:, half], expected, rtol=0, atol=1e-10)


def test_blockwise_updates_need_whole_groups_of_heads(worker_pool: WorkerPool) -> None:
    layout = ParallelLayout(tp=4, dp=1, ep=4, etp=1)
    for message in worker_pool.run_mesh(layout, _refusal):
        assert "cut a group of heads of 'qkv'" in message and "use distributed" in message


def _refusal(mesh: Mesh) -> str:
    with pytest.raises(OptimError) as caught:
        trained(mesh, DataParallelConfig(), 1, tp_mode="blockwise")
    return str(caught.value)
