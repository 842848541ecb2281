"""The section ``data``: where the tokens of a run come from."""

from dataclasses import dataclass
from typing import Any, Literal

from megatron_data.datasets import is_conversation_file
from megatron_data.tokenizers import (
    MultimodalPromptFormat,
    SFTPromptFormat,
    TokenizerKind,
    default_tokenizer_kind,
    tokenizer_options_error,
)

from megatron_train.config.fields import check_positive, flag_of, required, setting
from megatron_train.errors import TrainError

CONVERSATION_OPTIONS = (
    "sft_tokenizer_prompt_format",
    "chat_template",
    "tokenizer_prompt_format",
    "image_tag_type",
    "force_system_message",
)
"""Settings of the section that say how conversations are written."""

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
"""Settings of the section that tokenizers are made from."""

LINE_LIMITS = ("max_document_bytes", "max_template_steps", "max_template_characters")
"""Settings of the section that bound what JSON lines of conversations may take."""

DATA_PATHS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
"""Settings of the section that name corpora."""


@dataclass(frozen=True)
class DataConfig:
    """Where the tokens come from."""

    seq_length: int = required("length of a training sample", unit="tokens")
    data_path: tuple[str, ...] | None = setting(
        None,
        "path of a tokenised corpus without .bin/.idx, divided by --split; several corpora are "
        "given as weight path pairs",
        unit="path",
    )
    train_data_path: tuple[str, ...] | None = setting(
        None, "tokenised corpus to train on, in the forms of --data-path", unit="path"
    )
    valid_data_path: tuple[str, ...] | None = setting(
        None, "tokenised corpus to validate on, in the forms of --data-path", unit="path"
    )
    test_data_path: tuple[str, ...] | None = setting(
        None,
        "tokenised corpus to measure the loss on once, after the last step, in the forms of "
        "--data-path",
        unit="path",
    )
    mock_data: bool = setting(
        False,
        "train, validate and test on made-up samples, whose tokens count up, in place of a corpus",
    )
    split: str = setting(
        "969,30,1",
        "shares of train, validation and test that --data-path is divided into by documents; the "
        "test share is measured once, after the last step",
    )
    tokenizer_type: TokenizerKind | None = setting(  # noqa: RUF009
        None,
        "kind of tokenizer; unset: GPT2BPETokenizer with --vocab-file, the kind that a prompt "
        "format is of, otherwise what --tokenizer-model holds; NullTokenizer, "
        "NullMultimodalTokenizer and ByteTokenizer need no file",
    )
    tokenizer_model: str | None = setting(
        None,
        "tokenizer file or folder; gives the vocabulary size and is kept in the checkpoint",
        unit="path",
    )
    vocab_file: str | None = setting(
        None,
        "vocab.json of a GPT2BPETokenizer, in place of --tokenizer-model, or vocab.txt of BERT's",
        unit="path",
    )
    merge_file: str | None = setting(
        None, "merges.txt of a GPT2BPETokenizer, beside --vocab-file", unit="path"
    )
    vocab_extra_ids: int | None = setting(
        None, "sentinels for T5 behind the tokens of BERT's tokenizers or a SentencePieceTokenizer"
    )
    tiktoken_pattern: Literal["v1", "v2"] | None = setting(
        None, "how a TikTokenizer cuts texts into words; unset: v2"
    )
    tiktoken_num_special_tokens: int | None = setting(
        None, "numbers that the special tokens of a TikTokenizer take; unset: 1000"
    )
    tokenizer_special_tokens: tuple[str, ...] | None = setting(
        None,
        "tokens that are kept whole, added to the tokenizer; all the special tokens of a "
        "TikTokenizer; unset, a MultimodalTokenizer adds <image>",
    )
    sft_tokenizer_prompt_format: SFTPromptFormat | None = setting(  # noqa: RUF009
        None,
        "how an SFTTokenizer writes conversations, default by the template in the tokenizer's "
        "folder; unset: nemotron-h-aligned, as in Megatron",
    )
    chat_template: str | None = setting(
        None, "file of the template by which an SFTTokenizer writes conversations", unit="path"
    )
    tokenizer_prompt_format: MultimodalPromptFormat | None = setting(  # noqa: RUF009
        None, "how a MultimodalTokenizer writes conversations"
    )
    image_tag_type: Literal["nvlm", "internvl"] | None = setting(
        None,
        "what a MultimodalTokenizer puts around <image>: nvlm <Image>, internvl <img>; unset: "
        "nothing",
    )
    force_system_message: bool = setting(
        False, "let a MultimodalTokenizer begin every conversation with Qwen's system message"
    )
    allow_tokenizer_mismatch: bool = setting(
        False,
        "train on corpora whose manifest names another tokenizer, which is refused otherwise: for "
        "a tokenizer that was saved anew by other software, with the same tokens (our name)",
    )
    reset_position_ids: bool = setting(False, "restart positions after each document", by_task=True)
    reset_attention_mask: bool = setting(False, "attend within a document only", by_task=True)
    eod_mask_loss: bool = setting(
        False, "no loss where the input is the end-of-document token", by_task=True
    )
    fim_data: bool = setting(
        False,
        "take documents apart, by --fim-rate, so that a model learns to fill in the middle; the "
        "tokenizer needs the tokens that name the parts (--tokenizer-special-tokens)",
        by_task=True,
    )
    sft: bool = setting(
        False,
        "train on conversations, what assistants say in them: --data-path names what "
        "megatron-data tokenize-conversations wrote, or files of JSON lines (.jsonl, .json) that "
        "are tokenized as samples ask for them",
        by_task=True,
    )
    max_document_bytes: int | None = setting(
        None,
        "bytes that a line of conversations may have which --sft reads as JSON lines; unset: "
        "33554432",
        unit="bytes",
        by_task=True,
    )
    max_template_steps: int | None = setting(
        None,
        "steps that the chat template may take for a conversation of these lines; unset: 20000000",
        by_task=True,
    )
    max_template_characters: int | None = setting(
        None,
        "characters that a text may have which the chat template makes of these lines; unset: "
        "67108864",
        by_task=True,
    )
    sample_order: Literal["stateless", "packed", "compat"] = setting(
        "stateless",
        "which tokens make up which sample: stateless computes every sample from its number, so "
        "that a run can be made longer and its data changed; packed does so with whole documents, "
        "cutting only those longer than a sample; compat gives Megatron's samples (our name)",
        by_task=True,
    )
    data_path_changes: str | None = setting(
        None,
        "JSON file of data that takes the place of --data-path in training from a sample on: "
        '[{"from_sample": 80000, "data_path": ["0.7", "a", "0.3", "b"]}] (our name)',
        unit="path",
        by_task=True,
    )
    data_cache_path: str | None = setting(
        None,
        "folder that keeps built sample indices of --sample-order compat for the next start",
        unit="path",
        by_task=True,
    )
    mmap_bin_files: bool = setting(
        True,
        "map token files into memory; otherwise stretches are read as samples ask for them: "
        "nothing is read ahead, and the memory of the process does not grow with the page cache",
    )
    object_storage_cache_path: str | None = setting(
        None,
        "folder on a local disk that keeps what is read of corpora at URLs (s3://, gs://, hf://): "
        "indices whole, tokens in blocks, of which those used longest ago are removed beyond 64 "
        "GiB; the ranks of a machine share it",
        unit="path",
    )
    broadcast_batches: bool = setting(
        False,
        "let one rank of each copy of the model open the corpus and send its micro-batches to the "
        "others; opening it has to take less than --distributed-timeout-minutes (our name)",
    )

    def __post_init__(self) -> None:
        check_positive(self, "seq_length", *LINE_LIMITS)
        self._check_tokenizer()
        for name in ("train_data_path", "valid_data_path", "test_data_path"):
            if self.data_path and getattr(self, name):
                raise TrainError(
                    f"--data-path, which --split divides, and {flag_of(name)} exclude each other; "
                    "give the one or the other"
                )
        self._check_mock_data()
        if not self.data_path and not self.train_data_path and not self.mock_data:
            raise TrainError("no corpus: give --data-path, or --train-data-path, or --mock-data")
        if self.data_path_changes and self.sample_order == "compat":
            raise TrainError(
                "--data-path-changes does not go with --sample-order compat, which is drawn for "
                "a whole run; give stateless or packed"
            )
        for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
            if getattr(self, name) and self.tokenizer is None:
                raise TrainError(
                    f"{flag_of(name)} needs --tokenizer-model, which knows where documents end"
                )

        self._check_sft()

    def _check_mock_data(self) -> None:
        """Refuses what needs a corpus where samples are made up."""
        if not self.mock_data:
            return
        corpora = (*DATA_PATHS, "data_path_changes", "sft", "fim_data")
        documents = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
        for name in (*corpora, *documents):
            if getattr(self, name):
                raise TrainError(
                    f"{flag_of(name)} does not go with --mock-data, which has no documents; give "
                    "the one or the other"
                )

    def _check_sft(self) -> None:
        """Refuses what conversations need, or have no use for."""
        limits = [flag_of(name) for name in LINE_LIMITS if getattr(self, name) is not None]
        if limits and not (self.sft and self.holds_conversation_lines):
            raise TrainError(
                f"{limits[0]} bounds what --sft reads of JSON lines, of which no corpus is a file; "
                "leave it out, or give it to megatron-data tokenize-conversations"
            )
        if not self.sft:
            return
        wanted = ("reset_position_ids", "reset_attention_mask")
        missing = [flag_of(name) for name in wanted if not getattr(self, name)]
        if missing:
            raise TrainError(
                f"--sft needs {' and '.join(missing)}: the conversations of a sample have nothing "
                "to do with each other"
            )
        for name in ("eod_mask_loss", "fim_data", "data_path_changes", "data_cache_path"):
            if getattr(self, name):
                raise TrainError(
                    f"{flag_of(name)} does not go with --sft, whose samples are conversations; "
                    "leave it out"
                )

    @property
    def corpora(self) -> tuple[str, ...] | dict[str, tuple[str, ...] | None]:
        """The corpora of all splits together, or of each by its name: train, valid and test."""
        return self.data_path or {
            "train": self.train_data_path,
            "valid": self.valid_data_path,
            "test": self.test_data_path,
        }

    @property
    def holds_conversation_lines(self) -> bool:
        """Whether a corpus is a file of JSON lines."""
        paths = (path for name in DATA_PATHS for path in getattr(self, name) or ())
        return any(map(is_conversation_file, paths))

    @property
    def tokenizer(self) -> TokenizerKind | None:
        """The kind of tokenizer, None where there is none.

        A --tokenizer-model whose kind nobody said counts as a HuggingFaceTokenizer; it may be any
        that megatron-data has saved.
        """
        if self.tokenizer_type is not None:
            return self.tokenizer_type
        kind = default_tokenizer_kind(self.tokenizer_settings)
        if kind == "HuggingFaceTokenizer" and self.tokenizer_model is None:
            return None
        return kind

    @property
    def tokenizer_settings(self) -> dict[str, Any]:
        """Settings that tokenizers are made from, by name, as far as they are given."""
        values = {name: getattr(self, name) for name in TOKENIZER_OPTIONS}
        return {
            name: value
            for name, value in values.items()
            if value is not None and value is not False  # a number of 0 is given
        }

    def _check_tokenizer(self) -> None:
        """Refuses files that the kind of tokenizer lacks, or has no use for."""
        given = self.tokenizer_settings
        if self.tokenizer is None:
            if given:
                names = ", ".join(map(flag_of, given))
                raise TrainError(
                    f"{names}: there is no tokenizer; give --tokenizer-model, --vocab-file or "
                    f"--tokenizer-type as well, or leave {names} out"
                )
            return
        if self.tokenizer.startswith("Null"):
            given["vocab_size"] = None  # a setting of the model
        if error := tokenizer_options_error(self.tokenizer_type, given):
            raise TrainError(error)
