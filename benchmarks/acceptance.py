"""Acceptance files for --simulate-acceptance: record one from a real model, or fit one to published figures.

    python -m benchmarks.acceptance record --target smollm2-135m --draft auto --out x.json
    python -m benchmarks.acceptance fit --chain 6.57 --tree 16:7.42 --tree 256:9.54 --block 16 --out y.json
    python -m benchmarks.acceptance show benchmarks/acceptance/*.json

Recording runs benchmarks.reference (transformers, the published algorithms, no code of the services) over
greedy texts. At each round that a tree of --walk nodes would begin, the drafter's marginals and the ranks
that the text's tokens have in them are noted, to the full depth: one pass gives all marginals, whatever is
accepted of them. Rounds are put into classes by where the drafter itself expects its chain to break
(k-means). Counts of few are smoothed towards those of all classes and, at high ranks, over neighbours.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import common
from specbridge.acceptance import Acceptance, RoundClass, read
from specbridge.acceptance_model import Curves
from specbridge.errors import ConfigError

TREES = (4, 8, 16, 32, 64, 128, 256)
PRIOR_ROUNDS = 8.0
"""Weight of what all classes say against the counts of one, in rounds."""


@dataclass(frozen=True, slots=True)
class RecordedRound:
    """ranks: of the text's tokens at depths 1.. as far as the text goes, `limit` for what is no candidate.
    draft: [depths][ranks], the drafter's probabilities. accepted: what a chain (0) and trees would commit.
    """

    ranks: tuple[int, ...]
    draft: tuple[tuple[float, ...], ...]
    accepted: dict[int, int]


def record(args: argparse.Namespace) -> Acceptance:
    """Run the reference and count. Raises ConfigError if the model can't be had."""
    import torch

    from benchmarks.reference import Reference
    from specbridge.models import resolve_draft, resolve_target

    target = resolve_target(args.target)
    draft = resolve_draft(args.draft, args.target)
    reference = Reference(target, draft, torch.float32)
    rounds: list[RecordedRound] = []
    for number, prompt in enumerate(common.load_prompts(args.sets, args.prompts)):
        chat = [{"role": "user", "content": prompt}]
        encoded = reference.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)
        ids = list(encoded["input_ids"])
        rounds += _rounds_of(reference, ids, reference.greedy(ids, args.max_tokens), args)
        print(f"{number + 1} prompts, {len(rounds)} rounds", file=sys.stderr, flush=True)
    made = tabulate(rounds, classes=args.classes, name=args.name or f"{Path(args.target).name} recorded")
    whole = [r for r in rounds if len(r.ranks) == made.depths]
    measured = {
        "chain" if not n else f"tree of {n}": round(sum(r.accepted[n] for r in whole) / len(whole), 3)
        for n in (0, *TREES)
    }
    notes = {"what": "recorded by benchmarks.acceptance from greedy texts", "target": args.target,
             "draft": args.draft, "rounds": len(rounds), "prompts": args.prompts, "sets": list(args.sets),
             "max_tokens": args.max_tokens, "walk": args.walk, "replayed": measured,
             "file": promises(made), **common.provenance()}  # fmt: skip
    return replace(made, provenance=notes)


def _rounds_of(
    reference: Any, prompt: list[int], output: list[int], args: argparse.Namespace
) -> list[RecordedRound]:
    import torch

    from benchmarks.reference import heap_tree

    found = []
    with torch.inference_mode():
        tokens = prompt + output
        drafter = reference.drafter
        states = reference.model(torch.tensor([tokens]), output_hidden_states=True)
        hidden = torch.cat([states.hidden_states[i + 1][0] for i in drafter.taps], -1)
        context = drafter.project(hidden)
        embed = reference.model.get_input_embeddings()
        start = len(prompt)
        while start < len(tokens) - 1:
            block = embed(torch.tensor([tokens[start], *[drafter.mask_id] * (drafter.block_size - 1)]))
            hidden_rows = drafter.marginals(context[:start], block)
            log_probs = reference.model.lm_head(hidden_rows).float().log_softmax(-1)
            text = tokens[start + 1 : start + 1 + len(log_probs)]
            own = log_probs[torch.arange(len(text)), torch.tensor(text)]
            ranks = (log_probs[: len(text)] > own.unsqueeze(1)).sum(-1).clamp(max=args.ranks)
            accepted = {0: _common([int(t) for t in log_probs.argmax(-1)], text) + 1}
            for nodes in TREES:
                accepted[nodes] = _walked(heap_tree(log_probs, nodes), text) + 1
            probs = log_probs.topk(args.ranks, dim=-1).values.exp()
            found.append(RecordedRound(tuple(ranks.tolist()), tuple(map(tuple, probs.tolist())), accepted))
            step = _walked(heap_tree(log_probs, args.walk), text) + 1 if args.walk else accepted[0]
            start += step
    return found


def _common(draft: Sequence[int], text: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(draft, text, strict=False)) if a != b), len(text))


