"""What users of a notebook give by mistake: one sentence each, and the same result in any form."""

import copy
import json
import re
import shutil

import numpy as np
import pytest
import torch
from golden_givt import import_golden
from PIL import Image
from tiny import VIT, tiny

import megavis
from megavis.cli import main
from megavis.composition.encoded_tokens import Ids, Latents
from megavis.composition.tokens import Frames
from megavis.config.errors import UserError
from megavis.config.load import did_you_mean, load_config
from megavis.data.loading.dataset import ShardDataset
from megavis.notebook import Run
from megavis.parallel.context import close_context, open_context
from megavis.parallel.launch import read_launch
from megavis.training.metrics import read_metrics

pytestmark = pytest.mark.once


@pytest.fixture(scope="module")
def trained(tmp_path_factory, train_small):
    """A run of three steps."""
    folder = tmp_path_factory.mktemp("run")
    return train_small(folder, "training.steps=3", "model.num_layers=2")


@pytest.fixture(scope="module")
def run(trained):
    yield megavis.load(trained, device="cpu")
    close_context()


@pytest.fixture(scope="module")
def ids(shard_folders):
    return ShardDataset(shard_folders / "validation").read(np.arange(8))[0].astype(np.int64)


def test_pictures_in_any_form_have_the_same_features(run, ids):
    pixels = run.images(ids)
    expected = run.features(torch.from_numpy(ids))
    mirrored = np.ascontiguousarray(pixels[:, ::-1])
    for same in (ids, pixels, [Image.fromarray(each) for each in pixels], mirrored[:, ::-1]):
        assert torch.equal(run.features(same), expected)


def test_many_images_are_computed_in_parts(run, ids):
    many = np.tile(ids, (40, 1))  # 320 images
    assert torch.allclose(run.features(many)[:, :8], run.features(ids), atol=1e-6)
    assert run.features(many).shape[1] == 320


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([None, None], "expected an array of numbers"),
        ("a path", "expected an array of numbers"),
        ([[1, 2], [3]], "the inputs are no array"),
        (np.zeros((0, 16), np.int64), "hold no image"),
        (np.full((2, 16), 99), "the ids range from 99 to 99"),
        (np.full((2, 16), -1), "the ids range from -1 to -1"),
        (torch.zeros(2, 17, dtype=torch.int64), r"shape \[2, 17\]"),
        (torch.zeros(2, 16), "torch.float32"),
        (torch.tensor(1), r"not Tensor of shape \[\]"),
        (torch.zeros(2, 16, dtype=torch.complex64), "type torch.complex64"),
    ],
)
def test_other_inputs_are_refused(run, inputs, message):
    for use in (run.features, run.loss, lambda each: run.sample(originals=each, given=0.5)):
        with pytest.raises(UserError, match=message):
            use(inputs)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"num_images": 0}, "num_images must be a whole number of at least 1, not 0"),
        ({"num_images": 1.5}, "num_images must be a whole number of at least 1, not 1.5"),
        ({"batch_size": True}, "batch_size must be a whole number of at least 1, not True"),
        ({"batch_size": -1}, "batch_size must be a whole number of at least 1, not -1"),
        ({"given": "half"}, r"must lie in \[0, 1\], not 'half'"),
        ({"temperature": "hot"}, "temperature must be a number, not 'hot'"),
        ({"temperature": [1.0]}, r"temperature must be a number, not \[1.0\]"),
        ({"top_k": 2.5}, "top_k must be a whole number, not 2.5"),
        ({"top_p": True}, "top_p must be a number, not True"),
        ({"beams": "2"}, "beams must be a whole number, not '2'"),
        ({"guidance_schedule": 3}, "guidance_schedule must be a word, not 3"),
    ],
)
def test_options_of_other_types_are_refused(run, words, message):
    with pytest.raises(UserError, match=message):
        run.sample(**words)


@pytest.mark.parametrize("layer", [3, -4, 1.0, "1", True])
def test_layers_are_whole_numbers_in_range(run, ids, layer):
    with pytest.raises(UserError, match=f"layer {layer!r} is not one of 0 to 2"):
        run.features(ids, layer=layer)


