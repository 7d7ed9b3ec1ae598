"""Models in several files: everything that reads one reads all of it, or says which part is wrong."""

import os
import re
import shutil

import numpy as np
import pytest
import tiny_models
from split_models import split

from eagle3_llama import EagleError, EagleLlama
from eagle3_llama.bench.roofline import roofline
from eagle3_llama.common.gguf_reader import read_gguf
from eagle3_llama.common.model_files import check_models
from eagle3_llama.common.model_reader import files_of, fingerprint, read_model, row_bytes, size_of
from eagle3_llama.errors import ErrorKind
from eagle3_llama.heads.convert.target import read_target
from eagle3_llama.heads.info import describe
from eagle3_llama.llama import model_costs

CTX = {"n_ctx": 128, "n_threads": 1, "verbose": False}


@pytest.fixture
def whole(tmp_path):
    return tiny_models.target(tmp_path / "whole.gguf", kind="Q8_0")


@pytest.fixture
def parts(whole, tmp_path):
    """The output matrix is in the last part: the first alone looks like a model with tied weights."""
    return split(whole, tmp_path, 3, apart=["output.weight"])


def test_all_tensors_are_read(whole, parts):
    one, many = read_gguf(whole), read_model(parts[0])
    assert many.tensors.keys() == one.tensors.keys() and many.size == sum(p.stat().st_size for p in parts)
    for name in one.tensors:
        assert np.array_equal(one.floats(name), many.floats(name)), name
    rows = np.array([3, 1])
    assert np.array_equal(one.floats("output.weight", rows), many.floats("output.weight", rows))
    assert row_bytes(many) == row_bytes(one) == roofline(str(parts[0]), 1).n_bytes
    assert files_of(parts[0]) == parts and size_of(parts[0]) == many.size and files_of(whole) == [whole]
    assert files_of(parts[1]) == [parts[1]]


def test_info_counts_all_parts(whole, parts):
    found, wanted = dict(describe(parts[0])), dict(describe(whole))
    assert found["weights"] == wanted["weights"]
    assert found["file"] == f"{parts[0].name}, {size_of(parts[0]) / 1e6:.1f} MB in 3 files"


@pytest.mark.thorough
def test_training_reads_the_output_matrix_of_a_later_part(whole, parts):
    pytest.importorskip("torch")
    from eagle3_llama.train.weights import TargetWeights

    one, many = TargetWeights(whole), TargetWeights(parts[0])
    assert many.output_name == "output.weight" and many.shape == one.shape
    assert np.array_equal(many.rows(many.output_name), one.rows(one.output_name))
    assert many.last_layer().keys() == one.last_layer().keys()


def test_a_load_counts_all_parts(whole, parts):
    """What a row reads, and what its measured costs belong to."""
    with EagleLlama(parts[0], **CTX) as llm, EagleLlama(whole, **CTX) as other:
        assert model_costs.memory_of(llm).row_bytes == model_costs.memory_of(other).row_bytes
        assert (
            llm("ab", max_tokens=4, temperature=0)["choices"]
            == other("ab", max_tokens=4, temperature=0)["choices"]
        )
        before = model_costs.cost_key(llm, None)
        os.utime(parts[2], (1, 1))
        assert model_costs.cost_key(llm, None) == before  # what was loaded is what it was
    with EagleLlama(parts[0], **CTX) as llm:
        assert model_costs.cost_key(llm, None) != before


def test_another_later_part_is_another_model(parts):
    before = fingerprint(parts[0])
    data = bytearray(parts[2].read_bytes())
    data[-1] ^= 1
    parts[2].write_bytes(data)
    assert fingerprint(parts[0]) != before


def refused(path, said):
    calls = (
        lambda: check_models(path),
        lambda: EagleLlama(path, **CTX),
        lambda: describe(path),
        lambda: read_target(path),
        lambda: roofline(str(path), 1),
    )
    for call in calls:
        with pytest.raises(EagleError, match=re.escape(said)) as error:
            call()
        assert error.value.kind is ErrorKind.BAD_FILE and "\n" not in str(error.value)


def test_missing_parts_are_named(parts):
    parts[2].unlink()
    refused(parts[0], f"first of 3 files of a model, and {parts[2].name} is not beside it")
    parts[1].unlink()
    refused(parts[0], f"{parts[1].name}, {parts[2].name} are not beside it: put all")


def test_a_later_part_says_which_is_the_first(parts):
    refused(parts[1], f"is part 2 of a model in 3 files: give the first, {parts[0].name}")
    other = parts[1].rename(parts[1].with_name("other.gguf"))
    refused(other, "is part 2 of a model in 3 files: give the first, ...-00001-of-00003.gguf")


def test_parts_of_two_models(whole, parts, tmp_path):
    shutil.copy(parts[1], parts[2])
    refused(parts[0], f"{parts[2]} is not part 3 of 3: fetch the parts")
    two = split(whole, tmp_path, 2, name="two")
    shutil.copy(two[1], parts[1])
    refused(parts[0], f"{parts[1]} is not part 2 of 3")


def test_a_first_part_under_another_name(parts):
    other = parts[0].rename(parts[0].with_name("renamed.gguf"))
    with pytest.raises(EagleError, match="call it NAME-00001-of-00003.gguf"):
        EagleLlama(other, **CTX)
    with pytest.raises(EagleError, match="call it NAME-00001-of-00003.gguf"):
        describe(other)


def test_a_name_alone_makes_no_parts(whole):
    """A model in one file that is called so loads, as it does with llama.cpp."""
    odd = whole.rename(whole.with_name("odd-00001-of-00002.gguf"))
    check_models(odd)
    assert read_model(odd).tensors and files_of(odd) == [odd]
    EagleLlama(odd, **CTX).close()
