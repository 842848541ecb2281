"""Models with other products than the plain one."""

import pytest
import torch
from megatron_models import GPT, EncoderDecoderConfig, Placement
from megatron_parallel import Mesh, collect_shardings
from megatron_parallel.tensor_parallel import (
    PLAIN,
    LoRA,
    freeze_all_but_adapters,
    merged_parameters,
)

ROLES = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "output_layer")
LORA = LoRA(rank=3, alpha=4.0)
EXPERTS = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 20}
GATED = {"activation": "swiglu", "add_bias_linear": False, "moe_shared_expert_intermediate_size": 8}


def adapted(config, roles=ROLES):
    """Returns a float64 model with adapters whose B is not zero."""
    placement = Placement(Mesh.single(), dtype=torch.float64, products=dict.fromkeys(roles, LORA))
    model = GPT(config, placement)
    freeze_all_but_adapters([model], [LORA])
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_b"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def tokens_of(config):
    return torch.randint(config.vocab_size, (3, 9), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("changes", [{}, {**EXPERTS, **GATED}, EXPERTS])
def test_adapters_equal_merged_weights_and_have_their_gradients(small, changes):
    """The gradients of A and B follow from that of W' = W + s B A by the chain rule."""
    config = small(**changes, untie_embeddings_and_output_weights=True)
    model = adapted(config)
    plain = GPT(config, Placement(Mesh.single(), dtype=torch.float64))
    plain.load_state_dict(merged_parameters(model))
    tokens = tokens_of(config)
    losses = [each(tokens, labels=tokens) for each in (model, plain)]
    torch.testing.assert_close(*losses, rtol=0, atol=1e-12)
    for loss in losses:
        loss.sum().backward()
    truth = {name: parameter.grad for name, parameter in plain.named_parameters()}
    adapters = 0
    for name, parameter in model.named_parameters():
        layer, _, last = name.rpartition(".")
        if last not in ("lora_a", "lora_b"):
            assert parameter.grad is None
            continue
        adapters += 1
        a, b = (model.get_parameter(f"{layer}.{which}") for which in ("lora_a", "lora_b"))
        whole = truth[f"{layer}.weight"]
        whole = whole.flatten(1, -2) if a.dim() == 3 else whole.flatten(0, -2)
        rows = b.flatten(1, -2) if a.dim() == 3 else b.flatten(0, -2)
        chained = rows.mT @ whole if last == "lora_a" else whole @ a.mT
        expected = (LORA.scale * chained).view(parameter.shape)
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-10, atol=1e-12, msg=name)
    assert adapters == 2 * sum("lora_a" in name for name in collect_shardings(model)) > 0


def test_roles_have_the_names_of_megatron(small):
    model = adapted(small(), roles=["linear_fc1"])
    assert {n.split(".", 2)[2] for n, _ in model.named_parameters() if "lora" in n} == {
        "mlp.up.lora_a",
        "mlp.up.lora_b",
    }


def test_a_tied_output_matrix_has_the_product_of_its_role_but_no_adapter(small):
    class Own(type(PLAIN)):
        """Another product."""

    own = Own()
    for product, used in ((LORA, PLAIN), (own, own)):
        for untied in (False, True):
            config = small(untie_embeddings_and_output_weights=untied)
            placement = Placement(Mesh.single(), products={"output_layer": product})
            word = GPT(config, placement).embedding.word
            assert word.product is (None if untied else used)


def test_cross_attention_has_its_own_roles():
    sizes = {"num_layers": 1, "encoder_num_layers": 1, "hidden_size": 16, "num_attention_heads": 2}
    sizes["untie_embeddings_and_output_weights"] = True
    config = EncoderDecoderConfig(**sizes, vocab_size=50, max_position_embeddings=16)
    roles = {spec.role for spec in config.parameters().values()}
    assert roles == {"", *ROLES, "linear_q", "linear_kv"}
