#!/usr/bin/env python3
"""Runs the products' tests and the check of a library on an emulated x86 processor, by Bochs.

    scripts/processors/emulate.py skylake-x [--bochs PATH] [--keep FOLDER] [PROGRAM [ARGUMENT...]]

The processors: skylake-x (AVX-512 without VNNI), ice-lake (with VNNI), arrow-lake (AVX2 with VNNI),
sapphire-rapids (AMX). qemu-user emulates no AVX-512; Bochs does, about a hundred times slower than a
processor, so this takes 5 to 30 minutes. Without PROGRAM it runs dots_test, interleaved_test, together_test,
products_test, amx_test where there is AMX, and eagle3-proof: products in every format, and tiny generations.

It boots Debian's kernel from a CD in Bochs. As root on Debian:
    apt-get install bochs vgabios isolinux xorriso cpio busybox-static
Debian's Bochs 2.7 has the first two processors. The others need Bochs 3.0 or newer (--bochs), configured
with --enable-avx --enable-evex --enable-amx --with-nogui. Linux uses AMX only where the processor reports
XFD, which Bochs does not: add "leaf->eax |= 1 << 4;" to subfunction 1 of leaf 0xD in its cpu/cpuid.cc.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SHARED = Path("/usr/share")
LOADER = (Path("/usr/lib/ISOLINUX/isolinux.bin"), Path("/usr/lib/syslinux/modules/bios/ldlinux.c32"))
MODULES = "scsi_common scsi_mod libata ata_piix cdrom sr_mod isofs".split()  # each needs those before it
PACKAGES = "bochs vgabios isolinux xorriso cpio busybox-static"
TESTS = ["dots_test", "interleaved_test 1", "together_test 1", "products_test 1", "eagle3-proof"]
_AVX2 = "SSE42 AVX AVX2 FMA F16C BMI2"
_VNNI = "AVX512 AVX512_VBMI AVX512_VNNI"
SILENCE = 1800.0  # seconds: an emulated program that says nothing for so long hangs


class Processor(NamedTuple):
    model: str  # a processor of Bochs on which Linux starts, which does not on its newer ones
    features: str  # added to it, as Bochs calls them
    sets: str  # GGML_* options
    tests: list[str]


PROCESSORS = {
    "skylake-x": Processor("corei7_skylake_x", "", f"{_AVX2} AVX512", TESTS),
    "ice-lake": Processor("corei7_skylake_x", "avx512vbmi, avx512vnni", f"{_AVX2} {_VNNI}", TESTS),
    "arrow-lake": Processor("corei7_haswell_4770", "avx_vnni", f"{_AVX2} AVX_VNNI", TESTS),
    "sapphire-rapids": Processor(
        "corei7_skylake_x",
        "avx512vbmi, avx512vnni, avx512bf16, avx_vnni, amx, amx_int8, amx_bf16",
        f"{_AVX2} {_VNNI} AVX512_BF16 AVX_VNNI AMX_TILE AMX_INT8 AMX_BF16",
        ["amx_test 1", *TESTS],
    ),
}

# The first program of the emulated machine. It writes to the serial port.
INIT = """#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t proc proc /proc; mount -t devtmpfs dev /dev; mount -t tmpfs tmp /tmp
for m in {modules}; do insmod /modules/$m.ko; done
i=0; while [ ! -b /dev/sr1 ] && [ $i -lt 100 ]; do sleep 0.1; i=$((i + 1)); done
mount -t iso9660 -o ro /dev/sr1 /cd
mkdir /lib64; ln -s /cd/lib/ld-linux-x86-64.so.2 /lib64/
export LD_LIBRARY_PATH=/cd/bin:/cd/lib OMP_NUM_THREADS=1 EAGLE3_LLAMA_INTERLEAVE=1
echo "# $(grep -m1 'model name' /proc/cpuinfo)"
{programs}
echo "# end"; poweroff -f
"""

BOOT = """default linux
label linux
 kernel /linux
 append initrd=/initrd console=ttyS0 quiet mitigations=off nokaslr lpj=1000000 tsc=reliable no_timer_check
