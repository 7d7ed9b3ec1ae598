"""What to say where a package is missing that only an extra of pyproject.toml installs."""


def command(extra: str) -> str:
    """The command that installs the extra. No package index has this project, so pip needs its folder."""
    return f"pip install '.[{extra}]' in the folder of eagle3-llama"
