"""The number of images that are generated at once."""

import dataclasses
import io
import json
import re
import shutil
import tracemalloc
import weakref
from itertools import product

import numpy as np
import pytest
import torch
from pretended_memory import PretendedMemory
from tiny import tiny

from megavis.config.errors import UserError
from megavis.sampling.batches import Batches
from megavis.sampling.pictures import write_npz
from megavis.sampling.sampler import Sampler

pytestmark = pytest.mark.once


@pytest.fixture
def batches(context):
    """Batches of images that fill a memory."""

    def batches(memory, size=None, *, is_alone=True):
        return Batches(context, size, halves=is_alone and size is None, memory=memory)

    return batches


def test_measures_larger_and_larger_batches(batches):
    # 80 % of 10,000 bytes are filled. One image needs 1,100, so 7 fit for certain; 7 need 1,700,
    # so 32 fit; 32 need 4,200, so 60 fit, rounded to 56. In truth 70 would.
    memory = PretendedMemory(10_000, (1_000, 100))
    chosen = batches(memory)
    assert chosen.choose(memory.draw, 1000) == 56
    assert memory.sizes == [1, 7, 32]
    assert chosen.choose(memory.draw, 1000) == 56
    assert memory.sizes == [1, 7, 32]


@pytest.mark.parametrize("second", [(0, 0), (0, 9), (50_000, 2)])
def test_the_largest_batch_that_fits(batches, second):
    for free, fixed, each in product((200_000, 10**6, 10**7), (0, 300, 70_000), (3, 700, 9_000)):
        memory = PretendedMemory(free, (fixed, each), second)
        size = batches(memory).choose(memory.draw, 10**10)
        to_fill = 0.8 * free
        most = min((to_fill - a) / b for a, b in ((fixed, each), second) if b)
        # Fixed needs count for up to twice, and sizes are multiples of 8.
        assert (1 - 2 * max(fixed, second[0]) / to_fill) * most - 8 <= size <= most
        assert size % 8 == 0 or size < 8
        assert all(memory.need(tried) <= to_fill for tried in memory.sizes)


def test_measuring_takes_few_images(batches):
    memory = PretendedMemory(1_000, (100, 1))
    # 273 fit for certain. Measuring an eighth of the images, 100, would say how many really do, but
    # that is not even twice as many as the 52 measured before.
    assert batches(memory).choose(memory.draw, 800) == 272
    assert memory.sizes == [1, 7, 52]
    # All images of the process fit.
    memory = PretendedMemory(10_000, (0, 9))
    assert batches(memory).choose(memory.draw, 803) == 803
    assert memory.sizes == [1]


@pytest.mark.parametrize(
    ("options", "num_images", "expected"),
    [
        ({"size": 1000}, 2000, 1000),
        ({}, 64, 64),
        ({}, 3, 3),
        ({"size": 1000, "is_alone": False}, 2000, 1000),
    ],
)
def test_nothing_is_measured(batches, options, num_images, expected):
    memory = PretendedMemory(100, (0, 10))
    assert batches(memory, **options).choose(memory.draw, num_images) == expected
    assert memory.sizes == []


def test_64_images_without_a_gpu(batches, context):
    memory = PretendedMemory(100, (0, 10))
    assert batches(None).choose(memory.draw, 1000) == 64
    assert Batches.of(context, None, is_alone=True).choose(memory.draw, 1000) == 64
    assert memory.sizes == []


def test_memory_of_a_gpu(context, monkeypatch):
    numbers = {"mem_get_info": (1_000, 9_999), "memory_reserved": 700, "memory_allocated": 300}
    numbers["max_memory_allocated"] = 450
    calls = []
    for name, value in numbers.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: calls.append(device))
    gpu = torch.device("cuda", 0)
    on_gpu = dataclasses.replace(context, device=gpu)
    memory = Batches.of(on_gpu, None, is_alone=True).memory
    # 400 of the reserved bytes are not in use.
    assert memory.free() == 1_400
    assert memory.peak_of(lambda: calls.append("job")) == 150
    assert calls == [gpu, "job"]


def test_even_few_images_are_measured_where_a_batch_cannot_be_halved(batches):
    memory = PretendedMemory(100, (0, 10))
    shared = batches(memory, is_alone=False)
    assert shared.choose(memory.draw, 20) == 8
    assert memory.sizes == [1, 2]
    with pytest.raises(torch.OutOfMemoryError):
        shared.run(lambda numbers: memory.draw(numbers.repeat(2)), torch.arange(8))


def test_a_batch_that_does_not_fit_is_halved(batches):
    memory = PretendedMemory(30, (0, 10))
    halved = batches(memory)
    assert halved.choose(memory.draw, 20) == 20
    images = halved.distribute(memory.draw, 20)
    assert images.flatten().tolist() == list(range(0, 200, 10))
    assert memory.sizes == [20, 10, 5] + [2] * 10
    assert halved.size == 2


