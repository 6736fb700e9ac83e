"""Track the tensors that exist during a computation, and those that autograd saves.

On the meta device tensors have shapes but no data, so both are found without allocating memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
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
    place: int = storage_of(tensor)._cdata
    return place


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """Return the storage that holds a tensor's data."""
    return tensor.untyped_storage()


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
        for storage in map(storage_of, tensors_in(made)):
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
