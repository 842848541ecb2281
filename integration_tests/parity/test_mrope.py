"""Rotary positions with three axes equal those of transformers and megatron-core."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from megatron_infer import SamplingParams, generate_tokens, load_model
from megatron_kernels import rope
from megatron_models import GPT, GPTConfig, Placement
from megatron_models.components.rotary.module import RotaryTable
from megatron_parallel import Mesh
from torch import Tensor
from transformers import (
    DynamicCache,
    Glm4vTextConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2VLTextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3VLTextConfig,
)
from transformers.models.glm4v import modeling_glm4v
from transformers.models.qwen2_vl import modeling_qwen2_vl
from transformers.models.qwen3_vl import modeling_qwen3_vl

HEADS, CHANNELS, LENGTH, POSITIONS, BASE = 4, 32, 19, 500, 1e6
SIZES: dict[str, Any] = {
    "num_hidden_layers": 3,
    "hidden_size": HEADS * CHANNELS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "head_dim": CHANNELS,
    "intermediate_size": 48,
    "rms_norm_eps": 1e-6,
    "vocab_size": 150,
    "max_position_embeddings": POSITIONS,
}
QWEN2 = Qwen2VLTextConfig, modeling_qwen2_vl, "Qwen2VL"
QWEN3 = Qwen3VLTextConfig, modeling_qwen3_vl, "Qwen3VLText"
GLM = Glm4vTextConfig, modeling_glm4v, "Glm4vText"


def angles(config: GPTConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    rotation = config.rotary_spec(CHANNELS)
    assert rotation is not None
    return RotaryTable(rotation, POSITIONS, Placement(Mesh.single()))(LENGTH, 0, positions)


def ours(sections: tuple[int, ...], **options: Any) -> GPTConfig:
    return GPTConfig(
        num_layers=1,
        hidden_size=HEADS * CHANNELS,
        num_attention_heads=HEADS,
        vocab_size=61,
        max_position_embeddings=POSITIONS,
        position_embedding_type="mrope",
        mrope_section=sections,
        rotary_base=BASE,
        **options,
    )


@pytest.mark.parametrize(
    ("theirs", "sections", "options"),
    [
        (QWEN2, (4, 6, 6), {}),
        (QWEN2, (0, 15, 1), {}),
        (QWEN2, (16, 0, 0), {}),
        (QWEN3, (6, 5, 5), {"mrope_interleaved": True}),
        (QWEN3, (12, 1, 3), {"mrope_interleaved": True}),
        (GLM, (2, 3, 3), {"rotary_interleaved": True, "rotary_percent": 0.5}),
    ],
)
def test_queries_turn_like_those_of_transformers(
    theirs: Any, sections: tuple[int, ...], options: dict[str, Any]
) -> None:
    generator = torch.Generator().manual_seed(1)
    positions = torch.randint(POSITIONS, (3, 2, LENGTH), generator=generator)
    queries = torch.randn(2, HEADS, LENGTH, CHANNELS, generator=generator)
    config_class, module, name = theirs
    parameters = {
        "rope_type": "default",
        "rope_theta": BASE,
        "mrope_section": list(sections),
        "partial_rotary_factor": options.get("rotary_percent", 1.0),
    }
    rotary = getattr(module, f"{name}RotaryEmbedding")(
        config_class(**SIZES, rope_parameters=parameters)
    )
    expected, _ = module.apply_rotary_pos_emb(queries, queries, *rotary(queries, positions))
    config = ours(sections, **options)
    found = rope(queries.permute(2, 0, 1, 3), *angles(config, positions), config.rotary_interleaved)
    torch.testing.assert_close(found.permute(1, 2, 0, 3), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("sections", [(4, 6, 6), (1, 0, 15)])
def test_angles_equal_those_of_megatron(megatron: Any, sections: tuple[int, ...]) -> None:
    embeddings = pytest.importorskip("megatron.core.models.common.embeddings.rotary_pos_embedding")
    rotary = embeddings.MultimodalRotaryEmbedding(CHANNELS, 1.0, rotary_base=BASE)
    positions = torch.randint(POSITIONS, (3, 2, LENGTH), generator=torch.Generator().manual_seed(2))
    expected = rotary(positions, list(sections))[:, :, 0, : CHANNELS // 2]
    for found, function in zip(
        angles(ours(sections), positions), (torch.cos, torch.sin), strict=True
    ):
        torch.testing.assert_close(found, function(expected), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("theirs", "plain", "config", "sections"),
    [
        (QWEN2, Qwen2ForCausalLM, Qwen2Config, (4, 6, 6)),
        (QWEN3, Qwen3ForCausalLM, Qwen3Config, (6, 5, 5)),
    ],
)
@torch.no_grad()
def test_a_text_model_reads_an_image_between_texts(
    theirs: Any, plain: Any, config: Any, sections: tuple[int, ...], tmp_path: Path
) -> None:
    torch.manual_seed(3)
    decoder = plain(config(**SIZES, rope_theta=BASE)).double().eval()
    for name, parameter in decoder.named_parameters():
        parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    decoder.save_pretrained(tmp_path)
    text_only = load_model(tmp_path, tokenizer=None, dtype=torch.float64).model
    assert isinstance(text_only, GPT) and isinstance(text_only.config, GPTConfig)
    model = GPT(
        replace(
            text_only.config,
            position_embedding_type="mrope",
            mrope_section=sections,
            mrope_interleaved=theirs is QWEN3,
        ),
        Placement(Mesh.single(), dtype=torch.float64),
    ).eval()
    model.load_state_dict(text_only.state_dict())

    config_class, module, name = theirs
    text_model = f"{name.removesuffix('Text')}TextModel"
    rotation = {"rope_type": "default", "rope_theta": BASE, "mrope_section": list(sections)}
    reference = getattr(module, text_model)(config_class(**SIZES, rope_parameters=rotation))
    reference.load_state_dict(decoder.model.state_dict())
    reference.double().eval()

    def their_logits(tokens: Tensor, positions: Tensor, cache: Any = None) -> Tensor:
        hidden = reference(input_ids=tokens, position_ids=positions, past_key_values=cache)
        return decoder.lm_head(hidden.last_hidden_state)

    tokens = torch.randint(150, (1, 20))
    image = torch.cartesian_prod(torch.arange(1), torch.arange(3), torch.arange(4)).t() + 5
    after = torch.arange(9, 12)  # after the longest side of the image
    positions = torch.cat([torch.arange(5).expand(3, -1), image, after.expand(3, -1)], 1)[:, None]
    expected = their_logits(tokens, positions)
    found = model(tokens, positions=positions)[:, :, :150].transpose(0, 1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert (expected - their_logits(tokens, torch.arange(20).expand(3, 1, -1))).abs().max() > 0.1

    cache, chosen = DynamicCache(), []
    logits = their_logits(tokens, positions, cache)
    for position in range(12, 24):
        chosen.append(int(logits[0, -1].argmax()))
        logits = their_logits(torch.tensor([chosen[-1:]]), torch.full((3, 1, 1), position), cache)
    greedy = SamplingParams(max_new_tokens=12, temperature=0.0)
    (found_tokens,) = generate_tokens(model, tokens.tolist(), greedy, positions=[positions[:, 0]])
    assert list(found_tokens.tokens) == chosen
    assert len(set(chosen)) > 3
