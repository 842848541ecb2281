"""Settings of layouts, compiled code and graphs: what is accepted, and what is refused."""

from types import SimpleNamespace

import pytest
from megatron_train.config.model_checks import check_features
from megatron_train.errors import TrainError

from .test_configuration import CP2, IN_SAMPLES, MINIMAL, TP2, parse


@pytest.mark.parametrize(
    ("flags", "ranks", "message"),
    [
        ("--cp-comm-type a2a", 1, "--cp-comm-type a2a needs --context-parallel-size of at least 2"),
        ("--context-parallel-split per_document", 1, "needs --context-parallel-size of at least"),
        (
            "--hierarchical-context-parallel-sizes 1 1",
            1,
            "--hierarchical-context-parallel-sizes needs --context-parallel-size of at least 2",
        ),
        (
            "--hierarchical-context-parallel-sizes 2 2",
            1,
            "--hierarchical-context-parallel-sizes (2, 2) must be two sizes, inner and outer",
        ),
        (f"{CP2} --seq-length 10", 2, "--seq-length 10 cannot be split into 2 x 2 equal slices"),
        (
            f"{CP2} --tensor-model-parallel-size 4 --num-attention-heads 4 --sequence-parallel "
            "--seq-length 12",
            8,
            "--seq-length 12 with --context-parallel-size 2 leaves 6 tokens on a rank, which "
            "--sequence-parallel cannot split into 4 equal slices; use --seq-length 8 or 16",
        ),
        (
            f"{CP2} --context-parallel-split per_document",
            2,
            "--context-parallel-split per_document needs --reset-attention-mask",
        ),
        (f"{CP2} --cp-comm-type ring", 2, "needs one of p2p, a2a, allgather, a2a+p2p, got 'ring'"),
        (f"{CP2} --cp-comm-type p2p a2a p2p", 2, "--cp-comm-type has 3 values for --num-layers 2"),
        (f"{CP2} --cp-comm-type a2a+p2p", 2, "a2a+p2p needs --hierarchical-context-parallel-sizes"),
        (
            f"{CP2} --hierarchical-context-parallel-sizes 2 1",
            2,
            "--hierarchical-context-parallel-sizes is used only with --cp-comm-type a2a+p2p",
        ),
        (
            f"{CP2} --cp-comm-type p2p a2a --tensor-model-parallel-size 4 --num-attention-heads 4",
            8,
            "--num-attention-heads 4 / --tensor-model-parallel-size 4 = 1 heads over 2 ranks",
        ),
    ],
)
def test_invalid_context_parallelism_is_refused(flags, ranks, message):
    with pytest.raises(TrainError) as caught:
        parse(f"{MINIMAL} {flags}", ranks=ranks)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


POOL = (
    "--hybrid-context-parallel --max-seqlen-per-dp-cp-rank 8 --tokenizer-model bytes "
    "--reset-attention-mask "
    "--micro-batch-size 1"
)
TP2_SP = "--tensor-model-parallel-size 2 --sequence-parallel"


