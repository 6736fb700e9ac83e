"""Exported folders: outputs in a process without megavis, and re-import."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from small_batches import photographs
from tiny import VIT, tiny

import megavis
from megavis.checkpoint.format.folder import latest_checkpoint
from megavis.checkpoint.format.manifest import read_manifest, write_manifest
from megavis.checkpoint.state.restore import load_weights
from megavis.cli import main
from megavis.config.load import load_config
from megavis.data.loading.loader import Batch
from megavis.model.inference import Inference
from megavis.model.stack import LayerStack, LocalLayers
from megavis.tokenizers.palette import Palette
from megavis.tokenizers.patches import standardize
from megavis.weights.own_folder import PlainForm
from megavis.weights.released import origin_of, write_run

transformers = pytest.importorskip(
    "transformers", reason="pip install transformers, to open exported folders"
)
pytestmark = pytest.mark.usefixtures("context")

DECODER = "decoder: {num_layers: 1, hidden_size: 8, num_attention_heads: 2}"
LEARNED = {**VIT, "positions": "learned"}
TUNED = {"num_classes": 3, "visibility": "full", "read_out": "first"}
CASES = {
    "igpt": tiny("{name: igpt, vocabulary_size: 32}", data={"image_size": 4}),
    "mae": tiny(f"{{name: mae, patch_size: 4, mask_ratio: 0.7, {DECODER}}}", model=VIT),
    "darl": tiny("{name: darl, patch_size: 4, decoder: linear}", model=LEARNED),
    "gvp": tiny("{name: gvp, patch_size: 4, num_groups: 3}", model=VIT),
    "tuned": tiny(
        "{name: gvp, patch_size: 4, num_groups: 3}",
        model=VIT,
        validates=True,
        finetune=TUNED,
        training={"validate_every": 1},
    ),
    "mp3_timm": tiny("{name: mp3, patch_size: 4}", model=VIT),
    "tuned_timm": tiny(
        f"{{name: mae, patch_size: 4, {DECODER}}}",
        model=VIT,
        validates=True,
        finetune=TUNED,
        training={"validate_every": 1},
    ),
    "mean_timm": tiny(
        "{name: mp3, patch_size: 4}",
        model={**VIT, "num_attention_heads": 4},
        validates=True,
        finetune={**TUNED, "read_out": "mean"},
        training={"validate_every": 1},
    ),
    "rotary_own": tiny("{name: darl, patch_size: 4, decoder: linear}", model=VIT),
    "givt_own": tiny("{name: givt}", data={"image_size": 32}),
    "aim_own": tiny(
        "{name: aim, patch_size: 4, head: {num_layers: 1, hidden_size: 8}}",
        model={**VIT, "add_bias": False},
    ),
    "order_own": tiny("{name: igpt, vocabulary_size: 32, order: random}", data={"image_size": 4}),
    "groups_own": tiny(
        "{name: gvp, patch_size: 4, num_groups: 3}", model={**VIT, "positions": "rope_2d"}
    ),
}


def make_run(folder, text, build_paper):
    """Write a run with random weights and load it."""
    objective, inference = build_paper(text, std=0.2)
    named = {**dict(inference.layers.named_parameters()), **dict(inference.layers.named_buffers())}
    path = folder.with_suffix(".yaml")
    path.write_text(text)
    write_run(folder, load_config(path).config, {k: v.detach() for k, v in named.items()})
    return megavis.load(folder, device="cpu")


def inputs_and_outputs(name, run):
    """Return inputs and expected outputs for `open_exports.py`."""
    if name.endswith("_own"):
        form = PlainForm(run)
        return {"inputs": form.tokens, "expected": form.expected}
    if name == "igpt":
        ids = torch.randint(32, (2, 16))
        return {"inputs": ids, "expected": run.outputs(ids)}
    images = photographs(2, 16)
    pixels = {"inputs": standardize(images).permute(0, 3, 1, 2).contiguous()}
    if name == "mae":
        return {**pixels, **hidden_patches(run, images)}
    tuned = run.config.finetune is not None
    return {
        **pixels,
        "expected": run.outputs(images) if tuned else full_attention_tokens(run, images),
    }


@torch.no_grad()
def full_attention_tokens(run, images):
    """Return the final norm's output `[b, s, h]` on images uint8 `[b, H, W, 3]`, full attention."""
    paper, inference = run.objective.backbone, run.inference
    if run.config.finetune is None:
        paper = paper.with_full_attention()
        plans = paper.layer_plans()
        layers = LocalLayers(plans, list(LayerStack(plans, paper.loss).layers))
        load_weights(run.checkpoint, layers, run.context)
        inference = Inference(layers, run.context)
    batch = Batch(images, torch.full((len(images),), -1), torch.arange(len(images)))
    return inference.last_features(paper.feature_inputs(batch))


