"""Multi-latent attention as plain data. Importing this module does not import torch."""

from dataclasses import dataclass
from typing import ClassVar

from megatron_parallel import ParallelLayout
from megatron_parallel.sharding import Init
from megatron_parallel.tensor_parallel.specs import ColumnSpec, ReplicatedSpec, RowSpec

from megatron_models.components.fields import check_divisible
from megatron_models.components.latent_attention.config import LatentAttentionConfig
from megatron_models.components.mixer import (
    BytesByPart,
    ClippedRows,
    KVSpec,
    LayerPass,
    Mixer,
    Parameters,
    parameters_of,
    prefixed,
)
from megatron_models.components.norm.spec import NormConfig, NormSpec
from megatron_models.components.rotary.spec import RotarySpec


@dataclass(frozen=True, kw_only=True)
class LatentAttentionSpec(LatentAttentionConfig, NormConfig, Mixer):
    """Multi-latent attention (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1).

    A token's latent of keys and values, ``kv_lora_rank`` channels, is projected up to the key and
    the value of each head. A second key of ``qk_pos_emb_head_dim`` rotated channels is shared by
    all heads. Queries come from a latent of their own, or directly from the token.

    The projections to latents are small, and every tensor-parallel rank holds them whole, as in
    Megatron-Core: cut, they would need a gather of the latents before each norm. The projections up
    are cut by heads. The rows of ``q_up`` (or ``q``), ``(n, qk + rotated, rank)``, are for each
    head those without and with rotation; those of ``kv_up``, ``(n, qk + v, rank)``, its key, then
    its value. The last rows of ``kv_down`` are the shared key.
    """

    module: ClassVar[str] = "megatron_models.components.latent_attention.module:LatentAttention"

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.num_attention_heads

    @property
    def q(self) -> ColumnSpec:
        """The projection of the token, or of its latent, to the queries of all heads."""
        rows, init = (self.num_attention_heads, self.kv_channels), Init(scale=self.init_method_std)
        if self.q_lora_rank:
            return ColumnSpec(self.q_lora_rank, rows, False, init=init, role="linear_q_up_proj")
        return ColumnSpec(self.hidden_size, rows, False, init=init, role="linear_q_proj")

    @property
    def q_down(self) -> ReplicatedSpec | None:
        """The projection of the token to the latent of queries, or None."""
        return self._down(self.q_lora_rank, "linear_q_down_proj") if self.q_lora_rank else None

    @property
    def kv_down(self) -> ReplicatedSpec:
        """The projection of the token to the latent of keys and values, and the shared key."""
        return self._down(self.kv_lora_rank + self.qk_pos_emb_head_dim, "linear_kv_down_proj")

    @property
    def kv_up(self) -> ColumnSpec:
        """The projection of the latent to the key and the value of each head."""
        sizes = (self.qk_head_dim, self.v_head_dim)
        return ColumnSpec(
            self.kv_lora_rank,
            (self.num_attention_heads, sum(sizes)),
            False,
            init=Init(scale=self.init_method_std),
            role="linear_kv_up_proj",
            fused_sizes=sizes,
        )

    @property
    def q_norm(self) -> NormSpec | None:
        """The norm of the latent of queries, or None."""
        return self._norm(self.q_lora_rank) if self.q_lora_rank else None

    @property
    def kv_norm(self) -> NormSpec | None:
        """The norm of the latent of keys and values, or None."""
        return self._norm(self.kv_lora_rank)

    @property
    def out(self) -> RowSpec:
        """The output projection, back to the residual stream."""
        sizes, init = (self._values, self.hidden_size), Init(scale=self.output_std)
        return RowSpec(*sizes, self.has_attention_out_bias, init=init, role="linear_proj")

    def parameters(self, sequence_parallel: bool = False) -> Parameters:
        """Returns the parameters of projections and norms, in the order of the module."""
        found: Parameters = {}
        if self.q_down is not None:
            found |= prefixed("q_down", parameters_of(self.q_down, sequence_parallel))
        if self.q_norm is not None:
            found |= prefixed("q_norm", self.q_norm.parameters(sequence_parallel))
        found |= prefixed(self.q_name, parameters_of(self.q, sequence_parallel))
        found |= prefixed("kv_down", parameters_of(self.kv_down, sequence_parallel))
        if self.kv_norm is not None:
            found |= prefixed("kv_norm", self.kv_norm.parameters(sequence_parallel))
        found |= prefixed("kv_up", parameters_of(self.kv_up, sequence_parallel))
        return found | prefixed("out", parameters_of(self.out, sequence_parallel))

    @property
    def q_name(self) -> str:
        """Name of the last projection of queries: ``q_up`` after a latent, else ``q``."""
        return "q_up" if self.q_lora_rank else "q"

    def clipped_rows(self, alpha: float) -> ClippedRows:
        """Returns the rows of queries and keys of each head.

        All heads share the rotated key, which is not scaled. The factor of the rotated queries is
        therefore that of both.
        """
        queries = ((self.qk_head_dim, alpha), (self.qk_pos_emb_head_dim, 1.0))
        keys = ((self.qk_head_dim, 1.0 - alpha), (self.v_head_dim, 0.0))
        return {f"{self.q_name}.weight": queries, "kv_up.weight": keys}

    def rotations(self) -> tuple[RotarySpec, ...]:
        """Returns the rotation of queries and of the shared key."""
        return () if self.rotation is None else (self.rotation,)

    def cached(self, tp: int) -> KVSpec:
        """Returns one latent and one rotated key for all heads, which every rank holds."""
        del tp
        channels = self.kv_lora_rank + self.qk_pos_emb_head_dim
        return KVSpec(1, channels, self.kv_lora_rank, values_in_keys=True)

    def multiply_adds_per_pair(self) -> int:
        """Returns a multiply-add of each channel for the score, and one for the weighted value."""
        return self.num_attention_heads * self.kv_channels + self._values

    def activations(self, layer_pass: LayerPass) -> BytesByPart:
        """Returns the saved bytes, with fused or unfused attention."""
        saved_bytes, tp = layer_pass.saved_bytes, layer_pass.tp
        if self.attn_logit_softcapping:
            saved_bytes = saved_bytes.with_unfused_attention(max(saved_bytes.activation, 4))
        size, tokens = saved_bytes.activation, layer_pass.tokens
        heads, length = self.num_attention_heads // tp, layer_pass.sequence_length
        keys, values = heads * self.kv_channels, heads * self.v_head_dim
        once = not layer_pass.recompute.selects("core_attn")
        padded = self.v_head_dim < self.kv_channels and saved_bytes.pads_values
        padded = padded and not saved_bytes.per_score
        latents_only = layer_pass.recompute.selects("mla_up_proj")
        projected = 0 if latents_only else 2 * keys + values
        core = tokens * self.qk_pos_emb_head_dim * size * latents_only
        if once:
            per_row = saved_bytes.logsumexp + saved_bytes.per_score * length
            core += tokens * heads * per_row + length**2 * saved_bytes.attention_mask
            core += tokens // length * heads * saved_bytes.dropout_mask_of_head(length)
        if once and saved_bytes.qkv_copy:
            core += tokens * (2 * keys + values) * saved_bytes.qkv_copy
        elif once and padded:  # values and output are as wide as keys
            core += tokens * (2 if latents_only else 4) * keys * size
        else:
            core += tokens * projected * size
        latents = layer_pass.stream_tokens
        if padded and heads == 1:  # the output is a view of the padded one
            values = 0 if once else keys
        found = {"": core, "out": tokens * values * size}
        for name, norm, rank in (
            ("q", self.q_norm, self.q_lora_rank),
            ("kv", self.kv_norm, self.kv_lora_rank),
        ):
            if norm is not None:
                found[f"{name}_norm"] = norm.activation_bytes(layer_pass)
            gathered = layer_pass.sequence_parallel and tp > 1
            linear = saved_bytes.of_linear(latents * rank, gathered=gathered)
            found[f"{name}_up"] = latents * rank * size if latents_only else linear
        if saved_bytes.linear_input and not layer_pass.recompute.selects("layernorm"):
            # Both first projections convert the input; one of them is counted as its reader.
            found["kv_down"] = saved_bytes.of_linear(latents * self.hidden_size)
        return found

    def input_saved_by(self, layer_pass: LayerPass) -> str | None:
        """Returns the first projection of queries."""
        return "q_down" if self.q_lora_rank else "q"

    @property
    def gathers_input(self) -> bool:
        """Whether queries have no latent, whose projection every rank holds."""
        return not self.q_lora_rank

    def check_layout(self, layout: ParallelLayout) -> None:
        """Refuses tensor-parallel sizes that do not divide the heads."""
        check_divisible(self, "num_attention_heads", "tp", layout.tp)

    @property
    def _values(self) -> int:
        """Width of the values of all heads."""
        return self.num_attention_heads * self.v_head_dim

    def _down(self, rows: int, role: str) -> ReplicatedSpec:
        bias, init = self.add_qkv_bias, Init(scale=self.init_method_std)
        return ReplicatedSpec(self.hidden_size, rows, bias, init=init, role=role)

    def _norm(self, rank: int) -> NormSpec | None:
        if not self.qk_layernorm:
            return None
        epsilon = self.latent_norm_epsilon or self.norm_epsilon
        return self.component(NormSpec, hidden_size=rank, norm_epsilon=epsilon)
