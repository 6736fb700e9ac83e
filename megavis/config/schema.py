"""What a YAML file may say, section by section.

Every key has a type, a range and a meaning; an unknown key is an error. The classes hold data and
the checks of one section; what must hold between sections is in `checks.py`. The objective's
section belongs to its paper: `objectives` hands its classes to the loader.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field, SerializeAsAny

from megavis.config.choices import PositionKind
from megavis.config.data import DataConfig
from megavis.config.evaluation import EvaluationConfig
from megavis.config.section import (
    Above0,
    AtLeast0,
    ConfigIssue,
    Fraction,
    NonNegative,
    Positive,
    Section,
    Share,
)


class ObjectiveConfig(Section):
    """What every paper's section has; each paper's own class adds its keys."""

    has_blocks: ClassVar[bool] = True
    """False where there is no Transformer, and so no `model` section."""

    takes_frames: ClassVar[bool] = False
    """True where samples may be frames of a spectrogram instead of images."""
    has_relative_positions: ClassVar[bool] = False
    """True where attention may have a bias for each offset (`model.positions: relative_2d`)."""

    name: str
    """The paper's short name, for example `igpt`."""

    @property
    def missing_null_label(self) -> str | None:
        """Key whose value 0 leaves no input for "no class"; None: there is one, or no need."""
        return None

    @property
    def no_images(self) -> str | None:
        """Sentence on why models of these keys draw no images; None: they do."""
        return f"runs of {self.name} draw no images"

    def check(self, config: RunConfig) -> Iterator[ConfigIssue]:
        """Yield what is wrong between the paper's keys and the others; nothing by default."""
        yield from ()


class ModelConfig(Section):
    """The Transformer, in Megatron's names."""

    num_layers: NonNegative
    """Transformer blocks; 0 for what has none, such as a VAE."""
    hidden_size: Positive
    """Width of the residual stream."""
    num_attention_heads: Positive
    """Attention heads; must divide `hidden_size`."""
    ffn_hidden_size: Positive | None = None
    """Width of the MLP; 4 × hidden_size when absent."""
    normalization: Literal["rms_norm", "layer_norm"] = "rms_norm"
    """`rms_norm`: a gain and no mean subtraction. `layer_norm`: the usual one, with a bias."""
    norm_bias: Literal["all", "last"] = "all"
    """Which layer norms have a bias: all, or only the one before the head."""
    norm_epsilon: Above0 = 1e-5
    """Added to the variance inside every norm."""
    activation: Literal["quick_gelu", "gelu", "gelu_tanh"] = "quick_gelu"
    """`quick_gelu` is x · sigmoid(1.702 x)."""
    add_bias: bool = False
    """Biases on the linear layers of the blocks."""
    attention_bias: bool | None = None
    """Biases on those of attention; as `add_bias` says when absent."""
    hidden_dropout: Fraction = 0.0
    """Dropout on what each half of a block adds to the residual stream."""
    attention_output_dropout: Fraction | None = None
    """Dropout on what attention adds to it; `hidden_dropout` when absent."""
    attention_dropout: Fraction = 0.0
    """Dropout on attention probabilities."""
    mlp_dropout: Fraction = 0.0
    """Dropout inside the MLP, after its activation."""
    drop_path: Fraction = 0.0
    """Stochastic depth: probability that an image skips a part (attention, MLP) of the last block
    in training; it grows linearly from 0 in the first. An encoder's blocks skip nothing."""
    positions: PositionKind | None = None
    """Position encoding; the paper's default when absent. `relative_2d`: attention
    has a bias for each offset, zero at the start."""
    position_scale: Above0 = 1.0
    """Multiplies coordinates of rotary and sin-cos positions: trained grid / present grid
    interpolates them."""

    @property
    def has_biased_attention(self) -> bool:
        """True where attention's linear layers have biases."""
        return self.add_bias if self.attention_bias is None else self.attention_bias

    @property
    def residual_dropout(self) -> float:
        """Dropout on what attention adds to the residual stream."""
        given = self.attention_output_dropout
        return self.hidden_dropout if given is None else given

    @property
    def has_dropout(self) -> bool:
        """True where anything is drawn from torch's generators; `drop_path` is not."""
        return any(
            (
                self.hidden_dropout,
                self.residual_dropout,
                self.attention_dropout,
                self.mlp_dropout,
            )
        )

    def without_dropout(self) -> ModelConfig:
        """Return the same model without what `has_dropout` looks for."""
        names = ("hidden_dropout", "attention_output_dropout", "attention_dropout", "mlp_dropout")
        return self.model_copy(update=dict.fromkeys(names, 0.0))

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def mlp_size(self) -> int:
        """Width of the MLP, given or 4 × hidden_size."""
        return self.ffn_hidden_size or 4 * self.hidden_size