def hidden_patches(run, images):
    """Return the run's predictions, of hidden patches only, and the order of patches."""
    index = torch.arange(len(images))
    order = run.objective.schedule.draw(index).order
    noise = order.argsort(1).float()  # transformers takes its argsort as the order
    return {"noise": noise, "expected": run.outputs(images, sample_index=index), "order": order}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tmp_path_factory.mktemp("hub")


# Importing transformers and timm takes seconds, and does not depend on the version of Python.
@pytest.mark.once
def test_exports_match_without_megavis(folders, build_paper, capsys):
    for name, text in CASES.items():
        run = make_run(folders / f"{name}-run", text, build_paper)
        form = "timm" if name.endswith("_timm") else "huggingface"
        folder = folders / name
        assert main(["export", str(run.folder), "--to", form, str(folder)]) == 0, name
        assert ("megavis.load" in capsys.readouterr().out) == name.endswith("_own"), name
        case = {key: t.contiguous() for key, t in inputs_and_outputs(name, run).items()}
        save_file(case, folder.with_suffix(".safetensors"))
    script = Path(__file__).parents[1] / "support" / "open_exports.py"
    command = [sys.executable, "-W", "ignore", script, folders]
    settings = {**os.environ, "HF_HUB_OFFLINE": "1"}
    settings.pop("PYTHONPATH", None)
    process = subprocess.run(command, cwd=folders, env=settings, text=True, capture_output=True)
    assert process.returncode == 0, process.stderr
    found = dict(line.split() for line in process.stdout.splitlines())
    assert {name: float(number) for name, number in found.items() if float(number) > 1e-5} == {}
    assert set(found) == set(CASES)


@pytest.mark.parametrize(
    "name", ["igpt", "mae", "darl", "gvp", "tuned", "mp3_timm", "mean_timm", "givt_own"]
)
def test_export_import_round_trip(folders, build_paper, name, capsys):
    run = make_run(folders / f"{name}-first", CASES[name], build_paper)
    out, back = folders / f"{name}-out", folders / f"{name}-back"
    form = "timm" if name.endswith("_timm") else "huggingface"
    assert main(["export", str(run.folder), "--to", form, str(out)]) == 0
    assert main(["import", "huggingface", str(out), str(back)]) == 0
    if name == "givt_own":
        weights, again = (
            dict(megavis.load(f).inference.layers.named_parameters()) for f in (out, back)
        )
        assert all(torch.equal(again[key], tensor) for key, tensor in weights.items())
    else:
        assert "parameters from" in capsys.readouterr().out
        again = folders / f"{name}-again"
        assert main(["export", str(back), "--to", form, str(again)]) == 0
        expected, found = (
            {key.removeprefix("vit."): t for key, t in load_file(f / "model.safetensors").items()}
            for f in (out, again)
        )
        # A run of a ViT has a classifier, from zero if the folder had none.
        added = {key.partition(".")[0] for key in found.keys() - expected.keys()}
        assert added <= {"classifier", "head"}
        assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


@pytest.mark.parametrize(
    ("changed", "form", "sentence"),
    [
        ({"read_out": "mean"}, "huggingface", "from the class token; finetune.read_out is mean"),
        ({"read_out": "last"}, "timm", "the mean of all tokens; finetune.read_out is last"),
        ({"layer": 1}, "timm", "from the last norm; finetune.layer or model.features chooses"),
        ({"linear_evaluation": True}, "timm", "finetune.standardize is true"),
        ({"linear_evaluation": True, "average": 2}, "timm", "finetune.concatenate or average"),
    ],
)
def test_a_classifier_is_never_left_out(tmp_path, build_paper, capsys, changed, form, sentence):
    """What neither library's classifier computes is a folder of megavis, or refused."""
    text = tiny(
        "{name: mp3, patch_size: 4}",
        model=VIT,
        validates=True,
        finetune={**TUNED, **changed},
        training={"validate_every": 1},
    )
    run, out = make_run(tmp_path / "run", text, build_paper), tmp_path / "out"
    code = main(["export", str(run.folder), "--to", form, str(out)])
    if form == "timm":
        assert code == 2
        assert sentence in capsys.readouterr().err
        return
    card = (out / "README.md").read_text()
    assert sentence in card
    assert "pipeline_tag: image-classification" in card
    images = photographs(2, 16)
    assert torch.equal(megavis.load(out, device="cpu").outputs(images), run.outputs(images))


