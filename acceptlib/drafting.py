"""Drawing drafted tokens from the same law that `verify` is given."""

from __future__ import annotations

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from acceptlib.checks import check_device
from acceptlib.engine.draw import draw
from acceptlib.engine.process import law, pieces
from acceptlib.engine.scratch import in_use
from acceptlib.errors import InputError
from acceptlib.rng import Rng
from acceptlib.sampling import SamplingParams
from acceptlib.tensors import FLOAT_DTYPES, expect_tensor

__all__ = ["sample"]


def sample(
    logits: torch.Tensor, *, rng: Rng, position: int, sampling: SamplingParams | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token for each request, for drafting with the streams that `verify` will be given.

    A rule is lossless only if the drafted tokens are drawn from the rows that `verify` is given. This function ensures
    it: the law is the engine's own, and the random numbers come from a part of each stream that verification does not
    use. It runs in torch, and after a first call, which brings constants to the device, it waits for nothing.

    Args:
        logits: [B, V] float32, float16 or bfloat16, the draft model's.
        rng: Streams of the requests; they do not advance.
        position: Index of the token within this step's draft, from 0. Each position has fixed random numbers, so two
            tokens drawn at the same position would not be independent.
        sampling: Parameters that turn logits into the law, as `draft_sampling` of `verify`; a bitmask is
            [B, ceil(V/32)] here.

    Returns:
        Token ids [B] int64, and the probabilities [B, V] float32 that they were drawn from. Pass the probabilities as
        `draft_probs`, or the logits as `draft_logits` with the same parameters. A row without a law, because of NaN or
        because no token may be drawn, has NaN probabilities and an arbitrary id. Parameter tensors are not checked for
        entries out of range: `verify` marks their requests.

    Raises:
        InputError: Shapes, dtypes, devices or parameters do not fit, or the position is not an int in [0, 2^32).
    """
    expect_tensor("logits", logits, ("B", "V"), FLOAT_DTYPES, getattr(logits, "device", torch.device("cpu")))
    if not isinstance(rng, Rng):
        msg = f"rng: expected an acceptlib.Rng, the one that `verify` is given, got {type(rng).__name__}"
        raise InputError(msg)
    check_device("logits", logits.device)
    # Otherwise arithmetic on seeds would become constants of the graph.
    if not torch.compiler.is_dynamo_compiling() and get_proxy_mode() is not None:
        msg = "expected a call outside of make_fx and of an export that is not strict: torch.compile traces `sample`"
        raise InputError(msg)
    streams = Rng.of(rng, logits.shape[0], logits.device)
    if sampling is not None and not isinstance(sampling, SamplingParams):
        msg = f"sampling: expected an acceptlib.SamplingParams, got {type(sampling).__name__}"
        raise InputError(msg)
    if logits.shape[1] == 0:
        msg = f"logits: expected at least one vocabulary entry, got {list(logits.shape)}"
        raise InputError(msg)
    bits = streams.draft_bits(position)
    if not len(logits):
        return bits, logits.to(torch.float32)
    with in_use():
        probs = law(logits, sampling)
        return torch.cat([draw(probs[some], bits[some]) for some in pieces(probs)]), probs
