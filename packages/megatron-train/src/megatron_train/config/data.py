"""The section ``data``: the corpora and the tokenizer of a run."""

from dataclasses import dataclass
from typing import Any, Final, Literal

from megatron_data.datasets import is_conversation_file
from megatron_data.tokenizers import (
    MultimodalPromptFormat,
    SFTPromptFormat,
    TokenizerKind,
    default_tokenizer_kind,
    tokenizer_options_error,
)

from megatron_train.config.fields import (
    check_not_negative,
    check_positive,
    flag_of,
    required,
    setting,
)
from megatron_train.errors import TrainError

CONVERSATION_OPTIONS = (
    "sft_tokenizer_prompt_format",
    "chat_template",
    "tokenizer_prompt_format",
    "image_tag_type",
    "force_system_message",
)
"""Settings of the section that define the format of conversations."""

TOKENIZER_OPTIONS = (
    "tokenizer_model",
    "vocab_file",
    "merge_file",
    "vocab_extra_ids",
    "tiktoken_pattern",
    "tiktoken_num_special_tokens",
    "tokenizer_special_tokens",
    *CONVERSATION_OPTIONS,
)
"""Settings of the section that tokenizers are built from."""

NULL_TOKENIZERS: Final = ("NullTokenizer", "NullMultimodalTokenizer")
"""Kinds whose --vocab-size excludes the end-of-document token, as in Megatron-LM."""

INDEPENDENT_DOCUMENTS: Final = ("reset_position_ids", "reset_attention_mask")
"""Settings that make the documents in a sample independent of each other."""

LINE_LIMITS = ("max_document_bytes", "max_template_steps", "max_template_characters")
"""Settings of the section that limit JSON lines of conversations."""

DATA_PATHS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
"""Settings of the section that name corpora."""


