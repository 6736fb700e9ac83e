"""The study of docs/comparison.md: all papers on letters, equal in network and images seen.

    python -m benchmarks.comparison --out comparison
    make comparison                  # the same; SMALL=1: every command, on few images

Each paper is pre-trained and probed, generates images if it can, and is fine-tuned to classify,
with three seeds. Letters, palette, VAE and VQGAN are made once. Shards, runs, logs and tables go to
`--out`. An interrupted study continues when it is started again: existing results are kept.
`--records FOLDER` shares a study among machines: each machine's table has all finished results.
"""