def test_a_batch_that_does_not_fit_while_measuring(batches):
    class Careless(PretendedMemory):
        def peak_of(self, job):
            return super().peak_of(job) // 4

    # One image seems to need 25 bytes: 32 fit, of which 31 are tried.
    memory = Careless(1_000, (0, 100))
    assert batches(memory).choose(memory.draw, 250) == 8
    assert memory.sizes == [1, 31]
    with pytest.raises(torch.OutOfMemoryError):
        batches(memory, is_alone=False).choose(memory.draw, 250)


def test_errors(batches):
    memory = PretendedMemory(30, (0, 31))
    with pytest.raises(UserError, match="not even one image fits into the memory of cpu"):
        batches(memory).choose(memory.draw, 100)
    with pytest.raises(UserError, match="not even one image fits"):
        batches(memory).distribute(memory.draw, 5)
    with pytest.raises(torch.OutOfMemoryError):
        batches(memory, 4).distribute(memory.draw, 5)
    assert memory.sizes == [1, 5, 2, 1, 4]


GIVT = tiny(
    "{name: compose, reads: {kind: patches, patch_size: 4}, schedule: {kind: one_by_one},"
    " asks: {kind: shift}, density: {kind: gaussian_mixture, num_components: 2},"
    " condition: {kind: labels, num_classes: 3, dropout: 0.1}}",
    data={"image_size": 8},
    model={"num_layers": 1},
)


@pytest.fixture
def measured(monkeypatch):
    """A function that makes samplers measure a memory in place of the device's."""

    def measured(memory):
        def batches(self, size=None):
            return Batches(self.inference.context, size, halves=size is None, memory=memory)

        tokens = Sampler.tokens

        def counted(self, numbers, **options):
            memory.sizes.append(len(numbers))
            return tokens(self, numbers, **options)

        monkeypatch.setattr(Sampler, "tokens", counted)
        monkeypatch.setattr(Sampler, "batches", batches)

    return measured


def test_images_do_not_depend_on_the_batch(build, measured, tmp_path):
    objective, inference = build(None, "objective.order=random")
    sampler = Sampler(inference, objective, tmp_path, {"temperature": 0.9}, seed=5)
    fixed = sampler.sample(70, batch_size=70)
    assert torch.equal(sampler.sample(70), fixed)
    memory = PretendedMemory(1_000, (100, 50))
    measured(memory)
    # One image needs 150 of 800 bytes, 5 need 350: 11 fit.
    assert torch.equal(sampler.sample(70), fixed)
    assert memory.sizes == [1, 5, *[8] * 8, 6]
    assert len(fixed.unique(dim=0)) == 70


def test_a_batch_that_did_not_fit_is_freed(build, tmp_path, monkeypatch):
    objective, inference = build(None)
    sampler = Sampler(inference, objective, tmp_path)
    expected, predictions, held = sampler.sample(9), inference.predictions, []

    def short_of_memory(rows, *, cache, **options):
        assert not any(each() for each in held)
        if cache.length == 3 and len(rows[0]) > 4:
            held.extend(map(weakref.ref, [*rows, cache]))
            raise torch.OutOfMemoryError
        return predictions(rows, cache=cache, **options)

    monkeypatch.setattr(inference, "predictions", short_of_memory)
    assert torch.equal(sampler.sample(9), expected)
    assert len(held) > 1


def test_counts_only_the_images_that_are_returned(build_paper, measured, tmp_path):
    def counts(batch_size):
        objective, inference = build_paper(GIVT)
        sampler = Sampler(inference, objective, tmp_path, {"guidance": 0.3})
        labels = torch.arange(3)
        sampler.sample(70, conditions={"labels": labels}, batch_size=batch_size)
        return sampler.acceptance.counts.tolist()

    expected = counts(70)
    memory = PretendedMemory(1_000, (100, 50))
    measured(memory)
    assert counts(None) == expected
    assert memory.sizes[:2] == [1, 5]


def test_an_interrupted_file_keeps_its_batch_size(batches, context, tmp_path):
    path = tmp_path / "images.npz"
    small, large = PretendedMemory(100, (0, 10)), PretendedMemory(10**6, (0, 10))

    def interrupted(numbers):
        if numbers[0] >= 16:
            raise KeyboardInterrupt
        return small.draw(numbers)

    common = {"num_images": 70, "settings": {"seed": 1}}
    with pytest.raises(KeyboardInterrupt):
        write_npz(path, interrupted, batches=batches(small), **common)
    kept = json.loads((tmp_path / "images.npz.parts" / "settings.json").read_text())
    assert kept == {"seed": 1, "num_images": 70, "batch_size": 8}
    with pytest.raises(UserError, match="other settings"):
        write_npz(path, large.draw, batches=batches(large, 9), **common)
    # On another device, all 70 would fit.
    write_npz(path, large.draw, batches=batches(large), **common)
    assert large.sizes == [8] * 6 + [6]
    assert np.array_equal(np.load(path)["arr_0"], 10 * np.arange(70)[:, None])