def test_run_without_classes_has_no_labels(run, ids):
    with pytest.raises(UserError, match="not conditioned on labels"):
        run.loss(ids, labels=[0] * 8)


@pytest.mark.parametrize(
    ("tokens", "shape", "message"),
    [
        (Ids(image_size=16, side=4, vocabulary_size=9, tokenizer=None), (2, 17), "numbers [b, 16]"),
        (Frames(4, 3, normalize=False), (2, 5, 3), "expects [b, 4, 3]"),
    ],
)
def test_shapes_of_other_tokens_are_checked(tokens, shape, message):
    with pytest.raises(UserError, match=re.escape(message)):
        tokens.of(torch.zeros(shape, dtype=torch.int64))


def test_sample_index_is_checked(run, ids):
    expected = run.loss(ids, sample_index=torch.arange(8))
    assert run.loss(ids, sample_index=list(range(8))) == expected
    for wrong in (np.arange(7), np.arange(8.0), [[1]] * 8):
        with pytest.raises(UserError, match=r"sample_index must be whole numbers \[8\]"):
            run.loss(ids, sample_index=wrong)
    with pytest.raises(UserError, match="must be 0 or more, not -1"):
        run.loss(ids, sample_index=np.arange(8) - 1)


def test_tokens_to_decode_are_checked(run, ids):
    for wrong in (ids[:, :15], ids[None]):
        with pytest.raises(UserError, match=r"the tokens have shape .*, not \[b, 16\]"):
            run.images(wrong)
    for use, what in ((run.images, "tokens"), (run.to_ids, "inputs")):
        with pytest.raises(UserError, match=f"the {what} hold no image"):
            use(ids[:0])


def test_loss_of_a_finetuned_run_needs_labels(run, trained, small_config, shard_folders, tmp_path):
    words = [f"output={tmp_path}", "name=tuned", "training.validate_every=2", "model.num_layers=2"]
    tuning = f"finetune={{num_classes: 3, from_run: {trained}}}"
    assert main(["train", str(small_config), *words, tuning, "--device", "cpu"]) == 0
    tuned = megavis.load(tmp_path / "tuned", device="cpu")
    data = ShardDataset(shard_folders / "validation")
    inputs, labels = data.read(np.arange(len(data)))[0].astype(np.int64), data.labels
    with pytest.raises(UserError, match="the loss of a fine-tuned run needs labels"):
        tuned.loss(inputs)
    logits = tuned.outputs(inputs)
    expected = torch.nn.functional.cross_entropy(logits, torch.as_tensor(np.asarray(labels)).long())
    assert tuned.loss(inputs, labels=labels) == pytest.approx(float(expected), rel=1e-6)
    names = [tuned.classes[label] for label in labels]
    assert tuned.loss(inputs, labels=names) == tuned.loss(inputs, labels=labels)
    with pytest.raises(UserError, match="there is no class 'none'"):
        tuned.loss(inputs, labels=["none"] * len(inputs))
    for wrong in (-1, 3):
        with pytest.raises(UserError, match=r"labels must be in 0\.\.2"):
            tuned.loss(inputs, labels=[wrong] * len(inputs))
    with pytest.raises(UserError, match="layer 3 is not one of 0 to 2"):
        tuned.features(inputs, layer=3)
    for wrong in ([0.5] * len(inputs), labels[:1], [[0]] * len(inputs)):
        with pytest.raises(UserError, match="labels must be whole numbers"):
            tuned.loss(inputs, labels=wrong)


def test_images_of_an_autoencoder_have_its_channels(run, tmp_path):
    vae = megavis.load(import_golden(tmp_path, "vae"), device="cpu")
    for size in (32, 48):
        assert vae.outputs(np.zeros((1, size, size, 3), np.uint8)).isfinite().all()
    for shape in ((16, 16, 3), (1, 16, 16, 4), (1, 3, 16, 16), (1, 17, 16, 3)):
        with pytest.raises(UserError, match=r"the inputs have shape .* not \[b, 256, 256, 3\]"):
            vae.outputs(np.zeros(shape, np.uint8))


