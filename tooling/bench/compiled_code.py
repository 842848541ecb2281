"""What compiled training steps do to a GPU beside products and attention: kernels and bytes.

Counts the steps of `gpu_step.py`, ours and those of a Llama written by hand, on an imagined device:
Inductor generates the code of an H100 (`device.inductor`), and a ledger counts what runs eagerly,
which is mostly the optimizer. Kernels of libraries, for products of matrices and attention, are
counted apart, without their bytes. Models have fewer layers, since all layers are alike. Needs a
C++ compiler and no GPU; nothing is timed.

    PYTHONPATH=tooling python tooling/bench/compiled_code.py [--models 125m] [--sources FOLDER]
"""

from megatron_parallel.imagined import NoGuardError, load_guard

try:
    load_guard()  # before torch is imported
except NoGuardError as error:
    print(f"compiled_code: nothing is counted: {error}")
    raise SystemExit(0) from None

import argparse
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from device.inductor import GraphCode, code_for_h100
from gpu_step import MODELS, PEER, VARIANTS, build_ours, our_step, plain_step, read_run
from megatron_parallel import Mesh
from megatron_parallel._compat.imagined import PRODUCTS
from megatron_parallel.imagined import imagined_device
from megatron_train.dry_run.rank import proof_batch
from tqdm import tqdm

HEADER = (
    "| model | variant | products, attention | kernels, compiled | eager | GiB, compiled | eager "
    "| all | / plain |\n|---|---|---:|---:|---:|---:|---:|---:|---:|"
)


class StepCode(NamedTuple):
    """What one step does.

    Attributes:
        codes: The code of its graphs, with the number of calls in the step.
        eager_kernels: Kernels outside of compiled code, by operation, those of libraries too.
        eager_bytes: What these read and write, by code line.
    """

    codes: list[GraphCode]
    eager_kernels: Counter[str]
    eager_bytes: Counter[str]

    @property
    def eager_products(self) -> int:
        """Kernels of libraries outside of compiled code."""
        names = {packet.__name__ for packet in PRODUCTS}
        return sum(count for name, count in self.eager_kernels.items() if name in names)

    def total(self, of: Callable[[GraphCode], int]) -> int:
        """Returns the sum of a property of the graphs over their calls."""
        return sum(code.calls * of(code) for code in self.codes)

    @property
    def nbytes(self) -> int:
        """Bytes of compiled and of eager code."""
        return self.total(lambda code: code.nbytes) + self.eager_bytes.total()


def count_step(flags: str, *, plain: bool = False) -> StepCode:
    """Returns what the second step of a run does on an imagined GPU.

    Args:
        flags: Flags of ``megatron-train pretrain gpt``.
        plain: Whether the loop by hand runs instead.
    """
    run = read_run(flags)
    batch = proof_batch(run)
    torch.compiler.reset()
    with (
        Mesh.imagined(run.layout, 0, "cuda") as mesh,
        imagined_device("cuda") as ledger,
        code_for_h100(ledger) as codes,
    ):
        trainer = build_ours(run, mesh, batch)
        trainer.callbacks = []
        (stage,) = trainer.engine.stages.modules
        step = plain_step(stage, batch) if plain else our_step(trainer)
        step()
        ledger.clear()
        for code in codes:
            code.calls = 0
        before = len(codes)
        step()
        if len(codes) > before:
            raise RuntimeError("the second step compiled again")
        return StepCode(list(codes), ledger.kernels.copy(), ledger.bytes_moved.copy())


def shortened(flags: str, layers: int) -> str:
    """Returns flags of a model with fewer layers."""
    return re.sub(r"--num-layers \d+", f"--num-layers {layers}", flags)


def row(model: str, variant: str, found: StepCode, plain: StepCode) -> str:
    """Returns a row of the table."""
    compiled = found.total(lambda code: code.nbytes)
    cells = (
        re.sub(r", \d+ of \d+ layers", "", model),
        variant,
        f"{found.total(lambda code: code.products) + found.eager_products:,}",
        f"{found.total(lambda code: code.kernels):,}",
        f"{found.eager_kernels.total() - found.eager_products:,}",
        *(f"{n / 2**30:.2f}" for n in (compiled, found.eager_bytes.total(), found.nbytes)),
        f"{found.nbytes / plain.nbytes:.2f}",
    )
    return f"| {' | '.join(cells)} |"


def write_sources(folder: Path, name: str, codes: list[GraphCode]) -> None:
    """Writes the code of every graph into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, code in enumerate(codes):
        way = "backward" if code.backward else "forward"
        file_name = re.sub(r"\W+", "-", f"{name}-{number}-{way}")
        (folder / f"{file_name}.py").write_text(code.source)


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    # Compiled code calls kernels of ours like those of libraries, whose bytes are not counted.
    variants = [name for name in VARIANTS if "Triton" not in name]
    parser.add_argument("--variants", nargs="+", choices=variants, default=variants)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--sources", type=Path, help="folder for the code of every graph")
    args = parser.parse_args()
    rows, plain = [HEADER], dict[str, StepCode]()
    cases = [(name, variant) for name in args.models for variant in (PEER, *args.variants)]
    for name, variant in tqdm(cases, unit="variant", disable=None):
        flags = shortened(MODELS[name].flags, args.layers)
        found = count_step(flags + VARIANTS.get(variant, ""), plain=variant == PEER)
        if variant == PEER:
            plain[name] = found
        rows.append(row(name, variant, found, plain[name]))
        if args.sources is not None:
            write_sources(args.sources, f"{name}-{variant}", found.codes)
    print("\n".join(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
