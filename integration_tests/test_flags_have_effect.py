"""Every accepted flag has an effect on a run.

Each option is added to a small run (`BASE`) with the context that it needs, and the observable
results of both runs are compared: exit status, losses, gradient norms and learning rates of every
step, evaluations, output, files, and some calls that have no other visible effect on one rank
(`Probes`). Copies of the configuration are ignored: the printed settings, the line on the model,
`config.yaml`.

A run with the flag must succeed. Only for the flags in `REFUSALS` is an error the expected effect.
test_flags_on_ranks.py covers the flags that one rank refuses. `nox -s tests` tries one flag in
five.
"""

import json
import re
import shutil
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fsspec
import megatron_parallel.recompute.checkpointing as checkpointing
import pytest
import torch
from flag_effects import ALIAS_REFUSALS, EFFECTS, REFUSALS
from flag_effects.words import BASE, EXPERTS, FP8, LOAD, ROPE, YARN
from flags_on_ranks import LAYERS_PER_VIRTUAL_STAGE, ON_RANKS, Words, command
from megatron_ckpt import Checkpoint
from megatron_data import ByteTokenizer, IndexedDatasetBuilder, preprocess, train_bpe
from megatron_data.indexed.dataset_files import FileTokens
from megatron_data.tokenizers import NullTokenizer
from megatron_parallel import GradientBuffers, Mesh
from megatron_parallel.pipeline import gradients
from megatron_parallel.recompute import OffloadSavedTensors
from megatron_train import StepEngine, Trainer, batches, tokenizer
from megatron_train.cli import main
from megatron_train.config.aliases import ALIASES
from megatron_train.config.extensions import SelectedExtensions
from megatron_train.config.reference import documented_options
from megatron_train.config.run_sections import run_options
from megatron_train.metrics.console import Console

pytestmark = pytest.mark.usefixtures("plain_runs")

