"""State that is not a parameter: observations of ranks and micro-batches, and updates."""

import copy
import math

import pytest
import torch
from megatron_parallel import (
    LayoutError,
    Mesh,
    ParallelLayout,
    Sharding,
    StepState,
    TrainableChunks,
    collect_shardings,
    initialize_parameters,
    parameter_views,
)
from megatron_parallel.sharding import ONES, ZEROS, collect_states
from torch import nn
from torch.utils.checkpoint import checkpoint

SAMPLES = torch.tensor([[1.0, -2.0, 4.0], [0.5, 7.0, -9.0], [3.0, 1.0, 1.0], [2.0, 2.0, -4.0]])


class Watched(nn.Module):
    """Multiplies by a weight and observes the sum and the maximum of its inputs."""

    def __init__(self, mesh, partial=None):
        super().__init__()
        self.sharding = {
            "weight": Sharding((3,), init=ONES, partial=partial),
            "total": Sharding((3,), init=ZEROS, partial=partial, reduce="sum"),
            "largest": Sharding((2,), init=ZEROS, partial=partial, reduce="max"),
        }
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
        StepState(self, "total", mesh, torch.add, dtype=torch.float64)
        StepState(
            self,
            "largest",
            mesh,
            lambda value, seen: torch.cat([value[1:], seen]),  # of the last two steps
            observation_shape=(1,),
            dtype=torch.float64,
        )

    def forward(self, x):
        y = self.states["total"].observe(x * self.weight, x.sum(0))
        return self.states["largest"].observe(y, x.max().view(1))


def train(mesh, partial=None, again=False):
    """Runs two steps with the samples of this rank, one by one, and returns the state."""
    model = Watched(mesh, partial)
    stages = TrainableChunks([model], mesh)
    data = mesh.axis("dp")
    rank, ranks = data.index, data.size
    if partial is not None:
        other = mesh.axis(partial)
        rank, ranks = rank * other.size + other.index, ranks * other.size
    for step in range(2):
        own = range(rank, len(SAMPLES), ranks)
        for number in own:
            for buffers in stages.buffers:
                buffers.begin(last=number == own[-1])
            x = SAMPLES[number : number + 1].double() * (step + 1)
            with torch.no_grad():
                model(x)  # an evaluation
            y = checkpoint(model, x, use_reentrant=False) if again else model(x)
            y.sum().backward()
        stages.finish()
        stages.update_states()
        stages.zero()
    return model.total.clone(), model.largest.clone()


TOTAL, LARGEST = 3 * SAMPLES.sum(0).double(), torch.tensor([7.0, 14.0], dtype=torch.float64)


@pytest.mark.parametrize("again", [False, True], ids=["kept", "computed again"])
def test_observations_of_all_micro_batches_are_combined_once(again):
    total, largest = train(Mesh.single(), again=again)
    torch.testing.assert_close(total, TOTAL)
    assert torch.equal(largest, LARGEST)


@pytest.mark.parametrize(
    ("layout", "partial"),
    [
        (ParallelLayout(dp=2), None),
        (ParallelLayout(dp=4), None),
        (ParallelLayout(dp=2, tp=2), None),
        (ParallelLayout(dp=2, tp=2), "tp"),
        (ParallelLayout(dp=1, tp=2), "tp"),
    ],
    ids=str,
)
def test_several_ranks_have_the_state_of_one_rank(worker_pool, layout, partial):
    for total, largest in worker_pool.run_mesh(layout, train, partial):
        torch.testing.assert_close(total, TOTAL)
        assert torch.equal(largest, LARGEST)


def test_no_observation_is_zero_or_minus_infinity():
    model = Watched(Mesh.single())
    for state in model.states.values():
        state.step()
    assert torch.equal(model.total, torch.zeros(3, dtype=torch.float64))
    assert model.largest.tolist() == [0.0, -torch.inf]


def test_a_forward_pass_after_frozen_parameters_observes_in_training_mode():
    model = Watched(Mesh.single()).requires_grad_(False)
    x = SAMPLES.double()
    with torch.no_grad():
        model(x)
    model.eval()(x)
    model.train()(x)
    for state in model.states.values():
        state.step()
    torch.testing.assert_close(model.total, SAMPLES.sum(0).double())


def test_reset_discards_the_observations_of_a_step():
    mesh = Mesh.single()
    model = Watched(mesh)
    stages = TrainableChunks([model], mesh)
    model(SAMPLES.double()).sum().backward()
    stages.zero()
    stages.update_states()
    assert torch.equal(model.total, torch.zeros(3, dtype=torch.float64))


def test_state_is_in_the_table_and_views_and_starts_at_its_constant():
    mesh = Mesh.single()
    model = nn.Sequential(Watched(mesh), Watched(mesh))
    table = collect_shardings(model)
    states = ["0.total", "0.largest", "1.total", "1.largest"]
    assert list(table) == ["0.weight", "1.weight", *states]
    assert list(collect_states([model])) == states
    model[1].total.fill_(5.0)
    views = parameter_views(model, table, mesh)
    assert list(views) == list(table)
    assert views["1.total"][0].tensor.data_ptr() == model[1].total.data_ptr()
    assert list(TrainableChunks([model], mesh).views()) == list(table)
    initialize_parameters(model, seed=1, mesh=mesh)
    assert torch.equal(model[1].total, torch.zeros(3, dtype=torch.float64))


