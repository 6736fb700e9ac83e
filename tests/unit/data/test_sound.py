"""Recordings: coefficients against formulas, shift and noise against a loop, draws by position."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from scipy import fft
from written_shards import write_payloads

from megavis.config.errors import UserError
from megavis.config.load import load_config
from megavis.config.section import DataConfig
from megavis.data.codecs.sound import (
    NUM_SOUND_DRAWS,
    RecordingsCodec,
    SoundAugment,
    cepstra,
    sound_augment,
    write_noises,
)
from megavis.data.codecs.transforms import Transform, evaluation_transform, training_transform
from megavis.data.loading.dataset import ShardDataset
from megavis.data.loading.loader import BatchLoader
from megavis.data.loading.opening import ShardOpener

RANDOM = np.random.default_rng(0)


def to_mel(hertz):
    """HTK's scale, as in tf.signal.linear_to_mel_weight_matrix."""
    return 1127.0 * math.log(1.0 + hertz / 700.0)


def mel_weight_matrix():
    """Return tf.signal.linear_to_mel_weight_matrix(64, 257, 16000, 80, 7600) in plain loops.

    Its triangles are linear in mel, not in hertz, and nothing of bin 0 passes.
    """
    low, high = to_mel(80.0), to_mel(7600.0)
    edges = [low + (high - low) * i / 65 for i in range(66)]
    weights = np.zeros((257, 64))
    for number in range(1, 257):
        mel = to_mel(8000.0 * number / 256)
        for band, (left, peak, right) in enumerate(zip(edges, edges[1:], edges[2:], strict=False)):
            weights[number, band] = max(
                0.0, min((mel - left) / (peak - left), (right - mel) / (right - peak))
            )
    return weights


def coefficients_by_the_formulas(samples, frame):
    """Compute Hann window, FFT, mel filters, logarithm and TensorFlow's DCT in plain loops."""
    middle = 160 * frame + 80
    window = np.zeros(512)
    for i in range(480):
        place = middle - 240 + i
        value = samples[place] if 0 <= place < len(samples) else 0.0
        window[16 + i] = value * (0.5 - 0.5 * math.cos(2.0 * math.pi * i / 480))
    power = np.abs(np.fft.rfft(window)) ** 2
    logarithms = np.log(power @ mel_weight_matrix() + 1e-6).tolist()
    # tf.signal.dct, type 2, has a factor of 2 and no norm; mfccs_from_log_mel_spectrograms divides
    # all coefficients by √(2 · 64), the first one too.
    return [
        sum(2.0 * x * math.cos(math.pi * k * (i + 0.5) / 64) for i, x in enumerate(logarithms))
        / math.sqrt(2.0 * 64)
        for k in range(40)
    ]


def frames_of_tc_resnet(samples):
    """Return the coefficients of tf.signal.stft's frames, [t, t + 480) every 160 samples."""
    hann = 0.5 - 0.5 * np.cos(2.0 * np.pi * np.arange(480) / 480)
    starts = range(0, len(samples) - 480 + 1, 160)
    power = np.abs(np.fft.rfft([samples[t : t + 480] * hann for t in starts], 512)) ** 2
    dct = fft.dct(np.log(power @ mel_weight_matrix() + 1e-6), type=2)
    return dct[:, :40] / math.sqrt(2.0 * 64)


def test_cepstra_are_those_of_tc_resnet():
    """A second has 98 of its frames, and two more, half of silence, for Table 1's 100 positions."""
    samples = (0.1 * RANDOM.standard_normal(16_000)).astype(np.float32)
    theirs = frames_of_tc_resnet(samples)
    assert theirs.shape == (98, 40)
    np.testing.assert_allclose(cepstra(samples, 40)[1:-1], theirs, rtol=1e-4, atol=1e-4)


