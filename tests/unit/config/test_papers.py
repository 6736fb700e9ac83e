"""Papers are found by the names of their folders, and variants by the classes in `config.py`."""

import subprocess
import sys
from pathlib import Path

import pytest
from tiny import tiny

from megavis import papers
from megavis.config.errors import UserError
from megavis.config.load import load_config
from megavis.config.papers import PAPER_CONFIGS, paper_class
from megavis.grammar.compose import in_same_words, written_out

CONFIG = '''
from typing import Literal
from megavis.config.schema import ObjectiveConfig
from megavis.papers.igpt.config import IGPTConfig

class SharedConfig(ObjectiveConfig):
    """Keys of both."""

class FirstConfig(SharedConfig):
    """Those of the paper."""
    name: Literal["two_rooms"] = "two_rooms"

class SecondConfig(IGPTConfig):
    """Those of a variant."""
    name: Literal["two_rooms_second_kind"] = "two_rooms_second_kind"
    size: int = 3

class ThirdConfig(SharedConfig):
    """Those of a variant with a file of its own."""
    name: Literal["two_rooms_third"] = "two_rooms_third"
'''
MODELS = """
from megavis.papers.two_rooms.config import FirstConfig, SecondConfig

class First:
    config_type = FirstConfig

class Second(First):
    config_type = SecondConfig
"""
THIRD = """
from megavis.papers.two_rooms.config import ThirdConfig
from megavis.papers.two_rooms.paper import First

class Third(First):
    config_type = ThirdConfig
"""
NAMES = {"two_rooms": "First", "two_rooms_second_kind": "Second", "two_rooms_third": "Third"}


@pytest.fixture
def two_rooms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A room of a paper and two variants, which imports the config of another room."""
    room = tmp_path / "two_rooms"
    room.mkdir()
    files = {"__init__": "", "config": CONFIG, "paper": MODELS, "third": THIRD}
    for name, text in files.items():
        (room / f"{name}.py").write_text(text)
    monkeypatch.setattr(papers, "__path__", [*papers.__path__, str(tmp_path)])
    yield
    for name in [name for name in sys.modules if name.startswith("megavis.papers.two_rooms")]:
        del sys.modules[name]


def test_a_config_file_holds_a_paper_and_its_variants(two_rooms: None) -> None:
    assert {name for name in PAPER_CONFIGS if name.startswith("two_rooms")} == set(NAMES)
    assert list(PAPER_CONFIGS).count("igpt") == 1
    for name, model in NAMES.items():
        assert PAPER_CONFIGS[name].__name__ == f"{model}Config"
        assert paper_class(name).__name__ == model
    assert PAPER_CONFIGS["two_rooms_second_kind"](vocabulary_size=4).size == 3


@pytest.mark.parametrize(
    "name", ["", "none", "two", "two_rooms_", "two_rooms_paper", "givt_config"]
)
def test_no_other_name_is_a_paper(two_rooms: None, name: str) -> None:
    assert name not in PAPER_CONFIGS
    with pytest.raises(KeyError):
        paper_class(name)


def test_the_config_of_a_variant_imports_no_other_room() -> None:
    code = """import sys
from megavis.config.papers import PAPER_CONFIGS
PAPER_CONFIGS["givt_maskgit"]
names = [name.split(".") for name in sys.modules if name.startswith("megavis.papers.")]
assert {parts[2] for parts in names} == {"givt"}, names
assert "torch" not in sys.modules
"""
    process = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True)
    assert process.returncode == 0, process.stderr


OWN = '''
from typing import Literal
from megavis.papers.igpt.config import IGPTConfig

class OwnConfig(IGPTConfig):
    """Those of iGPT."""
    name: Literal["own"] = "own"
'''
MODEL = """
from megavis.composition.model import Model
from megavis.papers.own.config import OwnConfig

