"""`python -P -m peakcast.collectors.dryrun QUESTION.json`: the process in which a script runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

if __name__ == "__main__":
    from peakcast.collectors.dryrun.keeper import keep
    from peakcast.collectors.dryrun.script import main
    from peakcast.collectors.processes.warm_parent import die_with_parent

    question = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    if question.get("is_child"):  # of a script, whose keeper ends it too
        die_with_parent()
    else:
        keep(Path(question["folder"]))
    main(question)
