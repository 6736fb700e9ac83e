"""Schema of a YAML file, section by section.

Every key has a type, a range and a meaning; an unknown key is an error. The classes hold data and
the checks within one section; checks between sections are in `checks.py`. The objective's section
belongs to its paper (`papers.py` finds its class).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, SerializeAsAny

from megavis.config.arguments import RUN_NAME
from megavis.config.section import (
    Above0,
    Activation,
    AtLeast0,
    ConfigIssue,
    DashboardKind,
    DataConfig,
    EvaluationConfig,
    Fraction,
    KernelLibrary,
    NonNegative,
    ParallelConfig,
    PositionKind,
    Positive,
    Section,
    Share,
)


class ObjectiveConfig(Section):
    """Keys common to all papers; each paper's own class adds its keys."""

    has_blocks: ClassVar[bool] = True
    """Whether there is a Transformer, and therefore a `model` section."""

    takes_frames: ClassVar[bool] = False
    """Whether samples may be frames of a spectrogram instead of images."""
    has_relative_positions: ClassVar[bool] = False
    """Whether attention may have a bias for each offset (`model.positions: relative_2d`)."""

    name: str
    """The paper's short name, for example `igpt`."""

    def null_label_key(self, config: RunConfig) -> str | None:
        """Return the key that would train the null label; None if it is trained."""
        return None

    def cannot_generate(self, config: RunConfig) -> str | None:
        """Return why models with these keys cannot generate images; None if they can."""
        return f"runs of {self.name} generate no images"

    def warning(self, config: RunConfig) -> str | None:
        """Return a warning to print before training, on limitations of the model; often None."""
        return None

    def num_further_blocks(self, config: RunConfig) -> int:
        """Return the blocks of encoders and decoders, which `model.num_layers` does not count."""
        return 0

    def check(self, config: RunConfig) -> Iterator[ConfigIssue]:
        """Yield conflicts between the paper's keys and others; none by default."""
        yield from ()


class ModelConfig(Section):
    """The Transformer, with Megatron's names."""

    num_layers: NonNegative
    """Transformer blocks; 0 if there are none, as in a VAE."""
    hidden_size: Positive
    """Width of the residual stream."""
    num_attention_heads: Positive
    """Attention heads; must divide `hidden_size`."""
    ffn_hidden_size: Positive | None = None
    """Width of the MLP; default: 4 × hidden_size."""
    normalization: Literal["rms_norm", "layer_norm"] = "rms_norm"
    """`rms_norm`: a gain and no mean subtraction. `layer_norm`: the usual one, with a bias."""
    norm_bias: Literal["all", "last"] = "all"
    """Layer norms with a bias: all, or only the one before the head."""
    norm_epsilon: Above0 = 1e-5
    """Added to the variance inside every norm."""
    activation: Activation = "quick_gelu"
    """`quick_gelu` is x · sigmoid(1.702 x). `swiglu` is gated, SiLU(Ux) · Vx, with three matrices
    of `ffn_hidden_size` rows or columns ("GLU Variants Improve Transformer", equation 6)."""
    add_bias: bool = False
    """Biases on the linear layers of the blocks."""
    attention_bias: bool | None = None
    """Biases on the linear layers of attention; default: `add_bias`."""
    qk_norm: bool = False
    """Normalise the queries and keys of each head of self-attention, as `normalization` says, with
    one gain (and bias) for all heads ("Scaling Vision Transformers to 22 Billion Parameters",
    section 2)."""
    embedding_dropout: Fraction = 0.0
    """Dropout on embedded tokens, before positions are added."""
    hidden_dropout: Fraction = 0.0
    """Dropout on the output of attention and MLP, before it is added to the residual stream."""
    attention_output_dropout: Fraction | None = None
    """The same for attention only; default: `hidden_dropout`."""
    attention_dropout: Fraction = 0.0
    """Dropout on attention probabilities."""
    mlp_dropout: Fraction = 0.0
    """Dropout inside the MLP, after its activation."""
    drop_path: Fraction = 0.0
    """Stochastic depth: probability that an image skips a branch (attention, MLP) of the last block
    in training; it increases linearly from 0 in the first block. Not used in an encoder's blocks.
    """
    positions: PositionKind | None = None
    """Position encoding; default: the paper's. `learned_sincos`: learned and initially sin-cos, as
    in MAE's released code when it fine-tunes a model with sin-cos positions. `relative_2d`: a
    learned bias of attention for each offset, initially zero."""
    features: Literal["norms", "blocks"] = "norms"
    """Features of a layer: the output of its first norm (iGPT, section 2.4), or the input of that
    norm, which is the output of the block before it (GIVT, appendix F)."""
    position_scale: Above0 = 1.0
    """Factor for the coordinates of rotary and sin-cos positions. To interpolate, use the image
    side in training divided by the new side; for `rope_1d`, whose coordinate is the index in the
    sequence, the square of that."""

    @property
    def has_biased_attention(self) -> bool:
        """Whether attention's linear layers have biases."""
        return self.add_bias if self.attention_bias is None else self.attention_bias

    @property
    def residual_dropout(self) -> float:
        """Dropout on attention's output to the residual stream."""
        given = self.attention_output_dropout
        return self.hidden_dropout if given is None else given

    @property
    def blocks_have_dropout(self) -> bool:
        """Whether blocks draw from torch's generators; `drop_path` does not."""
        return any(
            (self.hidden_dropout, self.residual_dropout, self.attention_dropout, self.mlp_dropout)
        )

    @property
    def has_dropout(self) -> bool:
        """Whether anything is drawn from torch's generators."""
        return self.blocks_have_dropout or self.embedding_dropout > 0

    def without_dropout(self) -> ModelConfig:
        """Return the same model without dropout."""
        names = ("hidden", "attention_output", "attention", "mlp", "embedding")
        return self.model_copy(update={f"{name}_dropout": 0.0 for name in names})

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def mlp_size(self) -> int:
        """Width of the MLP, given or 4 × hidden_size."""
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def mlp_input_size(self) -> int:
        """Width before the activation: twice the MLP's where it is gated."""
        return self.mlp_size * (2 if self.activation == "swiglu" else 1)

    @property
    def block_parameters(self) -> int:
        """Parameters in the matrices of a block: attention's four, and the MLP's."""
        return self.hidden_size * (4 * self.hidden_size + self.mlp_input_size + self.mlp_size)