class Own(Model):
    "Predicts otherwise."
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A paper with its own model class, next to a folder that is not a paper."""
    room = tmp_path / "own"
    room.mkdir()
    for name, text in {"__init__": "", "config": OWN, "paper": MODEL}.items():
        (room / f"{name}.py").write_text(text)
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "__init__.py").touch()
    monkeypatch.setattr(papers, "__path__", [*papers.__path__, str(tmp_path)])
    yield room / "paper.py"
    for name in [name for name in sys.modules if name.startswith("megavis.papers.own")]:
        del sys.modules[name]


def test_a_folder_without_keys_is_no_paper(own: Path) -> None:
    assert "own" in PAPER_CONFIGS
    assert "half" not in PAPER_CONFIGS


def test_a_model_that_names_no_keys_is_refused(own: Path) -> None:
    """It would be taken for the model of the paper's words."""
    with pytest.raises(UserError, match=r"papers\.own\.paper has a model, Own, .* = OwnConfig"):
        paper_class("own")


def test_a_model_of_its_own_is_not_written_out(own: Path, tmp_path: Path) -> None:
    own.write_text(f"{MODEL}    config_type = OwnConfig\n")
    assert paper_class("own").__name__ == "Own"
    path = tmp_path / "own.yaml"
    path.write_text(tiny("{name: own, vocabulary_size: 12}"))
    run = load_config(path).config
    with pytest.raises(UserError, match=r"own has a model of its own, megavis\.papers\.own\.paper"):
        written_out(run)
    path.write_text(tiny("{name: igpt, vocabulary_size: 12}"))
    composed = written_out(load_config(path).config)
    assert in_same_words(run, composed) == (run, composed)


def test_a_range_of_a_word_is_said_in_the_papers_key(own: Path, tmp_path: Path) -> None:
    own.write_text(f"{MODEL}    config_type = OwnConfig\n")
    keys = 'name: Literal["own"] = "own"'
    config = own.with_name("config.py")
    config.write_text(OWN.replace(keys, f"{keys}\n    mask_ratio: float = 0.15"))
    path = tmp_path / "own.yaml"
    path.write_text(tiny("{name: own, vocabulary_size: 12, mode: bert, mask_ratio: 2.0}"))
    with pytest.raises(UserError) as caught:
        load_config(path)
    assert "objective.mask_ratio: input should be less than 1, not 2.0" in str(caught.value)


def refused(tmp_path: Path, name: str) -> str:
    path = tmp_path / "own.yaml"
    path.write_text(tiny(f"{{name: {name}}}"))
    with pytest.raises(UserError) as caught:
        load_config(path)
    return str(caught.value)


@pytest.mark.parametrize("wanted", ["own", "igpt_own", "none"])
def test_a_name_of_another_folder_is_refused(own: Path, tmp_path: Path, wanted: str) -> None:
    config = own.with_name("config.py")
    for name in ("igpt", "igpt_own"):
        config.write_text(OWN.replace('["own"] = "own"', f'["{name}"] = "{name}"'))
        sys.modules.pop("megavis.papers.own.config", None)
        said = refused(tmp_path, wanted)
        text = f"{config}: name '{name}' of OwnConfig must be 'own', as its folder, or begin with"
        assert text in said


def test_a_name_of_a_longer_folder_is_refused(own: Path, tmp_path: Path) -> None:
    longer = tmp_path / "own_second"
    longer.mkdir()
    for name, text in {"__init__": "", "config": OWN.replace('"own"', '"own_second"')}.items():
        (longer / f"{name}.py").write_text(text)
    second = OWN.replace('"own"', '"own_second"').replace("OwnConfig", "SecondConfig")
    config = own.with_name("config.py")
    config.write_text(OWN + second.partition("import IGPTConfig")[2])
    said = refused(tmp_path, "own")
    assert "name 'own_second' of SecondConfig belongs to another folder, own_second" in said


