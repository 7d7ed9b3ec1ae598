"""Where the checkout is, and the data of its tests."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"
PROMPTS = ROOT / "scripts" / "data"  # prompts*.jsonl, which measurements read
