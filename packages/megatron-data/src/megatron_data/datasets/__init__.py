"""Datasets of training samples.

`build*` construct the training, validation and test datasets of a run from `paths` (Megatron's
`--data-path`) and `split` (`--split`). The datasets are `gpt`, `bert`, `t5`, `ict`, `sft` and
`conversation_lines`; `blended` combines several of them and `mock` generates data. `masks` finds
document boundaries, `masking` hides tokens and `fim` rearranges documents. `tokenizer_check`
compares the tokenizers of datasets.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
