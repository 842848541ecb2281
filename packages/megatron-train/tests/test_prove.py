"""Small copies of runs for proofs: layouts, layers and settings."""

import argparse

import pytest
from megatron_models import GPTConfig
from megatron_parallel import ParallelLayout, RecomputeConfig
from megatron_train.cli.main import build_parser, main
from megatron_train.config.described_run import resolve_run
from megatron_train.errors import TrainError
from megatron_train.prove.layout import small_layout
from megatron_train.prove.shrink import ShrunkRun, _cuts, choose_layers, shrink_run


def arguments(*words: str) -> argparse.Namespace:
    return build_parser().parse_args(["prove", *words])


def small(*words: str, max_ranks: int = 8) -> ShrunkRun:
    return shrink_run(resolve_run(arguments(*words)), 20, max_ranks)


# -- layouts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (ParallelLayout(dp=64), ParallelLayout(dp=2)),
        (ParallelLayout(tp=8, pp=16, dp=8), ParallelLayout(tp=2, pp=2, dp=2)),
        (ParallelLayout(tp=8, dp=1), ParallelLayout(tp=8, dp=1)),
        (ParallelLayout(tp=3, pp=5, dp=1), ParallelLayout(tp=3, pp=2, dp=1)),
        (ParallelLayout(pp=16, dp=1), ParallelLayout(pp=4, dp=1)),
        # Experts keep ranks, and copies: dp 2 would hold each expert once.
        (ParallelLayout(pp=16, ep=64, dp=128), ParallelLayout(pp=2, ep=2, dp=4)),
        (ParallelLayout(dp=8, dp_outer=2), ParallelLayout(dp=4, dp_outer=2)),
        (
            ParallelLayout(cp=8, hierarchical_cp=(4, 2), dp=2),
            ParallelLayout(cp=4, hierarchical_cp=(2, 2), dp=2),
        ),
        # 8 stages are enough, or 2 chunks on each of 4 ranks
        (ParallelLayout(pp=4, vpp=8, dp=1), ParallelLayout(pp=4, vpp=2, dp=1)),
        (ParallelLayout(pp=2, vpp=16, dp=1), ParallelLayout(pp=2, vpp=4, dp=1)),
        (ParallelLayout(pp=2, vpp=2, dp=1), ParallelLayout(pp=2, vpp=2, dp=1)),
        (ParallelLayout(tp=4, cp=4, dp=4), ParallelLayout(tp=2, cp=2, dp=2)),
        (ParallelLayout(tp=2, pp=2, dp=2), ParallelLayout(tp=2, pp=2, dp=2)),
        (ParallelLayout(tp=4, ep=2, etp=1, dp=4), ParallelLayout(tp=4, ep=2, etp=1, dp=2)),
    ],
    ids=str,
)
def test_each_axis_keeps_several_ranks(layout: ParallelLayout, expected: ParallelLayout) -> None:
    assert small_layout(layout, 8) == expected


def test_a_layout_that_needs_more_ranks_is_refused_with_their_number() -> None:
    with pytest.raises(TrainError, match=r"--max-ranks 8 is too small .* give --max-ranks 16"):
        small_layout(ParallelLayout(tp=8, cp=2, pp=4, dp=16), 8)
    assert small_layout(ParallelLayout(tp=8, cp=2, pp=4, dp=16), 16).world_size == 16


@pytest.mark.parametrize(
    ("levels", "max_ranks", "small"),
    [
        ((2, 4), 8, (2, 4)),
        ((2, 4), 4, (2, 2)),
        ((4, 2), 4, (2, 2)),
        ((4, 1), 4, (4, 1)),
        ((4, 1), 2, (2, 1)),
        ((1, 4), 2, (1, 2)),
        ((3, 2), 6, (3, 2)),
    ],
)
def test_levels_of_context_parallelism_with_several_ranks_keep_several(
    levels: tuple[int, int], max_ranks: int, small: tuple[int, int]
) -> None:
    layout = ParallelLayout(cp=levels[0] * levels[1], hierarchical_cp=levels, dp=1)
    found = small_layout(layout, max_ranks)
    assert (found.cp, found.hierarchical_cp) == (small[0] * small[1], small)


