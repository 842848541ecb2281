"""The peer of the benchmarks: a Llama written by hand with torch's own modules."""

from functools import partial

import torch
from megatron_models import GPT, GPTConfig
from torch import Tensor, nn
from torch.nn import functional


class PlainLayer(nn.Module):
    """A Llama layer written by hand, batch first."""

    def __init__(self, config: GPTConfig, dtype: torch.dtype) -> None:
        super().__init__()
        linear = partial(nn.Linear, bias=False, dtype=dtype)
        hidden, ffn = config.hidden_size, config.ffn_hidden_size
        self.heads, self.groups = config.num_attention_heads, config.num_query_groups
        self.channels = config.kv_channels
        self.norm_1 = nn.RMSNorm(hidden, eps=config.norm_epsilon, dtype=dtype)
        width = (self.heads + 2 * self.groups) * self.channels
        self.qkv = linear(hidden, width)
        self.proj = linear(hidden, hidden)
        self.norm_2 = nn.RMSNorm(hidden, eps=config.norm_epsilon, dtype=dtype)
        self.gate_up = linear(hidden, 2 * ffn)
        self.down = linear(ffn, hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, s, h = x.shape
        qkv = self.qkv(self.norm_1(x)).view(b, s, -1, self.channels).transpose(1, 2)
        q, k, v = qkv.split((self.heads, self.groups, self.groups), 1)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        grouped = self.groups < self.heads
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        x = x + self.proj(y.transpose(1, 2).reshape(b, s, h))
        gate, up = self.gate_up(self.norm_2(x)).chunk(2, -1)
        return x + self.down(functional.silu(gate) * up)


class PlainLlama(nn.Module):
    """The peer: rotary positions, untied output, cross entropy."""

    def __init__(self, config: GPTConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.word = nn.Embedding(config.padded_vocab_size, config.hidden_size, dtype=dtype)
        self.layers = nn.ModuleList(PlainLayer(config, dtype) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_epsilon, dtype=dtype)
        self.output = nn.Linear(
            config.hidden_size, config.padded_vocab_size, bias=False, dtype=dtype
        )
        channels = config.kv_channels
        powers = torch.arange(0, channels, 2, dtype=torch.float64) / channels
        positions = torch.arange(config.max_position_embeddings, dtype=torch.float64)
        angles = torch.outer(positions, config.rotary_base**-powers).repeat(1, 2)
        self.tables = angles.cos().float(), angles.sin().float()

    def forward(self, tokens: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
        """Returns the cross entropy of `labels`, `[b, s]` like `tokens`."""
        x = self.word(tokens)
        cos, sin = (table[: tokens.shape[1]].to(x.dtype) for table in self.tables)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = self.output(self.norm(x)).flatten(0, 1).float()
        return functional.cross_entropy(logits, labels.flatten(), reduction=reduction)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns `[b, n, s, d]` rotated by the angles of its positions."""
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


def plain_llama(model: GPT) -> PlainLlama:
    """Returns the peer with the weights of our model, in their dtype."""
    config = model.config
    heads, groups = config.num_attention_heads, config.num_query_groups
    d, hidden = config.kv_channels, config.hidden_size
    ours = {name: value.detach() for name, value in model.named_parameters()}
    state = {
        "word.weight": ours["embedding.word.weight"],
        "norm.weight": ours["final_norm.weight"],
        "output.weight": ours["output.weight"],
    }
    for i in range(config.num_layers):
        own = {
            name.removeprefix(f"layers.{i}."): value
            for name, value in ours.items()
            if name.startswith(f"layers.{i}.")
        }
        by_group = own["attention.qkv.weight"].view(groups, heads // groups + 2, d, hidden)
        parts = by_group[:, :-2], by_group[:, -2], by_group[:, -1]
        state |= {
            f"layers.{i}.norm_1.weight": own["attention_norm.weight"],
            f"layers.{i}.qkv.weight": torch.cat([part.reshape(-1, hidden) for part in parts]),
            f"layers.{i}.proj.weight": own["attention.out.weight"],
            f"layers.{i}.norm_2.weight": own["mlp_norm.weight"],
            f"layers.{i}.gate_up.weight": own["mlp.up.weight"].reshape(-1, hidden),
            f"layers.{i}.down.weight": own["mlp.down.weight"],
        }
    norm = ours["final_norm.weight"]
    with norm.device:
        peer = PlainLlama(config, norm.dtype)
    peer.load_state_dict(state)
    return peer
