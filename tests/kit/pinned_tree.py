"""Files of the llama.cpp that the patches are made for, as llama-cpp-python's sdist has them."""

import sys
import tarfile

from paths import ROOT

sys.path.insert(0, str(ROOT / "native"))
import fetch


def pinned_files(names):
    """{name: bytes} of those of these files that are there."""
    with tarfile.open(fetch.sdist()) as sdist:
        return {
            name: sdist.extractfile(member).read()
            for member in sdist.getmembers()
            for name in [member.name.partition("/vendor/llama.cpp/")[2]]
            if name in names
        }
