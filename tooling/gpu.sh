#!/usr/bin/env bash
# Every test marked `gpu`, from the bare source folders: nothing is installed, nothing downloaded.
# Most of them need one GPU; those over several (NCCL) use as many devices as there are. What is
# skipped is printed with its reason. PYTHON names the interpreter; arguments go to pytest:
# `tooling/gpu.sh --device simulated` tries what can be tried without a GPU, and files or folders
# among the arguments replace the folders of all packages.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT

"$python" - <<'PRINT'
import sys
try:
    import torch
except ModuleNotFoundError:
    sys.exit(f"gpu.sh: error: torch is not installed for {sys.executable}; set PYTHON to one that has it")
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
nccl = ".".join(map(str, torch.cuda.nccl.version())) if names else "not used"
print(f"Python {sys.version.split()[0]}, torch {torch.__version__}, NCCL {nccl}")
print("devices:", ", ".join(names) or "none; without --device simulated every test marked gpu is skipped")
PRINT

settings=$("$python" tooling/bare_install.py "$site")
eval "$settings"
export PYTHONPATH="$PYTHONPATH:$PWD/tooling"
for argument in "$@"; do
    if [ -e "${argument%%::*}" ]; then
        TEST_FOLDERS=
    fi
done
status=0
# shellcheck disable=SC2086 - folders are separate words
"$python" -m pytest -q -m gpu -rs -p skip_missing -p no:cacheprovider $TEST_FOLDERS "$@" || status=$?
if [ "$status" = 5 ]; then
    echo "gpu.sh: no test is marked gpu"
    status=0
fi
exit "$status"
