"""The configuration of a run from flags and files, and its errors."""

import dataclasses
import re
from pathlib import Path

import pytest
from megatron_train._command import CommandError
from megatron_train.config.dump import format_config
from megatron_train.config.extensions import SelectedExtensions
from megatron_train.config.files import read_file, to_yaml
from megatron_train.config.flags import Parser, add_options, add_run_options, given_flags
from megatron_train.config.reference import render_reference
from megatron_train.config.renamed_keys import RENAMED_KEYS
from megatron_train.config.resolve import resolve
from megatron_train.config.run import RunConfig
from megatron_train.config.run_sections import run_options, sections
from megatron_train.errors import TrainError, UsageError

ROOT = Path(__file__).parents[3]
TITLES = {name: title for name, (title, _) in sections().items()}
SIZES = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --vocab-size 100"
REST = "--seq-length 16 --micro-batch-size 2 --train-iters 10 --data-path corpus"
MINIMAL = f"{SIZES} {REST}"


def parse(command: str, config: Path | None = None, ranks: int = 1) -> RunConfig:
    parser = Parser()
    add_run_options(parser, run_options(), TITLES)
    namespace = parser.parse_args(command.split())
    namespace.config, namespace.recipe, namespace.kind = config, None, "gpt"
    return resolve(namespace, ranks)[0]


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


def test_defaults_are_megatrons():
    run = parse(MINIMAL)
    assert run.training.seed == 1234
    assert run.data.split == "969,30,1"
    assert (run.optimizer.lr_decay_style, run.optimizer.min_lr) == ("linear", 0.0)
    assert (run.optimizer.clip_grad, run.optimizer.weight_decay) == (1.0, 0.01)
    assert (run.evaluation.eval_interval, run.evaluation.eval_iters) == (1000, 100)
    assert run.logging.log_interval == 100
    assert run.global_batch_size == run.micro_batch_times_data_parallel_size == 2


def test_positions_follow_the_sequence_unless_given():
    assert parse(MINIMAL).model.max_position_embeddings == 16
    assert parse(f"{MINIMAL} --max-position-embeddings 64").model.max_position_embeddings == 64
    with pytest.raises(TrainError, match="--seq-length 16 exceeds --max-position-embeddings 8"):
        parse(f"{MINIMAL} --max-position-embeddings 8")


def test_dist_muon_is_muon_with_the_distributed_optimizer():
    run = parse(f"{MINIMAL} --optimizer dist_muon --muon-momentum 0.8")
    wanted = parse(f"{MINIMAL} --optimizer muon --use-distributed-optimizer --muon-momentum 0.8")
    assert run == wanted
    assert run != parse(f"{MINIMAL} --optimizer muon --muon-momentum 0.8")


def test_qk_clip_is_refused_where_it_has_no_effect_or_does_not_work():
    with pytest.raises(TrainError, match=r"--qk-clip-alpha 0\.25 has no effect"):
        parse(f"{MINIMAL} --qk-clip-alpha 0.25")
    with pytest.raises(TrainError, match="--qk-clip does not work with --optimizer-cpu-offload"):
        parse(f"{MINIMAL} --qk-clip --optimizer-cpu-offload")


def test_flags_override_the_file_and_the_file_overrides_defaults(tmp_path):
    text = "training: {seed: 7, bf16: true}\noptimizer: {lr: 1e-4, clip_grad: 0.5}\n"
    run = parse(f"{MINIMAL} --lr 0.5 --no-bf16", write(tmp_path, text))
    assert run.training.seed == 7
    assert run.training.bf16 is False
    assert (run.optimizer.lr, run.optimizer.clip_grad) == (0.5, 0.5)


def test_a_file_may_give_all_required_settings(tmp_path):
    given = {
        "model": {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 9},
        "data": {"seq_length": 16, "data_path": ("corpus",)},
        "training": {"micro_batch_size": 2, "train_iters": 10},
    }
    run = parse("", write(tmp_path, to_yaml(given)))
    assert run.model.num_layers == 2
    assert run.data.data_path == ("corpus",)


