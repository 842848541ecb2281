"""A kind of model from another distribution, `stranger/`, which is found by its entry points.

No file of the eight packages mentions it. It supports parallelism like their models: losses and
gradients on several ranks equal those of one rank in float64. `parity/test_extension_kind.py`
compares it with transformers.
"""

import re
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import torch
from megatron_models import (
    Placement,
    find_kind,
    model_kinds,
    parameter_count,
    parameter_shapes,
    training_flops,
    training_memory,
)
from megatron_parallel import (
    GradientBuffers,
    Mesh,
    ParallelLayout,
    PipelineEngine,
    collect_shardings,
    parameter_views,
)
from megatron_parallel.pipeline import stage_parameters

pytest.importorskip("bidirectional", reason="pip install -e integration_tests/stranger")

STRANGER = Path(__file__).with_name("stranger")
SHAPE = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "vocab_size": 61,
    "max_position_embeddings": 12,
    "ffn_hidden_size": 24,
}


def config():
    return find_kind("bidirectional").config(**SHAPE)


def batch(number):
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(61, (3, 10), generator=generator)
    padding = torch.zeros(3, 10, dtype=torch.bool)
    padding[1, 10 - 1 - number :] = True
    return {"tokens": tokens, "segments": tokens % 2, "padding": padding}


def step(mesh):
    """Returns losses and gradients of two micro-batches on this rank, as shards of parameters."""
    stages = find_kind("bidirectional").build(config(), Placement(mesh, dtype=torch.float64))
    table = {}
    for stage in stages:
        table |= collect_shardings(stage)
    with torch.no_grad():  # gains of 1 and biases of 0 would hide errors
        for name, parameter in stage_parameters(stages).items():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            noise = torch.randn(table[name].shape, generator=generator, dtype=torch.float64) * 0.2
            for piece in table[name].shard_boxes(mesh):
                parameter[piece.local.slices] += noise[piece.box.slices]
    losses = []

    def inputs(given, number):
        first = {"x": given["tokens"], "segments": given["segments"]} if number == 0 else {}
        return {**first, "padding": given["padding"]}

    def loss(output, given):
        weights = torch.arange(output.numel(), dtype=torch.float64).view(output.shape) % 7
        value = (output * weights).sum() + stages[-1].pool(output).square().sum()
        losses.append(value.item())
        return {"loss": value}

    engine = PipelineEngine(
        mesh,
        stages,
        loss,
        inputs=inputs,
        stage_output_spec=lambda given, number: stages[0].stage_output_spec(3, 10),
    )
    buffers = GradientBuffers(stage_parameters(stages), table, mesh)
    engine.run([batch(0), batch(1)], {"loss": 5.0})
    buffers.finish()
    views = parameter_views(buffers.gradients(), table, mesh)
    return losses, [(n, v.offsets, v.tensor.clone()) for n in views for v in views[n]]


@pytest.mark.parametrize("degrees", [{"tp": 2}, {"pp": 2}], ids=["tp2", "pp2"])
def test_ranks_equal_one_rank_in_float64(worker_pool, degrees):
    losses, whole = step(Mesh.single())
    gradients = {name: gradient for name, _, gradient in whole}
    assert gradients.keys() == parameter_shapes(config()).keys()
    seen = {name: torch.zeros_like(gradient) for name, gradient in gradients.items()}
    for theirs, pieces in worker_pool.run_mesh(ParallelLayout(dp=1, **degrees), step):
        assert theirs == pytest.approx(losses if theirs else [], rel=1e-12)
        for name, offsets, gradient in pieces:
            box = tuple(slice(o, o + n) for o, n in zip(offsets, gradient.shape, strict=True))
            seen[name][box] = 1
            torch.testing.assert_close(gradient, gradients[name][box], rtol=1e-9, atol=1e-11)
    assert all(covered.all() for covered in seen.values())


def test_parameters_flops_and_memory_are_counted():
    shape, (model,) = config(), find_kind("bidirectional").build(config(), Mesh.single())
    shapes = {name: cut.shape for name, cut in collect_shardings(model).items()}
    assert parameter_shapes(shape) == shapes
    assert parameter_count(shape) == sum(torch.Size(each).numel() for each in shapes.values())
    # In each of two layers 4 h^2 + 2 h f for a token, and 2 h for a pair of tokens.
    products = 2 * (4 * 16 * 16 + 2 * 16 * 24)
    assert training_flops(shape, 10) == 6 * (10 * products + 2 * 2 * 16 * 100)
    memory = training_memory(shape, 10, 3)
    assert memory.parameters == 4 * parameter_count(shape, padded=True)
    assert memory.activations > 0
    half = training_memory(shape, 10, 3, layout=ParallelLayout(tp=2, dp=1))
    assert memory.parameters / 2 < half.parameters < memory.parameters


@pytest.mark.parametrize("tutorial", ["README.md", "adding-a-task.md", "adding-parts.md"])
def test_the_tutorials_quote_the_code(tutorial):
    text = (STRANGER / tutorial).read_text()
    blocks = re.findall(r"```py\n# (\S+)\n(.*?)```", text, re.S)
    assert len(blocks) > 5
    for name, code in blocks:
        assert code in (STRANGER / name).read_text(), name
    packages = STRANGER.parents[1] / "packages"
    projects = [STRANGER / "pyproject.toml", packages / "megatron-models" / "pyproject.toml"]
    tables = re.findall(r"```toml\n\[(.*?)\]\n(.*?)```", text, re.S)
    assert tables
    for title, lines in tables:
        written = [path.read_text() for path in projects if title in path.read_text()]
        assert all(any(line in text for text in written) for line in lines.splitlines()), title


def test_it_is_listed_and_no_package_mentions_it():
    assert "bidirectional" in model_kinds()
    command = Path(sys.executable).with_name("megatron-train")
    done = subprocess.run([command, "models", "list"], capture_output=True, text=True, check=True)
    assert "bidirectional: an encoder that reads in both directions (bidirectional)" in done.stdout
    assert "family bert-encoder: BidirectionalEncoder (bidirectional)" in done.stdout
    packages = Path(__file__).parents[1] / "packages"
    sources = list(packages.glob("*/src/**/*.py"))
    assert len(sources) > 100
    assert not [path for path in sources if "bidirectional" in path.read_text().split()]
