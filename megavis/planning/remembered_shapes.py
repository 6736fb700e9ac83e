"""Run operations on the meta device once for each combination of shapes."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megavis.planning.live_storages import place_of, tensors_in


class RememberedShapes(TorchDispatchMode):
    """Replaces a repeated operation on the meta device by new tensors of the shapes it returned.

    torch computes some shapes, such as those of a norm and its gradients, in Python with a dozen
    other operations. Operations that change an argument or return its storage always run.
    """

    def __torch_dispatch__(
        self,
        operation: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return new tensors of known shapes, or run the operation."""
        key = operation, _form(args), _form(kwargs or {})
        if (known := _KNOWN.get(key)) is not None:
            return known.again()
        results = operation(*args, **(kwargs or {}))
        if key not in _KNOWN:
            places = {place_of(tensor) for tensor in tensors_in((args, kwargs))}
            _KNOWN[key] = _Results.of(operation, results, places)
        return results


_Shape = tuple[torch.Size, tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class _Results:
    """Shape, strides and dtype of each result; None for a result that is None."""

    forms: tuple[_Shape | None, ...]
    is_single: bool

    @classmethod
    def of(cls, operation: Any, results: Any, arguments: set[int]) -> _Results | None:
        """Describe the results of an operation, or return None if others cannot replace them.

        Args:
            operation: the operation that returned them.
            results: a tensor, several, or something else, such as the work of a collective.
            arguments: places of the arguments' storages.
        """
        is_single = isinstance(results, Tensor)
        if operation._schema.is_mutable or not isinstance(results, Tensor | tuple | list):
            return None
        forms: list[_Shape | None] = []
        for result in (results,) if is_single else results:
            if isinstance(result, Tensor):
                if result.device.type != "meta" or place_of(result) in arguments:
                    return None
                form = result.shape, result.stride(), result.dtype
                if result.untyped_storage().nbytes() != _made(form).untyped_storage().nbytes():
                    return None
                forms.append(form)
            elif result is None:
                forms.append(None)
            else:
                return None
        return cls(tuple(forms), is_single)

    def again(self) -> Any:
        """Make such results once more."""
        made = [None if form is None else _made(form) for form in self.forms]
        return made[0] if self.is_single else tuple(made)


_KNOWN: dict[Hashable, _Results | None] = {}
"""Results by operation and arguments. They depend on nothing else, so all contexts share them."""


def _made(form: _Shape) -> Tensor:
    shape, strides, dtype = form
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def _form(argument: Any) -> Hashable:
    """Return everything that shapes depend on: the arguments without the tensors' data."""
    if isinstance(argument, Tensor):
        return argument.shape, argument.stride(), argument.dtype, argument.device
    if isinstance(argument, tuple | list):
        return tuple(map(_form, argument))
    if isinstance(argument, Mapping):
        return tuple((name, _form(each)) for name, each in argument.items())
    # Include the type, since 1, 1.0 and True are equal.
    return type(argument), argument
