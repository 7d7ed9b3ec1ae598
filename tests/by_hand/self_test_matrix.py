"""The self-test's verdicts on SmolLM2 for heads whose layers are right, all wrong by one, and one of three
wrong by one.

    python tests/by_hand/self_test_matrix.py [FORMAT ...]    # Q4_0, Q8_0 and BF16 if none is given

A verdict is wrong if wrong layers are called fine, right ones wrong, or layers other than the right ones are
named.
"""

import itertools
import sys
import tempfile
from pathlib import Path

from eagle3_llama.heads.convert import convert
from eagle3_llama.heads.self_test import Verdict, verdict
from eagle3_llama.models import shipped_head, smollm2

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "kit"))
from paths import DATA
from wrong_layers import CENTRE, shifted, trials_of_wrong_layers

SHIFTS = [
    (0, 0, 0),
    (-1, -1, -1),
    (1, 1, 1),
    *(s for s in itertools.product((-1, 0, 1), repeat=3) if sum(map(abs, s)) == 1),
]


def is_wrong(by, kind, line):
    named = f"--extract-layers {','.join(map(str, CENTRE))}" in line
    return (
        kind is Verdict.WRONG and (by == (0, 0, 0) or not named) or kind is Verdict.FINE and by != (0, 0, 0)
    )


def main():
    n_wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        reference = convert(DATA / "reference-head", smollm2("Q4_0"), Path(folder) / "head.gguf", "q8_0").out
        for fmt in sys.argv[1:] or ["Q4_0", "Q8_0", "BF16"]:
            for name, head in (("reference", reference), ("shipped", shipped_head())):
                for by, found in trials_of_wrong_layers(head, smollm2(fmt), SHIFTS).items():
                    kind, line = verdict(found)
                    n_wrong += is_wrong(by, kind, line)
                    print(
                        f"{fmt}, {name} head, layers {shifted(by)}, {found.positions} positions, "
                        f"{found.trials[0].accepted:.3f} accepted: "
                        f"{kind.value}{' (a wrong verdict)' * is_wrong(by, kind, line)}",
                        flush=True,
                    )
                    for t in found.trials[1:]:
                        errors = t.likelihood.mean / t.likelihood.error
                        print(
                            f"    {t.layers}: acceptance {t.acceptance}, "
                            f"log-likelihood {t.likelihood}, {errors:+.1f} errors"
                        )
    print(f"{n_wrong} wrong verdicts")
    return n_wrong > 0


if __name__ == "__main__":
    sys.exit(main())