def _walked(nodes: Sequence[tuple[int, int, int]], text: Sequence[int]) -> int:
    """Depth to which `text` goes along a tree of (parent, depth, token)."""
    children = {(parent, token): i for i, (parent, _, token) in enumerate(nodes)}
    node, depth = -1, 0
    while depth < len(text) and (found := children.get((node, text[depth]))) is not None:
        node, depth = found, depth + 1
    return depth


def tabulate(rounds: Sequence[RecordedRound], *, classes: int, name: str) -> Acceptance:
    """Rounds to tables. Raises ConfigError for too few of them."""
    if len(rounds) < 10 * classes:
        raise ConfigError(
            f"{len(rounds)} rounds are too few for {classes} classes; take more --prompts or fewer --classes"
        )
    depths, limit = len(rounds[0].draft), len(rounds[0].draft[0])
    groups = cluster(rounds, classes)
    pooled = _histograms(rounds, depths, limit)
    prior = {on: [_smooth(row) for row in pooled[on]] for on in pooled}
    made = []
    for group in groups:
        own = _histograms(group, depths, limit)
        tables = {}
        for on, rows in own.items():
            tables[on] = tuple(_blend(row, prior[on][depth]) for depth, row in enumerate(rows))
        draft = tuple(
            tuple(sum(r.draft[d][k] for r in group) / len(group) for k in range(limit)) for d in range(depths)
        )
        made.append(RoundClass(len(group) / len(rounds), tables[True], tables[False], draft))
    return Acceptance(name, depths, limit, tuple(made))


