"""Damaged or forged files are read or refused in one line, in bounded time and memory."""

import json

import pytest
import torch
from fuzzing import fuzz, mutate_bytes, mutate_json
from megatron_ckpt import CheckpointStore, SingleProcessCoordinator
from megatron_optim import SpikeConfig, SpikeDetector
from megatron_train import checkpointing
from megatron_train.callbacks.log_line import LogLine
from megatron_train.callbacks.recording import Recorder
from megatron_train.callbacks.stopping import StopAt
from megatron_train.checkpointing import restore
from megatron_train.config.files import parse_settings, read_file
from megatron_train.config.recipes import recipe_kind, recipe_names, recipe_text
from megatron_train.config.run_sections import run_options
from megatron_train.errors import TrainError
from megatron_train.metrics.console import Console
from megatron_train.metrics.records import read_records
from megatron_train.report.page import write_report
from megatron_train.saving import Saver

OPTIONS = run_options()
CPU = torch.device("cpu")
CONFIG = """\
about: a small model
model: {num_layers: 2, hidden_size: 16, num_attention_heads: &heads 2, num_query_groups: *heads}
data:
  seq_length: 16
  data_path: ["0.3", a, "0.7", b]
training: {micro_batch_size: 2, train_iters: 10, bf16: true}
optimizer: {lr: 1e-3}
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: " + "[" * 5_000, "more than 20 levels of nesting"),
        ("{" * 5_000, "more than 20 levels of nesting"),
        ("model: {num_layers: 2, num_layers: 3}", "the key 'num_layers' is given twice"),
        ("model: {num_layers: 2}\nmodel: {hidden_size: 2}", "the key 'model' is given twice"),
        ("training: {seed: 0x" + "f" * 5_000 + "}", "got an integer of thousands of digits"),
        ("training: {seed: " + "9" * 5_000 + "}", "is not YAML: "),
        ("training: {seed: 9223372036854775808}", "training.seed needs an integer"),
        ("training: {seed: 2026-13-45}", "is not YAML: month must be in 1..12"),
        ('checkpoint: {save: "a\\0b"}', "checkpoint.save needs text, got 'a\\x00b'"),
        ('checkpoint: {save: "\\ud800"}', "checkpoint.save needs text, got '\\ud800'"),
        ("x" * 100_000 + ": 1", "is not YAML"),
        ("? " + "x" * 100_000 + "\n: 1", "unknown section 'xxx"),
    ],
)
def test_yaml_without_settings_is_refused_in_one_line(text, message):
    with pytest.raises(TrainError) as refused:
        parse_settings(text, "run.yaml", OPTIONS)
    line = str(refused.value)
    assert line.startswith("run.yaml") and message in line
    assert len(line) < 1_000 and "\n" not in line


def test_a_bomb_of_aliases_is_refused_by_a_short_line():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    bomb = "about:\n" + "".join(f"  {line}\n" for line in lines)
    with pytest.raises(TrainError, match=r"training\.seed needs an integer, got ") as refused:
        parse_settings(f"{bomb}training: {{seed: *a11}}", "run.yaml", OPTIONS)
    assert len(str(refused.value)) < 1_000


def test_a_file_that_is_too_large_for_settings_is_not_parsed(tmp_path):
    (tmp_path / "run.yaml").write_bytes(b"#" * (2 << 20))
    with pytest.raises(TrainError, match="is larger than 1048576 bytes"):
        read_file(tmp_path / "run.yaml", OPTIONS)


def test_recipes_have_no_key_twice():
    for name in recipe_names():
        assert parse_settings(recipe_text(name), name, run_options(recipe_kind(name))).given


def test_fuzzed_settings_are_read_or_refused(tmp_path, fuzz_count):
    path = tmp_path / "run.yaml"

    def read(content: bytes) -> None:
        path.write_bytes(content)
        read_file(path, OPTIONS)

    fuzz(read, [CONFIG.encode()], TrainError, count=fuzz_count, mutate=mutate_bytes)


START = {"kind": "event", "event": "start", "iteration": 0, "torch": "2.13.0", "layout": "1 rank"}
STEP = {
    "kind": "train",
    "iteration": 1,
    "consumed_samples": 4,
    "lm loss": 4.5,
    "learning_rate": 1e-3,
    "grad_norm": None,
    "updated": True,
    "seconds": 0.5,
    "tokens": 100,
}
RECORDS = [
    START,
    STEP,
    {**STEP, "iteration": 2, "lm loss": 4.25},
    {"kind": "log", "iteration": 2, "lm loss": 4.375},
    {"kind": "validation", "iteration": 2, "lm loss": 4.5},
    {"kind": "event", "event": "test", "iteration": 2, "lm loss": 4.5},
    {"kind": "event", "event": "end", "iteration": 2, "reason": "done"},
]


@pytest.mark.parametrize(
    "line",
    [
        "[" * 100_000,
        "[1, 2]",
        '{"kind": ["train"], "iteration": 1}',
        '{"kind": "train", "iteration": "1"}',
        '{"kind": "train", "iteration": true}',
        '{"kind": "train", "iteration": 1, "lm loss": "low"}',
        '{"kind": "train", "iteration": 1, "lm loss": NaN}',
        '{"kind": "train", "iteration": 1, "lm loss": 1e999}',
        '{"kind": "train", "iteration": 1' + "0" * 4_000 + "}",
        '{"kind": "train", "iteration": -1}',
        '{"kind": "train", "iteration": 9223372036854775808}',
        '{"kind": "train", "iteration": 1, "lm loss": -1.1e100}',
        '{"kind": "event", "event": "start", "iteration": 1, "layout": [1]}',
        '{"kind": "event", "iteration": 1}',
        '{"kind": "event", "iteration": 1, "event": {}}',
        "\udcff\udcfe",
    ],
)
def test_an_invalid_line_is_named(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(f"{json.dumps(STEP)}\n{line}\n".encode(errors="surrogateescape"))
    with pytest.raises(TrainError, match=r"metrics.jsonl, line 2: not a metrics record") as refused:
        read_records(path)
    assert len(str(refused.value)) < 1_000


def test_the_largest_numbers_of_records_are_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    ends = {"kind": "train", "iteration": 2**63 - 1, "lm loss": 1e100, "grad_norm": -1e100}
    path.write_text(json.dumps({**ends, "iteration": 0}) + "\n" + json.dumps(ends) + "\n")
    assert read_records(path).train == [{**ends, "iteration": 0}, ends]


def test_a_report_shows_the_existing_fields(tmp_path):
    """Checks that a page is written without the fields that older versions did not record."""
    bare = {"kind": "train", "iteration": 1, "lm loss": 4.5}
    end = {"kind": "event", "event": "end", "iteration": 1}
    lines = [bare, {**bare, "iteration": 2, "seconds": 0, "tokens": 3}, end]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    (tmp_path / "config.yaml").write_bytes(b"model: \xff\xfe")
    write_report(tmp_path, tmp_path / "page.html")
    assert "lm loss of step 2 alone" in (tmp_path / "page.html").read_text()


def test_fuzzed_metrics_make_a_page_or_are_refused(tmp_path, fuzz_count):
    path = tmp_path / "metrics.jsonl"

    def read(content: bytes) -> None:
        path.write_bytes(content)
        write_report(tmp_path, tmp_path / "page.html")

    def damage_line(rng, content: bytes) -> bytes:
        lines = content.split(b"\n")
        number = rng.randrange(len(lines) - 1)
        lines[number] = mutate_json(rng, lines[number])
        return b"\n".join(lines)

    whole = "".join(json.dumps(record) + "\n" for record in RECORDS).encode()
    fuzz(read, [whole], TrainError, count=fuzz_count, mutate=mutate_bytes)
    fuzz(read, [whole], TrainError, count=fuzz_count, mutate=damage_line)


def test_a_damaged_state_is_refused_in_one_line(make_trainer):
    def made():
        return make_trainer(callbacks=[LogLine(Console(silent=True), 100, peak=None)])

    trainer = made()
    trainer.callbacks.append(StopAt(2, None))
    trainer.run()
    state = trainer.state()
    made().load_state(state)
    for name in state.keys() - {"schedules"}:  # read on request
        with pytest.raises(TrainError, match=f"the saved state is damaged: it has no '{name}'"):
            made().load_state({key: state[key] for key in state if key != name})
    for wrong in (None, -1, 1.5, True, "3", [1], 2**63):
        with pytest.raises(TrainError, match="the saved state is damaged: 'iteration' is "):
            made().load_state({**state, "iteration": wrong})
    with pytest.raises(TrainError, match="the saved state is damaged: 3 holds no 'sums'"):
        made().load_state({**state, "callbacks": {"log_line": 3}})
    saved = state["callbacks"]["log_line"]
    for wrong in (None, [1], ["x"], [[1.0]]):
        counts = {**saved, "counts": {"layer": [1.0], "load": wrong}}
        with pytest.raises(TrainError, match="is damaged: the counts of 'load' are "):
            made().load_state({**state, "callbacks": {"log_line": counts}})


@pytest.mark.parametrize(
    "wrong",
    [
        3,
        {"means": [1.0]},
        {"updates": 3},
        {"means": [1.0, "2"], "updates": 3},
        {"means": 1.0, "updates": 3},
        {"means": [1.0], "updates": -1},
    ],
)
def test_a_damaged_state_of_spikes_is_refused_in_one_line(make_trainer, wrong):
    trainer = make_trainer(spikes=SpikeDetector(SpikeConfig(skip_grad_norm=1.0), CPU))
    trainer.load_state({**trainer.state(), "spikes": {"means": [1.0, 2.0], "updates": 3}})
    assert trainer.state()["spikes"] == {"means": [1.0, 2.0], "updates": 3}
    with pytest.raises(TrainError, match="the saved state is damaged: "):
        trainer.load_state({**trainer.state(), "spikes": wrong})


def test_fuzzed_states_continue_or_are_refused(make_trainer, fuzz_count):
    trainer = make_trainer(callbacks=[LogLine(Console(silent=True), 100, peak=None)])
    trainer.step(trainer.micro_batches(0))

    def read(content: bytes) -> None:
        try:
            state = json.loads(content)
        except (ValueError, RecursionError) as error:  # megatron-ckpt refuses this
            raise TrainError("no JSON") from error
        trainer.load_state(state)
        trainer.state()

    whole = json.dumps(trainer.state()).encode()
    fuzz(read, [whole], TrainError, count=fuzz_count, mutate=mutate_json)


@pytest.mark.parametrize("part", ["trainer", "optimizer", "run"])
def test_a_checkpoint_with_a_damaged_part_of_its_state_is_refused(make_trainer, tmp_path, part):
    save = CheckpointStore.save

    class Store(CheckpointStore):
        def save(self, iteration, state, **more):
            return save(self, iteration, {**state, part: 5}, **more)

    saver = Saver(Store(tmp_path), {}, None, None, None, Console(silent=True))
    make_trainer(callbacks=[saver, StopAt(1, None)]).run()
    with pytest.raises(TrainError, match=r"iter_0000001.* is damaged"):
        restore(make_trainer(), tmp_path, {}, Console(silent=True))


def test_a_checkpoint_with_a_flat_record_is_continued(make_trainer, tmp_path, capsys):
    flat = {"data": ["corpus"], "seq_length": 6, "seed": 1, "order": "stateless", "split": None}
    saver = Saver(CheckpointStore(tmp_path), flat, None, None, None, Console(silent=True))
    make_trainer(callbacks=[saver, StopAt(1, None)]).run()
    run = {"data": {"seq_length": 6}, "seed": {"seed": 1}}
    assert restore(make_trainer(), tmp_path, run, Console())
    assert "has no record of its data, so changes cannot be detected" in capsys.readouterr().err


def test_a_run_with_damaged_metrics_ends_with_its_checkpoint(make_trainer, tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text("damaged\n")
    silent = Console(silent=True)
    saver = Saver(CheckpointStore(tmp_path), {}, None, None, None, silent)
    trainer = make_trainer(callbacks=[Recorder(tmp_path, {}, Console()), saver, StopAt(1, None)])
    trainer.run()
    assert saver.newest is not None and saver.newest.iteration == 1
    error = capsys.readouterr().err
    assert "loss.png is not drawn: " in error and "metrics.jsonl, line 1: not a" in error


def test_all_ranks_get_the_error_of_a_refused_state(make_trainer, tmp_path, monkeypatch):
    heard = []

    class Heard(SingleProcessCoordinator):
        def broadcast(self, text):
            heard.append(text)
            return text

    saver = Saver(CheckpointStore(tmp_path), {}, None, None, None, Console(silent=True))
    trainer = make_trainer(callbacks=[saver, StopAt(1, None)])
    monkeypatch.setattr(saver, "state", lambda: {"origin": 5})
    trainer.run()
    monkeypatch.setattr(checkpointing, "coordinator_of", lambda _: Heard())
    with pytest.raises(TrainError, match="'origin' is 5; load another checkpoint"):
        restore(make_trainer(callbacks=[saver]), tmp_path, {}, Console(silent=True))
    assert "'origin' is 5; load another checkpoint" in heard[-1]
