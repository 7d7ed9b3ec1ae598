"""Figures and the table of a benchmark."""

from __future__ import annotations

from typing import Any, Sequence

from rich.table import Table

from .bench import Answer, Target, loop_flags


def results(target: Target, answers: Sequence[Answer], modes: Sequence[str], curve: dict[str, float] | None) -> list[dict[str, Any]]:
    """One entry for each mode and category, and one for `all`."""
    out = []
    categories = sorted({a.category for a in answers})
    for category in [*(categories if len(categories) > 1 else []), "all"]:
        chosen = [a for a in answers if category in ("all", a.category)]
        out += [_result(target, chosen, mode, category, curve) for mode in modes]
    return out


def _result(target: Target, answers: Sequence[Answer], mode: str, category: str, curve: dict[str, float] | None) -> dict[str, Any]:
    tokens = sum(len(a.tokens(mode)) for a in answers)
    seconds = sum(a.seconds(mode) for a in answers)
    plain = sum(a.seconds("plain") for a in answers) / max(sum(len(a.tokens("plain")) for a in answers), 1)
    out = {
        "target": target.path, "format": target.format, "mode": mode, "category": category, "tokens": tokens,
        "tok_per_s": round(tokens / seconds, 2) if seconds else 0.0,
        "ratio": round(plain * tokens / seconds, 4) if seconds else 0.0,
        "identical": all(a.tokens(mode) == a.tokens("plain") for a in answers),
        "first_divergence_gaps": [a.gap for a in answers if a.gap is not None] if mode != "plain" else [],
        "loop_share": _loop_share(answers, mode),
    }
    out.update(_acceptance(answers, mode))
    out["time_share"] = _time_share(answers, mode)
    if mode.startswith("eagle"):
        out["n_max"] = target.llms[mode].eagle_params.n_max
        out["limit"] = _limit(out, curve)
    return out


def _loop_share(answers: Sequence[Answer], mode: str) -> float:
    flags = [f for a in answers for f in loop_flags(a.tokens(mode))]
    return round(sum(flags) / len(flags), 4) if flags else 0.0


def _acceptance(answers: Sequence[Answer], mode: str) -> dict[str, Any]:
    if mode == "plain":
        return {"mean_accepted_length": 1.0, "accept_per_position": [], "mean_accepted_length_outside_loops": 1.0, "mean_drafted": 0.0}
    every, outside, drafted = [], [], []
    for a in answers:
        flags = loop_flags(a.tokens(mode))
        rounds = a.runs[mode][0].rounds
        # the last round may have been cut off by the limit on tokens or the end of the answer
        for start, length, n in rounds[:-1]:
            every.append(length)
            drafted.append(n)
            if not flags[start]:
                outside.append(length)
    mean = lambda xs: round(sum(xs) / len(xs), 4) if xs else 0.0  # noqa: E731
    positions = [round(sum(n > i for n in every) / len(every), 4) for i in range(1, max(every, default=1))]
    return {"mean_accepted_length": mean(every), "accept_per_position": positions,
            "mean_accepted_length_outside_loops": mean(outside), "mean_drafted": mean(drafted)}


def _time_share(answers: Sequence[Answer], mode: str) -> dict[str, float] | None:
    shares = [r.shares for a in answers for r in a.runs[mode] if r.shares]
    total = sum(sum(s.values()) for s in shares)
    return {name: round(sum(s[name] for s in shares) / total, 4) for name in shares[0]} if total else None


def _limit(result: dict[str, Any], curve: dict[str, float] | None) -> float | None:
    """Accepted length over the cost of the rows: the speed-up of a head that costs nothing, no overhead."""
    if not curve:
        return None
    points = sorted((int(n), c) for n, c in curve.items())
    rows = 1 + result["mean_drafted"]
    for (n0, c0), (n1, c1) in zip(points, points[1:]):
        if rows <= n1:
            cost = c0 + (c1 - c0) * (rows - n0) / (n1 - n0)
            return round(result["mean_accepted_length"] / cost, 4)
    return None


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """The same as a table for people."""
    t = Table(title="speed against plain decoding, greedy unless said otherwise")
    for name in ("format", "mode", "category", "tokens", "tok/s", "ratio", "limit", "accepted length", "outside loops",
                 "accepted at 1, 2, ...", "loops", "target/draft/verify/other", "same text"):
        t.add_column(name, justify="left" if name in ("format", "mode", "category") else "right")
    for r in rows:
        share = r["time_share"]
        mode = f"{r['mode']} n_max={r['n_max']}" if "n_max" in r else r["mode"]
        t.add_row(
            r["format"], mode, r["category"], str(r["tokens"]), f"{r['tok_per_s']:.1f}", f"{r['ratio']:.2f}",
            f"{r['limit']:.2f}" if r.get("limit") else "", f"{r['mean_accepted_length']:.2f}",
            f"{r['mean_accepted_length_outside_loops']:.2f}", " ".join(f"{x:.2f}" for x in r["accept_per_position"][:6]),
            f"{r['loop_share']:.0%}", " ".join(f"{v:.1%}" for v in share.values()) if share else "",
            "yes" if r["identical"] else f"no, gaps {r['first_divergence_gaps']}")
    return t
