"""The largest tensor that a piece of code computes."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargestTensor(TorchDispatchMode):
    """Record the largest tensor, in bytes, that operations return forward and backward."""

    def __init__(self):
        super().__init__()
        self.size, self.operation = 0, ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().nbytes() > self.size:
                self.size, self.operation = leaf.untyped_storage().nbytes(), str(func)
        return result
