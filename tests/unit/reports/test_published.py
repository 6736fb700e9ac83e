"""Tables of published results: completeness, and rows checked against the papers."""

import pytest

from megavis.reports.published import published_papers

pytestmark = pytest.mark.once

PRINTED = [
    ("igpt", "Table 1", ("CIFAR-100", "ResNet-152", "yes", "78.0")),
    ("igpt", "Table 4", ("iGPT-L", "26.8 ± 1.5", "12.4 ± 0.6", "5.7 ± 0.1")),
    ("givt", "Table 1", ("masked", "GIVT-MaskGIT", "t_C = 35", "16", "4.64", "0.85", "0.49")),
    (
        "givt_encoder_decoder",
        "Table 3",
        ("GIVT-Causal (UViM)", "71.0", "40.2", "0.195", "0.474"),
    ),
    ("darl", "Table 5", ("generative", "DARL (DIFF)", "81.9", "84.9", "85.9", "")),
    ("gvp", "Table 5", ("GVP-p2p", "800", "69.6", "84.0")),
    ("rar", "Table 2", ("200", "300", "2.18", "269.7", "0.83", "0.55")),
    ("rar", "Table 4", ("autoregressive", "RAR-B", "261M", "1.95", "290.5", "0.82", "0.58")),
    ("randar", "Table 2 of ARPG", ("RandAR-XL", "775M", "88", "2.25", "317.8", "0.80", "0.60")),
    ("mar", "Table 3", ("1024", "21M", "0.288", "with guidance", "1.97", "291.2")),
    ("mp3", "Table 3", ("MP3", "2K", "2D relative", "84.2", "73.2")),
]


@pytest.mark.parametrize(("objective", "number", "row"), PRINTED)
def test_rows_match_the_paper(objective, number, row):
    tables = {table.table: table for table in published_papers()[objective].tables}
    assert row in tables[number].rows


def test_every_row_has_one_entry_per_column():
    papers = published_papers()
    givt = {"givt", "givt_maskgit", "givt_encoder_decoder", "vae_label_maps"}
    plain = {"igpt", "darl", "gvp", "mp3", "mae", "aim", "rar", "randar", "mar"}
    assert set(papers) == plain | givt
    for paper in papers.values():
        assert len({table.table for table in paper.tables}) == len(paper.tables)
        for table in paper.tables:
            assert {len(row) for row in table.rows} == {len(table.columns)}, table.table
