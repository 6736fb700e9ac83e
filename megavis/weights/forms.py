"""Forms in which a run is exported: a run folder with plain tensors, or a Vision Transformer.

Any run becomes a folder for `megavis.load`, and if possible for a page of plain PyTorch: a run
folder with one file of weights at its top level, as on the Hub. What the first layer adds
(positions, a start or class token, "no class") and the attention mask are stored as tensors with
the weights, so that `plain_loader.py` needs no code specific to a paper.

A run is exported as a ViT of `timm` or `transformers` if its model is one: it reads patches,
prepends one learned token, adds positions and has a ViT's blocks. Backbones pretrained with another
visibility use full attention here, as with `finetune.visibility: full`.

Legend: b images, s rows (of a ViT the class token and n patches), n tokens, h hidden size, H and W
pixels.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megavis.checkpoint.format.folder import chosen_checkpoint, partial_folder, publish
from megavis.checkpoint.format.manifest import (
    CheckpointManifest,
    LogicalTensor,
    read_manifest,
    write_manifest,
)
from megavis.checkpoint.format.tensor_reader import read_weights
from megavis.checkpoint.state.restore import load_weights
from megavis.checkpoint.state.save import write_tensors
from megavis.composition.condition import PooledFeatures
from megavis.composition.model import Model
from megavis.composition.reader import Reader
from megavis.composition.tokens import Patches, Vocabulary
from megavis.config.errors import UserError
from megavis.config.load import dump_config, exported_names, with_tokenizers
from megavis.data.format.manifest import PALETTE_NAME
from megavis.data.loading.loader import Batch
from megavis.model.inference import Inference
from megavis.model.layer_state import LayerState
from megavis.model.positions import angles
from megavis.model.stack import LayerStack, LocalLayers, watch_features
from megavis.notebook import Run
from megavis.tokenizers.network_tokenizer import open_tokenizer
from megavis.weights.plain_loader import features as plain_features
from megavis.weights.released import random_images
from megavis.weights.vit_blocks import TIMM, block_to
from megavis.weights.vits import EPSILON, TimmViT, timm_features

WEIGHTS = "model.safetensors"
TOLERANCE = 1e-4
_PREFIX = "plain."
_CONTENT = "embedding.content"


def check_agreement(ours: Tensor, theirs: Tensor) -> float:
    """Return the maximum absolute difference of two outputs; raises UserError above 1e-4."""
    difference = float((ours - theirs).abs().max())
    if not difference <= TOLERANCE:
        raise UserError(
            f"the converted network's outputs differ by {difference:.1e} from the original's on"
            f" random inputs, more than {TOLERANCE:.0e}; the result was discarded"
        )
    return difference


def write_run(
    folder: Path, run: Run, weights: Mapping[str, Tensor], extra: Mapping[str, Tensor]
) -> None:
    """Write a run folder whose checkpoint refers to `model.safetensors` at its top level.

    The file has the unsharded parameters under megavis' names, and `extra` tensors. Config, palette
    and tokenizers of the run are written too. Raises UserError if a tokenizer cannot be opened.
    """
    assert run.checkpoint is not None
    _write_checkpoint(folder, run.checkpoint, weights, extra)
    names = exported_names(run.config)
    for path, name in names.items():
        _write_tokenizer(folder / name, Path(path))
    (folder / "config.yaml").write_text(dump_config(with_tokenizers(run.config, names)))
    if (run.folder / PALETTE_NAME).exists():
        run.palette.save(folder / PALETTE_NAME)


def _write_tokenizer(folder: Path, run_folder: Path) -> None:
    """Write a run folder of a tokenizer; raises UserError if there is no intact one."""
    # The opened one is not needed: this checks the files.
    open_tokenizer(run_folder)
    checkpoint = chosen_checkpoint(run_folder)
    _write_checkpoint(folder, checkpoint, read_weights(checkpoint), {})
    shutil.copyfile(run_folder / "config.yaml", folder / "config.yaml")


def _write_checkpoint(
    folder: Path, source: Path, weights: Mapping[str, Tensor], extra: Mapping[str, Tensor]
) -> None:
    """Write weights at the top level of a run folder, and a checkpoint that refers to them."""
    trained = read_manifest(source)
    partial = partial_folder(folder, trained.step)
    partial.mkdir(parents=True)
    named = {**weights, **extra}
    stored = write_tensors(folder / WEIGHTS, {k: t.contiguous() for k, t in named.items()})
    file = f"../../{WEIGHTS}"
    manifest = CheckpointManifest(
        step=trained.step,
        samples_seen=trained.samples_seen,
        optimizer_step=0,
        seed=trained.seed,
        tokenizer=trained.tokenizer,
        layout={},
        files={file: stored},
        tensors={
            f"weight/{k}": LogicalTensor.whole(t.shape, file, k) for k, t in sorted(weights.items())
        },
    )
    write_manifest(partial, manifest)
    publish(folder, trained.step)


class PlainForm:
    """The inputs of `plain_loader.py` besides the weights, from a run on one process.

    Raises UserError if `plain_loader.py` does not support this model; says why.

    Attributes:
        settings: section `plain` of `config.json`.
        tensors: tensors whose names begin with `plain.`.
        tokens: random tokens of two images, `[2, n]` or `[2, n, d]`, to compare outputs.
        expected: the final norm's output on these tokens, `[2, s, h]`.
    """

    @torch.no_grad()
    def __init__(self, run: Run) -> None:
        paper = composition_of(run)
        self._check(run, paper)
        reader, model = run.runner.layers.modules[0], run.config.model
        assert isinstance(reader, Reader)
        self.tokens = _random_tokens(paper)
        plan = paper.schedule.for_features(torch.zeros(1).long())
        asked = paper.feature_rows(self.tokens, plan)
        extra = paper.density.blank_inputs(paper.asks.shape_of(asked), self.tokens.device)
        inputs = (*asked, *paper.condition.for_features(self.tokens), *extra)
        reader.eval()
        rows, carried = _embedded(reader, inputs, fill=0.0)
        marked, _ = _embedded(reader, inputs, fill=1.0)
        changed = (marked != rows).any(-1).nonzero()[:, 0]
        order = plan.order[0] if paper.asks.permutes else torch.arange(self.tokens.shape[1])
        self.tensors = {f"{_PREFIX}rows": rows, f"{_PREFIX}order": order.clone()}
        if "coordinates" in carried:
            turns = angles(carried["coordinates"][0], model.head_size, scale=model.position_scale)
            self.tensors[f"{_PREFIX}turns"] = torch.polar(torch.ones_like(turns), turns)
        if "content_groups" in carried:
            groups = carried["content_groups"][0]
            self.tensors[f"{_PREFIX}mask"] = groups <= groups[:, None]
        self.expected = _last_norm(run.runner, inputs)
        self.settings = {
            "content": _CONTENT,
            "first": int(changed[0]),
            "layers": model.num_layers,
            "heads": model.num_attention_heads,
            "normalization": model.normalization,
            "epsilon": model.norm_epsilon,
            "activation": model.activation,
            "causal": paper.core.visibility_kind == "causal",
            "norm": norm_name(run.runner),
        }

    @staticmethod
    def _check(run: Run, paper: Model) -> None:
        paper.check_unlabelled()
        if paper.has_transform or "encoder" in paper.condition.roles:
            raise UserError("its model has an adapter or an encoder besides the blocks")
        if paper.schedule.has_random_features:
            raise UserError("its features hide tokens that are drawn")
        if paper.position_kind == "relative_2d":
            raise UserError("its attention has relative positions")
        if isinstance(paper.condition, PooledFeatures):
            raise UserError("its model reads a condition besides the tokens")
        if run.config.finetune is not None and run.config.finetune.layer is not None:
            raise UserError("its classifier is attached to an inner layer")

    @torch.no_grad()
    def check(self, folder: Path) -> float:
        """Compare the loader's output with the run's; return the difference, at most 1e-4."""
        return check_agreement(plain_features(str(folder), self.tokens), self.expected)


def composition_of(run: Run) -> Model:
    """Return the composition of a run; raise UserError if it has no Transformer."""
    paper = run.objective.backbone
    if not isinstance(paper, Model):
        raise UserError(f"a run of {run.config.objective.name} has no Transformer")
    return paper


def _last_norm(runner: Inference, inputs: tuple[Tensor, ...]) -> Tensor:
    """Return the output `[b, s, h]` of the topmost norm that provides features."""
    kept: list[Tensor] = []
    with watch_features(runner.layers.feature_layers()[-1], kept.append):
        runner.features(inputs)
    return kept[0].transpose(0, 1)


def norm_name(runner: Inference) -> str:
    """Return the name of the topmost norm that provides features."""
    layers = runner.layers
    pairs = zip(layers.plans, layers.modules, strict=True)
    plan, module = [(plan, module) for plan, module in pairs if plan.gives_features][-1]
    norm: Any = module.feature_norm
    return f"{plan.name}.{next(name for name, each in module.named_modules() if each is norm)}"


def _random_tokens(paper: Model) -> Tensor:
    """Return random tokens of two images: ids of the vocabulary, or standard normal vectors."""
    generator, blank = torch.Generator().manual_seed(0), paper.reads.blank(torch.zeros(2).long())
    blank = paper.reads.sequence(blank)
    if blank.is_floating_point():
        return torch.randn(blank.shape, generator=generator)
    assert isinstance(paper.reads, Vocabulary)
    return torch.randint(paper.reads.vocabulary_size, blank.shape, generator=generator)


def _embedded(
    reader: Reader, inputs: tuple[Tensor, ...], *, fill: float
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Return the first layer's rows `[s, h]`, with every token embedding replaced by `fill`."""

    def filled(_: Any, __: Any, output: Tensor) -> Tensor:
        return torch.full_like(output, fill)

    with reader.part("content").register_forward_hook(filled):
        state = LayerState.unpack(reader(inputs), reader.core.carried_names)
    return state.hidden[:, 0].clone(), state.carried


