"""Weight delivery from end to end: pauses, seconds and bytes over links of 1 and 10 Gbit/s, and after faults.

    python benchmarks/weights_e2e.py [--parts links engine faults] [--pairs DIR | --elems N] [--replicas 1 4 16]
                                     [--gbit-s 1 10] [--repeats 3] [--model DIR]

links    toy replicas (arrays in memory, one thread each) that pull from one store over one link, which limits the sum
         of their reads: a delta per version, against the whole weights. Both ways check hashes, hold the new weights
         in memory before they pause, and copy them in place in the pause. Seconds run from the start of publishing
         (encoding and writing to a local folder included) until the last replica serves
engine   the pause of the native engine: a delta against a full snapshot in the page cache, in turns
faults   seconds until a replica serves the right version again, for each class of fault (weights_faults.py)

The link is a queue in this process without latency; all replicas share this machine's cores, which real ones do not.
Weights: the last pair of weights_pairs.py at lr 1e-6, or synthetic ones. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

import weights_faults
from headrace.config.schema import EngineConfig
from headrace.hub.fetch import ensure_model
from headrace.rollout.native.core import build
from headrace.sync.codec import warm_up
from headrace.sync.manifest import StoreManifest
from headrace.sync.publish import write_version
from headrace.sync.publisher import DeltaPublisher
from headrace.sync.report import SyncReport
from headrace.sync.store import Store, object_key
from headrace.telemetry.silent import SilentView
from weights_world import DEFAULT_PAIRS, RUN, Arrays, Link, Series, Shaped, World, nudged, series

_MODEL = "smollm2-135m-instruct"
now = time.perf_counter


# --- links


def delta_rounds(versions: Series, replicas: int, gbit_s: Sequence[float], repeats: int) -> dict[float, dict[str, Any]]:
    """Per link: medians over versions of total seconds, bytes per replica, median and longest pause."""
    arrays = versions.arrays
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(replicas) as pool:
        world = World(Path(folder), arrays[0])
        joined = list(pool.map(lambda _: world.joined(arrays[0], threads=1), range(replicas)))
        found, version = {}, 0
        for world.link.gbit_s in gbit_s:
            rounds = []
            for _ in range(repeats * len(arrays)):
                version += 1
                index = version % len(arrays)
                world.link.bytes, begun_s = 0, now()
                world.publisher.publish(arrays[index], version=version)
                published_s = now()
                reports = [r for r in pool.map(lambda one: one[1].sync(), joined) if r is not None]
                if len(reports) != replicas:
                    raise SystemExit(f"{replicas - len(reports)} of {replicas} replicas had nothing to do")
                if index in versions.single:
                    rounds.append((now() - begun_s, published_s - begun_s, world.link.bytes, reports))
            if not all(replica.holds(arrays[index]) for replica, _ in joined):
                raise SystemExit("a replica holds something else than what was published")
            found[world.link.gbit_s] = _delta_numbers(rounds, replicas)
        return found


def _delta_numbers(rounds: Sequence[tuple[float, float, int, list[SyncReport]]], replicas: int) -> dict[str, Any]:
    pauses = [[report.pause_s for report in reports] for *_, reports in rounds]
    return {
        "total_s": statistics.median(total_s for total_s, *_ in rounds),
        "publish_s": statistics.median(publish_s for _, publish_s, *_ in rounds),
        "bytes": statistics.median(size for _, _, size, _ in rounds) / replicas,
        "pause_s": statistics.median(pause_s for each in pauses for pause_s in each),
        "pause_max_s": statistics.median(max(each) for each in pauses),
    }


def full_round(versions: Series, replicas: int, gbit_s: float) -> dict[str, Any]:
    """The same for the whole weights as one object, read in blocks into memory, proven by its name, copied in."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(replicas) as pool:
        link = Link(gbit_s)
        backend = Shaped(Path(folder), link)
        old, new = versions.arrays[:2]
        serving = [{name: array.copy() for name, array in old.items()} for _ in range(replicas)]
        room = [np.full(versions.full_bytes, 1, np.uint8) for _ in range(replicas)]
        begun_s = now()
        data = b"".join(array.reshape(-1).view(np.uint8).tobytes() for array in new.values())
        key = object_key(data, "pack")
        backend.write(key, data)
        del data
        published_s = now()

        def pull(arrays: Arrays, buffer: Any) -> float:
            at = 0
            for block in backend.read(key, 0, None):
                buffer[at : at + len(block)] = np.frombuffer(block, np.uint8)
                at += len(block)
            if object_key(buffer.data, "pack") != key:
                raise SystemExit("the weights were damaged on the way")
            paused_s, at = now(), 0
            for array in arrays.values():
                flat = array.reshape(-1).view(np.uint8)
                flat[:] = buffer[at : at + flat.size]
                at += flat.size
            return now() - paused_s

        pauses = list(pool.map(pull, serving, room))
        return {
            "total_s": now() - begun_s,
            "publish_s": published_s - begun_s,
            "bytes": link.bytes / replicas,
            "pause_s": statistics.median(pauses),
            "pause_max_s": max(pauses),
        }


