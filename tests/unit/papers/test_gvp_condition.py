"""GVP conditioned on a tokenizer's features, and GVP with one stream."""

import pytest
import torch
from small_batches import batch_of, photographs
from small_vqgan import write_untrained_run

from megavis.composition.model import generator_of
from megavis.config.errors import UserError
from megavis.model.layer_state import LayerState
from megavis.tokenizers.network_tokenizer import open_tokenizer

ONE_STREAM = ["objective.streams=one", "objective.segmentation=fixed", "objective.num_groups=9"]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    return write_untrained_run(tmp_path_factory.mktemp("vqgan"))


@pytest.fixture
def with_features(build_gvp, run_folder):
    words = ["data.image_size=16", f"objective.tokenizer={run_folder}"]
    return lambda size=4, *more: build_gvp(*words, f"objective.condition_size={size}", *more)


def test_pooled_features_replace_the_class_token(with_features, run_folder):
    objective, inference = with_features()
    embedding, batch = inference.layers.modules[0], batch_of(photographs(2, 16))
    network = open_tokenizer(run_folder).network
    pixels = batch.inputs.permute(0, 3, 1, 2).float() / 255.0
    pooled = network.vectors(pixels).mean((2, 3))
    linear = embedding.front
    wanted = pooled @ linear.weight.t() + linear.bias
    for inputs in (objective.sequence(batch).inputs, objective.feature_inputs(batch)):
        stream = LayerState.unpack(embedding(inputs), objective.carried_names)
        torch.testing.assert_close(stream.hidden[0], wanted)
        assert (stream.carried["content_groups"][:, 0] == 0).all(), "visible to all groups"
    assert objective.tokenizer_identity == open_tokenizer(run_folder).identity()


def test_feature_size_is_checked(with_features):
    objective, _ = with_features(5)
    with pytest.raises(UserError, match="features of 4 channels; objective.condition_size is 5"):
        objective.sequence(batch_of(photographs(2, 16)))


def test_one_stream_predicts_the_next_patch(build_gvp):
    """The prediction of patch t + 1 depends on patches up to t and no later one."""
    objective, inference = build_gvp(*ONE_STREAM, "objective.num_condition_tokens=2")
    batch = batch_of(photographs(1, 12))
    sequence = objective.sequence(batch)
    content, *rest = sequence.inputs
    order = objective.schedule.draw(batch.sample_index).order
    patches = objective.tokens_of(batch.inputs)[0, order[0]]
    torch.testing.assert_close(sequence.targets[0][0], patches)
    torch.testing.assert_close(content[0], patches[:-1])
    outputs = objective.outputs(inference.predictions(sequence.inputs))
    assert outputs.shape == (1, 9, 48)
    loss = objective.loss(inference.predictions(sequence.inputs), sequence.targets)
    torch.testing.assert_close(loss, (outputs[0] - patches).square().mean())
    for place in range(8):
        other = content.clone()
        other[0, place] += 1.0
        moved = objective.outputs(inference.predictions((other, *rest))) != outputs
        assert moved.any(-1)[0].tolist() == [t > place for t in range(9)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["objective.streams=one"], "objective.segmentation: must be fixed with num_groups 9"),
        (
            [*ONE_STREAM, "objective.num_condition_tokens=0"],
            "needs a row before the first token, to predict it; set it to 1 or more",
        ),
        (
            ["objective.patch_size=12"],
            "use smaller tokens, or set it to 1 and objective.segmentation to fixed",
        ),
        (["objective.condition_size=4"], "objective.tokenizer: must name the run folder"),
        (
            ["objective.condition_size=4", "objective.num_condition_tokens=2"],
            "must be 1 with condition_size",
        ),
    ],
)
def test_incompatible_keys(build_gvp, words, message):
    with pytest.raises(UserError, match=message):
        build_gvp(*words)


def test_fine_tuning_splits_content_alone(build_gvp):
    """All nine patches and the condition tokens are split over two processes, and no queries."""
    tuned = ["finetune.num_classes=3", "data.validation=held", "training.validate_every=1"]
    split = ["parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"]
    fixed = ["objective.segmentation=fixed", "objective.num_groups=2", *split]
    with pytest.raises(UserError, match="13 rows, 6 of them queries, are not divisible"):
        build_gvp(*fixed)
    build_gvp(*tuned, *fixed)
    with pytest.raises(UserError, match="11 rows are not divisible"):
        build_gvp(*tuned, *fixed, "objective.num_condition_tokens=2")


@pytest.mark.parametrize("words", [ONE_STREAM, ["objective.condition_size=4"]])
def test_generation_errors(build_gvp, run_folder, words):
    extra = [f"objective.tokenizer={run_folder}"] if len(words) == 1 else []
    objective, _ = build_gvp(*words, *extra)
    with pytest.raises(UserError, match="to generate, set objective"):
        generator_of(objective)