_WORDS = {"layer_norm": "normalization", "all": "norm_bias", "gelu": "activation"}
_ADDED = ("learned", "sincos", "learned_sincos", "none")


def as_vit(run: Run, weights: Mapping[str, Tensor]) -> TimmViT:
    """Convert a run on one process, and its unsharded parameters, to timm's parameter names.

    Raises UserError if it is not a plain ViT with a class token; names the config key.
    """
    paper = _paper(run)
    reader = run.runner.layers.modules[0]
    assert isinstance(reader, Reader)
    side = paper.paper.patch_size
    heads, norm = run.config.model.num_attention_heads, norm_name(run.runner)
    kernel = weights[f"{_CONTENT}.weight"].unflatten(1, (side, side, 3)).permute(0, 3, 1, 2)
    tensors = {
        "cls_token": _first_token(reader).detach().view(1, 1, -1),
        "pos_embed": F.pad(_positions(paper, reader), (0, 0, 1, 0))[None],
        "patch_embed.proj.weight": kernel,
        "patch_embed.proj.bias": weights[f"{_CONTENT}.bias"],
        "norm.weight": weights[f"{norm}.weight"],
        "norm.bias": weights[f"{norm}.bias"],
    }
    found = {int(m[1]) for name in weights if (m := re.match(r"blocks\.(\d+)\.mlp", name))}
    for layer in sorted(found):
        block = block_to(weights, f"blocks.{layer}.", TIMM, num_heads=heads)
        tensors |= {f"blocks.{layer}.{name}": tensor for name, tensor in block.items()}
    if classifies(run):
        for kind in ("weight", "bias"):
            name = f"{norm.rpartition('.')[0]}.classifier.linear.{kind}"
            tensors[f"head.{kind}"] = weights[name]
    whole = {name: tensor.float().contiguous() for name, tensor in tensors.items()}
    return TimmViT(whole, heads, epsilon=run.config.model.norm_epsilon)


