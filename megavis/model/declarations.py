"""Which parameters weight decay leaves alone, declared where they are made.

Everything of two or more dimensions decays but what is declared here: tables that are looked up
(embeddings, codebooks, positions) and learned tokens. So MAE's and GIVT's released code has it: the
kernels of linear maps and convolutions decay, biases and the gains of norms do not.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

_DECLARATION = "without_weight_decay"


def without_decay(parameter: Tensor) -> None:
    """Declare that weight decay leaves a parameter alone.

    The declaration is an attribute of the parameter, as Megatron's own are: ZeRO-3 and the
    pipeline engine keep parameters, whatever they do to their shapes.
    """
    declared: Any = parameter
    setattr(declared, _DECLARATION, True)


def is_without_decay(parameter: Tensor) -> bool:
    """Return whether `without_decay` was called for a parameter."""
    return getattr(parameter, _DECLARATION, False)
