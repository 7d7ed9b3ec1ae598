"""scripts/release/arm64_root.py: what it says of a wrong command. tests/by_hand/wheels.py uses a root."""

import sys

from commands import run
from paths import ROOT

SCRIPT = ROOT / "scripts" / "release" / "arm64_root.py"


def script(*words, code=0, **settings):
    return run([sys.executable, SCRIPT, *words], code, **settings)


def test_missing_tools_are_named(tmp_path):
    said = script("make", tmp_path / "root", code=2, env={"PATH": str(tmp_path)}).stderr
    assert "debootstrap, dpkg-deb, qemu-aarch64-static is missing: apt-get install" in said
    assert not (tmp_path / "root").exists()


def with_tools(folder):
    """A PATH where each tool is there, and does nothing."""
    for name in ("debootstrap", "dpkg-deb", "qemu-aarch64-static", "unshare", "chroot"):
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    return {"PATH": str(folder)}


def test_wrong_commands(tmp_path):
    env = with_tools(tmp_path)
    assert "which command?" in script("run", tmp_path, code=2, env=env).stderr
    said = script("run", tmp_path, "true", code=1, env=env).stderr
    assert said == f"error: {tmp_path} is no root that this script made\n"
    assert "is there already" in script("make", tmp_path, code=1, env=env).stderr
