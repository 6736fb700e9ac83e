"""Checks between config keys, and between a config and the number of processes."""

import itertools

import pytest

from megavis.config.checks import check_world, require_world
from megavis.config.errors import UserError


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["model.num_attention_heads=7"],
            "command line: model.num_attention_heads: hidden_size 64 is not divisible by 7 heads",
        ),
        (
            [
                "parallel.tensor_model_parallel_size=3",
                "model.ffn_hidden_size=96",
                "objective.vocabulary_size=513",
            ],
            "config.yaml:7: model.num_attention_heads: 8 heads are not divisible by"
            " tensor_model_parallel_size 3; use 1, 2, 4, 8",
        ),
        (
            ["parallel.tensor_model_parallel_size=8", "model.ffn_hidden_size=100"],
            "command line: model.ffn_hidden_size: 100 is not divisible by"
            " tensor_model_parallel_size 8",
        ),
        (
            ["parallel.tensor_model_parallel_size=4", "parallel.context_parallel_size=4"],
            "config.yaml:7: model.num_attention_heads: 8 heads are not divisible by"
            " tensor_model_parallel_size 4 × context_parallel_size 4; use 1, 2, 4, 8",
        ),
        (
            ["data.image_size=9", "parallel.context_parallel_size=2"],
            "command line: parallel.context_parallel_size: 81 rows are not divisible by"
            " context_parallel_size 2; set it to 1",
        ),
        (
            [
                "data.image_size=6",
                "parallel.tensor_model_parallel_size=4",
                "parallel.context_parallel_size=2",
                "parallel.sequence_parallel=true",
            ],
            "command line: parallel.sequence_parallel: 36 rows are not divisible by"
            " tensor_model_parallel_size 4 × context_parallel_size 2; set it to false",
        ),
        (
            ["parallel.pipeline_model_parallel_size=5"],
            "command line: parallel.pipeline_model_parallel_size: 4 layers cannot fill 5 pipeline"
            " stages; use at most 4",
        ),
        (
            [
                "objective={name: mae, patch_size: 4, decoder: {num_layers: 2}}",
                "parallel.pipeline_model_parallel_size=7",
            ],
            "command line: parallel.pipeline_model_parallel_size: 6 layers cannot fill 7 pipeline"
            " stages; use at most 6",
        ),
        (
            ["parallel.sequence_parallel=true"],
            "command line: parallel.sequence_parallel: splits over the tensor group, which has"
            " one process; set tensor_model_parallel_size to 2 or more, or this to false",
        ),
        (
            ["training.precision=bf16", "parallel.zero_stage=0"],
            "command line: parallel.zero_stage: 0 keeps no float32 master weights and gradients"
            " under bf16; the nearest legal choice is 1",
        ),
        (
            ["training.precision=fp16", "parallel.pipeline_model_parallel_size=2"],
            "command line: training.precision: fp16 accumulates pipeline gradients in half"
            " precision in DeepSpeed under zero_stage 1; use bf16, or zero_stage 2, which is"
            " experimental with stages",
        ),
        (
            ["parallel.offload_parameters=cpu", "parallel.zero_stage=2"],
            "command line: parallel.offload_parameters: needs zero_stage 3, not 2; set it to 3 or"
            " this to none",
        ),
        (
            ["parallel.hierarchical_partition_size=8", "parallel.zero_stage=2"],
            "command line: parallel.hierarchical_partition_size: needs zero_stage 3, not 2; set it"
            " to 3 or this to 1",
        ),
        (
            [
                "parallel.hierarchical_partition_size=8",
                "parallel.zero_stage=3",
                "parallel.tensor_model_parallel_size=2",
            ],
            "command line: parallel.hierarchical_partition_size: needs tensor_model_parallel_size"
            " 1: DeepSpeed's groups are of consecutive processes, which here hold different"
            " weights; set this to 1",
        ),
        (
            [
                "parallel.hierarchical_partition_size=8",
                "parallel.zero_stage=3",
                "parallel.context_parallel_size=2",
            ],
            "command line: parallel.hierarchical_partition_size: is not supported with context"
            " parallelism; set this or context_parallel_size to 1",
        ),
        (
            ["parallel.offload_optimizer=cpu", "parallel.zero_stage=0"],
            "command line: parallel.offload_optimizer: needs zero_stage 1, 2 or 3; the nearest"
            " is 1",
        ),
        (
            ["parallel.offload_optimizer=nvme", "parallel.nvme_path=/d", "parallel.zero_stage=2"],
            "command line: parallel.offload_optimizer: nvme needs zero_stage 3; the nearest choice"
            " is cpu",
        ),
        (
            ["parallel.offload_optimizer=cpu", "parallel.pipeline_model_parallel_size=2"],
            "command line: parallel.offload_optimizer: is not supported with pipeline parallelism;"
            " the nearest choice is none",
        ),
        (
            [
                "parallel.offload_parameters=cpu",
                "parallel.zero_stage=3",
                "parallel.pipeline_model_parallel_size=2",
            ],
            "command line: parallel.offload_parameters: is not supported with pipeline parallelism;"
            " the nearest choice is none",
        ),
        (
            ["parallel.offload_optimizer=nvme", "parallel.zero_stage=3"],
            "command line: parallel.nvme_path: names the folder for nvme offload and must be given",
        ),
        (
            ["schedule.warmup_steps=11"],
            "command line: schedule.warmup_steps: 11 is more than training.steps = 10",
        ),
        (
            ["schedule.warmup_rate=1e-4"],
            "command line: schedule.warmup_rate: applies to schedule.warmup_steps, which is 0",
        ),
        (
            ["schedule.min_rate=2e-3"],
            "command line: schedule.min_rate: is above optimizer.learning_rate, where the decay"
            " starts",
        ),
        (
            ["evaluation={what: [loss]}"],
            "config.yaml:8: data.validation: is missing; `evaluation` needs it",
        ),
        (
            [
                "data.validation=held",
                "evaluation={what: [frechet], inception: i.pth, network: efficientnet-lite0}",
                "evaluation.reference=r.npz",
            ],
            "command line: evaluation.what: has `frechet`, which needs one network:"
            " evaluation.inception or evaluation.network",
        ),
        (
            [
                "training.max_rollbacks=1",
                "training.max_bad_steps=5",
                "training.rollback_margin=16",
                "checkpoint={every: 10, keep_last: 3}",
            ],
            "command line: training.max_rollbacks: rolls back by 21 steps (rollback_margin +"
            " max_bad_steps) or more; keep checkpoints for as long: (checkpoint.keep_last - 1) ×"
            " checkpoint.every is 20",
        ),
    ],
)
def test_incompatible_keys_give_one_message(complain, small, words, message):
    assert complain(small, *words) == message


