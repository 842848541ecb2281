"""Files as DeepSeek releases them: settings, multi-token prediction, weights in float8."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families.case import FamilyCase, cases
from families.comparison import text
from families.parity import LIMIT, error, logits, our_logits, our_model, round_trip, tensors
from families.theirs import randomize, their_logits
from megatron_ckpt import CheckpointError, CheckpointStore, ForeignModel, ModelRecord, export_hf
from megatron_ckpt.families import detect_family
from megatron_models import GPT, ConfigError, FutureTokens, GPTConfig, Placement, record_of
from megatron_models import shift_within_documents as shift
from megatron_models.components.rotary.module import RotaryTable
from megatron_models.parameters import parameter_shapes
from megatron_parallel import AuxiliaryLosses, Mesh, collect_shardings, parameter_views
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

transformers = pytest.importorskip("transformers")

YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096}
COMMON: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_layer_freq": 1,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 128,
}
V2 = COMMON | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekV2Config",
        "AutoModel": "modeling_deepseek.DeepseekV2Model",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV2ForCausalLM",
    },
    "aux_loss_alpha": 0.001,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "first_k_dense_replace": 1,
    "model_type": "deepseek_v2",
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_experts_per_tok": 6,
    "pretraining_tp": 1,
    "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707, "type": "yarn"},
    "scoring_func": "softmax",
    "seq_aux": True,
    "vocab_size": 102400,
}
#: Content of the ``config.json`` of three released models.
RELEASED: dict[str, dict[str, Any]] = {
    "DeepSeek-V2-Lite": V2
    | {
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 64,
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "routed_scaling_factor": 1.0,
        "topk_group": 1,
        "topk_method": "greedy",
    },
    "DeepSeek-V2": V2
    | {
        "hidden_size": 5120,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "n_group": 8,
        "n_routed_experts": 160,
        "num_attention_heads": 128,
        "num_hidden_layers": 60,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "routed_scaling_factor": 16.0,
        "topk_group": 3,
        "topk_method": "group_limited_greedy",
    },
    "DeepSeek-V3": COMMON
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_deepseek.DeepseekV3Config",
            "AutoModel": "modeling_deepseek.DeepseekV3Model",
            "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
        },
        "bos_token_id": 0,
        "eos_token_id": 1,
        "ep_size": 1,
        "first_k_dense_replace": 3,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "model_type": "deepseek_v3",
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "type": "yarn"},
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "vocab_size": 129280,
    },
}
CASE: FamilyCase = cases()["deepseek_v3"]
SMALL = CASE.hf_config | {"num_hidden_layers": 3, "num_nextn_predict_layers": 1}
SMALL["rope_scaling"] = YARN | {
    "mscale": 0.8,
    "mscale_all_dim": 1.1,
    "original_max_position_embeddings": 8,
    "type": "yarn",
}


def read(content: dict[str, Any]) -> GPTConfig:
    config = detect_family(content["architectures"]).config_from_hf(content)
    assert isinstance(config, GPTConfig)
    return config


@pytest.mark.parametrize("name", RELEASED)
def test_norms_of_latents_have_an_epsilon_of_their_own(name: str) -> None:
    content = RELEASED[name]
    family = detect_family(content["architectures"])
    same, other = read(content), read(content | {"rms_norm_eps": 1e-5})
    assert (same.norm_epsilon, same.latent_norm_epsilon) == (1e-6, 0.0)
    assert (other.norm_epsilon, other.latent_norm_epsilon) == (1e-5, 1e-6)
    assert family.config_to_hf(other)["rms_norm_eps"] == 1e-5
    assert family.config_to_hf(replace(same, latent_norm_epsilon=1e-6))["rms_norm_eps"] == 1e-6
    with pytest.raises(ConfigError, match="latent_norm_epsilon = 1e-06, this one has 1e-05"):
        family.config_to_hf(replace(other, latent_norm_epsilon=0.0))


@pytest.mark.parametrize("name", RELEASED)
def test_released_settings_describe_the_model_of_transformers(name: str) -> None:
    content = RELEASED[name]
    ours = read(content)
    values = {key: value for key, value in content.items() if key != "auto_map"}
    config = transformers.AutoConfig.for_model(**values)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    trunk = replace(ours, mtp_num_layers=0)
    assert sum(shape.numel() for shape in map(torch.Size, parameter_shapes(trunk).values())) == sum(
        parameter.numel() for parameter in model.parameters()
    )
    assert ours.mtp_num_layers == content.get("num_nextn_predict_layers", 0)
    attention = model.model.layers[0].self_attn
    assert ours.latent_softmax_scale == pytest.approx(attention.scaling, rel=1e-12)
    assert ours.latent_softmax_scale > 1.2 / 192**0.5
    positions = torch.tensor([[0, 1, 77, 4095, 4096, 9000, 20_000]])
    rotary = type(model.model.rotary_emb)(config)
    found = rotary(torch.zeros(1), positions)
    if not isinstance(found, tuple):  # complex numbers, one for each pair
        found = tuple(torch.cat((part, part), -1) for part in (found.real, found.imag))
    assert ours.rotation is not None
    table = RotaryTable(replace_layout(ours), 20_001, Placement(Mesh.single()))
    table.reset()
    for own, theirs in zip(table(7, 0, positions, None), found, strict=True):
        width = own.shape[-1]
        torch.testing.assert_close(
            own.float().reshape(7, width), theirs[0, :, :width].float(), rtol=0, atol=2e-3
        )


def replace_layout(config: GPTConfig) -> Any:
    """Returns the rotation with pairs in halves, as transformers stores its tables."""
    assert config.rotation is not None
    return replace(config.rotation, interleaved=False)


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize("attention_factor", [None, 1.3])
def test_scores_are_scaled_without_mscale_and_beside_an_attention_factor(
    attention_factor: float | None, family: str, tmp_path: Path
) -> None:
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8}
    scaling = yarn | {"mscale_all_dim": 0.4, "attention_factor": attention_factor}
    changes = {"num_hidden_layers": 2, "rope_parameters": scaling | {"rope_theta": 1e4}}
    assert logits(cases()[family], changes, tmp_path / "logits") <= LIMIT
    assert round_trip(cases()[family], changes, tmp_path / "round_trip") <= LIMIT


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> tuple[GPT, Path]:
    """A small model with a layer of multi-token prediction, and the folder of its export."""
    folder = tmp_path_factory.mktemp("deepseek")
    model = GPT(read(SMALL), Placement(Mesh.single()))
    randomize(model, 3)
    record = ModelRecord(family="deepseek_v3", **record_of(model.config))
    views = parameter_views(model, collect_shardings(model), model.mesh)
    CheckpointStore(folder / "trained").save(3, dict(views), model=record)
    return model, export_hf(folder / "trained", folder / "exported")


def copied(folder: Path, to: Path, changes: dict[str, Tensor | None], **fields: Any) -> Path:
    """Writes a folder with changed tensors (None removes one) and settings."""
    to.mkdir()
    content = json.loads((folder / "config.json").read_text()) | fields
    (to / "config.json").write_text(json.dumps(content))
    left = tensors(folder) | changes
    save_file(
        {n: t.contiguous() for n, t in left.items() if t is not None}, to / "model.safetensors"
    )
    return to


def test_transformers_reads_the_layer_of_multi_token_prediction(
    released: tuple[GPT, Path],
) -> None:
    from transformers.modeling_layers import MtpModel

    ours, folder = released
    main = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    whole = text(150)
    inputs, labels = whole[:, :-1], whole[:, 1:]
    assert error(our_logits(ours, inputs), their_logits(main, inputs)) <= LIMIT

    # Their patterns name the number of the layer in the released model.
    main._keys_to_ignore_on_load_unexpected = [r"model\.layers\.3\."]
    layers = MtpModel.from_pretrained(main).eval()
    values = (inputs, labels, torch.ones(inputs.shape), torch.arange(31).expand(3, -1))
    future = FutureTokens(*(shift(value, 1) for value in values))
    (name,) = ours.config.multi_token_losses
    losses = AuxiliaryLosses({name: float(future.loss_mask.sum())})
    with torch.no_grad():
        stream = main.model(inputs, use_cache=False).last_hidden_state[:, :-1]
        places = torch.arange(1, 31).expand(3, -1)
        stream = layers.forward_layer(0, stream, places, None, input_ids=inputs[:, 1:])
        found = main.lm_head(stream)
    ours(inputs, labels=labels, auxiliary_losses=losses, future=future).sum().backward()
    ours.zero_grad()
    expected = functional.cross_entropy(
        found.flatten(0, 1).double(), labels[:, 1:].flatten(), reduction="sum"
    )
    total = torch.as_tensor(losses.sums[name]).double()
    torch.testing.assert_close(total.reshape(()), expected, rtol=1e-6, atol=0)


def test_a_file_with_the_layer_is_read_as_it_was_written(released: tuple[GPT, Path]) -> None:
    ours, folder = released
    stored, read_again = tensors(folder), ForeignModel(folder)
    assert torch.equal(
        stored["model.layers.3.embed_tokens.weight"], stored["model.embed_tokens.weight"]
    )
    assert torch.equal(stored["model.layers.3.shared_head.head.weight"], stored["lm_head.weight"])
    assert read_again.model.config["mtp_num_layers"] == 1
    state = {n: t for n, t in ours.state_dict().items() if n in read_again.tensors}
    assert state.keys() == read_again.tensors.keys()
    assert sum(name.startswith("mtp.0.") for name in state) == 4 + 2 + 7 + 6
    for name, tensor in state.items():
        given = read_again.read_tensor(name)
        inside = tuple(slice(n) for n in given.shape)
        assert torch.equal(given, tensor[inside]), name


def test_a_file_without_tensors_of_the_layer_is_a_model_without_it(
    released: tuple[GPT, Path], tmp_path: Path
) -> None:
    ours, folder = released
    gone: dict[str, Tensor | None] = {n: None for n in tensors(folder) if ".layers.3." in n}
    assert len(gone) > 20
    plain = our_model(copied(folder, tmp_path / "plain", gone))
    assert plain.config == replace(ours.config, mtp_num_layers=0)
    tokens = text(150)
    assert torch.equal(our_logits(plain, tokens), our_logits(ours, tokens))
    some: dict[str, Tensor | None] = {"model.layers.3.enorm.weight": None}
    with pytest.raises(CheckpointError, match=r"no tensor 'model.layers.3.enorm.weight'"):
        ForeignModel(copied(folder, tmp_path / "some", some))


@pytest.mark.parametrize("name", ["embed_tokens", "shared_head.head"])
def test_a_copy_that_differs_is_refused(
    name: str, released: tuple[GPT, Path], tmp_path: Path
) -> None:
    _, folder = released
    name = f"model.layers.3.{name}.weight"
    other = tensors(folder)[name].clone()
    other[7, 3] += 1
    with pytest.raises(CheckpointError, match=f"{name}.*tied tensors differ"):
        our_model(copied(folder, tmp_path / "other", {name: other}))


def quantized(matrix: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a matrix in float8, the scales of its blocks, and the product of both."""
    down, right = -(-matrix.shape[0] // rows), -(-matrix.shape[1] // columns)
    stored = torch.empty_like(matrix, dtype=torch.float8_e4m3fn)
    scales, product = torch.empty(down, right), torch.empty_like(matrix)
    for i in range(down):
        for j in range(right):
            block = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            scales[i, j] = matrix[block].abs().max() / 448
            stored[block] = (matrix[block] / scales[i, j]).to(stored.dtype)
            product[block] = stored[block].float() * scales[i, j]
    return stored, scales, product


def test_weights_in_float8_give_the_logits_of_their_products(
    released: tuple[GPT, Path], tmp_path: Path
) -> None:
    _, folder = released
    stored: dict[str, Tensor | None] = {}
    products: dict[str, Tensor | None] = {}
    for name, tensor in tensors(folder).items():
        # Released files have these in float8, and others in bfloat16 or float32.
        if "_proj" in name and "eh_proj" not in name:
            matrix, scales, product = quantized(tensor, 8, 16)
            stored |= {name: matrix, f"{name}_scale_inv": scales}
            products[name] = product
    assert len(products) == 4 * 5 + 3 + 3 * 3 * 9
    settings = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [8, 16],
    }
    in_float8 = copied(
        folder, tmp_path / "float8", stored, quantization_config=settings, dtype="float32"
    )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        copied(folder, tmp_path / "products", products),
        attn_implementation="eager",
        experts_implementation="eager",
    ).eval()
    tokens = text(150)
    ours = our_model(in_float8)
    assert ours.config.mtp_num_layers == 1
    found = our_logits(ours, tokens)
    assert error(found, their_logits(theirs, tokens)) <= LIMIT
    assert error(found, our_logits(released[0], tokens)) > 10 * LIMIT  # rounding shows
