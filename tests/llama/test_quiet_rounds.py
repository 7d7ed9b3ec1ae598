"""A round calls no logger: llama-cpp-python's is a function in Python, and takes longer than a fast row."""

import itertools

import pytest

from eagle3_llama import EagleLlama
from eagle3_llama.runtime.binding import llama_cpp


@pytest.mark.parametrize("with_head", [False, True])
def test_rounds_log_nothing(files, with_head):
    from llama_cpp import _logger  # found once the package is imported

    target, head = files
    said = []
    listening = llama_cpp.llama_log_callback(lambda level, text, _: said.append(text))
    with EagleLlama(target, eagle=head if with_head else None, n_ctx=256, verbose=False) as llm:
        tokens = llm.generate([5, 17, 29, 41], temp=0.0)
        list(itertools.islice(tokens, 4))
        llama_cpp.llama_log_set(listening, None)
        try:
            list(itertools.islice(tokens, 40))
        finally:
            llama_cpp.llama_log_set(_logger.llama_log_callback, None)
        tokens.close()
    assert said == []
