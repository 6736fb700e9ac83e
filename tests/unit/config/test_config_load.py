"""Loading configs: overrides, inheritance, and one-line errors naming place, key and remedy."""

from pathlib import Path

import pytest

from megavis.config.errors import UserError
from megavis.config.load import dump_config, load_config
from megavis.config.papers import PAPER_CONFIGS

PAPERS = ", ".join(sorted(PAPER_CONFIGS))


def test_defaults_are_filled_in(read):
    config = read().config
    assert config.model.hidden_size == 64
    assert config.model.mlp_size == 256
    assert config.model.head_size == 8
    assert config.parallel.zero_stage == 1
    assert config.optimizer.betas == (0.9, 0.95)
    assert config.objective.name == "igpt"
    assert config.folder == Path("runs/small")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "  hidden_size: 64",
            "  hiden_size: 64",
            "config.yaml:6: model.hiden_size: unknown key; did you mean 'hidden_size'?",
        ),
        (
            "  name: igpt\n",
            "  name: igpt\n  mask_ration: 0.2\n",
            "config.yaml:4: objective.mask_ration: unknown key; did you mean 'mask_ratio'?",
        ),
        (
            "name: small\n",
            "name: small\nbatch_size: 4\n",
            "config.yaml:2: batch_size: unknown key; did you mean 'training.batch_size'?",
        ),
        (
            "  steps: 10",
            "  steps: 10\n  qqq: 1",
            "config.yaml:15: training.qqq: unknown key; known here: steps, batch_size, ",
        ),
        (
            "name: small\n",
            "name: small\nparalel:\n  zero_stage: 1\n",
            "config.yaml:2: paralel: unknown key; did you mean 'parallel'?",
        ),
        (
            "  steps: 10",
            "  steps: ten",
            "config.yaml:14: training.steps: input should be a valid integer, not 'ten'",
        ),
        (
            "  steps: 10",
            "  steps: 1e6",
            "config.yaml:14: training.steps: input should be a valid integer, not 1000000.0",
        ),
        (
            "  steps: 10",
            "  steps: true",
            "config.yaml:14: training.steps: input should be a valid integer, not True",
        ),
        (
            "  steps: 10",
            "  steps: 0",
            "config.yaml:14: training.steps: input should be greater than 0, not 0",
        ),
        (
            "  learning_rate: 1e-3",
            "  learning_rate: .inf",
            "config.yaml:12: optimizer.learning_rate: input should be a finite number, not inf",
        ),
        (
            "  learning_rate: 1e-3",
            "  learning_rate: 1e-3\n  betas: [0.9, 1.5]",
            "config.yaml:13: optimizer.betas.1: input should be less than 1, not 1.5",
        ),
        (
            "  learning_rate: 1e-3",
            "  learning_rate: 1e-3\n  betas: [0.9]",
            "config.yaml:13: optimizer.betas.1: is missing and has no default",
        ),
        (
            "  steps: 10",
            "  steps: 10\n  precision: half",
            "config.yaml:15: training.precision: input should be 'float32', 'bf16' or 'fp16',"
            " not 'half'",
        ),
        (
            "  steps: 10",
            "  steps: 10\n  precision: fp32",
            "config.yaml:15: training.precision: input should be 'float32', 'bf16' or 'fp16',"
            " not 'fp32'; did you mean 'float32'?",
        ),
        (
            "  image_size: 8\n",
            "  image_size: 8\n  crop: Centre\n",
            "config.yaml:11: data.crop: input should be 'random_resized', 'inception', 'scaled',"
            " 'jittered', 'window', 'shifted', 'center' or 'none', not 'Centre'; did you mean"
            " 'center'?",
        ),
        (
            "  name: igpt\n",
            "  name: igpt\n  mode: autoregresive\n",
            "config.yaml:4: objective.mode: input should be 'autoregressive' or 'bert',"
            " not 'autoregresive'; did you mean 'autoregressive'?",
        ),
        (
            "  name: igpt",
            "  name: i-gpt",
            f"config.yaml:3: objective.name: must say which paper: one of {PAPERS}, not 'i-gpt';"
            " did you mean 'igpt'?",
        ),
        (
            "name: small\n",
            "name: ../up\n",
            "config.yaml:1: name: a run's name has only letters, digits, '.', '_' and '-'",
        ),
        (
            "  hidden_size: 64\n",
            "",
            "config.yaml:4: model.hidden_size: is missing and has no default",
        ),
        (
            "data:\n  train: shards/train\n  image_size: 8\n",
            "",
            "config.yaml: data: is missing and has no default",
        ),
        (
            "name: small\n",
            "name: small\nparallel:\n",
            "config.yaml:2: parallel: must hold keys, not None; known here: tensor_model_parallel",
        ),
        (
            "  name: igpt",
            "  name: dalle",
            f"config.yaml:3: objective.name: must say which paper: one of {PAPERS}, not 'dalle'",
        ),
        (
            "  name: igpt",
            "  mode: bert",
            f"config.yaml:2: objective.name: must say which paper: one of {PAPERS}",
        ),
        (
            "objective:\n  name: igpt\n",
            "",
            f"config.yaml: objective.name: must say which paper: one of {PAPERS}",
        ),
        (
            "  steps: 10",
            "  steps: 10\n  steps: 20",
            "config.yaml:14: training.steps: is given twice, also on line 15; keep one",
        ),
    ],
)
def test_error_names_file_line_key_and_remedy(complain, small, old, new, message):
    text = small.replace(old, new)
    assert text != small
    answer = complain(text)
    assert answer.startswith(message)
    assert "\n" not in answer


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "config.yaml: a config must be a mapping of keys, for example 'name: demo'"),
        ("- a\n- b\n", "config.yaml: a config must be a mapping of keys"),
        ("name: [1\nmodel: 2\n", "config.yaml:2: not valid YAML: "),
        ("name: a: b\n", "config.yaml:1: not valid YAML: mapping values are not allowed here"),
        ("name: a\n\tmodel: 1\n", "config.yaml:2: not valid YAML: "),
        ("name: a\n---\nname: b\n", "config.yaml:2: not valid YAML: but found another document"),
        ("name: !!python/object:os.system x\n", "config.yaml:1: not valid YAML: "),
        ("name: \x00\n", "config.yaml: not valid YAML: unacceptable character"),
        (
            "name: &a {b: *a}\n",
            "config.yaml: not valid YAML: keys are nested too deeply, or contain themselves",
        ),
        (
            "name: " + "{a: " * 2000 + "1" + "}" * 2000,
            "config.yaml: not valid YAML: keys are nested too",
        ),
        ("? [a, b]\n: 1\n", "config.yaml:1: not valid YAML: found unhashable key"),
    ],
)
def test_invalid_yaml_gives_one_message(complain, text, message):
    answer = complain(text)
    assert answer.startswith(message)
    assert "\n" not in answer


