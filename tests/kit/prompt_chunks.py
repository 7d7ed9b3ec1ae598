"""Compares a batcher's texts and logprobs with EagleLlama's on SmolLM2, while the speed of prompts changes.

    python tests/kit/prompt_chunks.py [FORMAT] [SEEDS]    # Q4_K_M and 20; exit code 1 if a text differs

Each seed has a prompt of 100 to 600 tokens. After each chunk, the batcher believes that another speed was
measured, so that it cuts the next prompts in other ways.
"""

import random
import sys

from eagle3_llama import EagleLlama  # before llama_cpp: it brings the library
from eagle3_llama.batching import Batcher, BatchSettings
from eagle3_llama.models import smollm2

WORDS = "the old river ran past a small town where nobody had ever seen so much snow at night".split()
RATES = [0.0, 300.0, 400.0, 700.0, 1111.0, 3000.0, 1e6]  # tokens/s


def main(fmt="Q4_K_M", seeds=20):
    path, different = str(smollm2(fmt)), 0
    alone = EagleLlama(path, n_ctx=768, flash_attn=True, n_threads=2, n_threads_batch=2, verbose=False)
    with Batcher(BatchSettings(path, n_parallel=2, n_ctx=768, n_threads=2)) as batcher:
        rng, rounds, chunks = random.Random(0), batcher._scheduler, []
        decode = rounds._prompt_chunk

        def chunk(slot, job, n):
            chunks.append(n)
            decode(slot, job, n)
            rounds._prompt_rate = rng.choice(RATES)

        rounds._prompt_chunk = chunk
        for seed in range(int(seeds)):
            words = " ".join(rng.choice(WORDS) for _ in range(600))
            prompt = alone.tokenize(words.encode())[: rng.randint(100, 600)]
            ask = dict(max_tokens=24, temperature=0.8, seed=seed, logprobs=1)
            alone.reset()
            expected = alone.create_completion(prompt, **ask)["choices"]
            chunks.clear()
            batcher.inbox.run(lambda: [batcher._prefixes.keep(slot, 0) for slot in batcher._slots])
            with batcher.request() as llm:
                got = llm.create_completion(prompt, **ask)["choices"]
            text, rows = expected[0]["text"], expected[0]["logprobs"]["token_logprobs"]
            same = got[0]["text"] == text and got[0]["logprobs"]["token_logprobs"] == rows
            different += not same
            outcome = "same" if same else "DIFFERENT"
            print(f"seed {seed}: {len(prompt)} tokens as {chunks}: {outcome}", flush=True)
    alone.close()
    print(f"{different} of {seeds} differ")
    return different > 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
