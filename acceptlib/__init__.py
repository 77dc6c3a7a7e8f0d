"""acceptlib: the verification step of speculative decoding, as a framework of acceptance rules."""

from importlib import metadata as _metadata

from acceptlib import ops
from acceptlib.config import from_config
from acceptlib.drafting import sample
from acceptlib.errors import AcceptlibError
from acceptlib.hookspecs import hookimpl
from acceptlib.registry import available, create
from acceptlib.result import PLACEHOLDER_TOKEN_ID, Status, VerifyResult
from acceptlib.rng import Rng, Uniforms
from acceptlib.rules import row_sum, rule
from acceptlib.sampling import LogitBias, SamplingParams, pack_bitmask
from acceptlib.strategy import AcceptanceStrategy, Options, Traits
from acceptlib.workspace import Workspace

__all__ = [
    "PLACEHOLDER_TOKEN_ID",
    "AcceptanceStrategy",
    "AcceptlibError",
    "LogitBias",
    "Options",
    "Rng",
    "SamplingParams",
    "Status",
    "Traits",
    "Uniforms",
    "VerifyResult",
    "Workspace",
    "available",
    "create",
    "from_config",
    "hookimpl",
    "ops",
    "pack_bitmask",
    "row_sum",
    "rule",
    "sample",
]

try:
    __version__ = _metadata.version("acceptlib")
except _metadata.PackageNotFoundError:  # run from its sources
    __version__ = "0+unknown"
