"""What `megavis parity` allows a layout, on curves whose verdict is known."""

import math

import pytest

from megavis.training.parity import Noise, judge

pytestmark = pytest.mark.once

LEAST = 1e-5
REFERENCE = [(4.0, 1.0), (3.0, 2.0), (2.0, 4.0)]


def moved(*differences):
    """Return the reference with loss and gradient norm moved by relative differences."""
    return [
        (loss * (1 + by_loss), norm * (1 + by_norm))
        for (loss, norm), (by_loss, by_norm) in zip(REFERENCE, differences, strict=True)
    ]


def verdict(noise, *layout, least=LEAST):
    perturbed = [moved(*differences) for differences in noise]
    return judge("x", [moved(*layout)], REFERENCE, Noise.of(perturbed, REFERENCE), least)


QUIET = [[(1e-7, 2e-7), (1e-7, 3e-7), (2e-7, 9e-6)]]
AMPLIFYING = [[(1e-7, 1e-7), (1e-6, 5e-4), (1e-4, 2e-3)], [(0, 2e-7), (1e-6, 1e-3), (1e-4, 1e-3)]]


def test_rounding_that_training_amplifies_is_no_fault_of_a_layout():
    result = verdict(AMPLIFYING, (0, 1e-7), (2e-6, 8e-4), (2e-4, 3e-3))
    assert result.passed, result.error
    # With a fixed tolerance it was one.
    assert max(result.loss_difference, result.gradient_norm_difference) > LEAST
    assert result.gradient_norm_noise == pytest.approx(2e-3, rel=1e-6)


@pytest.mark.parametrize(
    ("layout", "step"),
    [
        pytest.param([(0, 1.0), (0, 1.0), (0, 1.0)], 1, id="gradients doubled"),
        pytest.param([(0, 2e-5), (0, 0), (0, 0)], 1, id="before training amplifies anything"),
        pytest.param([(0, 0), (2e-5, 0), (1e-4, 0)], 2, id="the loss, whose noise is less"),
        pytest.param([(0, 0), (0, 0), (0, 3e-2)], 3, id="far more than rounding made"),
    ],
)
def test_a_fault_is_one_where_rounding_is_amplified_too(layout, step):
    result = verdict(AMPLIFYING, *layout)
    assert not result.passed
    assert result.error.startswith(f"step {step} differs: the ")


@pytest.mark.parametrize("difference", [1.2e-5, 3e-5])
def test_a_quiet_config_keeps_the_tolerance(difference):
    assert verdict(QUIET, (0, 0), (0, 0), (9e-6, 9e-6)).passed
    result = verdict(QUIET, (0, 0), (0, 0), (0, difference))
    assert not result.passed
    assert result.loss_tolerance == result.gradient_norm_tolerance == LEAST


def test_noise_is_never_less_than_at_an_earlier_step():
    noise = Noise((1e-7, 4e-4, 4e-4), (0.0, 1e-3, 1e-3))
    perturbed = [moved((1e-7, 0), (4e-4, 1e-3), (1e-5, 1e-6))]
    measured = Noise.of(perturbed, REFERENCE)
    assert measured.loss == pytest.approx(noise.loss)
    assert measured.gradient_norm == pytest.approx(noise.gradient_norm)


@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_layout_that_diverges_alone_fails(place, value):
    curve = moved((0, 0), (0, 0), (0, 0))
    curve[place] = (value, curve[place][1])
    noise = Noise.of([REFERENCE], REFERENCE)
    # Of several processes, also if another one is right: no number is larger than NaN.
    assert not judge("x", [REFERENCE, curve, REFERENCE], REFERENCE, noise, LEAST).passed


def test_infinite_gradients_of_both_are_equal():
    reference = [(1.0, math.inf), (0.0, 1.0)]
    noise = Noise.of([reference], reference)
    assert judge("x", [reference], reference, noise, LEAST).passed
    assert not judge("x", [[(1.0, 1.0), (0.0, 1.0)]], reference, noise, LEAST).passed
    assert not judge("x", [[(1.0, math.inf), (1e-9, 1.0)]], reference, noise, LEAST).passed
