"""Decide from measurements which images `filter` keeps, and write the lists of dropped ones.

Each unit gets a `dropped-NNNNNN.jsonl` with every dropped image, the reason, and the image of which
it is a near-duplicate. `report.json`, with the counts, is written last and completes the selection.

Similarity to a reference collection is the output of a logistic regression between its images and a
random sample of the web, as language models filter text ("Language Models are Few-Shot Learners",
Brown et al., appendix A). Its inputs are colour and texture, or features of a trained network.

Legend: n images of a unit, m of the reference, D features.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_tools import __version__
from data_tools.job_report import say
from data_tools.measurements import find_duplicates, measured_units, read_measurements
from data_tools.selection import DECISION_NAME, KEY, MEASURED, dropped_name
from data_tools.sources import DUPLICATE, ImageSource
from data_tools.user_text import numbered_lines
from megavis.config.errors import UserError, counted
from megavis.data.format.files import write_atomically, write_json

LIKE = "like"
TABLE = np.dtype([("width", "<u4"), ("height", "<u4"), ("perceptual", "<u8")])
"""Fields of each image that are kept in memory."""
LEAST_LIKE = 10
"""Images of each side that the classifier needs: two of them test it."""
_EXAMPLES = 5
_EXCLUDED = "excluded"
_UNLIKE = "unlike the pictures of --like"
_NEAR_EXCLUDED = "near-duplicate of an excluded picture"
_NEAR_EVALUATION = "near-duplicate of an evaluation picture"
_NEAR_OTHER = "near-duplicate of another picture"
_HELD_OUT = 5  # every fifth image tests the classifier
_SHA256_DIGITS, _PERCEPTUAL_DIGITS = 64, 16


@dataclass(frozen=True)
class Thresholds:
    """Criteria for keeping an image.

    Attributes:
        min_side: smallest shorter side in pixels.
        max_aspect: largest ratio of longer to shorter side.
        near: largest Hamming distance between perceptual hashes of near-duplicates.
        keep_duplicates: do not compare images with each other.
        min_likeness: smallest probability of belonging to `--like`; None for no comparison.
        like_count: largest number of images of each side to train the classifier on.
    """

    min_side: int
    max_aspect: float
    near: int
    keep_duplicates: bool
    min_likeness: float | None
    like_count: int


@dataclass(frozen=True)
class Reference:
    """Images to exclude with their near-duplicates: opt-outs, then evaluation sets.

    `hashes` are uint64 `[m]`. The first `num_excluded` are opt-outs, whose names are their hashes.
    """

    hashes: np.ndarray
    names: list[str]
    num_excluded: int

    @classmethod
    def of(cls, excluded: Excluded, evaluation: Sequence[Path]) -> Reference:
        """Collect opt-outs and the measurements in the folders `evaluation`."""
        hashes = [np.array(excluded.perceptual, np.uint64)]
        names = [f"{one:016x}" for one in excluded.perceptual]
        for folder in evaluation:
            for _, tar, index in measured_units(folder):
                hashes.append(read_measurements(tar, index)["perceptual"])
                names += index.sources
        return cls(np.concatenate(hashes), names, len(excluded.perceptual))


def decide(
    out: Path,
    source: ImageSource,
    *,
    thresholds: Thresholds,
    excluded: Excluded,
    evaluation: Sequence[Path],
) -> None:
    """Write the dropped images, one list per unit, and then the report.

    Args:
        out: folder of `filter`, with the measurements of all images.
        source: the images.
        thresholds: criteria.
        excluded: hashes of opt-outs.
        evaluation: folders with measurements of evaluation sets.
    """
    (out / DECISION_NAME).unlink(missing_ok=True)  # invalid while the lists change
    likeness = None
    if thresholds.min_likeness is not None:
        likeness = _fit(out, count=thresholds.like_count)
    columns, reasons = [], []
    for _, tar, index in measured_units(out / MEASURED):
        values = read_measurements(tar, index)
        columns.append(np.empty(len(values), TABLE))
        for name in TABLE.names or ():  # a view of several fields would keep all measurements
            columns[-1][name] = values[name]
        reasons.append(own_reasons(values, thresholds, excluded, likeness))
    reason = np.concatenate(reasons)
    reference = Reference.of(excluded, evaluation)
    close = drop_near(np.concatenate(columns), reason, thresholds, reference)
    dropped, examples, num_files = _write_lists(out, reason, close, reference)
    report = {
        "source": source.sha256,
        "description": source.description,
        "num_files": num_files,
        "num_kept": num_files - sum(dropped.values()),
        "dropped": dropped,
        "examples": examples,
        "thresholds": asdict(thresholds),
        "excluded_hashes": len(excluded.sha256) + len(excluded.perceptual),
        "area_under_roc": likeness.area if likeness else None,
        "tool_version": __version__,
    }
    write_json(out / DECISION_NAME, report)
    _say(out, report)


def own_reasons(
    values: np.ndarray, thresholds: Thresholds, excluded: Excluded, likeness: Likeness | None
) -> np.ndarray:
    """Return why each image of a unit is dropped on its own, regardless of others.

    From measurements `[n]`, strings as objects `[n]`: the most important reason, or an empty
    string.
    """
    reason = np.full(len(values), "", object)
    shorter = np.minimum(values["width"], values["height"]).astype(np.int64)
    longer = np.maximum(values["width"], values["height"])
    if likeness is not None:
        assert thresholds.min_likeness is not None
        reason[likeness(values["features"]) < thresholds.min_likeness] = _UNLIKE
    # Later reasons overwrite earlier ones.
    aspect = thresholds.max_aspect
    reason[longer > aspect * shorter] = f"aspect ratio above {aspect:g}"
    reason[shorter < thresholds.min_side] = f"shorter side below {thresholds.min_side} pixels"
    if excluded.sha256:
        hashes = [row.tobytes().hex() for row in values["sha256"]]
        reason[[one in excluded.sha256 for one in hashes]] = _EXCLUDED
    return reason


def drop_near(
    table: np.ndarray, reason: np.ndarray, thresholds: Thresholds, reference: Reference
) -> np.ndarray:
    """Set the reason of near-duplicates among the images that have none yet.

    Among near-duplicates, the image with the most pixels is kept; of equal ones, the first.

    Args:
        table: `TABLE` `[n]`.
        reason: objects `[n]`, changed in place.
        thresholds: criteria.
        reference: images to exclude.

    Returns:
        int64 `[n]`: the image that each is a near-duplicate of, as an index into the reference (m)
        followed by the table; -1 for other images.
    """
    num_fixed = len(reference.hashes)
    kept = np.flatnonzero(reason == "")
    area = table["width"][kept].astype(np.int64) * table["height"][kept]
    kept = kept[np.argsort(-area, kind="stable")]
    hashes = np.concatenate([reference.hashes, table["perceptual"][kept]])
    found = find_duplicates(hashes, distance=thresholds.near, num_fixed=num_fixed)[num_fixed:]
    if thresholds.keep_duplicates:
        # Being close to the reference takes precedence over other near-duplicates.
        found[found >= num_fixed] = -1
    names = np.array([_NEAR_EXCLUDED, _NEAR_EVALUATION, _NEAR_OTHER], object)
    near = np.flatnonzero(found >= 0)
    sort = (found[near] >= reference.num_excluded).astype(int) + (found[near] >= num_fixed)
    reason[kept[near]] = names[sort]
    close = np.full(len(table), -1, np.int64)
    others = np.concatenate([np.arange(num_fixed), num_fixed + kept])
    close[kept[near]] = others[found[near]]
    return close


def _fit(out: Path, *, count: int) -> Likeness:
    """Train the classifier on evenly spaced images of both sides. Raises UserError if too few."""
    wanted, found = (_some_features(out / name, count=count) for name in (LIKE, MEASURED))
    for features, what in ((wanted, "--like has"), (found, "the source has")):
        if len(features) < LEAST_LIKE:
            raise UserError(
                f"{what} {counted(len(features), 'image')} that can be read: give"
                f" {LEAST_LIKE} or more to compare with --like"
            )
    return fit_likeness(wanted, found)


def _some_features(folder: Path, *, count: int) -> np.ndarray:
    total = sum(len(index) for _, _, index in measured_units(folder))
    count = min(count, total)
    places = np.arange(count) * total // max(count, 1)
    start, chosen = 0, [np.zeros((0, 0), np.float16)]
    for _, tar, index in measured_units(folder):
        own = places[(places >= start) & (places < start + len(index))] - start
        if len(own):  # a unit without images does not know the width of features
            chosen.append(read_measurements(tar, index)["features"][own])
        start += len(index)
    return np.concatenate(chosen[1:] or chosen)


def _write_lists(
    out: Path, reason: np.ndarray, close: np.ndarray, reference: Reference
) -> tuple[dict[str, int], dict[str, list[str]], int]:
    """Write one list per unit; return counts and first names by reason, and the image count."""
    names = _names(out, close, reference)
    dropped: Counter[str] = Counter()
    examples: dict[str, list[str]] = defaultdict(list)
    start = num_files = 0
    for number, _, index in measured_units(out / MEASURED):
        reasons = reason[start : start + len(index)]
        kept = {index.sources[place] for place in np.flatnonzero(reasons == "").tolist()}
        lines = [
            # It is rejected again when it is read, and another image of the same name is kept.
            {"name": name, "reason": why} | ({KEY: ""} if name in kept or why == DUPLICATE else {})
            for name, why in index.skipped
        ]
        for place in np.flatnonzero(reasons != "").tolist():
            line = {"name": index.sources[place], "reason": reasons[place]}
            if index.sources[place] in kept:
                line[KEY] = index.keys[place]
            if close[start + place] >= 0:
                line["close_to"] = names[int(close[start + place])]
            lines.append(line)
        for line in lines:
            dropped[line["reason"]] += 1
            if len(examples[line["reason"]]) < _EXAMPLES:
                examples[line["reason"]].append(line["name"])
        text = "".join(json.dumps(line) + "\n" for line in lines)
        write_atomically(out / dropped_name(number), text.encode())
        start += len(index)
        num_files += len(index) + len(index.skipped)
    return dict(sorted(dropped.items())), dict(sorted(examples.items())), num_files


def _names(out: Path, close: np.ndarray, reference: Reference) -> dict[int, str]:
    """Return the names of the images that `close` refers to, by index."""
    wanted = np.unique(close[close >= 0])
    names = {
        place: reference.names[place] for place in wanted.tolist() if place < len(reference.names)
    }
    start = len(reference.names)
    for _, _, index in measured_units(out / MEASURED):
        inside = wanted[(wanted >= start) & (wanted < start + len(index))]
        names.update((place, index.sources[place - start]) for place in inside.tolist())
        start += len(index)
    return names


def _say(out: Path, report: dict[str, Any]) -> None:
    kept, total = report["num_kept"], report["num_files"]
    say(f"{out}: {kept} of {total} pictures kept; other verbs take --selection {out}")
    if report["area_under_roc"] is not None:
        area = report["area_under_roc"]
        say(f"  the classifier separates --like from the rest with an area under ROC of {area:.3f}")
    for name, count in report["dropped"].items():
        say(f"  dropped, {name}: {count} (the first: {report['examples'][name][0]})")


@dataclass(frozen=True)
class Likeness:
    """A trained classifier of features `[n, D]`.

    `area` is the area under the ROC curve on held-out images of both collections; 0.5 is chance.
    """

    model: Any
    area: float

    def __call__(self, features: np.ndarray) -> np.ndarray:
        """Return the probability of `--like`, float64 `[n]`, for features `[n, D]`."""
        if not len(features):
            return np.zeros(0)
        return self.model.predict_proba(features.astype(np.float32))[:, 1]


def fit_likeness(wanted: np.ndarray, found: np.ndarray) -> Likeness:
    """Train on features `[n, D]` of the wanted collection and `[m, D]` of the found one.

    Both sides have equal weight, regardless of their size. The result is deterministic.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from threadpoolctl import threadpool_limits

    features = np.concatenate([wanted, found]).astype(np.float32)
    labels = np.repeat([1, 0], [len(wanted), len(found)])
    places = np.concatenate([np.arange(len(wanted)), np.arange(len(found))])
    test = places % _HELD_OUT == _HELD_OUT - 1
    model = make_pipeline(
        StandardScaler(), LogisticRegression(C=0.1, max_iter=2000, class_weight="balanced")
    )
    # The summation order of threads differs between machines.
    with threadpool_limits(1):
        model.fit(features[~test], labels[~test])
        scores = model.predict_proba(features[test])[:, 1]
    both = len(set(labels[test])) == 2
    return Likeness(model, float(roc_auc_score(labels[test], scores)) if both else float("nan"))


@dataclass(frozen=True)
class Excluded:
    """Hashes of images that must not be used: SHA-256 of files, and ImageHash's `phash`, 64 bits.

    Near-duplicates of the latter are excluded too.
    """

    sha256: frozenset[str] = frozenset()
    perceptual: tuple[int, ...] = ()


def read_excluded(path: Path | None) -> Excluded:
    """Read a file of `--exclude`; the rest of a line after its hash is ignored."""
    if path is None:
        return Excluded()
    sha256, perceptual = set(), set()
    for number, line in numbered_lines(path):
        word = line.split()[0].lower()
        if word.startswith("#"):
            continue
        if len(word) not in (_SHA256_DIGITS, _PERCEPTUAL_DIGITS) or set(word) - set(
            "0123456789abcdef"
        ):
            raise UserError(
                f"--exclude {path} line {number}: {word!r} is neither a SHA-256 (64 hexadecimal "
                "digits) nor a perceptual hash (16)"
            )
        if len(word) == _SHA256_DIGITS:
            sha256.add(word)
        else:
            perceptual.add(int(word, 16))
    return Excluded(frozenset(sha256), tuple(sorted(perceptual)))