@pytest.mark.parametrize(
    "words",
    [
        ["parallel.zero_stage=0"],
        ["parallel.zero_stage=3", "training.precision=fp16"],
        ["parallel.zero_stage=1", "training.precision=bf16"],
        ["parallel.pipeline_model_parallel_size=4", "training.precision=bf16"],
        ["parallel.pipeline_model_parallel_size=3", "parallel.zero_stage=0"],
        ["parallel.pipeline_model_parallel_size=2", "parallel.zero_stage=3"],
        [
            "parallel.pipeline_model_parallel_size=2",
            "parallel.zero_stage=2",
            "training.precision=fp16",
        ],
        ["parallel.tensor_model_parallel_size=8", "parallel.sequence_parallel=true"],
        ["parallel.context_parallel_size=4", "parallel.pipeline_model_parallel_size=2"],
        ["parallel.zero_stage=2", "parallel.offload_optimizer=cpu"],
        [
            "parallel.zero_stage=3",
            "parallel.offload_optimizer=nvme",
            "parallel.offload_parameters=nvme",
            "parallel.nvme_path=/local",
        ],
        ["schedule.warmup_steps=10", "schedule.warmup_rate=1e-4", "schedule.min_rate=1e-3"],
        [
            "data.validation=held",
            "evaluation={what: [frechet], reference: r.npz, network: efficientnet-lite0}",
        ],
        [
            "training.max_rollbacks=1",
            "training.max_bad_steps=5",
            "training.rollback_margin=15",
            "checkpoint={every: 10, keep_last: 3}",
        ],
    ],
)
def test_compatible_keys_are_accepted(read, small, words):
    read(small, *words)


def test_world_size_check_matches_arithmetic(read, small):
    """processes = tensor × context × pipeline × data; batch = micro × accumulation × data."""
    accepted = refused = 0
    for tensor, context, pipeline, batch, micro in itertools.product(
        (1, 4), (1, 2), (1, 2, 3), (1, 6, 16, 24), (None, 1, 2, 3)
    ):
        words = [
            f"parallel.tensor_model_parallel_size={tensor}",
            f"parallel.context_parallel_size={context}",
            f"parallel.pipeline_model_parallel_size={pipeline}",
            f"training.batch_size={batch}",
            f"training.micro_batch_size={'' if micro is None else micro}",
        ]
        config = read(small, *words).config
        for world in range(1, 25):
            data = world / (tensor * context * pipeline)
            share = batch / data
            fits = data.is_integer() and share.is_integer() and share % (micro or 1) == 0
            issues = list(check_world(config, world))
            assert bool(issues) != fits, (tensor, context, pipeline, batch, micro, world)
            assert len(issues) <= 1
            accepted += fits
            refused += not fits
    assert min(accepted, refused) > 300


