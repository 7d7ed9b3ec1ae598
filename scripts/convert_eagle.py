#!/usr/bin/env python3
"""Converts an EAGLE head to GGUF. It needs no native library.

scripts/convert_eagle.py HEAD_DIR --model TARGET.gguf --out HEAD.gguf
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

try:
    from eagle3_llama.heads.convert.cli import main
except ModuleNotFoundError as e:
    needs = "pip install gguf numpy rich typer"
    sys.exit(
        f"error: this Python has no package {e.name}: run the script with .venv/bin/python after "
        f"./scripts/demo, or install what it needs: {needs}"
    )

if __name__ == "__main__":
    main()