NO_BLOCKS = ModelConfig(num_layers=0, hidden_size=1, num_attention_heads=1)


class ParallelConfig(Section):
    """How the work is laid out over processes; the data-parallel size is what remains."""

    tensor_model_parallel_size: Positive = 1
    """Processes that share each layer's matrices."""
    sequence_parallel: bool = False
    """Split the norms' and residual's activations over the tensor group as well."""
    pipeline_model_parallel_size: Positive = 1
    """Processes that hold consecutive blocks."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    """DeepSpeed ZeRO: 1 splits optimizer states, 2 gradients too, 3 weights too."""
    offload_optimizer: Literal["none", "cpu", "nvme"] = "none"
    """Where the optimizer states live."""
    offload_parameters: Literal["none", "cpu", "nvme"] = "none"
    """Where ZeRO-3's weights live between uses."""
    nvme_path: str | None = None
    """Folder on a fast local disk, for the nvme choices."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """`selective` recomputes core attention, `full` whole blocks."""


class OptimizerConfig(Section):
    """Adam, as torch or NVIDIA Apex has it; for linear evaluation SGD or LARS."""

    algorithm: Literal["adam", "sgd", "lars"] = "adam"
    """`sgd`: momentum alone, for linear evaluation (iGPT, section 3.4). `lars` scales each matrix's
    step by its norm, for the large batches of MAE's."""

    learning_rate: Above0
    """Peak learning rate."""
    betas: Annotated[tuple[Fraction, Fraction], Field(strict=False)] = (0.9, 0.95)
    """Adam's decay rates; the first is the momentum of SGD and LARS."""
    epsilon: Above0 = 1e-8
    """Adam's denominator constant."""
    weight_decay: AtLeast0 = 0.0
    """Decoupled weight decay on the kernels of linear maps and convolutions; biases, norms,
    embeddings, positions and learned tokens have none."""
    gradient_clipping: AtLeast0 = 0.0
    """Largest global gradient norm; 0 leaves gradients alone."""
    ema_decay: Fraction = 0.0
    """Decay a step of a moving average of the weights, which validation, pictures and all who open
    the run take in place of the weights; 0: none."""
    implementation: Literal["torch", "apex"] = "torch"
    """`apex` takes NVIDIA Apex's fused Adam, which must be installed."""


class ScheduleConfig(Section):
    """Learning rate over steps."""

    decay: Literal["cosine", "constant"] = "cosine"
    """Shape after the warm-up; `cosine` ends at `min_rate` after the last step."""
    min_rate: AtLeast0 = 0.0
    """Learning rate at which `cosine` ends."""
    warmup_steps: NonNegative = 0
    """Steps of linear rise from 0."""
    warmup_rate: Above0 | None = None
    """Learning rate of all warm-up steps, in place of the rise."""
    halve_every: NonNegative = 0
    """With `constant`: steps after the warm-up at which the rate is halved, again and again; 0:
    never."""


class TrainingConfig(Section):
    """How long, how many at once, how precisely."""

    steps: Positive
    """Optimizer steps."""
    batch_size: Positive
    """Images a step, over all processes."""
    micro_batch_size: Positive | None = None
    """Images a process handles at once; batch_size / data-parallel size when absent."""
    precision: Literal["float32", "bf16", "fp16"] = "float32"
    """Compute precision; the sums of gradients, master weights and the loss stay in float32."""
    reduce_precision: Literal["float32", "compute"] = "float32"
    """In what gradients are averaged over processes; `compute`: in `precision`, half the bytes."""
    tf32: bool = False
    """Round the factors of float32 products and convolutions to TensorFloat-32 on GPUs: several
    times as fast, 10 bits of 23. Frozen tokenizers never do."""
    deterministic: bool = False
    """On GPUs only kernels that repeat their bits, so that a resumed run continues bit for bit;
    slower. A CPU repeats them anyway."""
    log_every: Positive = 10
    """Steps between two lines of metrics."""
    validate_every: NonNegative = 0
    """Steps between two validation losses; 0: never."""
    validation_images: Positive = 256
    """Held-out images of one validation loss."""
    sample_every: NonNegative = 0
    """Steps between two image grids; 0: never."""
    sample_images: Positive = 8
    """Images of such a grid."""
    hang_timeout: AtLeast0 = 180.0
    """Seconds that a step of several processes may take before the job is ended as hung; what comes
    between two steps may take ten times as long. 0: any time."""
    spike_threshold: AtLeast0 = 0.0
    """A step is bad when its loss lies more than so many deviations (1.4826 times the median
    distance from the median) above the median of the good steps before it; 0: no finite loss is."""
    spike_window: Annotated[int, Field(ge=2)] = 100
    """Good steps that it is compared with; before there are so many, no finite loss is bad."""
    max_bad_steps: NonNegative = 10
    """Bad steps in a row, spikes or gradients that are not finite, after which training goes back,
    or ends. 0: any number. With fp16 spikes alone: its loss scale is found by skipping steps."""
    max_rollbacks: NonNegative = 0
    """Times that training goes back to one and the same checkpoint, and leaves out the data up to
    the last bad step; 0: it ends instead."""
    rollback_margin: NonNegative = 100
    """Steps by which that checkpoint is older than the first bad step, and batches beyond the last
    one that are left out too."""
    check_replicas_every: NonNegative = 0
    """Steps between two looks, and one before every checkpoint, whether processes that hold the
    same weights have the same bits, and the same images give the same loss; 0: never."""
    max_restarts: NonNegative = 3
    """Automatic restarts (of SLURM, of torchrun) without a new checkpoint between them."""


