"""Run layers on the meta device, where tensors have shapes but no data.

`LiveStorages` tracks the tensors that exist during a computation, `saved_tensors` finds those that
autograd saves, `RememberedShapes` repeats an operation without running it, and `FlashAttention`
keeps what a GPU's kernel would. No memory is allocated.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

Storages = dict[int, Tensor]
"""One tensor per storage, by the storage's address."""


def saved_tensors(
    run: Callable[[], Any], modules: Iterable[nn.Module] = ()
) -> tuple[Storages, Any]:
    """Return the tensors, except parameters, that autograd saves during `run`, and its result."""
    parameters = [parameter for module in modules for parameter in module.parameters()]
    # Keep the tensors alive: the address of a freed storage may be reused.
    saved: Storages = {}

    def keep(tensor: Tensor) -> Tensor:
        place = place_of(tensor)
        # Look it up each time: ZeRO-3 allocates a new storage whenever it gathers a parameter.
        if all(place != place_of(parameter) for parameter in parameters):
            saved.setdefault(place, tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = run()
    return saved, result


def num_bytes(storages: Storages) -> int:
    """Return the total bytes of the storages."""
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())


def place_of(tensor: Tensor) -> int:
    """Return a key that identifies the storage of a tensor while it exists."""
    # On the meta device every address is 0; this is the address of the storage object itself.
    place: int = tensor.untyped_storage()._cdata
    return place


class LiveStorages(TorchDispatchMode):
    """Track storages created by operations in this context until they are freed.

    `sizes` has the bytes of live storages by address, `most` their peak, `made` the bytes of all.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.num_bytes = self.most = self.made = 0

    def add(self, place: int, size: int) -> None:
        """Note a new storage."""
        self.sizes[place] = size
        self.num_bytes += size
        self.made += size

    def free(self, place: int) -> int:
        """Note that a storage has been freed; return its bytes."""
        size = self.sizes.pop(place)
        self.num_bytes -= size
        return size

    def record(self) -> None:
        """Note the bytes of live storages after an operation."""
        self.most = max(self.most, self.num_bytes)

    def __torch_dispatch__(
        self,
        operation: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation and record its new storages; views of its arguments have none."""
        known = {place_of(tensor) for tensor in tensors_in((args, kwargs))}
        made = operation(*args, **(kwargs or {}))
        for storage in (tensor.untyped_storage() for tensor in tensors_in(made)):
            if storage._cdata not in known and storage._cdata not in self.sizes:
                self.add(storage._cdata, storage.nbytes())
                weakref.finalize(storage, self.free, storage._cdata)
        self.record()
        return made


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors in nested tuples, lists and dictionaries."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (tuple, list)):
        return []
    return [tensor for part in tree for tensor in tensors_in(part)]


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


class FlashAttention(TorchFunctionMode):
    """Attention that keeps queries, keys, values, output and the softmax's sums, as on a GPU.

    On the meta device torch chooses a kernel that keeps all scores.
    """

    def begin(self, *_: Any) -> None:
        """Begin, before a module's forward pass."""
        self.__enter__()

    def end(self, *_: Any) -> None:
        """End, after it."""
        self.__exit__(None, None, None)

    def __torch_function__(
        self,
        function: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function is F.scaled_dot_product_attention:
            mask = (kwargs or {}).get("attn_mask")
            return _Attended.apply(*args, mask)
        return function(*args, **(kwargs or {}))


class _Attended(torch.autograd.Function):
    """Tensors of attention's shapes, without values."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        # Kernels lay their output out like the queries, and take a mask in their precision.
        mixed = torch.empty_like(query)
        sums = query.new_empty(query.shape[:3], dtype=torch.float32)
        mask = None if mask is None else mask.to(query.dtype)
        ctx.save_for_backward(query, key, value, mixed, sums, mask)
        return mixed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        query, key, value, _, _, mask = ctx.saved_tensors
        needed = zip((query, key, value, mask), ctx.needs_input_grad, strict=True)
        return tuple(torch.empty_like(each) if needs else None for each, needs in needed)
