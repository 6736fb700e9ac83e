"""A learned attention bias for each offset between two cells of a grid.

"BEiT: BERT Pre-Training of Image Transformers" (section 2.5 and its released code): every layer and
head has its own, and all start at zero.

Legend: b images, n heads of this process, q queries, c keys, H × W the grid.
"""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from torch import Tensor, nn

from megavis.model.declarations import set_start
from megavis.model.init import filled, zeros

OFF_GRID = -1
"""Row and column of a token off the grid, such as a class token."""


class RelativeBias(nn.Module):
    """Added to q · k / √d, by head and by the relative position of key and query.

    `weight` is float32 `[n, (2H - 1)(2W - 1) + 3]`: a number for each offset in rows and columns,
    then one for a query off the grid, one for a key off the grid, and one where both are. It is
    split over the tensor group by heads.

    Args:
        num_heads: n.
        grid: H and W.
    """

    def __init__(self, num_heads: int, grid: tuple[int, int]) -> None:
        super().__init__()
        self.height, self.width = grid
        self.num_offsets = (2 * self.height - 1) * (2 * self.width - 1)
        self.weight = filled(num_heads, self.num_offsets + 3, fill=zeros)
        set_start([self.weight], "saved or fresh")
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return the bias `[b or 1, n, q, c]`.

        Args:
            queries: int64 `[b or 1, q, 2]`, row and column of each, `OFF_GRID` where it has none.
            keys: likewise, `[b or 1, c, 2]`.
        """
        rows, columns = (keys[:, None] - queries[:, :, None]).unbind(-1)
        entries = (rows + self.height - 1) * (2 * self.width - 1) + columns + self.width - 1
        outside = queries[:, :, None, 0].eq(OFF_GRID) + 2 * keys[:, None, :, 0].eq(OFF_GRID).long()
        entries = torch.where(outside > 0, self.num_offsets - 1 + outside, entries)
        return self.weight[:, entries].transpose(0, 1)
