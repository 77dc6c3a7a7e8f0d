"""What is timed, as data: shapes, dtype, kind of input and how much of the draft is accepted."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Final, Literal, TypeAlias, get_args

import torch
from torch.nn import functional

from acceptlib import demo, exact
from acceptlib.demo.pair import load_pair
from acceptlib.engine.process import law
from acceptlib.errors import InputError
from acceptlib.integrations.transformers import SpeculativeDecoder
from acceptlib.result import VerifyResult
from acceptlib.rng import Rng
from acceptlib.sampling import OFF, PARAMETERS, SamplingParams, pack_bitmask
from acceptlib.strategy import AcceptanceStrategy

Kind: TypeAlias = Literal["logits", "probs", "one-hot"]
Level: TypeAlias = Literal["low", "medium", "high"]
Source: TypeAlias = Literal["synthetic", "pair"]
Dtype: TypeAlias = Literal["float32", "float16", "bfloat16"]

ALPHA: Final[dict[str, float]] = {"low": 0.3, "medium": 0.6, "high": 0.9}
"""Mean probability that rejection sampling accepts a drafted token of synthetic rows."""

DTYPES: Final[dict[Dtype, torch.dtype]] = {name: getattr(torch, name) for name in get_args(Dtype)}

SPREAD: Final = 3.0
"""Standard deviation of a synthetic row's logits."""

PAIR_PROMPTS: Final = 4
PAIR_TOKENS: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One batch to verify, as a description.

    Attributes:
        num_requests: B.
        num_draft_tokens: K, the same for every request.
        vocab_size: V.
        kind: `logits` and `probs` give both models' rows; `one-hot` gives the target's logits and no draft rows.
        dtype: Of the rows.
        acceptance: How much of the draft is accepted. Synthetic rows have a mean acceptance probability of `ALPHA`;
            rows of the bundled pair are its steps with the lowest, middle or highest third of acceptance.
        source: `synthetic` or `pair`. Rows of the bundled pair are padded to `vocab_size` with unlikely entries.
        temperature, top_k, top_p, min_p: Of both models, for logits, as in `SamplingParams`. Under them the acceptance
            of synthetic rows differs from `ALPHA`, except that of one-hot drafts under a temperature alone.
        filters_draft: Whether top-k, top-p and min-p are the draft's too. vLLM draws drafts under a temperature alone.
        masked: Whether a bitmask forbids tokens below the mean logit, except drafted ones. Those forbidden hold next to
            no mass, so that as much is accepted as without it.
        counts: Whether results count the drafted tokens that pass on their own, past the stop too, for which every row
            is read.
    """

    num_requests: int = 1
    num_draft_tokens: int = 5
    vocab_size: int = 128256
    kind: Kind = "logits"
    dtype: Dtype = "float32"
    acceptance: Level = "medium"
    source: Source = "synthetic"
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    filters_draft: bool = True
    masked: bool = False
    counts: bool = False

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            InputError: A size is too small, a word is none of those it may be, a parameter is out of range, or one is
                given for probabilities.
        """
        words = {"kind": get_args(Kind), "dtype": DTYPES, "acceptance": get_args(Level), "source": get_args(Source)}
        for name, known in words.items():
            if getattr(self, name) not in known:
                msg = f"{name}: expected {' or '.join(map(repr, known))}, got {getattr(self, name)!r}"
                raise InputError(msg)
        for name, least in (("num_requests", 1), ("num_draft_tokens", 1), ("vocab_size", 2)):
            if getattr(self, name) < least:
                msg = f"{name}: expected at least {least}, got {getattr(self, name)}"
                raise InputError(msg)
        if self.kind == "probs" and (self.parameters or self.masked):
            msg = f"expected no sampling parameters with probabilities, which are processed already, got {self.heading}"
            raise InputError(msg)
        SamplingParams(**self.parameters)
        if not self.filters_draft and (self.kind != "logits" or self.draft_parameters == self.parameters):
            msg = f"filters_draft: expected True without rows of a draft and a top-k, top-p or min-p, got {self.path}"
            raise InputError(msg)

    @property
    def parameters(self) -> dict[str, Any]:
        """The sampling parameters that are on."""
        return {name: getattr(self, name) for name, off in OFF.items() if getattr(self, name) != off}

    @property
    def draft_parameters(self) -> dict[str, Any]:
        """The sampling parameters of the draft's rows."""
        return {name: value for name, value in self.parameters.items() if self.filters_draft or name == "temperature"}

    @property
    def heading(self) -> str:
        """The sampling parameters in words."""
        names = {"temperature": "T =", "top_k": "top-k", "top_p": "top-p", "min_p": "min-p"}
        words = [f"{names[name]} {value:g}" for name, value in self.parameters.items()]
        flags = {"drafts unfiltered": not self.filters_draft, "bitmask": self.masked, "counted": self.counts}
        return ", ".join([*words, *(word for word, holds in flags.items() if holds)])

    @property
    def path(self) -> str:
        """What is verified from what, in words: one heading of a table."""
        names = {"logits": "logits", "probs": "probabilities", "one-hot": "logits, one-hot draft"}
        return ", ".join(filter(None, (names[self.kind], self.heading)))

    def __str__(self) -> str:
        """Name it, as in `B1-K5-V128256-float32-logits-medium`."""
        shape = f"B{self.num_requests}-K{self.num_draft_tokens}-V{self.vocab_size}"
        pair = "-pair" if self.source == "pair" else ""
        heading = "".join(f"-{word}" for word in self.heading.replace(" = ", "").replace(" ", "").split(",") if word)
        return f"{shape}-{self.dtype}-{self.kind}{heading}-{self.acceptance}{pair}"


