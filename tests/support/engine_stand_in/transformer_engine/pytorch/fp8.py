"""The state of FP8, the contexts that set it, and the rounding."""

import torch


class FP8GlobalStateManager:
    """The recipe of the innermost context; None outside or where it is disabled."""

    recipe = None

    @classmethod
    def is_fp8_enabled(cls):
        return cls.recipe is not None


class autocast:  # noqa: N801, its name in Transformer Engine
    """Multiply matrices in FP8 inside the block."""

    def __init__(
        self,
        enabled=True,
        calibrating=False,
        recipe=None,
        amax_reduction_group=None,
        _graph=False,
    ):
        self.recipe = recipe if enabled else None

    def __enter__(self):
        self.before = FP8GlobalStateManager.recipe
        FP8GlobalStateManager.recipe = self.recipe
        return self

    def __exit__(self, *_):
        FP8GlobalStateManager.recipe = self.before


def fp8_autocast(enabled=True, calibrating=False, fp8_recipe=None, fp8_group=None, _graph=False):
    return autocast(enabled, calibrating, fp8_recipe, fp8_group, _graph)


def fp8_model_init(*_, **__):
    raise NotImplementedError


def rounded(x, dtype):
    """Return x scaled so that its maximum is the largest number of an FP8 type, rounded, and back.

    In float32, like the accumulators of a product.
    """
    largest = x.float().abs().amax()
    scale = torch.where(largest > 0, torch.finfo(dtype).max / largest, 1.0)
    return (x.float() * scale).to(dtype).float() / scale