@pytest.mark.parametrize(
    ("flags", "ranks", "message"),
    [
        (
            "--max-seqlen-per-dp-cp-rank 8",
            1,
            "--max-seqlen-per-dp-cp-rank 8 needs --hybrid-context-parallel; give both or neither",
        ),
        ("--hybrid-context-parallel", 2, "needs --max-seqlen-per-dp-cp-rank, the maximum num"),
        (f"{POOL} --max-seqlen-per-dp-cp-rank 0", 2, "--max-seqlen-per-dp-cp-rank must be positi"),
        (
            f"{POOL} --max-seqlen-per-dp-cp-rank 7",
            2,
            "--max-seqlen-per-dp-cp-rank 7, in multiples of 2, on 2 data and context parallel "
            "ranks holds 12 tokens, but a document may have --seq-length 16",
        ),
        (f"{POOL} {TP2_SP}", 2, "on 1 data and context parallel ranks holds 8 tokens"),
        (
            POOL,
            6,
            "--hybrid-context-parallel needs a power of two of data- and context-parallel ranks",
        ),
        (
            f"{POOL} --context-parallel-size 4 --hierarchical-context-parallel-sizes 2 2",
            4,
            "--hybrid-context-parallel cannot be combined with",
        ),
        (f"{POOL} --no-reset-attention-mask", 2, "needs --reset-attention-mask: without it each"),
        (
            f"{POOL} --pipeline-model-parallel-size 2",
            4,
            "--pipeline-model-parallel-size 2 does",
        ),
        (f"{POOL} --no-calculate-per-token-loss", 2, "--no-calculate-per-token-loss does not wor"),
        (f"{POOL} --micro-batch-size 2", 2, "sets the size of a micro-batch; use 1"),
        (f"{POOL} --num-experts 4", 2, "--hybrid-context-parallel does not work with --num-exper"),
        (
            f"{POOL} --compile",
            2,
            "--compile does not work with --hybrid-context-parallel: each len",
        ),
        (f"{POOL} {CP2} --broadcast-batches", 2, "--broadcast-batches does not work with"),
        (f"{POOL} --context-parallel-split per_document", 2, "a pool always splits per document"),
        (f"{POOL} --cp-comm-type a2a+p2p", 2, "--cp-comm-type a2a+p2p does not work with"),
        (f"{POOL} --cp-comm-type p2p a2a p2p", 2, "--cp-comm-type has 3 values for --num-layers 2"),
        (
            f"{POOL} --cp-comm-type p2p a2a",
            4,
            "--num-attention-heads 2 / --tensor-model-parallel-size 1 = 2 heads over all 4 ranks",
        ),
        (
            f"{POOL} --cp-comm-type a2a --num-attention-heads 4 --tensor-model-parallel-size 2",
            8,
            "--num-attention-heads 4 / --tensor-model-parallel-size 2 = 2 heads over all 4 ranks",
        ),
    ],
)
def test_invalid_settings_of_a_pool_are_refused(flags, ranks, message):
    with pytest.raises(TrainError) as caught:
        parse(f"{MINIMAL} {flags}", ranks=ranks)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_pool_consists_of_data_and_context_parallel_ranks():
    run = parse(f"{MINIMAL} {POOL} {CP2} {TP2_SP} --cp-comm-type allgather", ranks=8)
    assert (run.layout.pool, run.layout.dp, run.layout.hybrid_cp) == (4, 2, True)
    assert parse(f"{MINIMAL} {POOL} --max-seqlen-per-dp-cp-rank 16").layout.pool == 1
    assert parse(f"{MINIMAL} {POOL} --cp-comm-type a2a", ranks=2).layout.pool == 2


def test_slices_of_a_sequence_are_split_again_by_sequence_parallelism():
    assert parse(f"{MINIMAL} {CP2} {TP2_SP}", ranks=4).placement.sequence_parallel


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--tp-comm-overlap", "--tp-comm-overlap needs --sequence-parallel; give both"),
        (
            "--tp-comm-overlap --sequence-parallel --compile",
            "--tp-comm-overlap has no effect on compiled code",
        ),
        (
            "--num-attention-heads 12 --hidden-size 48 --num-query-groups 3",
            "--tensor-model-parallel-size 2 and --num-query-groups 3: one must be a multiple of",
        ),
    ],
)
def test_invalid_tensor_parallelism_is_refused(flags, message):
    with pytest.raises(TrainError) as caught:
        parse(f"{MINIMAL} --tensor-model-parallel-size 2 {flags}", ranks=2)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_query_groups_may_be_fewer_than_ranks():
    flags = "--num-attention-heads 8 --num-query-groups 2 --tensor-model-parallel-size 4"
    assert parse(f"{MINIMAL} {flags}", ranks=4).model.groups_on_rank(4) == 1


@pytest.mark.parametrize(
    ("flags", "ranks", "message"),
    [
        ("", 3, "needs a multiple of 2 ranks, but there are 3"),
        ("--global-batch-size 8", 6, "not a multiple of --micro-batch-size 2 times 3 data"),
        ("--seq-length 15 --sequence-parallel", 2, "15 cannot be split into 2 equal slices"),
    ],
)
def test_layouts_that_do_not_divide_the_run_are_refused(flags, ranks, message):
    with pytest.raises(TrainError) as caught:
        parse(f"{TP2} {flags}", ranks=ranks)
    assert message in str(caught.value)


