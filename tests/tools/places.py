"""Says where the repository and its command line are."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BINARY = Path(os.environ.get("SAGEBWD_BIN", ROOT / "build/bin/sagebwd"))
