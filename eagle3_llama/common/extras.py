"""What to say where a package is missing that only an extra of pyproject.toml installs."""

import sys
from pathlib import Path


def command(extra: str) -> str:
    """The command that installs the extra. No package index has this project, so pip needs its folder.

    A checkout stays installed as it is, in editable mode: pip would replace that by a copy.
    """
    of_venv, of_package = Path(sys.prefix).parent, Path(__file__).resolve().parents[2]
    if Path(sys.prefix).name == ".venv" and (of_venv / "scripts" / "_env.py").is_file():
        return f"python3 scripts/_env.py --extra {extra} in {of_venv}"
    if (of_package / "scripts" / "_env.py").is_file():
        return f"pip install -e '.[{extra}]' in {of_package}"
    return f"pip install '.[{extra}]' in the folder of eagle3-llama"
