"""Find the newest intact checkpoint, and set damaged ones aside."""

from __future__ import annotations

import sys
from pathlib import Path

from megavis.checkpoint.format.folder import checkpoints_by_age, set_aside
from megavis.checkpoint.format.manifest import CheckpointManifest
from megavis.checkpoint.state.load import check_files
from megavis.config.errors import UserError
from megavis.parallel.context import ParallelContext

Found = tuple[Path, CheckpointManifest]


def newest_intact_checkpoint(
    run_folder: Path, context: ParallelContext, *, up_to: int | None = None
) -> Found | None:
    """Return the newest checkpoint, up to a step, whose every byte is right; None where is none.

    Every process calls this. Newer ones that are damaged are reported, renamed and skipped: the
    run resumes from the one before, with the same samples and draws as the first time.

    Raises:
        UserError: on every process, when there are checkpoints and all are damaged.
    """
    # The folder may look older on another node.
    own = checkpoints_by_age(run_folder, up_to=up_to) if context.is_main else []
    folders = context.from_main(own)
    complaints: list[str] = []
    for folder in folders:
        try:
            manifest = check_files(folder, context)
        except UserError as error:
            complaints.append(str(error))
            continue
        if complaints and context.is_main:
            set_aside(run_folder, folders[: len(complaints)], newest=folder)
            sys.stderr.writelines(f"WARNING: {text}\n" for text in complaints)
            sys.stderr.write(f"WARNING: resuming from {folder}, the newest intact checkpoint\n")
        return folder, manifest
    if complaints:
        raise UserError(f"{complaints[0]}; and no older checkpoint is whole")
    return None