def test_two_classes_of_one_name_are_refused(own: Path, tmp_path: Path) -> None:
    config = own.with_name("config.py")
    config.write_text(OWN + OWN.partition("import IGPTConfig")[2].replace("OwnConfig", "Other"))
    assert f"{config}: OwnConfig and Other have the same name, 'own'" in refused(tmp_path, "own")


def test_what_a_folder_lacks_is_said(own: Path, tmp_path: Path) -> None:
    config = own.with_name("config.py")
    assert f"half is not a paper yet: {tmp_path / 'half'} has no config.py" in refused(
        tmp_path, "half"
    )
    config.write_text(OWN.replace('    name: Literal["own"] = "own"\n', ""))
    text = f"own.yaml:10: objective.name: own is not a paper yet: {config} has no config class with"
    assert f"{text} name: Literal['own'] = 'own'" in refused(tmp_path, "own")
    own.with_name("__init__.py").unlink()
    assert f"{own.parent} has no __init__.py" in refused(tmp_path, "own")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("Categorical(vocabulary=3)", "extra inputs are not permitted, not 3 (key vocabulary of"),
        ("Categorical(bias=1)", "input should be a valid boolean, not 1 (key bias of the word"),
        ("Categorical(bias=self.biass)", "AttributeError: 'OwnConfig' object has no attribute"),
        ("Categorial()", "NameError: name 'Categorial' is not defined"),
        ("Categorical(True)", "TypeError: "),
        ("None", "input should be a valid dictionary or object to extract fields from, not None"),
    ],
)
def test_a_mistake_in_a_grammar_has_a_place(
    own: Path, tmp_path: Path, wrong: str, message: str
) -> None:
    method = f"""
    def grammar(self, run):
        words = dict(super().grammar(run))
        words["density"] = {wrong}
        return Grammar(**words)
"""
    config = own.with_name("config.py")
    imports = "\nfrom megavis.grammar.grammar import Grammar\n"
    config.write_text(f"{imports}from megavis.grammar.words import Categorical{OWN}{method}")
    line = 1 + config.read_text().splitlines().index(f'        words["density"] = {wrong}')
    if wrong == "None":
        line += 1
    said = refused(tmp_path, "own")
    assert f"own.yaml:9: objective: {config}:{line}: {message}" in said
    assert "\n" not in said


def test_a_mistake_in_own_faults_has_a_place(own: Path, tmp_path: Path) -> None:
    config = own.with_name("config.py")
    config.write_text(f"{OWN}\n    def own_faults(self, run):\n        yield run.modle, ''\n")
    line = len(config.read_text().splitlines())
    said = refused(tmp_path, "own")
    assert f"{config}:{line}: AttributeError: 'RunConfig' object has no attribute 'modle'" in said


def test_a_grammar_that_returns_nothing_is_refused(own: Path, tmp_path: Path) -> None:
    config = own.with_name("config.py")
    config.write_text(f"{OWN}\n    def grammar(self, run):\n        pass\n")
    text = f"objective: {config}: TypeError: OwnConfig.grammar returns NoneType, not Grammar"
    assert text in refused(tmp_path, "own")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"schedule.lenght": "mode"}, "the grammar has no key 'schedule.lenght'"),
        ({"schedule.kind": "mod"}, "the paper has no key 'mod'"),
        ({"asks.decoder.width": "mode"}, "the grammar has no key 'asks.decoder.width'"),
    ],
)
def test_names_of_keys_that_do_not_exist_are_refused(
    own: Path, tmp_path: Path, names: dict[str, str], message: str
) -> None:
    """They would rename nothing, or name a key that no file can have."""
    config = own.with_name("config.py")
    config.write_text(f"{OWN}    names = {names}\n".replace("names =", "names: ClassVar[dict] ="))
    config.write_text("from typing import ClassVar\n" + config.read_text())
    assert f"{config}: names of OwnConfig: {message}" in refused(tmp_path, "own")
