"""Export any run as a folder that `megavis.load` opens, and if possible a page of plain PyTorch.

Such a folder is a run folder with one file of weights at its top level, as on the Hub. What the
first layer adds (positions, a start or class token, "no class") and the attention mask are stored
as tensors with the weights, so that `plain_loader.py` needs no code specific to a paper.

Legend: b images, s rows, n tokens, h hidden size.
"""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megavis.checkpoint.format.folder import chosen_checkpoint, partial_folder, publish
from megavis.checkpoint.format.manifest import (
    CheckpointManifest,
    LogicalTensor,
    read_manifest,
    write_manifest,
)
from megavis.checkpoint.format.tensor_reader import read_weights
from megavis.checkpoint.state.save import write_tensors
from megavis.composition.condition import PooledFeatures
from megavis.composition.model import Model
from megavis.composition.reader import Reader
from megavis.composition.tokens import Vocabulary
from megavis.config.errors import UserError
from megavis.config.load import dump_config, exported_names, with_tokenizers
from megavis.data.format.manifest import PALETTE_NAME
from megavis.grammar import words
from megavis.model.inference import Inference
from megavis.model.layer_state import LayerState
from megavis.model.positions import turns
from megavis.notebook import Run
from megavis.tokenizers.network_tokenizer import open_tokenizer
from megavis.weights import plain_loader
from megavis.weights.released import WEIGHTS

TOLERANCE = 1e-4
_PREFIX = "plain."
_CONTENT = "embedding.content"


def write_run_folder(
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
        # The opened tokenizer is not needed: this checks its files.
        open_tokenizer(Path(path))
        checkpoint = chosen_checkpoint(Path(path))
        _write_checkpoint(folder / name, checkpoint, read_weights(checkpoint), {})
        shutil.copyfile(Path(path) / "config.yaml", folder / name / "config.yaml")
    (folder / "config.yaml").write_text(dump_config(with_tokenizers(run.config, names)))
    if (run.folder / PALETTE_NAME).exists():
        run.palette.save(folder / PALETTE_NAME)


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
        classes=trained.classes,
        words=trained.words,
        origin=trained.origin,
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
        model = composition_of(run)
        self._check(run, model)
        self._check_rows(model)
        reader, sizes = run.inference.layers.modules[0], run.config.model
        assert isinstance(reader, Reader)
        self.tokens = _random_tokens(model)
        arrangement = model.schedule.for_features(torch.zeros(1).long())
        known = model.condition.for_features(self.tokens)
        inputs = model.inputs_from_tokens(self.tokens, known)
        reader.eval()
        rows, carried = _embedded(reader, inputs, fill=0.0)
        marked, _ = _embedded(reader, inputs, fill=1.0)
        # Rows that do not depend on the content belong to start and class tokens, and precede all
        # others.
        changed = (marked != rows).any(-1).nonzero()[:, 0]
        # None at all where each row asks with the token before it, and there is one token.
        first = int(changed[0]) if len(changed) else len(rows)
        if len(changed) != len(rows) - first:
            raise UserError("rows that ask for a place stand between its tokens")
        order = arrangement.order[0] if model.asks.permutes else torch.arange(self.tokens.shape[1])
        self.tensors = {f"{_PREFIX}rows": rows, f"{_PREFIX}order": order.clone()}
        if "coordinates" in carried:
            by = turns(carried["coordinates"], sizes.head_size, scale=sizes.position_scale)
            self.tensors[f"{_PREFIX}turns"] = torch.complex(*by)[0, 0]
        if "content_groups" in carried:
            groups = carried["content_groups"][0]
            self.tensors[f"{_PREFIX}mask"] = groups <= groups[:, None]
        self.expected = run.inference.last_features(inputs)
        self.settings = {
            "content": _CONTENT,
            "first": first,
            "layers": sizes.num_layers,
            "heads": sizes.num_attention_heads,
            "normalization": sizes.normalization,
            "epsilon": sizes.norm_epsilon,
            "activation": sizes.activation,
            "causal": model.core.visibility_kind == "causal",
            "norm": norm_name(run.inference),
        }

    @staticmethod
    def _check(run: Run, model: Model) -> None:
        model.check_unlabelled()
        if model.has_transform or "encoder" in model.condition.roles:
            raise UserError("its model has an adapter or an encoder besides the blocks")
        if model.grammar.is_modulated:
            raise UserError("its norms are modulated by the class")
        if model.core.model.qk_norm:
            raise UserError("its attention normalises queries and keys")
        if model.schedule.has_random_features:
            raise UserError("its features hide tokens that are drawn")
        if model.grammar.positions == "relative_2d":
            raise UserError("its attention has relative positions")
        tuned = run.config.finetune
        if tuned is not None and tuned.task != "classes":
            raise UserError(f"its head finds {tuned.task} from the features of several blocks")
        if tuned is not None and tuned.layer is not None:
            raise UserError("its classifier is attached to an inner layer")

    @staticmethod
    def _check_rows(model: Model) -> None:
        asks = model.grammar.asks
        if asks.norm:
            raise UserError("its rows are normalised before the first block")
        if isinstance(asks, words.Mask) and asks.marks:
            raise UserError("its rows hold half of a token's embedding, and a mark")
        if isinstance(model.condition, PooledFeatures):
            raise UserError("its model reads a condition besides the tokens")

    @torch.no_grad()
    def check(self, folder: Path) -> float:
        """Compare the loader's output with the run's; return the difference.

        Raises:
            UserError: it is above 1e-4.
        """
        found = plain_loader.features(str(folder), self.tokens)
        difference = float((found - self.expected).abs().max())
        if not difference <= TOLERANCE:
            raise UserError(
                f"the loader of the model card differs by {difference:.1e} from the run on random"
                f" inputs, more than {TOLERANCE:.0e}; the result was discarded"
            )
        return difference


def loader_source() -> str:
    """Return the source of `plain_loader.py` without its module docstring."""
    return inspect.getsource(plain_loader).split('"""\n', 1)[1].strip()


def composition_of(run: Run) -> Model:
    """Return the composition of a run; raise UserError if it has no Transformer."""
    paper = run.objective.backbone
    if not isinstance(paper, Model):
        raise UserError(f"a run of {run.config.objective.name} has no Transformer")
    return paper


def norm_name(inference: Inference) -> str:
    """Return the name of the topmost norm that provides features."""
    layers = inference.layers
    pairs = zip(layers.plans, layers.modules, strict=True)
    plan, module = [(plan, module) for plan, module in pairs if plan.gives_features][-1]
    norm: Any = module.feature_norm
    return f"{plan.name}.{next(name for name, each in module.named_modules() if each is norm)}"


def _random_tokens(model: Model) -> Tensor:
    """Return random tokens of two images: ids of the vocabulary, or standard normal vectors."""
    generator, blank = torch.Generator().manual_seed(0), model.reads.blank(torch.zeros(2).long())
    blank = model.reads.sequence(blank)
    if blank.is_floating_point():
        return torch.randn(blank.shape, generator=generator)
    assert isinstance(model.reads, Vocabulary)
    return torch.randint(model.reads.vocabulary_size, blank.shape, generator=generator)


def _embedded(
    reader: Reader, inputs: tuple[Tensor, ...], *, fill: float
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Return the first layer's rows `[s, h]`, with every token embedding replaced by `fill`."""

    def filled(_: Any, __: Any, output: Tensor) -> Tensor:
        return torch.full_like(output, fill)

    with reader.part("content").register_forward_hook(filled):
        state = LayerState.unpack(reader(inputs), reader.core.carried_names)
    return state.hidden[:, 0].clone(), state.carried