NO_BLOCKS = ModelConfig(num_layers=0, hidden_size=1, num_attention_heads=1)


class OptimizerConfig(Section):
    """Adam or Adafactor; for linear evaluation SGD or LARS."""

    algorithm: Literal["adam", "adafactor", "sgd", "lars"] = "adam"
    """`adafactor`: with momentum, and mean squares of the rows and columns of each matrix, as in
    the released code of UViM and GIVT; `epsilon` does not apply, and a layer's own learning rate
    does not scale its decay. `sgd`: plain momentum, for linear evaluation (iGPT, section 3.4).
    `lars`: scales each matrix's step by its norm, for large batches (MAE)."""

    learning_rate: Above0
    """Peak learning rate."""
    betas: Annotated[tuple[Fraction, Fraction], Field(strict=False)] = (0.9, 0.95)
    """Adam's decay rates. The first is the momentum of Adafactor, SGD and LARS; the second bounds
    Adafactor's decay of mean squares, which increases with the step."""
    epsilon: Above0 = 1e-8
    """Adam's denominator constant."""
    weight_decay: AtLeast0 = 0.0
    """Decoupled weight decay on the kernels of linear maps and convolutions; biases, norms,
    embeddings, positions and learned tokens have none."""
    decay_embeddings: bool = False
    """Decay embeddings, positions and learned tokens too, as the released code of MAR
    and RandAR does."""
    gradient_clipping: AtLeast0 = 0.0
    """Maximum global gradient norm; 0 disables clipping."""
    ema_decay: Fraction = 0.0
    """Decay per step of an EMA of the weights, which replaces the weights in validation, in image
    grids and wherever the run is opened; 0: none. It starts from the weights of the first step, of
    which 0.9999 leaves 37 % after 10,000 steps, 1 % after 46,000."""


