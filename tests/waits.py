"""Proof that code never makes the host wait for the device."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_waits() -> Iterator[None]:
    """Inside, whatever makes the host wait for the GPU raises RuntimeError; what was asked for before is done first.

    PyTorch warns once in a process that this mode is a prototype. As an error, that warning would leave the mode on,
    and every later test in the process would fail of it.
    """
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
