"""The words of a paper: tokens, schedule, asking, density, condition, memory, transform, weights.

Each word is a section of the config. Its `kind` is the name, in snake case, of the class that
`composition/build.py` makes of it. Facts that checks and planning need are here, without torch.
"""

from megavis.grammar.words.asking import (
    AnyAsking,
    AskWord,
    DecoderConfig,
    InContext,
    Instruct,
    Mask,
    Query,
    Rows,
    Shift,
    Visible,
)
from megavis.grammar.words.conditions import (
    Adapter,
    AnyCondition,
    ConditionWord,
    EncodedImage,
    Labels,
    LearnedTokens,
    PooledFeatures,
)
from megavis.grammar.words.densities import (
    AnyDensity,
    Categorical,
    CorrelatedGaussian,
    DensityWord,
    Diffusion,
    GaussianMixture,
    Place,
    SquaredError,
)
from megavis.grammar.words.schedules import (
    AnySchedule,
    Context,
    Groups,
    Masked,
    OneByOne,
    Rounds,
    ScheduleWord,
)
from megavis.grammar.words.tokens import (
    AnyTokens,
    Colors,
    Frames,
    Ids,
    Latents,
    Patches,
    SquareTokens,
    TokenWord,
)
from megavis.grammar.words.weights import Deviation, InitialWeights

__all__ = [
    "Adapter",
    "AnyAsking",
    "AnyCondition",
    "AnyDensity",
    "AnySchedule",
    "AnyTokens",
    "AskWord",
    "Categorical",
    "Colors",
    "ConditionWord",
    "Context",
    "CorrelatedGaussian",
    "DecoderConfig",
    "DensityWord",
    "Deviation",
    "Diffusion",
    "EncodedImage",
    "Frames",
    "GaussianMixture",
    "Groups",
    "Ids",
    "InContext",
    "InitialWeights",
    "Instruct",
    "Labels",
    "Latents",
    "LearnedTokens",
    "Mask",
    "Masked",
    "OneByOne",
    "Patches",
    "Place",
    "PooledFeatures",
    "Query",
    "Rounds",
    "Rows",
    "ScheduleWord",
    "Shift",
    "SquareTokens",
    "SquaredError",
    "TokenWord",
    "Visible",
]