"""

CONFIG = """megs: 1024
romimage: file={shared}/bochs/BIOS-bochs-latest
vgaromimage: file={shared}/vgabios/vgabios.bin
cpu: model={model}, count=1, ips=25000000, reset_on_triple_fault=0{features}
ata0-master: type=cdrom, path={folder}/boot.iso, status=inserted
ata0-slave: type=cdrom, path={folder}/programs.iso, status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev={folder}/serial.txt
clock: sync=none
log: {folder}/bochs.log
"""
# Debian's Bochs has no display but a window or the network's, and a loudspeaker.
DEBIANS = """display_library: rfb, options="timeout=0"
speaker: enabled=1, mode=none
sound: driver=dummy
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("processor", choices=PROCESSORS)
    parser.add_argument("program", nargs="*", help="of native/tests, with its arguments")
    parser.add_argument("--bochs", default="bochs", help="the emulator; Debian's by default")
    parser.add_argument("--keep", type=Path, help="the folder for its files and logs, which stay there")
    arguments = parser.parse_args()
    missing = [tool for tool in (arguments.bochs, "xorriso", "cpio", "busybox") if not shutil.which(tool)]
    if missing or not all(path.exists() for path in (*LOADER, SHARED / "vgabios")):
        what = ", ".join(missing) or "a boot loader"
        print(f"error: {what} is missing: apt-get install {PACKAGES}", file=sys.stderr)
        return 2
    processor = PROCESSORS[arguments.processor]
    programs = [" ".join(arguments.program)] if arguments.program else processor.tests
    with tempfile.TemporaryDirectory(prefix="emulated-") as made:
        folder = (arguments.keep or Path(made)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        library = build(processor)
        say("makes the two CDs")
        write_boot_cd(folder, programs)
        write_programs_cd(folder, library)
        return emulate(folder, arguments.bochs, processor, programs)


def say(what: str) -> None:
    print(f"emulate: {what}", file=sys.stderr, flush=True)


def build(processor: Processor) -> Path:
    """The folder of the library and of native/tests, compiled for this processor."""
    sets = " ".join(f"-DGGML_{name}=ON" for name in processor.sets.split())
    done = subprocess.run(
        [sys.executable, ROOT / "native" / "build.py", "--tests", "--print-dir"],
        env={**os.environ, "CMAKE_ARGS": f"-DGGML_NATIVE=OFF {sets}"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return Path(done.stdout.strip())


def kernel(folder: Path) -> Path:
    """The unpacked package of Debian's newest kernel, downloaded if need be."""
    out = folder / "kernel"
    if not out.exists():
        say("downloads a kernel")
        depends = run(["apt-cache", "depends", "linux-image-amd64"], folder).stdout
        name = re.search(r"Depends: (linux-image-\S+)", depends)
        if not name:
            sys.exit("error: apt-cache knows no linux-image-amd64: apt-get update, on Debian")
        run(["apt-get", "download", name[1]], folder)
        run(["dpkg-deb", "-x", next(folder.glob("linux-image-*.deb")), out], folder)
    return out


def run(command: list, folder: Path, **options) -> subprocess.CompletedProcess:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, **options)
    if done.returncode:
        sys.exit(f"error: {' '.join(map(str, command))} failed: {done.stderr.strip()[-500:]}")
    return done


def write_boot_cd(folder: Path, programs: list[str]) -> None:
    unpacked, root, cd = kernel(folder), folder / "root", folder / "boot"
    for old in (root, cd):
        shutil.rmtree(old, ignore_errors=True)
    for name in ("bin", "modules", "proc", "dev", "tmp", "cd"):
        (root / name).mkdir(parents=True)
    shutil.copy(shutil.which("busybox") or "busybox", root / "bin")
    (root / "bin" / "sh").symlink_to("busybox")
    for module in MODULES:
        shutil.copy(next(unpacked.rglob(f"{module}.ko")), root / "modules")
    lines = [f'echo "# {program}"; cd /cd/bin; ./{program}; echo "# ended with $?"' for program in programs]
    (root / "init").write_text(INIT.format(modules=" ".join(MODULES), programs="\n".join(lines)))
    (root / "init").chmod(0o755)
    (cd / "isolinux").mkdir(parents=True)
    names = "\n".join(str(path.relative_to(root)) for path in root.rglob("*"))
    run(["cpio", "-o", "-H", "newc", "-F", cd / "initrd"], root, input=names)
    shutil.copy(next((unpacked / "boot").glob("vmlinuz-*")), cd / "linux")
    for path in LOADER:
        shutil.copy(path, cd / "isolinux")
    (cd / "isolinux" / "isolinux.cfg").write_text(BOOT)
    run(
        ["xorriso", "-as", "mkisofs", "-quiet", "-o", folder / "boot.iso", "-b", "isolinux/isolinux.bin"]
        + ["-c", "isolinux/boot.cat", "-no-emul-boot", "-boot-load-size", "4", "-boot-info-table", cd],
        folder,
    )


def write_programs_cd(folder: Path, library: Path) -> None:
    """The programs, and what they are linked with."""
    cd = folder / "programs"
    shutil.rmtree(cd, ignore_errors=True)
    shutil.copytree(library, cd / "bin")
    (cd / "lib").mkdir()
    needed = {"/lib64/ld-linux-x86-64.so.2"}
    for path in (cd / "bin").iterdir():
        found = subprocess.run(["ldd", path], capture_output=True, text=True).stdout
        needed |= set(re.findall(r"=> (/(?:usr/)?lib\S*)", found))
    for name in needed:
        shutil.copy(name, cd / "lib")
    run(["xorriso", "-as", "mkisofs", "-quiet", "-R", "-o", folder / "programs.iso", cd], folder)


def emulate(folder: Path, bochs: str, processor: Processor, programs: list[str]) -> int:
    """Prints what the emulated machine says. 0 if every program ended with 0."""
    serial = folder / "serial.txt"
    serial.unlink(missing_ok=True)
    features = f', add_features="{processor.features}"' if processor.features else ""

    display = DEBIANS if bochs == "bochs" else "display_library: nogui\n"
    (folder / "bochsrc").write_text(
        CONFIG.format(shared=SHARED, model=processor.model, features=features, folder=folder) + display
    )
    say(f"boots {processor.model}; its first line takes a minute or two")
    said, at, last = "", 0, time.monotonic()
    with (
        (folder / "bochs.txt").open("w") as log,
        subprocess.Popen(
            [bochs, "-q", "-f", folder / "bochsrc"], stdin=subprocess.PIPE, stdout=log, stderr=log
        ) as child,
    ):
        try:
            assert child.stdin
            child.stdin.write(b"c\n")  # a Bochs with a debugger waits for it
            child.stdin.flush()
            while child.poll() is None and "# end\n" not in said and time.monotonic() - last < SILENCE:
                time.sleep(1)
                said = serial.read_text(errors="replace").replace("\r", "") if serial.exists() else ""
                if len(said) > at:
                    print(said[at:], end="", flush=True)
                    at, last = len(said), time.monotonic()
        finally:
            child.kill()
    if "# end\n" not in said:
        say("the machine did not get to its end; see --keep FOLDER, bochs.txt and bochs.log there")
        return 1
    return int(said.count("# ended with 0\n") != len(programs))


if __name__ == "__main__":
    sys.exit(main())
