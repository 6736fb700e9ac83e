"""`megavis schema`: the JSON schema of a config file, for editors."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from megavis.config.errors import UserError
from megavis.config.json_schema import json_schema


def run(args: argparse.Namespace) -> int:
    """Write the schema.

    Raises:
        UserError: the file cannot be written.
    """
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
    """Return the schema as in `yaml_configs/schema.json`."""
    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"
