"""Measures the final loss of models of several widths at several learning rates.

    python tooling/widths/transfer.py OUT.json [--widths 128 256 512 1024] [--exponents -12 ... -7]

Each width is trained with the standard and with maximal update parametrization, on one thread. The
file is written after every run, and runs that it has are skipped. `picture.py` draws it.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from widths.training import BASE, Training, final_loss, model_config

SIZE, LENGTH = 8, 32


def main() -> None:
    """Trains the models that the file lacks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument(
        "--exponents", type=int, nargs="+", default=range(-12, -6), help="of learning rates 2^N"
    )
    parser.add_argument("--widths", type=int, nargs="+", default=[128, 256, 512, 1024])
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    done = json.loads(arguments.output.read_text()) if arguments.output.exists() else []
    known = {(run["width"], run["mup"], run["lr"], run.get("seed", 0)) for run in done}
    for width in arguments.widths:
        for mup in (False, True):
            for lr in (2.0**exponent for exponent in arguments.exponents):
                if (width, mup, lr, arguments.seed) in known or (mup and width == BASE):
                    continue  # at the base width both parametrizations are the same
                start = time.process_time()
                training = Training(
                    model_config(width, mup=mup), seed=arguments.seed, size=SIZE, length=LENGTH
                )
                run = {"width": width, "mup": mup, "lr": lr, "seed": arguments.seed}
                loss = final_loss(training, lr, arguments.steps)
                done.append({**run, "steps": arguments.steps, "loss": loss})
                arguments.output.write_text(json.dumps(done, indent=1) + "\n")
                print(f"{done[-1]} {time.process_time() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