def links(args: argparse.Namespace, versions: Series) -> dict[str, Any]:
    rows = []
    for replicas in args.replicas:
        deltas = delta_rounds(versions, replicas, args.gbit_s, args.repeats)
        for gbit_s in args.gbit_s:
            gc.collect()
            full = full_round(versions, replicas, gbit_s)
            ratios = {f"{key}_ratio": full[key] / deltas[gbit_s][key] for key in ("total_s", "bytes", "pause_s")}
            rows.append({"replicas": replicas, "gbit_s": gbit_s, "delta": deltas[gbit_s], "full": full, **ratios})
    line = "{:>8} {:>7}  {:>18} {:>18} {:>18} {:>18} {:>18}\n"
    heads = ("total s", "publish s", "MB a replica", "pause ms", "longest pause ms")
    sys.stdout.write(line.format("replicas", "Gbit/s", *heads) + "delta, full, full over delta\n")
    for row in rows:
        cells = []
        for key, unit in (("total_s", 1), ("publish_s", 1), ("bytes", 1e-6), ("pause_s", 1e3), ("pause_max_s", 1e3)):
            delta, full_ = row["delta"][key] * unit, row["full"][key] * unit
            cells.append(f"{delta:.2f} {full_:.2f} {full_ / delta:.1f}x")
        sys.stdout.write(line.format(row["replicas"], row["gbit_s"], *cells))
    return {"links": [_rounded(row) for row in rows]}


# --- engine


def engine(args: argparse.Namespace, versions: Series) -> dict[str, Any]:
    """Pauses of two engines that get the same versions in turns."""
    model_dir = args.model or str(ensure_model(_MODEL, SilentView().progress))
    config = EngineConfig(max_batch=8, max_context_tok=128).model_dump()
    cores = {
        name: build(model_dir=model_dir, engine=config, dtype="bfloat16", device="cpu", run_id=RUN)
        for name in ("delta", "full")
    }
    arrays, single = served(versions, cores["delta"])
    pauses: dict[str, list[float]] = {name: [] for name in cores}
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        publisher = DeltaPublisher(Store(str(store), durable=False), run_id=RUN, with_limit=False)
        for version in range(1, 2 + args.repeats * len(arrays)):
            now_served = arrays[version % len(arrays)]
            publish = publisher.start if version == 1 else publisher.publish
            report = publish(now_served, version=version)
            manifests: dict[str, Any] = {
                "delta": StoreManifest(
                    run_id=RUN, version=version, digest=report.digest, store=str(store), report=report
                ),
                "full": write_version(
                    Path(folder) / "full", run_id=RUN, version=version, arrays=now_served.items(), durable=False
                ),
            }
            for name, core in cores.items():
                core.stage(manifests[name])
                pause_s = core.swap(version, "keep").pause_s
                if version > 1 and version % len(arrays) in single:
                    pauses[name].append(pause_s)
    delta_s, full_s = (statistics.median(pauses[name]) for name in ("delta", "full"))
    sys.stdout.write(f"native engine: pause {1e3 * delta_s:.1f} ms by delta, {1e3 * full_s:.1f} ms by snapshot\n")
    return {
        "engine_delta_pause_s": round(delta_s, 5),
        "engine_full_pause_s": round(full_s, 5),
        "pause_share_of_reload": round(delta_s / full_s, 4),
    }


def served(versions: Series, core: Any) -> tuple[Sequence[Arrays], frozenset[int]]:
    """Versions of the engine's own model: those given where they fit it, else its weights and two nudges."""
    shapes = {info.name: tuple(info.shape) for info in core._backend.infos}
    if {name: array.shape for name, array in versions.arrays[0].items()} == shapes:
        return versions.arrays, versions.single
    own = {name: array.copy() for name, array in core._backend.held().arrays().items()}
    return (own, nudged(own, 1), nudged(own, 2)), frozenset({0, 1, 2})


# --- faults


def faults(args: argparse.Namespace, versions: Series) -> dict[str, Any]:
    rows = [weights_faults.recovery(name, versions.arrays[0], args.gbit_s[0]) for name in weights_faults.FAULTS]
    sys.stdout.write(f"recovery over a link of {args.gbit_s[0]:g} Gbit/s\n{weights_faults.table(rows)}\n")
    return {"recovery": [_rounded(asdict(row)) for row in rows]}


def _rounded(row: Any) -> Any:
    if isinstance(row, dict):
        return {key: _rounded(value) for key, value in row.items()}
    return round(row, 5) if isinstance(row, float) else row


PARTS: dict[str, Callable[[argparse.Namespace, Series], dict[str, Any]]] = {
    "links": links,
    "engine": engine,
    "faults": faults,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=sorted(PARTS), default=list(PARTS))
    default = DEFAULT_PAIRS if (DEFAULT_PAIRS / "index.json").exists() else None
    parser.add_argument("--pairs", type=Path, default=default, metavar="DIR")
    parser.add_argument("--elems", type=int, help="synthetic weights of that many elements")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--gbit-s", type=float, nargs="+", default=[1.0, 10.0])
    parser.add_argument(
        "--repeats", type=int, default=1, help="rounds through the versions, of which three are measured"
    )
    parser.add_argument("--model", help="folder of the model that the native engine serves")
    args = parser.parse_args()
    versions = series(None if args.elems else args.pairs, args.elems or 134_000_000)
    warm_up("BF16")
    result: dict[str, Any] = {
        "pause_share_of_reload": None,
        "weights": versions.what,
        "full_bytes": versions.full_bytes,
    }
    for part in args.parts:
        result |= PARTS[part](args, versions)
    result |= {"repeats": args.repeats, "python": platform.python_version(), "machine": platform.machine()}
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