def test_exported_classifiers_name_their_classes(folders, build_paper):
    run = make_run(folders / "named-run", CASES["tuned_timm"], build_paper)
    manifest = read_manifest(run.checkpoint)
    write_manifest(run.checkpoint, manifest.model_copy(update={"classes": ("ant", "bee", "owl")}))
    settings = {}
    for form in ("huggingface", "timm"):
        assert main(["export", str(run.folder), "--to", form, str(folders / f"named-{form}")]) == 0
        settings[form] = json.loads((folders / f"named-{form}" / "config.json").read_text())
    config = transformers.AutoConfig.from_pretrained(folders / "named-huggingface")
    assert config.id2label == {0: "ant", 1: "bee", 2: "owl"}
    assert config.label2id == {"ant": 0, "bee": 1, "owl": 2}
    assert settings["timm"]["label_names"] == ["ant", "bee", "owl"]


def test_model_card(folders, build_paper):
    run = make_run(folders / "card-run", CASES["rotary_own"], build_paper)
    (run.folder / "metrics.jsonl").write_text('{"step": 0, "loss": 1.5}\n')
    assert main(["export", str(run.folder), "--to", "huggingface", str(folders / "card")]) == 0
    card = (folders / "card" / "README.md").read_text()
    head = card.split("---\n")[1]
    assert "library_name: megavis" in head
    assert "license: unknown" in head
    assert "| loss | 1.5 at step 0 |" in card
    assert "model.positions is rope_2d" in card
    assert "A run of `darl`, trained with megavis" in card
    assert (
        "patches of 4 × 4 pixels in raster order. A patch has 48 numbers in the order row" in card
    )
    assert json.loads((folders / "card" / "config.json").read_text())["paper"] == "darl"


def test_a_card_of_imported_weights_claims_no_training(tmp_path, build_paper):
    run = make_run(tmp_path / "run", CASES["tuned_timm"], build_paper)
    first, back, again = (tmp_path / name for name in ("out", "back", "again"))
    assert main(["export", str(run.folder), "--to", "timm", str(first)]) == 0
    assert main(["import", "timm", str(first), str(back)]) == 0
    assert main(["export", str(back), "--to", "huggingface", str(again)]) == 0
    card = (again / "README.md").read_text()
    assert "Released weights, which megavis has not trained, as a run of `darl`" in card
    assert "none with megavis; these keys of the config are for further training" in card
    digest = hashlib.sha256((first / "model.safetensors").read_bytes()).hexdigest()
    assert f"They came from out; model.safetensors has the SHA-256 {digest}.\n" in card
    assert str(tmp_path) not in card
    for claim in ("trained with megavis", "tuned with megavis", "It has seen", "learning rate 0.0"):
        assert claim not in card


def test_an_exported_folder_of_megavis_keeps_the_origin(tmp_path, build_paper):
    run = make_run(tmp_path / "run", CASES["order_own"], build_paper)
    checkpoint = latest_checkpoint(run.folder)
    imported = read_manifest(checkpoint).model_copy(update={"origin": "a released file"})
    write_manifest(checkpoint, imported)
    out, back = tmp_path / "out", tmp_path / "back"
    assert main(["export", str(run.folder), "--to", "huggingface", str(out)]) == 0
    assert "They came from a released file." in (out / "README.md").read_text()
    assert main(["import", "huggingface", str(out), str(back)]) == 0
    assert read_manifest(latest_checkpoint(back)).origin == "a released file"


