"""Measure inside one checkout: a process that reads jobs as lines of JSON and replies.

Started by `__main__.py` with a PYTHONPATH that selects the checkout's `megavis`. The current folder
is the recording's; all paths are relative to it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import json
import os
import shlex
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.compare_trees import adapter, records
from benchmarks.compare_trees.cases import (
    BASES,
    CASES,
    DATA,
    LAYOUTS,
    NUM_STEPS,
    REFUSALS,
    SAVED_STEP,
    Case,
)
from benchmarks.compare_trees.records import SECONDS, Record

_SPEEDS = ("samples_per_s", "tokens_per_s", "mfu", "save_stall_s")
_BY_NAME = {case.name: case for case in CASES}


class Said(NamedTuple):
    """Output of a command."""

    code: int
    out: str
    error: str
    seconds: float


def call(words: Sequence[str], program: str = "megavis") -> Said:
    """Run a command in this process; seconds are CPU time."""
    out, error = io.StringIO(), io.StringIO()
    before = time.process_time()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            code = _main(program)(list(words))
        except SystemExit as end:
            code = int(end.code or 0)
        finally:
            adapter.close_job()
    return Said(code, out.getvalue(), error.getvalue(), time.process_time() - before)


def _main(program: str) -> Callable[[list[str]], int]:
    module = {"megavis": "megavis.cli", "data_tools": "data_tools.__main__"}[program]
    main: Callable[[list[str]], int] = importlib.import_module(module).main
    return main


def must(words: Sequence[str], program: str = "megavis") -> Said:
    """Run a command that must succeed; raises RuntimeError with its output."""
    said = call(words, program)
    if said.code != 0:
        raise RuntimeError(f"{program} {shlex.join(words)}: exit code {said.code}\n{said.error}")
    return said


def write_configs() -> None:
    """Write the base configs."""
    for name, text in BASES.items():
        Path(f"{name}.yaml").write_text(text, encoding="utf-8")


def make_data() -> Record:
    """Make the data that both trees read."""
    for line in DATA:
        program, *words = shlex.split(line)
        must(words, program)
    return {}


def measure_fresh(name: str) -> Record:
    """Train a case from scratch, and plan it."""
    case = _BY_NAME[name]
    words = [f"{case.base}.yaml", *case.overrides]
    with adapter.watched_training() as seen:
        said = must(["train", *words, "--device", "cpu"])
    run = Path("runs", name)
    record: Record = {
        "fresh/curve": _curve(run, 0),
        "fresh/parameters": seen.parameters,
        "fresh/config": (run / "config.yaml").read_text(encoding="utf-8"),
        "fresh/said": said.out,
        f"{SECONDS}step": min(seen.step_seconds),
        **_pictures(run / "samples", "fresh/picture"),
    }
    for number, (inputs, targets) in enumerate(seen.sequences[:NUM_STEPS]):
        record |= {f"fresh/inputs {number}.{i}": value for i, value in enumerate(inputs)}
        record |= {f"fresh/targets {number}.{i}": value for i, value in enumerate(targets)}
    np.savez(f"images-{name}.npz", inputs=seen.batches[0][0], labels=seen.batches[0][1])
    for key, command in {
        "params": ["params", *words, "--json"],
        "plan": ["plan", *words, "--gpus", "4", "--json"],
    }.items():
        record |= _said(f"fresh/{key}", call(command))
    return record


def measure_loaded(name: str) -> Record:
    """Load the old tree's run: resume, run, sample and evaluate it."""
    record = _resumed(_BY_NAME[name])
    run = Path("loaded", name)
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(Path("../old/runs", name), run)
    with np.load(f"../old/images-{name}.npz") as images:
        given = _own_form(_BY_NAME[name].base, images["inputs"], images["labels"])
        record |= _opened(run, images["inputs"], given)
    for options in _BY_NAME[name].samples:
        record |= _sampled(run, options)
    for line in _BY_NAME[name].commands:
        record |= _evaluated(run, line)
    return record


