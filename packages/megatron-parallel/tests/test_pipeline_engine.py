"""The engine on one rank, its sums, and what describes passes, tensors and durations."""

from contextlib import nullcontext
from fractions import Fraction
from typing import Any

import pytest
import torch
from megatron_parallel import LayoutError, Mesh
from megatron_parallel.pipeline import (
    BackwardPass,
    PassDurations,
    PipelineConfig,
    PipelineEngine,
    TensorSpec,
    chunk_layers,
    count_stages,
    simulate,
    split_layers,
    stage_parameters,
)
from torch import Tensor, nn


class Layer(nn.Linear):
    """A linear layer with the weight (1, 2), and inputs by name."""

    def __init__(self) -> None:
        super().__init__(2, 1, bias=False)
        nn.init.constant_(self.weight, 1.0).data[0, 1] = 2.0


def losses(output: Tensor, batch: Tensor) -> dict[str, Tensor]:
    return {"loss": output.sum(), "tokens": torch.tensor(float(len(batch)))}


def engine(mesh: Mesh, chunk: Any, **options: Any) -> PipelineEngine:
    wanted: dict[str, Any] = {"sums": ("loss", "tokens")} | options
    found: Any = wanted.pop("loss", losses)
    return PipelineEngine(
        mesh, chunk, found, inputs=lambda batch, stage: {"input": batch[stage:]}, **wanted
    )


BATCHES = [torch.tensor([[1.0, 1.0]]), torch.tensor([[0.0, 1.0], [2.0, 0.0]])]


def test_sums_are_over_all_micro_batches_and_gradients_are_divided_once(single: Mesh) -> None:
    chunk = Layer()
    made = engine(single, chunk)
    for _ in range(2):  # the sums of the step before are not in it
        sums = made.run(BATCHES, {"loss": 4.0})
        assert {name: (total.item(), total.dtype) for name, total in sums.items()} == {
            "loss": (7.0, torch.float64),
            "tokens": (3.0, torch.float64),
        }
    assert chunk.weight.grad is not None
    assert chunk.weight.grad.tolist() == [[2 * 3.0 / 4, 2 * 2.0 / 4]]
    assert [str(action) for action in made.trace] == ["F0", "B0", "F1", "B1"]
    assert made.stages == (0,) and made.interleaver is None
    evaluated = made.evaluate(BATCHES[1:])
    assert [total.item() for total in evaluated.values()] == [4.0, 2.0]
    assert made.trace == [("F", 0, 0)]
    assert chunk.weight.grad.tolist() == [[1.5, 1.0]]


def test_several_sums_are_differentiated_each_by_its_denominator(single: Mesh) -> None:
    chunk = Layer()

    def two(output: Tensor, batch: Tensor) -> dict[str, Tensor]:
        return {"square": output.square().sum(), "loss": output.sum(), "other": output.sum() * 9}

    made = engine(single, chunk, loss=two, sums=("loss", "square", "other"))
    sums = made.run(BATCHES[:1], {"loss": 2.0, "square": torch.tensor(3.0, dtype=torch.float64)})
    assert [(n, t.item()) for n, t in sums.items()] == [
        ("loss", 3.0),
        ("square", 9.0),
        ("other", 27.0),
    ]
    assert chunk.weight.grad is not None and chunk.weight.grad.dtype == torch.float32
    torch.testing.assert_close(chunk.weight.grad, torch.full((1, 2), 1 / 2 + 2 * 3 / 3))


def test_steps_that_an_engine_cannot_run_are_refused(single: Mesh) -> None:
    made = engine(single, Layer())
    for denominators, enabled in (({}, True), ({"loss": 1.0}, False)):
        with torch.set_grad_enabled(enabled), pytest.raises(LayoutError, match="needs a denom"):
            made.run(BATCHES, denominators)
    with pytest.raises(LayoutError, match="0 micro-batches: use at least 1"):
        made.run([], {"loss": 1.0})
    with pytest.raises(LayoutError, match="0 micro-batches: an evaluation needs at least 1"):
        made.evaluate([])
    with pytest.raises(LayoutError, match=r"for \['other'\], but the sums are \['loss', 'tok"):
        made.run(BATCHES, {"loss": 1.0, "other": 2.0})
    for name in ("loss", "tokens"):
        short = engine(single, Layer(), sums=(name,))
        with pytest.raises(LayoutError, match=r"returned the sums \['loss', 'tokens'\], but `sum"):
            short.run(BATCHES, {name: 1.0})


def test_an_engine_refuses_chunks_and_groups_that_do_not_fit(single: Mesh) -> None:
    with pytest.raises(LayoutError, match="got 2 model chunks, but the layout has vpp=1"):
        engine(single, [Layer(), Layer()])
    with pytest.raises(LayoutError, match="group_size=2 needs schedule"):
        engine(single, Layer(), group_size=2)
    assert engine(single, [Layer()], schedule="combined-1f1b").interleaver is not None


