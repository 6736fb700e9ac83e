"""Attention within windows: folding by hand, and all blocks against ViTDet's in `transformers`."""

import pytest
import torch
from small_batches import photographs
from tiny import VIT, tiny

from megavis.model.attention import split_heads
from megavis.model.layer_state import LayerState
from megavis.model.positions import resize_table
from megavis.model.windows import QueryPositions, Windows
from megavis.tokenizers.patches import standardize
from megavis.training.optimizer import decays

pytestmark = pytest.mark.once

HEADS, DEPTH, PATCH, WINDOW, SIDE = 2, 4, 4, 4, 32
PAPERS = {
    "mae": "{name: mae, patch_size: 4}",
    "mp3": "{name: mp3, patch_size: 4, mask_ratio: 0.5}",
    "gvp": "{name: gvp, patch_size: 4, num_groups: 3, num_condition_tokens: 2}",
    "darl": "{name: darl, patch_size: 4, order: nested_raster, order_block: 2}",
    "aim": "{name: aim, patch_size: 4}",
}


def config(name="mae", positions="learned", **keys):
    finetune = {
        "task": "instances", "num_classes": 3, "head_width": 8, "visibility": "full",
        "window": WINDOW, "global_blocks": [2, 4], "relative_positions": True, **keys,
    }  # fmt: skip
    return tiny(
        PAPERS[name],
        model={**VIT, "num_layers": DEPTH, "num_attention_heads": HEADS, "positions": positions},
        data={"image_size": SIDE, "crop": "jittered", "validation": "held"},
        training={"validate_every": 1},
        finetune=finetune,
    )


def test_relative_positions_have_weight_decay_and_absolute_ones_none(build_paper):
    _, inference = build_paper(config())
    tables = {name: one for name, one in inference.layers.named_parameters() if "position" in name}
    relative = [one for name, one in tables.items() if "query_positions" in name]
    absolute = [one for name, one in tables.items() if "query_positions" not in name]
    assert len(relative) == 2 * DEPTH
    assert all(map(decays, relative))
    assert len(absolute) == 1
    assert not decays(absolute[0])


def test_windows_are_cut_where_a_loop_cuts_them():
    windows = Windows((4, 6), 2)
    cells = torch.arange(4 * 6 * 3).view(24, 3, 1)
    folded = windows.fold(cells)
    assert folded.shape == (4, 3 * 6, 1)
    for image in range(3):
        for number, (top, left) in enumerate((y, x) for y in (0, 2) for x in (0, 2, 4)):
            expected = [cells[(top + y) * 6 + left + x, image] for y in (0, 1) for x in (0, 1)]
            assert torch.equal(folded[:, image * 6 + number], torch.stack(expected))
    assert torch.equal(windows.unfold(folded), cells)