class ScheduleConfig(Section):
    """Learning rate over steps."""

    decay: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape after warm-up; `cosine` and `linear` end at `min_rate` after the last step."""
    min_rate: AtLeast0 = 0.0
    """Final learning rate of `cosine` and `linear`."""
    warmup_steps: NonNegative = 0
    """Steps of linear increase from 0."""
    warmup_rate: Above0 | None = None
    """Constant learning rate during warm-up, instead of the linear increase."""
    halve_every: NonNegative = 0
    """With `constant`: halve the rate every N steps after warm-up; 0: never."""


class TrainingConfig(Section):
    """Duration, batch size, precision, and handling of failures."""

    steps: Positive
    """Optimizer steps."""
    batch_size: Positive
    """Images per step, over all processes."""
    micro_batch_size: Positive | None = None
    """Images per micro-batch and process; default: batch_size / data-parallel size."""
    precision: Literal["float32", "bf16", "fp16"] = "float32"
    """Compute precision; the sums of gradients, master weights and the loss stay in float32."""
    reduce_precision: Literal["float32", "compute"] = "float32"
    """Precision in which gradients are averaged over processes; `compute`: in `precision`, which
    halves the bytes."""
    tf32: bool = False
    """Round the inputs of float32 matrix products and convolutions to TensorFloat-32 on GPUs:
    several times as fast, with 10 of 23 bits. Frozen tokenizers never do."""
    deterministic: bool = False
    """On GPUs, use only deterministic kernels, so that a resumed run continues bit for bit; slower.
    A CPU is always deterministic."""
    kernels: KernelLibrary = "auto"
    """On GPUs: `blocks` (and `auto`) compiles each Transformer block whole for training; `regions`
    uses torch's fastest kernels and compiles small regions; `torch` uses plain operators; `apex` is
    `regions` with the norms and Adam of NVIDIA Apex; `transformer_engine` is `regions` with NVIDIA
    Transformer Engine's linear layers and norms in the blocks. Both libraries must be installed. A
    CPU uses plain operators, and compiled blocks only with `blocks`."""
    fp8: bool = False
    """Multiply the blocks' matrices in FP8 in training (E4M3, gradients E5M2, each tensor scaled by
    its own maximum), with `kernels: transformer_engine` and `precision: bf16`. Master weights,
    norms, attention, embedding, head, loss and evaluation are unchanged."""
    log_every: Positive = 10
    """Steps between lines of metrics."""
    validate_every: NonNegative = 0
    """Steps between validations; 0: never."""
    validation_images: Positive = 256
    """Held-out images per validation."""
    patience: NonNegative = 0
    """Stop pre-training after this many validations without a new best accuracy, and keep the best
    step's checkpoint for fine-tuning; 0: never."""
    sample_every: NonNegative = 0
    """Steps between image grids; 0: never."""
    sample_images: Positive = 8
    """Images per grid."""
    hang_timeout: AtLeast0 = 180.0
    """Seconds that a step of several processes may take before the job is ended as hung; each part
    of the work between two steps may take ten times as long. 0: no limit."""
    spike_threshold: AtLeast0 = 0.0
    """A step is bad if its loss lies more than this many deviations (1.4826 times the median
    distance from the median) above the median of the good steps before it; 0: never."""
    spike_window: Annotated[int, Field(ge=2)] = 100
    """Good steps to compare with; until there are this many, finite losses are never bad."""
    max_bad_steps: NonNegative = 10
    """Consecutive bad steps (spikes or non-finite gradients) after which training rolls back or
    ends. 0: any number. With fp16 only spikes count: its loss scale is found by skipping steps."""
    max_rollbacks: NonNegative = 0
    """Maximum number of rollbacks to the same checkpoint, each skipping the data up to the last
    bad step; 0: training ends instead."""
    rollback_margin: NonNegative = 100
    """Steps by which that checkpoint must be older than the first bad step, and batches after the
    last one to skip too."""
    check_replicas_every: NonNegative = 0
    """Steps between checks, also made before every checkpoint, that replicas hold the same bits
    and compute the same loss from the same images; 0: never."""
    max_restarts: NonNegative = 3
    """Maximum number of automatic restarts (by SLURM or torchrun) without a new checkpoint."""

    def micro_batch(self, data_parallel_size: int) -> int:
        """Return the images per micro-batch and process."""
        return self.micro_batch_size or self.batch_size // data_parallel_size


_HEAD = (
    "task",
    "num_classes",
    "visibility",
    "read_out",
    "layer",
    "concatenate",
    "average",
    "linear_evaluation",
    "standardize",
    "layers",
    "head_width",
    "detector",
    "window",
    "global_blocks",
    "relative_positions",
)
"""The keys of fine-tuning on which the head depends, and what it reads."""


