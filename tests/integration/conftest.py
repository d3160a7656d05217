"""Puts shared helpers on the import path of this folder's tests, the tiny tokenizer of the rollout tests among them."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
for folder in (HERE, HERE.parent / "unit" / "rollout"):
    sys.path.insert(0, str(folder))
