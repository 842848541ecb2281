"""Proofs at their limits: small layouts and runs, what ranks record, and what is refused first."""

from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pytest
import torch
from megatron_optim import OptimizerConfig
from megatron_parallel import Mesh, ParallelLayout
from megatron_train.cli.main import build_parser
from megatron_train.config.described_run import resolve_run
from megatron_train.engine import StepEngine
from megatron_train.errors import TrainError
from megatron_train.prove import proof as proof_module
from megatron_train.prove import shrink as shrink_module
from megatron_train.prove.defects import CATALOGUE
from megatron_train.prove.layout import small_layout
from megatron_train.prove.proof import prove, train_on_rank
from megatron_train.prove.record import RecordingOptimizer, record_run, watch_routes
from megatron_train.prove.samples import documents, stacked
from megatron_train.prove.shrink import choose_layers
from waiting import HANG

from .conftest import BigramTask
from .test_prove import small
from .test_prove_defects import Pool, Routed, mesh_of

SIZES = "--num-layers 4 --hidden-size 8 --num-attention-heads 2 --seq-length 64"


# -- layouts and layers ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "max_ranks", "expected"),
    [
        # 8 stages or fewer: 2 chunks on each of 3 ranks, 2 on each of 4
        (ParallelLayout(pp=3, vpp=8, dp=1), 8, ParallelLayout(pp=3, vpp=2, dp=1)),
        (
            ParallelLayout(pp=8, vpp=2, stage_mapping="v", dp=1),
            8,
            ParallelLayout(pp=4, vpp=2, stage_mapping="v", dp=1),
        ),
        # Tensor-parallel ranks of experts stay those of the other layers.
        (ParallelLayout(tp=4, ep=2, etp=4, dp=4), 16, ParallelLayout(tp=4, ep=2, etp=4, dp=4)),
    ],
    ids=str,
)
def test_a_small_layout_keeps_its_structure(
    layout: ParallelLayout, max_ranks: int, expected: ParallelLayout
) -> None:
    assert small_layout(layout, max_ranks) == expected


@pytest.mark.parametrize("levels", [(2, 4), (4, 2)])
def test_both_levels_of_context_parallelism_need_two_ranks(levels: tuple[int, int]) -> None:
    layout = ParallelLayout(cp=8, hierarchical_cp=levels, dp=1)
    with pytest.raises(TrainError, match=r"--max-ranks 2 is too small .* give --max-ranks 4"):
        small_layout(layout, 2)


def test_a_stage_with_several_kinds_of_layers_gets_no_other_layers() -> None:
    """One of each kind, and the last layer."""
    assert choose_layers([0, 1, 2, 0, 1, 2], [range(6)], 1) == [[0, 1, 2, 5]]


# -- small runs ------------------------------------------------------------------------------------


def test_a_small_model_may_have_four_million_parameters() -> None:
    def model(count: int) -> SimpleNamespace:
        spec = SimpleNamespace(sharding=SimpleNamespace(shape=(count,)))
        return SimpleNamespace(parameters=lambda: {"weight": spec})

    shrink_module._refuse_large(model(4_000_000))
    with pytest.raises(TrainError, match="still has 4,000,001 parameters, more than 4,000,000"):
        shrink_module._refuse_large(model(4_000_001))


def test_samples_are_a_multiple_of_what_context_and_sequence_parallelism_cut() -> None:
    """2 x 3 x 2 = 12 parts, and at least 16 tokens; positions are no more than tokens."""
    layout = "--tensor-model-parallel-size 2 --context-parallel-size 3"
    layout += " --cpu-offloading-num-layers 2"
    found = small("gpt", *f"{SIZES} --seq-length 48 {layout}".split())
    assert found.run.data.seq_length == found.run.model.embedding.max_position_embeddings == 24
    assert not found.one_rank.data.broadcast_batches
    assert found.run.recompute.cpu_offloading_num_layers == 1


class StoppedError(Exception):
    """Raised in place of a small layout."""


