"""Datasets that are opened and checked once and shared between splits."""

from typing import TYPE_CHECKING

from megatron_data.indexed.reader import IndexedDataset
from megatron_data.sources.block_cache import StorageCache

if TYPE_CHECKING:
    from megatron_data.datasets.conversation_lines import ConversationLines
    from megatron_data.tokenizers.sft import SFTTokenizer


class DatasetPool:
    """Open datasets that several calls of `build_gpt_datasets` or `build_sft_datasets` share.

    Opening a dataset checks its whole index, which takes a second for 10^8 sequences. Opening a
    file of conversations reads it to find its lines. With a pool, a run that builds its splits one
    by one does each only once.
    """

    def __init__(self) -> None:
        self._indexed: dict[tuple[str, bool], IndexedDataset] = {}
        self._lines: dict[tuple[str, int, int | None], ConversationLines] = {}

    def indexed_dataset(
        self, prefix: str, storage: StorageCache | None = None, mmap: bool = True
    ) -> IndexedDataset:
        """Returns the dataset at a prefix. Opens it and checks its index if necessary.

        Raises:
            DataError: The dataset is missing, or its index is damaged.
        """
        if (prefix, mmap) not in self._indexed:
            dataset = IndexedDataset(prefix, storage, mmap)
            dataset.check()
            self._indexed[prefix, mmap] = dataset
        return self._indexed[prefix, mmap]

    def is_open(self, prefix: str, mmap: bool = True) -> bool:
        """Returns whether the dataset at a prefix is open."""
        return (prefix, mmap) in self._indexed

    def conversation_lines(
        self, path: str, tokenizer: "SFTTokenizer", max_document_bytes: int | None
    ) -> "ConversationLines":
        """Returns the conversations of a file of JSON lines. Opens it if necessary.

        Raises:
            DataError: See `ConversationLines`.
        """
        from megatron_data.datasets.conversation_lines import ConversationLines

        key = path, id(tokenizer), max_document_bytes  # the cached value keeps the tokenizer alive
        if key not in self._lines:
            self._lines[key] = ConversationLines(
                path, tokenizer, max_document_bytes=max_document_bytes
            )
        return self._lines[key]
