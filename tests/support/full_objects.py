"""Images with so many objects that a loss counts all the regions it may."""

import dataclasses

import torch

from megavis.data.loading.loader import Batch

OBJECTS = 160
"""More than the proposals that may be objects, 128: torchvision proposes all objects too."""


def with_full_objects(batch: Batch) -> Batch:
    """Return the batch with rectangles of many sizes as the objects of each image."""
    side, random = batch.inputs.shape[1], torch.Generator().manual_seed(1)
    pixels = torch.zeros(len(batch.inputs), OBJECTS, side, side, dtype=torch.uint8)
    for image in pixels:
        for mask in image:
            height, width = torch.randint(6, side // 2, (2,), generator=random).tolist()
            top = int(torch.randint(0, side - height, (1,), generator=random))
            left = int(torch.randint(0, side - width, (1,), generator=random))
            mask[top : top + height, left : left + width] = 1
    weights = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1])
    packed = (pixels.unflatten(3, (side // 8, 8)) * weights).sum(4).to(torch.uint8)
    classes = torch.ones(len(pixels), OBJECTS, dtype=torch.int64)
    return dataclasses.replace(batch, objects=(classes, packed))