OVERLAP = "--num-experts 4 --expert-model-parallel-size 2 --overlap-moe-expert-parallel-comm"
ALLTOALL = "--moe-token-dispatcher-type alltoall"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "needs --moe-token-dispatcher-type alltoall: allgather waits for its"),
        (
            ALLTOALL,
            "needs at least 2 micro-batches a step, to compute one while the tokens of the other "
            "are sent, but 4 samples in micro-batches of 2 on 2 data parallel ranks are 1; "
            "raise --global-batch-size or lower --micro-batch-size",
        ),
        (
            f"{ALLTOALL} --global-batch-size 12 --rampup-batch-size 4 4 24",
            "but 4 samples in micro-batches of 2 on 2",
        ),
        (
            f"{ALLTOALL} --global-batch-size 8 --pipeline-schedule gpipe",
            "runs combined-1f1b and excludes --pipeline-schedule gpipe: leave out one of them",
        ),
    ],
)
def test_overlap_of_expert_communication_is_refused_if_nothing_overlaps(flags, message):
    with pytest.raises(TrainError) as caught:
        parse(f"{IN_SAMPLES if 'rampup' in flags else MINIMAL} {OVERLAP} {flags}", ranks=2)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_expert_communication_overlaps_with_and_without_a_pipeline():
    for pipeline, ranks in (("", 2), ("--pipeline-model-parallel-size 2", 4)):
        run = parse(f"{MINIMAL} {OVERLAP} {ALLTOALL} --global-batch-size 8 {pipeline}", ranks=ranks)
        assert run.pipeline.resolve_schedule(run.layout) == "combined-1f1b"


def test_experts_compute_between_graphs_but_not_in_halves_or_in_turns():
    flags = f"{MINIMAL} --num-experts 4 --expert-model-parallel-size 2 --compile {ALLTOALL}"
    parse(flags, ranks=2)
    for more, message in (
        ("--overlap-moe-expert-parallel-comm", "does not work with --compile: the passes of"),
        (
            "--pipeline-model-parallel-size 2 --compile-scope layer "
            "--pipeline-schedule zero-bubble",
            "--compile with --pipeline-schedule zero-bubble does not work with --num-experts",
        ),
    ):
        with pytest.raises(TrainError) as caught:
            parse(f"{flags} {more}", ranks=4)
        assert message in str(caught.value)


PP4 = "--pipeline-model-parallel-size 4"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "2 layers cannot be split evenly over 4 stages: use 4 layers or"),
        ("", "or uneven ones: --decoder-first-pipeline-num-layers, --decoder-last-"),
        ("--pipeline-schedule zb-v", "'zb-v' does not support vpp=1: it needs exactly 2 chunks"),
        ("--pipeline-model-parallel-layout Et|tL", "Et|tL has 2 stages, but 4 ranks x 1 chunks"),
        (
            "--pipeline-schedule dualpipe-v --pipeline-model-parallel-layout E|t||||||tL",
            "cannot run 1 micro-batches: it needs at least one for each of its 2 x 4 = 8 stages",
        ),
        (
            "--pipeline-schedule zb-v --pipeline-model-parallel-layout E|t||||||tL --compile",
            "--pipeline-schedule zb-v splits backward passes, which torch does not run with",
        ),
    ],
)
def test_invalid_pipelines_are_refused(flags, message):
    with pytest.raises(TrainError) as caught:
        parse(f"{MINIMAL} {PP4} {flags}", ranks=4)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--compile-scope layer", "--compile-scope layer has no effect without --compile; give"),
        ("--compile --fp4-format e2m1", "--compile does not work with --fp4-format, whose random"),
        *(
            (
                f"--compile {flags}",
                f"--compile does not work with {flags.split()[0]}: a compiled stage cannot wait "
                "for the weights of a layer; use --compile-scope layer, or leave out one of them",
            )
            for flags in (
                "--use-torch-fsdp2",
                "--overlap-param-gather --use-distributed-optimizer",
            )
        ),
    ],
)
def test_compiled_code_that_cannot_be_is_refused(flags, message):
    with pytest.raises(TrainError) as caught:
        parse(f"{MINIMAL} {flags}", ranks=2)
    assert message in str(caught.value)


