"""llama_cpp with this package's libllama. Import it from here: then the order of imports does not matter.

Raises EagleError of kind LIBRARY where the native libraries cannot be loaded.
"""

from . import library

library.load()

import llama_cpp  # noqa: E402 - it opens a libllama when it is first imported, and this one is ours
from llama_cpp import Llama, LlamaState  # noqa: E402

__all__ = ["Llama", "LlamaState", "llama_cpp"]
