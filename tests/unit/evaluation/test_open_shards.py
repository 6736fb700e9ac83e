"""Images for the evaluation of a run: what is said if they do not fit it."""

from types import SimpleNamespace

import numpy as np
import pytest
from image_files import encoded
from shard_folder import write_folder
from written_shards import write_payloads

from megavis.commands.opening import open_shards
from megavis.config.errors import UserError
from megavis.config.section import DataConfig
from megavis.tokenizers.palette import Palette


def opened_by(folder, colors=None, **data):
    """Open a folder for a run with a section `data`."""
    config = SimpleNamespace(data=DataConfig(train="shards", image_size=2, **data))
    return open_shards(SimpleNamespace(config=config, palette=colors), str(folder))


def test_a_run_without_a_crop_reads_images_of_its_size(tmp_path):
    image = encoded(np.zeros((3, 3, 3), np.uint8))
    write_payloads(tmp_path, [image], suffix="jpg", kind="jpeg", image_size=3)
    message = "3x3 pixels, not 2x2; this run reads images stored at 2x2 pixels$"
    with pytest.raises(UserError, match=message):
        opened_by(tmp_path, crop="none")


def test_a_run_that_crops_reads_jpeg_files(tmp_path):
    """The message named `data.crop`, which is the run's."""
    write_folder(tmp_path, tokens=np.zeros((1, 9), int), labels=[0], class_names=["a"])
    palette = Palette.load(tmp_path / "palette.npy")
    message = "cannot be resized; this run reads images that it crops to 2x2 pixels, such as JPEG"
    with pytest.raises(UserError, match=message):
        opened_by(tmp_path, palette, crop="center", palette="palette.npy")