def cluster(rounds: Sequence[RecordedRound], classes: int, *, passes: int = 25) -> list[list[RecordedRound]]:
    """At most `classes` groups of rounds in which the drafter is sure of alike things; the least sure first.

    k-means, begun at the quantiles of the expected chain length: the same rounds give the same groups.
    """
    points = [_survival(one) for one in rounds]
    order = sorted(range(len(rounds)), key=lambda i: sum(points[i]))
    middle = [order[(2 * k + 1) * len(order) // (2 * classes)] for k in range(classes)]
    centres = [points[i] for i in middle]
    members: list[list[int]] = []
    for _ in range(passes):
        members = [[] for _ in centres]
        for i, point in enumerate(points):
            members[min(range(len(centres)), key=lambda k: math.dist(point, centres[k]))].append(i)
        members = [own for own in members if own]
        centres = [
            tuple(sum(points[i][d] for i in own) / len(own) for d in range(len(points[0]))) for own in members
        ]
    return [[rounds[i] for i in own] for own in members]


def _survival(one: RecordedRound) -> tuple[float, ...]:
    """Probability that the drafter gives its chain to reach each depth."""
    reached, product = [], 1.0
    for row in one.draft:
        product *= row[0]
        reached.append(product)
    return tuple(reached)


def _histograms(rounds: Sequence[RecordedRound], depths: int, limit: int) -> dict[bool, list[list[float]]]:
    """Counts [depths][limit + 1] of ranks: on the greedy path (True), after a miss (False)."""
    counts = {on: [[0.0] * (limit + 1) for _ in range(depths)] for on in (True, False)}
    for one in rounds:
        on_path = True
        for depth, rank in enumerate(one.ranks):
            counts[on_path][depth][rank] += 1
            on_path = on_path and rank == 0
            if rank == limit:
                break
    return counts


def _smooth(row: Sequence[float]) -> list[float]:
    """Counts of all rounds at a depth as probabilities; ranks from 2 on share with neighbours, twice as many
    each time.
    """
    total = sum(row)
    if not total:
        return [1.0 / len(row)] * len(row)
    smooth, start, size = list(row), 2, 2
    while start < len(row) - 1:
        stop = min(start + size, len(row) - 1)
        smooth[start:stop] = [sum(row[start:stop]) / (stop - start)] * (stop - start)
        start, size = stop, size * 2
    return [count / total for count in smooth]


def _blend(counts: Sequence[float], prior: Sequence[float]) -> tuple[float, ...]:
    total = sum(counts) + PRIOR_ROUNDS
    # The last entry is what lies beyond the candidates: implied by the rest.
    return tuple((c + PRIOR_ROUNDS * p) / total for c, p in zip(counts, prior, strict=True))[:-1]


# ---- fitting --------------------------------------------------------------------------------


def fit(args: argparse.Namespace) -> Acceptance:
    """The member of the family nearest to the given figures. Raises ConfigError for impossible ones."""
    depths = args.block - 1
    trees = dict(args.tree)
    for nodes, length in trees.items():
        if not args.chain * 0.5 < length < args.block + 1e-9:
            raise ConfigError(f"--tree {nodes}:{length} is not possible with a block of {args.block}")

    def curves(point: Sequence[float]) -> Curves:
        spread, jitter, penalty, second, beyond = point
        shape = Curves(
            spread=math.exp(spread),
            jitter=math.exp(jitter),
            penalty=math.exp(penalty),
            second=1 / (1 + math.exp(-second)),
            beyond=1 / (1 + math.exp(-beyond)),
        )
        return shape.with_chain(args.chain, depths=depths, classes=args.classes)

    def build(point: Sequence[float], name: str = "fit") -> Acceptance:
        return curves(point).acceptance(name, depths=depths, ranks=args.ranks, classes=args.classes)

    begin = [0.7, 1.1, -0.7, 0.8, -1.5]

    def loss(point: Sequence[float]) -> float:
        made = build(point)
        miss = sum((made.tree_length(n) / length - 1.0) ** 2 for n, length in trees.items())
        # Two or three figures leave freedom: stay near the middle of the family.
        return miss + 1e-5 * sum((p - b) ** 2 for p, b in zip(point, begin, strict=True))

    best = minimise(loss, begin, steps=args.steps) if trees else begin
    chosen = curves(best)
    made = build(best, args.name or f"chain {args.chain:g}")
    notes = {"what": "fitted by benchmarks.acceptance to published mean acceptance lengths; no recording",
             "source": args.source,
             "asked": {"chain": args.chain, **{f"tree of {n}": v for n, v in trees.items()}},
             "file": promises(made), "curves": {n: round(getattr(chosen, n), 4) for n in Curves.__slots__},
             "argv": common.provenance()["argv"]}  # fmt: skip
    return replace(made, provenance=notes)


def minimise(
    loss: Callable[[Sequence[float]], float], begin: Sequence[float], *, steps: int, width: float = 0.6
) -> list[float]:
    """Nelder-Mead: the best point found in `steps` evaluations or so."""
    corners = [list(begin)] + [[v + width * (i == j) for j, v in enumerate(begin)] for i in range(len(begin))]
    scored = sorted((loss(c), c) for c in corners)
    for _ in range(steps):
        worst, rest = scored[-1], scored[:-1]
        centre = [sum(c[j] for _, c in rest) / len(rest) for j in range(len(begin))]

        def moved(by: float, centre: list[float] = centre, worst: list[float] = worst[1]) -> list[float]:
            return [m + by * (m - w) for m, w in zip(centre, worst, strict=True)]

        reflected = (loss(point := moved(1.0)), point)
        if reflected[0] < scored[0][0]:
            further = (loss(point := moved(2.0)), point)
            scored[-1] = min(reflected, further)
        elif reflected[0] < rest[-1][0]:
            scored[-1] = reflected
        else:
            nearer = (loss(point := moved(-0.5)), point)
            if nearer[0] < worst[0]:
                scored[-1] = nearer
            else:
                best = scored[0][1]
                shrunk = [[(b + v) / 2 for b, v in zip(best, c, strict=True)] for _, c in scored[1:]]
                scored[1:] = [(loss(c), c) for c in shrunk]
        scored.sort()
    return scored[0][1]


def promises(made: Acceptance) -> dict[str, float]:
    """Mean acceptance lengths that a file stands for."""
    return {"chain": round(made.chain_length(), 3)} | {
        f"tree of {n}": round(made.tree_length(n), 3) for n in TREES
    }


def write(made: Acceptance, out: Path) -> None:
    """Write a file, and read it back: what is shipped must parse."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(made.to_json(), encoding="utf-8")
    read(out)


def _tree(text: str) -> tuple[int, float]:
    nodes, _, length = text.partition(":")
    try:
        return int(nodes), float(length)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not NODES:LENGTH, as in 64:8.9") from None


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    actions = parser.add_subparsers(dest="action", required=True)
    recorder = actions.add_parser("record", help="from a real target and drafter, through transformers")
    recorder.add_argument("--target", default="smollm2-135m")
    recorder.add_argument("--draft", default="auto")
    recorder.add_argument(
        "--sets", nargs="+", default=list(common.SETS), help="prompt sets or JSON-lines files"
    )
    recorder.add_argument("--prompts", type=int, default=24)
    recorder.add_argument("--max-tokens", type=int, default=128)
    recorder.add_argument("--walk", type=int, default=16, help="nodes of the tree that advances; 0: a chain")
    fitter = actions.add_parser("fit", help="to a published chain length and tree lengths")
    fitter.add_argument("--chain", type=float, required=True, help="mean acceptance length, bonus included")
    fitter.add_argument("--tree", type=_tree, action="append", default=[], metavar="NODES:LENGTH")
    fitter.add_argument("--block", type=int, default=16, help="block size of the drafter, anchor included")
    fitter.add_argument("--source", default="", help="where the figures were published, for the file")
    fitter.add_argument("--steps", type=int, default=120)
    for one in (recorder, fitter):
        one.add_argument("--ranks", type=int, default=32, help="candidates per position")
        one.add_argument("--classes", type=int, default=8, help="classes of rounds")
        one.add_argument("--name", default="")
        one.add_argument("--out", type=Path, required=True)
    shower = actions.add_parser("show", help="what files promise")
    shower.add_argument("files", type=Path, nargs="+")
    args = parser.parse_args()
    if args.action == "show":
        made = [read(path) for path in args.files]
    else:
        made = [record(args) if args.action == "record" else fit(args)]
        write(made[0], args.out)
    rows = [[one.name, *promises(one).values()] for one in made]
    print(common.table(["file", "chain", *(f"tree {n}" for n in TREES)], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
