"""Self-attention and cross-attention as plain data. Importing this module does not import torch."""

from dataclasses import dataclass
from typing import ClassVar

from megatron_parallel import LayoutError, ParallelLayout, Sharding
from megatron_parallel.nearest import divisors, nearest
from megatron_parallel.sharding import Init
from megatron_parallel.tensor_parallel.specs import ColumnSpec, RowSpec

from megatron_models.components.attention.config import AttentionConfig
from megatron_models.components.attention.qk_norm_spec import QKNormSpec
from megatron_models.components.attention.span import Span
from megatron_models.components.fields import check_divisible
from megatron_models.components.mixer import (
    BytesByPart,
    ClippedRows,
    KVSpec,
    LayerPass,
    Mixer,
    Parameters,
    ParameterSpec,
    parameters_of,
    prefixed,
)
from megatron_models.components.norm.spec import NormConfig
from megatron_models.components.rotary.spec import RotarySpec
from megatron_models.components.saved_bytes import SavedBytes
from megatron_models.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(AttentionConfig, NormConfig, Mixer):
    """Self-attention with query groups: fused projection, attention, output projection.

    The rows of the fused weight ``(g, (n/g + 2) * d, h)`` are, for each group, those of its query
    heads, then its key, then its value. With ``attention_output_gate``, the rows of the gates of
    its heads follow those of the query heads. Queries and keys may be normalized (Henry et al.
    2020).

    Attributes:
        bidirectional: Whether the mask of the model lets tokens attend to later tokens too.
    """

    module: ClassVar[str] = "megatron_models.components.attention.module:Attention"

    bidirectional: bool = False

    def _check(self) -> None:
        super()._check()
        if self.qk_layernorm_scope == "projection" and self.normalization != "RMSNorm":
            raise ConfigError(
                "{qk_layernorm_scope} needs {normalization:name} 'RMSNorm', not "
                "{normalization:repr}",
                vars(self),
            )

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.num_attention_heads

    def qk_norms(self) -> dict[str, QKNormSpec]:
        """Returns the norms of queries and keys by name; empty without them."""
        if not self.qk_layernorm:
            return {}
        whole = self.qk_layernorm_scope == "projection"
        heads = {"q_norm": self.num_attention_heads, "k_norm": self.num_query_groups}
        return {
            name: self.component(
                QKNormSpec, hidden_size=self.kv_channels * (count if whole else 1), whole=whole
            )
            for name, count in heads.items()
        }

    @property
    def heads_by_role(self) -> tuple[int, ...]:
        """Heads of one group in the fused projection: queries, gates if any, key, value."""
        gates = (self.heads_per_group,) if self.attention_output_gate else ()
        return (self.heads_per_group, *gates, 1, 1)

    @property
    def qkv(self) -> ColumnSpec:
        """The fused projection. Ranks that share a group divide its rows."""
        sizes = tuple(heads * self.kv_channels for heads in self.heads_by_role)
        return ColumnSpec(
            self.hidden_size,
            (self.num_query_groups, sum(sizes)),
            self.has_qkv_bias,
            spill_dim=1,
            init=Init(scale=self.init_method_std),
            role="linear_qkv",
            fused_sizes=sizes,
        )

    @property
    def out(self) -> RowSpec:
        """The output projection, back to the residual stream."""
        return out_projection(self)

    def clipped_rows(self, alpha: float) -> ClippedRows:
        """Returns the rows of queries and keys in the fused projection of each group.

        Raises:
            ConfigError: Queries and keys are normed, so that scaled rows have no effect.
        """
        if self.qk_layernorm or self.qk_l2_norm:
            name = "qk_layernorm" if self.qk_layernorm else "qk_l2_norm"
            raise ConfigError(
                f"{name} norms queries and keys after the projection, so that scaled weights do "
                "not bound the scores; leave out one of both"
            )
        heads = self.heads_by_role
        exponents = (alpha, *(0.0,) * (len(heads) - 3), 1.0 - alpha, 0.0)
        rows = tuple(
            (count * self.kv_channels, exponent)
            for count, exponent in zip(heads, exponents, strict=True)
        )
        bias = {"qkv.bias": rows} if self.has_qkv_bias else {}
        return {"qkv.weight": rows, **bias}

    def sinks(self) -> dict[str, Sharding]:
        """Returns the sharding of learned sink logits ``[n]``; empty without learned sinks."""
        if self.softmax_type != "learnable":
            return {}
        init = Init(scale=self.init_method_std)
        return {"weight": Sharding((self.num_attention_heads,), "tp", 0, init=init)}

    def parameters(self, sequence_parallel: bool = False) -> Parameters:
        """Returns the parameters of projections, norms and sinks."""
        norms: Parameters = {}
        for name, norm in self.qk_norms().items():
            norms |= prefixed(name, norm.parameters(sequence_parallel))
        sinks = {name: ParameterSpec(sharding) for name, sharding in self.sinks().items()}
        return {
            **prefixed("qkv", parameters_of(self.qkv, sequence_parallel)),
            **norms,
            **prefixed("sinks", sinks),
            **prefixed("out", parameters_of(self.out, sequence_parallel)),
        }

    def cached(self, tp: int) -> KVSpec:
        """Returns the keys and values of one rank's query groups."""
        return KVSpec(self.groups_on_rank(tp), self.kv_channels, self.kv_channels)

    def rotations(self) -> tuple[RotarySpec, ...]:
        """Returns the rotation of queries and keys, if any."""
        return () if self.rotation is None else (self.rotation,)

    def packs_rope(self, tp: int) -> bool:
        """Returns whether one operation may rotate and separate all heads of the projection."""
        between = self.qk_layernorm or query_group_ranks(self, tp) > 1 or self.attention_output_gate
        return self.rotation is not None and not between

    def spans(self) -> tuple[Span, ...]:
        """Returns the span of the layer."""
        return (self.span,)

    def multiply_adds_per_pair(self) -> int:
        """Returns a multiply-add of each channel for the score, and one for the weighted value."""
        return 2 * self.query_size

    def activations(self, layer_pass: LayerPass) -> BytesByPart:
        """Returns the saved bytes. Under recomputation only queries, keys and values are saved."""
        saved_bytes, tp = self._saved_bytes(layer_pass.saved_bytes), layer_pass.tp
        unfused = not layer_pass.recompute.selects("core_attn")
        core, length = 0, layer_pass.sequence_length
        narrow = self.span.narrows(length)
        if unfused and narrow and not saved_bytes.per_score:
            core += length**2 * saved_bytes.window_mask
        if unfused:
            heads = layer_pass.tokens * self.num_attention_heads // tp
            core += heads * (saved_bytes.logsumexp + saved_bytes.per_score * length)
            core += heads // length * saved_bytes.dropout_mask_of_head(length)
            core += length**2 * saved_bytes.attention_mask
            core += self._saved_sinks(saved_bytes) // tp
        if unfused and self.attention_output_gate:
            # The output of attention, and the sigmoid of the gates in at least float32.
            each = saved_bytes.activation + max(saved_bytes.activation, 4)
            core += layer_pass.tokens * self.query_size // tp * each
        core += self._saved_norms(layer_pass.tokens, tp, saved_bytes)
        core += self._saved_l2_norms(layer_pass.tokens, tp, saved_bytes)
        if self.attn_temperature_scale:  # one factor for each position
            core += layer_pass.sequence_length * max(saved_bytes.activation, 4)
        return {
            "": core + self._query_key_value(layer_pass.tokens, tp, saved_bytes, unfused),
            "out": layer_pass.tokens * self.query_size // tp * saved_bytes.activation,
        }

    def input_saved_by(self, layer_pass: LayerPass) -> str | None:
        """Returns the fused projection."""
        return "qkv"

    def check_layout(self, layout: ParallelLayout) -> None:
        """Refuses tensor-parallel sizes that do not divide heads and query groups."""
        check_heads(self, layout.tp)

    def _saved_bytes(self, saved_bytes: SavedBytes) -> SavedBytes:
        """Returns the saved bytes with unfused attention, if the scores need it.

        A bound saves the hyperbolic tangents too.
        """
        if saved_bytes.fused_scores and self.position_embedding_type != "relative":
            return saved_bytes
        if self.attn_logit_softcapping:
            return saved_bytes.with_unfused_attention(max(saved_bytes.activation, 4))
        biased = self.position_embedding_type in ("alibi", "relative")
        plain = self.softmax_type == "vanilla" and not biased
        return saved_bytes if plain else saved_bytes.with_unfused_attention()

    def _saved_sinks(self, saved_bytes: SavedBytes) -> int:
        """Returns the bytes of all sinks; learned sinks of enough precision are parameters."""
        wide = max(saved_bytes.activation, 4)
        learned = self.softmax_type == "learnable" and saved_bytes.activation == wide
        return 0 if self.softmax_type == "vanilla" or learned else self.num_attention_heads * wide

    def _saved_norms(self, tokens: int, tp: int, saved_bytes: SavedBytes) -> int:
        """Returns the bytes that the norms of queries and keys save on one rank."""
        heads, groups = self.num_attention_heads // tp, self.groups_on_rank(tp)
        shapes = {"q_norm": (heads, heads == groups or groups == 1), "k_norm": (groups, True)}
        found = 0
        for name, norm in self.qk_norms().items():
            count, is_view = shapes[name]
            found += norm.saved_of_heads(
                tokens, count * self.kv_channels, saved_bytes, shares_input=is_view
            )
        return found

    def _saved_l2_norms(self, tokens: int, tp: int, saved_bytes: SavedBytes) -> int:
        """Returns the bytes of norms without gains on one rank, if norms are those of RMSNorm."""
        if not self.qk_l2_norm:
            return 0
        heads = self.num_attention_heads // tp + self.groups_on_rank(tp)
        of_input = saved_bytes.norm_input or saved_bytes.activation
        return tokens * heads * (self.kv_channels * of_input + saved_bytes.norm_statistic)

    def _query_key_value(self, tokens: int, tp: int, saved_bytes: SavedBytes, unfused: bool) -> int:
        """Returns the bytes of one rank's fused projection and of reordered copies.

        Ranks that share a group save all of its projection, including queries of other ranks.
        """
        heads, groups = self.num_attention_heads // tp, self.groups_on_rank(tp)
        if saved_bytes.qkv_copy and unfused:
            copied = tokens * (heads + 2 * groups) * self.kv_channels * saved_bytes.qkv_copy
            if all(norm.copies_input(saved_bytes) for norm in self.qk_norms().values()):
                return copied
            rows = groups * sum(self.heads_by_role)
            return copied + tokens * rows * self.kv_channels * saved_bytes.activation
        if saved_bytes.packs_rope and self.packs_rope(tp):
            return tokens * (heads + 2 * groups) * self.kv_channels * saved_bytes.activation
        copies = 0
        if self.rotary_dim or self.qk_layernorm:
            copies = heads + groups
        elif self.attn_temperature_scale or (
            heads > groups and (groups > 1 or (unfused and saved_bytes.per_score))
        ):
            copies = heads
        fused = groups * sum(self.heads_by_role)
        return tokens * (fused + copies) * self.kv_channels * saved_bytes.activation