def test_first_coefficient_of_silence():
    """ln(1e-6) in 64 bands: √(2 / 64) times their sum."""
    silence = cepstra(np.zeros(16_000, np.float32), 40)
    expected = math.sqrt(2 / 64) * 64 * math.log(1e-6)
    np.testing.assert_allclose(silence[:, 0], expected, rtol=1e-5)
    np.testing.assert_allclose(silence[:, 1:], 0.0, atol=1e-3)


def test_cepstra_match_formulas():
    samples = (0.1 * RANDOM.standard_normal(16_000)).astype(np.float32)
    found = cepstra(samples, 40)
    assert (found.shape, found.dtype) == ((100, 40), np.float32)
    np.testing.assert_allclose(cepstra(samples, 7), found[:, :7], rtol=1e-5, atol=1e-5)
    for frame in (0, 1, 50, 99):
        expected = coefficients_by_the_formulas(samples, frame)
        np.testing.assert_allclose(found[frame], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("draws", "shift", "noise", "first", "volume"),
    [
        ((0.0, 0.4, 0.0, 0.7, 0.8), -1600, 0, 0, 0.08),
        ((0.9999, 0.5, 0.9999, 0.0, 0.3), 1599, 1, 2000, 0.03),
        ((0.5, 0.7, 0.5, 0.79, 0.9999), 0, 1, 1000, 0.09999),
        ((0.25, 0.7, 0.5, 0.8, 0.9), -800, 1, 0, 0.0),
    ],
)
def test_shift_and_noise_match_a_loop(draws, shift, noise, first, volume):
    """Shift, add volume · noise and clip, sample by sample."""
    samples = RANDOM.uniform(-1, 1, 16_000).astype(np.float32)
    noises = [RANDOM.integers(-32768, 32767, 16_000 + n).astype(np.int16) for n in (500, 2000)]
    varied = SoundAugment(1600, noises)(samples, np.array(draws))
    assert varied.dtype == np.float32
    for place in range(16_000):
        before = samples[place - shift] if 0 <= place - shift < 16_000 else 0.0
        expected = before + volume * float(noises[noise][first + place]) / 32768.0
        assert varied[place] == pytest.approx(min(1.0, max(-1.0, expected)), abs=1e-6)


@pytest.fixture
def folder(tmp_path):
    """Forty recordings of 80 ms, and two noises."""
    codec = RecordingsCodec((8, 5))
    stored = RANDOM.integers(-9000, 9000, (40, 1280)).astype(np.int16)
    write_payloads(
        tmp_path / "train",
        [codec.encode(one) for one in stored],
        suffix="pcm",
        kind="recordings",
        image_size=None,
        frame_shape=(8, 5),
    )
    noises = [RANDOM.integers(-9000, 9000, length).astype(np.int16) for length in (1280, 5000)]
    write_noises(tmp_path / "noise.npz", noises)
    return tmp_path, stored, noises


def config_of(folder, **keys):
    return DataConfig(train="train", frames=(8, 5), **keys)


def test_training_draws_anew_for_each_position(folder):
    path, stored, noises = folder
    config = config_of(folder, time_shift=0.05, background_noise=str(path / "noise.npz"))
    transform = training_transform(config, seed=3)
    dataset = ShardDataset(path / "train", transform)
    positions = np.array([0, 7, 47, 1 << 40])
    frames, _ = dataset.read(np.array([0, 7, 7, 7]), positions=positions)
    augment, draws = SoundAugment(800, noises), transform.sound_draws(positions, NUM_SOUND_DRAWS)
    for row, index in enumerate((0, 7, 7, 7)):
        samples = stored[index].astype(np.float32) / 32768
        assert np.array_equal(frames[row], cepstra(augment(samples, draws[row]), 5))
    # Another epoch, another position: other coefficients, and the same ones when read alone.
    assert not np.allclose(frames[1], frames[2])
    assert not np.allclose(frames[2], frames[3])
    assert np.array_equal(dataset.read(np.array([7]), positions=positions[2:3])[0][0], frames[2])
    other = ShardDataset(path / "train", training_transform(config, seed=4))
    assert not np.allclose(other.read(np.array([0]), positions=positions[:1])[0][0], frames[0])


