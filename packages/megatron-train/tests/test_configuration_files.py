"""Files of settings: their limits and mistakes; and which settings replace others."""

import pytest
from megatron_train.config.files import (
    file_description,
    file_kind,
    parse_settings,
    read_file,
    to_yaml,
)
from megatron_train.config.renamed_keys import RENAMED_KEYS
from megatron_train.config.run_sections import run_options
from megatron_train.config.values import GivenValue, Values
from megatron_train.errors import SettingsError, TrainError

OPTIONS = run_options()
MIB = 1 << 20


def read(text, kind=None):
    return parse_settings(text, "a.yaml", OPTIONS, kind)


def refusal(text, kind=None):
    """Returns the only or the joined message of a refused file."""
    with pytest.raises(TrainError) as caught:
        read(text, kind)
    return str(caught.value)


def test_a_file_may_have_a_mebibyte(tmp_path):
    path = tmp_path / "a.yaml"
    text = "training: {seed: 3}\n#"
    path.write_text(text + "x" * (MIB - len(text)))
    assert read_file(path, OPTIONS).get("training.seed") == 3
    path.write_text(text + "x" * (MIB - len(text) + 1))
    with pytest.raises(TrainError, match=f"a.yaml is larger than {MIB} bytes, the maximum for"):
        read_file(path, OPTIONS)
    path.write_bytes(b"\xff")
    with pytest.raises(TrainError, match=r"a.yaml is not YAML: 'utf-8' codec can't decode"):
        read_file(path, OPTIONS)


def test_a_file_has_at_most_20_levels_of_nesting():
    """A file is a level, and so is each list in it."""
    assert "must contain `key: value` lines" in refusal(f"model: {'[' * 19}{']' * 19}")
    assert "more than 20 levels of nesting" in refusal(f"model: {'[' * 20}{']' * 20}")
    siblings = ", ".join("[[x]]" for _ in range(50))
    assert "must contain `key: value` lines" in refusal(f"model: [{siblings}]")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", "a.yaml is not YAML: line 3: the key 'a' is given twice"),
        ("model:\n  x: 1\n  x: 2", "a.yaml is not YAML: line 3: the key 'x' is given twice"),
        ("- 1", "a.yaml must contain sections such as `model:`, got list"),
        ("text", "a.yaml must contain sections such as `model:`, got str"),
        ("model: 3", "a.yaml: section 'model' must contain `key: value` lines, got 3"),
        ("modle: {}", "a.yaml: unknown section 'modle'; did you mean model? (known: model, "),
        ("seed: 3", "a.yaml: unknown section 'seed'; did you mean training.seed? (known: "),
        ("micro-batch-size: 3", "unknown section 'micro-batch-size'; did you mean training.micro_"),
        ("no_mmap_bin_files: 3", "'no_mmap_bin_files'; did you mean data.mmap_bin_files?"),
        ("training: {sead: 1}", "a.yaml: unknown key training.sead; did you mean training.seed?"),
        ("training: {lr: 1}", "unknown key training.lr; did you mean optimizer.lr?"),
        ("training: {micro-batch-size: 1}", "batch-size; did you mean training.micro_batch_size?"),
        ("training: {qqqqqqqqqqqq: 1}", "a.yaml: unknown key training.qqqqqqqqqqqq"),
        ("training: {seed: one}", "a.yaml: training.seed needs an integer, got 'one'"),
        ("model: [", "a.yaml is not YAML: "),
    ],
)
def test_a_mistake_in_a_file_is_named(text, message):
    found = refusal(text)
    assert message in found and "\n" not in found and len(found) < 1000
    if message.endswith("qqq"):
        assert "did you mean" not in found


def test_a_long_reason_is_cut():
    found = refusal(f"model: &{'x' * 3000} 1\nb: *{'y' * 3000}")
    assert len(found) == 400 + len("a.yaml is not YAML: ")


def test_all_mistakes_of_a_file_are_reported():
    with pytest.raises(SettingsError) as caught:
        read("training: {sead: 1, seed: one}\nmodle: {}\nmodel: {num_layers: x, hidden_size: 4}")
    assert [line.partition(";")[0][:40] for line in caught.value.lines] == [
        "a.yaml: unknown key training.sead",
        "a.yaml: training.seed needs an integer, ",
        "a.yaml: unknown section 'modle'",
        "a.yaml: model.num_layers needs an intege",
    ]