def test_a_transformer_encodes_label_maps_of_its_own_size(run, tmp_path):
    """Its positions are learned: those of 32 pixels in each direction here."""
    words = (
        "{name: vae_label_maps, semantic_channels: 6, instance_channels: 8, patch_size: 4,"
        " downsampling: 8, latent_channels: 4, decoder_layers: 1}"
    )
    path = tmp_path / "vae.yaml"
    path.write_text(tiny(words, model={**VIT, "activation": "gelu"}, data={"image_size": 32}))
    vae = Run(load_config(path).config, folder=tmp_path, checkpoint=None, context=run.context)
    assert vae.outputs(np.zeros((1, 32, 32, 3), np.uint8)).isfinite().all()
    with pytest.raises(UserError, match=r"have shape \[1, 16, 16, 3\], not \[b, 32, 32, 3\]$"):
        vae.outputs(np.zeros((1, 16, 16, 3), np.uint8))


@pytest.mark.parametrize("options", [{"labels": [[1, 2]]}, {"labels": []}, {"image": []}])
def test_conditions_of_other_shapes_are_refused(run, tmp_path, options):
    givt = megavis.load(import_golden(tmp_path, "givt_causal"), device="cpu")
    latents = givt.objective.backbone.blank_batch(1, torch.device("cpu")).inputs
    uses = [lambda: givt.sample(1, **options)]
    uses += [lambda: givt.outputs(latents, **options)] * ("labels" in options)
    for use in uses:
        with pytest.raises(UserError, match=r"labels must be whole|image holds no image"):
            use()


def test_layer_that_the_config_lost_is_noticed(run, trained, tmp_path):
    edited = shutil.copytree(trained, tmp_path / "edited")
    config = (edited / "config.yaml").read_text()
    assert "num_layers: 2\n" in config
    (edited / "config.yaml").write_text(config.replace("num_layers: 2\n", "num_layers: 1\n"))
    with pytest.raises(UserError, match=r"holds blocks\.1\.\S+, which the network"):
        megavis.load(edited, device="cpu")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"device": "gpu"}, "device 'gpu': choose cpu or cuda"),
        ({"device": 0}, "device '0': choose cpu or cuda"),
        ({"device": "cuda:1"}, "CUDA_VISIBLE_DEVICES selects a GPU"),
        ({"dtype": "bfloat16"}, "dtype: 'bfloat16' is not one of float32, bf16, fp16"),
        ({"dtype": torch.float64}, "is not one of"),
        ({"image_size": 0}, "image_size must be a whole number of at least 1, not 0"),
        ({"image_size": 4.5}, "image_size must be a whole number"),
        ({"image_size": True}, "image_size must be a whole number of at least 1, not True"),
    ],
)
def test_options_of_load_are_checked(run, trained, words, message):
    with pytest.raises(UserError, match=message):
        megavis.load(trained, **words)


def test_the_folder_of_load_is_a_path(run):
    for wrong in (3, None, b"runs"):
        with pytest.raises(UserError, match="run_folder must be a path such as 'runs/NAME', not "):
            megavis.load(wrong)


@pytest.mark.parametrize("seed", ["x", 1.5, -1, True, 2**64, [1]])
def test_seeds_are_whole_numbers(run, seed):
    """A text was hashed, and drew other images than the number that it shows."""
    message = re.escape(f"seed must be a whole number from 0 to 2⁶⁴ - 1, not {seed!r}")
    for use in (
        run.untrained,
        lambda seed: run.sample(1, seed=seed),
        lambda seed: run.sampler(seed=seed),
    ):
        with pytest.raises(UserError, match=message):
            use(seed)


def test_numbers_of_numpy_are_seeds(run):
    assert torch.equal(run.sample(2, seed=np.int64(3)), run.sample(2, seed=3))