def test_the_least_size_of_tensor_parallelism_counts_for_the_number_of_ranks() -> None:
    layout = ParallelLayout(tp=8, dp=4)
    assert small_layout(layout, 4) == ParallelLayout(tp=2, dp=2)
    assert small_layout(layout, 8, least_tp=4) == ParallelLayout(tp=4, dp=2)
    with pytest.raises(TrainError, match=r"--max-ranks 7 is too small .* give --max-ranks 8"):
        small_layout(layout, 7, least_tp=4)


# -- layers --------------------------------------------------------------------------------------


def test_stages_keep_a_layer_of_each_kind() -> None:
    kinds = [0, 0, 0, 3, 3, 3, 3, 3]  # dense, then experts
    split = [range(2), range(2, 4), range(4, 6), range(6, 8)]
    assert choose_layers(kinds, split, 4) == [[0, 1], [2, 3], [4], [6, 7]]
    assert choose_layers(kinds, split, 2) == [[0, 1], [6, 7]]


def test_a_kind_that_no_chosen_stage_has_is_added() -> None:
    kinds = [0, 0, 2, 0, 0, 0]
    split = [range(2), range(2, 4), range(4, 6)]
    assert choose_layers(kinds, split, 2) == [[0, 1, 2], [4, 5]]


def test_stages_without_layers_stay_empty() -> None:
    assert choose_layers([0, 0], [range(0), range(1), range(1, 2), range(2, 2)], 4) == [
        *([], [0], [1], [])
    ]


@pytest.mark.parametrize(
    ("kinds", "split", "stages", "expected"),
    [
        # 8 stages become 3 at equal distances; the first has 2 layers, the last its last layer
        ([0] * 16, [range(n, n + 2) for n in range(0, 16, 2)], 3, [[0, 1], [6], [14, 15]]),
        ([0] * 4, [range(4)], 1, [[0, 3]]),
        ([0] * 2, [range(2)], 1, [[0, 1]]),
        ([0] * 5, [range(1), range(1, 3), range(3, 5)], 3, [[0], [1, 2], [3, 4]]),
        # layer 3 is the only one of its kind, in a stage that is left out
        (
            [0, 0, 0, 3, 0, 0, 6, 0],
            [range(n, n + 2) for n in range(0, 8, 2)],
            2,
            [[0, 1, 3], [6, 7]],
        ),
    ],
)
def test_chosen_layers_are_at_the_ends_and_of_each_kind(kinds, split, stages, expected) -> None:
    assert choose_layers(kinds, split, stages) == expected


# -- runs ----------------------------------------------------------------------------------------


def test_gpt3_on_1024_ranks_becomes_a_run_of_eight() -> None:
    found = small("gpt", "--recipe", "gpt3-175b", "--world-size", "1024")
    run, one = found.run, found.one_rank
    assert (run.layout.tp, run.layout.pp, run.layout.dp) == (2, 2, 2)
    assert run.layer_split == (range(2), range(2, 4))
    assert run.training.float64 and not run.training.bf16
    assert one.layout.world_size == 1 and one.pipeline.stages is None
    assert one.global_batch_size == run.global_batch_size
    assert one.model == run.model
    assert run.training.hidden_dropout == 0.1
    changes = {each.setting: (each.before, each.after) for each in found.changes}
    assert changes["tp"] == (8, 2) and changes["--num-layers"] == (96, 4)
    assert changes["--global-batch-size"] == (1536, run.global_batch_size)


def test_a_run_that_compiles_layers_is_proven_without_a_compiler() -> None:
    compiles = ("--compile", "--compile-scope", "layer", "--attention-dropout", "0")
    found = small("gpt", "--recipe", "gpt3-175b", "--world-size", "1024", *compiles)
    assert not found.run.training.compile and found.run.training.compile_scope == "stage"


def test_a_batch_that_is_not_given_is_one_micro_batch_on_each_rank() -> None:
    sizes = ("--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4")
    found = small("gpt", *sizes, "--seq-length", "64", "--world-size", "16")
    changes = {each.setting: (each.before, each.after) for each in found.changes}
    assert changes["--global-batch-size"] == (16, 2)
    assert all(isinstance(n, int) for pair in changes.values() for n in pair)