VOLATILE = (
    (r"^ \[[^]]*\]", ""),
    (r"(elapsed time per iteration \(ms\)|tokens/s|MFU|TFLOP/s/GPU\)): [\d.]+", r"\1"),
)
"""Parts of printed lines that differ between equal runs."""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Returns a folder with corpora, tokenizers and a run to continue."""
    folder = tmp_path_factory.mktemp("prepared")
    ByteTokenizer().save(folder / "bytes")
    with IndexedDatasetBuilder(str(folder / "talks_loss"), "uint8") as builder:
        for _ in range(60):
            builder.add_item([0, 0, 0, 1, 1, 1, 0, 1, 1, 1])
            builder.end_document()
        builder.finalize()
    for name, step in (("text", 1), ("other", 3), ("talks", 2)):
        with IndexedDatasetBuilder(str(folder / name), "uint16") as builder:
            for start in range(60):
                builder.add_item([*((start + step * i) % 250 for i in range(9)), 256])
                builder.end_document()
            builder.finalize()
    (folder / "foreign.jsonl").write_text('{"text": "1 2 3 4 5 6 7 8 9"}\n' * 60)
    preprocess([folder / "foreign.jsonl"], folder / "foreign", NullTokenizer(250))
    for name in ("text.bin", "text.idx"):
        fsspec.filesystem("memory").pipe(f"/{name}", (folder / name).read_bytes())
    train_bpe(["you see the image there"], 300).save(folder / "chat")
    turns = [{"role": "user", "content": "<image>"}, {"role": "assistant", "content": "see"}]
    rows = [{"messages": [{**turn, "content": turn["content"] + str(n)} for turn in turns]}
            for n in range(60)]  # fmt: skip
    (folder / "lines.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "template").write_text("{% for m in messages %}{% generation %}{{ m.content }}"
                                     "{% endgeneration %}{% endfor %}")  # fmt: skip
    tokens = {chr(256 + n): n for n in range(256)} | {"<|endoftext|>": 256}
    (folder / "vocab").write_text(json.dumps(tokens | {chr(256) * 2: 257}))
    (folder / "merges").write_text(f"{chr(256)} {chr(256)}\n")
    (folder / "no-merges").write_text("#version: 0.2\n")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *tokens]
    (folder / "words").write_text("\n".join(words))
    ranks = [{"rank": n, "token_bytes": b64encode(bytes([n])).decode()} for n in range(256)]
    (folder / "ranks").write_text(json.dumps(ranks))
    (folder / "changes").write_text('[{"from_sample": 8, "data_path": "other"}]')
    (folder / "another").write_text(json.dumps(tokens | {chr(256) * 2: 300}))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(command({**BASE, "--lr-decay-iters": "8", "--save": "trained"})) == 0
    return folder


@pytest.fixture(scope="module")
def unchanged():
    """Returns a cache of the observations of contexts."""
    return {}


class Probes:
    """Records calls of a run that have no other visible effect on one rank."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.observed: dict[str, Any] = {"bars": 0, "compiled": 0, "micro-batches": []}
        self.observed["runs"] = self.observed["offloaded"] = self.observed["reads"] = 0
        bind, run, train = Mesh.bind, StepEngine.run, Trainer.run
        opened = tokenizer.open_tokenizer

        def recording_bind(*args: Any, **options: Any) -> Mesh:
            self.observed["timeout"] = options["timeout"]
            return bind(*args, **options)

        def recording_run(engine: StepEngine, batches: Any, *rest: Any) -> Any:
            self.observed["micro-batches"].append(len(batches))
            self.observed["deterministic"] = torch.are_deterministic_algorithms_enabled()
            return run(engine, batches, *rest)

        def recording_train(trainer: Trainer) -> Any:
            engine = trainer.engine
            parameters = engine.stages.parameters
            self.observed["buckets"] = [len(b.buckets) for b in engine.stages.buffers]
            self.observed["sharded"] = len(engine.stages.shards)
            self.observed["fused"] = engine.fusion.fused
            self.observed["waiting"] = sum(
                len(module._forward_pre_hooks)
                for stage in trainer.task.stages
                for module in stage.modules()
            )
            self.observed["loss"] = [stage.vocabulary_loss for stage in trainer.task.stages]
            self.observed["products"] = {
                type(module.product).__name__
                for stage in trainer.task.stages
                for module in stage.modules()
                if hasattr(module, "product")
            }
            self.observed["elements"] = {name: p.shape for name, p in parameters.items()}
            blocks = [m for stage in trainer.task.stages for m in stage.modules()]
            self.observed["dispatchers"] = [
                type(block.dispatcher).__name__ for block in blocks if hasattr(block, "dispatcher")
            ]
            return train(trainer)

        def recording_open(*args: Any) -> Any:
            tokenizer = opened(*args)
            self.observed["tokenizer"] = tokenizer and tokenizer.fingerprint
            return tokenizer

        finish = gradients.finish_buffers

        def recording_finish(buffers: Sequence[GradientBuffers]) -> None:
            buckets = [bucket for each in buffers for bucket in each.buckets]
            self.observed["early"] = sum(bucket.launched for bucket in buckets)
            finish(buffers)

        patch.setattr(gradients, "finish_buffers", recording_finish)
        function, pack = checkpointing.checkpoint, OffloadSavedTensors._pack

        def recording_checkpoint(*args: Any, **options: Any) -> Any:
            self.observed["runs"] += 1
            return function(*args, **options)

        def recording_pack(memory: OffloadSavedTensors, tensor: Any) -> Any:
            self.observed["offloaded"] += 1
            return pack(memory, tensor)

        ahead = batches.read_ahead

        def recording_ahead(steps: Any, count: int) -> Any:
            self.observed["ahead"] = count
            return ahead(steps, count)

        read = FileTokens.__getitem__

        def recording_read(tokens: FileTokens, part: slice) -> Any:
            self.observed["reads"] += 1
            return read(tokens, part)

        patch.setattr(batches, "read_ahead", recording_ahead)
        patch.setattr(FileTokens, "__getitem__", recording_read)
        patch.setattr(checkpointing, "checkpoint", recording_checkpoint)
        patch.setattr(OffloadSavedTensors, "_pack", recording_pack)
        patch.setattr(tokenizer, "open_tokenizer", recording_open)
        patch.setattr(Mesh, "bind", recording_bind)
        patch.setattr(StepEngine, "run", recording_run)
        patch.setattr(Trainer, "run", recording_train)
        patch.setattr(torch, "compile", self._compiled)
        patch.setattr(Console, "start_bar", self._bar)

    def _compiled(self, stage: Any, **_: Any) -> Any:
        self.observed["compiled"] += 1
        return stage

    def _bar(self, *_: Any) -> None:
        self.observed["bars"] += 1


