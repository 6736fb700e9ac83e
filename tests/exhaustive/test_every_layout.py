"""Every legal layout of four processes against one, for every small model of `small_configs.py`.

The test of `megavis parity CONFIG --layouts everything`. It takes hours, so it is run by
`make test-layouts` only.
"""

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
from small_configs import SMALL

from megavis.config.load import load_config
from megavis.config.section import ParallelConfig
from megavis.planning.layouts import legal_layouts
from megavis.training.parity import ParityResult, compare_layouts, parity_config

PROCESSES, STEPS, BATCH, TOLERANCE = 4, 3, 8, 1e-5


def show(comparison: ParityResult) -> None:
    verdict = "pass" if comparison.passed else f"FAIL {comparison.error}"
    loss, norm = comparison.loss_difference, comparison.gradient_norm_difference
    print(f"{comparison.layout:<30} {loss:.1e} {norm:.1e} {verdict}", flush=True)


def micro_batch_size(parallel: ParallelConfig) -> int:
    """Return the size for two micro-batches a step, so that each layout accumulates gradients.

    Four with four stages, so that each stage has one at the same time.
    """
    data = PROCESSES // parallel.model_parallel_size
    return BATCH // (data * max(2, parallel.pipeline_model_parallel_size))


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", list(SMALL))
def test_every_layout(write_config: Callable[[str], Path], name: str) -> None:
    loaded = load_config(write_config(name)).config
    training = loaded.training.model_copy(update={"batch_size": BATCH, "micro_batch_size": 1})
    config = parity_config(loaded.model_copy(update={"training": training}))
    by_size: dict[int, list[ParallelConfig]] = defaultdict(list)
    for parallel in legal_layouts(config, PROCESSES):
        by_size[micro_batch_size(parallel)].append(parallel)
    comparisons = []
    for size, layouts in by_size.items():
        training = config.training.model_copy(update={"micro_batch_size": size})
        comparisons += compare_layouts(
            config.model_copy(update={"training": training}),
            layouts,
            num_processes=PROCESSES,
            steps=STEPS,
            tolerance=TOLERANCE,
            device="cpu",
            report_noise=lambda noise: print(
                f"noise {noise.loss[-1]:.1e} {noise.gradient_norm[-1]:.1e}"
            ),
            report=show,
        )
    loss = max(comparison.loss_difference for comparison in comparisons)
    norm = max(comparison.gradient_norm_difference for comparison in comparisons)
    print(f"{name}: {len(comparisons)} layouts, loss within {loss:.1e}, gradient norm {norm:.1e}")
    assert not [comparison for comparison in comparisons if not comparison.passed]
