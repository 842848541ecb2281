"""Limits and pairs of settings: what is refused, beside the nearest run that is accepted."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from megatron_models import ConfigError
from megatron_train.config.run import RunConfig
from megatron_train.errors import TrainError, UsageError

from .test_configuration import IN_SAMPLES, MINIMAL, SAMPLES, parse

CP2, TP2 = "--context-parallel-size 2", "--tensor-model-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"
BF16, COMPILE, FSDP = "--bf16", "--compile", "--use-torch-fsdp2"
A2A = "--moe-token-dispatcher-type alltoall"
EXPERTS = "--num-experts 4 --moe-layer-freq 1"
STEPPED = "--step-batch-size-schedule 0:2"
SFT = "--tokenizer-type ByteTokenizer"

# Flags that are accepted, flags that are refused, number of ranks, and the message.
PAIRS = [
    ("--seq-length 16", "--seq-length 17 --max-position-embeddings 16", 1, "--seq-length 17 exc"),
    ("--hidden-dropout 0", "--hidden-dropout -0.1", 1, "must be in [0, 1), got -0.1"),
    ("--attention-dropout 0.99", "--attention-dropout 1", 1, "--attention-dropout must be in"),
    ("--seed 0", "--seed -1", 1, "--seed must not be negative, got -1"),
    ("--train-iters 1", "--train-iters 0", 1, "--train-iters must be positive, got 0"),
    ("--exit-interval 1", "--exit-interval 0", 1, "--exit-interval must be positive, got 0"),
    ("--log-interval 1", "--log-interval 0", 1, "--log-interval must be positive, got 0"),
    ("--eval-interval 1", "--eval-interval 0", 1, "--eval-interval must be positive, got 0"),
    ("--eval-iters 0", "--eval-iters -1", 1, "--eval-iters must not be negative, got -1"),
    (
        "--exit-duration-in-mins 0.1",
        "--exit-duration-in-mins 0",
        1,
        "--exit-duration-in-mins must be positive",
    ),
    (
        "--distributed-timeout-minutes 0.5",
        "--distributed-timeout-minutes 0",
        1,
        "--distributed-timeout-minutes must be positive",
    ),
    ("--iterations-to-skip 1 10", "--iterations-to-skip 0", 1, "steps count from 1, got 0"),
    (
        "--iterations-to-skip 10",
        "--iterations-to-skip 1 11",
        1,
        "--iterations-to-skip 11 is beyond the last step 10; leave it out",
    ),
    ("--lr-warmup-iters 9", "--lr-warmup-iters 10", 1, "10 must be below --train-iters 10"),
    ("--lr-warmup-iters 0", "--lr-warmup-iters -1", 1, "must not be negative"),
    ("--lr-decay-iters 1", "--lr-decay-iters 0", 1, "--lr-decay-iters must be positive"),
    (
        "--lr-warmup-iters 4 --lr-decay-iters 5",
        "--lr-warmup-iters 5 --lr-decay-iters 5",
        1,
        "--lr-warmup-iters 5 must be below --lr-decay-iters 5",
    ),
    ("--lr-warmup-fraction 0.99", "--lr-warmup-fraction 1", 1, "must be below 1, got 1.0"),
    ("--lr-warmup-fraction 0", "--lr-warmup-fraction -0.1", 1, "must not be negative"),
    (
        "--lr-decay-style WSD --lr-wsd-decay-iters 8 --lr-warmup-iters 2",
        "--lr-decay-style WSD --lr-wsd-decay-iters 9 --lr-warmup-iters 2",
        1,
        "--lr-wsd-decay-iters 9 does not fit between the end of the warm-up at 2",
    ),
    (
        "--lr-decay-style WSD --lr-wsd-decay-iters 5 --lr-warmup-fraction 0.5",
        "--lr-decay-style WSD --lr-wsd-decay-iters 6 --lr-warmup-fraction 0.5",
        1,
        "does not fit between the end of the warm-up at 5 (--lr-warmup-fraction) and the end of",
    ),
    ("--bf16", "--bf16 --fp16", 1, "--bf16 and --fp16 exclude each other; give one"),
    ("--float64", "--fp16 --float64", 1, "--fp16 and --float64 exclude each other; give one"),
    (STEPPED, f"{STEPPED} --global-batch-size 4", 1, "4 is not 2, the last batch size of"),
    (
        STEPPED,
        f"{STEPPED} --decrease-batch-size-if-needed",
        1,
        "--step-batch-size-schedule and --decrease-batch-size-if-needed exclude each other",
    ),
    # layouts
    (
        f"{CP2} --broadcast-batches",
        "--broadcast-batches",
        2,
        "--broadcast-batches needs several ranks per model replica",
    ),
    (
        "--pipeline-model-parallel-size 2 --broadcast-batches",
        "--broadcast-batches",
        2,
        "--broadcast-batches needs several ranks per model replica",
    ),
    (f"{CP2} {PP2} --broadcast-batches", "--broadcast-batches", (4, 1), "needs several ranks per"),
    (f"{CP2} --seq-length 12", f"{CP2} --seq-length 10", 2, "2 x 2 equal slices for --context"),
    (
        f"{TP2} --sequence-parallel --seq-length 14",
        f"{TP2} --sequence-parallel --seq-length 15",
        2,
        "--seq-length 15 cannot be split into 2 equal slices for --sequence-parallel",
    ),
    (
        f"{CP2} --cp-comm-type p2p a2a",
        f"{CP2} --cp-comm-type p2p a2a p2p",
        2,
        "--cp-comm-type has 3 values for --num-layers 2",
    ),
    (
        f"{CP2} --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 1",
        f"{CP2} --cp-comm-type a2a+p2p",
        2,
        "a2a+p2p needs --hierarchical-context-parallel-sizes",
    ),
    (
        "--context-parallel-size 4 --seq-length 16 --cp-comm-type a2a+p2p "
        "--hierarchical-context-parallel-sizes 2 2",
        "--context-parallel-size 4 --seq-length 16 --cp-comm-type a2a",
        4,
        "--cp-comm-type a2a cannot scatter --num-attention-heads 2 / --tensor-model-parallel-size "
        "1 = 2 heads over 4 ranks",
    ),
    (
        f"{CP2} --context-parallel-split per_document {SFT} --reset-attention-mask",
        f"{CP2} --context-parallel-split per_document",
        2,
        "--context-parallel-split per_document needs --reset-attention-mask",
    ),
    (f"{CP2} {TP2} --broadcast-batches", "--broadcast-batches", (4, 1), "needs several ranks per"),
    (
        f"{CP2} {TP2}",
        f"{CP2} {TP2} --cp-comm-type a2a",
        4,
        "--tensor-model-parallel-size 2 = 1 heads over 2 ranks; use p2p or allgather",
    ),
    (
        f"{CP2} {TP2} --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 1 2",
        f"{CP2} {TP2} --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 1",
        4,
        "--cp-comm-type a2a+p2p cannot scatter --num-attention-heads 2",
    ),
    # experts
    (EXPERTS, A2A, 1, "--moe-token-dispatcher-type alltoall needs --num-experts; give it or leave"),
    (
        f"{EXPERTS} --expert-model-parallel-size 2",
        "--expert-model-parallel-size 2",
        2,
        "--expert-model-parallel-size 2 needs --num-experts",
    ),
    (
        f"{EXPERTS} --moe-per-layer-logging",
        "--moe-per-layer-logging",
        1,
        "--moe-per-layer-logging has no effect without experts; leave it out or set --num-experts",
    ),
    # precision and gradients
    (
        f"{BF16} --no-accumulate-allreduce-grads-in-fp32",
        "--no-accumulate-allreduce-grads-in-fp32",
        1,
        "--no-accumulate-allreduce-grads-in-fp32 (--grad-reduce-in-bf16) needs --bf16 or --fp16",
    ),
    (
        "--fp16 --no-accumulate-allreduce-grads-in-fp32",
        "--float64 --no-accumulate-allreduce-grads-in-fp32",
        1,
        "needs --bf16 or --fp16; give both or leave it out",
    ),
    (
        f"{BF16} --grad-reduce-in-bf16 --ddp-reduce-scatter-with-fp32-accumulation",
        "--fp16 --grad-reduce-in-bf16 --ddp-reduce-scatter-with-fp32-accumulation",
        1,
        "--ddp-reduce-scatter-with-fp32-accumulation sends gradients in bf16, so it needs --bf16",
    ),
    (
        f"{BF16} --use-precision-aware-optimizer --main-params-dtype bf16",
        "--fp16 --use-precision-aware-optimizer --main-params-dtype bf16",
        1,
        "--main-params-dtype bf16 is for weights in bfloat16, but they are in float16; use bf16",
    ),
    ("--fp16 --initial-loss-scale 8", "--bf16 --initial-loss-scale 8", 1, "no effect without --fp"),
    (
        f"{FSDP} {PP2} --pipeline-schedule 1f1b",
        f"{FSDP} {PP2} --pipeline-schedule zero-bubble",
        4,
        "--use-torch-fsdp2 does not work with --pipeline-schedule zero-bubble, which splits",
    ),
    (
        f"{BF16} --linear-product lora",
        f"{BF16} --linear-product lora --fp8-format hybrid --fp8-recipe tensorwise",
        1,
        "--fp8-format and --linear-product lora are both products of linear layers; leave out one",
    ),
    (
        f"{FSDP} {CP2}",
        f"{FSDP} {CP2} --num-distributed-optimizer-instances 2",
        2,
        "--use-torch-fsdp2 needs at least 2 data parallel ranks in an optimizer instance",
    ),
    (FSDP, FSDP, (2, 1), "--use-torch-fsdp2 needs at least 2 data parallel ranks in an optimizer"),
    (
        f"{BF16} --fp8-format hybrid --fp8-recipe tensorwise",
        f"{BF16} --fp8-format hybrid --fp8-recipe tensorwise --batch-invariant-mode",
        1,
        "--fp8-format does not work with --batch-invariant-mode, since scales depend on all rows",
    ),
    (
        "--optimizer-cpu-offload",
        "--optimizer-cpu-offload --ema-decay 0.9",
        1,
        "--ema-decay does not work with --optimizer-cpu-offload, since averages are on the device",
    ),
    (
        f"{BF16} {COMPILE} --fp8-format hybrid --fp8-recipe tensorwise",
        f"{BF16} {COMPILE} --fp4-format e2m1",
        1,
        "--compile does not work with --fp4-format, whose random rounding ends its graphs",
    ),
    (
        f"{BF16} --fp4-format e2m1",
        f"{BF16} --fp4-format e2m1 --batch-invariant-mode",
        1,
        "--fp4-format does not work with --batch-invariant-mode",
    ),
    # compiled code
    (
        "--mtp-num-layers 1",
        f"{COMPILE} --mtp-num-layers 1",
        1,
        "--compile does not work with --mtp-num-layers",
    ),
    (
        f"{COMPILE} --compile-scope layer",
        "--compile-scope layer",
        1,
        "--compile-scope layer has no effect without --compile",
    ),
    (
        f"{COMPILE} --compile-scope layer {FSDP}",
        f"{COMPILE} {FSDP}",
        2,
        "--compile does not work with --use-torch-fsdp2: a compiled stage cannot wait",
    ),
    (
        "--batch-invariant-mode",
        f"{COMPILE} --batch-invariant-mode",
        1,
        "--batch-invariant-mode does not work with --compile, which orders sums by shape",
    ),
    (
        f"{COMPILE} --cross-entropy-fusion-impl te",
        f"{COMPILE} --cross-entropy-fusion-impl linear-recompute",
        1,
        "--cross-entropy-fusion-impl linear-recompute does not work with --compile",
    ),
    (
        "--recompute-granularity selective --recompute-modules layernorm",
        f"{COMPILE} --recompute-granularity selective --recompute-modules layernorm",
        1,
        "--recompute-modules has no effect on compiled code (--compile), for which the compiler",
    ),
    (
        f"{COMPILE} --compile-scope layer --cuda-graph-impl local --cuda-graph-warmup-steps 1",
        f"{COMPILE} --compile-scope layer --cuda-graph-impl local --cuda-graph-warmup-steps 0",
        1,
        "--cuda-graph-warmup-steps 0 is less than 1",
    ),
    # kernels
    (
        "--attention-backend flash --flash-attention-version 3",
        "--flash-attention-version 3",
        1,
        "--flash-attention-version 3 has no effect without --attention-backend flash",
    ),
    (
        "--kernel-backends attention=torch",
        "--kernel-backends attention=torch --attention-backend unfused",
        1,
        "--kernel-backends attention=torch and --attention-backend unfused choose the same",
    ),
    (
        "--kernel-backends attention=torch",
        "--kernel-backends attention=torch attention=tiles",
        1,
        "--kernel-backends names attention twice; give it once",
    ),
    *(
        ("", f"--kernel-backends {wrong}", 1, f"--kernel-backends '{wrong}' is not OP=BACKEND")
        for wrong in ("attention", "attention=", "=torch")
    ),
    (
        f"{CP2} --kernel-backends attention_forward=torch",
        "--kernel-backends attention_forward=torch",
        (2, 1),
        "--kernel-backends attention_forward has no effect with --context-parallel-size 1",
    ),
]


@pytest.mark.parametrize(("accepted", "refused", "ranks", "message"), PAIRS)
def test_a_setting_is_refused_just_beyond_what_is_accepted(accepted, refused, ranks, message):
    for_one, for_other = ranks if isinstance(ranks, tuple) else (ranks, ranks)
    assert parse(f"{MINIMAL} {accepted}", ranks=for_one)
    with pytest.raises((TrainError, ConfigError)) as caught:
        parse(f"{MINIMAL} {refused}", ranks=for_other)
    assert message in str(caught.value) and "\n" not in str(caught.value)


CHECKPOINT = [
    ("--save s --save-interval 1", "--save-interval 1", "--save-interval needs --save, the folder"),
    ("--save s --keep-last 1", "--keep-last 1", "--keep-last needs --save, the folder"),
    ("--save s --keep-last 1", "--save s --keep-last 0", "--keep-last must be positive, got 0"),
    *(
        (f"--load l {flag}", f"--save s {flag}", f"{flag} needs --load, the folder of checkpoints")
        for flag in (
            "--exit-on-missing-checkpoint",
            "--no-load-optim",
            "--use-checkpoint-opt-param-scheduler",
            "--override-opt-param-scheduler",
        )
    ),
    *(
        (f"{place} {flag}", flag, "needs a checkpoint: give --load or --pretrained-checkpoint")
        for place in ("--load l", "--pretrained-checkpoint p")
        for flag in ("--finetune", "--no-load-rng", "--allow-changed-run data")
    ),
    (
        "--load l --extend-schedule decay",
        "--load l --extend-schedule decay --override-opt-param-scheduler",
        "--override-opt-param-scheduler and --extend-schedule choose different schedules; give one",
    ),
    (
        "--load l --finetune",
        "--load l --finetune --extend-schedule plateau",
        "--extend-schedule has no effect with --finetune, which begins a new run",
    ),
]


@pytest.mark.parametrize(("accepted", "refused", "message"), CHECKPOINT)
def test_settings_of_checkpoints_need_their_folder(accepted, refused, message):
    assert parse(f"{MINIMAL} {accepted}")
    with pytest.raises(TrainError) as caught:
        parse(f"{MINIMAL} {refused}")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "choice"),
    [
        ("", "unchanged"),
        ("--use-checkpoint-opt-param-scheduler", "checkpoint"),
        ("--override-opt-param-scheduler", "override"),
        ("--extend-schedule plateau", "plateau"),
        ("--extend-schedule decay", "decay"),
    ],
)
def test_a_run_continues_with_the_schedule_that_is_chosen(flags, choice):
    assert parse(f"{MINIMAL} --load l {flags}").checkpoint.schedule_choice == choice


def test_a_ramp_needs_its_final_size_and_a_length_in_samples():
    ramp = "--rampup-batch-size 2 2 24"
    assert parse(f"{IN_SAMPLES} {ramp} --global-batch-size 6").batch_sizes.sizes == (2, 4, 6)
    for command, message in (
        (f"{IN_SAMPLES} {ramp}", "--rampup-batch-size needs --global-batch-size, its final size"),
        (f"{MINIMAL} {ramp} --global-batch-size 6", "give --train-samples instead of --train-it"),
        (f"{IN_SAMPLES} {ramp} {STEPPED} --global-batch-size 2", "exclude each other; give one"),
    ):
        with pytest.raises(TrainError) as caught:
            parse(command)
        assert message in str(caught.value)


def test_an_evaluation_needs_data_and_test_data_an_evaluation():
    plain = MINIMAL.replace("--data-path corpus", "")
    train, valid, test = (f"--{name}-data-path {name}" for name in ("train", "valid", "test"))
    for flags in (f"{train} {valid} {test}", f"{train} --eval-iters 0", "--mock-data"):
        assert parse(f"{plain} {flags}")
    assert parse(MINIMAL).evaluation.eval_iters > 0  # on a share of the corpus
    for flags, message in (
        (train, "no validation data: give --valid-data-path, or --eval-iters 0 to skip"),
        (f"{train} {test}", "no validation data"),
        (f"{train} {test} --eval-iters 0", "--test-data-path has no effect with --eval-iters 0"),
    ):
        with pytest.raises(TrainError) as caught:
            parse(f"{plain} {flags}")
        assert message in str(caught.value)


@pytest.mark.parametrize(
    ("length", "longest", "message"),
    [
        (10, 10, ""),
        (8, 8, ""),
        (11, 10, "--seq-length 11 exceeds --max-position-embeddings 10; lower the first"),
        (9, 8, "--seq-length 9 exceeds --max-position-embeddings 10 without the first 2; lower"),
    ],
)
def test_a_sample_has_at_most_the_positions_that_the_model_uses(length, longest, message):
    embedding = SimpleNamespace(max_position_embeddings=10)
    model = SimpleNamespace(embedding=embedding, longest_sequence=longest)
    run = SimpleNamespace(model=model, data=SimpleNamespace(seq_length=length))
    refused = pytest.raises(TrainError, match=f"^{message}") if message else nullcontext()
    with refused:
        RunConfig._check_length(run)


def test_a_tokenizer_without_files_needs_the_size_of_the_vocabulary():
    flags = MINIMAL.replace("--vocab-size 100", "--tokenizer-type NullTokenizer")
    with pytest.raises(UsageError, match=r"^--tokenizer-type NullTokenizer needs --vocab-size$"):
        parse(flags)
    assert parse(f"{flags} --vocab-size 100").model.vocab_size == 101


def test_lengths_in_samples_have_limits_of_their_own():
    assert parse(f"{SAMPLES} --lr-warmup-samples 84").schedule.lr_warmup_samples == 84
    assert parse(f"{SAMPLES} --train-samples 8").train_iters == 1
    for flags, message in (
        ("--lr-warmup-samples 85", "--lr-warmup-samples 85 must be below --train-samples 85"),
        ("--train-samples 7", "--train-samples 7 is less than one step of 8 samples"),
        ("--lr-decay-samples 0", "--lr-decay-samples must be positive, got 0"),
        ("--lr-decay-style WSD", "the length of its final phase in samples"),
    ):
        with pytest.raises(TrainError) as caught:
            parse(f"{SAMPLES} {flags}")
        assert message in str(caught.value)
