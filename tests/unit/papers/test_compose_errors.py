"""Errors of invalid compositions."""

import pytest
from compositions import (
    ADAPTER,
    BOTH,
    BRIDGE,
    CATEGORICAL,
    CLASSES,
    CONTENT,
    CONTEXT,
    ERROR,
    FEATURES,
    FRAMES,
    GROUPS,
    IDS,
    ITSELF,
    LATENTS,
    MASK,
    MEMORY,
    MIXTURE,
    ONE_BY_ONE,
    PALETTE,
    PATCHES,
    PLACE,
    QUERY,
    RANDOM,
    SHIFT,
    SPEECH,
)
from small_batches import batch_of, photographs

from megavis.config.errors import UserError


@pytest.mark.parametrize(
    ("words", "more", "key", "message"),
    [
        ([PATCHES, ONE_BY_ONE, MASK, ERROR], [], "asks.kind", "mask needs schedule masked or"),
        ([PATCHES, GROUPS, SHIFT, ERROR], [], "asks.kind", "shift needs schedule one_by_one"),
        (
            [PATCHES, RANDOM, SHIFT, ERROR],
            [],
            "asks.place",
            "asked does not encode the position of the held",
        ),
        (
            [PATCHES, RANDOM, CONTENT, ERROR],
            [],
            "asks.place",
            "content does not encode the position of the next",
        ),
        ([PALETTE, ONE_BY_ONE, SHIFT, ERROR], [], "density.kind", "squared_error cannot predict"),
        ([PATCHES, ONE_BY_ONE, SHIFT, CATEGORICAL], [], "density.kind", "cannot predict patches"),
        (
            [PATCHES, f"predicts: {IDS.replace('4', '8')}", ONE_BY_ONE, SHIFT, CATEGORICAL],
            [],
            "predicts",
            "has 2 × 2 tokens per image, but objective.reads has 4 × 4",
        ),
        (
            [PATCHES, f"predicts: {IDS.replace(', tokenizer: run', '')}", ONE_BY_ONE]
            + [SHIFT, CATEGORICAL],
            [],
            "predicts.tokenizer",
            "must name the run folder",
        ),
        (
            [PALETTE, f"predicts: {IDS.replace('4', '1')}", ONE_BY_ONE, SHIFT, CATEGORICAL],
            [],
            "reads.kind",
            "palette shards contain no images",
        ),
        (
            [PATCHES, "schedule: {kind: one_by_one, prefix: 4}", SHIFT, ERROR],
            [],
            "schedule.prefix",
            "needs asks of kind shift with place content",
        ),
        (
            [PATCHES, "schedule: {kind: one_by_one, prefix: 16}", CONTENT, ERROR],
            [],
            "schedule.prefix",
            "16 of 16 tokens leaves none to predict",
        ),
        (
            [PATCHES, "schedule: {kind: one_by_one, prefix: drawn}", SHIFT, ERROR],
            [],
            "schedule.prefix",
            "needs asks of kind shift with place content",
        ),
        (
            [PATCHES.replace("4", "16"), "schedule: {kind: one_by_one, prefix: drawn}"]
            + [CONTENT, ERROR],
            [],
            "schedule.prefix",
            "a drawn prefix needs at least two tokens, and images have one",
        ),
        (
            [PATCHES, ONE_BY_ONE, "asks: {kind: shift, start: false}", ERROR],
            [],
            "asks.start",
            "false leaves no row to predict the first token, which must then be given; set it"
            " to true, or objective.schedule.prefix to 1 and objective.asks.place to content",
        ),
        (
            [PATCHES, RANDOM, "asks: {kind: shift, place: both, start: false}", ERROR],
            [],
            "asks.start",
            "which must then be given; set it to true",
        ),
        (
            [PATCHES, "schedule: {kind: one_by_one, prefix: 1}"]
            + ["asks: {kind: shift, place: content, start: false}", ERROR, CLASSES],
            [],
            "condition.kind",
            "labels stands in place of the start token, which asks.start false leaves out; set"
            " objective.condition to null, or objective.asks.start to true",
        ),
        (
            [PATCHES, "schedule: {kind: one_by_one, order: round_robin, order_block: 3}"]
            + [SHIFT, ERROR],
            [],
            "schedule.order_block",
            "3 does not divide a grid of 4 × 4",
        ),
        (
            [PATCHES, ONE_BY_ONE, SHIFT, "density: {kind: squared_error, decoder_width: 8}"],
            [],
            "density.decoder_width",
            "8 is the width of an mlp decoder, not of a linear one; set it to null, or"
            " objective.density.decoder to mlp",
        ),
        (
            [PATCHES, ONE_BY_ONE, SHIFT]
            + ["density: {kind: squared_error, decoder_positions: true}"],
            [],
            "density.decoder_positions",
            "true adds positions before an mlp decoder, not before a linear one",
        ),
        (
            [PATCHES, ONE_BY_ONE, SHIFT]
            + [
                "density: {kind: squared_error, decoder: mlp, decoder_positions: true,"
                " decoder_width: 6}"
            ],
            [],
            "density.decoder_positions",
            "the width 6 of the decoder is not divisible by 4; set it to false",
        ),
        (
            [PATCHES, "schedule: {kind: groups, num_groups: 16}", QUERY, ERROR],
            [],
            "schedule.num_groups",
            "16 groups cannot be cut from 16 tokens with random length; use at most 15",
        ),
        (
            [PALETTE, "schedule: {kind: rounds}", "asks: {kind: mask, filler: zero_token}"]
            + [CATEGORICAL],
            [],
            "asks.filler",
            "zero_token does not exist for colors",
        ),
        (
            [PATCHES, "schedule: {kind: rounds}", MASK, MIXTURE],
            ["model.positions=none"],
            "",
            "none makes all tokens that mask asks for indistinguishable",
        ),
        (
            [PATCHES, ONE_BY_ONE, ITSELF, PLACE],
            [],
            "asks.kind",
            "in_context needs schedule context",
        ),
        (
            [PATCHES, CONTEXT, ITSELF, ERROR],
            [],
            "density.kind",
            "cannot be combined with asks in_context",
        ),
        (
            [PATCHES, ONE_BY_ONE, SHIFT, PLACE],
            [],
            "density.kind",
            "cannot be combined with asks shift",
        ),
        (
            [PALETTE, CONTEXT, ITSELF, PLACE],
            [],
            "reads.kind",
            "positions of colors cannot be predicted",
        ),
        (
            [PATCHES, f"predicts: {IDS}", CONTEXT, ITSELF, PLACE],
            [],
            "predicts.kind",
            "is not used with asks in_context, which predicts places; set objective.predicts to",
        ),
        (
            [PATCHES, CONTEXT, "asks: {kind: in_context, given_ratio: 0.5}", PLACE],
            ["model.positions=sincos"],
            "asks.given_ratio",
            "leaves no context token without its position; lower it below 0.46875, or set it to 0",
        ),
        (
            [PATCHES, CONTEXT, ITSELF, PLACE],
            ["model.positions=learned"],
            "",
            "learned reveals what the model has to predict",
        ),
        ([PATCHES, CONTEXT, ITSELF, PLACE, FEATURES], [], "condition.kind", "reveal the position"),
        (
            [PATCHES, ONE_BY_ONE, SHIFT, "density: {kind: diffusion, decoder_width: 8}"],
            [],
            "density.decoder_width",
            "8 is the width of an mlp or modulated_mlp decoder, not of a transformer one",
        ),
        (
            [PATCHES, ONE_BY_ONE, SHIFT]
            + ["density: {kind: diffusion, decoder: modulated_mlp, condition_on_gamma: true}"],
            [],
            "density.condition_on_gamma",
            "true appends γ to the noisy token, and a modulated_mlp has it already; set it",
        ),
        (
            [PATCHES, ONE_BY_ONE, SHIFT, "density: {kind: diffusion, learns_variance: true}"],
            [],
            "density.learns_variance",
            "true needs steps of a cosine schedule; set it to false, or objective.density.noise to",
        ),
        (
            [PATCHES, ONE_BY_ONE, SHIFT]
            + ["density: {kind: diffusion, noise: cosine, noise_steps: 50}"],
            [],
            "density.sampling_steps",
            "1000 is more than objective.density.noise_steps 50; set it to 50",
        ),
        ([PATCHES, ONE_BY_ONE, BRIDGE, ERROR], [], "asks.kind", "visible needs schedule contex"),
        (
            [PATCHES, "schedule: {kind: masked, shape: blocks}", MASK, ERROR],
            [],
            "schedule.shape",
            "blocks needs the same number of hidden tokens in every image; set"
            " objective.schedule.count to exact",
        ),
        (
            [PATCHES, CONTEXT.replace("0.5", "0"), BRIDGE, ERROR],
            [],
            "schedule.mask_ratio",
            "0.0 of 16 tokens hides none; set it to 0.063",
        ),
        (
            [PATCHES, CONTEXT, BRIDGE.replace("8", "6"), ERROR],
            [],
            "asks.decoder.hidden_size",
            "6 is not divisible by 4",
        ),
        ([PATCHES, CONTEXT, BRIDGE, ERROR], ["model.positions=rope_2d"], "", "not reach the decod"),
        (
            [FRAMES, CONTEXT, ITSELF, PLACE],
            [],
            "reads.kind",
            "give data.frames in place of data.image_size, or set it to patches",
        ),
        (
            [PATCHES, CONTEXT, ITSELF, PLACE],
            SPEECH,
            "reads.kind",
            "data.frames describes; set it to frames",
        ),
        (
            [FRAMES, "schedule: {kind: one_by_one, order: nested_raster}", SHIFT, ERROR],
            SPEECH,
            "schedule.order",
            "nested_raster needs a square grid",
        ),
        (
            [FRAMES, f"predicts: {IDS}", ONE_BY_ONE, SHIFT, CATEGORICAL],
            SPEECH,
            "predicts.kind",
            "frames can be predicted only from frames",
        ),
        (
            [PATCHES, ONE_BY_ONE, SHIFT, ERROR, FEATURES],
            [],
            "condition.kind",
            "asks shift has no such row; set objective.condition to null, or objective.asks",
        ),
        ([LATENTS, ONE_BY_ONE, QUERY, ERROR, FEATURES], [], "reads.kind", "latents shards lack"),
        (
            [PATCHES, ONE_BY_ONE, QUERY, ERROR, FEATURES, MEMORY],
            [],
            "condition.kind",
            "pooled_features and objective.memory each need the image that the model is given; set"
            " objective.condition to null, or objective.memory to null",
        ),
        (
            [PATCHES, GROUPS, "asks: {kind: query, start: false}", ERROR, FEATURES],
            ["parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"],
            "",
            "33 rows, 16 of them queries, are not divisible by tensor_model_parallel_size 2",
        ),
        ([PATCHES, ONE_BY_ONE, SHIFT, MIXTURE, ADAPTER], [], "transform", "needs latents"),
        ([LATENTS, ONE_BY_ONE, SHIFT, ERROR, ADAPTER], [], "transform", "a density of Gaussians"),
        ([LATENTS, RANDOM, BOTH, MIXTURE, ADAPTER], [], "transform", "in raster order"),
        (
            [LATENTS.replace("channels: 4", "channels: 3"), ONE_BY_ONE, SHIFT, MIXTURE, ADAPTER],
            [],
            "transform.blocks",
            "3 channels are odd",
        ),
        (
            [LATENTS, ONE_BY_ONE, SHIFT, MIXTURE, ADAPTER.replace("2}", "2, bottleneck: 2}")],
            [],
            "transform.bottleneck",
            "must be divisible by 2",
        ),
        (
            [PALETTE, ONE_BY_ONE, SHIFT, CATEGORICAL, MEMORY],
            [],
            "reads.kind",
            "colors shards lack",
        ),
        ([FRAMES, ONE_BY_ONE, SHIFT, ERROR, MEMORY], SPEECH, "reads.kind", "frames shards lack"),
        (
            [PATCHES, ONE_BY_ONE, SHIFT, ERROR, MEMORY.replace("8", "5")],
            [],
            "memory.patch_size",
            "5 does not divide data.image_size 16",
        ),
        (
            [PATCHES, ONE_BY_ONE, SHIFT, ERROR, MEMORY.replace("}", ", hidden_size: 31}")],
            [],
            "memory.num_attention_heads",
            "width 31 is not divisible by 2 heads",
        ),
        (
            [PATCHES, ONE_BY_ONE, SHIFT, ERROR, MEMORY.replace("8", "16")],
            [
                "parallel.tensor_model_parallel_size=2",
                "parallel.sequence_parallel=true",
            ],
            "",
            "1 patches of the encoder are not divisible",
        ),
        ([PATCHES, CONTEXT, BRIDGE, ERROR, MEMORY], [], "memory", "decoder of asks visible"),
        ([PATCHES, CONTEXT, ITSELF, PLACE, MEMORY], [], "memory", "asks is in_context"),
        ([PATCHES.replace("4", "5"), ONE_BY_ONE, SHIFT, ERROR], [], "reads.patch_size", "5 does"),
        ([PATCHES, RANDOM, BOTH, ERROR], ["model.positions=rope_2d"], "", "cannot add two places"),
        (
            [PALETTE.replace("32", "33"), ONE_BY_ONE, SHIFT, CATEGORICAL],
            ["parallel.tensor_model_parallel_size=2"],
            "reads.vocabulary_size",
            "33 is not divisible by tensor_model_parallel_size 2",
        ),
        (
            [PATCHES, ONE_BY_ONE, SHIFT, "density: {kind: gaussian_mixtur}"],
            [],
            "density.kind",
            "gaussian_mixture'",
        ),
        ([PATCHES, ONE_BY_ONE, SHIFT, "density: {}"], [], "density.kind", "is missing"),
        (
            [PATCHES, ONE_BY_ONE, SHIFT, "density: {kind: gaussian_mixture, componets: 3}"],
            [],
            "density.componets",
            "did you mean 'num_components'",
        ),
    ],
)
def test_invalid_combinations(build_composition, words, more, key, message):
    with pytest.raises(UserError, match=rf"{'objective.' if key else ''}{key}.*: ") as raised:
        build_composition(*words, more=more)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


