"""Training a VQGAN with `megavis train`, and its use as a tokenizer."""

import json

import pytest
import torch
from small_vqgan import write_config

from megavis.cli import main
from megavis.tokenizers.network_tokenizer import IdTokenizer, open_tokenizer

pytestmark = pytest.mark.once


def test_trained_run_is_a_tokenizer(tmp_path, image_shards):
    path = write_config(tmp_path, image_shards)
    assert main(["train", str(path), "--device", "cpu"]) == 0
    lines = (tmp_path / "small" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    errors = [r["validation_squared_error"] for r in records if "validation_loss" in r]
    assert errors[-1] < 0.8 * errors[0]
    assert 0 < records[-1]["validation_codebook_use"] <= 1
    assert (tmp_path / "small" / "samples" / "step-00000020.png").exists()
    tokenizer = open_tokenizer(tmp_path / "small")
    assert isinstance(tokenizer, IdTokenizer)
    images = torch.randint(256, (2, 16, 16, 3), dtype=torch.uint8)
    ids = tokenizer.encode(images)
    assert ids.shape == (2, tokenizer.num_tokens(16))
    assert 0 <= int(ids.min()) <= int(ids.max()) < tokenizer.vocabulary_size
    assert tokenizer.decode(ids).shape == images.shape