def test_the_origin_of_a_folder_of_the_hubs_cache_is_its_repository(tmp_path):
    folder = tmp_path / "models--facebook--vit-mae-base" / "snapshots" / "25b1"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    # What an import reads, and the same weights in a format that it does not.
    (folder / "model.safetensors").write_bytes(b"abc")
    (folder / "pytorch_model.bin").write_bytes(b"pickled")
    # FIPS 180-4, one-block message sample.
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    expected = f"facebook/vit-mae-base at commit 25b1; model.safetensors has the SHA-256 {digest}"
    assert origin_of(folder) == expected
    assert origin_of(folder / "model.safetensors") == expected


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (CASES["givt_own"], "its ViTs read patches of pixels, its ImageGPT is a run of igpt"),
        (CASES["order_own"], "ImageGPT predicts pixels in raster order; this run does not"),
        (
            tiny("{name: igpt, vocabulary_size: 32, mode: bert}", data={"image_size": 4}),
            "ImageGPT is autoregressive; objective.mode is bert",
        ),
        (
            tiny(f"{{name: mae, patch_size: 4, {DECODER}}}", model={**VIT, "qk_norm": True}),
            "ViTMAE does not normalise queries and keys; model.qk_norm is true",
        ),
        (CASES["groups_own"], "a ViT adds its positions; model.positions is rope_2d"),
    ],
    ids=["givt", "igpt", "bert", "mae", "gvp"],
)
def test_the_reason_is_that_of_the_nearest_class(tmp_path, build_paper, capsys, text, why):
    run = make_run(tmp_path / "run", text, build_paper)
    assert main(["export", str(run.folder), "--to", "huggingface", str(tmp_path / "out")]) == 0
    assert f"transformers has no class for it: {why}" in limits_of(tmp_path / "out")
    assert f"transformers has no class for it: {why}" in capsys.readouterr().out


def test_nothing_is_written_into_an_exported_folder(tmp_path, build_paper, capsys):
    run = make_run(tmp_path / "run", CASES["order_own"], build_paper)
    out = tmp_path / "out"
    assert main(["export", str(run.folder), "--to", "huggingface", str(out)]) == 0
    before = sorted(out.rglob("*"))
    for words in (
        ["sample", str(out)],
        ["probe", str(out), "--out", str(tmp_path / "probe.json")],
        ["figure", "depth", str(out)],
    ):
        assert main(words) == 2
        assert f"import huggingface {out} runs/NAME" in capsys.readouterr().err, words
    assert sorted(out.rglob("*")) == before


def test_a_folder_of_the_cache_is_named(tmp_path, capsys):
    outer = tmp_path / "models--facebook--vit-mae-base"
    inner = outer / "snapshots" / "0123"
    inner.mkdir(parents=True)
    for form in ("huggingface", "imagegpt", "timm"):
        assert main(["import", form, str(outer), str(tmp_path / "run")]) == 2
        said = f"{outer}: a folder of the Hub's cache; the files are in {inner}\n"
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "is_causal"),
    [
        ("darl", True),
        ("gvp", True),
        ("gvp_timm", True),
        ("mp3_timm", False),
        ("mae_timm", False),
        ("tuned", False),
    ],
)
def test_a_card_says_when_tokens_saw_less_in_pretraining(folders, build_paper, name, is_causal):
    paper, _, form = name.partition("_")
    case = name if name in CASES else paper
    run = make_run(folders / f"{name}-seen", CASES[case], build_paper)
    out = folders / f"{name}-seen-out"
    assert main(["export", str(run.folder), "--to", form or "huggingface", str(out)]) == 0
    limits = limits_of(out)
    assert ("each token attended only to earlier tokens" in limits) == is_causal


def limits_of(folder):
    return (folder / "README.md").read_text().split("## Limits\n")[1]


@pytest.mark.parametrize(
    ("form", "keys", "sentences"),
    [
        ("huggingface", "", ["attended only to 4 of the 16 patches, drawn for each image"]),
        ("timm", "", ["attended only to 4 of the 16 patches, drawn for each image"]),
        ("timm", ", mask_ratio: 0", []),
        (
            "huggingface",
            ", mask_ratio: 0.5, given_ratio: 0.25",
            ["attended only to 8 of the 16 patches", "only 4 of the 16 patches had a position"],
        ),
    ],
)
def test_a_card_says_what_patches_of_mp3_saw_in_pretraining(
    tmp_path, build_paper, form, keys, sentences
):
    model = {**VIT, "positions": "sincos"} if "given" in keys else VIT
    text = tiny(f"{{name: mp3, patch_size: 4{keys}}}", model=model)
    run = make_run(tmp_path / "run", text, build_paper)
    assert main(["export", str(run.folder), "--to", form, str(tmp_path / "out")]) == 0
    limits = limits_of(tmp_path / "out")
    assert limits.count("In pretraining") == len(sentences)
    assert all(sentence in limits for sentence in sentences)


