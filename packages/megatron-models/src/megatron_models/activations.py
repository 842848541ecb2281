"""Bytes of activations that one layer keeps for its backward pass, term by term.

The terms are those of Korthikanti et al. 2022 ("Reducing Activation Recomputation in Large
Transformer Models", section 4), evaluated with the bytes that the operations in use keep: element
size, width of stored dropout masks, attention written out or fused, norm fused or not. With the
paper's own (`Keeping.paper()`: bfloat16, masks of one byte, attention written out) they add up to
its constants: `s b h (34 + 5 a s / h)` for a layer, `s b h (10 + 24/t + 5 a s / (h t))` with tensor
parallelism, that divided by `t` in all its terms with sequence parallelism, `34 s b h / t` with
selective and `2 s b h` with full recomputation.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_parallel import Recompute

from megatron_models.config import GPTConfig
from megatron_models.expert_activations import (
    ExpertRanks,
    expert_activations,
    reads_stream,
)


@dataclass(frozen=True)
class Keeping:
    """What operations keep, in bytes.

    Attributes:
        element: of an activation.
        mask: of an element of a dropout mask; 0 where it is a hash, computed again.
        square: of each query and key, for each head: scores, probabilities and what dropout makes
            of them; 0 for fused attention.
        pair: of each query and key, for all heads and samples: whether it may attend. Documents
            make it one for each sample, which is not counted here.
        row: of each query, for each head: the logarithm of its sum of exponentials.
        attended: of an element of queries, keys and values, where attention keeps copies in another
            precision instead of them; 0 where it keeps them as they are.
        statistic: of a number that a norm keeps for each token.
        normalised: of an element of the normalised input, where a norm keeps it too.
        norm_input: of an element of a norm's input, where it is kept in another precision.
        number: of a channel's number that hidden dropout keeps.
        key_number: of a key's number that attention dropout keeps, for each head.
    """

    element: int
    mask: int = 0
    square: int = 0
    pair: int = 0
    row: int = 4
    attended: int = 0
    statistic: int = 4
    normalised: int = 0
    norm_input: int = 0
    number: int = 0
    key_number: int = 0

    @classmethod
    def paper(cls) -> "Keeping":
        """bfloat16; of each probability itself, its mask and what dropout leaves: 2 + 1 + 2."""
        return cls(element=2, mask=1, square=5, row=0, statistic=0)

    @classmethod
    def cpu(
        cls,
        element: int,
        normalization: str,
        *,
        hidden_dropout: bool = False,
        attention_dropout: bool = False,
    ) -> "Keeping":
        """What this package's operations keep on CPUs.

        Attention dropout needs attention written out, in at least float32, which keeps the scores,
        the probabilities and what dropout leaves of them, for each row its logarithm and whether
        it has one, and in each layer the causal mask. RMSNorm is not fused and computes in at least
        float32.
        """
        wide = max(element, 4)
        rms = normalization == "RMSNorm"
        return cls(
            element=element,
            square=3 * wide if attention_dropout else 0,
            pair=1 if attention_dropout else 0,
            row=wide + 1 if attention_dropout else wide,
            attended=wide if attention_dropout and element < 4 else 0,
            statistic=wide if rms else element,
            normalised=wide if rms else 0,
            norm_input=wide if rms else 0,
            number=4 if hidden_dropout else 0,
            key_number=4 if attention_dropout else 0,
        )


Terms = dict[str, int]
"""Bytes by the operation that keeps them."""


def layer_activations(
    config: GPTConfig,
    sequence_length: int,
    micro_batch_size: int,
    keeping: Keeping,
    *,
    layer: int = 0,
    tp: int = 1,
    sequence_parallel: bool = False,
    recompute: Recompute | None = None,
    experts: ExpertRanks | None = None,
) -> Terms:
    """Return what one layer keeps of one micro-batch on one rank, by the part that keeps it.

    What all layers share (tables, dropout keys) is left out. Full recomputation is a matter of
    several layers: see `stack_activations`.

    Args:
        config: the model.
        sequence_length: `s`, all of it.
        micro_batch_size: `b`.
        keeping: what operations keep.
        layer: its number; some may have experts in place of a feed-forward layer.
        tp: `t`, ranks over which heads and feed-forward layer are cut.
        sequence_parallel: whether what lies between is cut along the sequence over them.
        recompute: of parts of a layer.
        experts: how experts are cut; by default all of them are on every rank, cut like the
            feed-forward layer. Where some are on other ranks, what a rank keeps depends on the
            routing: this is the mean over ranks.
    """
    plan = recompute or Recompute()
    tokens = sequence_length * micro_batch_size
    outside = tokens // tp if sequence_parallel else tokens  # of these, outside of the cut parts
    stream = outside * config.hidden_size
    size, norm_again = keeping.element, plan.does("layernorm")
    norm = stream * (keeping.norm_input or size) + stream * keeping.normalised
    norm += outside * keeping.statistic * (2 if config.normalization == "LayerNorm" else 1)
    query = tokens * config.query_size // tp
    heads = tokens * config.num_attention_heads // tp
    core = 0
    if not plan.does("core_attn"):
        core = heads * (keeping.row + keeping.square * sequence_length)
        core += sequence_length**2 * keeping.pair
        core += config.num_attention_heads // tp * sequence_length * keeping.key_number
    read = {"mlp.up": 0 if norm_again else stream * size}
    if config.moe_layers[layer]:
        inside: Terms = {}
        if not plan.does("moe"):
            inside = expert_activations(config, tokens, size, tp, experts or ExpertRanks())
            if not reads_stream(config, size):
                read = {}
    else:
        inside = {} if plan.does("mlp") else _feed_forward(config, tokens // tp, size)
    return {
        "attention_norm": norm,
        "attention.qkv": 0 if norm_again else stream * size,
        "attention": core
        + _query_key_value(config, tokens, tp, keeping, not plan.does("core_attn")),
        "attention.out": query * size,
        "dropout": 2 * (stream * keeping.mask + config.hidden_size * keeping.number),
        "mlp_norm": norm,
        **read,
        **inside,
    }


def _feed_forward(config: GPTConfig, tokens: int, size: int) -> Terms:
    """Input and output of the activation; SwiGLU also keeps the activated gate."""
    width = tokens * config.ffn_hidden_size * size
    return {"mlp": width * (3 if config.gated else 1), "mlp.down": width}


def _query_key_value(config: GPTConfig, tokens: int, tp: int, keep: Keeping, written: bool) -> int:
    """The fused projection of one rank, and copies of what is rotated or put in another order.

    Ranks that share a group keep all of its projection, other ranks' queries too.
    """
    heads, groups = config.num_attention_heads // tp, config.groups_on_rank(tp)
    if keep.attended and written:
        return tokens * (heads + 2 * groups) * config.kv_channels * keep.attended
    copies = 0
    if config.rotary_dim:
        copies = heads + groups
    elif heads > groups and (groups > 1 or (written and keep.square)):
        copies = heads
    fused = groups * (config.heads_per_group + 2)
    return tokens * (fused + copies) * config.kv_channels * keep.element


def stack_activations(
    config: GPTConfig,
    sequence_length: int,
    micro_batch_size: int,
    keeping: Keeping,
    *,
    layers: Sequence[int] | None = None,
    tp: int = 1,
    sequence_parallel: bool = False,
    recompute: Recompute | None = None,
    experts: ExpertRanks | None = None,
) -> int:
    """Return what the layers of one stage keep of one micro-batch, in bytes on the device.

    Args as for `layer_activations`, and ``layers``, the numbers of those of the stage; by default
    all. What waits in host memory is not counted.
    """
    plan = recompute or Recompute()
    numbers = range(config.num_layers) if layers is None else layers
    whole = sequence_length * micro_batch_size * config.hidden_size * keeping.element
    cut = sequence_parallel or plan.distribute_saved_activations
    kept_input = -(-whole // tp) if cut else whole

    def each(layer: int) -> int:
        terms = layer_activations(
            config,
            sequence_length,
            micro_batch_size,
            keeping,
            layer=layer,
            tp=tp,
            sequence_parallel=sequence_parallel,
            recompute=plan,
            experts=experts,
        )
        return sum(terms.values())

    total = done = 0
    for group in plan.groups(numbers):
        if done >= plan.cpu_offloading_num_layers:
            total += kept_input if group.again else sum(map(each, group.layers))
        done += len(group.layers)
    return total
