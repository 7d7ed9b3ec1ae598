"""What reading the weights of a decode takes."""

from pathlib import Path

import tiny_models

from eagle3_llama.bench import roofline
from eagle3_llama.common.gguf_reader import Gguf, T, TensorInfo, Value, read_gguf
from eagle3_llama.common.model_reader import row_bytes


def a_model(keys, **n_bytes):
    tensors = {
        name.replace("__", "."): TensorInfo(name, (1,), None, 0, n, Path()) for name, n in n_bytes.items()
    }
    return Gguf(None, {"general.architecture": Value(b"llama", T.STRING), **keys}, tensors, 0)


def test_one_row_reads_all_weights_once():
    assert row_bytes(a_model({}, token_embd__weight=100, blk__weight=50)) == 150


def test_of_an_embedding_beside_an_output_matrix_it_reads_one_row():
    model = a_model({}, token_embd__weight=100, output__weight=100, blk__weight=50)
    assert row_bytes(model) == 150


def test_of_the_experts_it_reads_those_that_are_used():
    keys = {"llama.expert_count": Value(8, T.UINT32), "llama.expert_used_count": Value(2, T.UINT32)}
    assert row_bytes(a_model(keys, blk__0__ffn_up_exps__weight=800, blk__weight=50)) == 250


def test_a_file(tmp_path):
    path = tiny_models.target(tmp_path / "target.gguf", kind="Q4_0")
    total = sum(t.n_bytes for t in read_gguf(path).tensors.values())
    found = roofline.roofline(str(path), 2)
    assert 0 < found.n_bytes <= total and found.speed > 0
    assert abs(found.seconds * found.speed - found.n_bytes) < 1


def test_the_report_has_shares_of_the_decodes():
    limit = roofline.Roofline(n_bytes=2_000_000, speed=1e9)  # 2 ms
    report = limit.report(one_row=0.004, eight_rows=0.008)
    assert report["share_of_one_row"] == 0.5 and report["share_of_eight_rows"] == 0.25
    line = limit.line(one_row=0.004, eight_rows=0.008)
    assert "2 MB" in line and "4.0 ms (50%)" in line and "8.0 ms (25%)" in line
