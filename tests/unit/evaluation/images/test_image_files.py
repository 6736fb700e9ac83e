"""Reading images from NPZ files, folders and shards."""

import numpy as np
import pytest
from image_files import encoded
from inception_weights import random_images
from PIL import Image
from written_shards import write_payloads

from megavis.config.errors import UserError
from megavis.data.loading.dataset import ShardDataset
from megavis.evaluation.images.image_files import image_batches, open_images
from megavis.tokenizers.palette import Palette

pytestmark = pytest.mark.once

IMAGES = random_images(11, 20).numpy()


def all_of(images, **options):
    count = options.pop("num_images", len(images))
    batches = image_batches(images, num_images=count, batch_size=4)
    return np.concatenate([batch.numpy() for batch in batches])


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_read_npz(tmp_path, save):
    save(tmp_path / "images.npz", labels=np.arange(11), arr_0=IMAGES)
    images = open_images(tmp_path / "images.npz")
    assert np.array_equal(all_of(images), IMAGES)
    few = all_of(open_images(tmp_path / "images.npz"), num_images=3)
    assert np.array_equal(few, IMAGES[[0, 3, 7]])


def test_folder_is_read_in_name_order_and_resized(tmp_path):
    (tmp_path / "b").mkdir()
    for number, name in enumerate(("b/2.png", "b/1.png", "a.png")):
        Image.fromarray(IMAGES[number]).save(tmp_path / name)
    images = open_images(tmp_path)
    assert np.array_equal(all_of(images), IMAGES[[2, 1, 0]])
    digest = images.sha256
    Image.fromarray(IMAGES[5][:, :14]).save(tmp_path / "b/1.png")
    assert open_images(tmp_path).sha256 != digest
    with pytest.raises(UserError, match="1.png has 20×14 pixels, others .* 20×20; give --image-"):
        all_of(open_images(tmp_path))
    assert all_of(open_images(tmp_path, image_size=10)).shape == (3, 10, 10, 3)


def test_no_image_of_a_folder_is_passed_over(tmp_path):
    """Metrics of some of the images would look like those of all."""
    for number, name in enumerate(("a.png", "b.jfif", "c.JPE")):
        form = "PNG" if number == 0 else "JPEG"
        Image.fromarray(IMAGES[number]).save(tmp_path / name, form, quality=100)
    (tmp_path / "notes.txt").write_text("no image")
    assert len(open_images(tmp_path)) == 3
    Image.fromarray(IMAGES[3]).save(tmp_path / "d.webp")
    with pytest.raises(
        UserError, match=r"d\.webp is an image, and only PNG and JPEG files are read"
    ):
        open_images(tmp_path)
    Image.fromarray(IMAGES[4]).save(tmp_path / "e.bmp")
    with pytest.raises(UserError, match=r"d\.webp and 1 more are images, and only PNG and JPEG"):
        open_images(tmp_path)


def test_read_jpeg_and_palette_shards(shards, image_shards):
    folder = image_shards / "validation"
    assert all_of(open_images(folder, image_size=8)).shape[1:] == (8, 8, 3)
    found = all_of(open_images(shards / "validation"))
    ids, _ = ShardDataset(shards / "validation").read(np.arange(len(found)))
    colours = Palette.load(shards / "palette.npy").decode(ids)
    assert np.array_equal(found.reshape(colours.shape), colours)
    with pytest.raises(UserError, match="ids of images of 8², as they are"):
        open_images(shards / "validation", image_size=16)


def test_jpeg_shards_of_many_sizes_are_cropped_to_one(tmp_path):
    images = [encoded(image[:height]) for image, height in zip(IMAGES, (20, 16), strict=False)]
    write_payloads(tmp_path, images, suffix="jpg", kind="jpeg", image_size=None)
    with pytest.raises(UserError, match="several sizes; give --image-size"):
        open_images(tmp_path)
    assert all_of(open_images(tmp_path, image_size=8)).shape == (2, 8, 8, 3)


def test_sources_without_images_raise(tmp_path):
    np.savez(tmp_path / "floats.npz", arr_0=IMAGES / 255.0)
    np.savez(tmp_path / "names.npz", images=IMAGES)
    (tmp_path / "text.npz").write_text("no archive")
    reasons = {
        "floats.npz": r"float64 \[11, 20, 20, 3\], not uint8",
        "names.npz": "no array arr_0 of images",
        "text.npz": "no array arr_0 of images",
        "absent.npz": "does not exist",
        ".": "no PNG or JPEG files, no shards and no run",
    }
    for name, reason in reasons.items():
        with pytest.raises(UserError, match=reason):
            open_images(tmp_path / name)
