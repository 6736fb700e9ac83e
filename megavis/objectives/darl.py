"""DARL: Denoising Autoregressive Representation Learning (Li, Bornschein, Chen, 2024).

The next patch of an image is predicted from those before it: its pixels by squared error, or by a
decoder that takes noise from it, given the backbone's output (section 3), or its id in a frozen
tokenizer (appendix B.4). Patches are corrupted independently of each other, each with a γ of its
own.

Legend: b images, T patches, d numbers of a patch, v ids.
"""

from __future__ import annotations

import functools

from megavis.composition.asking import Asking, Query, Shift
from megavis.composition.codebook import Ids
from megavis.composition.reader import Slot, places, vector
from megavis.composition.tokens import Patches
from megavis.config.choices import PositionKind
from megavis.config.errors import UserError
from megavis.densities.categorical import Categorical
from megavis.densities.decoders import PatchHead, decoder_flops
from megavis.densities.diffusion import Diffusion, Process
from megavis.densities.squared_error import SquaredError
from megavis.model.init import Initialization, normal, vision_transformer
from megavis.model.orders import fixed_order
from megavis.objectives.composition import Composition
from megavis.objectives.darl_config import DARLConfig, position_kind
from megavis.schedules.one_by_one import OneByOne
from megavis.schedules.orders import Orders
from megavis.tokenizers.patches import pixel_range


class DARL(Composition):
    """Patch after patch."""

    config_type = DARLConfig
    paper: DARLConfig
    num_copies = 3

    @property
    def position_kind(self) -> PositionKind:
        """Decomposed rotary ones, unless the config says otherwise (section 3.4)."""
        return position_kind(self.config)

    @functools.cached_property
    def reads(self) -> Patches:
        """Patches of pixels."""
        size = self.config.data.image_size
        return Patches(image_size=size, patch_size=self.paper.patch_size)

    @functools.cached_property
    def predicts(self) -> Ids | Patches:
        """What is read, or ids of a frozen tokenizer (appendix B.4)."""
        paper = self.paper
        if paper.loss != "ids":
            return self.reads
        assert paper.vocabulary_size is not None
        return Ids(
            image_size=self.config.data.image_size,
            side=paper.grid_side(self.config),
            vocabulary_size=paper.vocabulary_size,
            tokenizer=paper.tokenizer,
        )

    @functools.cached_property
    def schedule(self) -> OneByOne:
        """Patch after patch in the config's order; features by rows where each has its own."""
        paper, side = self.paper, self.paper.grid_side(self.config)
        is_random = paper.order == "random"
        kind = "raster" if is_random else paper.order
        shared = fixed_order(kind, height=side, width=side, block=paper.order_block)
        seed = self.config.seed if is_random else None
        return OneByOne(Orders(shared, seed=seed), name="patch {}")

    @functools.cached_property
    def asks(self) -> Asking:
        """By the patch before, or by the query stream of appendix A.5.

        "The input token is the last image patch which the model doesn't need during pre-training"
        (section 4.1): features read it too.
        """
        return Query(starts=True) if self.paper.two_streams else Shift("content")

    @property
    def extra_tensors(self) -> tuple[str, ...]:
        """Noisy patches."""
        return ("noisy",) if self.paper.loss == "diffusion" else ()

    @functools.cached_property
    def density(self) -> Categorical | Diffusion | SquaredError:
        """Pixels by squared error or out of noise, or ids (sections 3.2, 3.3)."""
        paper, width = self.paper, self.reads.width
        if isinstance(self.predicts, Ids):
            return Categorical(self.core, self.predicts.vocabulary_size, fill=normal(0.02))
        head, work = functools.partial(self._build_head, width), self._decoder_flops()
        if paper.loss == "mse":
            return SquaredError(
                width, normalize=paper.normalize_targets, build_head=head, decoder_flops=work
            )
        process = Process(
            beta=(paper.noise_a, paper.noise_b),
            predicts=paper.predicts,
            value_range=pixel_range(),
            sampling_steps=paper.sampling_steps,
            temperature=paper.sampling_temperature,
            seed=self.config.seed,
        )
        return Diffusion(width, process, build_head=head, decoder_flops=work)

    def slots(self) -> dict[str, Slot]:
        """Return patches, positions, start token, and with two streams the query."""
        core, fill = self.core, normal(0.02)
        slots = {
            "patches": Slot("content", lambda: self.reads.embedding(core)),
            "positions": Slot("positions", places(core, self.position_kind, self.reads.grid, fill)),
            "start": Slot("start", vector(core, fill)),
        }
        if self.paper.two_streams:
            slots["query"] = Slot("query", vector(core, fill))
        return slots

    def _build_head(self, width: int) -> PatchHead:
        return PatchHead(
            self.core,
            width,
            kind=self.paper.decoder_kind,
            num_layers=self.paper.num_decoder_layers,
            denoises=self.paper.loss == "diffusion",
            tells_gamma=self.paper.condition_on_gamma,
        )

    def _decoder_flops(self) -> float:
        paper, noisy_width = self.paper, 0
        if paper.loss == "diffusion":
            noisy_width = self.reads.width + paper.condition_on_gamma * paper.patch_size**2
        return decoder_flops(
            self.config.model,
            paper.decoder_kind,
            paper.num_decoder_layers,
            noisy_width=noisy_width,
        )

    def initialization(self) -> Initialization:
        """Return MAE's, whose recipe is followed (section 4, table 8)."""
        return vision_transformer()

    def generation(self) -> DARL:
        """Return itself; raises UserError where predictions are not what is read."""
        if self.paper.loss == "ids":
            raise UserError(
                "with objective.loss ids the model reads patches and names ids, so it cannot go on"
                " from what it has drawn"
            )
        return self