@pytest.mark.parametrize(
    ("words", "world", "message"),
    [
        (
            ["parallel.tensor_model_parallel_size=2", "parallel.pipeline_model_parallel_size=2"],
            6,
            "command line: parallel.tensor_model_parallel_size: 6 processes do not divide into"
            " groups of tensor size 2 × pipeline size 2; start a multiple of 4",
        ),
        (
            ["parallel.tensor_model_parallel_size=2", "parallel.context_parallel_size=4"],
            6,
            "command line: parallel.tensor_model_parallel_size: 6 processes do not divide into"
            " groups of tensor size 2 × context size 4 × pipeline size 1; start a multiple of 8",
        ),
        (
            [],
            3,
            "config.yaml:15: training.batch_size: 16 is not divisible by the data-parallel size 3;"
            " 15 would",
        ),
        (
            ["training.micro_batch_size=3"],
            2,
            "config.yaml:15: training.batch_size: 16 must be micro_batch_size 3 × accumulation ×"
            " data-parallel size 2; 18 would be",
        ),
        (
            ["training.batch_size=2"],
            8,
            "command line: training.batch_size: 2 is not divisible by the data-parallel size 8;"
            " 8 would",
        ),
        (
            ["parallel.hierarchical_partition_size=8", "parallel.zero_stage=3"],
            4,
            "command line: parallel.hierarchical_partition_size: 8 does not divide the"
            " data-parallel size 4; it could be 1, 2, 4",
        ),
    ],
)
def test_invalid_world_size_suggests_a_valid_one(read, small, tmp_path, words, world, message):
    loaded = read(small, *words)
    with pytest.raises(UserError) as caught, loaded.source.locate():
        require_world(loaded.config, world)
    assert str(caught.value).replace(f"{tmp_path}/", "") == message


def test_paper_config_adds_its_own_checks(tmp_path, small, monkeypatch):
    from megavis.config import load
    from megavis.config.load import load_config
    from megavis.config.schema import ObjectiveConfig

    class Paper(ObjectiveConfig):
        colours: int = 7

        def check(self, config):
            if self.colours % config.parallel.tensor_model_parallel_size:
                yield "objective.colours", "are not divisible by the tensor size"

    monkeypatch.setattr(load, "PAPER_CONFIGS", {"paper": Paper})
    path = tmp_path / "paper.yaml"
    path.write_text(small.replace("name: igpt", "name: paper\n  colours: 5"))
    word = "parallel.tensor_model_parallel_size=2"
    with pytest.raises(UserError, match=r"paper\.yaml:4: objective\.colours: are not divisible"):
        load_config(path, [word])
    load_config(path)


@pytest.mark.parametrize(
    ("legal", "wrong", "message"),
    [
        ("crop: scaled, crop_size: 256", "crop_size: 257", "crop_size: 257 is too large for"),
        ("short_side: 8", "short_side: 7", "short_side: 7 is too small for data.image_size = 8"),
        ("cache: c, cache_gib: 1", "cache: null", "cache_gib: is the size of data.cache"),
        ("images_per_class: 2", "train: [{path: a, weight: 1}]", "images_per_class: draws images"),
        ("train: [{path: a, weight: 1, crop: none}]", "crop: window", "train.0.crop: all folders"),
        ("scale: [0.5, 0.5]", "scale: [0.5, 0.4]", "scale: [0.5, 0.4] must begin with the smaller"),
        ("short_sides: [8, 8]", "short_sides: [9, 8]", "short_sides: [9, 8] must begin with the"),
    ],
)
def test_keys_of_data(read, complain, small, legal, wrong, message):
    """The first keys are the border of what is accepted."""
    data = "data={train: shards/train, image_size: 8, %s}"
    read(small, data % legal)
    assert f"command line: data.{message}" in complain(
        small, data % legal, f"data.{wrong.replace(': ', '=', 1)}"
    )


def test_the_longest_shift_of_recordings_is_below_their_length(read, complain, small):
    words = ["objective={name: mp3, patch_size: 4}", "data={train: a, frames: [100, 40]}"]
    words = [*words, "model.positions=null"]
    read(small, *words, "data.time_shift=0.99")
    message = "data.time_shift: must be shorter than 100 frames of 10 ms"
    assert message in complain(small, *words, "data.time_shift=1")


@pytest.mark.parametrize(
    ("positions", "head", "width", "message"),
    [
        ("rope_1d", 2, 6, "needs a head width divisible by 2, not 3"),
        ("rope_2d", 4, 4, "needs a head width divisible by 4, not 2"),
        ("sincos", 4, 6, "needs a hidden_size divisible by 4, not 6"),
    ],
)
def test_widths_that_positions_need(read, complain, small, positions, head, width, message):
    """`head` is the width of a head that they accept, of two."""
    words = [f"model.positions={positions}", "model.num_attention_heads=2"]
    read(small, *words, f"model.hidden_size={2 * head}")
    assert f"{positions} {message}" in complain(small, *words, f"model.hidden_size={width}")
