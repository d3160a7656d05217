"""What a delta changes, in numbers for people: per layer, per codec mode, by size of step."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from headrace.sync.delta_file import Delta, Times
from headrace.sync.version import elements

_LAYER = re.compile(r"(.*?(?:^|\.)\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerChange:
    """Tensors whose names share the part up to the first number, or one tensor that has none."""

    layer: str
    tensors: int
    elems: int
    changed: int
    bytes: int
    """Of the chunks' bodies."""

    @property
    def density_frac(self) -> float:
        return self.changed / self.elems if self.elems else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeUse:
    """What one mode of the codec carries."""

    chunks: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A delta in numbers."""

    from_digest: str
    to_digest: str
    full_bytes: int
    """Of all tensors, uncompressed."""
    file_bytes: int
    body_bytes: int
    """Of the chunks' bodies: the file without its header."""
    limit_bytes: float
    """Entropy bound of these changes (`sync.entropy`, L2)."""
    elems: int
    changed: int
    modes: Mapping[str, ModeUse]
    steps: tuple[int, ...]
    """Entry i counts changes by 2^i to 2^(i+1) - 1 steps of the last place."""
    layers: tuple[LayerChange, ...]
    """In the order of numbers in their names."""
    times: Times

    @property
    def density_frac(self) -> float:
        return self.changed / self.elems if self.elems else 0.0

    @property
    def ratio(self) -> float:
        """All tensors over the whole file."""
        return self.full_bytes / self.file_bytes

    @property
    def ratio_to_limit(self) -> float:
        """Bound over bodies: 1 is perfect, also for a delta without changes."""
        return self.limit_bytes / self.body_bytes if self.body_bytes else 1.0


def layer_of(name: str) -> str:
    """Layer of a tensor.

    >>> layer_of("model.layers.7.mlp.up_proj.weight"), layer_of("model.embed_tokens.weight")
    ('model.layers.7', 'model.embed_tokens')
    """
    found = _LAYER.match(name)
    return found[1] if found else re.sub(r"\.(weight|bias)$", "", name)


def summarize(delta: Delta) -> Summary:
    """The numbers of a delta."""
    layers: dict[str, list[int]] = {}
    for spec in delta.before.specs.values():
        row = layers.setdefault(layer_of(spec.name), [0, 0, 0, 0])
        row[0] += 1
        row[1] += spec.elems
    modes: dict[str, list[int]] = {}
    for chunk in delta.manifest.chunks:
        row = layers[layer_of(chunk.tensor)]
        row[2] += chunk.changed
        row[3] += chunk.size
        mode = modes.setdefault(chunk.mode, [0, 0])
        mode[0] += 1
        mode[1] += chunk.size
    return Summary(
        from_digest=delta.before.digest,
        to_digest=delta.after.digest,
        full_bytes=delta.manifest.full_bytes,
        file_bytes=delta.file_bytes,
        body_bytes=delta.manifest.body_bytes,
        limit_bytes=delta.manifest.limit_bytes,
        elems=elements(delta.before.specs.values()),
        changed=sum(chunk.changed for chunk in delta.manifest.chunks),
        modes={name: ModeUse(chunks=row[0], bytes=row[1]) for name, row in sorted(modes.items())},
        steps=delta.header.steps,
        layers=tuple(
            LayerChange(layer=name, tensors=row[0], elems=row[1], changed=row[2], bytes=row[3])
            for name, row in sorted(layers.items(), key=lambda item: _numbers_in_order(item[0]))
        ),
        times=delta.times,
    )


def _numbers_in_order(name: str) -> list[tuple[bool, int, str]]:
    """Layer 2 before layer 10."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in name.split(".")]
