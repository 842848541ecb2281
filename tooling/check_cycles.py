"""Checks that no modules import one another in a circle, not even for type checking or in
functions.

Usage: python tooling/check_cycles.py packages/*/src
"""

import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from grimp import build_graph


def find_cycle(sources: list[Path]) -> list[str]:
    """Returns modules each of which imports the next, from one to itself; empty if there is no
    cycle.

    Args:
        sources: Folders of packages.
    """
    sys.path[:0] = map(str, sources)
    packages = [path.name for source in sources for path in source.iterdir() if path.is_dir()]
    graph = build_graph(*packages, cache_dir=None, exclude_type_checking_imports=False)
    imported = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    try:
        TopologicalSorter(imported).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


if __name__ == "__main__":
    cycle = find_cycle([Path(argument) for argument in sys.argv[1:]])
    if cycle:
        sys.exit(f"modules import one another in a circle: {' -> '.join(cycle)}")
