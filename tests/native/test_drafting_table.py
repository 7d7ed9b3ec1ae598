"""docs/architectures.md: the table of what drafts for each architecture is what rounds on its models show."""

import pytest
from drafting_table import CELLS, ROUNDS, kinds_of, rows_of, rows_of_the_page, with_reasons
from native_programs import program
from tiers import each

PAGE, NOTES = rows_of_the_page()
ARCHITECTURES = sorted({name.partition(",")[0] for name in PAGE})
# Of each kind of memory and rollback, the one that takes least. DeepSeek-V4 is alone of its kind and takes a
# minute: runtime/test_memories.py and native/test_recurrent.py have it.
QUICK = ["llama", "cohere2", "arwkv7", "plamo2", "bailingmoe3", "lfm2"]
QUICK += ["hy_v4", "dots3note", "glm5-next", "minimax-m3", "t5", "dream"]


@pytest.fixture(scope="module")
def tool():
    return program("drafting")


@pytest.fixture(scope="module")
def kinds(tool):
    return kinds_of(tool)


def test_the_table_has_all(kinds):
    assert set(kinds) == set(ARCHITECTURES) and len(kinds) > 120
    memories = {tuple(PAGE[arch][:2]) for arch in [*QUICK, "deepseek4"]}
    assert memories == {tuple(cells[:2]) for cells in PAGE.values()} and len(memories) == len(QUICK) + 1


@pytest.mark.parametrize("arch", each(ARCHITECTURES, quick=QUICK))
def test_row(tool, kinds, arch):
    """Its rows say what the library does. Nothing fails, and no row of logits has other bits."""
    rows = rows_of(tool, arch, kinds[arch])
    said = {name: cells for name, cells in PAGE.items() if name.partition(",")[0] == arch}
    assert {row.name: row.words() for row in rows} == {n: with_reasons(c, NOTES) for n, c in said.items()}
    for row in rows:
        assert not {"fails", "differs"} & set(row.words()[0]), row
        drafting = [c for c in row.cells.values() if c.drafted]
        assert all(0 < c.accepted < c.drafted for c in drafting), row
        for depth in range(1, 4 if ROUNDS < 200 else 8):  # rejected there in some cell
            assert not drafting or sum(c.rejected[depth] for c in drafting) > 0, (depth, row)
        assert set(row.cells) in (set(), set(CELLS))