def test_all_errors_are_reported_together(complain, small):
    text = small.replace("steps: 10", "steps: ten").replace("name: igpt", "name: igpt\n  mod: x")
    assert complain(text).splitlines() == [
        "config.yaml:4: objective.mod: unknown key; did you mean 'mode'?",
        "config.yaml:15: training.steps: input should be a valid integer, not 'ten'",
    ]


def test_unreadable_file_raises(tmp_path: Path):
    with pytest.raises(UserError, match=r"absent\.yaml: no such config file"):
        load_config(tmp_path / "absent.yaml")
    with pytest.raises(UserError, match="is a folder; give a YAML file in it"):
        load_config(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9\n")
    with pytest.raises(UserError, match="cannot be read as text"):
        load_config(tmp_path / "latin.yaml")


def test_home_is_expanded_in_files_and_on_the_command_line(read, small, monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    text = small.replace("data:\n", "data:\n  palette: ~/palette.npy\n")
    mixture = "data.train=[{path: ~/a, weight: 1}, {path: '~b', weight: 2}]"
    data = read(text, mixture).config.data
    assert data.palette == "/home/someone/palette.npy"
    assert [source.path for source in data.train] == ["/home/someone/a", "~b"]


def test_overrides_replace_file_values(read, small):
    config = read(
        small,
        "training.steps=7",
        "optimizer.learning_rate=3e-4",
        "parallel.zero_stage=3",
        "optimizer.betas=[0.8, 0.9]",
        "data.validation=held/out",
        "schedule={decay: constant, warmup_steps: 2}",
    ).config
    assert config.training.steps == 7
    assert config.optimizer.learning_rate == 3e-4
    assert config.optimizer.betas == (0.8, 0.9)
    assert config.parallel.zero_stage == 3
    assert config.data.validation == "held/out"
    assert config.schedule.decay == "constant"
    assert read(small, "data.validation=x", "data.validation=").config.data.validation is None


def test_override_fills_an_empty_section(read, small):
    assert read(small + "parallel:\n", "parallel.zero_stage=2").config.parallel.zero_stage == 2


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("training.steps", "command line: 'training.steps' is not key=value, for example"),
        ("=3", "command line: '=3' is not key=value, for example"),
        ("training.step=3", "command line: training.step: unknown key; did you mean 'steps'?"),
        ("paralel.zero_stage=1", "command line: paralel: unknown key; did you mean 'parallel'?"),
        ("training.steps=many", "command line: training.steps: input should be a valid integer"),
        ("training.steps=[1", "command line: training.steps: '[1' is not a YAML value"),
        ("name.of.run=x", "command line: name.of.run: 'name' holds a value, not keys"),
        ("training={steps: 1, batch_size: x}", "command line: training.batch_size: input should"),
        ("training={steps: 1}", "command line: training.batch_size: is missing and has no default"),
        (
            "model.num_layers=-1",
            "command line: model.num_layers: input should be greater than or equal to 0",
        ),
        ("parallel.zero_stage=4", "command line: parallel.zero_stage: input should be 0, 1, 2 or"),
        ("data.train=3", "command line: data.train: input should be a valid string, not 3"),
        ("data.train=[]", "command line: data.train: names no folder"),
        ("data.train=[{path: x}]", "command line: data.train.0.weight: is missing"),
        (
            "data.train=[{path: x, weight: 0}]",
            "command line: data.train.0.weight: input should be greater than 0, not 0",
        ),
        (
            "data.train=[{path: x, weight: 1}, {path: y, wieght: 1}]",
            "command line: data.train.1.wieght: unknown key; did you mean 'weight'?",
        ),
    ],
)
def test_invalid_override_gives_one_message(complain, small, word, message):
    answer = complain(small, word)
    assert answer.startswith(message)
    assert "\n" not in answer


