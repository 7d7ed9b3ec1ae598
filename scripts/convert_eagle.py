#!/usr/bin/env python3
"""Converts an EAGLE head to GGUF. It needs no native library.

scripts/convert_eagle.py HEAD_DIR --model TARGET.gguf --out HEAD.gguf
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from eagle3_llama.heads.convert.cli import main

if __name__ == "__main__":
    main()