def observe(words: Words, prepared: Path, folder: Path, capsys: Any) -> dict[str, Any]:
    """Runs `pretrain gpt` in a copy of the prepared folder and returns the observable results."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    shutil.copytree(prepared, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        probes = Probes(patch)
        capsys.readouterr()
        status = main(command(words))
    torch.set_num_threads(threads)
    printed = capsys.readouterr()
    records = folder / "out" / "metrics.jsonl"
    return {
        "status": status,
        "printed": [
            without_volatile_parts(line) for line in printed.out.splitlines() if is_compared(line)
        ],
        "errors": printed.err,
        "files": sorted(re.sub(r"\d{6,}.*", "", str(p.relative_to(folder))) for p in files(folder)),
        "records": [comparable_record(line) for line in records.open()] if records.exists() else [],
        "probes": probes.observed,
        "families": families(folder / "out"),
    }


def observe_once(
    known: dict[str, Any], words: Words, prepared: Path, folder: Path, capsys: Any
) -> dict[str, Any]:
    """Returns the results of `observe`, from ``known`` if another test has run the same words."""
    key = json.dumps(words)
    if key not in known:
        known[key] = observe(words, prepared, folder, capsys)
    return known[key]


def families(folder: Path) -> list[str | None]:
    """Returns the family that each checkpoint records."""
    records = (Checkpoint(path).model for path in sorted(folder.glob("iter_*")))
    return [None if record is None else record.family for record in records]


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if "tfevents" not in path.name or path.is_dir()]


def is_compared(line: str) -> bool:
    return not line.startswith(("  ", "configuration", "environment", "model:", "MFU is", "---"))


def without_volatile_parts(line: str) -> str:
    for pattern, text in VOLATILE:
        line = re.sub(pattern, text, line)
    return line


def comparable_record(line: str) -> dict[str, Any]:
    record = json.loads(line)
    return {} if record.get("event") == "start" else {**record, "seconds": None}


def test_every_option_is_covered():
    """Checks the options of the task gpt; test_pretrain_bert.py and others check their own."""
    of_task = {option.key for option in run_options("gpt", SelectedExtensions("gpt"))}
    own = [option for option in documented_options() if option.key in of_task]
    options = [option.key for option in own]
    elsewhere = ON_RANKS.keys() - {LAYERS_PER_VIRTUAL_STAGE}
    assert sorted(EFFECTS) == sorted(key for key in options if key not in elsewhere)
    assert elsewhere <= set(options)
    flags = {option.key: (option.flag, option.opposite) for option in own}
    changes = {key: change for key, (_, change) in EFFECTS.items()}
    changes |= {key: ON_RANKS[key].change for key in elsewhere}
    for key, change in changes.items():
        assert set(flags[key]) & set(change), key


def test_equal_runs_compare_equal(prepared, tmp_path, capsys):
    first, second = (observe(BASE, prepared, tmp_path / n, capsys) for n in ("a", "b"))
    assert first == second
    assert first["status"] == 0
    assert len(first["records"]) == 10  # start, 4 steps, 2 log lines, validation, test, end


@pytest.mark.sampled(5)
@pytest.mark.parametrize("key", EFFECTS)
def test_a_flag_changes_the_run(key, prepared, unchanged, tmp_path, capsys):
    context, change = EFFECTS[key]
    before = {**BASE, **context}
    without = observe_once(unchanged, before, prepared, tmp_path / "without", capsys)
    after = observe({**before, **change}, prepared, tmp_path / "with", capsys)
    assert after != without
    if key in REFUSALS:
        assert after["status"] == 1 and REFUSALS[key] in after["errors"]
    else:
        assert after["status"] == 0, after["errors"]


FP32 = "--accumulate-allreduce-grads-in-fp32"
ALIAS_CONTEXTS: dict[str, Words] = {
    "--disable-fp8-wgrad": FP8,
    "--grad-reduce-in-bf16": {"--bf16": ""},
    "--main-grads-dtype": {"--bf16": ""},
    "--grad-reduce-in-fp32": {"--bf16": "", f"--no-{FP32[2:]}": ""},
    "--use-rope-scaling": {**ROPE, "--seq-length": "64", "--rope-scaling-original-length": "8"},
    "--rotary-seq-len-interpolation-factor": ROPE,
    "--rotary-scaling-factor": YARN,
    "--yarn-original-max-position-embeddings": {**ROPE, "--rope-scaling-type": "yarn"},
    "--moe-layer-recompute": EXPERTS,
    "--use-checkpoint-opt_param-scheduler": {**LOAD, "--lr": "1e-3"},
    "--override-opt_param-scheduler": {**LOAD, "--lr-decay-iters": "9"},
}
ALIAS_VALUES = {
    "--encoder-seq-length": "8",
    "--decoder-num-layers": "1",
    "--window-size": "1,0",
    "--rotary-seq-len-interpolation-factor": "2",
    "--mup-embedding-mult": "2",
    "--mup-output-mult": "0.5",
    "--rotary-scaling-factor": "2",
    "--yarn-original-max-position-embeddings": "64",
    "--layernorm-epsilon": "0.1",
    "--main-grads-dtype": "bf16",
    "--persistent-save-interval": "2",
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "flag",
    # One is for hybrid models: integration_tests/test_recurrent_runs.py.
    sorted(
        ALIASES.keys() - {"--virtual-pipeline-model-parallel-size", "--hybrid-override-pattern"}
    ),
)
def test_an_alias_changes_the_run(flag, prepared, unchanged, tmp_path, capsys):
    words = {**BASE, **ALIAS_CONTEXTS.get(flag, {})}
    without = observe_once(unchanged, words, prepared, tmp_path / "without", capsys)
    words[flag] = ALIAS_VALUES.get(flag, "")
    after = observe(words, prepared, tmp_path / "with", capsys)
    assert after != without
    if flag in ALIAS_REFUSALS:
        assert after["status"] == 1 and ALIAS_REFUSALS[flag] in after["errors"]
    else:
        assert after["status"] == 0, after["errors"]