@dataclass(frozen=True, slots=True)
class Batch:
    """The tensors of one workload, with the streams and the result that calls write.

    Attributes:
        workload: What it was made from.
        draft_token_ids: [B, K] int64.
        target: [B, K+1, V], logits or probabilities.
        draft: [B, K, V], likewise; None for one-hot drafts.
        rng: Streams, advanced by each call.
        out: Where calls write their result.
        sampling: The workload's sampling parameters.
        draft_sampling: Those of the draft, where they differ.
    """

    workload: Workload
    draft_token_ids: torch.Tensor
    target: torch.Tensor
    draft: torch.Tensor | None
    rng: Rng
    out: VerifyResult
    sampling: SamplingParams | None = None
    draft_sampling: SamplingParams | None = None

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.target.device

    def arguments(self, strategy: AcceptanceStrategy) -> dict[str, Any]:
        """Return the rows, their processing and the state of new requests as keyword arguments of `verify`."""
        form = "probs" if self.workload.kind == "probs" else "logits"
        given: dict[str, Any] = {f"target_{form}": self.target}
        if self.draft is not None:
            given[f"draft_{form}"] = self.draft
        if self.sampling is not None:
            given["sampling"] = self.sampling
        if self.draft_sampling is not None:
            given["draft_sampling"] = self.draft_sampling
        if state := strategy.initial_state(self.workload.num_requests, self.device):
            given["state"] = state
        return given

    def probabilities(self, request: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return one request's rows as float32 probabilities on the CPU."""
        rows = [None if rows is None else rows[request].cpu().float() for rows in (self.target, self.draft)]
        if self.workload.masked or self.workload.parameters:
            allowed = None if self.sampling is None else self.sampling.allowed_token_bitmask
            masks = [None if allowed is None else allowed[request].cpu(), None]
            parameters = [self.workload.parameters, self.workload.draft_parameters]
            rows = [
                None if logits is None else _processed(logits, mask, given)
                for logits, mask, given in zip(rows, masks, parameters, strict=True)
            ]
        elif self.workload.kind != "probs":
            rows = [None if logits is None else logits.softmax(-1) for logits in rows]
        target, draft = rows
        assert target is not None  # noqa: S101 - for the type checker
        return target, draft


def _processed(logits: torch.Tensor, mask: torch.Tensor | None, parameters: dict[str, Any]) -> torch.Tensor:
    """Return rows [n, V] of logits as probabilities, float32, from the definition."""
    laws = []
    for number, row in enumerate(logits):
        bits = None if mask is None else ((mask[number, :, None] >> torch.arange(32)) & 1).flatten()
        allowed = None if bits is None else {*bits.nonzero()[:, 0].tolist()}
        laws.append(exact.processed(row, allowed=allowed, **parameters))
    return torch.stack(laws).float()


def make(workload: Workload, device: torch.device | str = "cpu", seed: int = 0) -> Batch:
    """Return the tensors of a workload; equal arguments give equal ones on one device.

    Args:
        workload: What to make.
        device: Where.
        seed: Of the rows and the streams; other seeds give other rows.

    Raises:
        InputError: Rows of the bundled pair are wanted, but its vocabulary is larger than V, its texts have too few
            steps of K tokens.
        MissingPackageError: Rows of the bundled pair are wanted, and transformers is not installed.
    """
    device = torch.device(device)
    make_logits = _pair_logits if workload.source == "pair" else _synthetic_logits
    target, draft, ids = make_logits(workload, device, seed)
    sampling, draft_sampling = None, None
    if workload.parameters or workload.masked:
        sampling = _sampling(workload, ids, target)
    if sampling is not None and not workload.filters_draft:
        draft_sampling = SamplingParams(temperature=sampling.temperature)
    rows: list[torch.Tensor] = [target, draft]
    if workload.kind == "probs":
        rows = [logits.softmax(-1) for logits in rows]
    target, draft = (values.to(DTYPES[workload.dtype]) for values in rows)
    first = seed * workload.num_requests
    return Batch(
        workload=workload,
        draft_token_ids=ids,
        target=target,
        draft=None if workload.kind == "one-hot" else draft,
        rng=Rng(
            seeds=torch.arange(first, first + workload.num_requests, device=device),
            offsets=torch.zeros(workload.num_requests, dtype=torch.int64, device=device),
        ),
        out=VerifyResult.empty(workload.num_requests, workload.num_draft_tokens, device, num_passed=workload.counts),
        sampling=sampling,
        draft_sampling=draft_sampling,
    )


def _sampling(workload: Workload, ids: torch.Tensor, target: torch.Tensor) -> SamplingParams:
    """Return the sampling parameters as tensors [B]: a number would cost one more allocation per call."""
    kinds = {parameter.name: parameter.number_dtype for parameter in PARAMETERS}
    found: dict[str, Any] = {
        name: torch.full((workload.num_requests,), value, dtype=kinds[name], device=ids.device)
        for name, value in workload.parameters.items()
    }
    if workload.masked:
        allowed = target >= target.mean(-1, keepdim=True)
        allowed[:, :-1].scatter_(-1, ids[..., None], value=True)
        found["allowed_token_bitmask"] = pack_bitmask(allowed)
    return SamplingParams(**found)


def noise_for(alpha: float) -> float:
    """Return the noise on logits under which a token drafted from them is accepted with probability `alpha`.

    With q proportional to p exp(s n) and n standard normal, log(q / p) is normal with mean -s^2 / 2 and variance s^2
    under a p that no few entries dominate, so sum min(p, q) = 2 Phi(-s / 2).
    """
    return -2.0 * NormalDist().inv_cdf(alpha / 2.0)


def _synthetic_logits(
    workload: Workload, device: torch.device, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    size = (workload.num_requests, workload.num_draft_tokens, workload.vocab_size)
    alpha = ALPHA[workload.acceptance]
    target = torch.randn(size[0], size[1] + 1, size[2], device=device, generator=generator) * SPREAD
    draft = target[:, :-1] + torch.randn(size, device=device, generator=generator) * noise_for(alpha)
    # An exponential race draws from each row: on a GPU, torch.multinomial takes fewer entries per call.
    race = torch.empty_like(draft).exponential_(generator=generator).log_().neg_()
    drawn = law(draft, SamplingParams(**workload.draft_parameters)).log() if workload.draft_parameters else draft
    ids = race.add_(drawn).argmax(-1)
    if workload.kind == "one-hot":
        # A one-hot draft is accepted with the target's probability of its token, which is set to alpha.
        at, heat = ids[..., None], workload.temperature or 1.0
        rest = (target[:, :-1] / heat).scatter_(-1, at, -math.inf).logsumexp(-1, keepdim=True)
        target[:, :-1].scatter_(-1, at, heat * (rest + math.log(alpha / (1.0 - alpha))))
    return target, draft, ids


def _pair_logits(
    workload: Workload, device: torch.device, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    steps = _pair_steps(workload.num_draft_tokens)
    third = len(steps) // 3
    if not third:
        msg = (
            f"num_draft_tokens: expected so few that the bundled pair's texts have 3 steps of them, got "
            f"{workload.num_draft_tokens}, of which they have {len(steps)}: draft fewer, or take synthetic rows"
        )
        raise InputError(msg)
    start = {"low": 0, "medium": third, "high": 2 * third}[workload.acceptance]
    # Evenly spread over the third, and around again where needed, by a stride that reaches every step.
    stride = next(n for n in range(max(third // workload.num_requests, 1), 0, -1) if math.gcd(n, third) == 1)
    first = seed * workload.num_requests
    chosen = [steps[start + index * stride % third] for index in range(first, first + workload.num_requests)]
    target, draft, ids = (torch.stack(rows).to(device) for rows in zip(*chosen, strict=True))
    missing = workload.vocab_size - target.shape[-1]
    if missing < 0:
        msg = f"vocab_size: the bundled pair has {target.shape[-1]} entries, expected at least as many, got "
        raise InputError(msg + str(workload.vocab_size))
    lowest = min(float(target.min()), float(draft.min()))
    target, draft = (functional.pad(rows, (0, missing), value=lowest) for rows in (target, draft))
    return target, draft, ids


@functools.lru_cache(maxsize=4)
def _pair_steps(num_draft_tokens: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return steps of the bundled pair as (target logits, draft logits, ids), least accepted first."""
    pair = load_pair()
    found = []
    for number, prompt in enumerate(demo.prompts()[:PAIR_PROMPTS]):
        decoder = SpeculativeDecoder(
            target=pair.target, draft=pair.draft, num_draft_tokens=num_draft_tokens, rng=number
        )
        ids = pair.tokenizer(prompt, return_tensors="pt").input_ids
        for step in itertools.islice(decoder.steps(ids, PAIR_TOKENS), PAIR_TOKENS):
            if step.num_draft_tokens == num_draft_tokens:
                p, q = step.target_logits[:-1].softmax(-1), step.draft_probs
                alpha = float(torch.minimum(p, q).sum(-1).mean())
                found.append((alpha, (step.target_logits, q.log().clamp(min=-80.0), step.draft_token_ids)))
    found.sort(key=lambda pair: pair[0])
    return [rows for _, rows in found]