def test_missing_settings_are_named():
    with pytest.raises(UsageError, match=r"missing: --num-layers, --hidden-size.*--train-iters"):
        parse("--vocab-size 100")
    with pytest.raises(UsageError, match="vocabulary size is unknown: give --tokenizer-model"):
        parse(f"{REST} --num-layers 2 --hidden-size 8 --num-attention-heads 2")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trianing: {seed: 1}", "unknown section 'trianing'; did you mean training?"),
        ("seed: 1", "unknown section 'seed'; did you mean training.seed?"),
        ("num-layers: 1", "unknown section 'num-layers'; did you mean model.num_layers?"),
        (
            "recompute_granularity: full",
            "unknown section 'recompute_granularity'; did you mean recompute.granularity?",
        ),
        ("training: {sead: 1}", "unknown key training.sead; did you mean training.seed?"),
        ("training: {lr: 1}", "unknown key training.lr; did you mean optimizer.lr?"),
        ("training: {seed: x}", "training.seed needs an integer, got 'x'"),
        ("training: 3", "section 'training' must contain `key: value` lines, got 3"),
        ("- a", "must contain sections such as `model:`, got list"),
        ("a: [", "is not YAML"),
    ],
)
def test_errors_in_a_file_name_file_key_and_nearest_key(tmp_path, text, message):
    path = write(tmp_path, text)
    with pytest.raises(TrainError) as caught:
        read_file(path, run_options())
    assert message in str(caught.value) and str(path) in str(caught.value)


def test_keys_of_older_files_are_read(tmp_path):
    keys = {option.key for option in run_options()}
    assert keys.issuperset(RENAMED_KEYS.values()) and not keys & RENAMED_KEYS.keys()
    path = write(tmp_path, "training: {sequence_parallel: true, cp_comm_type: [a2a]}")
    given = read_file(path, run_options()).given
    assert {key: value.value for key, value in given.items()} == {
        "placement.sequence_parallel": True,
        "placement.cp_comm_type": ("a2a",),
    }
    assert given["placement.cp_comm_type"].origin == f"{path}: training.cp_comm_type"
    path = write(tmp_path, "training: {cp_comm_type: [ring]}")
    with pytest.raises(TrainError, match=r"training\.cp_comm_type needs one of p2p, a2a"):
        read_file(path, run_options())


@pytest.mark.parametrize("sections", [("training", "placement"), ("placement", "training")])
def test_a_setting_with_its_old_and_its_new_key_is_refused(sections, tmp_path):
    path = write(tmp_path, "".join(f"{name}: {{tp_comm_overlap: true}}\n" for name in sections))
    older, newer = (f"{name}.tp_comm_overlap" for name in sections)
    with pytest.raises(TrainError) as caught:
        read_file(path, run_options())
    assert str(caught.value) == (
        f"{path}: {newer} and {older} are the old and the new key of one setting; leave out one of "
        "them"
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--num-layer 3", "unknown argument --num-layer; did you mean --num-layers?"),
        ("--lr fast", "--lr needs a number, got 'fast'"),
        ("--lr-decay-style cosin", "did you mean cosine?"),
        ("--seed", "expected one argument"),
    ],
)
def test_errors_in_flags_are_usage_errors(flags, message):
    with pytest.raises(CommandError) as caught:
        parse(f"{MINIMAL} {flags}")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--global-batch-size 3",
            "--global-batch-size 3 is not a multiple of --micro-batch-size 2",
        ),
        (
            "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
            "needs a multiple of 4 ranks, but there is 1; start with --nproc-per-node 4",
        ),
        ("--num-experts 3 --expert-model-parallel-size 2", "needs a multiple of 2 ranks, but ther"),
        ("--expert-tensor-parallel-size 1", "--expert-tensor-parallel-size 1 needs --num-experts"),
        ("--moe-token-dispatcher-type alltoall", "alltoall needs --num-experts; give it or leave"),
        ("--overlap-moe-expert-parallel-comm", "comm needs --num-experts; give it or leave"),
        (
            "--num-experts 4 --overlap-moe-expert-parallel-comm",
            "parallel-size of at least 2: with 1",
        ),
        ("--moe-aux-loss-coeff 0.1", "--moe-aux-loss-coeff 0.1 has no effect without experts; set"),
        ("--num-experts 4 --moe-layer-freq [1]*9", "--moe-layer-freq: the pattern [1]*9 has 9"),
        ("--hidden-dropout 1", "--hidden-dropout must be in [0, 1), got 1.0"),
        ("--bf16 --float64", "exclude each other"),
        ("--train-data-path other", "exclude each other"),
        ("--lr-warmup-iters 3 --lr-warmup-fraction 0.1", "exclude each other"),
        ("--lr-warmup-fraction 1.5", "must be below 1, got 1.5"),
        ("--save-interval 5", "--save-interval needs --save"),
        ("--exit-on-missing-checkpoint", "needs --load"),
        ("--no-load-optim", "--no-load-optim needs --load"),
        ("--no-load-rng", "--no-load-rng needs a checkpoint: give --load"),
        ("--finetune", "--finetune needs a checkpoint: give --load or --pretrained-checkpoint"),
        ("--use-checkpoint-args --load nowhere", "--use-checkpoint-args: no checkpoint"),
        ("--test-data-path other", "--data-path, which --split divides, and --test-data-path"),
        (
            "--merge-file m",
            "--merge-file: the run has no tokenizer; give --tokenizer-model, --voca",
        ),
        ("--image-tag-type nvlm", "--image-tag-type: the run has no tokenizer"),
        (
            "--tokenizer-model t --tiktoken-num-special-tokens 0",
            "--tiktoken-num-special-tokens does not go with",
        ),
        ("--vocab-file v", "for BERT's vocab.txt give --tokenizer-type BertWordPieceLowerCase"),
        ("--tokenizer-type GPT2BPETokenizer", "GPT2BPETokenizer needs --vocab-file and --merge-f"),
        ("--tokenizer-model t --image-tag-type nvlm", "--image-tag-type does not go with"),
        ("--tokenizer-prompt-format chatml", "MultimodalTokenizer needs --tokenizer-model"),
        (
            "--tokenizer-type ByteTokenizer --tokenizer-model t",
            "--tokenizer-model does not go with",
        ),
        ("--eod-mask-loss", "--eod-mask-loss needs a tokenizer with an end-of-d"),
        ("--micro-batch-size 0", "--micro-batch-size must be positive, got 0"),
        ("--seed -1", "--seed must not be negative, got -1"),
    ],
)
def test_invalid_settings_are_refused(flags, message):
    with pytest.raises(TrainError) as caught:
        parse(f"{MINIMAL} {flags}")
    assert message in str(caught.value)


