"""The peer of the benchmarks: a GPT written by hand with torch's own modules."""

from functools import partial

import torch
from megatron_models import GPT, GPTConfig
from torch import Tensor, nn
from torch.nn import functional


class PlainBlock(nn.Module):
    """A GPT-2 block written by hand, batch first."""

    def __init__(self, config: GPTConfig, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, ffn = config.hidden_size, config.ffn_hidden_size
        linear = partial(nn.Linear, dtype=dtype)
        self.heads = config.num_attention_heads
        self.ln_1 = nn.LayerNorm(hidden, eps=config.norm_epsilon, dtype=dtype)
        self.qkv = linear(hidden, 3 * hidden)
        self.proj = linear(hidden, hidden)
        self.ln_2 = nn.LayerNorm(hidden, eps=config.norm_epsilon, dtype=dtype)
        self.up = linear(hidden, ffn)
        self.down = linear(ffn, hidden)

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        qkv = self.qkv(self.ln_1(x)).view(b, s, 3, self.heads, h // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, s, h))
        return x + self.down(functional.gelu(self.up(self.ln_2(x))))


class PlainGPT(nn.Module):
    """The peer: learned positions, tied output, mean cross entropy."""

    def __init__(self, config: GPTConfig, dtype: torch.dtype) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.word = nn.Embedding(config.padded_vocab_size, hidden, dtype=dtype)
        self.position = nn.Embedding(config.max_position_embeddings, hidden, dtype=dtype)
        self.blocks = nn.ModuleList(PlainBlock(config, dtype) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(hidden, eps=config.norm_epsilon, dtype=dtype)

    def forward(self, tokens: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
        """Returns the cross entropy of `labels`, `[b, s]` like `tokens`."""
        x = self.word(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.norm(x), self.word.weight)
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction)


def plain_copy(model: GPT) -> PlainGPT:
    """Returns the peer with the weights of our model, in their dtype."""
    config = model.config
    heads, d = config.num_attention_heads, config.kv_channels
    ours = {name: value.detach() for name, value in model.named_parameters()}
    norm = ours["final_norm.weight"]
    with norm.device:
        peer = PlainGPT(config, norm.dtype)
    names = {"ln_1": "attention_norm", "proj": "attention.out", "ln_2": "mlp_norm"}
    names |= {"up": "mlp.up", "down": "mlp.down"}
    state = {
        "word.weight": ours["embedding.word.weight"],
        "position.weight": ours["embedding.position.weight"],
    }
    for part in ("weight", "bias"):
        state[f"norm.{part}"] = ours[f"final_norm.{part}"]
        for i in range(config.num_layers):
            for theirs, name in names.items():
                state[f"blocks.{i}.{theirs}.{part}"] = ours[f"layers.{i}.{name}.{part}"]
            fused = ours[f"layers.{i}.attention.qkv.{part}"]
            fused = fused.view(heads, 3, d, *fused.shape[2:]).transpose(0, 1)
            state[f"blocks.{i}.qkv.{part}"] = fused.reshape(3 * heads * d, *fused.shape[3:])
    peer.load_state_dict(state)
    return peer