def classifies(run: Run) -> bool:
    """Return True if the run computes class logits from the class token, like a ViT."""
    tuned = run.config.finetune
    if tuned is None or tuned.read_out != "first" or tuned.concatenate > 1:
        return False
    return not (tuned.linear_evaluation and tuned.standardize)


def _paper(run: Run) -> Model:
    """Return the composition of a run; raise UserError if it is not a ViT."""
    paper, model = composition_of(run), run.config.model
    if not isinstance(paper.reads, Patches):
        raise UserError("a ViT reads patches of pixels, which this run does not")
    for wanted, key in _WORDS.items():
        if getattr(model, key) != wanted:
            raise UserError(f"a ViT has model.{key} {wanted}, not {getattr(model, key)}")
    if not (model.add_bias and model.has_biased_attention):
        raise UserError("a ViT has biases; model.add_bias or attention_bias is false")
    if paper.position_kind not in _ADDED:
        raise UserError(f"a ViT adds its positions; model.positions is {paper.position_kind}")
    if paper.has_transform or "encoder" in paper.condition.roles:
        raise UserError("a ViT has neither an adapter nor an encoder")
    sees_all = paper.core.visibility_kind in ("full", "context")
    if run.config.finetune is not None and not sees_all:
        raise UserError("a ViT has full attention; finetune.visibility is not full")
    return paper


