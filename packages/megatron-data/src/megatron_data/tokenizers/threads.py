"""Whether tokenizers may use threads."""

import os


def may_use_threads() -> bool:
    """Returns whether this process encodes in threads, by the variable of the `tokenizers` library.

    The workers of `preprocess` set TOKENIZERS_PARALLELISM=false: one worker, one thread.
    """
    return os.environ.get("TOKENIZERS_PARALLELISM", "true") != "false"