@dataclass(frozen=True, kw_only=True)
class CrossAttentionSpec(AttentionConfig, Mixer):
    """Attention of a decoder to the encoder's output, without rotary positions.

    The rows of the queries' weight ``(n, d, h)`` are those of each head. The rows of the fused
    weight ``(g, 2 * d, h)`` are, for each group, its key, then its value.
    """

    module: ClassVar[str] = "megatron_models.components.attention.cross:CrossAttention"
    reads_source: ClassVar[bool] = True

    @property
    def bidirectional(self) -> bool:
        """Whether all query-key pairs count: yes."""
        return True

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.num_attention_heads

    @property
    def q(self) -> ColumnSpec:
        """The projection to queries."""
        rows = (self.num_attention_heads, self.kv_channels)
        init = Init(scale=self.init_method_std)
        return ColumnSpec(self.hidden_size, rows, self.has_qkv_bias, init=init, role="linear_q")

    @property
    def kv(self) -> ColumnSpec:
        """The fused projection of the encoder's output to keys and values."""
        return ColumnSpec(
            self.hidden_size,
            (self.num_query_groups, 2 * self.kv_channels),
            self.has_qkv_bias,
            spill_dim=1,
            init=Init(scale=self.init_method_std),
            role="linear_kv",
            fused_sizes=(self.kv_channels, self.kv_channels),
        )

    @property
    def out(self) -> RowSpec:
        """The output projection, back to the residual stream."""
        return out_projection(self)

    def parameters(self, sequence_parallel: bool = False) -> Parameters:
        """Returns the parameters of the three projections."""
        return {
            **prefixed("q", parameters_of(self.q, sequence_parallel)),
            **prefixed("kv", parameters_of(self.kv, sequence_parallel)),
            **prefixed("out", parameters_of(self.out, sequence_parallel)),
        }

    def multiply_adds_per_pair(self) -> int:
        """Returns a multiply-add of each channel for the score, and one for the weighted value."""
        return 2 * self.query_size

    def activations(self, layer_pass: LayerPass) -> BytesByPart:
        """Raises an error, since the saved bytes depend on the length of the source.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            "there is no formula for the activations that cross-attention saves, which depend on "
            "the length of the source; measure them with "
            "megatron_parallel.recompute.count_saved_activations"
        )

    def input_saved_by(self, layer_pass: LayerPass) -> str | None:
        """Returns the projection to queries."""
        return "q"

    def check_layout(self, layout: ParallelLayout) -> None:
        """Refuses tensor-parallel sizes that do not divide heads and query groups."""
        check_heads(self, layout.tp)


def out_projection(config: AttentionConfig) -> RowSpec:
    """Returns the projection of all heads back to the residual stream."""
    bias, init = config.has_attention_out_bias, Init(scale=config.output_std)
    return RowSpec(config.query_size, config.hidden_size, bias, init=init, role="linear_proj")


def check_heads(config: AttentionConfig, tp: int) -> None:
    """Refuses a tensor-parallel size that does not divide heads and query groups.

    Raises:
        ConfigError: The sizes do not fit; the message names the fields.
    """
    check_divisible(config, "num_attention_heads", "tp", tp)
    groups = config.num_query_groups
    if groups % tp and tp % groups:
        sizes = divisors(config.num_attention_heads)
        fitting = [size for size in sizes if not (groups % size and size % groups)]
        raise ConfigError(
            "{tp} and {num_query_groups}: one must be a multiple of the other; use {tp:name} "
            f"{nearest(fitting, tp)}",
            {**vars(config), "tp": tp},
        )


def query_group_ranks(config: AttentionConfig, tp: int) -> int:
    """Returns how many of ``tp`` ranks share a query group.

    Raises:
        LayoutError: The heads of a group do not divide over its ranks.
    """
    ranks_per_group = tp // min(tp, config.num_query_groups)
    if config.heads_per_group % ranks_per_group:
        raise LayoutError(
            f"{ranks_per_group} of {tp} tensor-parallel ranks share a query group and cannot "
            f"share its {config.heads_per_group} heads equally: heads ("
            f"{config.num_attention_heads}) must be a multiple of the ranks"
        )
    return ranks_per_group
