"""What loader threads share with each other, and with the thread that trains."""

from __future__ import annotations

import io
import warnings
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import numpy as np
import pytest
from PIL import Image
from shard_folder import write_folder

from megavis.data.codecs.jpeg import decode_rgb
from megavis.data.loading.blended_dataset import BlendedDataset
from megavis.data.loading.dataset import ShardDataset

pytestmark = pytest.mark.once


def png_that_pillow_warns_about():
    """A palette whose entries each have an opacity."""
    image = Image.new("P", (2, 2))
    image.putpalette([255, 0, 0] + [0] * 765)
    file = io.BytesIO()
    image.save(file, format="png", transparency=bytes(range(256)))
    return file.getvalue()


def test_decoding_in_threads_leaves_the_warnings_of_others_alone(monkeypatch):
    """Of two threads inside `catch_warnings`, the last to leave keeps the other's filters."""
    content, opened = png_that_pillow_warns_about(), Image.open
    first_is_inside, second_is_inside, first_has_left = Event(), Event(), Event()

    def open_in_turn(*args, **options):
        if not first_is_inside.is_set():
            first_is_inside.set()
            second_is_inside.wait(10)
        else:
            second_is_inside.set()
            first_has_left.wait(10)
        return opened(*args, **options)

    monkeypatch.setattr(Image, "open", open_in_turn)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(decode_rgb, content)
        first_is_inside.wait(10)
        second = pool.submit(decode_rgb, content)
        assert first.result()[0, 0].tolist() == [255, 0, 0]
        first_has_left.set()
        assert second.result()[0, 0].tolist() == [255, 0, 0]
    with pytest.warns(RuntimeWarning, match="still heard"):
        warnings.warn("still heard", RuntimeWarning, stacklevel=1)
    assert ("ignore", None, Warning, None, 0) not in warnings.filters


@pytest.mark.parametrize("action", ["error", "always"])
def test_what_pillow_warns_about_is_decoded_under_any_filter(action, recwarn):
    for _ in range(2):  # set by whoever decodes, and then by somebody else
        decode_rgb(png_that_pillow_warns_about())
        warnings.simplefilter(action)
    assert decode_rgb(png_that_pillow_warns_about()).shape == (2, 2, 3)
    assert not recwarn.list


def test_the_count_of_replaced_samples_is_a_copy(tmp_path):
    """Loader threads add to the original while the caller goes through it."""
    parts = []
    for name in ("one", "two"):
        tokens = np.ones((3, 16), int)
        tokens[1, 5] = 300
        write_folder(
            tmp_path / name, tokens=tokens, labels=[-1] * 3, vocabulary=200, class_names=[]
        )
        parts.append(ShardDataset(tmp_path / name))
    blend = BlendedDataset(parts, [1, 1])
    before = parts[0].skipped
    blend.read(np.arange(6))
    assert not before
    assert blend.skipped == {"token beyond the vocabulary": 2}
