"""Models that a parallel layout does not fit."""

from refusals.cases.case import EXPERTS, LATENT, Case, blocks

LAYOUTS = {
    "heads": Case(
        {},
        "tp 3 cannot cut num_attention_heads 4 into 3 equal parts; use tp 2 or 4",
        layout={"tp": 3},
        fixed_layout={"tp": 2},
    ),
    "query groups": Case(
        {"num_attention_heads": 6, "num_query_groups": 3, "ffn_hidden_size": 48},
        "tp 2 and num_query_groups 3: one must be a multiple of the other; use tp 1 or 3",
        layout={"tp": 2},
        fixed_layout={"tp": 3},
    ),
    "the feed-forward width": Case(
        {"ffn_hidden_size": 42},
        "tp 4 cannot cut ffn_hidden_size 42 into 4 equal parts|or ffn_hidden_size 40 or 44",
        {"ffn_hidden_size": 44},
        layout={"tp": 4},
    ),
    "heads of a latent": Case(
        LATENT,
        "tp 3 cannot cut num_attention_heads 4 into 3 equal parts; use tp 2 or 4",
        layout={"tp": 3},
        fixed_layout={"tp": 4},
    ),
    "experts": Case(
        EXPERTS,
        "ep 3 cannot cut num_experts 8 into 3 equal parts; use ep 2 or 4",
        layout={"ep": 3, "dp": 3},
        fixed_layout={"ep": 4, "dp": 4},
    ),
    "the width of experts": Case(
        {**EXPERTS, "moe_ffn_hidden_size": 15},
        "etp 2 cannot cut the experts' moe_ffn_hidden_size 15 into 2 equal parts|14 or 16",
        {"moe_ffn_hidden_size": 16},
        layout={"etp": 2, "dp": 2},
    ),
    "the width of shared experts": Case(
        {**EXPERTS, "moe_shared_expert_intermediate_size": 15},
        "tp 2 cannot cut moe_shared_expert_intermediate_size 15 into 2 equal parts|14 or 16",
        {"moe_shared_expert_intermediate_size": 14},
        layout={"tp": 2},
    ),
    "biases of experts": Case(
        {**EXPERTS, "hidden_size": 25, "kv_channels": 6},
        "etp 2 cannot cut the experts' hidden_size 25 into 2 equal parts|hidden_size 24 or 26",
        {"hidden_size": 26},
        layout={"etp": 2, "dp": 2},
    ),
    "multi-token prediction": Case(
        {"mtp_num_layers": 1, "hidden_size": 25, "kv_channels": 6},
        "tp 2 cannot cut the outputs of eh_proj, hidden_size 25 into 2 equal parts|24 or 26",
        {"hidden_size": 24},
        layout={"tp": 2},
    ),
    "heads of one layer": Case(
        blocks('{"attention": {"num_attention_heads": 3, "kv_channels": 6}}')
        | {"num_query_groups": 0},
        "layer 0, attention: num_attention_heads 3 is not a multiple of num_query_groups 4|"
        "use num_query_groups 3",
        blocks('{"attention": {"num_attention_heads": 3, "num_query_groups": 3}}'),
    ),
    "layers": Case(
        {"num_layers": 5},
        "5 layers cannot be split evenly over 2 stages: use 4 or 6 layers",
        {"num_layers": 6},
        layout={"pp": 2},
    ),
    "layers of chunks": Case(
        {},
        "4 layers cannot be split evenly over 2 ranks x 3 chunks = 6 stages: use 6 layers",
        {"num_layers": 6},
        layout={"pp": 2, "vpp": 3},
    ),
    "no degree": Case(
        {},
        "tp=0 is not a degree: give a whole number >= 1",
        layout={"tp": 0},
        fixed_layout={"tp": 1},
    ),
    "chunks without a pipeline": Case(
        {},
        "vpp=2 needs pipeline parallelism, but pp=1; use at least 2 pipeline ranks",
        layout={"vpp": 2},
        fixed_layout={"vpp": 2, "pp": 2},
    ),
    "ranks": Case(
        EXPERTS,
        "world size 3 is not a multiple of etp 1 x ep 2 x pp 1 = 2: use 2 or 4 ranks",
        layout={"ep": 2, "dp": 3},
        fixed_layout={"ep": 2, "dp": 4},
    ),
    "two levels of context parallelism": Case(
        {},
        "hierarchical_cp=(2, 3) must be two sizes|whose product is cp=4, such as 2 2",
        layout={"cp": 4, "hierarchical_cp": (2, 3)},
        fixed_layout={"cp": 4, "hierarchical_cp": (2, 2)},
    ),
    "optimizer instances": Case(
        {},
        "dp_outer=3 does not divide dp 4 x cp 1 = 4 data-parallel ranks: use 2 or 4",
        layout={"dp": 4, "dp_outer": 3},
        fixed_layout={"dp": 4, "dp_outer": 2},
    ),
}
