#!/usr/bin/env bash
# Package:   transformers 5.23.0 with tokenizers 0.23.3; seen on 2026-11-27.
# Guess:     return_assistant_tokens_mask marks every token that has a character of a
#            {% generation %} block, and no other one.
# Behaviour: three masks differ. (1) If a template captures a block with {% set %} and writes text
#            before it, the mask is shifted to the left: its position is that at the time of the
#            capture. (2) Of a last character of several bytes only the first token is marked, since
#            char_to_token returns the first token of a character. (3) If a block ends with token 0,
#            every token is marked, since 0 is taken for a missing end.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q transformers==5.23.0 tokenizers==0.23.3 jinja2==3.1.6 numpy==2.4.6
"$folder/venv/bin/python" - <<'PY' 2>/dev/null
import tokenizers
import transformers
from tokenizers import models, pre_tokenizers

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
raw = tokenizers.Tokenizer(models.BPE({each: n for n, each in enumerate(letters)}, []))
raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=raw)
BLOCK = "{% generation %}{{ messages[0].content }}{% endgeneration %}"
cases = {
    "captured": ("{% set answer %}" + BLOCK + "{% endset %}>{{ answer }}<", "yes"),
    "not captured": (">" + BLOCK + "<", "yes"),
    "last character of two bytes": (">" + BLOCK + "<", "y\u00e9"),
    "block in the first token": (BLOCK + "<<", "y"),
}
seen = {}
for name, (template, content) in cases.items():
    made = tokenizer.apply_chat_template(
        [{"role": "assistant", "content": content}],
        chat_template=template,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    seen[name] = made["assistant_masks"]
expected = {
    "captured": [1, 1, 1, 0, 0],  # of ">yes<"
    "not captured": [0, 1, 1, 1, 0],
    "last character of two bytes": [0, 1, 1, 0, 0],  # of ">yé<", where é is two tokens
    "block in the first token": [1, 1, 1],  # of "y<<"
}
print(f"transformers {transformers.__version__}: masks of the tokens of an assistant")
for name, mask in seen.items():
    print(f"  {name:28} {mask}   (2026-11-27: {expected[name]})")
raise SystemExit(0 if seen == expected else 1)
PY