def test_a_resumed_file_halves_batches_of_a_larger_device(batches, tmp_path):
    path, memory = tmp_path / "images.npz", PretendedMemory(40, (0, 10))
    (tmp_path / "images.npz.parts").mkdir()
    settings = json.dumps({"num_images": 20, "batch_size": 8})
    (tmp_path / "images.npz.parts" / "settings.json").write_text(settings)
    write_npz(path, memory.draw, batches=batches(memory), num_images=20, settings={})
    assert memory.sizes == [8, 4, 4, 4, 4, 4]
    assert np.array_equal(np.load(path)["arr_0"], 10 * np.arange(20)[:, None])


def test_a_half_deleted_folder_lends_no_part_to_other_images(
    batches, context, tmp_path, monkeypatch
):
    path, memory = tmp_path / "images.npz", PretendedMemory(10**6, (0, 10))

    def killed_while_deleting(folder, **_):
        for part in sorted(folder.iterdir(), reverse=True)[:2]:
            part.unlink()
        raise KeyboardInterrupt

    def write(seed, size):
        def draw(numbers):
            return numbers[:, None] * 10 + seed

        settings = {"seed": seed}
        write_npz(path, draw, batches=batches(memory, size), num_images=8, settings=settings)
        return np.load(path)["arr_0"][:, 0].tolist()

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", killed_while_deleting)
        with pytest.raises(KeyboardInterrupt):
            write(1, 2)
    assert (tmp_path / "images.npz.parts" / "000000000.npy").exists()
    assert write(2, 4) == [2, 12, 22, 32, 42, 52, 62, 72]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("damage", ["", "\0" * 160, "x", "short"])
def test_damaged_parts_are_generated_again(batches, tmp_path, damage):
    path, memory = tmp_path / "images.npz", PretendedMemory(10**6, (0, 10))
    folder = tmp_path / "images.npz.parts"
    folder.mkdir()
    settings = json.dumps({"num_images": 6, "batch_size": 2})
    (folder / "settings.json").write_text(settings)
    for start in (0, 2, 4):
        np.save(folder / f"{start:09d}.npy", np.array([[start * 10], [start * 10 + 10]]))
    part = folder / "000000002.npy"
    whole = part.read_bytes()
    part.write_bytes(whole[:-1] if damage == "short" else damage.encode())
    write_npz(path, memory.draw, batches=batches(memory), num_images=6, settings={})
    assert memory.sizes == [2]
    assert np.load(path)["arr_0"][:, 0].tolist() == [0, 10, 20, 30, 40, 50]


def test_damaged_settings_are_named(batches, tmp_path):
    path, memory = tmp_path / "images.npz", PretendedMemory(10**6, (0, 10))
    folder = tmp_path / "images.npz.parts"
    folder.mkdir()
    for damage in (b"", b"\0\xff", b"{}", b"[]", b'{"batch_size": 0}'):
        (folder / "settings.json").write_bytes(damage)
        with pytest.raises(UserError, match=re.escape(f"{folder} holds images")):
            write_npz(path, memory.draw, batches=batches(memory), num_images=6, settings={})


def test_parts_are_joined_one_by_one(batches, tmp_path):
    path, memory = tmp_path / "images.npz", PretendedMemory(10**9, (0, 10))
    shape, generator = (4, 64, 64, 3), np.random.default_rng(0)
    parts = [generator.integers(0, 256, shape, dtype=np.uint8) for _ in range(32)]

    def draw(numbers):
        return torch.from_numpy(parts[int(numbers[0]) // 4])

    tracemalloc.start()
    write_npz(path, draw, batches=batches(memory, 4), num_images=128, settings={})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 128 * 64 * 64 * 3 / 4
    expected = io.BytesIO()
    np.savez(expected, arr_0=np.concatenate(parts))
    assert path.read_bytes() == expected.getvalue()


def test_decoding_is_halved(build_paper, monkeypatch, tmp_path):
    objective, inference = build_paper(GIVT)
    sampler = Sampler(inference, objective, tmp_path)
    tokens = sampler.sample(5, conditions={"labels": torch.arange(3)})
    expected = sampler.to_images(tokens)
    decode, sizes = type(sampler.model).to_images, []

    def short_of_memory(self, part, folder):
        sizes.append(len(part))
        if len(part) > 3:
            raise torch.OutOfMemoryError
        return decode(self, part, folder)

    monkeypatch.setattr(type(sampler.model), "to_images", short_of_memory)
    assert torch.equal(sampler.to_images(tokens), expected)
    assert sizes == [5, 2, 2, 1]