def test_empty_files_and_sections_have_no_settings():
    for text in ("", "# nothing", "training:", "training: {}", "about: x\nkind: gpt"):
        assert read(text).given == {}


def test_a_file_is_for_one_kind_of_model():
    text = "about: |\n  a  b\n  c\nkind: bert\n"
    assert (file_description(text), file_kind(text)) == ("a b c", "bert")
    assert (file_description(""), file_kind("")) == ("", None)
    assert read(text, "bert").given == read(text).given == {}
    assert refusal(text, "gpt") == (
        "a.yaml is for models of kind bert, not gpt; give another, or use megatron-train pretrain "
        "bert"
    )


@pytest.mark.parametrize("old", RENAMED_KEYS)
def test_a_renamed_key_excludes_the_new_one(old):
    new = RENAMED_KEYS[old]
    option = next(option for option in OPTIONS if option.key == new)
    value = {"integer": 1, "number": 1.0, "switch": True}.get(option.kind, "x")
    value = option.choices[0] if option.choices else value
    lines = {key: f"{key.split('.')[1]}: {value}" for key in (old, new)}
    found = read(f"{old.split('.')[0]}:\n  {lines[old]}\n").given
    assert list(found) == [new] and found[new].origin == f"a.yaml: {old}"
    if old.split(".")[0] != new.split(".")[0]:
        both = "".join(f"{key.split('.')[0]}:\n  {line}\n" for key, line in lines.items())
        assert f"a.yaml: {new} and {old} are the old and the new key of one setting" in refusal(
            both
        )


def test_settings_are_written_without_empty_sections_and_tuples():
    text = to_yaml({"training": {"seed": 1}, "model": {}, "data": {"data_path": ("a", "é")}})
    assert text == "training:\n  seed: 1\ndata:\n  data_path:\n  - a\n  - é\n"
    assert read(text).get("data.data_path") == ("a", "é")


EXCLUDING = [
    ("training.train_iters", "training.train_samples"),
    ("training.bf16", "training.fp16"),
    ("training.bf16", "training.float64"),
    ("training.fp16", "training.float64"),
    ("schedule.lr_warmup_iters", "schedule.lr_warmup_samples"),
    ("schedule.lr_warmup_iters", "schedule.lr_warmup_fraction"),
    ("schedule.lr_warmup_samples", "schedule.lr_warmup_fraction"),
    ("data.data_path", "data.train_data_path"),
    ("data.data_path", "data.valid_data_path"),
    ("data.data_path", "data.test_data_path"),
    ("data.data_path", "data.mock_data"),
    ("data.mock_data", "data.train_data_path"),
    ("data.tokenizer_model", "data.vocab_file"),
    ("data.tokenizer_model", "data.merge_file"),
]
TOGETHER = [
    ("data.train_data_path", "data.valid_data_path"),
    ("data.vocab_file", "data.merge_file"),
    ("training.train_iters", "training.bf16"),
    ("training.seed", "training.train_iters"),
]


@pytest.mark.parametrize(("one", "other"), EXCLUDING + TOGETHER)
def test_a_flag_replaces_what_it_excludes_in_a_file(one, other):
    for first, second in ((one, other), (other, one)):
        values = [Values({key: GivenValue(1, "x")}) for key in (first, second)]
        kept = {second} if (one, other) in EXCLUDING else {first, second}
        assert values[0].updated(values[1]).given.keys() == kept


def test_a_derived_value_never_replaces_a_given_one():
    values = Values({"a.b": GivenValue(1, "--b")})
    assert values.with_derived("a.b", 2, "x").given == values.given
    assert values.with_derived("a.c", 2, "x").given["a.c"] == GivenValue(2, "x")
    assert (values.get("a.b"), values.get("a.c")) == (1, None)
    assert Values({"ab.c": GivenValue(1, "x"), "a.c": GivenValue(2, "x")}).section("a") == {"c": 2}