SPLIT = ("parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true")
TUNED = ("finetune={num_classes: 3}", "data.validation=held", "training.validate_every=1")
FIXED = "schedule: {{kind: groups, num_groups: {}, length: fixed}}".format


@pytest.mark.parametrize(
    ("words", "more", "is_legal"),
    [
        ([FIXED(5), QUERY], (), True),
        ([FIXED(4), QUERY], (), False),
        ([FIXED(2), QUERY, CLASSES], (), False),
        ([GROUPS, QUERY, CLASSES], (), True),
        ([ONE_BY_ONE, QUERY], (), True),
        ([ONE_BY_ONE, QUERY], TUNED, False),
        ([ONE_BY_ONE, QUERY, CLASSES], TUNED, True),
        ([ONE_BY_ONE, CONTENT], (), True),
        ([ONE_BY_ONE, CONTENT], TUNED, False),
        ([ONE_BY_ONE, SHIFT], TUNED, True),
    ],
)
def test_sequence_parallelism_needs_even_rows(build_composition, words, more, is_legal):
    """On two processes: in the blocks and at the head, as counted in a forward pass."""
    objective, inference = build_composition(PATCHES, *words, ERROR, more=more)
    state, counts = objective.sequence(batch_of(photographs(2, 16))).inputs, set()
    for layer in inference.layers.modules[:-1]:
        state = layer(state)
        counts.add(len(state[0] if isinstance(state, tuple) else state))
    assert is_legal == all(count % 2 == 0 for count in counts)
    if is_legal:
        build_composition(PATCHES, *words, ERROR, more=(*more, *SPLIT))
        return
    with pytest.raises(UserError, match="not divisible by tensor_model_parallel_size 2"):
        build_composition(PATCHES, *words, ERROR, more=(*more, *SPLIT))
