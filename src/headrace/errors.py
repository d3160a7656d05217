"""One tree of exceptions, and the only place that may catch broadly.

HeadraceError
├── ConfigError (ValueError)      a setting that cannot work: names value, allowed values, key, file and line
├── DataError (ValueError)        a data set, prompt, model folder or checkpoint that cannot be used
├── PlanError (ValueError)        a plan that cannot exist: unknown chip, no GPUs, a model that does not fit
├── PluginError (LookupError)     "module:attr" that does not resolve or does not fit its protocol
├── FlowError (RuntimeError)      the controller was fed an impossible event, or cannot go on
│   └── SignalStarvedError        the refill budget is spent: (almost) every group has equal rewards
├── EngineError (RuntimeError)    generation failed
├── LearnerError (RuntimeError)   training failed
│   └── NonFiniteError            NaN or infinity in loss or gradients; names the sample
├── SyncError (RuntimeError)      weights could not be published, verified or applied
├── EnvError (RuntimeError)       an environment failed through no fault of the policy
├── LaunchError (RuntimeError)    a role could not be started
│   └── RoleDiedError             a role's process ended although it was needed
└── DeadlineError (TimeoutError)  a wait ended at its deadline; names what, who and how long
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class HeadraceError(Exception):
    """Base of every error that Headrace raises on purpose."""


class ConfigError(HeadraceError, ValueError):
    """A setting that cannot work."""


class DataError(HeadraceError, ValueError):
    """A data set, prompt, model folder or checkpoint that cannot be used."""


class PlanError(HeadraceError, ValueError):
    """A plan that cannot exist: unknown chip or model, nothing that fits, no sample that would be trained."""


class PluginError(HeadraceError, LookupError):
    """A "module:attr" that does not resolve or does not fit its protocol."""


class FlowError(HeadraceError, RuntimeError):
    """The controller was fed an impossible event, or cannot go on."""


class SignalStarvedError(FlowError):
    """The refill budget of one batch is spent on groups with equal rewards."""


class EngineError(HeadraceError, RuntimeError):
    """Generation failed."""


class LearnerError(HeadraceError, RuntimeError):
    """Training failed."""


class NonFiniteError(LearnerError):
    """NaN or infinity in loss or gradients; the message names the sample."""


class SyncError(HeadraceError, RuntimeError):
    """Weights could not be published, verified or applied."""


class EnvError(HeadraceError, RuntimeError):
    """An environment failed through no fault of the policy."""


class LaunchError(HeadraceError, RuntimeError):
    """A role could not be started."""


class RoleDiedError(LaunchError):
    """A role's process ended although it was needed."""


class DeadlineError(HeadraceError, TimeoutError):
    """A wait ended at its deadline."""


@contextmanager
def boundary(error: type[HeadraceError], doing: str) -> Iterator[None]:
    """Turn any foreign exception raised inside into `error`, saying what was being done.

    Errors of our own tree pass unchanged, and so do cancellation and keyboard interrupts.
    """
    try:
        yield
    except HeadraceError:
        raise
    except Exception as exc:
        raise error(f"{doing}: {type(exc).__name__}: {exc}") from exc


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint for a mistyped name: the nearest valid names, else all of them.

    >>> did_you_mean("sinc", ["sync", "pipeline"])
    "did you mean 'sync'?"
    """
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    if near:
        return "did you mean " + " or ".join(repr(n) for n in near) + "?"
    return "valid names: " + ", ".join(names)
