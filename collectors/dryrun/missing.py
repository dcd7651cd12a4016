"""What to put in the place of a file that a script reads and that is not there: the least that would do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePosixPath

ERROR = re.compile(
    r"\S*(?:FileNotFoundError|DataFilesNotFoundError|EmptyDatasetError|NotADirectoryError)\b.*?"
    r"(?:(?P<quote>['\"])(?P<quoted>[^'\"]+)(?P=quote)|(?P<bare>/\S+))"
)
ROWS = "64 rows as long as those that it trains on, with the columns that it reads"
LINES = '64 lines as long as those that it trains on, such as {"text": "word word"}, with the keys that it reads'
TABLE = "pandas.DataFrame({'text': ['word ' * 2048] * 64})"
"""Whose writer is put in the place of WRITTEN."""
WEIGHTS = "weights are read as shapes where from_pretrained reads them; here put a file that torch.save has written of them"
BY_SUFFIX = {
    ".jsonl": LINES,
    ".json": f"a list of {ROWS} (WRITTEN), or the settings that it is to have",
    ".parquet": f"{ROWS} (WRITTEN)",
    ".csv": f"{ROWS} (WRITTEN)",
    ".arrow": "a dataset of 64 rows, by datasets.Dataset.from_dict(...).save_to_disk",
    ".txt": "some 100,000 words",
    ".pt": WEIGHTS,
    ".pth": WEIGHTS,
    ".ckpt": WEIGHTS,
    ".pkl": "a pickle of what it reads, meta.pkl of nanoGPT say, which its prepare.py writes",
    ".yaml": "the settings that it is to have",
    ".yml": "the settings that it is to have",
    ".toml": "the settings that it is to have",
}
WRITERS = {".json": "to_json", ".parquet": "to_parquet", ".csv": "to_csv"}


def hint(lines: Sequence[str]) -> str:
    """What the last of the `lines` that a failing script printed asks for; "" where no file is missing."""
    found = next((match for line in reversed(lines) if (match := ERROR.match(line.strip())) is not None), None)
    if found is None:
        return ""
    path = found["quoted"] or found["bare"].rstrip(".,;:")
    suffix = PurePosixPath(path.rstrip("*")).suffix.lower()
    if suffix in BY_SUFFIX:
        least = BY_SUFFIX[suffix].replace("WRITTEN", f"{TABLE}.{WRITERS.get(suffix)}({path!r})")
    elif suffix:
        least = "a small one as it expects"
    else:
        least = "a folder there with one small file as it expects"
    return f"{path} is not here; put there {least}: only shapes count."
