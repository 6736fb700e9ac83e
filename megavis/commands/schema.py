"""`megavis schema`: the JSON schema of a config file, for editors."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Add the command to the parser."""
    parser = subparsers.add_parser(
        "schema",
        help="write the JSON schema of config files",
        description="Write the JSON schema of config files. An editor with a YAML language server"
        " completes and checks keys by it.",
        epilog="example: megavis schema --out yaml_configs/schema.json",
    )
    parser.add_argument("--out", metavar="FILE", help="default: standard output")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the schema.

    Raises:
        UserError: the file cannot be written.
    """
    from megavis.config.errors import UserError

    text = schema_text()
    if args.out is None:
        sys.stdout.write(text)
        return 0
    try:
        Path(args.out).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{args.out} cannot be written: {error.strerror}") from None
    return 0


def schema_text() -> str:
    """Return the schema as the file `yaml_configs/schema.json` has it."""
    from megavis.config.json_schema import json_schema

    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"