@pytest.mark.parametrize(("samples", "small_batch"), [(64, 10), (8, 4), (4, 2)])
def test_a_rank_has_one_micro_batch_more_than_pipeline_ranks(samples, small_batch) -> None:
    """Or as many as in the run; micro-batches of 4 samples have 2."""
    sizes = "--num-layers 8 --hidden-size 8 --num-attention-heads 2 --seq-length 64"
    words = f"{sizes} --pipeline-model-parallel-size 4 --micro-batch-size 4"
    found = small("gpt", *words.split(), "--global-batch-size", str(samples))
    assert found.run.layout.pp == 4 and found.run.training.micro_batch_size == 2
    assert found.run.global_batch_size == small_batch == found.one_rank.global_batch_size
    assert found.run.train_iters == 20 and found.run.data.seq_length == 16
    assert {"dp", "tp", "ep", "expert_tp"}.isdisjoint(each.setting for each in found.changes)


SIZES = "--num-layers 4 --hidden-size 8 --num-attention-heads 2 --seq-length 64"


def test_the_small_run_has_a_constant_rate_whole_steps_and_no_other_precision() -> None:
    words = f"""{SIZES} --world-size 2 --bf16 --deterministic-mode --train-samples 64 --lr 1e-3
        --global-batch-size 8 --rampup-batch-size 4 4 16 --lr-decay-style cosine
        --decrease-batch-size-if-needed
        --lr-warmup-samples 8 --lr-warmup-init 1e-5 --exit-interval 3 --exit-duration-in-mins 5
        --eval-iters 2 --save s --save-interval 2 --recompute-granularity full
        --recompute-method uniform --recompute-num-layers 3 --no-check-for-nan-in-loss-and-grad"""
    found = small("gpt", *words.split())
    run, one, training = found.run, found.one_rank, found.run.training
    assert training.precision == "float64" and training.device == "cpu"
    assert not training.deterministic_mode and not training.decrease_batch_size_if_needed
    assert (run.train_iters, run.train_samples) == (20, 20 * run.global_batch_size)
    assert training.exit_interval is None and training.exit_duration_in_mins is None
    assert run.batch_sizes.sizes == (run.global_batch_size,)
    assert run.learning_rate_schedule().at(0) == run.learning_rate_schedule().at(30) == 1e-3
    sums = run.data_parallel
    assert sums.accumulate_allreduce_grads_in_fp32 and sums.check_for_nan_in_loss_and_grad
    assert run.evaluation.eval_iters == 0 and not run.logging.progress
    assert run.checkpoint.save is None and run.checkpoint.save_interval is None
    assert (run.recompute.num_layers, one.recompute) == (2, RecomputeConfig())
    assert not one.data_parallel.gradient_accumulation_fusion and one.layout.world_size == 1
    changed = {each.setting for each in found.changes}
    assert changed.isdisjoint({"--train-samples", "--train-iters", "--exit-interval"})


@pytest.mark.parametrize(("group", "small_group", "samples"), [(4, 2, 4), (8, 3, 3)])
def test_micro_batches_in_a_row_are_as_many_as_ranks_or_more_as_before(
    group, small_group, samples
) -> None:
    """A rank has more than 2 micro-batches: 3 are a group of 3, but no groups of 2."""
    words = f"""{SIZES} --num-layers 16 --pipeline-model-parallel-size 4 --global-batch-size 32
        --num-virtual-stages-per-pipeline-rank 2 --micro-batch-size 1
        --microbatch-group-size-per-virtual-pipeline-stage {group}"""
    run = small("gpt", *words.split(), max_ranks=2).run
    assert (run.layout.pp, run.pipeline.group_size) == (2, small_group)
    assert run.global_batch_size == samples


def test_layers_keep_their_kind_of_context_parallelism() -> None:
    comm = "--cp-comm-type p2p allgather p2p a2a --context-parallel-size 2"
    found = small("gpt", *f"{SIZES} {comm}".split())
    assert found.run.model.depth == 2
    assert found.run.placement.cp_comm_type == ("p2p", "a2a")  # of the first and last layer


def test_a_rank_of_a_pool_has_room_for_the_same_share_of_a_sample() -> None:
    pool = "--hybrid-context-parallel --max-seqlen-per-dp-cp-rank 32 --reset-attention-mask"
    found = small("gpt", *f"{SIZES} {pool} --world-size 4 --micro-batch-size 1".split())
    assert found.run.data.seq_length == 16  # of 64
    assert found.run.training.max_seqlen_per_dp_cp_rank == 8
    assert found.one_rank.training.max_seqlen_per_dp_cp_rank is None