TP2 = f"{MINIMAL} --tensor-model-parallel-size 2"


def test_data_parallel_ranks_follow_from_the_number_of_ranks():
    run = parse(f"{TP2} --sequence-parallel", ranks=6)
    assert (run.layout.dp, run.global_batch_size, run.micro_batch_times_data_parallel_size) == (
        3,
        6,
        6,
    )
    run = parse(f"{TP2} --global-batch-size 24", ranks=6)
    assert (run.global_batch_size, run.micro_batch_times_data_parallel_size) == (24, 6)


IN_STEPS = f"{MINIMAL} --step-batch-size-schedule 0:2 160:8,320:4"


def test_a_stepped_batch_size_is_given_by_tokens_and_ends_at_its_last_size():
    run = parse(IN_STEPS)  # samples of 16 tokens: size 8 at sample 10, size 4 at sample 20
    assert run.batch_sizes.plateaus == ((0, 2), (10, 8), (20, 4))
    assert run.global_batch_size == 4 and run.train_iters == run.training.train_iters
    assert run.train_samples == run.consumed_samples == run.batch_sizes.consumed_by(run.train_iters)
    assert parse(f"{IN_STEPS} --global-batch-size 4") == dataclasses.replace(
        run, training=dataclasses.replace(run.training, global_batch_size=4)
    )


def test_samples_and_learning_rates_do_not_depend_on_rounding_of_the_batch_size():
    plain = parse(f"{MINIMAL} --global-batch-size 12", ranks=2)
    run = parse(f"{MINIMAL} --global-batch-size 12 --decrease-batch-size-if-needed", ranks=5)
    assert (run.batch_sizes.at(0), run.global_batch_size) == (10, 12)
    assert run.train_samples == plain.train_samples == 12 * run.train_iters
    assert run.consumed_samples == 10 * run.train_iters
    assert run.learning_rate_schedule() == plain.learning_rate_schedule()


def test_a_run_that_continues_counts_the_remaining_samples():
    run = parse(f"{IN_SAMPLES} --global-batch-size 6")
    samples = run.training.train_samples
    assert run.train_iters_after(100, samples - 13) == 102
    assert run.train_iters_after(100, samples + 5) == 100