@pytest.fixture
def least(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns the smallest tensor-parallel sizes that are asked for; no run shrinks further."""
    found: list[int] = []

    def layout(layout: ParallelLayout, max_ranks: int, *, least_tp: int) -> None:
        found.append(least_tp)
        raise StoppedError

    monkeypatch.setattr(shrink_module, "small_layout", layout)
    return found


def test_ranks_that_share_heads_are_four_at_least(least: list[int]) -> None:
    """4 ranks share 2 query groups, but not 4."""
    words = f"{SIZES} --hidden-size 32 --num-attention-heads 8 --tensor-model-parallel-size 4"
    for groups in (2, 4):
        with pytest.raises(StoppedError):
            small("gpt", *f"{words} --group-query-attention --num-query-groups {groups}".split())
    assert least == [4, 2]


def test_losses_over_batches_are_proven_without_data_parallelism(least: list[int]) -> None:
    """A layout with several data-parallel ranks is refused."""
    experts = "--num-experts 4 --moe-global-aux-loss-coeff 0.1 --tensor-model-parallel-size 2"
    with pytest.raises(StoppedError):
        small("gpt", *f"{SIZES} {experts}".split())


@pytest.mark.parametrize(("tokens", "room"), [(4, 2), (8, 2), (12, 4), (24, 6), (32, 8), (64, 16)])
def test_a_rank_of_a_pool_has_room_for_a_slice_at_least(
    tokens: int, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quarter of the tokens, rounded to a multiple of 2."""
    monkeypatch.setattr(shrink_module, "slice_multiple", lambda run: 1)
    run = SimpleNamespace(
        training=SimpleNamespace(max_seqlen_per_dp_cp_rank=tokens),
        data=SimpleNamespace(seq_length=64),
    )
    assert shrink_module._room(run, ParallelLayout(tp=1, dp=4), 16) == room


def test_a_model_without_tied_embeddings_cannot_have_their_defect() -> None:
    words = ["prove", "bert", "--recipe", "bert-tiny", "--pipeline-model-parallel-size", "2"]
    run = resolve_run(build_parser().parse_args(words))
    (tied,) = (each for each in CATALOGUE if each.name == "tied-not-summed")
    assert not tied.applies(run)


# -- records ---------------------------------------------------------------------------------------


def test_gradients_of_the_first_and_last_step_are_recorded_by_default(make_trainer) -> None:
    engine = StepEngine(BigramTask(), Mesh.single())
    optimizer = RecordingOptimizer(engine.stages, OptimizerConfig(lr=0.1))
    trainer = make_trainer(engine=engine, optimizer=optimizer, train_iters=3)
    assert len(record_run(trainer, 6).gradients) == 2


def recorded(mesh: SimpleNamespace, length: int, experts: torch.Tensor) -> dict:
    layer = Routed()
    stage = SimpleNamespace(layers={"0": SimpleNamespace(mlp=layer)})
    routes = watch_routes([stage], mesh, length)
    layer.router(SimpleNamespace(experts=experts))
    return routes


def test_every_token_has_a_row_of_its_experts() -> None:
    experts = torch.arange(8 * 2 * 3).view(16, 3)  # 8 tokens of 2 samples, 3 experts each
    (routes,) = recorded(mesh_of(), 8, experts).values()
    assert torch.equal(routes, experts)


def test_a_rank_with_padding_alone_has_no_tokens() -> None:
    """10 tokens are 2 on each of 5 ranks, and none on 3 more."""
    rows = torch.arange(2).view(2, 1)
    for rank, kept in ((4, [[0], [1]]), (5, []), (6, []), (7, [])):
        found = recorded(mesh_of(tp=(8, rank)), 10, rows)
        assert {key: part.tolist() for key, part in found.items()} == {(0, 0, 2 * rank): kept}


@pytest.mark.parametrize(("task", "count"), [(-1, 1), (0, 0), (3, 0)])
def test_routes_of_a_forward_pass_in_a_backward_pass_are_not_recorded_again(
    task: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch numbers backward passes from 0; outside of them the number is -1."""
    monkeypatch.setattr(torch._C, "_current_graph_task_id", lambda: task)
    assert len(recorded(mesh_of(), 2, torch.zeros(2, 1))) == count


def test_half_of_a_text_is_the_token_at_the_same_share_of_a_smaller_vocabulary() -> None:
    """Token 117 of 150 is token 46.8 of 60."""
    text = stacked([documents(index, 256, 60) for index in range(10)])["tokens"]
    assert text.flatten().mode().values == 46


# -- proofs ----------------------------------------------------------------------------------------


def small_copy(*, experts: bool = False, pool: bool = False) -> SimpleNamespace:
    """Returns a small copy of a run, as far as a proof reads it."""
    run = SimpleNamespace(
        task="task",
        train_iters=3,
        layout=SimpleNamespace(world_size=2, hybrid_cp=pool),
        model=SimpleNamespace(expert_parallel=experts),
    )
    return SimpleNamespace(run=run, one_rank=SimpleNamespace(layout=ParallelLayout(dp=1)))


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list:
    """Returns the runs whose data are opened."""
    runs: list = []
    kind = SimpleNamespace(open_proof_data=runs.append)
    monkeypatch.setattr(proof_module, "find_task_kind", lambda task: kind)
    return runs


@pytest.mark.parametrize(
    ("experts", "pool", "rerouted"), [(True, False, 0), (True, True, None), (False, False, None)]
)
def test_routes_are_compared_if_every_rank_records_them(
    experts: bool, pool: bool, rerouted: int | None, opened: list
) -> None:
    copy = small_copy(experts=experts, pool=pool)
    assert prove(copy, pool=Pool()).differences.rerouted == rerouted
    assert opened == [copy.run]


def test_a_proof_is_refused_before_its_processes_start(opened: list, monkeypatch) -> None:
    pool = Pool()
    monkeypatch.setattr("megatron_train.prove.defects.CATALOGUE", ())
    with pytest.raises(TrainError, match="unknown --defect 'none-such'"):
        prove(small_copy(), "none-such", pool=pool)

    def refuse(run: object) -> None:
        raise TrainError("the task has no samples for proofs")

    kind = SimpleNamespace(open_proof_data=refuse)
    monkeypatch.setattr(proof_module, "find_task_kind", lambda task: kind)
    with pytest.raises(TrainError, match="no samples"):
        prove(small_copy(), pool=pool)
    assert pool.calls == [] and opened == []


class Waiting(Pool):
    """Ends its first training when progress has been reported."""

    def __init__(self, reported: Event) -> None:
        super().__init__()
        self.reported = reported

    def run_mesh(self, *arguments, **options):
        assert self.reported.wait(HANG)
        return super().run_mesh(*arguments, **options)


def test_progress_is_reported_while_ranks_train(opened: list) -> None:
    reported, seen = Event(), []

    def progress(*counts: int) -> None:
        seen.append(counts)
        reported.set()

    prove(small_copy(), progress=progress, pool=Waiting(reported))
    assert seen[0] == (0, 6) and seen[-1] == (6, 6)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_records_every_step_and_the_first_one_counts_them(
    rank: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trainer, options, asked = SimpleNamespace(callbacks=[]), {}, []

    def build(*_, **given):
        options.update(given)
        return trainer

    def record(trainer, length, *, every_step):
        asked.append((length, every_step))
        for callback in trainer.callbacks:
            callback.on_step(trainer, None)
            callback.on_step(trainer, None)

    monkeypatch.setattr(proof_module, "find_task_kind", lambda task: SimpleNamespace())
    monkeypatch.setattr(proof_module, "open_batches", lambda *_: None)
    monkeypatch.setattr(proof_module, "build_trainer", build)
    monkeypatch.setattr(proof_module, "record_run", record)
    run = SimpleNamespace(task="task", data=SimpleNamespace(seq_length=8))
    train_on_rank(Mesh(ParallelLayout(dp=2), rank), run, None, str(tmp_path / "steps"))
    assert asked == [(8, True)] and options["optimizer"] is RecordingOptimizer
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b".."] * (rank == 0)
