"""Files of events for TensorBoard, which are written without its thread."""

import threading
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megavis.cli import main
from megavis.commands import evaluate_watch
from megavis.evaluation.figures import show_in_tensorboard
from megavis.evaluation.results import WatchedCheckpoint

pytestmark = pytest.mark.once


@pytest.fixture(autouse=True)
def no_threads(monkeypatch):
    """Fail if a thread starts: one that writes outlives the error or signal that ends a command."""

    def start(thread):
        raise AssertionError(f"{thread} starts")

    monkeypatch.setattr(threading.Thread, "start", start)


def events_in(folder):
    events = EventAccumulator(str(folder), size_guidance={"images": 0, "scalars": 0})
    events.Reload()
    return events


def test_watch_shows_numbers_of_each_step(tmp_path, capsys):
    for step in (4, 8):
        measured = WatchedCheckpoint(
            step=step,
            validation_loss=step / 2,
            seconds=1.5,
            train_images=100,
            validation_images=50,
            seed=0,
        )
        evaluate_watch._keep(tmp_path, measured)
    events = events_in(tmp_path / "tensorboard" / "evaluation")
    found = {event.step: event.value for event in events.Scalars("evaluation/validation_loss")}
    assert found == {4: 2.0, 8: 4.0}


def test_watch_shows_samples(tmp_path):
    pixels = np.zeros((8, 6, 3), np.uint8)
    evaluate_watch._show(tmp_path, 4, pixels)
    (image,) = events_in(tmp_path / "tensorboard" / "evaluation").Images("evaluation/samples")
    assert (image.step, image.width, image.height) == (4, 6, 8)


def test_figure_has_a_file_of_its_own(tmp_path):
    for _ in range(2):
        show_in_tensorboard(tmp_path, "depth", Figure(figsize=(1, 1)), step=3)
    files = [path.name for path in Path(tmp_path / "tensorboard").iterdir()]
    assert len(files) == 2
    assert all(name.endswith(".depth") for name in files)
    assert {image.step for image in events_in(tmp_path / "tensorboard").Images("evaluation/depth")}


def test_disk_error_is_raised(tmp_path):
    (tmp_path / "tensorboard").write_text("in the way")
    with pytest.raises(OSError, match="tensorboard"):
        show_in_tensorboard(tmp_path, "depth", Figure(figsize=(1, 1)), step=3)


@pytest.mark.parametrize("interval", ["0", "nan", "inf"])
def test_the_interval_of_a_watch_is_a_number_of_seconds(interval, tmp_path, capsys):
    assert main(["evaluate", "watch", str(tmp_path), "--interval", interval]) == 2
    assert "--interval" in (error := capsys.readouterr().err)
    assert "must be a number of seconds above 0" in error
