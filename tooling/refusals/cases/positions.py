"""Wrong configurations of rotary positions."""

from refusals.cases.case import LATENT, ROPE, Case

_AXES = {"position_embedding_type": "mrope", "mrope_section": (1, 1, 1)}

ROTARY = {
    "a fraction above 1": Case(
        {**ROPE, "rotary_percent": 1.5},
        "rotary_percent must lie in (0, 1], not 1.5; use 1.0",
        {"rotary_percent": 1.0},
    ),
    "an odd number of channels": Case(
        {**ROPE, "kv_channels": 5},
        "kv_channels 5 x rotary_percent 1.0 gives 5; make it even and positive, such as 4 or 6",
        {"kv_channels": 6},
    ),
    "factors in the wrong order": Case(
        {**ROPE, "rope_scaling_type": "llama3", "rope_scaling_low_freq_factor": 8.0},
        "rope_scaling_low_freq_factor 8.0 must be below rope_scaling_high_freq_factor 4.0|as 1",
        {"rope_scaling_low_freq_factor": 1.0},
    ),
    "periods in the wrong order": Case(
        {**ROPE, "rope_scaling_type": "yarn", "yarn_beta_slow": 32.0},
        "yarn_beta_slow 32.0 must be below yarn_beta_fast 32.0; use a smaller one, such as 8",
        {"yarn_beta_slow": 8.0},
    ),
    "too few factors": Case(
        {**ROPE, "rope_scaling_type": "longrope", "rope_scaling_short_factors": "1,2"},
        "rope_scaling_short_factors must be 3 positive numbers separated by commas|not '1,2'",
        {"rope_scaling_short_factors": "1,2,3", "rope_scaling_long_factors": "1,1,1"},
    ),
    "factors of a latent": Case(
        {**LATENT, "rope_scaling_type": "longrope", "rope_scaling_short_factors": "1,2,3"},
        "rope_scaling_short_factors must be 2 positive numbers separated by commas|not '1,2,3'",
        {"rope_scaling_short_factors": "1,2", "rope_scaling_long_factors": "1,1"},
    ),
    "text for layers without rotation": Case(
        {**ROPE, "no_rope_freq": "every"},
        "no_rope_freq: 'every' is not a pattern of layers; give a number",
        {"no_rope_freq": "2"},
    ),
    "layers without a rotation that no layer has": Case(
        {"no_rope_freq": "2"},
        "no_rope_freq 2 needs rotary positions, not position_embedding_type learned_absolute",
        {"no_rope_freq": "0"},
    ),
    "a local base without rotation": Case(
        {"rotary_base_local": 50.0, "sliding_window": 4},
        "rotary_base_local 50.0 needs rotary positions, not|leave it at 0",
        {"rotary_base_local": 0.0},
    ),
    "sections without axes": Case(
        {**ROPE, "mrope_section": (1, 1, 1)},
        "mrope_section (1, 1, 1) has no effect with position_embedding_type rope|leave it out",
        {"mrope_section": ()},
    ),
    "alternation without axes": Case(
        {**ROPE, "mrope_interleaved": True},
        "mrope_interleaved True has no effect with position_embedding_type rope|leave it out",
        {"mrope_interleaved": False},
    ),
    "sections of other channels": Case(
        {**_AXES, "mrope_section": (2, 4, 0)},
        "mrope_section must be 3 numbers of at least 0 that sum to 3, half of the|not (2, 4, 0)|"
        "use 1, 2 and 0",
        {"mrope_section": (1, 2, 0)},
    ),
    "no sections": Case(
        {"position_embedding_type": "mrope"},
        "mrope_section must be 3 numbers|sum to 3|not ()|use 1, 1 and 1",
        {"mrope_section": (1, 1, 1)},
    ),
    "sections that are no list": Case(
        {**_AXES, "mrope_section": "1,1,1"},
        "mrope_section must be a list of integers, not '1,1,1'",
        {"mrope_section": (1, 1, 1)},
    ),
    "sections that cannot alternate": Case(
        {**_AXES, "mrope_section": (0, 2, 1), "mrope_interleaved": True},
        "mrope_interleaved allows at most 1 for the height and 1 for the width|(0, 2, 1); use 1, 1",
        {"mrope_section": (1, 1, 1)},
    ),
}
