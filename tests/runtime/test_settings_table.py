"""Each drafting setting in each kind of draft: it changes what is drafted, or it is refused. None is ignored.

The table is params.USES. Each way to give settings is held against it: Python, a batcher's requests, the
command line, a request's `speculative`, and what docs/use.md says.
"""

import re
from pathlib import Path

import pytest
import typer.testing
from tiny_models import PROMPT

import eagle3_llama
from eagle3_llama import EagleError, EagleLlama, EagleParams, ErrorKind
from eagle3_llama.batching import Batcher, BatchSettings
from eagle3_llama.bench.modes import parse_modes
from eagle3_llama.cli import conversation, main
from eagle3_llama.runtime.engine import Ask
from eagle3_llama.runtime.params import USES, Kind, StaticTree, Tree, Use

COMMON = {"n_ctx": 128, "n_batch": 64, "n_threads": 1, "flash_attn": True, "verbose": False}
BASE = {
    Kind.PLAIN: {"n_max": 0},
    Kind.CHAIN: {"n_max": 6},
    Kind.TREE: {"tree": Tree(8, 3, 3)},
    Kind.CHOICES: {"tree": [(0,), (1,), (0, 0)]},
    Kind.PLANNED: {},
    Kind.PLANNED_CHAINS: {"tree": False},
}
VALUES = {
    "n_max": [0, 3, 6],
    "n_min": [2],
    "p_min": [0.01],
    "tree": [False, Tree(5, 2, 4), StaticTree(((0,), (0, 0)))],
    "text": [False],
}
PAIRS = [(kind, name) for kind in Kind for name in VALUES]
DRAFTING = [
    Kind.CHAIN,
    Kind.TREE,
    Kind.CHOICES,
]  # kinds that ask for drafts, rather than leave it to the planner
OPTIONS = {"n_max": "--n-max", "n_min": "--n-min", "p_min": "--p-min", "tree": "--tree"}


@pytest.fixture(scope="module")
def eagle(files):
    with_head = EagleLlama(files[0], eagle=files[1], **COMMON)
    yield with_head
    with_head.close()


def asked(engine, params):
    """The native ask that params become."""
    a = engine.ffi.new("struct eagle3_ask *")
    alive = engine.drafting.fill(a[0], Ask(0, 5, params), 1, engine.ffi.NULL)
    names = [name for name, _ in engine.ffi.typeof(a[0]).fields]
    shape = [list(getattr(a, name)[0 : a.n]) for name in ("parents", "ranks") if getattr(a, name)]
    del alive
    return {n: getattr(a, n) for n in names if n not in ("parents", "ranks", "tokens")}, shape


def drafted(engine, **params):
    """(tokens, parents, probabilities given the parent) of what the head drafts behind the prompt."""
    engine.rewind(0)
    engine.prefill(PROMPT)
    tokens, probs = engine.steps.draft(5, EagleParams(**params))
    return tokens, engine.drafting.drafted().parents, probs


def test_the_table_has_every_setting_and_kind():
    import dataclasses

    names = {f.name for f in dataclasses.fields(EagleParams)}
    assert set(USES) == set(Kind) and all(set(uses) == names == set(VALUES) for uses in USES.values())
    assert {kind: EagleParams(**given).kind for kind, given in BASE.items()} == {kind: kind for kind in Kind}


@pytest.mark.parametrize("kind, name", PAIRS)
def test_every_setting_in_every_kind_of_draft(eagle, kind, name):
    use, base = USES[kind][name], EagleParams(**BASE[kind])
    values = [v for v in VALUES[name] if v != getattr(base, name)]
    for value in values:
        try:
            params = EagleParams(**{**BASE[kind], name: value})
        except EagleError as e:
            conflict = {name, "tree", "n_max"} if name in ("n_max", "tree") else {name}
            assert e.kind is ErrorKind.BAD_ARGUMENT and any(str(e).startswith(n + " ") for n in conflict), e
            # a shape beside n_max: the error is that of n_max in a tree
            assert isinstance(use, str) or (
                name == "tree" and base.n_max is not None and value is not False
            ), e
            continue
        assert not isinstance(use, str), f"{name}={value!r} is accepted in a {kind.value}"
        before, after = asked(eagle.engine, base), asked(eagle.engine, params)
        if use is Use.HOLDS and value is False:
            assert (params.kind, after) == (kind, before)
            assert name == "text" or not eagle.engine.trees(params)
        else:
            assert after != before, f"{name}={value!r} is ignored in a {kind.value}"
        if use is Use.USED:
            assert params.kind is kind


