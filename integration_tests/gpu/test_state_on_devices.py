"""GPU and CPU continue the checkpoints of a GPU; dropout and generation equal those of the CPU."""

import pytest
import torch
from megatron_ckpt import CheckpointStore
from megatron_infer import SamplingParams, generate_tokens
from megatron_models import GPT, GPTConfig, Placement, StaticKVCache
from megatron_parallel import Mesh
from megatron_parallel.dropout import DropoutKey, keep_mask, keyed_dropout

pytestmark = pytest.mark.gpu

CPU = torch.device("cpu")
SMALL = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "ffn_hidden_size": 64,
    "vocab_size": 97,
    "max_position_embeddings": 32,
}
LLAMA = {
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "activation": "swiglu",
    "num_query_groups": 2,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
}
EXPERTS = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32}
MODELS = {"gpt2": {}, "llama": LLAMA, "experts": EXPERTS}


def saved(store: CheckpointStore, one, iteration: int) -> None:
    store.save(iteration, {**one.state(), "steps": one.optimizer.scalars()})


def loaded(store: CheckpointStore, one, iteration: int):
    values = store.load(iteration, one.state())
    one.optimizer.load_scalars(values["steps"])
    return one


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["gpt2", "experts"])
def test_a_continued_run_equals_one_that_was_not_interrupted(
    job, device, only_deterministic, tmp_path, name, dtype
):
    def new():
        return job(device, config=MODELS[name], dropout=0.1, dtype=dtype)

    store = CheckpointStore(tmp_path)
    whole = new()
    steps = [whole.step(iteration) for iteration in (1, 2)]
    saved(store, whole, 2)
    steps += [whole.step(iteration) for iteration in (3, 4)]
    rest = loaded(store, new(), 2)
    assert [rest.step(iteration) for iteration in (3, 4)] == steps[2:]
    assert all(torch.equal(w, whole.weights()[n]) for n, w in rest.weights().items())


@pytest.mark.parametrize("there", ["to the CPU", "to the GPU"])
def test_a_checkpoint_loads_on_the_other_device(job, device, tmp_path, there):
    source, target = (device, CPU) if there == "to the CPU" else (CPU, device)
    store = CheckpointStore(tmp_path)
    one = job(source, dropout=0.1)
    one.step(1)
    saved(store, one, 1)
    other = loaded(store, job(target, dropout=0.1), 1)
    assert all(torch.equal(w, one.weights()[n]) for n, w in other.weights().items())
    states = zip(one.state().items(), other.state().values(), strict=True)
    for (name, ours), theirs in states:
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a.tensor.cpu(), b.tensor.cpu()), name
    assert one.step(2)[1] == pytest.approx(other.step(2)[1], rel=1e-4)


@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("shape", [(16, 2, 32), (300, 3, 4, 7)], ids=str)
def test_dropout_keeps_the_same_elements_as_on_the_cpu(device, shape, p):
    masks = []
    for where in (CPU, device):
        numbers = torch.arange(7, 7 + shape[1], device=where)
        key = DropoutKey.for_batch(seed=11, iteration=3, samples=numbers, positions=shape[0])
        masks.append(keep_mask(shape, p, key, layer=2, site=1).cpu())
        x = torch.ones(shape, device=where)
        assert torch.equal(keyed_dropout(x, p, key, layer=2, site=1).cpu() > 0, masks[-1])
    assert torch.equal(*masks)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_logits_with_a_cache_equal_those_of_the_whole_text(device, name, dtype):
    config, mesh = GPTConfig(**SMALL, **MODELS[name]), Mesh.single(device)
    model = GPT(config, Placement(mesh, dtype=dtype)).eval()
    cache = StaticKVCache(config, mesh, 2, 32, dtype=dtype)
    tokens = torch.randint(97, (2, 12), generator=torch.Generator().manual_seed(1)).to(device)
    with torch.no_grad():
        pieces = [model(part, cache=cache) for part in tokens.split([5, 1, 6], 1)]
        cached, whole = torch.cat(pieces)[..., :97], model(tokens)[..., :97]  # without padding
    largest = float(whole.abs().max())
    # The order of summation depends on the size of a product: 97 terms, 9 in a row.
    allowed = torch.finfo(dtype).eps * 97 * 9 * largest
    assert float((cached - whole).abs().max()) <= allowed


@pytest.mark.parametrize("name", MODELS)
def test_greedy_continuations_equal_those_of_the_cpu(device, name):
    config = GPTConfig(**SMALL, **MODELS[name])
    params = SamplingParams(temperature=0.0, max_new_tokens=12)
    prompts = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3]]
    found = []
    for where in (CPU, device):
        torch.manual_seed(5)
        model = GPT(config, Placement(Mesh.single(where), dtype=torch.float64)).eval()
        found.append([c.tokens for c in generate_tokens(model, prompts, params)])
    assert found[0] == found[1] and all(len(tokens) == 12 for tokens in found[0])
