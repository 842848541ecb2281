"""An encoder-decoder generates the tokens of transformers' Blenderbot in float64.

Blenderbot (Roller et al. 2020) has pre-norm sublayers, learned positions and a final norm after
encoder and decoder, as our model has. Its embeddings are one weight; ours has three copies of it.
"""

from typing import Any

import pytest
import torch
from megatron_infer import SamplingParams, generate_tokens
from megatron_models import EncoderDecoder, EncoderDecoderConfig, Placement, find_kind
from megatron_parallel import Mesh, ParallelLayout
from megatron_parallel.testing import WorkerPool

transformers = pytest.importorskip("transformers")

VOCABULARY, WIDTH, HEADS, LAYERS, FFN, POSITIONS, NEW = 64, 32, 4, 2, 48, 40, 12
SOURCES = [[9, 4, 33, 2, 7], [5], [50, 51, 3, 4, 5, 6, 7, 8, 20], [12, 60]]
START, PADDING = 1, 0


def blenderbot() -> Any:
    """Returns a random model with non-zero biases whose tokens depend on the source."""
    torch.manual_seed(7)
    config = transformers.BlenderbotConfig(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        encoder_layers=LAYERS,
        decoder_layers=LAYERS,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=FFN,
        decoder_ffn_dim=FFN,
        max_position_embeddings=POSITIONS,
        decoder_start_token_id=START,
        pad_token_id=PADDING,
        bos_token_id=None,
        eos_token_id=None,
        forced_eos_token_id=None,
        encoder_no_repeat_ngram_size=0,
    )
    model = transformers.BlenderbotForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            gain = "norm" in name and name.endswith("weight")
            parameter.normal_(1.0 if gain else 0.0, 0.4)
    return model.double().eval()


def linear(state: dict[str, torch.Tensor], *names: str) -> dict[str, torch.Tensor]:
    """Returns weights and biases of projections, fused by heads."""
    return {
        kind: torch.stack([state[f"{name}.{kind}"].unflatten(0, (HEADS, -1)) for name in names], 1)
        for kind in ("weight", "bias")
    }


def as_ours(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns Blenderbot's weights with our names."""
    made = {"output.weight": state["lm_head.weight"]}
    for half in ("encoder", "decoder"):
        side = f"model.{half}"
        made[f"{half}.embedding.word.weight"] = state["model.shared.weight"]
        made[f"{half}.embedding.position.weight"] = state[f"{side}.embed_positions.weight"]
        plain = {f"{side}.layer_norm": f"{half}.final_norm"}
        for number in range(LAYERS):
            theirs, ours = f"{side}.layers.{number}", f"{half}.layers.{number}"
            plain |= {
                f"{theirs}.self_attn_layer_norm": f"{ours}.attention_norm",
                f"{theirs}.self_attn.out_proj": f"{ours}.attention.out",
                f"{theirs}.final_layer_norm": f"{ours}.mlp_norm",
                f"{theirs}.fc1": f"{ours}.mlp.up",
                f"{theirs}.fc2": f"{ours}.mlp.down",
            }
            parts = [f"{theirs}.self_attn.{one}_proj" for one in "qkv"]
            fused = {f"{ours}.attention.qkv": linear(state, *parts)}
            if half == "decoder":
                cross = f"{theirs}.encoder_attn"
                plain |= {
                    f"{cross}_layer_norm": f"{ours}.cross_attention_norm",
                    f"{cross}.out_proj": f"{ours}.cross_attention.out",
                }
                fused[f"{ours}.cross_attention.q"] = linear(state, f"{cross}.q_proj")
                both = linear(state, f"{cross}.k_proj", f"{cross}.v_proj")
                fused[f"{ours}.cross_attention.kv"] = both
            for name, tensors in fused.items():
                made |= {f"{name}.{kind}": value.flatten(1, 2) for kind, value in tensors.items()}
        for name, ours in plain.items():
            made |= {f"{ours}.{kind}": state[f"{name}.{kind}"] for kind in ("weight", "bias")}
    return made


def ours(mesh: Mesh, state: dict[str, torch.Tensor]) -> list[EncoderDecoder]:
    """Returns this rank's stages with Blenderbot's weights."""
    config = EncoderDecoderConfig(
        num_layers=LAYERS,
        encoder_num_layers=LAYERS,
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        ffn_hidden_size=FFN,
        vocab_size=VOCABULARY,
        make_vocab_size_divisible_by=VOCABULARY,
        max_position_embeddings=POSITIONS,
        untie_embeddings_and_output_weights=True,
        separate_decoder_embedding=True,
    )
    stages = find_kind("t5").build(config, Placement(mesh, dtype=torch.float64))
    weights = as_ours(state)
    for stage in stages:
        for name, parameter in stage.named_parameters():
            assert parameter.shape == weights[name].shape, name
            parameter.data.copy_(weights[name])
    return stages  # type: ignore[return-value]


@torch.no_grad()
def theirs(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the greedy tokens of all sources in one batch, and their log-probabilities."""
    width = max(map(len, SOURCES))
    padded = torch.tensor([[*one, *[PADDING] * (width - len(one))] for one in SOURCES])
    seen = torch.tensor([[1] * len(one) + [0] * (width - len(one)) for one in SOURCES])
    found = model.generate(
        padded,
        attention_mask=seen,
        max_new_tokens=NEW,
        min_length=0,
        num_beams=1,
        do_sample=False,
        no_repeat_ngram_size=0,
    )
    # Other results of `generate` are in float32.
    known = model(padded, attention_mask=seen, decoder_input_ids=found[:, :-1]).logits
    scores = known.log_softmax(-1).gather(-1, found[:, 1:].unsqueeze(-1)).squeeze(-1)
    return found[:, 1:], scores


def test_tokens_and_probabilities_equal_those_of_blenderbot(worker_pool: WorkerPool) -> None:
    model = blenderbot()
    tokens, known = theirs(model)
    assert len({tuple(row) for row in tokens.tolist()}) == len(SOURCES)
    state = model.state_dict()
    greedy = SamplingParams(max_new_tokens=NEW, temperature=0.0)
    starts = [[START]] * len(SOURCES)

    def written(mesh: Mesh) -> list:
        stages = ours(mesh, state)
        return generate_tokens(stages, starts, greedy, sources=SOURCES, log_probs=True)

    for found in (
        written(Mesh.single()),
        *worker_pool.run_mesh(ParallelLayout(pp=2, dp=1), written),
    ):
        assert [one.tokens for one in found] == [tuple(row) for row in tokens.tolist()]
        made = torch.tensor([one.log_probs for one in found], dtype=torch.float64)
        torch.testing.assert_close(made, known, rtol=0, atol=1e-9)