def _resumed(case: Case) -> Record:
    source, target = Path("../old/runs", case.name), Path("resumed", case.name)
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    shutil.rmtree(target / "checkpoints" / f"step-{NUM_STEPS:08d}")
    (target / "checkpoints" / "latest").write_text(f"step-{SAVED_STEP:08d}\n")
    words = [f"{case.base}.yaml", *case.overrides, "output=resumed"]
    must(["train", *words, "--device", "cpu"])
    return {"resumed/curve": _curve(target, SAVED_STEP)}


def _own_form(base: str, inputs: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
    """Return the arguments of `run.outputs`: inputs in the paper's form, and conditions."""
    if base == "pairs":
        return {"inputs": inputs[:, 1], "image": inputs[:, 0]}
    return {"inputs": inputs, "labels": labels} if base == "latents" else {"inputs": inputs}


def _opened(run_folder: Path, inputs: np.ndarray, given: Mapping[str, np.ndarray]) -> Record:
    import megavis

    run = megavis.load(str(run_folder), device="cpu")
    record: Record = {}
    try:
        fresh = run.untrained()
        record |= {f"fresh/weight {key}": value for key, value in adapter.weights(fresh).items()}
        for prefix, each in (("loaded", run), ("fresh", fresh)):
            record |= _answers(prefix, each, inputs, given)
        if run_folder.name.startswith(("igpt", "darl")):
            half = {"originals": inputs, "given": 0.5, "temperature": 0.8}
            draws: dict[str, dict[str, Any]] = {"2": {"num_images": 2, "seed": 3}, "half": half}
            for key, options in draws.items():
                question = functools.partial(adapter.sampled_tokens, run, **options)
                record |= _answer(f"loaded/sample {key}", question)
    finally:
        adapter.close_job()
    return record


def _answers(prefix: str, run: Any, inputs: np.ndarray, given: Mapping[str, np.ndarray]) -> Record:
    import torch

    tensor = torch.from_numpy(inputs)
    own = {name: torch.from_numpy(value) for name, value in given.items()}
    return {
        **_answer(f"{prefix}/loss", lambda: run.loss(tensor)),
        **_answer(f"{prefix}/features", lambda: run.features(tensor)),
        **_answer(f"{prefix}/outputs", lambda: run.outputs(**own)),
    }


def _answer(key: str, question: Callable[[], Any]) -> Record:
    """Return the result, or the exception."""
    try:
        answer = question()
    except Exception as error:
        return {key: f"{type(error).__name__}: {error}"}
    return {key: answer if isinstance(answer, float) else adapter.array(answer)}


def _sampled(run: Path, options: str) -> Record:
    key = f"sample {options}"
    out, npz = Path("sample.png"), Path("sample.npz")
    for file in (out, npz):
        file.unlink(missing_ok=True)
    words = [str(npz) if word == "NPZ" else word for word in shlex.split(options)]
    words = adapter.sample_words(words)
    said = call(["sample", str(run), *words, "--out", str(out), "--device", "cpu"])
    record = {**_said(key, said), f"{SECONDS}{key}": said.seconds}
    if out.exists():
        record[f"{key}/png"] = _pixels(out)
    if npz.exists():
        with np.load(npz) as archive:
            record |= {f"{key}/npz {name}": archive[name] for name in archive.files}
    return {**record, **_written(run, key)}


def _evaluated(run: Path, line: str) -> Record:
    shutil.rmtree(run / "evaluation", ignore_errors=True)
    words = [str(run) if word == "RUN" else word for word in shlex.split(line)]
    return {**_said(line, call([*words, "--device", "cpu"])), **_written(run, line)}


def _written(run: Path, key: str) -> Record:
    record: Record = {}
    for path in sorted((run / "evaluation").glob("*")):
        if path.suffix in (".json", ".csv"):
            record[f"{key}/{path.name}"] = path.read_text(encoding="utf-8")
        elif path.suffix == ".png":
            record[f"{key}/{path.name}"] = _pixels(path)
    return record


def _said(key: str, said: Said) -> Record:
    # On success, standard error has progress and throughput, which differ.
    error = said.error.replace(str(Path.cwd()), ".") if said.code else ""
    return {f"{key}/says": [said.code, said.out, error]}


def _curve(run: Path, first_step: int) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    metrics = [json.loads(line) for line in lines]
    return [
        {key: value for key, value in each.items() if key not in _SPEEDS}
        for each in metrics
        if each["step"] > first_step
    ]


def _pictures(folder: Path, key: str) -> Record:
    return {f"{key} {path.name}": _pixels(path) for path in sorted(folder.glob("*.png"))}


def _pixels(path: Path) -> np.ndarray:
    from PIL import Image

    return np.asarray(Image.open(path))


def measure_schema(_: str) -> Record:
    """Write the JSON schema."""
    return _said("schema", call(["schema"]))


def measure_presets(_: str) -> Record:
    """Read, count and plan every shipped config of the checkout."""
    record: Record = {}
    for path in sorted(Path("tree/yaml_configs").glob("*/*.yaml")):
        name = f"{path.parent.name}/{path.stem}"
        record |= {f"{name}/resolved": adapter.resolved_config(str(path))}
        record |= _said(f"{name}/params", call(["params", str(path), "--json"]))
        record |= _said(f"{name}/plan", call(["plan", str(path), "--gpus", "8", "--json"]))
    return record


def measure_refusals(_: str) -> Record:
    """Run the invalid commands."""
    return {
        key: value
        for line in REFUSALS
        for key, value in _said(line, call(shlex.split(line))).items()
    }


def measure_layout(name: str, layout: str, rank: int, port: int) -> Record:
    """Train a case on this process's part of a layout; the first process returns the record."""
    case, (processes, words) = _BY_NAME[name], LAYOUTS[layout]
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "MASTER_PORT": port}
    output = Path("layouts", layout)
    os.environ |= {key: str(value) for key, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
    try:
        command = ["train", f"{case.base}.yaml", *case.overrides, *shlex.split(words)]
        more = ["parallel.zero_stage=0"] if "zero_stage" not in words else []
        micro = ["training.micro_batch_size=2", f"output={output}", "training.sample_every=0"]
        said = call([*command, *more, *micro, "--device", "cpu"])
    finally:
        for key in (*place, "MASTER_ADDR"):
            del os.environ[key]
    if rank:
        return {}
    # Some papers reject some layouts; the rejection is recorded too.
    return {f"{layout}/curve": _curve(output / name, 0)} if not said.code else _said(layout, said)


PARTS: dict[str, Callable[[str], Record]] = {
    "fresh": measure_fresh,
    "loaded": measure_loaded,
    "schema": measure_schema,
    "presets": measure_presets,
    "refusals": measure_refusals,
    "data": lambda _: make_data(),
}


def work(job: dict[str, Any]) -> str:
    """Run a job and write its record; return the error, if any; details are in the log."""
    try:
        if job["part"] in LAYOUTS:
            record = measure_layout(job["case"], job["part"], job["rank"], job["port"])
        else:
            record = PARTS[job["part"]](job["case"])
    except BaseException as error:
        traceback.print_exc()
        return "".join(traceback.format_exception_only(error))
    if not job.get("rank"):
        records.write(Path("records", f"{job['case']}-{job['part']}"), record)
    return ""


@contextlib.contextmanager
def _answers_apart() -> Iterator[Any]:
    """Separate libraries' output from answers."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    with answers:
        yield answers


def main() -> None:
    """Run jobs until the input ends."""
    with _answers_apart() as answers:
        write_configs()
        for line in sys.stdin:
            answers.write(json.dumps(work(json.loads(line))) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
