"""Each folder of `data.train` may have its own crop (iGPT, section 3.1: web images have none)."""

from __future__ import annotations

import io
import textwrap

import numpy as np
import pytest
from PIL import Image
from written_shards import write_payloads

from megavis.config.errors import UserError
from megavis.config.load import dump_config, load_config
from megavis.data.codecs.transforms import evaluation_transform
from megavis.data.format.manifest import Preparation
from megavis.data.loading.dataset import ShardDataset
from megavis.data.loading.opening import ShardOpener

pytestmark = pytest.mark.once


def open_training_data(config):
    """Open all samples, whatever the paper."""
    return ShardOpener(
        config, None, lambda manifest: (), False, lambda manifest: ()
    ).training_data()


def write_images(folder, *, brightness):
    """Write four photographs of 4:3 as JPEG shards, with a ramp of another colour each."""
    files = []
    for number in range(4):
        ramp = np.linspace(0, brightness, 400)[None, :, None].repeat(300, 0).repeat(3, 2)
        ramp[..., number % 3] = brightness
        file = io.BytesIO()
        Image.fromarray(ramp.astype(np.uint8)).save(file, "JPEG", quality=95)
        files.append(file.getvalue())
    write_payloads(
        folder,
        files,
        suffix="jpg",
        kind="jpeg",
        image_size=None,
        preparation=Preparation(resize="none", crop="none", decoders={}),
    )


@pytest.fixture
def read(tmp_path):
    """Return a function that reads a config whose `data` section is given."""
    for name, brightness in (("imagenet", 100), ("web", 250)):
        write_images(tmp_path / name, brightness=brightness)

    def read_config(data):
        text = f"""
            name: small
            objective: {{name: igpt, mode: autoregressive}}
            model: {{num_layers: 1, hidden_size: 8, num_attention_heads: 1}}
            optimizer: {{learning_rate: 1e-3}}
            training: {{steps: 10, batch_size: 4}}
            data: {{image_size: 32, {data.format(folder=tmp_path)}}}
            """
        path = tmp_path / "config.yaml"
        path.write_text(textwrap.dedent(text))
        return load_config(path)

    return read_config


SOURCES = (
    "train: [{{path: {folder}/imagenet, weight: 1}},"
    " {{path: {folder}/web, weight: 1, crop: %s}}], crop: %s"
)


@pytest.mark.parametrize("crop", ["scaled", "random_resized", "inception"])
def test_web_images_are_read_as_held_out_ones(read, crop, tmp_path):
    """`crop: center` of a source is validation's crop; the others keep `data.crop`."""
    loaded = read(SOURCES % ("center", crop))
    blend = open_training_data(loaded.config)
    held_out = evaluation_transform(loaded.config.data)
    plain = ShardDataset(tmp_path / "web", held_out).read(np.arange(4))[0]
    for epoch in range(3):
        web = blend.read(np.arange(4, 8), positions=100 * epoch + np.arange(4))[0]
        assert (web == plain).all()
    first, again = (blend.read(np.arange(4), positions=p + np.arange(4))[0] for p in (0, 100))
    assert (first != again).any()
    centres = ShardDataset(tmp_path / "imagenet", held_out).read(np.arange(4))[0]
    assert (first != centres).any()


def test_either_source_may_be_the_random_one(read):
    loaded = read(SOURCES % ("scaled", "center"))
    blend = open_training_data(loaded.config)
    one, two = (blend.read(np.arange(8), positions=p + np.arange(8))[0] for p in (0, 100))
    assert (one[:4] == two[:4]).all()
    assert (one[4:] != two[4:]).any()


def test_sources_with_the_default_crop_are_as_before(read):
    loaded = read(SOURCES.replace(", crop: %s}}]", "}}]") % "scaled")
    given = read(SOURCES % ("scaled", "scaled"))
    for positions in (np.arange(8), 90 + np.arange(8)):
        one, two = (
            open_training_data(each.config).read(np.arange(8), positions=positions)[0]
            for each in (loaded, given)
        )
        assert (one == two).all()


def test_crops_round_trip(read, tmp_path):
    config = read(SOURCES % ("center", "scaled")).config
    assert [source.crop for source in config.data.train] == [None, "center"]
    path = tmp_path / "again.yaml"
    path.write_text(dump_config(config))
    assert load_config(path).config == config


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (SOURCES % ("window", "scaled"), "data.train.1.crop"),
        (SOURCES % ("whole", "scaled"), "data.train.1.crop"),
        (SOURCES % ("center", "window"), "data.train.1.crop: .* data.crop window"),
        (SOURCES % ("scaled", "center") + ", crop_size: 300", "data.crop_size: 300 is too large"),
        (SOURCES.replace("crop: %s}}]", "croq: %s}}]") % ("a", "none"), "data.train.1.croq"),
    ],
)
def test_wrong_crops_are_refused(read, data, message):
    with pytest.raises(UserError, match=message):
        read(data)


def test_a_crop_that_shards_cannot_have_is_refused_by_its_key(read):
    """JPEG files of many sizes cannot be read as stored."""
    loaded = read(SOURCES % ("none", "scaled"))
    with pytest.raises(UserError, match=r"data\.train\.1\.path: .*set data\.train\.1\.crop to"):
        open_training_data(loaded.config)
