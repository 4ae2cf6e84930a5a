"""Launches that were measured: written by `zoo bench tune`, and to be changed by it alone."""

from __future__ import annotations

from zoo_kernels.launch import Row

# kernel -> its rows, each for exactly the facts that the kernel asked with; they go before the kernels' own tables.
MEASURED: dict[str, tuple[Row, ...]] = {}
