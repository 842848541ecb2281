"""Small parts that a run is built from and prints, each by itself."""

import errno
import io
import math
from types import SimpleNamespace

import pytest
import torch
from megatron_ckpt import SingleProcessCoordinator
from megatron_parallel import Mesh, ParallelLayout, Sharding
from megatron_parallel.tensor_parallel import UNFUSED_CROSS_ENTROPY, LinearCrossEntropy
from megatron_train import assembly
from megatron_train._command import nearest
from megatron_train.assembly import load_run_tokenizer
from megatron_train.atomic_write import write_atomically
from megatron_train.errors import TrainError
from megatron_train.flat_graphs import needs_gradient, with_strides
from megatron_train.group_table import group_table
from megatron_train.launch.output import write_whole_lines
from megatron_train.layer_values import over_all_ranks
from megatron_train.mesh_coordinator import coordinator_of
from megatron_train.metrics.console import Console
from megatron_train.pretrain import _train
from megatron_train.products import products_of, trains_adapters_only, vocabulary_loss_of
from megatron_train.trainer import Stop

from .test_configuration import MINIMAL, parse
from .test_parts_of_a_run import run_config

# -- parameter groups ------------------------------------------------------------------------------


class AdamW:
    pass


class Muon:
    pass


def group(rule, names, lr_mult=1.0, lr_factor=1.0, decay=1.0, decoupled=False):
    return SimpleNamespace(
        rule=rule(),
        names=names,
        lr_mult=lr_mult,
        lr_factor=lr_factor,
        decay_factor=decay,
        decoupled=decoupled,
    )


class TwoRanks(SingleProcessCoordinator):
    """Rank 0 of two; the other one has sent its text before."""

    def __init__(self):
        self.other = None

    def gather(self, text):
        if self.other is None:
            self.other = text
            return [text]
        return [text, self.other]


@pytest.mark.parametrize("decoupled_lr", [None, 0.5])
def test_the_table_of_groups_counts_each_parameter_of_all_ranks_once(decoupled_lr):
    table = {
        "matrix": Sharding((40, 50)),
        "other": Sharding((3, 2)),
        "bias": Sharding((7,)),
        "embedding": Sharding((11, 10)),
    }
    shapes = [
        [
            group(Muon, ["matrix"], lr_mult=0.5, lr_factor=0.5, decay=2.0),
            group(AdamW, ["bias"], decay=0.0),
            group(AdamW, ["embedding"], lr_mult=2.0, lr_factor=0.25, decoupled=True),
        ],
        [
            group(Muon, ["matrix", "other"], lr_mult=0.5, lr_factor=0.5, decay=2.0),
            group(AdamW, ["bias"], decay=0.0),
        ],
    ]
    config, ranks = SimpleNamespace(decoupled_lr=decoupled_lr), TwoRanks()
    for groups in reversed(shapes):
        lines = group_table(SimpleNamespace(config=config, groups=groups), table, ranks)
    rate = "0.5 x --lr          " if decoupled_lr is None else "2 x --decoupled-lr"
    width = len("2 x --decoupled-lr") if decoupled_lr else len("learning rate")
    rows = [
        ("rule ", "learning rate", "weight decay      ", "tensors", "parameters"),
        ("Muon ", "0.25 x --lr", "2 x --weight-decay", "      2", "     2,006"),
        ("AdamW", "1 x --lr", "none              ", "      1", "         7"),
        ("AdamW", rate.strip(), "1 x --weight-decay", "      1", "       110"),
    ]
    assert lines == [
        "parameter groups:",
        *(f"  {a}  {b.ljust(width)}  {c}  {d}  {e}" for a, b, c, d, e in rows),
    ]


# -- values of layers and graphs -------------------------------------------------------------------


@pytest.mark.parametrize(("op", "missing"), [("sum", 0.0), ("max", -math.inf)])
def test_values_of_absent_layers_change_no_result(op, missing):
    held = {"a": None, "b": torch.tensor([1.0, -2.0, 3.0]).double(), "c": None}
    found = over_all_ranks(Mesh.single(), held, {"a": 2, "b": 3, "c": 1}, op)
    assert {name: values.tolist() for name, values in found.items()} == {
        "a": [missing] * 2,
        "b": [1.0, -2.0, 3.0],
        "c": [missing],
    }
    assert over_all_ranks(Mesh.single(), {}, {}, op) == {}


def test_gradients_get_the_strides_of_compiled_code():
    x = torch.arange(6.0).view(2, 3)
    assert with_strides(x, (3, 1)) is x
    other = with_strides(x, (1, 2))
    assert other.stride() == (1, 2) and torch.equal(other, x)
    wanted = [needs_gradient(one) for one in (x, x.clone().requires_grad_(), 3, None)]
    assert wanted == [False, True, False, False]


# -- products, tokenizers, graphs ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flag", "loss"),
    [
        ("native", UNFUSED_CROSS_ENTROPY),
        ("te", UNFUSED_CROSS_ENTROPY),
        ("linear", LinearCrossEntropy(gradients="forward")),
        ("linear-recompute", LinearCrossEntropy(gradients="backward")),
    ],
)
def test_the_loss_of_the_output_layer_is_that_of_its_flag(flag, loss):
    assert vocabulary_loss_of(parse(f"{MINIMAL} --cross-entropy-fusion-impl {flag}")) == loss


