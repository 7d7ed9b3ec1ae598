#!/usr/bin/env python3
"""Compares two ways to verify a draft tree in one batch: our attention mask, and overlapping sequence ids.

With sequence ids, each leaf has its own id, and the rows above it share it. The table shows milliseconds per
round (decode, then keep one path). The two ways alternate, and medians are shown.

    scripts/bench_trees.py TARGET.gguf [--threads N] [--context N] [--rounds N]
"""

import argparse
import random
import statistics
import time

from eagle3_llama import EagleLlama  # before llama_cpp, so that llama_cpp opens our libllama
from eagle3_llama.runtime.costs import fill_context
from eagle3_llama.runtime.machine import cores

import llama_cpp


def tree(n, rng):
    """The parents of n nodes, level by level; -1 is the root.

    As in EAGLE-2's trees, there are few levels, and more likely nodes have more children.
    """
    parents, level, first = [], [-1], 0
    while len(parents) < n:
        width = min(10, n - len(parents))
        children = sorted(min(int(rng.expovariate(0.4)), len(level) - 1) for _ in range(width))
        parents += [level[i] for i in children]
        level, first = list(range(first, len(parents))), len(parents)
    return parents


def leaves_below(parents):
    """(for the root and each node, the set of leaves below it; the number of leaves). Leaves count from 0."""
    inner, below, count = set(parents), [set() for _ in range(len(parents) + 1)], 0
    for i in range(len(parents)):
        if i in inner:
            continue
        at = i
        while True:
            below[at + 1].add(count)
            if at < 0:
                break
            at = parents[at]
        count += 1
    return below, count


class SequenceIds:
    def __init__(self, path, n_threads, n_ctx, context):
        self.llm = llama_cpp.Llama(
            path, n_ctx=n_ctx, n_threads=n_threads, n_threads_batch=n_threads, flash_attn=True, verbose=False
        )
        p = self.llm.context_params
        p.n_seq_max, p.kv_unified = 64, True
        self.ctx = llama_cpp.llama_init_from_model(self.llm._model.model, p)
        self.mem = llama_cpp.llama_get_memory(self.ctx)
        self.batch = llama_cpp.llama_batch_init(64, 0, 64)
        for at in range(0, context, 32):
            self._decode([(100 + i % 200, i, [0]) for i in range(at, min(at + 32, context))])
        self.n_past = context

    def _decode(self, rows):
        self.batch.n_tokens = len(rows)
        for i, (token, pos, ids) in enumerate(rows):
            self.batch.token[i], self.batch.pos[i] = token, pos
            self.batch.n_seq_id[i], self.batch.logits[i] = len(ids), 1
            for k, s in enumerate(ids):
                self.batch.seq_id[i][k] = s
        assert llama_cpp.llama_decode(self.ctx, self.batch) == 0

    def round(self, parents, below, n_leaves):
        depth = [0]
        for p in parents:
            depth.append(depth[p + 1] + 1)
        rows = [(100 + i, self.n_past + d, sorted(below[i])) for i, d in enumerate(depth)]
        start = time.perf_counter()
        for s in range(1, n_leaves):
            llama_cpp.llama_memory_seq_cp(self.mem, 0, s, 0, -1)
        self._decode(rows)
        llama_cpp.llama_synchronize(self.ctx)
        last = n_leaves - 1  # keep its path, so that the next round starts with one sequence again
        llama_cpp.llama_memory_seq_keep(self.mem, last)
        llama_cpp.llama_memory_seq_cp(self.mem, last, 0, 0, -1)
        llama_cpp.llama_memory_seq_keep(self.mem, 0)
        seconds = time.perf_counter() - start
        llama_cpp.llama_memory_seq_rm(self.mem, 0, self.n_past, -1)
        return seconds


class Mask:
    def __init__(self, path, n_threads, n_ctx, context):
        self.llm = EagleLlama(
            path, n_ctx=n_ctx, n_threads=n_threads, n_threads_batch=n_threads, flash_attn=True, verbose=False
        )
        self.engine = self.llm._engine
        fill_context(self.engine, context)
        self.sampler = self.llm._init_sampler(temp=0.0)

    def round(self, parents, below, n_leaves):
        start = time.perf_counter()
        self.engine.decode(100, [101 + i for i in range(len(parents))], parents)
        n_past = self.engine.n_past()
        self.engine.commit(1)
        seconds = time.perf_counter() - start
        self.engine.rewind(n_past)
        return seconds


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target")
    parser.add_argument("--threads", type=int, default=cores())
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=15)
    a = parser.parse_args()
    ways = {w.__name__: w(a.target, a.threads, a.context + 1024, a.context) for w in (Mask, SequenceIds)}
    print("nodes  leaves  " + "  ".join(f"{name:>11} ms" for name in ways) + "   ratio")
    for n in (8, 16, 32, 60):
        times = {name: [] for name in ways}
        for r in range(a.rounds):
            shape = tree(n, random.Random(n))
            below, n_leaves = leaves_below(shape)
            for name in ways if r % 2 == 0 else reversed(ways):
                times[name].append(1e3 * ways[name].round(shape, below, n_leaves))
        mask, ids = (statistics.median(t) for t in times.values())
        print(f"{n:5}  {n_leaves:6}  {mask:14.1f}  {ids:14.1f}   {ids / mask:5.2f}", flush=True)


if __name__ == "__main__":
    main()
