"""The fonts of `letters`: matplotlib's, divided among the splits of a data set.

Licences, whose texts come with matplotlib and its sources, and which do not restrict images of
letters: DejaVu: Bitstream Vera's and Arev's (LICENSE_DEJAVU with the fonts). STIX: STIX Font
License of 2010 (LICENSE_STIX). cm: Computer Modern, BaKoMa Fonts Licence (LICENSE_BAKOMA).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from megavis.config.errors import UserError

FONTS = {
    "train": (
        "DejaVuSans",
        "DejaVuSans-Bold",
        "DejaVuSans-Oblique",
        "DejaVuSansMono",
        "DejaVuSansMono-Bold",
        "DejaVuSansMono-Oblique",
        "DejaVuSerif",
        "DejaVuSerif-Bold",
        "DejaVuSerif-Italic",
        "DejaVuSerif-BoldItalic",
        "cmr10",
        "cmb10",
        "cmti10",
        "cmtt10",
    ),
    "selection": ("DejaVuSans-BoldOblique", "DejaVuSansMono-BoldOblique", "cmmi10"),
    "validation": (
        "STIXGeneral",
        "STIXGeneralBol",
        "STIXGeneralItalic",
        "STIXGeneralBolIta",
        "cmss10",
    ),
}
"""Fonts of each part; the parts are disjoint."""

LICENCES = {
    "DejaVu": "Bitstream Vera and Arev fonts' licences (matplotlib: LICENSE_DEJAVU)",
    "STIX": "STIX Font License of 2010 (matplotlib: LICENSE_STIX)",
    "cm": "BaKoMa Fonts Licence (matplotlib: LICENSE_BAKOMA)",
}
"""Licence of each family, by prefix of its font names."""


def licence_of(font: str) -> str:
    """Return the name of a font's licence."""
    return next(text for family, text in LICENCES.items() if font.startswith(family))


def font_path(font: str) -> Path:
    """Return the path of a font in matplotlib. Raises UserError if it does not exist."""
    import matplotlib

    path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{font}.ttf"
    if not path.is_file():
        raise UserError(
            f"matplotlib {matplotlib.__version__} does not ship the font {font}: install the"
            " matplotlib of https://pypi.org"
        )
    return path


@functools.lru_cache(maxsize=1024)
def glyph(font: str, letter: str, points: int) -> np.ndarray:
    """Render a letter as coverage uint8 `[h, w]`, without margins. Raises UserError.

    The height of a capital letter is about 0.7 times `points`, in pixels.
    """
    # Pillow has basic layout built in; the other depends on system libraries.
    type_face = ImageFont.truetype(
        str(font_path(font)), points, layout_engine=ImageFont.Layout.BASIC
    )
    paper = Image.new("L", (3 * points, 3 * points))
    ImageDraw.Draw(paper).text((points, points), letter, fill=255, font=type_face)
    return np.asarray(paper.crop(paper.getbbox()))


def describe_fonts(letters: Sequence[str]) -> str:
    """Return a text with the fonts of each part and their licences."""
    lines = [f"The letters {''.join(letters)}, drawn in fonts that matplotlib ships.", ""]
    for part, fonts in FONTS.items():
        lines += [f"{part}:", *(f"  {font}: {licence_of(font)}" for font in fonts), ""]
    return "\n".join(lines) + "None of these licences asks anything of images of letters.\n"
