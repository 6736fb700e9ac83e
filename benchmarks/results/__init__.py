"""The study of docs/results.md: every paper on real images, by the shipped commands.

    python -m benchmarks.results DATA --out results
    make results DATA=DATA           # the same; SMALL=1: every command, on few images

DATA is a folder with any of these, packed or unpacked, at the top or one folder below it:

- CIFAR-10: `train/` and `test/` with a folder of images for each class, or its authors' files;
- MNIST, as its authors publish it;
- the Free Spoken Digit Dataset: `7_speaker_0.wav`, or `7/speaker_0.wav`.

Shards, runs, logs and tables go to `--out`. An interrupted study continues when it is started
again: existing shards, trained runs and results are kept. The classes of the test images are read
once for each method, by its last commands; `--without-test` omits these commands.
`--records FOLDER` shares a study among machines: each machine's tables have all finished results.
"""
