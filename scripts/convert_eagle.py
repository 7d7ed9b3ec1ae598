#!/usr/bin/env python3
"""Convert an EAGLE-3 head to GGUF: convert_eagle.py HEAD_DIR --model TARGET.gguf --out HEAD.gguf. Needs no native library."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from eagle3_llama.heads.convert.cli import main

if __name__ == "__main__":
    main()
