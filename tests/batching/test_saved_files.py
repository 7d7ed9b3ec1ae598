"""What docs/saved-files.md says of bytes: a slot file and a drafting state are read by its tables alone."""

import hashlib
import json
import re
import struct

import pytest
from batch_tools import N_CTX, batcher, plain, take, tiny  # noqa: F401 - fixtures too
from paths import ROOT
from tiny_models import PROMPT

from eagle3_llama.batching import Batcher, BatchSettings

PAGE = (ROOT / "eagle3_llama/docs/saved-files.md").read_text(encoding="utf-8")


def table(heading):
    """The rows of the first table below a heading."""
    section = re.search(rf"^#+ {heading}\n(.*?)(?=^#|\Z)", PAGE, re.MULTILINE | re.DOTALL)[1]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def fixed(heading):
    """(names, struct format) of the fields before the first array; their offsets are those of the page."""
    names, code = [], "<"
    for offset, kind, meaning in table(heading):
        if offset and int(offset) == struct.calcsize(code) and kind in ("8 bytes", "`int32`"):
            code += {"8 bytes": "8s", "`int32`": "i"}[kind]
            names.append(re.sub(r"[`:].*", "", meaning.lstrip("`")) or meaning)
    return names, code


def read_head(data):
    """(fields, bytes of this part) of a drafting state that begins with the head's part."""
    names, code = fixed("The head's part")
    fields = dict(zip(names, struct.unpack_from(code, data)))
    waiting = 4 * fields["n_pending_tokens"] + 4 * fields["n_pending"] * fields["n_features"]
    cells = 2 * 2 * fields["n_blocks"] * (fields["head_n"] - fields["head_from"]) * fields["n_embd_kv"]
    return fields, struct.calcsize(code) + waiting + cells


def read_text(data):
    names, code = fixed("The text's part")
    *_, first, n = struct.unpack_from(code, data)
    tokens = struct.unpack_from(f"<{n}i", data, struct.calcsize(code))
    return first, list(tokens), struct.calcsize(code) + 4 * n


def read_slot_file(data):
    """(header, target, drafting state, texts), by the page's first table."""
    assert data[:12] == b"eagle3slot1\n" and hashlib.sha256(data[:-32]).digest() == data[-32:]
    (n,) = struct.unpack_from("<I", data, 12)
    header, at, parts = json.loads(data[16 : 16 + n]), 16 + n, []
    for name in ("target", "head", "texts"):
        parts.append(data[at : at + header[name]])
        at += header[name]
    assert at + 32 == len(data)
    return header, *parts


@pytest.mark.parametrize("with_head", [True, False])
def test_a_slot_file_is_as_the_page_says(tiny, with_head):
    head = tiny[1] if with_head else None
    settings = BatchSettings(tiny[0], head, n_parallel=2, n_ctx=N_CTX, n_threads=1, text_memory=1 << 20)
    with Batcher(settings) as served:
        with served.request() as llm:
            answer = take(llm, 20, [*PROMPT, *range(20, 70)], temp=0.0)
        slot = max(served.slots(), key=lambda s: s["n_past"])["id"]
        header, target, drafting, texts = read_slot_file(served.save_slot(slot))
    named = {row[0].strip("`") for row in table("Slot file") if row[0].startswith("`")}
    assert {field for name in named for field in name.split("`, `")} == set(header)
    assert all(f"`{field}`" in PAGE for field in header["of"])
    assert header["tokens"][: len(PROMPT)] == PROMPT and target

    size = 0
    if with_head:
        fields, size = read_head(drafting)
        assert drafting[:8] == b"eagle3s\0" and fields["version"] == 2
        assert fields["n_past"] == len(header["tokens"])
        assert 0 < fields["head_n"] <= fields["n_past"]
    assert drafting[size : size + 8] == b"E3TEXT1\0"
    first, tokens, n = read_text(drafting[size:])
    assert size + n == len(drafting) and tokens == header["tokens"][first:]
    remembered = struct.unpack(f"<{len(texts) // 4}i", texts)
    assert remembered[-1] == -1 and list(remembered[:-1])[: len(answer) - 1] == answer[:-1]


def test_the_tables_were_found():
    """A page whose tables nothing reads would be tested by nothing."""
    names, code = fixed("The head's part")
    assert struct.calcsize(code) == 48 and names[1:4] == ["version", "n_embd_kv", "n_features"]
    assert len(names) == 11 and fixed("The text's part")[1] == "<8sii"
