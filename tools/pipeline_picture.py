#!/usr/bin/env python3
"""Draws a step of a pipeline from the traces of its workers, and says what part of it is idle.

  tools/pipeline_picture.py [--title TEXT] [--step N] [--output FILE] TRACE...

The traces are those of `--trace`; the step is the N-th that they have, from 0, by default the
last one with a backward that they have as a whole. Writes an SVG, and prints how long the step took and the bubble: the part of the
ranks' time in which they did not compute. Prints as well by how much steps are longer, in the
median, than if each action had taken the time that it took, in its rank's order, and handing over
between the ranks had taken none: what the pipeline itself costs, on top of computing and bubble.
Steps without a backward, and those of which the traces have a part, are left out of the median.
"""
import argparse
import collections
import html
import json
import statistics
import sys

COLOURS = {
    "forward": "#8fbce6",
    "backward": "#7fc58a",
    "backward of inputs": "#a9d8a5",
    "backward of weights": "#e7c26f",
    "step": "#c9a3d6",
}
WIDTH, LEFT, ROW, GAP, TOP = 960, 70, 30, 6, 54


def read(paths):
    """Returns the actions that compute, by step, in the order of the steps."""
    steps = {}
    for path in paths:
        with open(path, encoding="ascii") as file:
            for event in json.load(file)["traceEvents"]:
                if event["ph"] != "X" or event.get("cat") != "pipeline":
                    continue
                args = event["args"]
                if args["action"] not in COLOURS:
                    continue
                begin = event["ts"]
                steps.setdefault(args["step"], []).append(
                    (int(args["rank"]), begin, begin + event["dur"], args))
    return sorted(steps.values(), key=lambda actions: min(a[1] for a in actions))


def shortest(actions):
    """Returns how long the actions of a step need at least, each with the time that it took.

    None if some of them wait for what the traces do not have.
    """
    stages = max(int(a[3]["stage"]) for a in actions)
    waiting = {}
    for rank, first, last, args in sorted(actions, key=lambda a: (a[0], a[1])):
        waiting.setdefault(rank, []).append((args, last - first))
    free = dict.fromkeys(waiting, 0)
    done = {}

    def needed(args):
        stage, micro_batch = int(args["stage"]), args["micro_batch"]
        if args["action"] == "forward" and stage > 0:
            return ("forward", stage - 1, micro_batch)
        if args["action"] in ("backward", "backward of inputs") and stage < stages:
            return ("backward", stage + 1, micro_batch)
        return None

    while waiting:
        ready = [r for r in waiting if needed(waiting[r][0][0]) in done or
                 needed(waiting[r][0][0]) is None]
        if not ready:
            return None
        for rank in ready:
            args, took = waiting[rank].pop(0)
            free[rank] = max(free[rank], done.get(needed(args), 0)) + took
            if args["action"] in ("forward", "backward", "backward of inputs"):
                kind = args["action"].split()[0]
                done[(kind, int(args["stage"]), args["micro_batch"])] = free[rank]
            if not waiting[rank]:
                del waiting[rank]
    return max(free.values())


def has_backward(actions):
    return any(a[3]["action"].startswith("backward") for a in actions)


def whole_trainings(steps):
    """Returns the places of the steps with a backward that the traces have as a whole.

    Whole is what waits for nothing that is not there, and is no part of another step: a run keeps
    its schedule, so that a step that lacks actions is a part of those that do not.
    """
    def count(actions):
        return collections.Counter((a[0], a[3]["stage"], a[3]["action"]) for a in actions)

    places = [i for i, actions in enumerate(steps) if has_backward(actions)]
    counts = {i: count(steps[i]) for i in places}
    return [i for i in places if shortest(steps[i]) is not None and
            not any(counts[i] < other for other in counts.values())]


def length(actions):
    return max(a[2] for a in actions) - min(a[1] for a in actions)


def draw(actions, title):
    begin, end = min(a[1] for a in actions), max(a[2] for a in actions)
    ranks = 1 + max(a[0] for a in actions)
    busy = sum(a[2] - a[1] for a in actions)
    bubble = 1 - busy / (ranks * (end - begin))
    scale = (WIDTH - LEFT - 10) / (end - begin)
    height = TOP + ranks * (ROW + GAP) + 24
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="Helvetica,Arial,sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="20" font-size="15">{html.escape(title)}: '
        f"{(end - begin) / 1000:.0f} ms, {100 * bubble:.1f} % idle</text>",
    ]
    shown = [name for name in COLOURS if any(a[3]["action"] == name for a in actions)]
    x = LEFT
    for name in shown:
        out.append(f'<rect x="{x}" y="31" width="12" height="12" fill="{COLOURS[name]}"/>')
        out.append(f'<text x="{x + 17}" y="41">{name}</text>')
        x += 40 + 7 * len(name)
    stages = len({a[3]["stage"] for a in actions})
    for rank in range(ranks):
        y = TOP + rank * (ROW + GAP)
        out.append(f'<text x="8" y="{y + 19}">worker {rank}</text>')
        out.append(f'<rect x="{LEFT}" y="{y}" width="{WIDTH - LEFT - 10}" height="{ROW}" fill="#f0f0f0"/>')
    for rank, first, last, args in sorted(actions, key=lambda a: a[:2]):
        x, width = LEFT + (first - begin) * scale, (last - first) * scale
        y = TOP + rank * (ROW + GAP)
        # With several stages on a rank, the later ones are darker at the bottom.
        out.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW}" '
                   f'fill="{COLOURS[args["action"]]}" stroke="#ffffff" stroke-width="0.6"/>')
        if stages > ranks and int(args["stage"]) >= ranks:
            out.append(f'<rect x="{x:.1f}" y="{y + ROW - 6}" width="{width:.1f}" height="6" '
                       'fill="#000000" fill-opacity="0.25"/>')
        if args["action"] != "step" and width > 9:
            out.append(f'<text x="{x + width / 2:.1f}" y="{y + 19}" text-anchor="middle" '
                       f'font-size="11">{args["micro_batch"]}</text>')
    out += [f'<text x="{LEFT}" y="{height - 8}" fill="#555555">time, from left to right; '
            "the numbers are micro-batches"
            + ("; a dark edge marks the later stages of a worker" if stages > ranks else "")
            + "</text>", "</svg>", ""]
    return "\n".join(out), end - begin, bubble


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--title", default="a step")
    parser.add_argument("--step", type=int)
    parser.add_argument("--output", default="pipeline.svg")
    parser.add_argument("traces", nargs="+")
    options = parser.parse_args()
    steps = read(options.traces)
    if not steps:
        return "the traces have no actions of a pipeline"
    whole = whole_trainings(steps)
    if options.step is None:
        if not whole:
            return ("the traces have no whole step with a backward: each worker's is needed; "
                    "--step N draws another one")
        options.step = whole[-1]
    if not -len(steps) <= options.step < len(steps):
        return f"the traces have {len(steps)} steps: there is no step {options.step}"
    picture, took, bubble = draw(steps[options.step], options.title)
    with open(options.output, "w", encoding="ascii") as file:
        file.write(picture)
    print(f"{options.title}: {took / 1000:.1f} ms, bubble {100 * bubble:.1f} %")
    if whole:
        longer = statistics.median(length(steps[i]) / shortest(steps[i]) - 1 for i in whole)
        print(f"steps are {100 * longer:.1f} % longer than their actions allow")
    return None


if __name__ == "__main__":
    sys.exit(main())
