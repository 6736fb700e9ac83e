"""A trivial feature network for Fréchet distances."""

from megavis.evaluation.images.feature_networks import Activations
from megavis.evaluation.images.results import NetworkName


class Small:
    """Features are the mean colours of three rows; the first three are also logits."""

    def __init__(self, is_published=False):
        self.about = NetworkName("small", "ab" * 32, "none", is_published)

    def __call__(self, images):
        features = images[:, :3].float().mean(2).flatten(1) / 255.0
        return Activations(features, 8 * features[:, :3], spatial=features[:, 3:])