CP2 = "--context-parallel-size 2"


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
            "--seq-length 12 with --context-parallel-size 2 leaves 6 tokens on a rank, which --seq",
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


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--fim-data", "--fim-data needs a tokenizer"),
        ("--fim-spm-rate 0.1", "--fim-spm-rate needs --fim-data; give both, or leave it out"),
        (
            "--tokenizer-model bytes --fim-data --fim-fragment-rate 1",
            "--fim-fragment-rate has no effect without --fim-split-sample",
        ),
    ],
)
def test_fill_in_the_middle_settings_without_effect_are_refused(flags, message):
    with pytest.raises(TrainError) as caught:
        parse(f"{MINIMAL} {flags}")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--no-reset-position-ids --no-reset-attention-mask",
            "--sft needs --reset-position-ids and --reset-attention-mask:",
        ),
        ("--no-reset-attention-mask", "--sft needs --reset-attention-mask:"),
        ("--eod-mask-loss", "--eod-mask-loss does not work with --sft"),
    ],
)
def test_sft_excludes_flags(flags, message):
    with pytest.raises(TrainError) as caught:
        parse(f"{MINIMAL} --sft --tokenizer-model bytes {flags}")
    assert message in str(caught.value)


def test_sft_implies_independent_conversations_and_names_the_missing_tokenizer():
    data = parse(f"{MINIMAL} --sft --tokenizer-type ByteTokenizer").data
    assert data.reset_position_ids and data.reset_attention_mask
    with pytest.raises(TrainError, match="--sft needs the tokenizer of the conversations"):
        parse(f"{MINIMAL} --sft")


@pytest.mark.parametrize(
    ("flags", "order"),
    [
        ("", "stateless"),
        ("--sft", "packed"),
        ("--sft --data-path talks.jsonl", "compat"),
        ("--sft --data-path 0.5 a_conversation 0.5 b.json", "compat"),
        ("--sft --sample-order stateless", "stateless"),
        ("--sft --data-path talks.jsonl --sample-order packed", "packed"),
    ],
)
def test_sft_keeps_conversations_whole_unless_a_sample_order_is_given(flags, order):
    tokenizer = "--tokenizer-type ByteTokenizer"
    assert parse(f"{MINIMAL} {tokenizer} {flags}").data.sample_order == order


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
IN_SAMPLES = MINIMAL.replace("--train-iters 10", "--train-samples 48")


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
        (f"{BY_LAYER} {PP4}", "--pipeline-model-parallel-size 4: several micro-batches"),
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


def test_a_pipeline_layout_sets_vpp_and_the_schedule_sets_the_stage_mapping():
    flags = f"{PP4} --pipeline-schedule zb-v --pipeline-model-parallel-layout E|t||||||tL"
    run = parse(f"{MINIMAL} {flags}", ranks=4)
    assert (run.layout.vpp, run.layout.stage_mapping) == (2, "v")
    assert [len(layers) for layers in run.layer_split] == [0, 1, 0, 0, 0, 0, 0, 1]
    with pytest.raises(TrainError, match="--pipeline-schedule gpipe needs a pipeline of at least"):
        parse(f"{MINIMAL} --pipeline-schedule gpipe")