def test_layouts_and_threads_read_the_same(folder):
    path = folder[0]
    config = config_of(folder, time_shift=0.05, background_noise=str(path / "noise.npz"))
    dataset = ShardDataset(path / "train", training_transform(config, seed=3))

    def read(ranks, micro_batch_size, threads):
        parts = []
        for rank in range(ranks):
            loader = BatchLoader(
                dataset,
                seed=3,
                micro_batch_size=micro_batch_size,
                data_parallel_rank=rank,
                data_parallel_size=ranks,
                accumulation_steps=24 // (ranks * micro_batch_size),
                threads=threads,
            )
            with loader:
                batches = [next(loader) for _ in range(24 // (ranks * micro_batch_size))]
            for batch in batches:
                parts += zip(batch.sample_index.tolist(), batch.inputs.numpy(), strict=True)
        return np.stack([frames for _, frames in sorted(parts, key=lambda part: part[0])])

    whole = read(1, 24, 1)
    assert np.array_equal(read(2, 4, 4), whole)
    assert np.array_equal(read(3, 2, 2), whole)


def test_held_out_recordings_are_unchanged(folder):
    path, stored, _ = folder
    config = config_of(folder, time_shift=0.05, background_noise=str(path / "noise.npz"))
    indices = np.arange(40)
    expected = np.stack([cepstra(one / np.float32(32768), 5) for one in stored])
    for transform in (
        evaluation_transform(config),
        training_transform(config_of(folder), seed=3),
        Transform(image_size=0, sound=SoundAugment(0)),
    ):
        assert np.array_equal(ShardDataset(path / "train", transform).read(indices)[0], expected)


def test_shift_and_noise_are_as_frequent_as_in_tc_resnet():
    draws = Transform(image_size=0).sound_draws(np.arange(4000), NUM_SOUND_DRAWS)
    silence = np.zeros(1280, np.float32)
    loud = [SoundAugment(0, [np.full(1280, 32767, np.int16)])(silence, row)[0] for row in draws]
    volumes = np.array(loud)[np.array(loud) > 0]
    assert len(volumes) / 4000 == pytest.approx(0.8, abs=0.02)
    assert volumes.max() < 0.1
    assert volumes.mean() == pytest.approx(0.05, abs=0.001)
    impulse = np.eye(1, 1280, 640, dtype=np.float32)[0]
    shifts = np.array([SoundAugment(200)(impulse, row).argmax() - 640 for row in draws])
    assert (shifts.min(), shifts.max()) == (-200, 199)
    assert abs(shifts.mean()) < 8


def test_unsuitable_files_of_noises(tmp_path):
    assert sound_augment(0.0, None, num_samples=10) is None
    path = tmp_path / "noise.npz"
    with pytest.raises(UserError, match="missing or not a file of noises"):
        sound_augment(0.0, str(path), num_samples=10)
    np.save(tmp_path / "one.npy", np.zeros(20, np.int16))
    for content in (b"", b"PK\3\4 nothing", (tmp_path / "one.npy").read_bytes()):
        path.write_bytes(content)
        with pytest.raises(UserError, match="missing or not a file of noises"):
            sound_augment(0.0, str(path), num_samples=10)
    for noises in ([], [np.zeros(9, np.int16)], [np.zeros(20, np.float32)]):
        write_noises(path, noises)
        with pytest.raises(UserError, match="each of 10 samples or more"):
            sound_augment(0.0, str(path), num_samples=10)


def test_missing_noises_name_their_key():
    preset = Path(__file__).parents[3] / "yaml_configs" / "mp3" / "speech_commands.yaml"
    config = load_config(preset, ["data.background_noise=nowhere.npz"]).config
    with pytest.raises(UserError, match=r"data\.background_noise: nowhere\.npz is missing"):
        ShardOpener(config, None, lambda manifest: (), False, lambda manifest: ()).training_data()
