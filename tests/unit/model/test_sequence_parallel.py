"""`whole_tokens` disables sequence parallelism for a forward pass without mutating configs."""

import dataclasses

import pytest

from megavis.model.tensor_parallel import splits_tokens, whole_tokens


@dataclasses.dataclass(frozen=True)
class Settings:
    sequence_parallel: bool


@pytest.mark.parametrize("flag", [True, False])
def test_whole_tokens_applies_only_inside_the_context(flag):
    settings = Settings(flag)  # frozen: assignment would raise
    assert splits_tokens(settings) is flag
    with whole_tokens():
        with whole_tokens():
            assert not splits_tokens(settings)
        assert not splits_tokens(settings)
    assert splits_tokens(settings) is flag


def test_whole_tokens_does_not_leak_from_predictions(build, tmp_path):
    """Code that runs between generation steps must see the original setting."""
    _, inference = build(tmp_path / "c.yaml")
    seen = []

    def finish(head, state):
        seen.append(splits_tokens(Settings(True)))
        return head(state)

    ids = inference.layers.modules[0].content.weight.new_zeros(1, 16).long()
    objective, _ = build(tmp_path / "c.yaml")
    for whole in (True, False):
        inference.predictions(objective.inputs_from(ids), finish=finish, whole=whole)
    assert seen == [False, True]
    assert splits_tokens(Settings(True))
