"""Checks tensor annotations at run time."""

from jaxtyping import install_import_hook

install_import_hook("megatron_infer", "beartype.beartype")