def _first_token(reader: Reader) -> Tensor:
    """Return the learned token before the patches, `[h]`; raise UserError if there is none."""
    parts = [part for role in ("start", "front") if (part := reader.part(role)) is not None]
    width = reader.core.model.hidden_size
    if len(parts) != 1 or not isinstance(parts[0], nn.Parameter) or parts[0].numel() != width:
        raise UserError("a ViT has one learned token before the patches; this run does not")
    return parts[0].view(-1)


@torch.no_grad()
def _positions(paper: Model, reader: Reader) -> Tensor:
    """Return the position embedding of each patch, `[n, h]`."""
    count, width = paper.reads.num_tokens, reader.core.model.hidden_size
    return reader.add_positions(
        torch.zeros(1, count, width), torch.arange(count)[None], "positions"
    )[0]


@torch.no_grad()
def compared_vit(run: Run, vit: TimmViT) -> tuple[Tensor, Tensor]:
    """Return both networks' features of random images, `[2, b, h]`.

    They are the first token and the mean over all tokens of the final norm's output.
    """
    images = random_images(run.config.data.image_size)
    tokens = (full_attention_tokens(run, images), timm_features(vit, images))
    ours, theirs = (torch.stack([each[:, 0], each.mean(1)]) for each in tokens)
    return ours, theirs


@torch.no_grad()
def full_attention_tokens(run: Run, images: Tensor) -> Tensor:
    """Return the final norm's output `[b, s, h]` on images uint8 `[b, H, W, 3]`, full attention."""
    paper, runner = run.objective.backbone, run.runner
    assert isinstance(paper, Model)
    if run.config.finetune is None:
        paper = paper.with_full_attention()
        plans = paper.layer_plans()
        layers = LocalLayers(plans, list(LayerStack(plans, paper.loss).layers))
        assert run.checkpoint is not None
        load_weights(run.checkpoint, layers, run.context)
        runner = Inference(layers, run.context)
    batch = Batch(images, torch.full((len(images),), -1), torch.arange(len(images)))
    return _last_norm(runner, paper.feature_inputs(batch))


def timm_settings(vit: TimmViT) -> dict[str, Any]:
    """Return the `config.json` for `timm.create_model("local-dir:DIR")`.

    Raises UserError if the norms' epsilon is not that of timm's ViTs.
    """
    if vit.epsilon != EPSILON:
        raise UserError(f"timm's ViTs have model.norm_epsilon {EPSILON}, not {vit.epsilon}")
    size = [3, vit.image_size, vit.image_size]
    return {
        "architecture": "vit_base_patch16_224",
        "num_classes": vit.num_classes,
        "num_features": vit.hidden_size,
        "global_pool": "token",
        "model_args": {
            "img_size": vit.image_size,
            "patch_size": vit.patch_size,
            "embed_dim": vit.hidden_size,
            "depth": vit.num_layers,
            "num_heads": vit.num_heads,
            "mlp_ratio": vit.mlp_size / vit.hidden_size,
        },
        "pretrained_cfg": {
            "num_classes": vit.num_classes,
            "input_size": size,
            "fixed_input_size": True,
            "interpolation": "bicubic",
            "crop_pct": 1.0,
            "mean": list(vit.mean),
            "std": list(vit.deviation),
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        },
    }
