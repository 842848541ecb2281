#!/usr/bin/env bash
# Package: tokenizers 0.23.3
# Guess: the trainers of tokenizers give the same vocabulary for the same text, as the trainer for BPE does.
# Behaviour: those for word pieces and unigram give another one in each process, also on one thread. Word pieces: the
# ids of characters that continue a word ("##a") follow the order of a hash table whose seed is random, and ties between
# pairs follow the ids. Unigram: probabilities are added in the order of such a table, so that scores differ.
# Seen on 2026-11-27 with tokenizers 0.23.3: three processes each, RAYON_NUM_THREADS=1:
#   BPE 1 vocabulary, WordPiece 3 vocabularies, Unigram 3 vocabularies
# Exits with 1 if this is no longer so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q tokenizers==0.23.3
cat > "$folder/train.py" <<'PY'
import hashlib, random, sys
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

kind = sys.argv[1]
draw = random.Random(0)
texts = [" ".join("".join(draw.choices("abcdefgh", k=draw.randint(1, 6))) for _ in range(50)) for _ in range(100)]
model = {"BPE": models.BPE(), "WordPiece": models.WordPiece(unk_token="[UNK]"), "Unigram": models.Unigram()}[kind]
made = Tokenizer(model)
made.pre_tokenizer = pre_tokenizers.Whitespace()
special = ["[UNK]"] if kind == "WordPiece" else []
trainer = getattr(trainers, f"{'Bpe' if kind == 'BPE' else kind}Trainer")
made.train_from_iterator(texts, trainer(vocab_size=200, special_tokens=special, show_progress=False))
print(hashlib.sha256(made.to_str().encode()).hexdigest())
PY
"$folder/venv/bin/python" -c 'import tokenizers; print("tokenizers", tokenizers.__version__)'
for kind in BPE WordPiece Unigram; do
    for _ in 1 2 3; do RAYON_NUM_THREADS=1 "$folder/venv/bin/python" "$folder/train.py" "$kind"; done > "$folder/$kind"
    echo "$kind: $(sort -u "$folder/$kind" | wc -l) vocabularies in 3 processes"
done
[ "$(sort -u "$folder/BPE" | wc -l)" = 1 ]
[ "$(sort -u "$folder/WordPiece" | wc -l)" -gt 1 ]
[ "$(sort -u "$folder/Unigram" | wc -l)" -gt 1 ]
