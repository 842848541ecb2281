"""Fixtures of several comparisons with other libraries."""

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import distributed


@pytest.fixture
def megatron(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[SimpleNamespace]:
    """Makes megatron-core's models run on a CPU, in a job of one process."""
    model = pytest.importorskip("megatron.core.models.gpt.gpt_model")
    specs = pytest.importorskip("megatron.core.models.gpt.gpt_layer_specs")
    mtp = pytest.importorskip("megatron.core.transformer.multi_token_prediction")
    attention = pytest.importorskip("megatron.core.transformer.dot_product_attention")
    state = pytest.importorskip("megatron.core.parallel_state")
    config = pytest.importorskip("megatron.core.transformer.transformer_config")
    tracker = SimpleNamespace(fork=lambda *names: nullcontext(), add=lambda *seed: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.") and hasattr(module, "get_cuda_rng_tracker"):
            monkeypatch.setattr(module, "get_cuda_rng_tracker", lambda *options: tracker)
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1
    )
    state.initialize_model_parallel()
    try:
        yield SimpleNamespace(model=model, specs=specs, mtp=mtp, attention=attention, config=config)
    finally:
        state.destroy_model_parallel()
        distributed.destroy_process_group()
