"""tooling/first_model.py finds what the README tells its reader to type."""

from pathlib import Path

from first_model import readme_commands, run_folder


def test_the_readme_has_the_commands_of_a_first_model_in_order() -> None:
    texts = readme_commands()
    assert [text.split()[:2] for text in texts] == [
        ["megatron-data", "train-tokenizer"],
        ["megatron-data", "preprocess"],
        ["megatron-train", "pretrain"],
        ["megatron-train", "report"],
        ["megatron-infer", "generate"],
    ]
    assert run_folder(texts) == Path("runs/book")
    assert all("runs/book" in text for text in texts[2:])
