"""The table of dense prediction: the paper's row, and the run's in the columns of its maps."""

import pytest
from made_results import made, write_results

from megavis.config.errors import UserError
from megavis.reports.published import dense_table, markdown_of, reconstruction_of

pytestmark = pytest.mark.once

EXPECTED = """\
# Table 3: Panoptic segmentation and depth estimation

| model | PQ, recon. | PQ, inference | RMSE, recon. | RMSE, inference |
| --- | --- | --- | --- | --- |
| GIVT-Causal (UViM) | 71.0 | 40.2 | 0.195 | 0.474 |
| scenes |  |  | 0.279 | 0.436 |

Rows above scenes are the paper's: photographs of COCO Panoptic 2017 (PQ) and NYU Depth v2 \
(RMSE in metres).
That of scenes is of 200 images of shards: other data, unless these are the same images.
"""


def test_own_row_is_below_that_of_the_paper():
    table = dense_table("givt_encoder_decoder")
    values = {"RMSE, recon.": 0.27918, "RMSE, inference": 0.4363}
    assert markdown_of(table, "scenes", values, images="200 images of shards") == EXPECTED


def test_papers_without_such_a_table_have_none():
    assert dense_table("mae") is None
    assert dense_table("compose") is None


def test_reconstruction_counts_on_the_same_images(tmp_path):
    result, other = made("panoptic.json"), made("panoptic.json", images=6)
    assert reconstruction_of(tmp_path, "panoptic.json", result) is None
    written = made("panoptic.json", step=5)
    write_results(tmp_path, panoptic=written)
    assert reconstruction_of(tmp_path, "panoptic.json", result) == written
    assert reconstruction_of(tmp_path, "panoptic.json", other) is None
    (tmp_path / "evaluation" / "panoptic.json").write_text('{"of": "shards", "images": 200}')
    with pytest.raises(UserError, match=r"panoptic.json is not a result .*: `step` is missing"):
        reconstruction_of(tmp_path, "panoptic.json", result)