GRAPHS = "--cuda-graph-impl local"
BY_LAYER = f"{GRAPHS} --compile --compile-scope layer"
EXPERTS_2 = "--num-experts 4 --expert-model-parallel-size 2"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--cuda-graph-warmup-steps 5", f"has no effect without {GRAPHS}; give both or leave"),
        (f"{BY_LAYER} --cuda-graph-warmup-steps 0", "--cuda-graph-warmup-steps 0 is less than 1"),
        (GRAPHS, f"{GRAPHS} needs --compile --compile-scope layer"),
        (f"{GRAPHS} --compile", f"{GRAPHS} needs --compile --compile-scope layer"),
        (f"{BY_LAYER} --device cpu", "does not work with --device cpu: a CPU has no CUDA graphs"),
        (f"{BY_LAYER} --pipeline-model-parallel-size 2", "-size 2: several micro-batches are in"),
        (f"{BY_LAYER} --tensor-model-parallel-size 2", "--tensor-model-parallel-size 2: graphs"),
        (f"{BY_LAYER} --context-parallel-size 2", "context parallelism: graphs with communic"),
        (f"{BY_LAYER} {EXPERTS_2}", "--num-experts: the number of rows of an expert changes"),
        (f"{BY_LAYER} --use-torch-fsdp2", "--use-torch-fsdp2: the weights of a layer are"),
        (
            f"{BY_LAYER} --overlap-param-gather --use-distributed-optimizer",
            "--overlap-param-gather: replays beside gathers",
        ),
        (
            f"{BY_LAYER} --recompute-granularity full --recompute-method uniform "
            "--recompute-num-layers 1",
            "--recompute-granularity full: a graph holds all activations",
        ),
        (f"{BY_LAYER} --bf16 --fp8-format hybrid --fp8-recipe tensorwise", "in few bits: they cha"),
    ],
)
def test_graphs_that_would_not_be_safe_are_refused(flags, message):
    with pytest.raises(TrainError) as caught:
        parse(f"{MINIMAL} {flags}", ranks=4)
    assert message in str(caught.value)


def test_graphs_of_layers_are_accepted():
    more = "--use-distributed-optimizer --recompute-activations"
    run = parse(f"{MINIMAL} {BY_LAYER} {more}", ranks=2)
    assert run.training.cuda_graph_warmup_steps == 3


@pytest.mark.parametrize(
    ("flags", "ranks", "features"),
    [
        ("", 1, []),
        ("--compile", 1, ["compile"]),
        ("--use-torch-fsdp2", 2, ["fully_shard"]),
        ("--pipeline-model-parallel-size 2", 2, []),
        (
            "--pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble",
            2,
            ["split_backward"],
        ),
        (
            "--pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble --compile "
            "--compile-scope layer",
            2,
            ["compile", "split_backward", "compiled_split"],
        ),
        (POOL, 2, ["document_pool"]),
    ],
)
def test_a_model_is_asked_about_the_features_of_its_run(flags, ranks, features):
    asked = []
    model = SimpleNamespace(unsupported_reason=asked.append)
    run = vars(parse(f"{MINIMAL} {flags}", ranks=ranks)) | {"model": model}
    check_features(SimpleNamespace(**run))
    assert asked == features


def test_ranks_that_are_missing_are_named_with_their_axes():
    with pytest.raises(TrainError) as caught:
        parse(f"{TP2} --pipeline-model-parallel-size 2")
    assert str(caught.value) == (
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 needs a multiple of 4 "
        "ranks, but there is 1; start with --nproc-per-node 4 or torchrun"
    )


def test_a_pipeline_layout_sets_vpp_and_the_schedule_sets_the_stage_mapping():
    flags = f"{PP4} --pipeline-schedule zb-v --pipeline-model-parallel-layout E|t||||||tL"
    run = parse(f"{MINIMAL} {flags}", ranks=4)
    assert (run.layout.vpp, run.layout.stage_mapping) == (2, "v")
    assert [len(layers) for layers in run.layer_split] == [0, 1, 0, 0, 0, 0, 0, 1]
    with pytest.raises(TrainError, match="--pipeline-schedule gpipe needs a pipeline of at least"):
        parse(f"{MINIMAL} --pipeline-schedule gpipe")
