"""Guards of llama_cpp's C functions: an exception of C++ that leaves one would end the process.

libeagle3 has a guarded function for each that can throw (native/src/api/guards.cpp). Its address takes the
place of llama.cpp's in the function object of ctypes, so whoever has the object already calls it too.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any


def put(library: Path, opened: ctypes.CDLL) -> None:
    """Guards the functions of `opened`, libllama or libmtmd, that a module of llama_cpp has declared.

    library: libeagle3. Without the file nothing happens: whoever needs it says so (library.py). To guard a
    function twice changes nothing.
    """
    if not library.is_file():
        return
    guarded = getattr(ctypes.CDLL(str(library)), "eagle3_guarded", None)
    if guarded is None:
        return  # another version's: library.py says so
    guarded.argtypes, guarded.restype = (ctypes.c_char_p, ctypes.c_void_p), ctypes.c_void_p
    functions: dict[str, Any] = vars(opened)
    for name, function in list(functions.items()):
        if name.startswith(("llama_", "mtmd_")):
            address = ctypes.c_void_p.from_buffer(function)
            address.value = guarded(name.encode(), address.value)
