"""Loads a model, decodes short and long texts with drafts of every length, and prints what that took.

python memory_of_a_load.py '{"model": ..., "eagle": ..., "n_max": [...], ...}'
prints JSON: the tokens, and the resident bytes of the process above those before the load.
"""

import json
import random
import sys

from tiny_models import take

from eagle3_llama import EagleLlama, EagleParams

SHORT = 300  # tokens of a text


def resident():
    with open("/proc/self/status") as status:
        return 1024 * next(int(line.split()[1]) for line in status if line.startswith("VmRSS:"))


def main(model, n_max, n_text=8000, **common):
    before = resident()
    llm = EagleLlama(model, n_ctx=n_text + 256, n_threads=1, verbose=False, **common)
    default, loaded = llm.eagle_params, llm.memory()
    rng = random.Random(1)
    text = [1] + [rng.randrange(300, llm.n_vocab()) for _ in range(n_text - 1)]
    tokens = []
    for prompt in (text[:SHORT], text, text[:SHORT]):
        tokens.append(take(llm, 8, prompt))
        for n in n_max:
            llm.eagle_params = EagleParams(n if "eagle" in common else 0)  # 0: plain decoding
            tokens.append(take(llm, 3, prompt))
        llm.eagle_params = default
    took = {"loaded": vars(loaded), "memory": vars(llm.memory()), "resident": resident() - before}
    print(json.dumps({"tokens": tokens, **took}))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