UNFIT = [
    ("--hidden-size 9", "--hidden-size 9 is not a multiple of --num-attention-heads 2; "),
    ("--num-attention-heads 4 --num-query-groups 3", "4 is not a multiple of --num-query-groups 3"),
    ("--position-embedding-type rope --kv-channels 3", "--kv-channels 3 x --rotary-percent 1.0 "),
    ("--rotary-percent 2", "--rotary-percent must lie in (0, 1], not 2.0"),
    ("--num-layers 0", "--num-layers must be a positive number, not 0"),
    ("--lr-warmup-iters 10", "--lr-warmup-iters 10 must be below --train-iters 10, the"),
    ("--lr-warmup-iters 5 --lr-decay-iters 5", "5 must be below --lr-decay-iters 5, the"),
    ("--lr-decay-style WSD", "needs --lr-wsd-decay-iters, the length of its final phase in steps"),
    (
        "--lr-decay-style WSD --lr-wsd-decay-iters 9 --lr-warmup-iters 2",
        "--lr-wsd-decay-iters 9 does not fit between the end of the warm-up at 2 "
        "(--lr-warmup-iters) and the end of the decay at 10 (--train-iters)",
    ),
    ("--min-lr 1 --lr 0.1", "--min-lr 1.0 must lie between 0 and --lr 0.1; "),
    (
        "--lr 1 --min-lr 0.5 --decoupled-lr 0.1",
        "--min-lr 0.5 must lie between 0 and --decoupled-lr",
    ),
    ("--lr 1 --decoupled-lr 1 --decoupled-min-lr 2", "--decoupled-min-lr 2.0 must lie between 0 "),
    ("--decoupled-min-lr 0.1", "--decoupled-min-lr needs --decoupled-lr; set both or neither"),
    ("--lr-warmup-init 1 --lr 0.1", "--lr-warmup-init 1.0 must lie between 0 "),
    ("--end-weight-decay 0.1", "from --weight-decay 0.01 to --end-weight-decay 0.1; set --weight"),
    ("--start-weight-decay 1", "or decrease: --start-weight-decay 1.0, --weight-decay 0.01"),
    ("--adam-beta2 1", "--adam-beta2 must lie in [0, 1), got 1.0"),
    ("--tensor-model-parallel-size 0", "--tensor-model-parallel-size 0 is not a degree"),
    ("--num-virtual-stages-per-pipeline-rank 2", "but --pipeline-model-parallel-size 1"),
]


@pytest.mark.parametrize(("flags", "message"), UNFIT)
def test_errors_of_sections_name_flags_and_units(flags, message):
    with pytest.raises(TrainError) as caught:
        parse(f"{MINIMAL} {flags}")
    assert message in str(caught.value)
    fields = {o.name for o in run_options() if "_" in o.name} | {"warmup_samples", "decay_samples"}
    assert not fields & set(re.findall(r"\w+", str(caught.value)))


def test_errors_about_lengths_in_samples_name_samples():
    command = MINIMAL.replace("--train-iters 10", "--train-samples 20")
    with pytest.raises(TrainError, match="--lr-warmup-samples 20 must be below --train-samples 20"):
        parse(f"{command} --lr-warmup-samples 20")


def test_errors_about_settings_of_a_file_name_file_and_key(tmp_path):
    path = write(tmp_path, "model: {hidden_size: 96}\nlayout: {tp: 0}\n")
    rest = MINIMAL.replace("--hidden-size 8", "")
    with pytest.raises(TrainError) as caught:
        parse(f"{rest} --num-attention-heads 5", path)
    assert str(caught.value).startswith(
        f"{path}: model.hidden_size 96 is not a multiple of --num-attention-heads 5; "
    )
    with pytest.raises(TrainError, match=r"run\.yaml: layout\.tp 0 is not a degree"):
        parse(f"{rest} --num-attention-heads 6", path)


def test_schedule_lengths_are_samples():
    run = parse(
        f"{MINIMAL} --global-batch-size 8 --lr-warmup-fraction 0.25 --lr 1.0 --lr-decay-iters 20"
    )
    schedule = run.learning_rate_schedule()
    assert (schedule.warmup_samples, schedule.decay_samples) == (40, 160)
    assert schedule.at(40) == 1.0 and schedule.at(100) == pytest.approx(0.5)


SAMPLES = MINIMAL.replace("--train-iters 10", "--train-samples 85 --global-batch-size 8")