def test_what_is_drafted_follows_each_setting(eagle):
    """The same on the drafts themselves, for what has a fixed size."""
    engine = eagle.engine
    tokens, _, probs = drafted(engine, n_max=6)
    assert (
        len(tokens) == 6 and drafted(engine, n_max=3)[0] == tokens[:3] and drafted(engine, n_max=0)[0] == []
    )
    below = sorted(probs)[3]
    n = next(i for i, p in enumerate(probs) if p < below)
    assert drafted(engine, n_max=6, p_min=below)[0] == tokens[:n]
    assert drafted(engine, n_max=6, p_min=below, n_min=n)[0] == tokens[:n]
    assert drafted(engine, n_max=6, p_min=below, n_min=n + 1)[0] == []
    for choices in ([(0,), (1,), (0, 0)], [(0,), (0, 0), (0, 0, 0)]):
        tree = StaticTree(tuple(choices))
        assert drafted(engine, tree=tree)[1] == tree.parents
    assert [len(drafted(engine, tree=t)[0]) for t in ("8x3x3", "5x3x3", "8x1x3")] == [8, 5, 3]


def test_p_min_of_a_tree_is_that_of_a_whole_path(eagle):
    """A node stays out by the product of its path, not by its own probability."""
    engine = eagle.engine

    def reaches(p_min):
        tokens, parents, probs = drafted(engine, tree="20x3x4", p_min=p_min)
        out = []
        for parent, p in zip(parents, probs):
            out.append(p * (out[parent][0] if parent >= 0 else 1.0))
            out[-1] = (out[-1], p)
        paths = []
        for token, parent in zip(tokens, parents):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        return dict(zip(paths, out))

    everything = reaches(0.0)
    ordered = sorted(reach for reach, _ in everything.values())
    p_min = (ordered[9] + ordered[10]) / 2  # between two, so that rounding does not matter
    kept = {path for path, (reach, _) in everything.items() if reach >= p_min}
    assert set(reaches(p_min)) == kept and 0 < len(kept) < len(everything)
    assert any(own >= p_min > reach for reach, own in everything.values()), "the two rules would be alike"


@pytest.mark.parametrize(
    "tree, said",
    [
        (True, "names no shape"),
        ([0, 1], "expected choices"),
        ([("a",), (0,)], "expected choices"),
        (b"8x2", "expected choices"),
        ([], "number of choices"),
    ],
)
def test_trees_that_are_none(tree, said):
    with pytest.raises(EagleError, match=said) as e:
        EagleParams(tree=tree)
    assert e.value.kind is ErrorKind.BAD_ARGUMENT


@pytest.mark.parametrize("tree, most", [("2x6x1", 2), ("8x3x3", 3), ([(0,), (0, 0)], 2)])
def test_a_tree_as_a_chain_has_no_more_tokens_than_the_tree(tree, most):
    """Logits processors make chains of trees; a server's limit of draft tokens holds for these too."""
    assert EagleParams(tree=tree).chain() == EagleParams(most)


@pytest.mark.parametrize("kind", Kind)
def test_settings_without_a_head(files, kind):
    """Drafts that nobody can make are refused; what plain decoding satisfies is accepted."""
    params, refused = EagleParams(**BASE[kind]), kind in DRAFTING
    said = f"{params.needs_head} has no effect, because there is no head to draft with: give eagle"
    plain = EagleLlama(files[0], **COMMON)
    batcher = Batcher(BatchSettings(files[0], n_parallel=1, n_ctx=64))
    for give in (
        lambda: EagleLlama(files[0], **BASE[kind], **COMMON).close(),
        lambda: setattr(plain, "eagle_params", params),
        lambda: batcher.request(params=params),
    ):
        if refused:
            with pytest.raises(EagleError, match=said) as e:
                give()
            assert e.value.kind is ErrorKind.BAD_ARGUMENT and plain.eagle_params == EagleParams()
        else:
            give()
    batcher.close()
    plain.close()


@pytest.mark.parametrize("kind, name", [p for p in PAIRS if p[0] not in (Kind.CHOICES, Kind.PLANNED_CHAINS)])
def test_every_setting_on_the_command_line(files, monkeypatch, kind, name):
    """--tree takes no choices and no False; all else is as in Python, with a head and without one."""
    monkeypatch.setattr(conversation, "answer", lambda llm, *_, **__: seen.append(llm.eagle_params))
    written = lambda v: f"{v.nodes}x{v.depth}x{v.width}" if isinstance(v, Tree) else str(v)
    values = VALUES[name] if name == "text" else [v for v in VALUES[name] if v is not False]
    given = {**BASE[kind], name: next(v for v in values if v != BASE[kind].get(name))}
    of = lambda n, v: ["--no-text"] if n == "text" else [OPTIONS[n], written(v)]
    options = [word for n, v in given.items() for word in of(n, v)]
    for head in (["--eagle", files[1]], []):
        seen = []
        args = ["generate", "-m", files[0], "-p", "x", "--raw", "-c", "128", "-t", "1", *head, *options]
        done = typer.testing.CliRunner().invoke(main.app, args)
        try:
            expected = EagleParams(**given)
            if not head:
                expected.check_no_head("there is no head")
        except EagleError as e:
            assert isinstance(done.exception, EagleError) and not seen, (args, done)
            assert str(done.exception).split()[0] == str(e).split()[0]
        else:
            assert done.exit_code == 0 and seen == [expected], (args, done.exception)


