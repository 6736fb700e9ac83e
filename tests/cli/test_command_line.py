"""The command line: help, examples, defaults and errors."""

import argparse
import inspect
import re
import shlex
import subprocess
import sys

import pytest

import megavis.cli
from data_tools.__main__ import build_parser as build_data_tools
from data_tools.__main__ import main as data_tools
from megavis.cli import _import_work, build_parser, main, read_arguments

pytestmark = pytest.mark.once


def commands(parser):
    """Yield the parsers of commands: those without subcommands."""
    parser.fill()
    inner = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    if not inner:
        yield parser
    for choices in inner:
        for each in choices.choices.values():
            yield from commands(each)


COMMANDS = [*commands(build_parser()), *commands(build_data_tools())]


def read(line):
    """Parse a command line as its program does."""
    words = shlex.split(line)
    if words[0] == "megavis":
        return read_arguments(words[1:])
    assert words[:3] == ["python", "-m", "data_tools"]
    return build_data_tools().parse_args(words[3:])


@pytest.mark.parametrize("parser", COMMANDS, ids=lambda parser: parser.prog)
def test_every_command_has_a_description_and_a_valid_example(parser):
    assert parser.description
    help_text = parser.format_help()
    examples = re.findall(rf"^(?:example: | +)({parser.prog} .*)$", help_text, re.MULTILINE)
    assert examples
    for example in examples:
        assert read(example).run == parser.get_default("run")


def test_every_command_resolves():
    """Parsers name their functions in strings, which type checkers do not see."""
    for parser in commands(build_parser()):
        assert callable(_import_work(parser.get_default("run")))


def test_options_that_main_looks_for_exist():
    """It gives those that a command lacks a default, which would hide a changed name."""
    asked = re.findall(r'(?:get|has)attr\(parsed, "(\w+)"', inspect.getsource(megavis.cli))
    assert len(set(asked)) > 3
    declared = {each.dest for parser in commands(build_parser()) for each in parser._actions}
    assert {*asked, *("out", "npz")} <= declared


@pytest.mark.parametrize("parser", COMMANDS, ids=lambda parser: parser.prog)
def test_every_option_has_help_with_its_default(parser):
    formatter = parser._get_formatter()
    for option in parser._actions:
        if option.help == argparse.SUPPRESS:
            continue
        text = formatter._get_help_string(option)
        assert text
        number = isinstance(option.default, int | float) and not isinstance(option.default, bool)
        if number and option.option_strings:
            assert text.count("default:") == 1
            found = re.findall(r"default: ([\d.e-]+)", text)
            assert [float(each) for each in found] in ([option.default], []), (option.dest, text)
        assert "None" not in text


@pytest.mark.parametrize(
    ("program", "words", "message"),
    [
        (main, [], "required: COMMAND; `megavis --help` shows"),
        (main, ["trian", "x.yaml"], "invalid choice: 'trian' (choose from"),
        (main, ["train"], "arguments are required: config; `megavis train --help`"),
        (main, ["train", "nowhere.yaml"], "nowhere.yaml: no such config file"),
        (main, ["probe", "runs/x", "--tarin", "y"], "--tarin y; `megavis probe --help` shows"),
        (main, ["probe", "runs/x", "--masks", "0"], "--masks: '0' is not a whole number of 1"),
        (main, ["figure", "patches", "runs/x", "--num-images", "-1"], "'-1' is not a whole number"),
        (
            data_tools,
            ["palette", "fti"],
            "invalid choice: 'fti' (choose from 'fit', 'grey', 'shards')",
        ),
        (main, ["checkpoint", "list", "x", "--y"], "--y; `megavis checkpoint list --help` shows"),
        (
            data_tools,
            ["palette", "fit", "x", "--out", "y.npy", "--colors", "8"],
            "arguments: --colors 8; `python -m data_tools palette fit --help` shows",
        ),
        (
            data_tools,
            ["palette", "fit", "x", "--out", "y.npy", "--num-colors", "0"],
            "from 1 to 512",
        ),
        (data_tools, ["verify", "nowhere"], "nowhere does not exist in"),
        (data_tools, ["jpeg", "nowhere", "--out", "x"], "nowhere does not exist: give a folder"),
    ],
)
def test_errors_are_one_line_with_exit_code_2(capsys, program, words, message):
    assert program(words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1


def test_ctrl_c_ends_a_command_without_a_traceback(capsys, monkeypatch):
    def interrupted(reference):
        raise KeyboardInterrupt

    monkeypatch.setattr("megavis.cli._import_work", interrupted)
    assert main(["runs"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_output_that_nobody_reads_is_no_error():
    line = f"{sys.executable} -m megavis.cli schema | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (141, "")


def test_version(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert re.fullmatch(r"megavis \d+\.\d+\.\d+\n", capsys.readouterr().out)
