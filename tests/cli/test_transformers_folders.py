"""Import of folders that `transformers` saved, against its own outputs, and of other folders."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import megavis
from megavis.cli import main
from megavis.parallel.context import close_context
from megavis.tokenizers.patches import standardize

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
# The folders depend on the version of transformers, not on those of other packages.
pytestmark = pytest.mark.once

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 16,
    "patch_size": 4,
}
DECODER = {
    "decoder_hidden_size": 16,
    "decoder_num_hidden_layers": 1,
    "decoder_num_attention_heads": 2,
    "decoder_intermediate_size": 64,
}
PIXELS = {"vocab_size": 21, "n_positions": 16, "n_embd": 24, "n_layer": 2, "n_head": 3}


def network(name, **changed):
    """Build a network with random weights, except for the positions."""
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    keys = {"ImageGPT": PIXELS, "ViTMAE": {**SIZES, **DECODER}}
    prefix = next((prefix for prefix in keys if name.startswith(prefix)), "ViT")
    config = getattr(transformers, f"{prefix}Config")
    model = kind(config(**{**keys.get(prefix, SIZES), **changed})).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "pos" not in parameter_name:
                parameter.normal_(std=0.2)
    return model


def run_import(folder, run, form="huggingface"):
    """Return the exit code of `megavis import`; a run that was opened is closed."""
    try:
        return main(["import", form, str(folder), str(run)])
    finally:
        if torch.distributed.is_initialized():
            close_context()


@torch.no_grad()
def both_outputs(name, model, run, standardized=standardize):
    """Return outputs of the run and of transformers, in float32."""
    model = model.float()
    if name.startswith("ImageGPT"):
        ids = torch.randint(20, (2, 16), generator=torch.Generator().manual_seed(1))
        start = torch.full((2, 1), 20)
        theirs = model(input_ids=torch.cat([start, ids[:, :-1]], 1)).logits
        return run.outputs(ids), theirs[..., :20]
    shape, generator = (2, 16, 16, 3), torch.Generator().manual_seed(1)
    images = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    pixels = standardized(images).permute(0, 3, 1, 2).contiguous()
    if name == "ViTForImageClassification":
        return run.outputs(images), model(pixels).logits
    if name == "ViTModel":
        return run.features(images, layer=2), model(pixels).last_hidden_state.mean(1)
    index = torch.arange(2)
    order = run.objective.schedule.draw(index).order
    ours = run.outputs(images, sample_index=index)
    theirs = model(pixels, noise=order.argsort(1).float()).logits
    # The run predicts hidden patches only, which are last in the order.
    return ours, theirs.take_along_dim(order[:, -ours.shape[1] :, None], 1)


@pytest.fixture
def leave_job():
    yield
    close_context()


def check_outputs(tmp_path, name, model, **options):
    assert run_import(tmp_path / "saved", tmp_path / "run") == 0
    run = megavis.load(tmp_path / "run", device="cpu")
    ours, theirs = both_outputs(name, model, run, **options)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


NAMES = ["ViTMAEForPreTraining", "ImageGPTForCausalImageModeling", "ViTForImageClassification"]


@pytest.mark.usefixtures("leave_job")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shard", ["50GB", "8KB"])
@pytest.mark.parametrize("name", NAMES)
def test_outputs_of_a_saved_folder(tmp_path, name, shard, dtype):
    model = network(name).to(dtype)
    model.save_pretrained(tmp_path / "saved", max_shard_size=shard)
    assert (tmp_path / "saved" / "model.safetensors").exists() == (shard == "50GB")
    check_outputs(tmp_path, name, model)


@pytest.mark.usefixtures("leave_job")
@pytest.mark.parametrize("name", [*NAMES[::2], "ViTModel"])
def test_outputs_of_weights_under_the_names_of_modules(tmp_path, name):
    model = network(name)
    (tmp_path / "saved").mkdir()
    model.config.save_pretrained(tmp_path / "saved")
    save_file(model.state_dict(), tmp_path / "saved" / "model.safetensors")
    check_outputs(tmp_path, name, model)


@pytest.mark.usefixtures("leave_job")
@pytest.mark.parametrize("stored", ["nothing", "the colours", "all rows"])
def test_a_tied_head_is_the_embedding_of_the_colours(tmp_path, stored, capsys):
    model = network(NAMES[1], tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "saved")
    file = tmp_path / "saved" / "model.safetensors"
    tensors = load_file(file)
    assert "lm_head.weight" not in tensors
    if stored != "nothing":
        rows = 20 if stored == "the colours" else 21
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"][:rows].clone()
        save_file(tensors, file)
    check_outputs(tmp_path, NAMES[1], model)
    assert "ties the head to the embedding" in capsys.readouterr().out


@pytest.mark.usefixtures("leave_job")
@pytest.mark.parametrize(
    ("options", "pixels"),
    [
        ({}, lambda images: (images / 255 - 0.5) / 0.5),
        (
            {"image_mean": [0.1, 0.2, 0.3]},
            lambda x: (x / 255 - torch.tensor([0.1, 0.2, 0.3])) / 0.5,
        ),
        ({"do_normalize": False}, lambda images: images / 255),
        ({"rescale_factor": 1 / 127.5}, lambda images: (images / 127.5 - 0.5) / 0.5),
        ({"do_rescale": False, "image_mean": [127.0] * 3}, lambda images: (images - 127.0) / 0.5),
    ],
)
def test_pixels_are_those_of_the_image_processor(tmp_path, options, pixels):
    model = network("ViTForImageClassification")
    model.save_pretrained(tmp_path / "saved")
    transformers.ViTImageProcessor(**options).save_pretrained(tmp_path / "saved")
    check_outputs(tmp_path, "ViTForImageClassification", model, standardized=pixels)


@pytest.mark.usefixtures("leave_job")
@pytest.mark.parametrize("names", [("ant", "bee"), ()])
def test_classes_keep_their_names(tmp_path, names):
    named = {"id2label": dict(enumerate(names))} if names else {}
    network(NAMES[2], **named).save_pretrained(tmp_path / "saved")
    assert run_import(tmp_path / "saved", tmp_path / "run") == 0
    assert megavis.load(tmp_path / "run", device="cpu").classes == names


DEEPER = "vit.encoder.layer.1.attention.attention.key.bias does not belong to ViT"


def check_refused(tmp_path, capsys, sentence, form="huggingface"):
    capsys.readouterr()  # Progress of save_pretrained.
    assert run_import(tmp_path / "saved", tmp_path / "run", form) == 2
    message = capsys.readouterr().err
    assert sentence in message
    assert message.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "changed", "sentence"),
    [
        ("ImageGPTModel", {}, "no transformer.wte.weight, which ImageGPTForCausalImageModeling"),
        (
            "ImageGPTForImageClassification",
            {},
            "no lm_head.weight, which ImageGPTForCausalImageModeling has; config.json names"
            " ImageGPTForImageClassification",
        ),
        ("ViTMAEModel", {}, "which ViTMAEForPreTraining has; config.json names ViTMAEModel"),
        (NAMES[0], {"decoder_intermediate_size": 48}, "decoder_intermediate_size is 48; only 4"),
        (NAMES[0], {"hidden_act": "relu"}, "hidden_act is 'relu'; only 'gelu'"),
        (NAMES[0], {"num_channels": 1}, "num_channels is 1; only 3"),
        (NAMES[2], {"hidden_act": "gelu_new"}, "hidden_act is 'gelu_new'; only 'gelu'"),
        (NAMES[2], {"num_channels": 1}, "num_channels is 1; only 3"),
        (NAMES[2], {"qkv_bias": False}, "qkv_bias is False; only True"),
        (NAMES[2], {"num_labels": 1}, "its classifier has one output"),
        (NAMES[2], {"image_size": (16, 32)}, "image_size is [16, 32], not a positive integer"),
    ],
)
def test_a_network_that_cannot_be_converted(tmp_path, capsys, name, changed, sentence):
    network(name, **changed).save_pretrained(tmp_path / "saved")
    check_refused(tmp_path, capsys, sentence)


@pytest.mark.parametrize(
    ("name", "changed", "sentence"),
    [
        (NAMES[0], {"image_size": None}, "image_size is None, not a positive integer"),
        (NAMES[0], {"mask_ratio": "0.75"}, "mask_ratio is '0.75', not a number in [0, 1)"),
        (
            NAMES[0],
            {"num_hidden_layers": 1},
            DEEPER,
        ),
        (NAMES[0], {"num_attention_heads": 3}, "hidden_size 16 is not divisible by num_attention"),
        (NAMES[0], {"hidden_size": 32}, "has shape [1, 1, 16]; config.json implies [1, 1, 32]"),
        (
            NAMES[2],
            {"num_hidden_layers": 1},
            DEEPER,
        ),
        (NAMES[2], {"num_hidden_layers": 3}, "no vit.encoder.layer.2.attention"),
        (NAMES[2], {"intermediate_size": 64}, "config.json implies [64, 16]"),
        (NAMES[1], {"tie_word_embeddings": True}, "lm_head.weight differs from transformer.wte"),
    ],
)
def test_settings_that_do_not_fit_the_weights(tmp_path, capsys, name, changed, sentence):
    network(name).save_pretrained(tmp_path / "saved")
    path = tmp_path / "saved" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    check_refused(tmp_path, capsys, sentence)


@pytest.mark.parametrize("classes", ["ViTModel", 1, None])
def test_names_of_classes_in_another_form(tmp_path, capsys, classes):
    network("ViTModel").save_pretrained(tmp_path / "saved")
    path = tmp_path / "saved" / "config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, "architectures": classes}))
    assert run_import(tmp_path / "saved", tmp_path / "run") == 0


def test_a_tensor_without_a_dimension(tmp_path, capsys):
    network("ViTMAEForPreTraining").save_pretrained(tmp_path / "saved")
    path, name = tmp_path / "saved" / "model.safetensors", "decoder.decoder_pos_embed"
    save_file({**load_file(path), name: torch.tensor(1.0)}, path)
    check_refused(tmp_path, capsys, f"{name} is a single number")


def test_mae_with_another_image_processor_is_refused(tmp_path, capsys):
    network(NAMES[0]).save_pretrained(tmp_path / "saved")
    transformers.ViTImageProcessor().save_pretrained(tmp_path / "saved")
    check_refused(tmp_path, capsys, "pixels are standardised by [0.5, 0.5, 0.5]; MAE of megavis")


GPT2 = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 30, "n_positions": 16}
TOWER = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


@pytest.mark.parametrize(
    ("form", "sentence"),
    [
        ("huggingface", "model_type is 'gpt2'; use one of timm, vit, imagegpt, vit_mae, megavis"),
        ("imagegpt", "this is a folder of 'gpt2', not of 'imagegpt'"),
    ],
)
def test_a_folder_of_gpt2(tmp_path, capsys, form, sentence):
    transformers.GPT2Model(transformers.GPT2Config(**GPT2)).save_pretrained(tmp_path / "saved")
    check_refused(tmp_path, capsys, sentence, form)


def test_a_folder_of_clip(tmp_path, capsys):
    vision = {**TOWER, "image_size": 16, "patch_size": 8}
    config = transformers.CLIPConfig(text_config=TOWER | {"vocab_size": 30}, vision_config=vision)
    transformers.CLIPModel(config).save_pretrained(tmp_path / "saved")
    check_refused(tmp_path, capsys, "model_type is 'clip'; use one of")


@pytest.mark.parametrize("form", ["huggingface", "imagegpt", "timm"])
@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        (None, "saved: no such folder"),
        ("a file", "saved: a file, not a folder of a model"),
        ([], "missing; the folder has no files; save the model with"),
        (["pytorch_model.bin"], "missing; the folder has pytorch_model.bin; save the model with"),
    ],
)
def test_a_folder_without_a_model(tmp_path, capsys, form, files, sentence):
    folder = tmp_path / "saved"
    if files == "a file":
        folder.touch()
    elif files is not None:
        folder.mkdir()
        for name in files:
            (folder / name).touch()
    check_refused(tmp_path, capsys, sentence, form)


@pytest.mark.parametrize("name", NAMES)
def test_pickled_weights_only(tmp_path, capsys, name):
    network(name).save_pretrained(tmp_path / "saved")
    weights = tmp_path / "saved" / "model.safetensors"
    weights.rename(weights.with_name("pytorch_model.bin"))
    check_refused(tmp_path, capsys, "pytorch_model.bin; save the model with transformers'")