@pytest.mark.parametrize("with_head", [True, False])
def test_every_setting_of_a_request_to_the_server(files, with_head):
    """`speculative`: it has no n_min and no choices, and `enabled`."""
    pytest.importorskip("fastapi")
    from eagle3_llama.server.body.fields import Speculative
    from eagle3_llama.server.errors import ApiError
    from eagle3_llama.server.prompt.choices import ChoiceMaker
    from eagle3_llama.server.settings import ServerSettings

    head = files[1] if with_head else None
    batcher = Batcher(BatchSettings(files[0], head, n_parallel=1, n_ctx=64))
    maker = ChoiceMaker(ServerSettings(files[0], head, max_draft=20), batcher.base, "tiny")
    for body, expected in (
        ({}, None),
        ({"report": True}, None),
        ({"enabled": True}, None),
        ({"enabled": False}, EagleParams(0)),
        ({"enabled": False, "report": True}, EagleParams(0)),
        ({"enabled": False, "n_max": 0, "tree": False}, EagleParams(0)),
        ({"enabled": False, "n_max": 3}, "400"),
        ({"enabled": False, "p_min": 0.5}, "400"),
        ({"enabled": False, "tree": "8x3x3"}, "400"),
        ({"n_max": 0}, EagleParams(0)),
        ({"n_max": 0, "p_min": 0.5}, "400"),
        ({"n_max": 0, "tree": False}, EagleParams(0, tree=False)),
        ({"n_max": 3}, EagleParams(3)),
        ({"n_max": 3, "p_min": 0.5}, EagleParams(3, p_min=0.5)),
        ({"n_max": 3, "tree": False}, EagleParams(3, tree=False)),
        ({"n_max": 3, "tree": "8x3x3"}, "400"),
        ({"n_max": 21}, "400"),
        ({"tree": "8x3x3"}, EagleParams(tree="8x3x3")),
        ({"tree": "8x3x3", "p_min": 0.5}, EagleParams(p_min=0.5, tree="8x3x3")),
        ({"tree": "21x3x3"}, "400"),
        ({"tree": False}, EagleParams(tree=False)),
        ({"tree": False, "p_min": 0.5}, "400"),
        ({"p_min": 0.5}, "400"),
        ({"text": False}, EagleParams(text=False)),
        ({"text": True}, EagleParams()),
        ({"text": False, "tree": False}, EagleParams(tree=False, text=False)),
        ({"text": False, "n_max": 3}, EagleParams(3, text=False)),
        ({"enabled": False, "text": True}, "400"),
        ({"enabled": False, "text": False}, EagleParams(0)),
    ):
        if not with_head and isinstance(expected, EagleParams) and expected.needs_head:
            expected = "400"
        try:
            params = maker.params(Speculative(**body))
        except ApiError as e:
            assert expected == "400" and e.status == 400, (body, e)
        else:
            assert params == expected, body
    maker.settings = ServerSettings(files[0], head, text=False)
    assert maker.params(Speculative(tree=False)) == EagleParams(tree=False, text=False)
    with pytest.raises(ApiError, match="--no-text"):
        maker.params(Speculative(text=True))
    maker.close()
    batcher.close()


@pytest.mark.parametrize(
    "modes, given",
    [
        (["plain"], {"params": EagleParams(3)}),
        (["plain", "upstream"], {"params": EagleParams(p_min=0.1, tree="8x2x2"), "heads": ["h"]}),
        (["plain"], {"fixed": ["3"]}),
        (["plain"], {"heads": ["h"]}),
        (["plain", "prompt_lookup"], {"draft_model": "d"}),
    ],
)
def test_a_benchmark_without_the_mode_that_a_setting_is_for(modes, given):
    call = {"heads": [], "draft_model": None, "params": EagleParams(), "fixed": [], **given}
    with pytest.raises(EagleError, match="^--.* has no effect in the modes .* to --modes") as e:
        parse_modes(modes, **call)
    assert e.value.kind is ErrorKind.BAD_ARGUMENT
    assert parse_modes([*modes, "eagle", "draft_model"], **{**call, "heads": ["h"], "draft_model": "d"})


def test_the_documentation_says_the_same():
    text = (Path(eagle3_llama.__file__).parent / "docs" / "use.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.strip("| ").split("|")] for line in text.splitlines() if "|" in line
    ]
    header = next(row for row in rows if row[1:] == [f"`{name}`" for name in VALUES])
    table = {row[0].split(" (")[0]: row[1:] for row in rows[rows.index(header) + 2 :][: len(Kind)]}
    words = {
        kind.value: [Use.REFUSED.value if isinstance(u, str) else u.value for u in uses.values()]
        for kind, uses in USES.items()
    }
    assert {kind: [re.sub(r" \(.*\)", "", cell) for cell in cells] for kind, cells in table.items()} == words
