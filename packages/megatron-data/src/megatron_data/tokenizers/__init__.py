"""Tokenizers with a common interface.

`protocol` defines the interface. `kinds` lists the kinds by Megatron's names and builds them.
`huggingface` wraps the `tokenizers` library; `gpt2` and `wordpiece` convert older files to its
format. `sentence_piece` and `tik_token` wrap the libraries of these names. `plain` has tokenizers
that need no file. `training` trains vocabularies and `loading` opens saved tokenizers.
`text_splitting` splits long texts into segments, and `fast` encodes with gigatoken.

Conversations: `chat` renders `messages` with chat templates in a `sandbox` with `template_limits`,
and finds the answers by `generation_blocks` or `turns`. `template_files` reads the templates of a
tokenizer, and `prompt_formats` holds Megatron's. `conversations` computes tokens and loss masks
with `turn_ends`. `sft` and `multimodal` combine tokenizer and template.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
