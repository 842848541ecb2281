"""The model against the same mathematics in float64 loops.

Dropout is a factor for each element: 0, or 1 / (1 - p).
"""

import json
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from megatron_models.components.dropout import Dropout
from megatron_models.models.gpt.model import GPT
from megatron_models.placement import Placement
from megatron_parallel import DropoutKey, Mesh
from megatron_parallel.dropout import keep_mask

pytestmark = pytest.mark.sampled(2)


def inverse_frequencies(config):
    dim = config.rotary_dim
    result = []
    for pair in range(dim // 2):
        frequency = config.rotary_base ** (-2 * pair / dim)
        if config.rope_scaling_type == "linear":
            frequency /= config.rope_scaling_factor
        if config.rope_scaling_type == "llama3":
            low, high = config.rope_scaling_low_freq_factor, config.rope_scaling_high_freq_factor
            turns = config.rope_scaling_original_length * frequency / (2 * math.pi)
            smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
            frequency *= smooth + (1 - smooth) / config.rope_scaling_factor
        result.append(frequency)
    return result


def rotate(head, position, config):
    """Rotates the pairs of channels of one head ``[d]``, each by its angle."""
    turned, half = head.clone(), config.rotary_dim // 2
    for pair, frequency in enumerate(inverse_frequencies(config)):
        first, second = pair, pair + half
        if config.rotary_interleaved:
            first, second = 2 * pair, 2 * pair + 1
        cos, sin = math.cos(position * frequency), math.sin(position * frequency)
        turned[first] = head[first] * cos - head[second] * sin
        turned[second] = head[second] * cos + head[first] * sin
    return turned


def norm(x, weights, name, config, epsilon=0.0):
    if config.normalization == "LayerNorm":
        x = x - x.mean(-1, keepdim=True)
    scale = (x.square().mean(-1, keepdim=True) + (epsilon or config.norm_epsilon)).sqrt()
    gain = weights[f"{name}.weight"] + (1.0 if config.apply_layernorm_1p else 0.0)
    return x / scale * gain + weights.get(f"{name}.bias", 0.0)


def linear(x, weights, name):
    return x @ weights[f"{name}.weight"].flatten(0, -2).T + weights.get(
        f"{name}.bias", torch.zeros(())
    ).reshape(-1)


def latent_attention(x, weights, name, config, factors):
    """Computes one sequence ``[s, h]`` as DeepSeek-V2, equations 9 to 19, head by head."""
    plain, rank = config.qk_head_dim, config.kv_lora_rank
    down = linear(x, weights, f"{name}.kv_down")
    latent, shared = down[:, :rank], down[:, rank:]
    queries = x
    if config.q_lora_rank:
        queries = linear(x, weights, f"{name}.q_down")
    if config.qk_layernorm:
        own = config.latent_norm_epsilon
        latent = norm(latent, weights, f"{name}.kv_norm", config, own)
        if config.q_lora_rank:
            queries = norm(queries, weights, f"{name}.q_norm", config, own)
    q = "q_up" if config.q_lora_rank else "q"
    shared = [rotate(key, t, config) for t, key in enumerate(shared)]
    outputs = []
    for head in range(config.num_attention_heads):
        query = queries @ weights[f"{name}.{q}.weight"][head].T
        key_value = latent @ weights[f"{name}.kv_up.weight"][head].T
        rows = []
        for t in range(len(x)):
            own = torch.cat((query[t, :plain], rotate(query[t, plain:], t, config)))
            keys = [torch.cat((key_value[i, :plain], shared[i])) for i in range(t + 1)]
            scores = torch.stack(keys) @ own / math.sqrt(len(own))
            kept = torch.softmax(scores, 0) * factors[t, head, : t + 1]
            rows.append(kept @ key_value[: t + 1, plain:])
        outputs.append(torch.stack(rows))
    return linear(torch.cat(outputs, -1), weights, f"{name}.out")


def gated_delta_net(x, weights, name, config):
    """Computes one sequence ``[s, h]`` as Yang et al. 2024, equation 10, head by head."""
    served = config.linear_num_value_heads // config.linear_num_key_heads
    key, value = config.linear_key_head_dim, config.linear_value_head_dim
    own, outputs = {each: weights[f"{name}.{each}"] for each in ("A_log", "dt_bias")}, []
    for group, filters in enumerate(weights[f"{name}.conv_weight"]):
        fused = x @ weights[f"{name}.in_proj.weight"][group].T
        mixed, rest = fused.split((2 * key + served * value, served * (value + 2)), -1)
        convolved = torch.zeros_like(mixed)
        for t in range(len(x)):
            for back in range(min(t + 1, config.linear_conv_kernel_dim)):
                convolved[t] = convolved[t] + filters[:, -1 - back] * mixed[t - back]
        convolved = activate(convolved, "silu")
        lengths = [
            (each.square().sum(-1, keepdim=True) + 1e-6).sqrt()
            for each in (convolved[:, :key], convolved[:, key : 2 * key])
        ]
        queries = convolved[:, :key] / lengths[0] / math.sqrt(key)
        keys = convolved[:, key : 2 * key] / lengths[1]
        for i in range(served):
            head = group * served + i
            values = convolved[:, 2 * key + i * value :][:, :value]
            gate = rest[:, i * value : (i + 1) * value]
            beta = torch.sigmoid(rest[:, served * value + i])
            step = torch.log1p(torch.exp(rest[:, served * (value + 1) + i] + own["dt_bias"][head]))
            decay, state, rows = torch.exp(-torch.exp(own["A_log"][head]) * step), 0.0, []
            for t in range(len(x)):
                old = decay[t] * (torch.eye(key) - beta[t] * torch.outer(keys[t], keys[t]))
                state = old @ (state + torch.zeros(key, value)) if t else 0.0
                state = state + beta[t] * torch.outer(keys[t], values[t])
                rows.append(queries[t] @ state)
            y = torch.stack(rows)
            y = y / (y.square().mean(-1, keepdim=True) + config.norm_epsilon).sqrt()
            outputs.append(y * weights[f"{name}.norm.weight"] * activate(gate, "silu"))
    return linear(torch.cat(outputs, -1), weights, f"{name}.out_proj")


def is_windowed(layer, config):
    return layer not in {"": [], "2": [1, 3, 5], "[0,1]": [0]}[config.window_attn_skip_freq]


def rotation(layer, config):
    """Returns the configuration of a layer's rotation."""
    if config.rotary_base_local and is_windowed(layer, config):
        base = config.rotary_base_local
        return replace(config, rotary_base=base, rotary_base_local=0.0, rope_scaling_type="none")
    return config


def first_key(t, layer, config):
    """Returns the first token that token ``t`` attends to in a layer."""
    if not is_windowed(layer, config):
        return 0
    if config.attention_chunk_size:
        return t - t % config.attention_chunk_size
    return max(0, t + 1 - config.sliding_window) if config.sliding_window else 0


def normed_head(fused, weights, name, config, group, i):
    """Returns head ``i`` of a group ``[s, d]``, normalized; the last head is the key."""
    d, m = config.kv_channels, config.heads_per_group
    part, is_key = f"{name}.{'k_norm' if i == m else 'q_norm'}", i == m
    own = fused[:, group, i * d : (i + 1) * d]
    if config.qk_layernorm_scope == "head":
        return norm(own, weights, part, config)
    rows = fused[:, :, m * d : (m + 1) * d] if is_key else fused[:, :, : m * d]
    whole = norm(rows.flatten(1), weights, part, config)
    first = (group if is_key else group * m + i) * d
    return whole[:, first : first + d]


def turned(head, position, layer, config):
    """Returns a query or key as the layer compares it."""
    if config.position_embedding_type != "rope":
        return head
    if config.no_rope_freq == "2" and layer % 2:
        return head
    head = rotate(head, position, rotation(layer, config))
    if config.qk_l2_norm:
        head = head / (head.square().mean() + config.norm_epsilon).sqrt()
    return head


def alibi_slope(head, config):
    """Returns the slope of a head by the rule of the paper's code."""
    power = 2 ** math.floor(math.log2(config.num_attention_heads))
    slopes = [2.0 ** (-8 * i / power) for i in range(1, power + 1)]
    slopes += [2.0 ** (-8 * i / (2 * power)) for i in range(1, 2 * power + 1)][::2]
    return slopes[head] / (math.sqrt(config.kv_channels) if config.scale_alibi else 1.0)


def attention(x, weights, name, config, factors, layer):
    """Computes one sequence ``[s, h]`` head by head and token by token; factors ``[s, n, s]``."""
    if config.linear_layers[layer]:
        return gated_delta_net(x, weights, name, config)
    if config.multi_latent_attention:
        return latent_attention(x, weights, name, config, factors)
    length, d, m = len(x), config.kv_channels, config.heads_per_group
    fused = linear(x, weights, f"{name}.qkv").view(length, config.num_query_groups, -1)
    if config.attention_output_gate:  # cut out the rows of gates
        fused, gates = torch.cat((fused[..., : m * d], fused[..., 2 * m * d :]), -1), fused
    outputs = []
    for group in range(config.num_query_groups):
        parts = fused[:, group].split(d, dim=-1)
        queries, keys, values = parts[:m], parts[m], parts[m + 1]
        if config.qk_layernorm:
            heads = [normed_head(fused, weights, name, config, group, i) for i in range(m + 1)]
            queries, keys = heads[:m], heads[m]
        keys = torch.stack([turned(key, t, layer, config) for t, key in enumerate(keys)])
        for head in queries:
            rows = []
            for t in range(length):
                query = turned(head[t], t, layer, config)
                if config.attn_temperature_scale and layer % 2:
                    steps = math.floor((t + 1) / config.attn_temperature_floor)
                    query = query * (config.attn_temperature_scale * math.log(1 + steps) + 1)
                scores = keys[: t + 1] @ query * (config.softmax_scale or 1 / math.sqrt(d))
                if bound := config.attn_logit_softcapping:
                    scores = bound * torch.tanh(scores / bound)
                if config.position_embedding_type == "alibi":
                    slope = alibi_slope(len(outputs), config)
                    scores = scores + slope * (torch.arange(t + 1) - t)
                scores[: first_key(t, layer, config)] = -math.inf
                kept = torch.softmax(scores, 0) * factors[t, len(outputs), : t + 1]
                rows.append(kept @ values[: t + 1])
            outputs.append(torch.stack(rows))
            if config.attention_output_gate:
                first = (m + (len(outputs) - 1) % m) * d
                outputs[-1] = outputs[-1] / (1 + torch.exp(-gates[:, group, first : first + d]))
    return linear(torch.cat(outputs, -1), weights, f"{name}.out")


def feed_forward(x, weights, name, config):
    up = linear(x, weights, f"{name}.up")
    if config.activation in GATES:
        gate, value = up.chunk(2, -1)
        if bound := config.activation_func_clamp_value:
            most = gate.new_tensor(bound)
            gate = torch.minimum(gate, most)
            value = torch.maximum(torch.minimum(value, most), -most)
        active = activate(gate, GATES[config.activation]) * (value + config.glu_linear_offset)
    else:
        active = activate(up, config.activation)
    return linear(active, weights, f"{name}.down")


GATES = {
    "swiglu": "silu",
    "geglu": "gelu",
    "geglu_tanh": "gelu_tanh",
    "quick_geglu": "quick_gelu",
    "reglu": "relu",
}


def activate(x, name):
    if name == "gelu":
        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    if name == "gelu_tanh":
        return x * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    if name in ("silu", "quick_gelu"):
        return x / (1 + torch.exp(-x * (1.702 if name == "quick_gelu" else 1.0)))
    return torch.where(x > 0, x, 0.0) ** (2 if name == "squared_relu" else 1)


def no_dropout(sample, layer, site, *channels):
    """Returns factors ``[s, *channels]`` of a sample without dropout."""
    return torch.ones((), dtype=torch.float64).expand(9, *channels)


def own_config(config, layer):
    """Returns the configuration of one layer, and how each sublayer is replaced."""
    text = config.heterogeneous_layers_config_encoded_json
    if not text:
        return config, {"attention": {}, "mlp": {}}
    blocks = json.loads(text)
    block = (blocks["block_configs"] if isinstance(blocks, dict) else blocks)[layer]
    parts = {"attention": block["attention"], "mlp": block.get("mlp", block.get("ffn"))}
    sizes = {
        key: value
        for part in parts.values()
        for key, value in part.items()
        if key in ("num_attention_heads", "num_query_groups", "kv_channels", "ffn_hidden_size")
    }
    if "n_heads_in_group" in parts["attention"]:
        sizes["num_query_groups"] = (
            config.num_attention_heads // parts["attention"]["n_heads_in_group"]
        )
    changed = replace(config, heterogeneous_layers_config_encoded_json="", **sizes)
    return changed, parts


def straight_line_logits(weights, config, tokens, factors):
    """Returns logits ``[s, v]`` of one sequence ``[s]`` for the unpadded vocabulary."""
    h = config.hidden_size
    x = weights["embedding.word.weight"][tokens] * config.embedding_multiplier
    if "embedding.position.weight" in weights:
        x = x + weights["embedding.position.weight"][: len(tokens)]
    x = x * factors(-1, 0, h)
    for i in range(config.num_layers):
        block, m = f"layers.{i}", config.residual_multiplier
        own, replaced = own_config(config, i)
        kept = factors(i, 1, own.num_attention_heads, len(tokens))

        def mix(read, part, i=i, block=block, kept=kept, config=own, replaced=replaced):
            """Returns what attention or feed-forward layer adds to the stream that it reads."""
            if replaced[part].get("no_op"):
                return 0.0
            own = {"shared_norm": "attention"}.get(config.parallel_residual, part)
            if config.norm_placement in ("pre", "sandwich"):
                read = norm(read, weights, f"{block}.{own}_norm", config)
            if replaced[part].get("replace_with_linear"):
                y = linear(read, weights, f"{block}.{part}.linear")
            elif part == "attention":
                y = attention(read, weights, f"{block}.attention", config, kept, i)
            else:
                y = feed_forward(read, weights, f"{block}.mlp", config)
            if config.norm_placement in ("post", "sandwich"):
                y = norm(y, weights, f"{block}.{part}_norm_after", config)
            return y * factors(i, 2 if part == "attention" else 3, h)

        if config.parallel_residual != "none":
            x = x + m * mix(x, "attention") + m * mix(x, "mlp")
            continue
        for part in ("attention", "mlp"):
            x = x + m * mix(x, part)
            if config.norm_placement == "sum":
                x = norm(x, weights, f"{block}.{part}_norm_sum", config)
    if config.norm_placement != "sum":
        x = norm(x, weights, "final_norm", config)
    output = weights.get("output.weight", weights["embedding.word.weight"])
    logits = x @ output[: config.vocab_size].T / config.logits_scaling
    bound = config.final_logit_softcapping
    return bound * torch.tanh(logits / bound) if bound else logits


@pytest.fixture
def model(config, scramble):
    return scramble(GPT(config, Placement(Mesh.single(), dtype=torch.float64)))


def draw(config, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, (2, 2, 9), generator=generator)


def compare(model, tokens, labels, dropout=None, factors=no_dropout):
    """Compares loss and gradients with straight-line code; ``factors`` takes the sample first."""
    loss = model.loss(tokens, labels, dropout=dropout)
    weights = {
        name: parameter.detach().clone().requires_grad_()
        for name, parameter in model.named_parameters()
    }
    logits = torch.stack(
        [
            straight_line_logits(weights, model.config, row, partial(factors, number))
            for number, row in enumerate(tokens)
        ]
    )
    wanted = -logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    torch.testing.assert_close(loss, wanted, rtol=0, atol=1e-11)
    loss.mean().backward()
    wanted.mean().backward()
    for name, parameter in model.named_parameters():
        grad = weights[name].grad
        torch.testing.assert_close(parameter.grad, grad, rtol=0, atol=1e-12, msg=name)
    return logits.detach()


def test_logits_loss_and_every_gradient_equal_straight_line_code(model):
    tokens, labels = draw(model.config)
    logits = compare(model, tokens, labels)
    found = model(tokens)[..., : model.config.vocab_size].transpose(0, 1)
    torch.testing.assert_close(found, logits, rtol=0, atol=1e-11)


def test_dropout_acts_at_the_documented_sites(model):
    """The factors are computed from the masks of the documented layers, sites and channels."""
    key = DropoutKey.for_batch(seed=1, iteration=2, samples=torch.tensor([7, 3]), positions=9)
    rates = {0: 0.2, 1: 0.3, 2: 0.2, 3: 0.2}

    def factors(sample, layer, site, *channels):
        keep = keep_mask((9, 2, *channels), rates[site], key, layer=layer, site=site)
        return keep[:, sample].double() / (1 - rates[site])

    tokens, labels = draw(model.config)
    compare(model, tokens, labels, Dropout(key, hidden=0.2, attention=0.3), factors)
