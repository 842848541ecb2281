"""The page of published configurations in the documentation."""

from families.published import DEPTHS, WIDTHS, Published, published

_START = """\
# Published configurations

The table lists published `config.json` files of every family, up to three each. The keys and
values are in `integration_tests/parity/published/`, beside the public copy in which each was seen.
`integration_tests/parity/test_published.py` shrinks the sizes of each and leaves all other fields
as they are. It draws random weights with `transformers`, converts the folder with the published
spellings, compares logits in float32, and exports the model again. All of them pass: the logits
differ by at most 1e-4, or are as near to those in float64 as the logits of `transformers`
(Qwen3-Next); tensors return bit for bit, and `transformers` loads the export.

A family with fewer rows has fewer published sizes, or no public copy of the others was found. The
first holds for all of them: gpt-oss, Llama 4 and Mixtral have two sizes; Qwen3-Next has one, of
which two files are in the table; DeepSeek-V3.2 and SmolLM3 have one. Not in the table is Nemotron 3
Super: experts on a latent width (`moe_latent_size`) are refused.

| family | model | layers | hidden size | public copy |
|---|---|---|---|---|
"""


def render() -> str:
    """Returns the page."""
    return _START + "".join(map(_row, published()))


def _row(one: Published) -> str:
    layers, width = (
        next((one.config[name] for name in names if name in one.config), "")
        for names in (DEPTHS, WIDTHS)
    )
    source = one.source + (f" ({one.note})" if one.note else "")
    return f"| {one.family} | {one.model} | {layers} | {width} | {source} |\n"