WORDS = """\
name: words
objective:
  name: compose
  reads: {kind: patches, patch_size: 4}
  schedule: {kind: one_by_one}
  asks: {kind: shift}
  density: {kind: squared_error}
"""


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("schedule.prefix=-1", "schedule.prefix: input should be greater than or equal to 0, or"),
        ("schedule.prefix=draw", "schedule.prefix: input should be a valid integer, or 'drawn',"),
        ("schedule.order=5", "schedule.order: input should be a valid string, or a list, such as"),
        ("weights.blocks=gtp", "weights.blocks: input should be a valid number, or 'xavier',"),
        ("weights.positions=-1", "weights.positions: input should be greater than 0, or 'width',"),
        ("condition=labels", "condition: must hold keys, not 'labels'; known here: kind"),
        ("schedule.masked=1", "schedule.masked: unknown key; known here: kind, order, drawn,"),
        ("schedule.length=given", "schedule.length: unknown key; known here: kind, order, drawn"),
        ("num_classes=3", "num_classes: unknown key; did you mean 'condition.num_classes'?"),
        ("place=both", "place: unknown key; did you mean 'asks.place'?"),
        ("hidden_size=4", "hidden_size: unknown key; did you mean 'model.hidden_size'?"),
        ("reads.tokenizer=run", "reads.tokenizer: unknown key; known here: kind, patch_size"),
    ],
)
def test_messages_about_words_name_keys_and_no_types(complain, small, word, message):
    """Pydantic's places have the types and kinds of a union too, and an error for each of them."""
    answer = complain(WORDS + small.partition("  name: igpt\n")[2], f"objective.{word}")
    assert answer.startswith(f"command line: objective.{message}")
    assert "\n" not in answer