def test_arguments_of_sample_and_images_are_checked(run, ids):
    with pytest.raises(UserError, match=r"the given share must lie in \[0, 1\], not True"):
        run.sample(originals=ids, given=True)
    with pytest.raises(UserError, match="tokens must be True or False, not 'yes'"):
        run.sample(2, tokens="yes")
    with pytest.raises(UserError, match="the tokens: expected an array of numbers, not str 'x'"):
        run.images("x")
    with pytest.raises(UserError, match="the ids are of type torch.float64, not whole numbers"):
        run.images(ids * 1.0)


ORDER = np.tile(np.arange(16), (8, 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": "raster"}, "order: expected an array of numbers, not str 'raster'"),
        ({"order": 3}, "order: expected an array of numbers, not int 3"),
        ({"order": ORDER * 1.0}, "must contain every integer from 0 to 15 once, as int64"),
        ({"sample_index": 3}, "sample_index: expected an array of numbers, not int 3"),
        ({"sample_index": [0.5] * 8}, r"sample_index must be whole numbers \[8\]"),
        ({"sample_index": [0, 1]}, r"sample_index must be whole numbers \[8\]"),
        ({"sample_index": [-1] * 8}, "sample_index must be 0 or more, not -1"),
    ],
)
def test_options_of_outputs_are_checked(run, ids, options, message):
    with pytest.raises(UserError, match=message):
        run.outputs(ids, **options)
    expected = run.outputs(ids, order=ORDER)
    assert torch.equal(run.outputs(ids, order=ORDER.tolist(), sample_index=range(8)), expected)


def test_device_may_be_an_object_and_given_twice(run, trained):
    """As when a notebook's cell runs again."""
    for dtype in ("float32", torch.bfloat16):
        assert megavis.load(trained, device=torch.device("cpu"), dtype=dtype).step == run.step


def test_unknown_device_is_refused_where_none_is_open():
    for device in ("gpu", "CPU", 0, "cuda:0"):
        with pytest.raises(UserError, match="choose cpu or cuda"):
            open_context(read_launch({}), device=device)


def test_runs_are_neither_copied_nor_pickled(run):
    with pytest.raises(UserError, match="again with megavis.load"):
        copy.deepcopy(run)


def test_folder_of_another_library_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="megavis import huggingface"):
        megavis.load(tmp_path)


@pytest.mark.parametrize(
    ("given", "meant"), [("bfloat16", "bf16"), ("float16", "fp16"), ("float31", "float32")]
)
def test_precision_of_other_libraries_is_understood(given, meant):
    assert did_you_mean(given, ["float32", "bf16", "fp16"]) == f"; did you mean '{meant}'?"


@pytest.mark.parametrize(
    "line", ['{"step": "7", "loss": 1}', '{"step": null}', "5", "null", '{"loss": 2}', "[1, 2]"]
)
def test_line_without_a_step_is_no_metric(trained, tmp_path, capsys, line):
    edited = shutil.copytree(trained, tmp_path / "runs" / "edited")
    before = read_metrics(edited)
    with (edited / "metrics.jsonl").open("a") as file:
        file.write(f"{line}\n{json.dumps({'step': 9, 'loss': 'x'})}\n")
    assert read_metrics(edited)[:-1] == before
    assert main(["runs", str(tmp_path / "runs")]) == 0
    assert main(["report", str(edited)]) == 0
    assert "edited" in capsys.readouterr().out


def test_words_of_a_command_may_be_paths_and_numbers(trained, tmp_path):
    out = tmp_path / "grid.png"
    words = ["sample", trained, "--num-images", 2, "--out", out, "--device", "cpu"]
    assert main(words) == 0
    assert out.exists()


def test_missing_tokenizer_is_named_by_its_key(tmp_path):
    sizes = {"channels": 4, "side": 4, "stacked": 1, "seed": 0, "image_size": 16, "beta": None}
    latents = Latents(tokenizer=str(tmp_path / "vae"), **sizes)
    with pytest.raises(UserError, match=r"^objective\.tokenizer: .* is not a run folder"):
        latents.tokenizer.to("cpu")
