"""Makes a Debian root for arm64 with Python in it, and runs commands there under qemu-user.

    python3 scripts/release/arm64_root.py make FOLDER             as root; 70 MB are downloaded
    python3 scripts/release/arm64_root.py run [--bind PLACE ...] FOLDER COMMAND ...

--bind: a folder that is seen at the same place inside. QEMU_CPU chooses the processor (its names:
qemu-aarch64-static -cpu help); without it there is each instruction set that qemu knows. Nothing is
registered on this machine: for the command alone, in a user namespace, the kernel starts arm64 programs with
qemu. That takes Linux 6.7.

On Debian 12: apt-get install debootstrap qemu-user-static
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

QEMU = "qemu-aarch64-static"
RELEASE = "bookworm"
PACKAGES = "python3,python3-venv,python3-pip"
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
# In the kernel's form: how a program begins, and which bits of that count.
_BEGINS = r"\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00"
_COUNTS = r"\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["make", "run"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--bind", type=Path, action="append", default=[])
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    tools = ["debootstrap", "dpkg-deb", QEMU] if args.what == "make" else ["unshare", "chroot", QEMU]
    if missing := [tool for tool in tools if not shutil.which(tool)]:
        parser.error(f"{', '.join(missing)} is missing: apt-get install debootstrap qemu-user-static")
    if args.what == "make":
        make(args.folder.absolute())
    elif not args.command:
        parser.error("which command?")
    else:
        run(args.folder.absolute(), [path.absolute() for path in args.bind], args.command)


def make(folder: Path) -> None:
    """Debian's packages, unpacked. They are not configured: nothing of them needs it to run Python."""
    if folder.exists():
        sys.exit(f"error: {folder} is there already")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as tmp:
        fetched, fresh = Path(tmp) / "fetched", Path(tmp) / "root"
        options = ["--arch=arm64", "--variant=minbase", f"--include={PACKAGES}", "--download-only"]
        subprocess.run(["debootstrap", *options, RELEASE, fetched], check=True)
        for name in ("bin", "lib", "sbin"):
            (fresh / "usr" / name).mkdir(parents=True)
            (fresh / name).symlink_to(f"usr/{name}")
        for package in sorted((fetched / "var/cache/apt/archives").glob("*.deb")):
            subprocess.run(["dpkg-deb", "-x", package, fresh], check=True)
        for name in ("proc", "dev", "sys", "tmp"):
            (fresh / name).mkdir(exist_ok=True)
        for source in (CERTIFICATES, Path("/etc/resolv.conf")):  # for pip
            if source.is_file():
                (fresh / source.relative_to("/")).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, fresh / source.relative_to("/"))
        fresh.rename(folder)


def run(folder: Path, binds: list[Path], command: list[str]) -> None:
    """Replaces this process by the command."""
    if not (folder / "usr" / "bin" / "python3").exists():
        sys.exit(f"error: {folder} is no root that this script made")
    lines = ["set -e", "mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc"]
    # F: qemu is opened now, outside of the root. P: a program keeps its argv[0].
    rule = f":arm64:M::{_BEGINS}:{_COUNTS}:{shutil.which(QEMU)}:FP"
    lines.append(f"printf %s {shlex.quote(rule)} > /proc/sys/fs/binfmt_misc/register")
    for place in (Path("/proc"), Path("/dev"), Path("/sys"), *binds):
        inside = folder / place.relative_to("/")
        inside.mkdir(parents=True, exist_ok=True)
        lines.append(f"mount --rbind {shlex.quote(str(place))} {shlex.quote(str(inside))}")
    lines.append(f"exec chroot {shlex.quote(str(folder))} {shlex.join(command)}")
    os.execvp("unshare", ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", "\n".join(lines)])


if __name__ == "__main__":
    main()
