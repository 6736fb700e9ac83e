"""`megavis parity` where training amplifies rounding: noise is measured, and faults are found."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from layout_curves import largest_difference, make_config, with_layout

from megavis.config.schema import RunConfig
from megavis.parallel.launch import Launch
from megavis.training.engine import Engine
from megavis.training.parity import Curve, Noise, judge, parity_config, train_briefly

STEPS, LEAST = 14, 1e-5


@pytest.fixture(scope="module")
def mixture_config(image_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """Patches one by one with a mixture density, at a high learning rate without warm-up."""
    path = tmp_path_factory.mktemp("parity") / "mixture.yaml"
    path.write_text(
        f"""\
name: mixture
output: {path.parent}/runs
objective:
  name: compose
  reads: {{kind: patches, patch_size: 4}}
  schedule: {{kind: one_by_one}}
  asks: {{kind: shift}}
  density: {{kind: gaussian_mixture, num_components: 4}}
model:
  num_layers: 2
  hidden_size: 32
  num_attention_heads: 4
  normalization: layer_norm
  add_bias: true
data: {{train: {image_shards}/train, image_size: 16}}
optimizer: {{learning_rate: 3e-2}}
training: {{steps: {STEPS}, batch_size: 8, micro_batch_size: 2}}
"""
    )
    return make_config(path)


@pytest.fixture(scope="module")
def alone(run_job: Any, mixture_config: RunConfig) -> tuple[Curve, Noise]:
    """The curve of one process, and its noise."""
    changes = (None, 0, 1, 2)
    curves = [
        run_job(train_briefly, 1, mixture_config, STEPS, "cpu", change)[0] for change in changes
    ]
    return curves[0], Noise.of(curves[1:], curves[0])


TENSOR = {"tensor_model_parallel_size": 2, "zero_stage": 0}


def test_rounding_is_no_fault(run_job: Any, alone: Any, mixture_config: RunConfig) -> None:
    reference, noise = alone
    curves = run_job(train_briefly, 2, with_layout(mixture_config, **TENSOR), STEPS)
    result = judge("tp2", curves, reference, noise, LEAST)
    assert result.passed, result.error
    assert largest_difference(curves, reference) > LEAST, "was called a fault"


def test_noise_starts_at_rounding(alone: Any) -> None:
    """The first step has nothing to amplify; afterwards the noise grows by orders of magnitude."""
    _, noise = alone
    assert max(noise.loss[0], noise.gradient_norm[0]) < 3e-6
    assert max(noise.loss[-1], noise.gradient_norm[-1]) > 10 * LEAST


@contextlib.contextmanager
def doubled_gradients() -> Iterator[None]:
    """Double the gradients of one layer, as a sum over a group that is done twice would."""
    build = Engine._local_layers

    def local_layers(self: Engine, plans: Any, module: Any) -> Any:
        layers = build(self, plans, module)
        for parameter in layers.modules[-1].parameters():
            parameter.register_hook(lambda gradient: 2 * gradient)
        return layers

    with mock.patch.object(Engine, "_local_layers", local_layers):
        yield


@contextlib.contextmanager
def missing_all_reduce() -> Iterator[None]:
    """Leave out the sums over the tensor group after row-parallel layers."""
    from megatron.core.tensor_parallel import mappings

    with mock.patch.object(mappings, "_reduce", lambda tensor, *_: tensor):
        yield


@contextlib.contextmanager
def missing_average() -> Iterator[None]:
    """Leave out the average of gradients over data-parallel processes."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    with mock.patch.object(DeepSpeedEngine, "allreduce_gradients", return_value=None):
        yield


def with_fault(
    launch: Launch,
    config: RunConfig,
    fault: Callable[[], contextlib.AbstractContextManager[None]],
) -> Curve:
    """Train as `train_briefly` does, with a fault."""
    with fault():
        return train_briefly(launch, config, STEPS)


@pytest.mark.parametrize(
    ("fault", "layout"),
    [
        (doubled_gradients, TENSOR),
        (missing_all_reduce, TENSOR),
        pytest.param(missing_average, {"zero_stage": 0}, marks=pytest.mark.once),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_wrong_layout_fails(
    run_job: Any, alone: Any, mixture_config: RunConfig, fault: Any, layout: dict[str, Any]
) -> None:
    reference, noise = alone
    curves = run_job(with_fault, 2, with_layout(mixture_config, **layout), fault)
    result = judge("wrong", curves, reference, noise, LEAST)
    assert not result.passed
    # Where nothing has been amplified yet, so that the strict tolerance applies.
    assert result.error.startswith("step 1 differs")


def test_half_precision_is_judged_by_its_own_rounding(
    run_job: Any, mixture_config: RunConfig
) -> None:
    """bf16 rounds to three digits, so that 1e-5 is no measure of a layout."""
    training = mixture_config.training.model_copy(update={"precision": "bf16"})
    optimizer = mixture_config.optimizer.model_copy(update={"learning_rate": 1e-3})
    changed = {"training": training, "optimizer": optimizer}
    config = parity_config(mixture_config.model_copy(update=changed))
    steps = 4
    curves = [run_job(train_briefly, 1, config, steps, "cpu", i)[0] for i in (None, 0, 1, 2)]
    noise = Noise.of(curves[1:], curves[0])
    layout = with_layout(config, **{**TENSOR, "zero_stage": 1})
    split = run_job(train_briefly, 2, layout, steps)
    result = judge("tp2", split, curves[0], noise, LEAST)
    assert result.passed, result.error
    assert largest_difference(split, curves[0]) > LEAST, "was called a fault"
    assert result.loss_tolerance < 2**-6
