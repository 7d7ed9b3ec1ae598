"""Heads whose layers are right or wrong by one, and the reports of their self-tests."""

import numpy as np

from eagle3_llama.heads.guesses import Reader
from eagle3_llama.heads.self_test import neighbours, report

CENTRE = [2, 15, 27]  # what both heads were trained on


def shifted(by):
    return [i + b for i, b in zip(CENTRE, by)]


def trials_of_wrong_layers(head, target, shifts, n_threads=None):
    """{shift: the report of a head whose file names CENTRE shifted so}: as self_test() gives it, but the
    target reads once for all."""
    with Reader(head, target, n_threads) as reader:
        tried = {by: neighbours(shifted(by), reader.n_layer) for by in shifts}
        choices = sorted({tuple(layers) for some in tried.values() for layers in some})
        parts = [reader.guesses(passage, choices) for passage in reader.built_in()]
    answers, hits, likelihoods = (np.concatenate(x, axis=-1) for x in zip(*parts))
    rows = {by: [choices.index(tuple(layers)) for layers in some] for by, some in tried.items()}
    return {by: report(some, answers, hits[rows[by]], likelihoods[rows[by]]) for by, some in tried.items()}
