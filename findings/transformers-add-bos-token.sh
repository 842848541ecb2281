#!/usr/bin/env bash
# Package: transformers 5.23.0 with tokenizers 0.23.3
# Guess: (worded after the run) "add_bos_token": false in tokenizer_config.json leaves the begin-of-text token out, and true adds it, as the
# fast tokenizer of Llama did in transformers 4.
# Behaviour: beside a tokenizer.json the field has no effect, in both directions; only its post-processor counts.
# Seen on 2026-11-27 with transformers 5.23.0, tokenizers 0.23.3 and the class LlamaTokenizer (ids of "ab"):
#   post-processor with <s>, add_bos_token False: [256, 64, 65]; without, add_bos_token True: [64, 65]
# Exits with 1 if this is no longer so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q transformers==5.23.0 tokenizers==0.23.3
cat > "$folder/read.py" <<'PY'
import json, sys
from pathlib import Path

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

print("transformers", transformers.__version__)
found = {}
for starts in (True, False):
    folder = Path(sys.argv[1]) / str(starts)
    folder.mkdir()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>"])
    if starts:
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    made.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "add_bos_token": not starts}))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    found[starts] = transformers.AutoTokenizer.from_pretrained(folder)("ab").input_ids
    print(f"post-processor with <s>: {starts}, add_bos_token {not starts}: {found[starts]}")
sys.exit(found != {True: [256, 64, 65], False: [64, 65]})
PY
"$folder/venv/bin/python" "$folder/read.py" "$folder" 2> /dev/null
