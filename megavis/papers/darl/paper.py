"""DARL: Denoising Autoregressive Representation Learning (Li, Bornschein, Chen, 2024).

The next patch of an image is predicted from those before it: its pixels by squared error, or by a
denoising decoder conditioned on the backbone's output (section 3), or its id in a frozen tokenizer
(appendix B.4). Patches are corrupted independently, each with its own γ.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, partial

from megavis.composition.asking import Asking, Query, Shift
from megavis.composition.composition import Composition
from megavis.composition.encoded_tokens import TokenIds
from megavis.composition.tokens import Patches
from megavis.data.format.manifest import Manifest
from megavis.densities.categorical import Categorical
from megavis.densities.decoders import DecoderSpec, PatchHead
from megavis.densities.diffusion import Diffusion, DiffusionProcess
from megavis.densities.squared_error import SquaredError
from megavis.model.embeddings import TokenHead
from megavis.model.parameters import normal
from megavis.papers.darl.config import DARLConfig
from megavis.schedules.one_by_one import OneByOne
from megavis.schedules.orders import Orders
from megavis.tokenizers.patches import pixel_range


class DARL(Composition):
    """Predict one patch at a time."""

    config_type = DARLConfig
    paper: DARLConfig
    default_positions = "rope_2d"  # decomposed (section 3.4)
    num_copies = 3

    @cached_property
    def reads(self) -> TokenIds | Patches:
        """Patches of pixels, or ids of a frozen tokenizer (appendix B.4)."""
        return self.ids() if self.paper.inputs == "ids" else self.patches()

    @cached_property
    def predicts(self) -> TokenIds | Patches:
        """The input tokens, or the other of the two kinds."""
        if (self.paper.inputs == "ids") == (self.paper.loss == "ids"):
            return self.reads
        return self.ids() if self.paper.loss == "ids" else self.patches()

    def check_data(self, manifest: Manifest) -> Iterator[str]:
        """Also check that shards hold images if pixels are predicted from ids."""
        yield from super().check_data(manifest)
        if manifest.kind == "ids" and self.paper.inputs == "ids" and self.paper.loss != "ids":
            yield f"holds ids; objective.loss {self.paper.loss} predicts pixels: name jpeg shards"

    @cached_property
    def schedule(self) -> OneByOne:
        """One patch at a time in the configured order; raster for features if it is random."""
        kind, block = self.paper.order, self.paper.order_block
        orders = Orders.of_kind(kind, *self.reads.grid, block=block, seed=self.config.seed)
        return OneByOne(orders)

    @cached_property
    def asks(self) -> Asking:
        """The patch before, or the query stream of appendix A.5.

        Features also read the last patch, "which the model doesn't need during pre-training"
        (section 4.1).
        """
        return Query(starts=True) if self.paper.two_streams else Shift("content")

    @property
    def extra_tensors(self) -> tuple[str, ...]:
        """Noisy patches, for diffusion."""
        return ("noisy",) if self.paper.loss == "diffusion" else ()

    @cached_property
    def density(self) -> Categorical | Diffusion | SquaredError:
        """Squared error or diffusion of pixels (sections 3.2, 3.3), or ids."""
        paper, predicts = self.paper, self.predicts
        if isinstance(predicts, TokenIds):
            return Categorical(self.core, predicts.vocabulary_size, fill=normal(0.02))
        if paper.loss == "mse" and paper.decoder_kind == "linear":
            return SquaredError(
                predicts.width,
                normalize=paper.normalize_targets,
                build_head=partial(TokenHead, self.core, predicts.width),
            )
        decoder = DecoderSpec(
            paper.decoder_kind,
            predicts.width,
            paper.decoder_layers,
            denoises=paper.loss == "diffusion",
            appends_gamma=paper.condition_on_gamma,
        )
        head, work = partial(PatchHead, self.core, decoder), decoder.work(self.core)
        if paper.loss == "mse":
            return SquaredError(
                predicts.width,
                normalize=paper.normalize_targets,
                build_head=head,
                decoder=work,
            )
        process = DiffusionProcess.of(paper, value_range=pixel_range(), seed=self.config.seed)
        return Diffusion(predicts.width, process, build_head=head, decoder=work)
