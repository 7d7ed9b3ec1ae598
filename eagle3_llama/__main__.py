"""`python -m eagle3_llama SCRIPT`: a program whose `llama_cpp.Llama` drafts, without a change to it."""

from __future__ import annotations

import optparse  # unlike argparse, it leaves the program's own options alone
import os
import runpy
import sys

from . import install
from .errors import EagleError


def main() -> None:
    """Runs a script, or a module with -m, after install()."""
    parser = optparse.OptionParser(
        prog="python -m eagle3_llama",
        usage="%prog [--eagle HEAD] SCRIPT [ARG]...\n       %prog [--eagle HEAD] -m MODULE [ARG]...",
        description="Run a program whose llama_cpp.Llama is an EagleLlama. The commands are in eagle3-llama.",
    )
    parser.disable_interspersed_args()
    parser.add_option(
        "--eagle", metavar="HEAD", help="head (GGUF), hf: name or auto; default: $EAGLE3_LLAMA_HEAD"
    )
    parser.add_option("-m", dest="module", action="store_true", help="run a module, as python -m does")
    options, words = parser.parse_args()
    if not words:
        parser.error("name a script, or a module with -m")
    if not options.module and not os.path.exists(words[0]):
        parser.error(f"there is no script {words[0]!r}: the commands are in eagle3-llama")
    try:
        install(options.eagle)
    except EagleError as e:
        parser.error(str(e))
    sys.argv[:] = words
    if options.module:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(words[0]))  # instead of the present folder
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()
