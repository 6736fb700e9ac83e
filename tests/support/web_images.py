"""Tars of web images, with an image for each reason for which `filter` drops one."""

import hashlib
import io

import imagehash
from image_files import encoded, real_jpegs
from image_sources import write_folder, write_tar
from PIL import Image

NUM_PHOTOGRAPHS = 16
DROPPED = {
    "000000004.jpg": "near-duplicate of another picture",
    "000000007.jpg": "excluded",
    "000000008.jpg": "near-duplicate of an excluded picture",
    "100000000.jpg": "near-duplicate of another picture",
    "100000002.jpg": "shorter side below 64 pixels",
    "100000003.jpg": "aspect ratio above 3",
    "100000004.jpg": "near-duplicate of an evaluation picture",
    "100000005.jpg": "truncated",
}
"""Reason by name."""


def photograph(number, size=(120, 90)):
    return Image.open(real_jpegs()[number]).convert("RGB").resize(size, Image.Resampling.BICUBIC)


def jpeg(image, quality=90):
    return encoded(image, "JPEG", quality=quality)


def web_files():
    """Name -> bytes: photographs, and an image for each reason to drop it."""
    files = {f"{number:09d}": jpeg(photograph(number)) for number in range(NUM_PHOTOGRAPHS)}
    files["100000000"] = jpeg(photograph(3), quality=30)  # dropped: as large as 3, but later
    files["100000001"] = jpeg(photograph(4, (240, 180)))  # kept: larger than 4
    files["100000002"] = jpeg(photograph(16, (60, 40)))
    files["100000003"] = jpeg(photograph(17, (400, 90)))
    files["100000004"] = jpeg(photograph(18))  # in the evaluation set
    files["100000005"] = files["000000005"][:500]
    return files


def write_web(root):
    """Two webdataset tars of `web_files`, an evaluation folder and a list of opt-outs."""
    files = list(web_files().items())
    for number, part in enumerate((files[:12], files[12:])):
        members = [(f"{key}.jpg", content) for key, content in part]
        write_tar(root / "tars" / f"{number:05d}.tar", members)
    write_folder(root / "evaluation", {"a.png": encoded(photograph(18, (200, 150)), "PNG")})
    sha256 = hashlib.sha256(web_files()["000000007"]).hexdigest()
    perceptual = imagehash.phash(Image.open(io.BytesIO(web_files()["000000008"])))
    (root / "exclude.txt").write_text(f"# opt-outs\n{sha256}  7.jpg\n\n{perceptual} 8.jpg\n")
    return root


def filter_words(web, out):
    return [
        "filter",
        *(str(web / "tars"), "--out", str(out), "--min-side", "64"),
        *("--evaluation", str(web / "evaluation"), "--exclude", str(web / "exclude.txt")),
    ]