class FinetuneConfig(Section):
    """A training on labelled images: the paper's own loss, a cross-entropy of classes, or both."""

    from_run: str | None = None
    """Run folder whose weights it starts from; from scratch when absent."""
    from_step: Positive | None = None
    """Which checkpoint of that run; the newest when absent."""
    num_classes: Annotated[int, Field(gt=1)]
    """Classes of the labels; must be that of the shards."""
    generative_weight: AtLeast0 = 0.0
    """Weight of the paper's own loss; that of the classes is 1. At 0 images are seen as for
    features."""
    visibility: Literal["kept", "full"] = "kept"
    """Which token sees which: as in pre-training, or all see all."""
    read_out: Literal["mean", "first", "last"] = "mean"
    """Where class logits are read off the last norm's output: the mean over tokens, the first
    token (a class token), or the last one."""
    layer: NonNegative | None = None
    """Layer l whose features classes are read off, from 0, in front of the first block, to
    `model.num_layers`; that when absent. Blocks above it are left out (iGPT, sections 2.4, 4.5)."""
    concatenate: Positive = 1
    """With `linear_evaluation`: so many adjacent layers, an odd number around `layer`, whose
    features stand side by side (iGPT, section 4.4)."""
    classifier_std: AtLeast0 | None = None
    """Deviation of the classifier's matrix at the start; when absent 0 (iGPT, appendix A.1), and
    0.01 under `linear_evaluation`, as MAE's and MoCo's code have it."""
    label_smoothing: Fraction = 0.0
    """Share of a label that is spread evenly over all classes."""
    mixup: AtLeast0 = 0.0
    """α of Beta(α, α), from which the share of the other image comes when two are added; 0: never.
    With `cutmix` too, each happens to half of the pairs."""
    cutmix: AtLeast0 = 0.0
    """Likewise for a rectangle of the other image put into the first."""
    drop_path: Fraction | None = None
    """Takes the place of `model.drop_path` in this run; that when absent."""
    linear_evaluation: bool = False
    """Train the classifier alone, on features of the frozen network, in place of fine-tuning."""
    standardize: bool = True
    """With `linear_evaluation`: standardise features over the batch (MAE, appendix A.2); false:
    take them as they are (iGPT, section 2.4)."""
    layer_decay: Share = 1.0
    """Each layer learns at so many times the rate of the one above it."""
    patience: NonNegative = 0
    """Validations without a new best accuracy after which training stops; 0: at the last step."""
    test: str | None = None
    """Folder of test shards, which the best checkpoint meets once; when absent, a half of the
    validation images is kept for that."""


class CheckpointConfig(Section):
    """When to save, what to keep."""

    every: NonNegative = 1000
    """Steps between two checkpoints; the last step is always saved. 0: only the last."""
    keep_last: Positive = 2
    """Newest checkpoints that are kept."""
    keep_every: NonNegative = 0
    """Checkpoints whose step is a multiple of this are kept for good; 0: none."""
    keep_at: Annotated[tuple[Positive, ...], Field(strict=False)] = ()
    """Steps whose checkpoints are saved, whatever `every` says, and kept for good."""


class RunConfig(Section):
    """A whole run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Name of the run folder."""
    output: str = "runs"
    """Folder that holds the run folders."""
    seed: NonNegative = 0
    """Decides initial weights, sample order and every random draw."""
    objective: SerializeAsAny[ObjectiveConfig]
    """The paper's own keys; `name` says which paper."""
    model: ModelConfig = NO_BLOCKS
    """The Transformer; absent for what has none, such as a VAE."""
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

    @property
    def drop_path(self) -> float:
        """Rate of stochastic depth: that of fine-tuning where it has its own, else the model's."""
        own = self.finetune.drop_path if self.finetune else None
        return self.model.drop_path if own is None else own

    @property
    def folder(self) -> str:
        """The run folder."""
        return f"{self.output}/{self.name}"
