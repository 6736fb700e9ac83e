"""A tiny discrete tokenizer: k-means of patches."""

from __future__ import annotations

import torch
import yaml
from torch.nn import functional as F

from megavis.checkpoint.state.save import write_weights
from megavis.config.errors import UserError
from megavis.tokenizers.network_tokenizer import IdTokenizer

PATCH = 4


class SmallCodebook(IdTokenizer):
    """Encodes each patch as the nearest of k mean patches."""

    kind = "small_codebook"
    prefix = "codebook."

    def __init__(self, entries):
        super().__init__({"entries": entries})
        self.codes = torch.nn.Parameter(torch.zeros(entries, 3 * PATCH**2))

    @classmethod
    def from_config(cls, config):
        return cls(config["objective"]["entries"])

    @property
    def vocabulary_size(self):
        return self.settings["entries"]

    @property
    def feature_size(self):
        return 3 * PATCH**2

    def num_tokens(self, image_size):
        if image_size % PATCH:
            raise UserError(f"images of side {image_size} do not divide into patches of {PATCH}")
        return (image_size // PATCH) ** 2

    def features(self, images):
        return self.patches(images)

    def patches(self, images):
        pixels = images.permute(0, 3, 1, 2).float() / 255
        return F.unfold(pixels, PATCH, stride=PATCH).transpose(1, 2)

    def encode(self, images):
        return torch.cdist(self.patches(images), self.codes).argmin(dim=-1)

    def decode(self, ids):
        side = round(ids.shape[1] ** 0.5) * PATCH
        patches = self.codes[ids].transpose(1, 2)
        pixels = F.fold(patches, (side, side), PATCH, stride=PATCH)
        return (pixels * 255).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)

    @torch.no_grad()
    def fit(self, images, steps=5):
        """Run Lloyd's k-means, initialised with evenly spaced patches."""
        patches = self.patches(images).flatten(0, 1)
        places = torch.linspace(0, len(patches) - 1, len(self.codes)).long()
        self.codes.copy_(patches[places])
        for _ in range(steps):
            nearest = torch.cdist(patches, self.codes).argmin(dim=-1)
            for code in nearest.unique():
                self.codes[code] = patches[nearest == code].mean(dim=0)
        return self

    def save_run(self, folder):
        """Write a run folder as `megavis train` does."""
        return write_run(folder, self, {"name": "small_codebook", **self.settings})


def write_run(folder, tokenizer, section, **sections):
    """Write a tokenizer's run folder as `megavis train` does; return the folder."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({"objective": section, **sections}))
    weights = {f"{tokenizer.prefix}{name}": value for name, value in tokenizer.state_dict().items()}
    write_weights(folder, weights, seed=0, tokenizer=None)
    return folder