def test_what_the_small_run_leaves_out_is_named() -> None:
    sizes = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --world-size 2"
    words = ("gpt", *sizes.split())
    every = small(*words, "--bf16", "--compile", "--deterministic-mode", "--save", "s")
    assert every.not_covered == (
        *("bfloat16 rounding and fused GPU kernels", "NCCL", "--compile", "--deterministic-mode"),
        *("the corpus", "the learning-rate schedule", "checkpoints"),
    )
    assert small(*words, "--float64").not_covered == (
        *("float32 rounding and fused GPU kernels", "NCCL", "the corpus"),
        "the learning-rate schedule",
    )
    for flags in (("--load", "x"), ("--pretrained-checkpoint", "x")):
        assert small(*words, *flags).not_covered[-1] == "checkpoints"


def test_ranks_that_share_a_kv_head_still_do() -> None:
    words = ("gpt", "--recipe", "llama3.2-1b", "--tensor-model-parallel-size", "16")
    run = small(*words).run
    assert run.model.num_query_groups < run.layout.tp == 8 or run.layout.tp == 4
    assert 1 < run.model.num_query_groups < run.layout.tp


@pytest.mark.parametrize(("groups", "tp", "shared"), [(2, 4, True), (2, 2, False), (4, 4, False)])
def test_ranks_share_entries_of_attention_alone_and_hold_single_experts(groups, tp, shared) -> None:
    config = GPTConfig(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=8,
        vocab_size=11,
        num_query_groups=groups,
        num_experts=2,
        moe_ffn_hidden_size=2,
        max_position_embeddings=8,
    )
    found = _cuts(config, ParallelLayout(tp=tp, ep=2, dp=2))
    sharing = {name for name, (shares, _) in found.items() if shares}
    assert bool(sharing) == shared and all(".attention.qkv." in each for each in sharing)
    single = {name for name, (_, alone) in found.items() if alone}
    assert single == {name for name in found if ".experts." in name} != set()


def test_a_model_whose_layers_have_sizes_of_their_own_may_stay_too_large() -> None:
    blocks = '[{"mlp": {"ffn_hidden_size": 100000}}, {}, {}, {}]'
    words = ("--heterogeneous-layers-config-encoded-json", blocks, "--world-size", "2")
    with pytest.raises(TrainError, match=r"still has .* such as layers.0.mlp.* of \["):
        small("gpt", "--recipe", "llama-tiny", *words)


def test_samples_are_divided_as_before() -> None:
    words = ("--context-parallel-size", "4", "--tensor-model-parallel-size", "2")
    run = small("gpt", "--recipe", "llama-tiny", *words, "--sequence-parallel").run
    assert run.data.seq_length % (2 * run.layout.cp * run.layout.tp) == 0
    assert run.data.seq_length < 64


def test_the_other_text_of_an_encoder_decoder_shrinks_too() -> None:
    from megatron_train.tasks.t5_kind import SpanSettings

    run = small("t5", "--recipe", "t5-tiny", "--tensor-model-parallel-size", "2").run
    assert run.section(SpanSettings).decoder_seq_length <= run.data.seq_length <= 32


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "nothing to prove on one rank"),
        (("--world-size", "two"), "--world-size needs a positive integer"),
        (("--steps", "0", "--world-size", "2"), "--steps needs a positive integer"),
        (("--world-size", "2", "--defect", "none-such"), "unknown --defect 'none-such'"),
        (("--world-size", "2", "--defect", "tied-not-summed"), "needs --pipeline-model"),
        (("--tensor-model-parallel-size", "5"), "num-attention-heads"),
        (
            ("--world-size", "2", "--num-experts", "4", "--moe-global-aux-loss-coeff", "0.1"),
            "counts tokens of micro-batches that other ranks compute",
        ),
    ],
    ids=str,
)
def test_refusals_are_one_line(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prove", "gpt", "--recipe", "llama-tiny", *words]) in (1, 2)
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_defects_that_the_layout_can_have_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--recipe", "llama-tiny", "--context-parallel-size", "2", "--list-defects"]
    assert main(["prove", "gpt", *words]) == 0
    found = capsys.readouterr().out
    assert "mask-of-next-rank" in found and "experts" not in found