def test_the_length_of_a_run_may_be_given_in_samples():
    run = parse(f"{SAMPLES} --lr-warmup-samples 10 --lr-decay-samples 50 --lr 1.0")
    assert (run.train_iters, run.train_samples) == (10, 85)
    schedule = run.learning_rate_schedule()
    assert (schedule.warmup_samples, schedule.decay_samples) == (10, 50)
    assert schedule.at(30) == pytest.approx(0.5)
    run = parse(f"{SAMPLES} --lr-warmup-fraction 0.1")
    schedule = run.learning_rate_schedule()
    assert (schedule.warmup_samples, schedule.decay_samples) == (8, 85)
    annealing = "--lr-decay-style WSD --lr-wsd-decay-samples 30"
    assert parse(f"{SAMPLES} {annealing}").learning_rate_schedule().wsd_decay_samples == 30


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (f"{MINIMAL} --train-samples 9", "--train-iters and --train-samples exclude each other"),
        (f"{SAMPLES} --lr-decay-iters 9", "and --lr-decay-iters exclude each other; give --lr-de"),
        (f"{SAMPLES} --lr-warmup-iters 9", "--train-samples and --lr-warmup-iters exclude"),
        (f"{SAMPLES} --lr-wsd-decay-iters 9", "--train-samples and --lr-wsd-decay-iters exc"),
        (f"{MINIMAL} --lr-decay-samples 9", "--train-iters and --lr-decay-samples exclude each"),
        (f"{MINIMAL} --lr-warmup-samples 9", "give --lr-warmup-iters"),
        (f"{SAMPLES} --lr-warmup-samples 9 --lr-warmup-fraction 0.1", "exclude each other"),
        (f"{SAMPLES} --train-samples 7", "--train-samples 7 is less than one step of 8 samples"),
    ],
)
def test_lengths_in_steps_and_samples_exclude_each_other(command, message):
    with pytest.raises(TrainError) as caught:
        parse(command)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_flag_replaces_an_alternative_setting_of_the_file(tmp_path):
    text = "training: {bf16: true}\nschedule: {lr_warmup_fraction: 0.5}\n"
    run = parse(f"{MINIMAL} --float64 --lr-warmup-iters 2", write(tmp_path, text))
    assert run.training.float64 and not run.training.bf16
    assert run.learning_rate_schedule().warmup_samples == 4
    text = "training: {train_iters: 5}\ndata: {data_path: a}\n"
    flags = SAMPLES.replace("--data-path", "--train-data-path")
    run = parse(f"{flags} --eval-iters 0", write(tmp_path, text))
    assert run.train_iters == 10 and run.data.train_data_path == ("corpus",)


@pytest.mark.parametrize("tokenizer", ["NullTokenizer", "NullMultimodalTokenizer"])
def test_a_printed_configuration_reads_back_as_the_same_run(tmp_path, tokenizer):
    command = f"{MINIMAL} --tokenizer-type {tokenizer} --lr 1e-4 --split 9,1,0"
    parser = Parser()
    add_run_options(parser, run_options(), TITLES)
    namespace = parser.parse_args(command.split())
    namespace.config, namespace.recipe, namespace.kind = None, None, "gpt"
    run, values = resolve(namespace, 1)
    assert run.model.vocab_size == 101  # includes the end-of-document token
    printed = format_config(run, values)
    assert parse("", write(tmp_path, printed)) == run
    lines = {line.split(":")[0].strip(" #"): line for line in printed.splitlines()}
    for name, origin in {
        "lr": "--lr",
        "min_lr": "default",
        "max_position_embeddings": "--seq-length",
        "ffn_hidden_size": "derived",
        "load": "default",
    }.items():
        assert lines[name].endswith(f"# {origin}"), lines[name]
    assert {option.name for option in run_options("gpt", run.selected_extensions)} <= lines.keys()


def test_an_alias_sets_its_option():
    assert parse(f"{MINIMAL} --swiglu").model.activation == "swiglu"


def test_each_flag_sets_its_field():
    parser = Parser()
    options = run_options()
    add_options(parser, options, TITLES)
    for option in options:
        if option.kind == "switch":
            value, words = not option.default, [option.command_line(not option.default)]
        else:
            number = option.choices[-1] if option.choices else "3"
            value = option.coerce([number] if option.repeated else number, "")
            words = [option.flag, str(number)]
        given = given_flags(parser.parse_args(words), options)
        assert {key: g.value for key, g in given.given.items()} == {option.key: value}
        assert given.given[option.key].origin == words[0]


def test_no_two_options_share_a_flag():
    parser = Parser()
    add_run_options(parser, run_options(), TITLES)  # argparse refuses duplicate flags


def test_every_option_has_a_help_text():
    assert [option.key for option in run_options() if not option.help] == []


def test_sections_are_fields_of_the_run_or_its_tasks():
    fields = {field.name for field in dataclasses.fields(RunConfig)} - {"extension_settings"}
    extensions = {"fim", "adam"}
    assert fields == set(sections("gpt", SelectedExtensions("gpt", "adam", "plain"))) - extensions


def test_the_reference_page_is_up_to_date():
    page = ROOT / "docs" / "configuration.md"
    if not page.parent.exists():
        pytest.skip("the documentation is not available")
    assert page.read_text() == render_reference(), "run python tooling/generated_docs.py"