@pytest.mark.parametrize(
    ("name", "form", "squashes"),
    [
        ("igpt", "huggingface", True),
        ("mae", "huggingface", True),
        ("gvp", "huggingface", True),
        ("tuned", "huggingface", True),
        ("tuned", "timm", False),
        ("rotary_own", "huggingface", False),
    ],
)
def test_a_card_says_that_the_image_processor_squashes(tmp_path, build_paper, name, form, squashes):
    run = make_run(tmp_path / "run", CASES[name], build_paper)
    if name == "igpt":
        Palette(np.linspace(-1, 1, 96, dtype=np.float32).reshape(32, 3)).save(
            run.folder / "palette.npy"
        )
    assert main(["export", str(run.folder), "--to", form, str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "preprocessor_config.json").exists() == squashes
    assert ("to a square without keeping its proportions" in limits_of(tmp_path / "out")) == (
        squashes
    )


def test_a_card_without_an_image_processor_says_nothing_of_it(tmp_path, build_paper):
    run = make_run(tmp_path / "run", CASES["igpt"], build_paper)
    assert main(["export", str(run.folder), "--to", "huggingface", str(tmp_path / "out")]) == 0
    assert not (tmp_path / "out" / "preprocessor_config.json").exists()
    assert "image processor" not in limits_of(tmp_path / "out")


@pytest.mark.once
def test_the_image_processor_squashes_as_the_card_says(tmp_path, build_paper):
    """A wide photograph: another picture than the centre that megavis reads; a square: the same."""
    run = make_run(tmp_path / "run", CASES["gvp"], build_paper)
    assert main(["export", str(run.folder), "--to", "huggingface", str(tmp_path / "out")]) == 0
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "out", backend="pil")
    wide = np.zeros((16, 48, 3), dtype=np.uint8)
    wide[:, 16:32] = 255
    seen = processor(Image.fromarray(wide), return_tensors="pt").pixel_values
    assert not torch.allclose(
        seen,
        standardize(centre := torch.from_numpy(wide[None, :, 16:32])).permute(0, 3, 1, 2),
        atol=1e-3,
    )
    square = processor(Image.fromarray(centre[0].numpy()), return_tensors="pt").pixel_values
    grey = processor(Image.fromarray(wide[..., 0]), return_tensors="pt").pixel_values
    assert torch.equal(grey, seen)
    assert torch.allclose(square, standardize(centre).permute(0, 3, 1, 2), atol=1e-3)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("igpt", "a ViT reads patches of pixels"),
        ("rotary_own", "model.positions is rope_2d"),
    ],
)
def test_timm_export_needs_a_vit(folders, build_paper, capsys, name, message):
    run = make_run(folders / f"{name}-other", CASES[name], build_paper)
    assert main(["export", str(run.folder), "--to", "timm", str(folders / f"{name}-no")]) == 2
    assert message in capsys.readouterr().err
    assert not (folders / f"{name}-no").exists()


def test_unknown_model_type_is_refused(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    assert main(["import", "huggingface", str(tmp_path), str(tmp_path / "run")]) == 2
    assert "model_type is 'bert'" in capsys.readouterr().err


ALONE = {
    "its rows are normalised before the first block": tiny(
        "{name: mar, latent_channels: 4, downsampling: 4, num_classes: 3, class_rows: 2,"
        " decoder: {num_layers: 1, hidden_size: 8, num_attention_heads: 2}, denoiser_width: 8}",
        model=VIT,
    ),
    "rows that ask for a place stand between its tokens": tiny(
        "{name: randar, patch_size: 4, vocabulary_size: 12, num_classes: 3}",
        model={"normalization": "rms_norm", "qk_norm": False},
    ),
    "its rows hold half of a token's embedding": tiny(
        "{name: givt_maskgit, latent_channels: 4, downsampling: 4, num_classes: 3}"
    ),
}


@pytest.mark.parametrize("reason", ALONE)
def test_rows_that_are_no_embedded_tokens_are_opened_by_megavis_alone(
    tmp_path, build_paper, reason
):
    run = make_run(tmp_path / "run", ALONE[reason], build_paper)
    words = ["export", str(run.folder), "--to", "huggingface", str(tmp_path / "out")]
    assert main(words) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"opens it: {reason}" in card
    again = megavis.load(tmp_path / "out", device="cpu")
    has_ids = run.config.objective.name == "randar"
    tokens = torch.arange(32).view(2, 16) % 12 if has_ids else torch.randn(2, 4, 4, 4)
    assert torch.equal(again.features(tokens), run.features(tokens))


def test_rows_without_any_token_open_without_megavis(tmp_path, build_paper):
    """The only row of a single token asks for it."""
    one = tiny("{name: givt, latent_channels: 4, downsampling: 16, num_classes: 3}")
    run = make_run(tmp_path / "run", one, build_paper)
    words = ["export", str(run.folder), "--to", "huggingface", str(tmp_path / "out")]
    assert main(words) == 0
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    assert settings["plain"]["first"] == 1