def test_adapters_are_products_that_shards_of_torch_do_not_take():
    plain, lora = parse(MINIMAL), parse(f"{MINIMAL} --linear-product lora")
    assert products_of(plain) == {} and not trains_adapters_only(plain)
    assert products_of(lora) and trains_adapters_only(lora)
    words = "--linear-product lora freezes weights, but --use-torch-fsdp2 shards frozen and trained"
    with pytest.raises(TrainError, match=words):
        products_of(parse(f"{MINIMAL} --linear-product lora --use-torch-fsdp2", ranks=2))


@pytest.mark.parametrize("size", [9, 10, 11])
def test_a_tokenizer_has_at_most_the_tokens_of_the_model(size):
    tokenizer = SimpleNamespace(vocab_size=size)
    cache = SimpleNamespace(open=lambda data, vocab_size: tokenizer if vocab_size == 10 else None)
    names = {"tokenizer_model": "m", "vocab_file": "v", "tokenizer_type": "t"}
    config = run_config()  # of 10 tokens
    if size <= 10:
        assert load_run_tokenizer(config, cache) is tokenizer
        return
    words = "^--vocab-size 10 is smaller than the 11 tokens of {};"
    for given in ("mvt", "vt", "t"):
        data = SimpleNamespace(**{k: v if v in given else None for k, v in names.items()})
        with pytest.raises(TrainError, match=words.format(given[0])):
            load_run_tokenizer(SimpleNamespace(data=data, model=config.model), cache)


def test_graphs_are_captured_on_request_and_on_a_gpu_alone(monkeypatch):
    monkeypatch.setattr(assembly, "CudaCapture", lambda: "capture")
    local = SimpleNamespace(cuda_graph_impl="local", cuda_graph_warmup_steps=4)
    none = SimpleNamespace(cuda_graph_impl="none", cuda_graph_warmup_steps=4)
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert assembly._graph_backend(none, gpu) is assembly._graph_backend(none, cpu) is None
    backend = assembly._graph_backend(local, gpu)
    assert (backend.capture, backend.warmup_steps) == ("capture", 4)
    with pytest.raises(TrainError, match="--cuda-graph-impl local needs a CUDA device"):
        assembly._graph_backend(local, cpu)


# -- output ----------------------------------------------------------------------------------------


class Barred(Console):
    def __init__(self):
        super().__init__(io.StringIO())
        self.ended = 0

    def stop_bar(self):
        self.ended += 1


@pytest.mark.parametrize(
    ("stop", "line"),
    [
        (None, ""),
        (Stop("SIGTERM", 143), "stopped after step 3 of 8: SIGTERM; saved in run\n"),
        (KeyboardInterrupt(), "interrupted after step 3 of 8; saved in run\n"),
    ],
)
def test_a_run_that_ends_early_says_where_and_what_is_saved(make_trainer, stop, line):
    trainer, console = make_trainer(), Barred()
    trainer.iteration = 3

    def run():
        if isinstance(stop, KeyboardInterrupt):
            raise stop
        return stop

    trainer.run = run
    if isinstance(stop, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            _train(trainer, console, lambda: "saved in run")
    else:
        assert _train(trainer, console, lambda: "saved in run") is stop
    assert (console._out.getvalue(), console.ended) == (line, 1)


def test_output_is_passed_on_when_a_line_ends():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    write_whole_lines(stream)
    stream.write("step ")
    assert stream.buffer.getvalue() == b""
    stream.write("1\n")
    assert stream.buffer.getvalue() == b"step 1\n"
    write_whole_lines(io.StringIO())  # of a notebook, which encodes no text


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path):
    path = tmp_path / "f"
    path.write_text("old")
    with pytest.raises(OSError, match="full") as full, write_atomically(path) as temporary:
        temporary.write_text("half")
        raise OSError(errno.ENOSPC, "the disk is full")
    assert full.value.filename == str(path)
    assert path.read_text() == "old" and [*tmp_path.iterdir()] == [path]
    with write_atomically(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new" and [*tmp_path.iterdir()] == [path]


def test_one_rank_agrees_with_itself():
    assert type(coordinator_of(Mesh.single())) is SingleProcessCoordinator


def test_several_ranks_agree_over_their_mesh(monkeypatch):
    monkeypatch.setattr("megatron_train.mesh_coordinator.MeshCoordinator", lambda mesh: [mesh])
    mesh = Mesh(ParallelLayout(dp=2), 0)
    assert coordinator_of(mesh) == [mesh]


@pytest.mark.parametrize(
    ("word", "known", "found"),
    [
        ("--hidden_sise", ["--hidden-size"], "--hidden-size"),
        ("ab", ["cd", "ba"], "ba"),  # letters that changed places count once
        ("a", ["b"], "b"),
        ("a", ["bc"], ""),
        ("abc", ["axc", "abx"], "axc"),  # the first of several
        ("abc", ["axy"], ""),
        ("abcdef", ["xbcdey"], "xbcdey"),
        ("abcdef", ["xbzdey"], ""),
        ("abcde", ["xbcdy"], ""),
        ("abcdefghi", ["xbcdyfghz"], ""),
        ("abcdefghijkl", ["xbcdeyghijkz"], "xbcdeyghijkz"),
        ("abcdefghijkl", ["xbcdeyghzjkz"], ""),
        ("abcdefgh", ["abcdefghij"], "abcdefghij"),
        ("abcdefgh", ["abcdefghijk"], ""),
        ("size", [], ""),
    ],
)
def test_the_nearest_word_is_named_if_it_is_near(word, known, found):
    assert nearest(word, known) == (f"; did you mean {found}?" if found else "")
