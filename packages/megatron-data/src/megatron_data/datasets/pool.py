"""Datasets that are opened and checked once, however many splits are built of them."""

from typing import TYPE_CHECKING

from megatron_data.indexed.reader import IndexedDataset
from megatron_data.sources.block_cache import StorageCache

if TYPE_CHECKING:
    from megatron_data.datasets.conversation_lines import ConversationLines
    from megatron_data.tokenizers.sft import SFTTokenizer


class DatasetPool:
    """What the builders have opened; calls that are given the same one share it.

    The index of every dataset is checked from end to end when it is opened, which takes a second
    for 10^8 sequences, and a file of conversations is read once to find its lines. A run that
    builds its splits one by one does both once.
    """

    def __init__(self) -> None:
        self._indexed: dict[tuple[str, bool], IndexedDataset] = {}
        self._lines: dict[tuple[str, int, int | None], ConversationLines] = {}

    def indexed_dataset(
        self, prefix: str, storage: StorageCache | None = None, mmap: bool = True
    ) -> IndexedDataset:
        """Returns the dataset at a prefix, its index checked.

        Raises:
            DataError: There is none, or its index is damaged.
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
        """Returns the conversations of a file of JSON lines.

        Raises:
            DataError: As `ConversationLines`.
        """
        from megatron_data.datasets.conversation_lines import ConversationLines

        key = path, id(tokenizer), max_document_bytes  # what is kept holds the tokenizer
        if key not in self._lines:
            self._lines[key] = ConversationLines(
                path, tokenizer, max_document_bytes=max_document_bytes
            )
        return self._lines[key]
