"""Write docs/gallery.md and its images from the runs of the demos; called by `make demos`.

Demos that have not been run are omitted.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megavis.commands.report import summary
from megavis.config.errors import UserError
from megavis.reports.run_record import RunRecord

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PICTURES = Path("images/gallery")
HEAD = """# Gallery

Images of capital letters, and of scenes, from the demos. Training never sees the validation fonts
and scenes. The models are small and train for minutes on two CPU cores. `make demos` runs all of
them and writes this page from their run folders.
"""


@dataclass(frozen=True)
class Demo:
    """Contents of the page for one demo.

    Attributes:
        paper: as `make demo PAPER=` names it.
        title: section title.
        runs: run folders whose numbers are printed; images come from the first.
        pictures: file patterns below a run folder, each with the caption of the newest match.
    """

    paper: str
    title: str
    runs: tuple[str, ...]
    pictures: tuple[tuple[str, str], ...]


DEMOS = (
    Demo(
        paper="igpt",
        title="iGPT: pixel by pixel",
        runs=("igpt_demo",),
        pictures=(
            (
                "igpt_demo/samples/completions-*.png",
                "The original, its upper half, and six completions (top-p 0.9)",
            ),
            ("igpt_demo/samples/samples-*.png", "Unconditional samples"),
        ),
    ),
    Demo(
        paper="igpt-bert",
        title="iGPT with BERT's objective: masked pixels",
        runs=("igpt_demo_bert",),
        pictures=(
            (
                "igpt_demo_bert/evaluation/depth.png",
                "Linear probe of each layer, 15 % of the pixels masked",
            ),
        ),
    ),
    Demo(
        paper="darl",
        title="DARL: patch by patch, denoised",
        runs=(
            "darl_demo",
            "darl_mse_demo",
            "darl_finetune_demo",
            "darl_scratch_demo",
        ),
        pictures=(
            (
                "darl_demo/evaluation/completions.png",
                "The original, its upper half, and three completions, each patch denoised",
            ),
            (
                "darl_mse_demo/evaluation/completions.png",
                "The original, its upper half, and the completion by squared error",
            ),
        ),
    ),
    Demo(
        paper="mp3",
        title="MP3: patches back to their positions",
        runs=("mp3_demo", "mp3_finetune_demo", "mp3_scratch_demo"),
        pictures=(
            (
                "mp3_demo/evaluation/jigsaw.png",
                "The letter, then its patches shuffled and reassembled with none, a quarter, half"
                " and three quarters of them masked; context patches outlined in green",
            ),
            (
                "mp3_demo/evaluation/positions.png",
                "Accuracy of predicted positions over the mask ratio",
            ),
        ),
    ),
    Demo(
        paper="givt",
        title="GIVT: latents of real numbers",
        runs=("givt_demo", "givt_demo_vae"),
        pictures=(
            (
                "givt_demo/samples/samples-*.png",
                "Samples of the classes A to J, with temperature 0.9 and guidance 0.4",
            ),
            (
                "givt_demo_vae/samples/samples-*.png",
                "Letters in unseen fonts, and their reconstructions by the VAE",
            ),
        ),
    ),
    Demo(
        paper="givt-dense",
        title="GIVT: label maps from images",
        runs=(
            "givt_demo_panoptic",
            "givt_demo_depth",
            "givt_demo_vae_panoptic",
            "givt_demo_vae_depth",
        ),
        pictures=(
            (
                "givt_demo_panoptic/samples/samples-*.png",
                "Unseen scenes, their panoptic maps, and GIVT's predictions",
            ),
            (
                "givt_demo_depth/samples/samples-*.png",
                "The same scenes, their depths, and GIVT's predictions; nearer is brighter",
            ),
        ),
    ),
    Demo(
        paper="gvp",
        title="GVP: hidden patches, group by group",
        runs=("gvp_demo", "gvp_demo_d2d", "gvp_demo_vqgan"),
        pictures=(
            (
                "gvp_demo/evaluation/groups.png",
                "Letters in unseen fonts; a quarter of their patches; and the others predicted by"
                " squared error all at once, in four and in twelve groups (p2p)",
            ),
            (
                "gvp_demo_d2d/evaluation/groups.png",
                "The same with sampled ids of a VQGAN (d2d); letters as reconstructed by it",
            ),
        ),
    ),
    Demo(
        paper="mae",
        title="MAE: three quarters of the patches from the rest",
        runs=("mae_demo", "mae_finetune_demo", "mae_scratch_demo"),
        pictures=(
            (
                "mae_demo/evaluation/reconstructions.png",
                "The visible quarter of a letter, the prediction of the rest, and the letter;"
                " predicted patches are scaled with their true mean and standard deviation",
            ),
        ),
    ),
    Demo(
        paper="dense",
        title="MAE: classes of pixels, and objects, from a hundred labelled scenes",
        runs=(
            "mae_segments_demo",
            "mae_segments_scratch_demo",
            "mae_instances_demo",
            "mae_instances_scratch_demo",
        ),
        pictures=(
            (
                "mae_segments_demo/evaluation/finetune_test.png",
                "Unseen scenes, the classes of their pixels, and the predicted ones",
            ),
            (
                "mae_instances_demo/evaluation/detection.png",
                "The objects of unseen scenes, and as many of the best detections and their scores",
            ),
        ),
    ),
    Demo(
        paper="aim",
        title="AIM: the next patch after a prefix",
        runs=("aim_demo", "aim_probe_demo"),
        pictures=(
            (
                "aim_demo/evaluation/reconstructions.png",
                "The prefix of a letter, the prediction of the patches after it, and the letter;"
                " predicted patches are scaled with their true mean and standard deviation",
            ),
        ),
    ),
    Demo(
        paper="rar",
        title="RAR: ids in random orders that become raster order",
        runs=("rar_demo", "gvp_demo_vqgan"),
        pictures=(
            ("rar_demo/samples/samples-*.png", "Samples of the classes A to D, with guidance"),
        ),
    ),
    Demo(
        paper="randar",
        title="RandAR: ids in any order, several at once",
        runs=("randar_demo", "gvp_demo_vqgan"),
        pictures=(
            ("randar_demo/samples/samples-*.png", "Samples of the classes A to D in 24 rounds"),
            (
                "randar_demo/samples/completions-*.png",
                "The original, half of its ids at random places, and six completions",
            ),
        ),
    ),
    Demo(
        paper="mar",
        title="MAR: latents in rounds, denoised",
        runs=("mar_demo", "givt_demo_vae"),
        pictures=(
            (
                "mar_demo/samples/samples-*.png",
                "Samples of the classes A to J in 16 rounds, with guidance 1",
            ),
        ),
    ),
)


def main(runs: Path, docs: Path) -> int:
    """Write the page and its images below `docs`; return 1 if no demo has been run."""
    sections = ["\n".join(section(demo, runs, docs)) for demo in DEMOS if is_there(demo, runs)]
    if not sections:
        sys.stderr.write(f"{runs} contains no demo run: run `make demos`\n")
        return 1
    page = docs / "gallery.md"
    page.write_text("\n".join([HEAD, *sections]), encoding="utf-8")
    sys.stdout.write(f"{page}: {len(sections)} of {len(DEMOS)} demos\n")
    return 0


def is_there(demo: Demo, runs: Path) -> bool:
    """Return whether all runs of a demo exist."""
    return all((runs / name / "metrics.jsonl").exists() for name in demo.runs)


def section(demo: Demo, runs: Path, docs: Path) -> Iterator[str]:
    """Yield the lines of a demo's section; copy its images."""
    yield f"## {demo.title}\n\n```\nmake demo PAPER={demo.paper}\n```\n"
    for number, (pattern, caption) in enumerate(demo.pictures):
        found = sorted(runs.glob(pattern))
        if not found:
            continue
        picture = PICTURES / f"{demo.paper}_{number}.png"
        (docs / PICTURES).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(found[-1], docs / picture)
        yield f"![{caption}]({picture.as_posix()})\n\n{caption}.\n"
    yield "```"
    for name in demo.runs:
        yield from numbers(RunRecord.read(runs / name))
    yield "```\n"


def numbers(run: RunRecord) -> Iterator[str]:
    """Yield the lines of a run's summary that contain numbers, not paths.

    Raises:
        UserError: a file of the run has another form than its command writes.
    """
    for reason in run.results[1].values():
        raise UserError(reason)
    path = str(run.folder)
    first, *lines = summary(run)
    yield first.replace(path, run.name)
    yield from (line for line in lines if path not in line)


if __name__ == "__main__":
    sys.exit(main(ROOT / "runs", DOCS))
