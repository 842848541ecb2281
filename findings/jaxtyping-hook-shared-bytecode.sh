#!/usr/bin/env bash
# Package:   jaxtyping 0.3.11 with beartype 0.23.1; seen on 2026-11-27.
# Guess:     install_import_hook checks the modules that it is given and no others, independent of
#            what ran before.
# Behaviour: while a checked module is imported, all modules that it imports share the hook's name of
#            bytecode files. A module that is not to be checked leaves its plain bytecode there, and a
#            later process that is to check it reads that file and checks nothing. In the other order,
#            a module that is not to be checked is checked.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q jaxtyping==0.3.11 beartype==0.23.1 numpy==2.4.6
cat >"$folder/outer.py" <<'PY'
import inner
PY
cat >"$folder/inner.py" <<'PY'
import numpy
from jaxtyping import Float


def first(x: Float[numpy.ndarray, "n"]) -> float:
    return float(x.ravel()[0])
PY
cat >"$folder/run.py" <<'PY'
import sys

import numpy
from jaxtyping import install_import_hook

install_import_hook(sys.argv[1].split(","), "beartype.beartype")
import outer

try:
    outer.inner.first(numpy.zeros((2, 2)))
    print("unchecked")
except Exception as error:
    print("checked")
PY
cd "$folder"
export PYTHONDONTWRITEBYTECODE=
python=$folder/venv/bin/python
alone=$("$python" run.py inner)
rm -rf __pycache__
"$python" run.py outer >/dev/null
after_outer=$("$python" run.py outer,inner)
rm -rf __pycache__
"$python" run.py outer,inner >/dev/null
after_inner=$("$python" run.py outer)
echo "jaxtyping 0.3.11, a module with an array of the wrong shape"
echo "  to be checked, no bytecode: $alone"
echo "  to be checked, after a process that did not check it: $after_outer"
echo "  not to be checked, after a process that did: $after_inner"
[ "$alone $after_outer $after_inner" = "checked unchecked checked" ] || {
    echo "the behaviour has changed"
    exit 1
}
