"""Whether tokenizers may use several threads."""

import os


def may_use_threads() -> bool:
    """Returns whether TOKENIZERS_PARALLELISM lets this process encode in several threads.

    The variable is that of the `tokenizers` library. Worker processes of `preprocess` set it to
    "false", so that each uses one thread.
    """
    return os.environ.get("TOKENIZERS_PARALLELISM", "true") != "false"