@pytest.mark.parametrize(
    ("key", "meant"),
    [("data.patch_size", "objective.reads.patch_size"), ("model.steps", "training.steps")],
)
def test_a_key_of_another_section_is_found(complain, small, key, meant):
    answer = complain(WORDS + small.partition("  name: igpt\n")[2], f"{key}=4")
    assert answer == f"command line: {key}: unknown key; did you mean '{meant}'?"


@pytest.mark.parametrize(
    ("written", "value"),
    [("1e-3", 1e-3), ("1E-3", 1e-3), ("1.5e-4", 1.5e-4), ("1e2", 100.0), ("2", 2.0), (".5", 0.5)],
)
def test_number_formats(read, small, written, value):
    text = small.replace("1e-3", written)
    assert read(text).config.optimizer.learning_rate == value


def test_weighted_training_folders(read, complain, small):
    several = small.replace(
        "train: shards/train",
        "train:\n    - {path: a, weight: 0.3}\n    - path: b\n      weight: 1",
    )
    config = read(several).config
    assert [(s.path, s.weight) for s in config.data.train_sources] == [("a", 0.3), ("b", 1.0)]
    assert read(dump_config(config)).config == config
    assert read(small).config.data.train_sources[0].weight == 1.0
    answer = complain(several.replace("weight: 1", "weight: -1"))
    line = several[: several.index("weight: 1")].count("\n") + 1
    assert answer.startswith(f"config.yaml:{line}: data.train.1.weight: input should be greater")


@pytest.mark.parametrize("name", ["small", "1e3", "1e-3", "0x10", "12", "2024-01-02", "true", "no"])
def test_dumped_config_round_trips(read, small, name):
    config = read(
        small.replace("name: small", f"name: '{name}'"),
        "optimizer.learning_rate=1e-5",
        "objective.mode=bert",
        "data.train='été 1e-3/train'",
        "parallel.tensor_model_parallel_size=2",
        "parallel.sequence_parallel=true",
        "training.micro_batch_size=4",
    ).config
    again = read(dump_config(config)).config
    assert again == config
    assert type(again.objective) is type(config.objective)
    assert dump_config(again) == dump_config(config)


def test_based_on_merges_keys(read, small, tmp_path):
    (tmp_path / "base.yaml").write_text(small)
    above = "based_on: base.yaml\nname: longer\ntraining: {steps: 20}\n"
    config = read(above, "model.num_layers=2").config
    plain = read(small, "name=longer", "training.steps=20", "model.num_layers=2").config
    assert config == plain


def test_errors_name_the_file_that_sets_the_key(complain, small, tmp_path):
    (tmp_path / "base.yaml").write_text(small.replace("steps: 10", "steps: -1"))
    answer = complain("based_on: base.yaml\n")
    assert "base.yaml:14: training.steps: input should be greater than 0" in answer
    (tmp_path / "base.yaml").write_text(small)
    answer = complain("based_on: base.yaml\nmodel: {num_attention_heads: 7}\n")
    assert answer.startswith("config.yaml:2: model.num_attention_heads: ")


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ("absent.yaml", "config.yaml:1: based_on: absent.yaml: no such config file"),
        ("[a]", "config.yaml:1: based_on: must name a config file, not ['a']"),
        ("config.yaml", "config.yaml:1: based_on: config.yaml is based on this file in turn"),
    ],
)
def test_invalid_base_gives_one_message(complain, base, message):
    assert complain(f"based_on: {base}\nname: a\n") == message


@pytest.mark.parametrize("links", [1, 2])
def test_based_on_is_found_through_links(tiny_config, tmp_path, links):
    """A config that is reached by a link names its base from where it lies."""
    place = tmp_path / "configs"
    place.mkdir()
    (place / "base.yaml").write_text(tiny_config.read_text())
    (place / "small.yaml").write_text("based_on: base.yaml\nseed: 7\n")
    target = place / "small.yaml"
    for number in range(links):
        folder = tmp_path / f"elsewhere-{number}"
        folder.mkdir()
        link = folder / "linked.yaml"
        link.symlink_to(target)
        target = link
    assert load_config(target).config.seed == 7
    # A base beside the link is the nearer one, as before.
    (target.parent / "base.yaml").write_text(tiny_config.read_text() + "drop_me: 1\n")
    with pytest.raises(UserError, match="drop_me: unknown key"):
        load_config(target)
