"""docs/architectures.md: the table of what drafts for each architecture is what rounds on its models show."""

import pytest
from drafting_table import CELLS, ROUNDS, kinds_of, rows_of, rows_of_the_page, with_reasons
from native_programs import program

PAGE, NOTES = rows_of_the_page()
ARCHITECTURES = sorted({name.partition(",")[0] for name in PAGE})


@pytest.fixture(scope="module")
def tool():
    return program("drafting")


@pytest.fixture(scope="module")
def kinds(tool):
    return kinds_of(tool)


def test_the_table_has_all(kinds):
    assert set(kinds) == set(ARCHITECTURES) and len(kinds) > 120


@pytest.mark.parametrize("arch", ARCHITECTURES)
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
