"""The exception tree: everything acceptlib raises on purpose.

AcceptlibError
├── InputError               a shape, dtype, device or combination of arguments
│   └── StrictModeError      what vLLM V0's strict mode refuses (`acceptlib.compat.vllm_v0`)
├── ConfigError              a config file or mapping
│   ├── UnknownStrategyError a name that no strategy has
│   └── OptionError          an option that does not exist or is out of range
├── StrategyDefinitionError  a strategy class whose rules or traits do not fit the interface
├── PluginError              a third-party package that could not be used
├── BackendError             a backend that cannot run this call
├── MissingPackageError      a package that an extra installs, and that is not there
├── StatusError              bad values inside tensors, found by `VerifyResult.raise_for_status`
├── EnumerationError         an exact law too large to enumerate
├── ConformanceError         a strategy that fails a property that `acceptlib.testing` checks
├── MismatchError            a wrong result, which is not timed (`acceptlib.benchmarks.gate`)
└── CommandError             a command line that cannot be carried out (`acceptlib.cli`)

Errors that replace a builtin also derive from it, so that `except ValueError` keeps working.
"""

from __future__ import annotations

import difflib
import importlib
import reprlib
from collections.abc import Callable, Iterable
from numbers import Integral
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import pydantic
    from pydantic_core import ErrorDetails


class AcceptlibError(Exception):
    """Base class of every error that acceptlib raises on purpose."""


class InputError(AcceptlibError, ValueError):
    """An argument has the wrong shape, dtype or device, or does not fit another argument."""


class ConfigError(AcceptlibError, ValueError):
    """A config file or mapping cannot be read or does not fit the schema."""


class UnknownStrategyError(ConfigError, LookupError):
    """No strategy has this name."""


class OptionError(ConfigError):
    """An option does not exist, or its value is out of range."""


class StrategyDefinitionError(AcceptlibError, TypeError):
    """A strategy class does not fit the interface."""


class PluginError(AcceptlibError):
    """A third-party package could not be loaded or registered."""


class BackendError(AcceptlibError, RuntimeError):
    """The requested backend cannot run this call."""


class MissingPackageError(AcceptlibError, ImportError):
    """A package that an extra installs cannot be imported."""


class StatusError(AcceptlibError, ValueError):
    """A request carried bad values (NaN, ids out of range, unnormalised rows)."""


class EnumerationError(AcceptlibError, ValueError):
    """The exact law has too many outcomes to enumerate."""


class ConformanceError(AcceptlibError, AssertionError):
    """A strategy does not have a property that it must have."""


LONGEST: Final = 200
"""Letters of a value in a message, at most."""

MAX_PROBLEMS: Final = 5
"""Problems of one config, or of one strategy's options, in a message."""


class _Short(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        """Say how long an integer is that nobody reads: Python refuses to write one of thousands of digits."""
        return super().repr_int(x, level) if x.bit_length() <= LONGEST else f"<int of {x.bit_length()} bits>"

    def repr1(self, x: Any, level: int) -> str:
        """Say what a tensor is, not what is in it: that would wait for the device, and nobody reads it."""
        shape, device = getattr(x, "shape", None), getattr(x, "device", "cpu")
        if isinstance(shape, tuple) and hasattr(x, "dtype") and (shape or str(device) != "cpu"):
            return f"<{type(x).__name__} {list(shape)} {x.dtype} on {device}>"
        return super().repr1(x, level)


_SHORT: Final = _Short()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80
_SHORT.maxlevel = 2


def short_repr(value: object) -> str:
    """Return `repr(value)`, or as much of it as fits in a message: data may be of any size."""
    text = _SHORT.repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def expect_int(name: str, value: object, least: int = 0) -> None:
    """Check that an argument is an int, NumPy's too, of at least `least`.

    Raises:
        InputError: It is not.
    """
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        msg = f"{name}: expected an int >= {least}, got {short_repr(value)}"
        raise InputError(msg)


def kind_of(value: object) -> str:
    """Return what is given where a tensor is expected, and none that is nested."""
    return "a nested one" if getattr(value, "is_nested", False) else type(value).__name__


def one_line(error: BaseException) -> str:
    """Return what was raised, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def problems_of(error: pydantic.ValidationError, say: Callable[[str, ErrorDetails], str]) -> str:
    """Return what pydantic complains of, as much of it as fits in a message.

    Args:
        error: The complaint.
        say: Makes a sentence of a dotted key, quoted, and what is wrong there.
    """
    found = error.errors()
    lines = [say(short_repr(".".join(map(str, detail["loc"]))), detail) for detail in found[:MAX_PROBLEMS]]
    if len(found) > MAX_PROBLEMS:
        lines.append(f"And {len(found) - MAX_PROBLEMS} more.")
    return " ".join(lines)


def import_extra(module: str, extra: str) -> Any:
    """Return a module of a package that an extra installs.

    Raises:
        MissingPackageError: It cannot be imported; the message names the extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        msg = f"{package} cannot be imported ({error}). Install it: pip install 'acceptlib[{extra}]'"
        raise MissingPackageError(msg) from error


def suggest(name: object, known: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?`` for the nearest of `known`, or an empty string."""
    text = name if isinstance(name, str) else short_repr(name)
    close = difflib.get_close_matches(text[:80], list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""
