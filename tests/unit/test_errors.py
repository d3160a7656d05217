"""The tree of exceptions, the boundary, and hints."""

from __future__ import annotations

import asyncio

import pytest

from headrace import errors
from headrace.errors import ConfigError, DataError, EngineError, HeadraceError, boundary, did_you_mean


def test_every_error_is_of_the_tree_and_of_a_standard_type() -> None:
    own = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, HeadraceError)]
    standard = (ValueError, LookupError, RuntimeError, TimeoutError)
    assert len(own) > 10
    assert all(issubclass(e, standard) for e in own if e is not HeadraceError)


def test_tree_in_the_docstring_is_complete() -> None:
    own = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, HeadraceError)]
    assert errors.__doc__ is not None
    assert [e.__name__ for e in own if e.__name__ not in errors.__doc__] == []


def test_boundary_translates_and_keeps_the_cause() -> None:
    with pytest.raises(DataError, match=r"^reading x: KeyError: 'a'$") as caught, boundary(DataError, "reading x"):
        {}["a"]
    assert isinstance(caught.value.__cause__, KeyError)


def test_boundary_passes_our_own_errors_unchanged() -> None:
    with pytest.raises(ConfigError, match=r"^mine$"), boundary(DataError, "reading"):
        raise ConfigError("mine")


@pytest.mark.parametrize("signal", [KeyboardInterrupt, asyncio.CancelledError, SystemExit])
def test_boundary_swallows_no_cancellation(signal: type[BaseException]) -> None:
    with pytest.raises(signal), boundary(EngineError, "generating"):
        raise signal


def test_hints() -> None:
    assert did_you_mean("sinc", ["sync", "pipeline"]) == "did you mean 'sync'?"
    assert did_you_mean("zzz", ["sync", "pipeline"]) == "valid names: pipeline, sync"
    assert did_you_mean("clip", ["clip_low", "clip_high"]) == "did you mean 'clip_low' or 'clip_high'?"
