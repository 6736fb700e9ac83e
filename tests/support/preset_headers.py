"""Commands and overridden keys in the headers of `yaml_configs/*/*.yaml`."""

import functools
import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from megavis.config.load import load_config

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "yaml_configs").glob("*/*.yaml"))
# Values that the reader has found, and variables of loops.
PLACEHOLDERS = {"STEP": "1000", "RATE": "0.001", "LAYER": "16", "$part": "train"}
STARTS = r"(?:megavis|python -m (?:megavis(?:\.cli)?|data_tools)|torchrun|bash|sbatch|make|hf) "


@dataclass(frozen=True)
class Command:
    """A command line of a header.

    Attributes:
        path: the config with the header.
        text: the line, with its continuations.
    """

    path: Path
    text: str

    @functools.cached_property
    def words(self):
        """The words without comments, and with values for placeholders."""
        text = self.text
        for name, value in PLACEHOLDERS.items():
            text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", value, text)
        return shlex.split(text, comments=True)

    @property
    def loads(self):
        """The path of the config that it reads; None if it reads none."""
        return next((word for word in self.words if word.endswith(".yaml")), None)

    @property
    def overrides(self):
        """The words that override keys of the config."""
        at = self.words.index(self.loads)
        pairs = zip(self.words[at:], self.words[at + 1 :], strict=False)
        return [
            word
            for option, word in pairs
            if re.match(r"[a-z]\w*(\.\w+)*=", word) and not option.startswith("--")
        ]

    @functools.cached_property
    def config(self):
        """The config with its overrides."""
        return load_config(ROOT / self.loads, self.overrides).config

    def __str__(self):
        return f"{self.path.parent.name}/{self.path.name}: {self.text}"


def header_of(path):
    """Return the comments above a config's first key, without those below `Gives:`."""
    lines = path.read_text(encoding="utf-8").splitlines()
    first = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    text = "\n".join(line[1:].removeprefix(" ") for line in lines[:first])
    # docs/scripts/paper_claims.py reads these.
    text = re.sub(r"^Gives:\n(?:  .*\n?)*", "", text, flags=re.MULTILINE)
    return text.replace("\\\n", " ")


def commands_of(path):
    """Yield the commands of a header: lines that are indented."""
    for found in re.finditer(rf"^  +({STARTS}.*)$", header_of(path), re.MULTILINE):
        yield Command(path, re.sub(r" {2,}(?!#)", " ", found[1]))


def megavis_words(words):
    """Return a command's words after `megavis`; None if it is no megavis command."""
    if words[0] == "megavis":
        return words[1:]
    if words[0] == "torchrun":
        return words[words.index("megavis.cli") + 1 :]
    if words[0] in ("bash", "sbatch"):
        script = next(word for word in words if word.startswith("launch/"))
        return ["train", *words[words.index(script) + 1 :]] if script != words[-1] else None
    return None


def prose_of(path):
    """Return a header without its commands, in one line."""
    lines = header_of(path).splitlines()
    return " ".join(line for line in lines if not re.match(rf"  +{STARTS}", line))


@functools.cache
def sections():
    """Return the names of all config sections."""
    schema = json.loads((ROOT / "yaml_configs/schema.json").read_text(encoding="utf-8"))
    return [name for name, value in schema["properties"].items() if "type" not in value]


def overrides_in_prose(path):
    """Yield lists of overrides that a header names side by side, outside of its commands."""
    word = rf"(?:(?:{'|'.join(sections())})\.\w+|name|seed)=(?:\[[^]]*\]|[^\s,;)`]+)"
    for found in re.finditer(rf"(?<![^\s(`]){word}(?:\s+{word})*", prose_of(path)):
        yield [each.rstrip(".:") for each in found[0].split()]


def commands_with_keys(*commands):
    """Return path and words, by run name, of commands in headers that override keys.

    One that does not name its run gets a name of its own.
    """
    found, seen = {}, set()
    for command in (each for path in CONFIGS for each in commands_of(path)):
        given = megavis_words(command.words)
        if not given or given[0] not in commands or not command.loads or not command.overrides:
            continue
        words = tuple(command.overrides)
        if (command.loads, words) in seen:
            continue
        seen.add((command.loads, words))
        name = command.config.name
        if not any(word.startswith("name=") for word in words):
            name = f"{name}_as_in_header_{len(seen)}"
            words = (*words, f"name={name}")
        found[name] = (ROOT / command.loads, words)
    return found
