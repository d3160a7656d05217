"""How many events per second the flow controller alone handles, at the size of a cluster.

    python benchmarks/flow.py [--batch-groups 256] [--group-size 16] [--eta 4] [--steps 30] [--repeats 5]

Random groups end member by member, out of order, while the trainer takes batches. Events are made before the clock
starts and the journal is drained outside it: what is timed is `Controller.handle`, one MemberEnded per rollout for the
most part. Last line: one JSON object; `events_per_s` is the median of the repeats.
"""

import argparse
import json
import platform
import random
import statistics
import time

from headrace.config.schema import CurriculumConfig, FlowConfig
from headrace.flow.controller import Controller
from headrace.flow.events import (
    BatchWanted,
    Event,
    Landed,
    MemberEnded,
    RunStarted,
    StartGroup,
    StepEnded,
    SwapWeights,
    TakeBatch,
)
from headrace.records import Outcome


class Feed:
    """Times `handle` over ready-made events and keeps what has to be done next."""

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        self.events = 0
        self.busy_s = 0.0
        self.started: list[StartGroup] = []
        self.swap: int | None = None
        self.taken = False

    def __call__(self, events: list[Event]) -> None:
        handle = self.controller.handle
        decisions = []
        began_s = time.perf_counter()
        for event in events:
            decisions += handle(event)
        self.busy_s += time.perf_counter() - began_s
        self.events += len(events)
        for decision in decisions:
            if isinstance(decision, StartGroup):
                self.started.append(decision)
            elif isinstance(decision, SwapWeights):
                self.swap = decision.version
            elif isinstance(decision, TakeBatch):
                self.taken = True
        self.controller.ledger.drain_changes()


def run(flow: FlowConfig, *, steps: int, seed: int, curriculum: str) -> tuple[int, float]:
    """Events handled and seconds spent in the controller for so many steps."""
    rng = random.Random(seed)
    feed = Feed(Controller(flow, CurriculumConfig(kind=curriculum), prompts=10_000, seed=seed))
    running: list[StartGroup] = []
    feed([RunStarted(time_s=0.0, version=0)])
    now_s = 0.0
    while feed.controller.version < steps:
        now_s += 1.0
        running += feed.started
        feed.started = []
        rng.shuffle(running)
        ended, running = running[: flow.batch_groups], running[flow.batch_groups :]
        version = feed.controller.landed
        members = [(group, member) for group in ended for member in range(flow.group_size)]
        rng.shuffle(members)
        feed(
            [
                MemberEnded(
                    time_s=now_s,
                    group_id=group.group_id,
                    member=member,
                    attempt=0,
                    outcome=Outcome.OK,
                    reward=float(rng.random() < 0.5),
                    generated_tok=100,
                    oldest_version=group.version,
                    newest_version=version,
                    stale_tok_by_version=((group.version, 60), (version, 40)) if version > group.version else (),
                )
                for group, member in members
            ]
        )
        if not feed.taken:
            feed([BatchWanted(time_s=now_s)])
        if feed.taken:
            feed.taken = False
            feed([StepEnded(time_s=now_s, version=feed.controller.version + 1)])
        if feed.swap is not None:
            version, feed.swap = feed.swap, None
            feed([Landed(time_s=now_s, version=version)])
    return feed.events, feed.busy_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-groups", type=int, default=256)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--eta", type=int, default=4)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--curriculum", choices=["uniform", "band"], default="uniform")
    args = parser.parse_args()
    flow = FlowConfig(
        mode="pipeline", batch_groups=args.batch_groups, group_size=args.group_size, max_lag_steps=args.eta
    )
    rates = []
    for repeat in range(args.repeats):
        events, busy_s = run(flow, steps=args.steps, seed=repeat, curriculum=args.curriculum)
        rates.append(events / busy_s)
        print(f"repeat {repeat}: {events} events in {busy_s:.3f} s = {rates[-1]:,.0f} events/s")  # noqa: T201
    result = {
        "events_per_s": round(statistics.median(rates)),
        "target": 100_000,
        **vars(args),
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    print(json.dumps(result))  # noqa: T201


if __name__ == "__main__":
    main()
