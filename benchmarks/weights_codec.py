"""How small and how fast the delta codec is, on consecutive checkpoints of this project's own training.

    python benchmarks/weights_codec.py [--pairs DIR] [--repeats 3]

Pairs are made by weights_pairs.py when DIR holds none (minutes; it says how). On each pair our codec and three other
ways to write the same change run in turn, one thread each; the first turn is warm-up, medians count, and rates are
bytes of bf16 weights over CPU time of the process. Every result is decoded and compared bit for bit. Peers:

xor    old XOR new of the whole model, zstd level 1; or tensor by tensor where that is smaller
gap    gaps between changed elements (bytes or 16-bit words with an escape, whichever is smaller) and the byte planes
       of the XOR values, zstd level 1
index  int32 position and new value, uncompressed

What favours the peers: ours includes two to three hashes of each chunk, theirs none; theirs see the model as one array
in one piece, ours is cut into chunks that can be fetched and proven one by one. `limit` is the entropy bound of
headrace.sync.entropy (class of the old exponent known), per chunk. It is given the empirical frequencies for free, so
it is too low where most values occur once: steps from zero or from the bf16 grid.

The last line is one JSON object; `ratio` and what is compared with it are means over the pairs at lr 1e-6 of a run
under way, `..._resumed` of one that starts from bf16; rates and memory are over all pairs.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

import weights_pairs
from headrace.sync.codec import Chunk, apply_chunk, encode_tensors, stats, undo, warm_up
from headrace.sync.layout import read_layout
from weights_world import DEFAULT_PAIRS, LR

Bits = NDArray[Any]


@dataclass(frozen=True)
class Weights:
    """One checkpoint: the tensors, and all of them as one array."""

    tensors: dict[str, tuple[Bits, str]]
    """Flat bits and dtype."""
    fused: Bits


def read(path: Path) -> Weights:
    """All of it in memory, not mapped."""
    data = np.fromfile(path, np.uint8)
    layout = read_layout(data, str(path))
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    fused = data[start:].view(np.uint16)
    return Weights({name: (bits, spec.dtype) for name, (spec, bits) in sorted(layout.items())}, fused)


# --- peers


def compressed(data: Bits) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(np.ascontiguousarray(data).view(np.uint8).data)


def planes(bits: Bits) -> bytes:
    return b"".join(compressed(bits.view(np.uint8)[i :: bits.dtype.itemsize]) for i in range(bits.dtype.itemsize))


def xor_zstd(old: Bits, new: Bits) -> bytes:
    return compressed(old ^ new)


def unxor_zstd(packed: bytes, target: Bits) -> None:
    raw = zstandard.ZstdDecompressor().decompress(packed, max_output_size=target.nbytes)
    np.bitwise_xor(target, np.frombuffer(raw, target.dtype), out=target)


def gap_zstd(old: Bits, new: Bits) -> bytes:
    at = np.flatnonzero(old != new)
    gaps = np.diff(at, prepend=-1) - 1
    return min(escaped(gaps, np.uint8), escaped(gaps, np.uint16), key=len) + planes(old[at] ^ new[at])


def escaped(gaps: NDArray[np.int64], kind: type[Any]) -> bytes:
    """Each gap as words of the largest number, one for each whole multiple of it, and the rest."""
    most = int(np.iinfo(kind).max)
    ends = np.cumsum(gaps // most + 1)
    words = np.full(int(ends[-1]) if ends.size else 0, most, kind)
    words[ends - 1] = gaps % most
    return planes(words)


def index_value(old: Bits, new: Bits) -> bytes:
    at = np.flatnonzero(old != new)
    return at.astype(np.int32).tobytes() + new[at].tobytes()


# --- ours


def encoded(old: Weights, new: Weights) -> list[Chunk]:
    pairs = ((name, old.tensors[name][0], bits, dtype) for name, (bits, dtype) in new.tensors.items())
    return encode_tensors(pairs, threads=1)


def body_bytes(chunks: Sequence[Chunk]) -> int:
    return sum(len(chunk.body) for chunk in chunks)


def limit_bytes(old: Weights, new: Weights, chunks: Sequence[Chunk]) -> float:
    def part(weights: Weights, chunk: Chunk) -> Bits:
        return weights.tensors[chunk.tensor][0][chunk.start : chunk.start + chunk.elems]

    return sum(stats(part(old, c), part(new, c), c.dtype, tensor=c.tensor).l2_bytes for c in chunks if c.changed)


class PeakMemory:
    """Most resident bytes above those at the start, looked at every millisecond from another thread."""

    def __enter__(self) -> PeakMemory:
        self._before = self.peak = resident_bytes()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def extra_bytes(self) -> int:
        return self.peak - self._before

    def _watch(self) -> None:
        while not self._ended.wait(0.001):
            self.peak = max(self.peak, resident_bytes())


def resident_bytes() -> int:
    fields = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return int(fields[1]) * 4096


# --- measuring


def measure(old: Weights, new: Weights, repeats: int) -> dict[str, float]:
    """Sizes of one pair, and medians of GB/s per core."""
    full = new.fused.nbytes
    target = Weights({name: (bits.copy(), dtype) for name, (bits, dtype) in old.tensors.items()}, old.fused)
    fused_target = old.fused.copy()
    out: dict[str, Any] = {}
    times: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], Any]) -> None:
        begun_s = time.process_time()
        out[name] = work()
        times.setdefault(name, []).append(time.process_time() - begun_s)

    def apply() -> list[tuple[Bits, Any]]:
        parts = [(c, target.tensors[c.tensor][0][c.start : c.start + c.elems]) for c in out["encode"]]
        return [(part, apply_chunk(chunk, part)) for chunk, part in parts]

    for _ in range(1 + repeats):
        timed("encode", lambda: encoded(old, new))
        timed("apply", apply)
        same = all(np.array_equal(bits, new.tensors[name][0]) for name, (bits, _) in target.tensors.items())
        for part, record in out["apply"]:
            undo(part, record)
        timed("xor", lambda: xor_zstd(old.fused, new.fused))
        timed("unxor", lambda: unxor_zstd(out["xor"], fused_target))
        same &= np.array_equal(fused_target, new.fused)
        np.copyto(fused_target, old.fused)
        timed("gap", lambda: gap_zstd(old.fused, new.fused))
        timed("index", lambda: index_value(old.fused, new.fused))
        if not same:
            raise SystemExit("what was decoded is not what was encoded")
    chunks = out["encode"]
    by_tensor = sum(len(xor_zstd(old.tensors[name][0], bits)) for name, (bits, _) in new.tensors.items())
    with PeakMemory() as memory:
        encoded(old, new)
    rates = {f"{name}_gb_s": full / statistics.median(taken[1:]) / 1e9 for name, taken in times.items()}
    return {
        "full_bytes": full,
        "density": sum(c.changed for c in chunks) / sum(c.elems for c in chunks),
        "ours": body_bytes(chunks),
        "xor": min(len(out["xor"]), by_tensor),
        "gap": len(out["gap"]),
        "index": len(out["index"]),
        "limit": limit_bytes(old, new, chunks),
        "peak_mem_ratio": memory.extra_bytes / full,
        **rates,
    }


HEADS = ("start", "lr", "step", "changed", "full/ours", "xor/ours", "gap/ours", "index/ours", "limit/ours")
RATES = ("encode", "apply", "xor", "unxor", "gap")


def line(cells: Sequence[str]) -> str:
    return "  ".join(f"{cell:>10}" for cell in cells) + "\n"


def cells_of(row: dict[str, Any]) -> list[str]:
    sizes = [row[key] / row["ours"] for key in ("full_bytes", "xor", "gap", "index", "limit")]
    cells = [row["start"], f"{row['lr']:g}", str(row["step"]), f"{100 * row['density']:.2f} %"]
    cells += [f"{size:.3f}" if size < 1 else f"{size:.2f}" for size in sizes]
    return cells + [f"{row[rate + '_gb_s']:.2f}" for rate in RATES]


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The promised keys: sizes over the pairs at LR, rates and memory over all pairs."""

    def mean(start: str, number: Callable[[dict[str, Any]], float]) -> float | None:
        found = [number(row) for row in rows if row["start"] == start and row["lr"] == LR]
        return round(statistics.mean(found), 4) if found else None

    names = {
        "ratio": "full_bytes",
        "gain_vs_xor_zstd": "xor",
        "gain_vs_gap_zstd": "gap",
        "gain_vs_index_value": "index",
        "ratio_to_limit": "limit",
    }
    result: dict[str, Any] = {}
    for start, suffix in (("running", ""), ("resumed", "_resumed")):
        for name, key in names.items():
            result[name + suffix] = mean(start, lambda row, key=key: row[key] / row["ours"])  # type: ignore[misc]
        result[f"changed{suffix}"] = mean(start, lambda row: row["density"])
    result["ratio_to_limit_worst"] = round(min(row["limit"] / row["ours"] for row in rows), 3)
    for name in ("encode", "apply", "xor", "unxor"):
        result[f"{name}_gb_s_core"] = round(statistics.median(row[f"{name}_gb_s"] for row in rows), 3)
    result["peak_mem_ratio"] = round(max(row["peak_mem_ratio"] for row in rows), 3)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=Path, default=DEFAULT_PAIRS, metavar="DIR")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    weights_pairs.make(args.pairs)
    index = json.loads((args.pairs / weights_pairs.INDEX).read_text())
    warm_up("BF16")
    rows: list[dict[str, Any]] = []
    sys.stdout.write(line((*HEADS, *(f"{rate} GB/s" for rate in RATES))))
    for pair in index["pairs"]:
        old, new = read(args.pairs / pair["old"]), read(args.pairs / pair["new"])
        rows.append({**pair, **measure(old, new, args.repeats)})
        sys.stdout.write(line(cells_of(rows[-1])))
        sys.stdout.flush()
    about = {
        "model": index["model"],
        "pairs": len(rows),
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
    }
    sys.stdout.write(json.dumps({**summary(rows), **about}) + "\n")


if __name__ == "__main__":
    main()