def test_a_copy_of_a_module_has_state_of_its_own():
    one = Watched(Mesh.single())
    two = copy.deepcopy(one)
    two(SAMPLES.double()).sum().backward()
    for state in (*one.states.values(), *two.states.values()):
        state.step()
    assert one.total.abs().sum() == 0
    torch.testing.assert_close(two.total, SAMPLES.sum(0).double())


def test_invalid_states_are_refused():
    mesh = Mesh.single()
    module = nn.Module()
    module.sharding = {"a": Sharding((2,)), "b": Sharding((2,), reduce="sum")}
    for name in ("a", "c"):
        with pytest.raises(LayoutError, match=f"state '{name}' of Module needs a row in its attr"):
            StepState(module, name, mesh, torch.add)
    with pytest.raises(
        LayoutError, match="'b' of Module has 'normal' initial values: give its sharding"
    ):
        StepState(module, "b", mesh, torch.add)
    watched = Watched(mesh)
    with pytest.raises(LayoutError, match=r"'total' observes tensors of shape \(3,\), not \(4,\)"):
        watched.states["total"].observe(watched.weight * 1, torch.ones(4))
    with pytest.raises(LayoutError, match="two stages of this rank have a state 'total' each"):
        collect_states([watched, Watched(mesh)])


class WithHistory(nn.Module):
    """A layer whose weight has state of its own."""

    def __init__(self, mesh):
        super().__init__()
        self.sharding = {
            "weight": Sharding((3,), init=ONES),
            "peak": Sharding((2,), init=ZEROS, reduce="max"),
        }
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
        StepState(
            self,
            "peak",
            mesh,
            lambda value, seen: torch.cat((seen, value[:-1])),
            parameter="weight",
            observation_shape=(1,),
        )


def test_state_of_a_parameter_has_a_name_that_extends_the_parameter_s():
    model = nn.ModuleDict({"layer": WithHistory(Mesh.single())})
    (name,) = collect_states([model])
    assert name == "layer.weight.peak"
    table = collect_shardings(model)
    assert list(table) == ["layer.weight", "layer.weight.peak"]
    assert table[name].reduce == "max"
    views = parameter_views(model, table, Mesh.single())
    assert views[name][0].tensor.data_ptr() == model["layer"].peak.data_ptr()
    copied = copy.deepcopy(model)
    assert collect_states([copied])[name].value is copied["layer"].peak


def test_observations_of_a_backward_pass_are_added_at_once():
    state = WithHistory(Mesh.single()).states["peak"]
    for seen in (2.0, 5.0, 3.0):
        state.add(torch.tensor([seen]))
    assert state.observed().tolist() == [5]
    state.step()
    assert state.value.tolist() == [5, 0]
    with pytest.raises(LayoutError, match="observes tensors of shape"):
        state.add(torch.ones(2))


def test_observations_that_have_begun_are_those_that_compiled_code_adds_to():
    state = WithHistory(Mesh.single()).states["peak"]
    state.begin()
    assert state.observed().tolist() == [-math.inf]
    torch.compile(state.add, backend="eager", fullgraph=True)(torch.tensor([4.0]))
    state.begin()  # keeps them
    assert state.observed().tolist() == [4]


def count_messages(mesh):
    model = nn.ModuleList([Watched(mesh) for _ in range(5)])
    stages = TrainableChunks([model], mesh)
    for number, layer in enumerate(model):
        layer.states["total"].add(torch.full((3,), float(mesh.rank + number)))
        layer.states["largest"].add(torch.tensor([float(mesh.rank * number)]))
    with mesh.counting() as traffic:
        stages.update_states()
    found = [(layer.total.tolist(), layer.largest.tolist()) for layer in model]
    return sum(record.calls for record in traffic.records), found


def test_states_that_are_combined_alike_share_a_message(worker_pool):
    for messages, found in worker_pool.run_mesh(ParallelLayout(dp=2), count_messages):
        assert messages == 2  # one for sums, one for maxima
        assert found == [([2.0 * n + 1] * 3, [0.0, float(n)]) for n in range(5)]


def test_an_update_may_be_left_out_and_discards_the_observations():
    state = WithHistory(Mesh.single()).states["peak"]
    for unless, expected in ((True, [0.0, 0.0]), (False, [2.0, 0.0])):
        state.add(torch.tensor([2.0]))
        state.step(torch.tensor(unless))
        assert state.value.tolist() == expected
        assert state.observed().tolist() == [-math.inf]


def test_a_state_has_the_dtype_and_device_that_are_asked_for():
    module = nn.Module()
    module.sharding = {"a": Sharding((2,), init=ONES, reduce="sum")}
    plain = StepState(module, "a", Mesh.single(), torch.add)
    assert (plain.value.dtype, plain.path, plain.of_parameter) == (torch.float32, "a", False)
    assert plain.value.tolist() == [1.0, 1.0] and plain.observed().dtype == torch.float64
    meta = StepState(module, "a", Mesh.single(), torch.add, device="meta", parameter="w")
    assert meta.value.is_meta and (meta.path, meta.of_parameter) == ("w.a", True)


def test_a_tensor_that_needs_no_gradient_is_observed_in_training_only():
    model = Watched(Mesh.single())
    state = model.states["total"]
    x = torch.ones(2, 3, dtype=torch.float64)
    state.observe(x, torch.ones(3))
    with torch.no_grad():
        state.observe(x, torch.ones(3))
    model.eval()
    state.observe(x, torch.ones(3))
    assert state.observed().tolist() == [1.0] * 3
    state.reset()
    assert state.observed().tolist() == [0.0] * 3
