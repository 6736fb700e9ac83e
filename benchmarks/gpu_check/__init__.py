"""The first hour on a GPU: whether megavis works, how fast it is, and what to correct.

    python -m benchmarks.gpu_check                 # all ten stages
    python -m benchmarks.gpu_check --stages 1,3    # some of them
    python -m benchmarks.gpu_check --small         # all code paths on tiny sizes, about a minute
    python -m benchmarks.gpu_check --device cpu    # the same without a GPU

Each stage stops after `--limit` minutes (9.5) and keeps its measurements; the same command
continues with the missing parts. Finished stages are skipped unless `--again` is given. Ctrl-C, a
time limit or a crash loses only the parts that were running. Stages 2, 3, 4 and 9 measure no time:
on a GPU, `--jobs` of their parts run at once, by default one for two cores, up to eight.

    stage  minutes  what
    1      3        versions, an all-reduce, speed of products and memory, SDPA kernels, a CPU run
    2      6        losses and gradients of every demo on the CPU and on the GPU, random numbers,
                    Transformer Engine and FP8 where installed
    3      5        ZeRO 0 to 3 from one checkpoint, float32 and bf16; saved at ZeRO-3, on at ZeRO-1
    4      3        waits for the device inside a step, from the sixth step on
    5      12       the papers' presets: step time, MFU, memory, where the time goes
    6      6        decoding: batch 1, 16, 64; float32, bf16, CUDA graph; largest batch
    7      4        the loader alone and during a step; the stall of a save
    8      3        two equal runs, replica check, a refit of the planner
    9      2        a whole `megavis train`: killed after a save, resumed, with a grid of samples
    10              two to eight GPUs: all-reduces, layouts against one process, ZeRO-2 with
                    overlapping communication, a resume in another layout, the host's time under
                    tensor parallelism; never measured yet

Nothing needs to be installed. With a folder of wheels and no network, from the checkout:

    python -m pip install --no-index --find-links wheels megavis     # or, without pip:
    for wheel in wheels/*.whl; do python -m zipfile -e "$wheel" unpacked; done
    PYTHONPATH=unpacked:. python -m benchmarks.gpu_check

The output folder holds `stage-N.json`, `report.json` (a list of all of them), `report.md` and
`worker.log` (what libraries print; in `jobs/N` of parts that ran at once). A stage's file:

    stage, title     its number and what it measures
    device, small    cpu or cuda; true where sizes were tiny, so that times mean nothing
    finished         true where every part has run to its end
    stopped          why it stopped early; empty otherwise
    seconds          of all its parts
    facts            device, driver, processor, date and versions
    parts            by name: finished, seconds, error (empty, or the last line of what was raised),
                     trace (all of it) and rows

A row is one measurement:

    what             for example "GVP-B, ZeRO-1: MFU"
    value            number, string or true/false; null if it is meaningful only on a GPU
    unit             unit of the value; may be empty
    aim              the number to reach or to compare with, as text; may be empty
    passed           true/false if there is a right answer; null if the row is only informative
    note             a note for the reader, such as why there is no value
    detail           further data for programs: curves, kernels, what was compared
"""
