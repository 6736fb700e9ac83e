"""The palette of iGPT: 512 colours, one token per pixel.

A pixel x in 0..255 is mapped to x / 127.5 - 1 and encoded as the index of the nearest centre c by
squared distance, the lowest index in case of ties; decoding is rint(127.5 (c + 1)). This matches
the released code exactly.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from scipy.spatial import cKDTree

from megavis.config.errors import UserError, describe_os_error
from megavis.data.format.files import atomic_writer

MAX_COLORS = 512
MAX_GREYS = 256
# Exceeds the rounding error of float64 distances; closer ties are resolved by brute force.
_TIE_MARGIN = 1e-9


class Palette:
    """Nearest-colour tokens, equal to a brute-force float64 argmin for all 2^24 colours.

    Args:
        centers: `[k, 3]` in [-1, 1], RGB, 1 <= k <= 512; converted to float32.

    Attributes:
        centers: float32 `[k, 3]`, read-only.
        sha256: identity of the palette, the SHA-256 of the little-endian float32 bytes.

    Raises:
        UserError: the shape or the range is wrong.
    """

    def __init__(self, centers: np.ndarray) -> None:
        self.centers = _checked_centers(centers)
        self.sha256 = hashlib.sha256(self.centers.astype("<f4").tobytes()).hexdigest()
        self._tree = cKDTree(self.centers.astype(np.float64))
        # The token + 1 of each colour, or 0 if it is not known yet. Created here, since several
        # threads encode with one palette; pages of zeros take no memory until they are written to.
        self._table = np.zeros(1 << 24, np.uint16)

    def __reduce__(self) -> tuple[type[Palette], tuple[np.ndarray]]:
        return type(self), (self.centers,)

    def __len__(self) -> int:
        return len(self.centers)

    def encode(self, images: np.ndarray) -> np.ndarray:
        """Encode pixels uint8 `[..., 3]` as tokens uint16 `[...]` in [0, k).

        A table of all 2^24 colours (32 MiB) caches the results of a k-d tree, so that each colour
        is searched for only once. Several threads may call this at the same time.

        Raises:
            ValueError: `images` is not uint8 `[..., 3]`.
        """
        if images.dtype != np.uint8 or images.ndim < 1 or images.shape[-1] != 3:
            raise ValueError(f"expected uint8 [..., 3], not {images.dtype} {list(images.shape)}")
        wide = images.reshape(-1, 3).astype(np.int64)
        codes = (wide[:, 0] << 16) | (wide[:, 1] << 8) | wide[:, 2]
        tokens = self._table.take(codes)
        unknown = np.flatnonzero(tokens == 0)
        tokens -= 1
        if len(unknown):
            new, places = np.unique(codes[unknown], return_inverse=True)
            colors = np.stack([new >> 16, new >> 8 & 0xFF, new & 0xFF], axis=1).astype(np.uint8)
            # Return these rather than reading the table, which other threads may be changing.
            found = self._nearest(colors)
            tokens[unknown] = found[places]
            self._table[new] = found + 1
        return tokens.reshape(images.shape[:-1])

    def decode(self, tokens: np.ndarray) -> np.ndarray:
        """Decode integers `[...]` to colours uint8 `[..., 3]`; raise ValueError outside [0, k)."""
        tokens = np.asarray(tokens)
        if tokens.size and (tokens.min() < 0 or tokens.max() >= len(self)):
            raise ValueError(f"tokens must be in [0, {len(self)})")
        colors = np.rint(127.5 * (self.centers.astype(np.float64) + 1.0))
        return colors.clip(0, 255).astype(np.uint8)[tokens]

    def save(self, path: Path | str) -> None:
        """Write the centres in the format of the released `kmeans_centers.npy`, atomically."""
        with atomic_writer(Path(path)) as file:
            np.save(file, self.centers, allow_pickle=False)

    @classmethod
    def load(cls, path: Path | str) -> Palette:
        """Read a `.npy` file, float32 `[k, 3]` in [-1, 1], without unpickling. Raises UserError."""
        try:
            centers = np.load(path, allow_pickle=False)
        except FileNotFoundError:
            raise UserError(f"palette {path} does not exist") from None
        except PermissionError as error:
            raise UserError(describe_os_error(error)) from None
        except (OSError, ValueError, EOFError):
            raise UserError(f"palette {path} is not a .npy file of numbers") from None
        if not isinstance(centers, np.ndarray) or centers.dtype != np.float32:
            raise UserError(f"palette {path} must hold float32 numbers")
        try:
            return cls(centers)
        except UserError as error:
            raise UserError(f"palette {path}: {error}") from None

    def _nearest(self, pixels: np.ndarray) -> np.ndarray:
        """Return exact tokens uint16 `[n]` of colours uint8 `[n, 3]`."""
        points = to_unit(pixels)
        if len(self) == 1:
            return np.zeros(len(points), np.uint16)
        distances, nearest = self._tree.query(points, k=2)
        tokens = nearest[:, 0].astype(np.uint16)
        tied = np.flatnonzero(distances[:, 1] - distances[:, 0] < _TIE_MARGIN)
        for start in range(0, len(tied), 4096):
            rows = tied[start : start + 4096]
            differences = points[rows, None] - self.centers.astype(np.float64)
            tokens[rows] = (differences**2).sum(axis=-1).argmin(axis=-1)
        return tokens


def to_unit(pixels: np.ndarray) -> np.ndarray:
    """Map uint8 `[...]` to float64 `[...]` in [-1, 1]: x / 127.5 - 1."""
    return pixels.astype(np.float64) / 127.5 - 1.0


def grey_palette(num_greys: int = MAX_GREYS) -> Palette:
    """Return evenly spaced greys from black to white; with all 256, a token is its pixel's value.

    Encoding grey images is then lossless, and the likelihood of tokens is that of the 8-bit greys.

    Raises:
        ValueError: `num_greys` is not in [1, 256].
    """
    if not 1 <= num_greys <= MAX_GREYS:
        raise ValueError(f"{num_greys} greys; 8 bits have 1 to {MAX_GREYS}")
    greys = np.rint(np.linspace(0.0, 255.0, num_greys)).astype(np.uint8)
    return Palette(np.repeat(to_unit(greys)[:, None], 3, axis=1).astype(np.float32))


def fit_palette(
    pixels: np.ndarray, *, num_colors: int = MAX_COLORS, seed: int
) -> tuple[Palette, float]:
    """Fit `num_colors` colours to pixels uint8 `[n, 3]` by mini-batch k-means, deterministically.

    Returns:
        The palette, and the squared distance to the nearest centre in 0..255 units, summed over the
        channels and averaged over the pixels.

    Raises:
        UserError: `num_colors` is out of range, or there are fewer distinct colours.
    """
    # Importing scikit-learn takes seconds, and only fitting needs it.
    from sklearn.cluster import MiniBatchKMeans
    from threadpoolctl import threadpool_limits

    if not 1 <= num_colors <= MAX_COLORS:
        raise UserError(f"the number of colours must be in [1, {MAX_COLORS}], not {num_colors}")
    num_distinct = len(np.unique(pixels.astype(np.uint32) @ np.array([65536, 256, 1], np.uint32)))
    if num_distinct < num_colors:
        raise UserError(
            f"the images have {num_distinct} distinct colours, fewer than the requested"
            f" {num_colors}: give more images, or request at most {num_distinct} colours"
        )
    points = to_unit(pixels).astype(np.float32)
    means = MiniBatchKMeans(num_colors, random_state=seed, batch_size=4096, n_init=1, max_iter=50)
    # With one thread, the order of sums, and thus the result, does not depend on the core count.
    with threadpool_limits(limits=1):
        means.fit(points)
    palette = Palette(means.cluster_centers_.astype(np.float32).clip(-1.0, 1.0))
    nearest = palette.centers[palette.encode(pixels)].astype(np.float64)
    error = 127.5**2 * ((to_unit(pixels) - nearest) ** 2).sum(axis=-1).mean()
    return palette, float(error)


def _checked_centers(centers: np.ndarray) -> np.ndarray:
    if centers.ndim != 2 or centers.shape[1] != 3 or not 1 <= len(centers) <= MAX_COLORS:
        raise UserError(
            f"a palette has shape [k, 3] with k in [1, {MAX_COLORS}], not {list(centers.shape)}"
        )
    if not np.isfinite(centers).all() or np.abs(centers).max() > 1.0:
        raise UserError("the colours of a palette must be in [-1, 1]")
    centers = np.array(centers, dtype=np.float32, order="C")
    centers.setflags(write=False)
    return centers
