"""Whole tokens are a value of a forward pass: nothing that layers share changes."""

import dataclasses

import pytest

from megavis.model.tensor_parallel import splits_tokens, whole_tokens


@dataclasses.dataclass(frozen=True)
class Settings:
    sequence_parallel: bool


@pytest.mark.parametrize("flag", [True, False])
def test_tokens_are_whole_inside_the_block_alone(flag):
    settings = Settings(flag)  # Frozen: a write would raise.
    assert splits_tokens(settings) is flag
    with whole_tokens():
        with whole_tokens():
            assert not splits_tokens(settings)
        assert not splits_tokens(settings)
    assert splits_tokens(settings) is flag


def test_a_pass_over_whole_tokens_ends_between_the_steps_of_generation(build, tmp_path):
    """A picture that is drawn step by step must not reach into what its caller runs between."""
    _, runner = build(tmp_path / "c.yaml")
    seen = []

    def finish(head, state):
        seen.append(splits_tokens(Settings(True)))
        return head(state)

    ids = runner.layers.modules[0].tokens.weight.new_zeros(1, 16).long()
    objective, _ = build(tmp_path / "c.yaml")
    for whole in (True, False):
        runner.predictions(objective.inputs_from(ids), finish=finish, whole=whole)
    assert seen == [False, True]
    assert splits_tokens(Settings(True))
