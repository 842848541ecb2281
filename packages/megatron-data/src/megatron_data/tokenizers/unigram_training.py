"""Training of a unigram model with sentencepiece, on counted words.

sentencepiece is the reference implementation of the method (Kudo, 2018) and gives the same pieces
and scores in every process. The trainer of the `tokenizers` library (0.23.3) does not: it adds
probabilities in the order of a hash table and by threads.
"""

import io
from collections.abc import Sequence

from megatron_data.errors import DataError


def unigram_pieces(
    counts: Sequence[tuple[str, int]], alphabet: Sequence[str], size: int, progress: bool
) -> list[tuple[str, float]]:
    """Returns pieces with their log-probabilities, the likeliest first.

    Args:
        counts: Words with their counts, sorted. Pieces lie within words.
        alphabet: Characters that are pieces. Those without an occurrence come last, with the score
            of the least likely piece.
        size: Largest number of pieces, at least that of the alphabet.
        progress: Whether sentencepiece logs its steps.

    Raises:
        DataError: sentencepiece is not installed, or cannot train on these words.
    """
    try:
        import sentencepiece
    except ImportError:
        raise DataError(
            "training a unigram vocabulary needs sentencepiece; "
            "pip install 'megatron-data[sentencepiece]'"
        ) from None
    seen = set().union(*(word for word, _ in counts))
    absent = [character for character in alphabet if character not in seen]
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(f"{word}\t{count}" for word, count in counts),
            model_writer=model,
            input_format="tsv",
            model_type="unigram",
            vocab_size=size - len(absent) + 1,  # one is the unknown piece, which is left out
            hard_vocab_limit=False,
            character_coverage=1.0,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            split_by_whitespace=False,
            split_by_unicode_script=False,
            split_by_number=False,
            max_sentence_length=1 << 30,
            num_threads=1,  # sums depend on the number of threads
            unk_id=0,
            bos_id=-1,
            eos_id=-1,
            pad_id=-1,
            minloglevel=0 if progress else 2,
        )
    except (RuntimeError, OSError) as error:
        raise DataError(f"sentencepiece cannot train on these texts: {error}") from None
    made = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    pieces = [
        (made.id_to_piece(number), made.get_score(number))
        for number in range(made.get_piece_size())
        if not made.is_unknown(number)
    ]
    least = min(score for _, score in pieces)
    return [*pieces, *((character, least) for character in absent)]