@pytest.mark.parametrize("schedule", ["1f1b", "combined-1f1b"])
def test_the_last_backward_pass_of_a_loop_is_known(single: Mesh, schedule: str) -> None:
    passes: list[BackwardPass] = []

    def around(backward: BackwardPass) -> Any:
        passes.append(backward)
        return nullcontext()

    engine(single, Layer(), schedule=schedule, around_backward=around).run(BATCHES, {"loss": 1.0})
    assert passes == [BackwardPass(0, 0, last=False), BackwardPass(0, 1, last=True)]


def test_tensors_and_passes_are_described() -> None:
    assert str(TensorSpec((2, 3), torch.bfloat16)) == "[2, 3] bfloat16"
    assert str(TensorSpec((), torch.int64)) == "[] int64"
    assert BackwardPass(1, 2, last=True) == (1, 2, True, False)


def test_two_parameters_of_one_name_are_refused() -> None:
    first, second = (nn.ModuleDict({"a": Layer()}) for _ in range(2))
    with pytest.raises(LayoutError, match="two chunks of this rank have different parameters"):
        stage_parameters([first, second])
    second["a"].weight = first["a"].weight
    second["b"] = Layer()
    found = stage_parameters([first, second])
    assert list(found) == ["a.weight", "b.weight"]
    assert found["a.weight"] is first["a"].weight and found["b.weight"] is second["b"].weight


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ({"backward": 0}, "backward=0: use a duration above 0"),
        ({"forward": -1}, "forward=-1: use"),
        ({"weight": 0}, "weight=0 is not between 0 and backward=2"),
        ({"weight": 3, "backward": 3}, "weight=3 is not between 0 and backward=3"),
    ],
)
def test_passes_without_a_duration_are_refused(times: dict[str, float], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        PassDurations(**times)


def test_durations_are_exact_and_have_defaults() -> None:
    assert PassDurations().exact_durations == {"F": 1, "B": 2, "I": 1, "W": 1, "send": 0}
    short = PassDurations(0.1, 0.7, 0.2, 0.05)
    tenths = {"F": 1, "B": 7, "I": 5, "W": 2, "send": Fraction(1, 2)}
    assert short.exact_durations == {name: Fraction(n, 10) for name, n in tenths.items()}
    assert PassDurations(0.5, weight=0.25, send=0).exact_durations["I"] == Fraction(7, 4)


def test_stalls_are_idle_time_between_the_first_and_the_last_pass() -> None:
    """The pictures of 1F1B over two ranks: `F0 F1 . . B0 F2 B1 . B2`, and no gap on the last."""
    timeline = simulate("1f1b", 2, 3)
    assert timeline.stall_times == (3, 0)
    assert timeline.end == 12 and timeline.bubble_fraction == Fraction(6, 24)
    assert simulate("gpipe", 2, 1).stall_times == (3, 0)
    assert simulate("gpipe", 1, 2).stall_times == (0,)


@pytest.mark.parametrize("name", ["first", "last", "count_embedding", "count_loss"])
def test_a_layout_string_excludes_each_other_size(name: str) -> None:
    settings: dict[str, Any] = {name: True if name.startswith("count") else 0}
    with pytest.raises(LayoutError, match=r"stages=Et\|tL sets the number of layers"):
        PipelineConfig(stages="Et|tL", **settings)
    assert PipelineConfig(**settings) != PipelineConfig(stages="Et|tL")


def test_stages_are_counted_after_repetitions() -> None:
    assert [count_stages(text) for text in ("EtL", "Et|L", "E(t|)*3,L", "E|t*3|L")] == [1, 2, 4, 3]


@pytest.mark.parametrize("sizes", [(1, 0), (1, 1, 0), (4, -1)])
def test_splits_without_ranks_or_chunks_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError, match="all must be at least 1"):
        split_layers(*sizes)


def test_a_negative_size_is_refused_and_an_empty_last_rank_is_not() -> None:
    with pytest.raises(LayoutError, match="first=-2 layers cannot be split over vpp=1"):
        split_layers(4, 2, first=-2)
    assert split_layers(4, 2, last=0) == (range(4), range(4, 4))
    assert split_layers(1, 1) == (range(1),)
    assert chunk_layers(split_layers(6, 3, 2), 3, 1) == (range(1, 2), range(4, 5))


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((1, 2), {}, r"^1 layer cannot be split evenly over 2 stages: use 2 layers"),
        ((5, 2), {"count_loss": True}, None),
        ((6, 2), {"count_loss": True}, r"^6 layers \+ loss cannot .*: use 5 or 7 layers"),
        ((4, 2), {"count_embedding": True, "count_loss": True}, None),
        ((8, 4), {"first": 3}, r"leave 5 for the other 3 ranks .* use 6 or 9 layers"),
        ((6, 3), {"first": 1, "last": 5}, r"leave 0 for the other 1 ranks .* use 7 layers"),
        ((8, 2), {"first": 3, "last": 4}, r"pp=2 has no other stage; use 7 layers"),
    ],
)
def test_the_nearest_number_of_layers_is_proposed(
    arguments: tuple[int, ...], options: dict[str, Any], message: str | None
) -> None:
    if message is None:
        assert sum(map(len, split_layers(*arguments, **options))) == arguments[0]
        return
    with pytest.raises(LayoutError, match=message):
        split_layers(*arguments, **options)
