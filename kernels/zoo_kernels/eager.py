"""Custom ops that eager code calls without PyTorch's dispatcher, wherever only their kernels would see the call.

The dispatcher takes 10 us of the host's time for an op without a gradient and 80 us for one with (schema, autograd's
wrapper, checks of aliases; torch 2.13), more than a small kernel takes on the device. Compilers, fake tensors, counters
of FLOPs, selective checkpoints, functorch and whatever else wants to see ops still see them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.autograd.graph import increment_version

TENSORS = frozenset((Tensor, torch.nn.Parameter))
HARMLESS = frozenset((type(None), bool, int, float, str))


class Operator:
    """A custom op and its implementation; called, it is whichever of the two the call needs.

    ``op`` is what ``torch.library.custom_op`` gives; ``register_fake`` and ``register_autograd`` are its own.

    Args:
        name: "namespace::name".
        body: the op's body, with a type for every argument. Numbers should come as the types say: only ``op`` casts.
        mutates: the names of the tensors that it changes.
        implementation: the same as ``body`` but free to return None for absent outputs. None: ``body``.
    """

    def __init__(
        self,
        name: str,
        body: Callable[..., Any],
        mutates: Sequence[str] = (),
        implementation: Callable[..., Any] | None = None,
    ):
        self.op = torch.library.custom_op(name, body, mutates_args=mutates)
        self.register_fake = self.op.register_fake
        self._run = body if implementation is None else implementation
        names = body.__code__.co_varnames
        self._changed = tuple(names.index(one) for one in mutates)
        self._function: type[torch.autograd.Function] | None = None
        self.__name__, self.__doc__ = body.__name__, body.__doc__

    def register_autograd(self, backward: Callable[..., Any], *, setup_context: Callable[..., None]) -> None:
        """As of ``op``; where the call has no observers, the formula stands in a Function of its own."""
        self.op.register_autograd(backward, setup_context=setup_context)

        def forward(ctx: Any, *args: Any) -> Any:
            output = self._run(*args)
            setup_context(ctx, args, output)
            return output

        members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        self._function = type(f"{self.__name__}_eager", (torch.autograd.Function,), members)

    def __call__(self, *args: Any) -> Any:
        if torch.compiler.is_compiling() or _observed(args):
            return self.op(*args)
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
            # Without a formula, the op refuses where a gradient is asked for.
            return self.op(*args) if self._function is None else self._function.apply(*args)
        for place in self._changed:
            # The tensors of inference mode have no version to count.
            if not args[place].is_inference():
                increment_version(args[place])
            elif not torch.is_inference_mode_enabled():
                return self.op(*args)
        return self._run(*args)


def operator(
    name: str, *, mutates: Sequence[str] = (), implementation: Callable[..., Any] | None = None
) -> Callable[[Callable[..., Any]], Operator]:
    """Decorates the body of an :class:`Operator`."""
    return lambda body: Operator(name, body, mutates, implementation)


def _observed(args: Sequence[Any]) -> bool:
    """Whether a mode, a transform or an argument wants to see ops; what is not known to be harmless does."""
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return True
    if torch._C._are_functorch_transforms_active():
        return True
    # In frames that a compiler gave up, it would still trace those that they call, down into the kernels.
    return get_eval_frame_callback() is not None or _peculiar(args)


def _peculiar(args: Sequence[Any]) -> bool:
    """Whether anything in ``args`` is more than a number or a name, or a tensor that is just numbers on a device."""
    for x in args:
        kind = type(x)
        if kind in TENSORS:
            if x.is_meta:
                return True
        elif kind is list:
            if _peculiar(x):
                return True
        elif kind not in HARMLESS:
            return True
    return False
