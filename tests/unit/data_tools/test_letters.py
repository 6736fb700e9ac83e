"""Letters: determinism, disjoint fonts, sizes, colours and balance."""

import itertools
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from PIL import Image

from data_tools.__main__ import main
from data_tools.fonts import FONTS, font_path, glyph, licence_of
from data_tools.letters import (
    COLORS,
    LEAST_CONTRAST,
    LetterRecipe,
    draw,
    letter_and_font,
    luminance,
)

pytestmark = pytest.mark.once

COUNTS = {"train": 60, "selection": 21, "validation": 14}
SMALL = ["--images", "60", "--selection-images", "21", "--validation-images", "14"]


def recipe(**changed):
    plain = {"size": 12, "letters": "ABCDEFG", "glyph": (85, 92), "colors": "eight"}
    return LetterRecipe(**{**plain, "clutter": "none", "seed": 0, **changed})


def read(folder):
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def images(made, *, part="train", count=60):
    return [draw(made, part, number) for number in range(count)]


@pytest.mark.parametrize("clutter", ["none", "photographs"])
def test_letters_are_deterministic(tmp_path, capsys, clutter):
    """Also with other numbers of workers; a folder of other options is not overwritten."""
    options = [*SMALL, "--letters", "ABCDEFG", "--clutter", clutter]
    assert main(["letters", str(tmp_path / "a"), *options]) == 0
    made = read(tmp_path / "a")
    assert main(["letters", str(tmp_path / "b"), *options, "--workers", "2"]) == 0
    assert read(tmp_path / "b") == made
    capsys.readouterr()
    assert main(["letters", str(tmp_path / "a"), *options]) == 0
    assert "already" in capsys.readouterr().out
    assert main(["letters", str(tmp_path / "a"), *options, "--seed", "1"]) == 2
    assert "choose another folder" in capsys.readouterr().err
    assert read(tmp_path / "a") == made
    assert main(["letters", str(tmp_path / "c"), *options, "--seed", "1"]) == 0
    assert read(tmp_path / "c") != made


