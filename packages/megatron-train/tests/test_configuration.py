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
SAMPLES = MINIMAL.replace("--train-iters 10", "--train-samples 85 --global-batch-size 8")
IN_SAMPLES = MINIMAL.replace("--train-iters 10", "--train-samples 48")


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


CP2 = "--context-parallel-size 2"


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