def test_windows_have_coordinates_and_samples_of_their_image():
    carried = {
        "coordinates": torch.arange(8).view(1, 4, 2),
        "samples": torch.tensor([7, 9]),
    }
    folded = Windows((2, 2), 1).fold_state(LayerState(torch.zeros(4, 2, 3), carried))
    assert folded.carried["samples"].tolist() == [7, 7, 7, 7, 9, 9, 9, 9]
    assert folded.carried["coordinates"][:, 0].tolist() == 2 * [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_queries_are_asked_about_rows_and_columns():
    positions = QueryPositions((2, 3), 4)
    for parameter in positions.parameters():
        torch.nn.init.normal_(parameter)
    query = torch.randn(2, 1, 6, 4)
    bias = positions(query)
    for asks in range(6):
        for key in range(6):
            row, column = asks // 3 - key // 3 + 1, asks % 3 - key % 3 + 2
            vector = positions.rows[row] + positions.columns[column]
            torch.testing.assert_close(bias[:, :, asks, key], query[:, :, asks] @ vector)


def reference(state, grid):
    """Return ViTDet's backbone of `transformers` with the weights of a model."""
    from transformers import VitDetBackbone, VitDetConfig

    width = state["embedding.positions.weight"].shape[1]
    network = VitDetBackbone(
        VitDetConfig(
            hidden_size=width, num_hidden_layers=DEPTH, num_attention_heads=HEADS,
            image_size=SIDE, pretrain_image_size=grid * PATCH, patch_size=PATCH,
            window_block_indices=[0, 2], window_size=WINDOW, layer_norm_eps=1e-6,
            use_relative_position_embeddings=True,
        )
    )  # fmt: skip
    copied = {
        "embeddings.projection.weight": state["embedding.content.weight"]
        .view(width, PATCH, PATCH, 3)
        .permute(0, 3, 1, 2),
        "embeddings.projection.bias": state["embedding.content.bias"],
    }
    names = {
        "input_layernorm": "norm1", "pre_mlp_layernorm": "norm2", "mlp.linear_fc1": "mlp.fc1",
        "mlp.linear_fc2": "mlp.fc2", "self_attention.linear_proj": "attention.proj",
    }  # fmt: skip
    for block in range(DEPTH):
        own, other = f"blocks.{block}", f"encoder.layer.{block}"
        for kind in ("weight", "bias"):
            for name, theirs in names.items():
                copied[f"{other}.{theirs}.{kind}"] = state[f"{own}.{name}.{kind}"]
            joined = state[f"{own}.self_attention.linear_qkv.{kind}"]
            copied[f"{other}.attention.qkv.{kind}"] = torch.cat(split_heads(joined, HEADS))
        for axis, theirs in (("rows", "rel_pos_h"), ("columns", "rel_pos_w")):
            table = state[f"{own}.self_attention.query_positions.{axis}"]
            copied[f"{other}.attention.{theirs}"] = table
    missing = network.load_state_dict(copied, strict=False)
    assert missing.missing_keys == ["embeddings.position_embeddings"]
    return network.eval()


def test_blocks_equal_vitdet(build_paper):
    """With positions that were learned on a smaller grid."""
    objective, inference = build_paper(config(), std=0.3)
    state = dict(inference.layers.named_parameters())
    small = torch.randn(16, 16)
    network = reference(state, 4)
    with torch.no_grad():
        state["embedding.positions.weight"].copy_(resize_table(small, 64))
        network.embeddings.position_embeddings[0, 1:] = small
        images = photographs(2, SIDE)
        expected = network(standardize(images).permute(0, 3, 1, 2)).feature_maps[-1]
        packed = objective.inputs_from(images)
        for layer in inference.layers.modules[:-1]:
            packed = layer(packed)
    hidden = LayerState.unpack(packed, objective.backbone.core.carried_names).hidden
    found = hidden.permute(1, 2, 0).unflatten(2, (8, 8))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", list(PAPERS))
def test_windows_equal_a_mask(name, build_paper, monkeypatch):
    """Of every paper: patches of other windows are hidden by a mask, with every kind of place."""
    kind = {"darl": "rope_2d", "mp3": "relative_2d"}.get(name, "sincos")
    keys = {"global_blocks": [1, 4], "relative_positions": False}
    objective, inference = build_paper(config(name, kind, **keys), std=0.3)
    whole, other = build_paper(
        config(name, kind, window=None, global_blocks=None, relative_positions=False), std=0.3
    )
    side = torch.arange(8) // WINDOW
    window = (side[:, None] * 2 + side).flatten()
    hides = torch.zeros(64, 64).masked_fill(window[:, None] != window, -1e9)
    for block in (2, 3):
        other.layers.modules[block].self_attention.query_positions = lambda query: hides
    images = photographs(2, SIDE)
    streams = []
    with torch.no_grad():
        for model, layers in ((objective, inference), (whole, other)):
            packed = model.inputs_from(images)
            for layer in layers.layers.modules[:-1]:
                packed = layer(packed)
            names = model.backbone.core.carried_names
            streams.append(LayerState.unpack(packed, names).hidden)
    assert streams[0].shape == (64, 2, 16)
    torch.testing.assert_close(*streams, rtol=1e-4, atol=1e-5)