class FinetuneConfig(Section):
    """Training on labelled images: the paper's own loss, a cross-entropy of classes, or both."""

    task: Literal["classes", "segments", "instances"] = "classes"
    """What is predicted: the class of an image, or of each pixel (semantic segmentation by UPerNet,
    on features of four blocks, as in BEiT's recipe), or objects with boxes, classes and masks (by
    Mask R-CNN on a simple pyramid, as in ViTDet; needs the extra `dense`)."""

    from_run: str | None = None
    """Run folder with the initial weights; default: train from scratch. If it is a run of the same
    task, head and classes, its head is trained further; otherwise the head is new."""
    from_step: Positive | None = None
    """Step of its checkpoint; default: the one that a finished fine-tuning run chose, the best with
    `training.patience`, else the newest."""
    num_classes: Annotated[int, Field(gt=1)]
    """Number of classes, without void; must match the shards."""
    generative_weight: AtLeast0 = 0.0
    """Weight of the paper's own loss, relative to 1 for the classes. At 0, images are read as for
    features."""
    visibility: Literal["kept", "full"] = "kept"
    """Attention masks: as in pre-training, or none."""
    read_out: Literal["mean", "first", "last", "attention"] = "mean"
    """How class logits are read from the last norm's output: from the mean over tokens, the first
    token (a class token), the last token, or by `attention` of a learned query to all tokens (AIM,
    section 4.2)."""
    layer: NonNegative | None = None
    """Layer l whose features are read, from 0 (before the first block) to `model.num_layers`, the
    default. Blocks above it are dropped (iGPT, sections 2.4, 4.5)."""
    concatenate: Positive = 1
    """With `linear_evaluation`: odd number of adjacent layers around `layer` whose features are
    concatenated (iGPT, section 4.4)."""
    average: Positive = 1
    """With `linear_evaluation`: number of layers, the last of them `layer`, whose features are
    averaged, as in AIM's released code."""
    classifier_std: AtLeast0 | None = None
    """Standard deviation of the classifier's initial weights; default: 0 (iGPT, appendix A.1), and
    0.01 with `linear_evaluation`, as in the code of MAE and MoCo. MAE's code fine-tunes from 2e-5,
    DeiT's trains from 0.02."""
    label_smoothing: Fraction = 0.0
    """Share of a label spread evenly over all classes."""
    mixup: AtLeast0 = 0.0
    """α of Beta(α, α), the share of the other image when two are added; 0: never. With `cutmix`
    too, each is chosen with probability 1/2."""
    cutmix: AtLeast0 = 0.0
    """The same for a rectangle of the other image pasted into the first."""
    mixing: Literal["batch", "pair", "elem"] = "batch"
    """Images that share a draw of λ, the rectangle, and the choice between the two, like timm's
    `mode`: a `batch`, as in the code of DeiT and MAE; the mixed `pair`; or none (`elem`)."""
    mixing_batch: Positive = 32
    """Images of a `batch`, an even number. In those codes, the images of one process: 32 in MAE's
    fine-tuning and 64 in DeiT's training."""
    drop_path: Fraction | None = None
    """Drop path rate of this run; default: `model.drop_path`."""
    linear_evaluation: bool = False
    """Train only the classifier, on features of the frozen network, instead of fine-tuning."""
    standardize: bool = True
    """With `linear_evaluation`: standardise features over the batch (MAE, appendix A.2); false:
    use them unscaled (iGPT, section 2.4)."""
    tuned_blocks: NonNegative | None = None
    """Train only this many of the last blocks, the last norm and the classifier (MAE, section 4.3);
    default: everything."""
    layer_decay: Share = 1.0
    """Learning rate of each layer relative to the layer above it."""
    layers: Annotated[tuple[Positive, ...], Field(strict=False)] | None = None
    """With `segments`: the four blocks after which features are read, in ascending order; default:
    every quarter of the model's."""
    head_width: Annotated[int, Field(gt=1)] | None = None
    """With `segments`: channels of UPerNet, by default 512; the auxiliary head has the same number,
    but at most 256. With `instances`: channels of pyramid and heads, by default 256."""
    head_dropout: Fraction = 0.1
    """With `segments`: share of the heads' last channels that are set to 0 in training."""
    auxiliary_weight: AtLeast0 = 0.4
    """With `segments`: weight of the auxiliary head's loss."""
    detector: Literal["mask", "cascade"] = "mask"
    """With `instances`: Mask R-CNN, or Cascade Mask R-CNN, which refines boxes in three stages."""
    regions: Annotated[int, Field(ge=4)] = 512
    """With `instances`: proposals of an image that are drawn for the losses of its boxes; at most a
    quarter are objects, on which masks are trained (`ROI_HEADS.BATCH_SIZE_PER_IMAGE` in
    detectron2)."""
    window: Positive | None = None
    """With `instances`: side in patches of the windows to which attention is limited, except in
    `global_blocks`; must divide the image's side; default: all blocks attend to all patches."""
    global_blocks: Annotated[tuple[Positive, ...], Field(strict=False)] | None = None
    """With `window`: numbers of the blocks that attend to all patches; default: every quarter of
    the model's."""
    relative_positions: bool = False
    """With `instances`: add a bias of the query and the key's relative row and column to attention
    scores, as in ViTDet; these weights are initialised to 0."""
    patience: NonNegative = 0
    """Stop after this many validations without a new best accuracy; 0: never."""
    test: str | None = None
    """Folder of test shards on which the best checkpoint is evaluated once; default: half of the
    validation images is held out for this."""

    def blocks_without_window(self, depth: int) -> tuple[int, ...]:
        """Return the numbers, from 1, of the blocks of `depth` that attend to all patches."""
        if self.window is None:
            return tuple(range(1, depth + 1))
        quarters = {-(-depth * quarter // 4) for quarter in range(1, 5)}
        return tuple(sorted(quarters)) if self.global_blocks is None else self.global_blocks

    @property
    def width_of_head(self) -> int:
        """Channels of the head of a task with one."""
        return self.head_width or {"segments": 512}.get(self.task, 256)

    @property
    def gives_features(self) -> bool:
        """Whether a run has features of whole images, which probes read."""
        return self.task == "classes"

    @property
    def images_per_mix(self) -> int:
        """Consecutive images that share the draws of mixup and CutMix."""
        return {"batch": self.mixing_batch, "pair": 2, "elem": 1}[self.mixing]


class CheckpointConfig(Section):
    """When to save and what to keep."""

    every: NonNegative = 1000
    """Steps between checkpoints; the last step is always saved. 0: only the last."""
    keep_last: Positive = 2
    """Number of newest checkpoints to keep."""
    keep_every: NonNegative = 0
    """Checkpoints whose step is a multiple of this are never pruned; 0: none."""
    keep_at: Annotated[tuple[Positive, ...], Field(strict=False)] = ()
    """Steps that are saved regardless of `every`, and never pruned."""


class RunConfig(Section):
    """A whole run."""

    name: Annotated[str, Field(pattern=RUN_NAME)]
    """Name of the run folder."""
    output: str = "runs"
    """Parent of the run folders."""
    seed: Annotated[int, Field(ge=0, lt=2**64)] = 0
    """Seed of initial weights, sample order and every random draw."""
    # pydantic serializes a field by its declared class, and would omit the paper's own keys.
    objective: SerializeAsAny[ObjectiveConfig]
    """The paper's own keys; `name` selects the paper."""
    model: ModelConfig = NO_BLOCKS
    """The Transformer; absent if there is none, as in a VAE."""
    data: DataConfig
    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig
    schedule: ScheduleConfig = ScheduleConfig()
    training: TrainingConfig
    checkpoint: CheckpointConfig = CheckpointConfig()
    finetune: FinetuneConfig | None = None
    """Present in a fine-tuning run."""
    evaluation: EvaluationConfig | None = None
    """Present if checkpoints are evaluated during training."""
    logging: Annotated[tuple[DashboardKind, ...], Field(strict=False)] = ("tensorboard",)
    """Dashboards besides `metrics.jsonl`, which every run writes: `tensorboard`, `wandb`, `mlflow`.
    The latter two are extras, and write to the run folder unless their environment variables name
    a server."""

    @property
    def head(self) -> dict[str, Any]:
        """The keys that fix a fine-tuning run's head and what it reads; empty for other runs."""
        if self.finetune is None:
            return {}
        head = {f"finetune.{key}": getattr(self.finetune, key) for key in _HEAD}
        if self.finetune.layer is None:
            head["finetune.layer"] = self.model.num_layers
        return {"model.features": self.model.features, **head}

    @property
    def has_dropout(self) -> bool:
        """Whether blocks or the head of fine-tuning drop activations."""
        tuned = self.finetune
        drops = tuned is not None and tuned.task == "segments" and tuned.head_dropout > 0
        return self.model.has_dropout or drops

    @property
    def drop_path(self) -> float:
        """Rate of stochastic depth: fine-tuning's if set, else the model's."""
        own = self.finetune.drop_path if self.finetune else None
        return self.model.drop_path if own is None else own

    @property
    def classifies_only(self) -> bool:
        """Whether it fine-tunes without the paper's own loss, on images read as for features."""
        return self.finetune is not None and not self.finetune.generative_weight

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.output) / self.name
