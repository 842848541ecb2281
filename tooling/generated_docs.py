"""Writes the pages of docs/ that are generated from code.

Usage: python tooling/generated_docs.py [--check]
"""

import sys
from pathlib import Path

from commands_page import render_commands
from device.page import render_device_page
from families.pages import pages
from families.published_page import render as render_published
from megatron_train.config.reference import render_reference
from megatron_train.megatron_lm.page import render_flags

ROOT = Path(__file__).parents[1]
STRANGER = ROOT / "integration_tests" / "stranger"
PAGES = {
    "docs/commands.md": render_commands,
    "docs/configuration.md": render_reference,
    "docs/megatron-flags.md": render_flags,
    "docs/device-steps.md": render_device_page,
    "docs/adding-a-model.md": (STRANGER / "README.md").read_text,
    "docs/adding-a-task.md": (STRANGER / "adding-a-task.md").read_text,
    "docs/adding-parts.md": (STRANGER / "adding-parts.md").read_text,
    "docs/published-configurations.md": render_published,
    **pages(),
}


def main(check: bool) -> int:
    """Writes the pages, or with `check` reports those that are out of date."""
    stale = []
    for name, render in PAGES.items():
        page, text = ROOT / name, render()
        if page.exists() and page.read_text() == text:
            continue
        if check:
            stale.append(name)
        else:
            page.parent.mkdir(exist_ok=True)
            page.write_text(text)
            print(f"wrote {name}")
    for name in stale:
        print(
            f"generated_docs: error: {name} is out of date: run python tooling/generated_docs.py",
            file=sys.stderr,
        )
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
