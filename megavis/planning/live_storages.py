"""Storages that operations make and hold at once, on any device, `meta` too."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveStorages(TorchDispatchMode):
    """Storages that operations inside have made, until they are freed.

    Attributes:
        sizes: bytes of those that are alive, by their place.
        most: bytes at the worst moment.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.num_bytes = self.most = 0

    def counted(self) -> int:
        """Return the bytes of those alive that count."""
        return self.num_bytes

    def __torch_dispatch__(
        self,
        operation: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation and see what it made, which is not a view of what it was given."""
        known = {storage_of(tensor)._cdata for tensor in _tensors((args, kwargs))}
        made = operation(*args, **(kwargs or {}))
        for storage in map(storage_of, _tensors(made)):
            if storage._cdata not in known and storage._cdata not in self.sizes:
                self.sizes[storage._cdata] = storage.nbytes()
                self.num_bytes += storage.nbytes()
                weakref.finalize(storage, self._free, storage._cdata)
        if self.num_bytes > self.most:
            self.most = max(self.most, self.counted())
        return made

    def _free(self, place: int) -> None:
        self.num_bytes -= self.sizes.pop(place)


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """Return what holds a tensor's numbers."""
    return tensor.untyped_storage()


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