def test_classes_are_balanced_and_fonts_listed(tmp_path, capsys):
    assert main(["letters", str(tmp_path), *SMALL, "--letters", "GFEDCBA"]) == 0
    assert "60 train (14 fonts), 21 selection (3 fonts), 14 validation" in capsys.readouterr().out
    for part, count in COUNTS.items():
        files = list((tmp_path / part).rglob("*.png"))
        assert len(files) == count
        each = Counter(path.parent.name for path in files)
        assert set(each) == set("ABCDEFG")
        assert max(each.values()) - min(each.values()) <= 1
        fonts = Counter(path.stem.split("-", 1)[1] for path in files)
        assert set(fonts) <= set(FONTS[part])
        assert {Image.open(path).size for path in files} == {(12, 12)}
    text = (tmp_path / "FONTS.txt").read_text()
    assert all(f"{font}: {licence_of(font)}" in text for font in itertools.chain(*FONTS.values()))
    rows = [min(count // 7, len(FONTS[part])) for part, count in COUNTS.items()]
    assert Image.open(tmp_path / "sheet.png").size == (7 * 26 + 2, sum(rows) * 26 + 2)


def test_splits_share_no_font():
    assert all(not set(a) & set(b) for a, b in itertools.combinations(FONTS.values(), 2))
    contents = [font_path(font).read_bytes() for font in itertools.chain(*FONTS.values())]
    assert len(set(contents)) == len(contents)


def test_fonts_take_turns():
    named = [letter_and_font(recipe(), "selection", number) for number in range(21)]
    assert Counter(named) == Counter(itertools.product("ABCDEFG", FONTS["selection"]))


@pytest.mark.parametrize(("size", "glyph_range"), [(12, (85, 92)), (32, (60, 90)), (31, (50, 50))])
def test_glyph_size(size, glyph_range):
    """Check the larger side of the glyph's bounding box, and its centre."""
    made = recipe(size=size, glyph=glyph_range, letters="EHIMX", colors="black-white")
    for image in images(made, count=140):
        ink = (
            image[..., 0]
            != np.bincount(
                np.concatenate([image[0, :, 0], image[-1, :, 0]]), minlength=256
            ).argmax()
        )
        sides = [np.flatnonzero(ink.any(axis)).tolist() for axis in (0, 1)]
        larger = max(places[-1] - places[0] + 1 for places in sides)
        assert size * glyph_range[0] / 100 - 1 <= larger <= size * glyph_range[1] / 100 + 2
        centres = [(places[-1] + places[0] + 1) / 2 for places in sides]
        assert all(abs(centre - size / 2) <= 1.5 for centre in centres)


def test_pixels_are_area_averages():
    """Compare with a loop in exact fractions over the glyph on the fine grid."""
    made = recipe(size=8, letters="R", glyph=(100, 100), colors="black-white")
    image = draw(made, "train", 0)
    random = np.random.default_rng([0, 0, 0])
    share, stretch = int(random.integers(1000, 1001)), int(random.integers(950, 1051))
    assert share == 1000
    source = glyph("DejaVuSans", "R", 96)
    rows, columns = source.shape
    assert columns * stretch < rows * 1000, "an R is taller than wide"
    width = 64 * stretch * columns // (1000 * rows)
    random.integers(-4, 5)  # unused: the glyph is as tall as the image
    left = min(max((64 - width) // 2 + int(random.integers(-4, 5)), 0), 64 - width)
    ground = COLORS["black-white"][int(random.integers(2))][0]
    ink = 255 - ground
    for y, x in itertools.product(range(8), repeat=2):
        total = Fraction(0)
        for fine_y, fine_x in itertools.product(range(8 * y, 8 * y + 8), range(8 * x, 8 * x + 8)):
            inside = left <= fine_x < left + width
            place = (
                (2 * fine_y + 1) * rows // 128,
                (2 * (fine_x - left) + 1) * columns // (2 * width),
            )
            cover = Fraction(int(source[place]), 255) if inside else 0
            total += ground + (ink - ground) * cover
        assert abs(int(image[y, x, 0]) - total / 64) <= Fraction(1, 2)


@pytest.mark.parametrize("colors", ["eight", "black-white", "any"])
def test_contrast(colors):
    seen = set()
    for image in images(recipe(colors=colors, letters="I", size=64), count=84):
        # The two most frequent colours of an I are ground and ink.
        flat, counts = np.unique(image.reshape(-1, 3), axis=0, return_counts=True)
        first, second = flat[np.argsort(-counts)[:2]].tolist()
        assert abs(luminance(first) - luminance(second)) >= LEAST_CONTRAST
        seen |= {tuple(first), tuple(second)}
    if colors == "any":
        assert len(seen) > 100
    else:
        assert seen == set(COLORS[colors])


def test_luminance_matches_pillow():
    for color in itertools.chain(*COLORS.values(), [(1, 2, 3), (200, 201, 13)]):
        grey = Image.new("RGB", (1, 1), color).convert("L").getpixel((0, 0))
        assert abs(luminance(color) - grey) <= 1


def test_clutter_background():
    image = draw(recipe(clutter="photographs", size=32), "train", 0)
    plain = draw(recipe(size=32), "train", 0)
    border = np.ones((32, 32), bool)
    border[1:-1, 1:-1] = False
    assert len(np.unique(plain[border], axis=0)) == 1
    assert len(np.unique(image[border], axis=0)) > 30


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--letters", "ABA"], "'ABA' is neither a number from 1 to 26 nor different capital"),
        (["--letters", "27"], "'27' is neither"),
        (["--letters", "abc"], "'abc' is neither"),
        (["--glyph", "90", "80"], "--glyph 90 80: give the smaller one first"),
        (["--glyph", "90", "101"], "--glyph 90 101: give the smaller one first, and at most 100"),
        (["--selection-images", "25"], "25 selection images of 26 letters: give at least one"),
        (["--size", "0"], "'0' is not a whole number of 1 or more"),
    ],
)
def test_invalid_options(tmp_path, capsys, options, message):
    assert main(["letters", str(tmp_path / "out"), *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_missing_font_is_named(monkeypatch, tmp_path):
    from megavis.config.errors import UserError

    monkeypatch.setattr("matplotlib.get_data_path", lambda: str(tmp_path))
    with pytest.raises(UserError, match="does not ship the font cmr10"):
        font_path("cmr10")