@dataclass(frozen=True)
class DataConfig:
    """Settings of corpora, samples and tokenizer."""

    seq_length: int = required("length of a training sample", unit="tokens")
    data_path: tuple[str, ...] | None = setting(
        None,
        "path of a tokenized corpus without .bin/.idx, divided by --split; or pairs of weight and "
        "path for several corpora",
        unit="path",
    )
    train_data_path: tuple[str, ...] | None = setting(
        None, "tokenized corpora to train on, given as for --data-path", unit="path"
    )
    valid_data_path: tuple[str, ...] | None = setting(
        None, "tokenized corpora to validate on, given as for --data-path", unit="path"
    )
    test_data_path: tuple[str, ...] | None = setting(
        None,
        "tokenized corpora to test on once, after the last step, given as for --data-path",
        unit="path",
    )
    mock_data: bool = setting(
        False,
        "train, validate and test on synthetic samples, whose tokens count up, without a corpus",
    )
    split: str = setting(
        "969,30,1",
        "weights of the training, validation and test splits that the documents of --data-path are "
        "divided into; the test split is evaluated once, after the last step",
    )
    tokenizer_type: TokenizerKind | None = setting(  # noqa: RUF009
        None,
        "kind of tokenizer; unset: GPT2BPETokenizer with --vocab-file, the kind that the prompt "
        "format belongs to, otherwise the kind in --tokenizer-model; NullTokenizer, "
        "NullMultimodalTokenizer and ByteTokenizer need no file",
    )
    tokenizer_model: str | None = setting(
        None,
        "tokenizer file or folder; sets the vocabulary size and is saved in checkpoints",
        unit="path",
    )
    vocab_file: str | None = setting(
        None,
        "vocab.json of a GPT2BPETokenizer or vocab.txt of a BERT tokenizer, instead of "
        "--tokenizer-model",
        unit="path",
    )
    merge_file: str | None = setting(
        None, "merges.txt of a GPT2BPETokenizer, with --vocab-file", unit="path"
    )
    vocab_extra_ids: int | None = setting(
        None,
        "number of sentinel tokens for T5, added after the tokens of a BERT tokenizer or a "
        "SentencePieceTokenizer",
    )
    tiktoken_pattern: Literal["v1", "v2"] | None = setting(
        None, "pattern by which a TikTokenizer splits text into words; unset: v2"
    )
    tiktoken_num_special_tokens: int | None = setting(
        None, "token ids reserved for the special tokens of a TikTokenizer; unset: 1000"
    )
    tokenizer_special_tokens: tuple[str, ...] | None = setting(
        None,
        "special tokens to add, which are never split; for a TikTokenizer, all of its special "
        "tokens; unset: a MultimodalTokenizer adds <image>",
    )
    sft_tokenizer_prompt_format: SFTPromptFormat | None = setting(  # noqa: RUF009
        None,
        "format in which an SFTTokenizer writes conversations; default takes the template in the "
        "tokenizer's folder; unset: nemotron-h-aligned, as in Megatron",
    )
    chat_template: str | None = setting(
        None, "file with the chat template of an SFTTokenizer", unit="path"
    )
    tokenizer_prompt_format: MultimodalPromptFormat | None = setting(  # noqa: RUF009
        None, "format in which a MultimodalTokenizer writes conversations"
    )
    image_tag_type: Literal["nvlm", "internvl"] | None = setting(
        None,
        "tag that a MultimodalTokenizer puts around <image>: nvlm <Image>, internvl <img>; unset: "
        "none",
    )
    force_system_message: bool = setting(
        False, "begin every conversation of a MultimodalTokenizer with Qwen's system message"
    )
    allow_tokenizer_mismatch: bool = setting(
        False,
        "accept corpora whose manifest names another tokenizer, which are refused otherwise; for a "
        "tokenizer with the same tokens that other software has saved (our name)",
    )
    reset_position_ids: bool = setting(
        False, "restart position ids in each document", read_by="task"
    )
    reset_attention_mask: bool = setting(False, "attend only within a document", read_by="task")
    eod_mask_loss: bool = setting(
        False, "mask the loss where the input is the end-of-document token", read_by="task"
    )
    fim_data: bool = setting(
        False,
        "reorder documents for fill-in-the-middle training, with probability --fim-rate; the "
        "tokenizer needs the tokens that mark the parts (--tokenizer-special-tokens)",
        read_by="task",
    )
    sft: bool = setting(
        False,
        "train on the assistant's turns of conversations; --data-path names output of "
        "megatron-data tokenize-conversations, or files of JSON lines (.jsonl, .json), which are "
        "tokenized when samples are read",
        read_by="task",
    )
    max_document_bytes: int | None = setting(
        None,
        "maximum size of a line that --sft reads from JSON lines; unset: 33554432",
        unit="bytes",
        read_by="task",
    )
    max_template_steps: int | None = setting(
        None,
        "maximum number of steps of the chat template for one conversation; unset: 20000000",
        read_by="task",
    )
    max_template_characters: int | None = setting(
        None,
        "maximum number of characters of a text that the chat template makes; unset: 67108864",
        read_by="task",
    )
    sample_order: Literal["stateless", "packed", "compat"] = setting(
        "stateless",
        "how samples are made of documents: stateless computes each sample from its number, so "
        "that a run can be extended and its data changed; packed does so with whole documents and "
        "splits only those longer than a sample; compat gives Megatron's samples (our name)",
        read_by="task",
    )
    data_path_changes: str | None = setting(
        None,
        "JSON file of corpora that replace --data-path in training from a given sample on: "
        '[{"from_sample": 80000, "data_path": ["0.7", "a", "0.3", "b"]}] (our name)',
        unit="path",
        read_by="task",
    )
    data_cache_path: str | None = setting(
        None,
        "cache folder for the sample indices of --sample-order compat",
        unit="path",
        read_by="task",
    )
    mmap_bin_files: bool = setting(
        True,
        "map token files into memory; otherwise each sample reads its own ranges: nothing is read "
        "ahead, and the memory of the process does not grow with the page cache",
    )
    object_storage_cache_path: str | None = setting(
        None,
        "cache folder on a local disk for corpora at URLs (s3://, gs://, hf://): whole indices, "
        "and tokens in blocks; beyond 64 GiB the least recently used blocks are removed; the "
        "ranks of a machine share it",
        unit="path",
    )
    num_workers: int = setting(
        2,
        "number of steps whose samples a thread of each rank reads ahead; 0 reads them in the step "
        "itself, and so does --hybrid-context-parallel",
        unit="steps",
    )
    broadcast_batches: bool = setting(
        False,
        "read micro-batches on one rank of each model replica and broadcast them to the others; "
        "opening the corpus must take less than --distributed-timeout-minutes (our name)",
    )

    def __post_init__(self) -> None:
        check_positive(self, "seq_length", *LINE_LIMITS)
        check_not_negative(self, "num_workers")
        self._check_tokenizer()
        for name in ("train_data_path", "valid_data_path", "test_data_path"):
            if self.data_path and getattr(self, name):
                raise TrainError(
                    f"--data-path, which --split divides, and {flag_of(name)} exclude each other; "
                    "give one of them"
                )
        self._check_mock_data()
        if not self.data_path and not self.train_data_path and not self.mock_data:
            raise TrainError("no corpus: give --data-path, --train-data-path or --mock-data")
        if self.data_path_changes and self.sample_order == "compat":
            raise TrainError(
                "--data-path-changes does not work with --sample-order compat, which is computed "
                "for a whole run at once; give stateless or packed"
            )
        self._check_sft()
        for name in (*INDEPENDENT_DOCUMENTS, "eod_mask_loss"):
            if getattr(self, name) and self.tokenizer is None:
                raise TrainError(
                    f"{flag_of(name)} needs a tokenizer with an end-of-document token; give "
                    "--tokenizer-model"
                )

    def _check_mock_data(self) -> None:
        """Refuses settings that need a corpus, if samples are synthetic."""
        if not self.mock_data:
            return
        corpora = (*DATA_PATHS, "data_path_changes", "sft", "fim_data")
        for name in (*corpora, *INDEPENDENT_DOCUMENTS, "eod_mask_loss"):
            if getattr(self, name):
                raise TrainError(
                    f"{flag_of(name)} does not work with --mock-data, which has no documents; "
                    "give one of them"
                )

    def _check_sft(self) -> None:
        """Refuses settings that --sft needs but lacks, or does not use."""
        limits = [flag_of(name) for name in LINE_LIMITS if getattr(self, name) is not None]
        if limits and not (self.sft and self.holds_conversation_lines):
            raise TrainError(
                f"{limits[0]} limits what --sft reads from JSON lines, but no corpus is such a "
                "file; leave it out, or give it to megatron-data tokenize-conversations"
            )
        if not self.sft:
            return
        missing = [flag_of(name) for name in INDEPENDENT_DOCUMENTS if not getattr(self, name)]
        if missing:
            raise TrainError(
                f"--sft needs {' and '.join(missing)}: the conversations in a sample are "
                "independent of each other"
            )
        if self.tokenizer is None:
            raise TrainError(
                "--sft needs the tokenizer of the conversations; give --tokenizer-model"
            )
        for name in ("eod_mask_loss", "fim_data", "data_path_changes", "data_cache_path"):
            if getattr(self, name):
                raise TrainError(
                    f"{flag_of(name)} does not work with --sft, whose samples are conversations; "
                    "leave it out"
                )

    @property
    def corpora(self) -> tuple[str, ...] | dict[str, tuple[str, ...] | None]:
        """The corpora of all splits, or a dictionary of those of train, valid and test."""
        return self.data_path or {
            "train": self.train_data_path,
            "valid": self.valid_data_path,
            "test": self.test_data_path,
        }

    @property
    def holds_conversation_lines(self) -> bool:
        """Whether any corpus is a file of JSON lines."""
        paths = (path for name in DATA_PATHS for path in getattr(self, name) or ())
        return any(map(is_conversation_file, paths))

    @property
    def tokenizer(self) -> TokenizerKind | None:
        """The kind of tokenizer; None if the run has no tokenizer.

        Defaults to HuggingFaceTokenizer for a --tokenizer-model without --tokenizer-type, which may
        hold any tokenizer that megatron-data has saved.
        """
        if self.tokenizer_type is not None:
            return self.tokenizer_type
        kind = default_tokenizer_kind(self.tokenizer_settings)
        if kind == "HuggingFaceTokenizer" and self.tokenizer_model is None:
            return None
        return kind

    @property
    def tokenizer_settings(self) -> dict[str, Any]:
        """The given settings that tokenizers are built from, by name."""
        values = {name: getattr(self, name) for name in TOKENIZER_OPTIONS}
        return {
            name: value
            for name, value in values.items()
            if value is not None and value is not False  # 0 counts as given
        }

    def _check_tokenizer(self) -> None:
        """Refuses missing settings of the tokenizer, and settings that its kind does not use."""
        given = self.tokenizer_settings
        if self.tokenizer is None:
            if given:
                names = ", ".join(map(flag_of, given))
                raise TrainError(
                    f"{names}: the run has no tokenizer; give --tokenizer-model, --vocab-file or "
                    f"--tokenizer-type too, or leave {names} out"
                )
            return
        if self.tokenizer in NULL_TOKENIZERS:
            given["vocab_size"] = None  # --vocab-size is a setting of the model
        if error := tokenizer_options_error(self.tokenizer_type, given):
            raise TrainError(error)
