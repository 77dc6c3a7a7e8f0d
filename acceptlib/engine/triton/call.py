"""What a kernel is compiled for, and what follows from it."""

import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from acceptlib.engine.triton import records

MAX_LISTED = 256
"""Entries that a draw from a list goes through, at most. Few rows under top-k or min-p have as many listed."""

LISTED_AHEAD = 64
"""How many of these, or of runs, are loaded before the stop is known, at most."""

LANES = 8
"""Positions decided at a time, at most: the partial results of 8 rows are about as many as a program has threads."""

WARP = 32
"""Threads that tell each other numbers without waiting."""

MAX_PARTS_EACH = 8
"""Parts of a row that a thread looks at: there are registers for so many."""


@functools.cache
def _sources() -> str:
    """Return what tells versions of this package's code apart."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


@dataclass(frozen=True, kw_only=True, eq=False)
class Rules:
    """The part of a `Call` that follows from a plan. It is equal to itself alone; plans that are alike share one.

    Attributes:
        accept, carry, forgive, residual, sums: Rules as Triton functions, as `rules.bind` returns them.
        keeps_target, within_target: What `residual` leaves as it is; see the functions of `plans` of these names.
        vanishing: Which of `sums` have terms of 0 where the target's probability is 0.
        draws: Whether any token is drawn, or taken from a residual.
        top_k, window, stop, recovered, bonus: The strategy's traits.
        reads_*: Which of `positions.QUANTITIES` some rule reads.
        scalars, tables: Names of what rules read beside `positions.QUANTITIES`: of rows, and of each position.
        carry_scalar, mass_scalar, flags_scalar, entropy_scalar, top_scalar: Places among `scalars`, -1 for none.
    """

    accept: Any
    carry: Any
    forgive: Any
    residual: Any
    keeps_target: bool
    within_target: bool
    draws: bool
    sums: tuple[Any, ...]
    vanishing: tuple[bool, ...]
    top_k: int
    window: int
    stop: str
    recovered: str
    bonus: str
    reads_target: bool
    reads_draft: bool
    reads_target_max: bool
    reads_draft_max: bool
    reads_argmax: bool
    reads_length: bool
    scalars: tuple[str, ...]
    tables: tuple[str, ...]
    carry_scalar: int
    mass_scalar: int
    flags_scalar: int
    entropy_scalar: int
    top_scalar: int

    @property
    def finds_argmax(self) -> bool:
        """Whether the argmax of a target's row is asked for, by a rule or as a token."""
        return self.reads_argmax or "argmax" in {self.recovered, self.bonus}

    @property
    def goes_through_rows(self) -> bool:
        """Whether rows of probabilities are gone through for more than single entries and a draw."""
        best = self.finds_argmax or self.reads_target_max or self.reads_draft_max
        return best or bool(self.sums) or self.top_k > 0

    @property
    def reads_probs(self) -> bool:
        """Whether some rule reads a probability: a drafted token's, or a row's largest."""
        return self.reads_target or self.reads_draft or self.reads_target_max or self.reads_draft_max

    @property
    def decides_unseen(self) -> bool:
        """Whether the first rejection stops a request, and no row has a say in it."""
        return self.stop == "first_rejection" and not (self.reads_probs or self.reads_argmax or self.scalars)


@dataclass(frozen=True, kw_only=True, eq=False)
class Call(Rules):
    """What a kernel is compiled for: a strategy's rules, and the form of its inputs; pairs are (target, draft).

    There is one for each form of a call, and it is equal to itself alone: launches find their kernel by it.

    Attributes:
        state: Which of the caller's state are flags.
        ragged, ends: Whether counts are given, and whether without the leading 0.
        has_draft, has_bonus, has_bonus_rows: Whether the draft's rows, bonus tokens, and bonus rows are given.
        explicit, flat_uniforms, rooted, advances: Where random numbers come from; see `forms.Form`.
        logprobs, raw: Whether log-probabilities are asked for, and whether those of the raw rows differ from them.
        entropy: Whether the entropy of the target's rows comes with their laws; it is one of `sums` otherwise.
        tops: Whether the largest entries of the target's rows come with their laws, as logits.
        aligned: Whether distances of rows are multiples of 16.
        same_dtypes: Whether both models' rows, and the ids of their biases, have the same dtypes.
        logits, temperature, top_ks, top_ps, min_ps, masked, biased: What each model's rows are and have.
        best: Whether largest entries of rows, or argmaxes, are found whatever the temperature.
        counts_passed, adds_up: Whether what passes on its own is counted, and added to totals.
        decided: Whether a stage before the last decides: one of its own, or the one that reads rows.
        emit_run: Entries next to each other that a warp loads at once, where it has a part of a block to itself.
        block, emit_block, max_blocks, max_emit_blocks: Entries of a block, and blocks of a row rounded up.
        tile: Sub-blocks that a search for cuts holds at a time; 0 without filters.
        foreseen: Whether stops are known before any row is read, and no row but the one at the stop is asked for.
        lazy, loops, blocks_ahead, thirds, in_order, looks, runs, emit_parts, law_lanes: See `tunings.Tuning`.
        spins: Whether threads may wait for words by themselves, in instructions of NVIDIA's.
        overlaps: Whether a launch may start before the one ahead of it ends (programmatic dependent launch).
    """

    state: tuple[bool, ...]
    ragged: bool
    ends: bool
    has_draft: bool
    has_bonus: bool
    has_bonus_rows: bool
    explicit: bool
    flat_uniforms: bool
    rooted: bool
    advances: bool
    logprobs: bool
    raw: bool
    entropy: bool
    tops: bool
    aligned: bool
    same_dtypes: bool
    logits: tuple[bool, bool]
    temperature: tuple[bool, bool]
    top_ks: tuple[bool, bool]
    top_ps: tuple[bool, bool]
    min_ps: tuple[bool, bool]
    masked: tuple[bool, bool]
    biased: tuple[bool, bool]
    best: tuple[bool, bool]
    counts_passed: bool
    adds_up: bool
    foreseen: bool
    lazy: bool
    decided: bool
    block: int
    max_blocks: int
    loops: bool
    blocks_ahead: int
    emit_block: int
    emit_parts: int
    emit_run: int
    thirds: bool
    in_order: bool
    looks: int
    spins: bool
    overlaps: bool
    law_lanes: int
    runs: bool
    max_emit_blocks: int
    tile: int

    @property
    def cache_key(self) -> str:
        """What Triton finds kernels on disk by. It sees neither properties nor what rules call, hence the sources."""
        return f"{self!r}-{_sources()}"

    # Reading rows

    @property
    def reduces(self) -> tuple[bool, bool]:
        """Whether laws or argmaxes of a model's rows are found."""
        target, draft = (logits or best for logits, best in zip(self.logits, self.best, strict=True))
        return target, draft and self.has_draft

    @property
    def num_reduced(self) -> int:
        """The number of models whose laws or argmaxes are found."""
        return sum(self.reduces)

    @property
    def alike(self) -> bool:
        """Whether both models' rows are logits of one dtype with the same kinds of parameters.

        Then one piece of code can serve both, under TARGET. Where much is done to a row, that compiles sooner, and
        leaves room for other instructions in the caches.
        """
        pairs = (self.logits, self.temperature, self.top_ks, self.top_ps, self.min_ps, self.masked, self.biased)
        return self.logits[0] and self.same_dtypes and all(target == draft for target, draft in (*pairs, self.best))

    @property
    def argmax_at_stop(self) -> bool:
        """Whether the argmax of the target's row is found at the stop alone, in the block with the largest entry.

        Until then a law has that block's number. A small batch does not wait for the block to be loaded again.
        """
        return self.finds_argmax and self.loops and not (self.reads_argmax or self.filtered[0])

    @property
    def argmaxes(self) -> tuple[bool, bool]:
        """Whether the argmax of each block of a model's rows is found whatever the temperature."""
        return self.finds_argmax and not self.argmax_at_stop, False

    @property
    def has_argmax(self) -> bool:
        """Whether laws of rows have an argmax; elsewhere it is 0, which nothing reads."""
        return any(self.temperature + self.best)

    @property
    def normalises(self) -> tuple[bool, bool]:
        """Whether a model's rows of logits need normalisers, for which exponentials are added up; else these are 0."""
        sums = bool(self.sums) or self.entropy_scalar >= 0 or self.mass_scalar >= 0
        needed = self.draws or self.logprobs or self.filters or self.reads_probs or sums
        return needed and self.logits[0], needed and self.logits[1]

    @property
    def given_probs(self) -> bool:
        """Whether rows come as probabilities, whose sums are to be checked."""
        return not self.logits[0] or (self.has_draft and not self.logits[1])

    @property
    def extra_words(self) -> int:
        """Words for each block of the target's rows, beyond those that each model's rows have."""
        return 2 * self.raw + self.entropy + self.sums_weights

    @property
    def needs_sums(self) -> bool:
        """Whether some quantity needs rows as probabilities."""
        return bool(self.sums) or (self.top_k > 0 and not self.tops)

    @property
    def in_one_pass(self) -> bool:
        """Whether one stage finds all that is asked of whole rows, since none of that needs their laws.

        Not where that is the largest entry of a draft's row: it may lie beyond the vocabulary, where sums do not go.
        """
        return self.needs_sums and not (any(self.logits) or self.best[1])

    @property
    def sums_bonus_rows(self) -> bool:
        """Whether the stage of sums goes through bonus rows too."""
        return self.in_one_pass and self.best[0]

    # Filters

    @property
    def filtered(self) -> tuple[bool, bool]:
        """Whether top-k, top-p and min-p keep a part of a model's rows: a cut, found by one program a row, says which.

        Where the target's cuts are found from lists of runs, so are the laws of the draft's rows, even without a cut.
        """
        target, draft = (any(given) for given in zip(self.top_ks, self.top_ps, self.min_ps, strict=True))
        return target, draft or (self.lists_runs and target and self.logits[1])

    @property
    def filters(self) -> bool:
        """Whether some rows are filtered."""
        return any(self.filtered)

    @property
    def num_filtered(self) -> int:
        """The number of models whose rows are searched for a cut."""
        return sum(self.filtered)

    @property
    def min_p_alone(self) -> bool:
        """Whether min-p is the only filter."""
        return any(self.min_ps) and not any(self.top_ks + self.top_ps)

    @property
    def lists_runs(self) -> bool:
        """Whether what is kept of rows is found from lists of their blocks: see `min_p`."""
        return self.runs and self.min_p_alone

    @property
    def joins(self) -> bool:
        """Whether the last program to reduce a row finds what is kept of it, which is quick under min-p alone."""
        return self.lazy and self.min_p_alone

    @property
    def selects(self) -> bool:
        """Whether a stage finds what is kept of rows."""
        return self.filters and not self.joins

    @property
    def splits(self) -> bool:
        """Whether rows that are not filtered may be reduced while a stage finds what is kept of the others.

        Where that is found from lists of runs, the stage has too little to do.
        """
        found = self.selects and not (self.lazy or self.lists_runs)
        return found and self.num_filtered < self.num_reduced

    @property
    def collects(self) -> tuple[bool, bool]:
        """Whether top-p alone may keep many entries of a model's rows. With top-k beside it, that is rare."""
        target, draft = (top_p and not top_k for top_p, top_k in zip(self.top_ps, self.top_ks, strict=True))
        return target, draft

    @property
    def num_collected(self) -> int:
        """The number of models whose rows may keep many entries under top-p alone."""
        return sum(self.collects)

    @property
    def block_words(self) -> int:
        """Words that a block of a filtered row leaves: of the maxima of its sub-blocks, or of what is listed of it."""
        return records.HELD.value if self.lists_runs else self.block // records.WIDTH.value // 2

    @property
    def tile_words(self) -> int:
        """Words of a filtered row's law, and of what is listed of it; see `records.list_of`."""
        width = records.WIDTH.value
        return records.LAW_WORDS.value + self.tile * records.LISTED.value // 2 + self.tile * width + width + width // 2

    @property
    def lists(self) -> bool:
        """Whether a draw goes through the list of what a row keeps, and nothing else, where that list is short."""
        few = self.filtered[0] and not self.collects[0]
        known = self.within_target and self.mass_scalar < 0 and not self.given_probs
        return few and known and self.draws

    @property
    def most_listed(self) -> int:
        """Entries that such a draw goes through, at most."""
        return min(MAX_LISTED, self.tile * records.WIDTH.value)

    @property
    def listed_run(self) -> int:
        """Neighbours that a word of a list stands for: a run, or an entry by itself."""
        return records.RUN.value if self.lists_runs else 1

    @property
    def listed_ahead(self) -> int:
        """Words of each list that are loaded before it is known which list is drawn from."""
        return min(LISTED_AHEAD, self.most_listed // self.listed_run)

    # Decisions

    @property
    def settles(self) -> bool:
        """Whether stages settle positions as they go through rows, and the last one waits for each request separately.

        See `counters.settle` and `counters.known_stop`.
        """
        return self.lazy and self.decided and (self.sums_bonus_rows or not self.needs_sums)

    @property
    def spares_masses(self) -> bool:
        """Whether no mass is needed before a position that is accepted."""
        return self.mass_scalar >= 0 and self.stop == "last_acceptance" and not self.counts_passed

    @property
    def keeps_laws(self) -> bool:
        """Whether the last stage decides, and keeps the laws that it decides by.

        Programs that loop have no room for laws, except where masses decide: there few run at a time.
        """
        decides = not (self.filters or self.decided or self.foreseen)
        has_room = any(self.logits) and not self.loops
        return decides and (self.mass_scalar >= 0 or (has_room and self.stop in {"first_rejection", "window"}))

    @property
    def finds_faults(self) -> bool:
        """Whether that decision also tells what is wrong with the token at the stop, which is not loaded again then.

        Programs that hold weights take longer for it.
        """
        return self.keeps_laws and self.stop == "first_rejection" and self.mass_scalar < 0 and not self.holds

    @property
    def lanes(self) -> int:
        """Positions that `decide.first_rejection` and `decide.window` decide at a time."""
        return self.law_lanes if self.keeps_laws and self.mass_scalar < 0 else LANES

    # What a draw reads

    @property
    def knows_weights(self) -> bool:
        """Whether the weights of draws are the target's logits under their law, but for a drafted token.

        If so, the sums behind the law of a row without a filter tell where a draw falls, whatever other requests have.
        """
        keeps = self.residual is None or (self.keeps_target and not self.has_draft and self.recovered == "sample")
        return self.draws and keeps and self.logits[0] and self.mass_scalar < 0

    @property
    def draws_by_law(self) -> bool:
        """Whether sums of blocks tell where every draw falls: those behind the row's law, or of `sums_weights`."""
        return self.sums_weights or (self.knows_weights and not self.filtered[0])

    @property
    def mixes_draws(self) -> bool:
        """Whether requests without a filter are drawn by law, and rows of others are weighed."""
        return self.knows_weights and self.filtered[0]

    @property
    def weighs(self) -> bool:
        """Whether blocks of the stopping row are weighed; elsewhere its law tells what is emitted, or one block."""
        return self.draws and not self.draws_by_law

    @property
    def sums_weights(self) -> bool:
        """Whether rows of probabilities are summed up as their argmaxes are found, so that none is gone through again.

        This is done where bonus tokens alone are drawn, each from one block of a row. In large batches it takes longer.
        """
        bonus_alone = self.draws and self.residual is None and self.recovered == "argmax" and self.mass_scalar < 0
        return bonus_alone and not (self.logits[0] or self.loops)

    @property
    def in_fours(self) -> bool:
        """Whether weights of a draw are added up in fours before they become integers.

        Weights from probabilities are not, so that tokens equal the torch engine's. Others are where that is faster.
        """
        return self.mass_scalar >= 0 and not self.given_probs

    @property
    def drops(self) -> bool:
        """Whether what the last stage reads is the first to leave the cache.

        Logits that have room there stay, for a part of them may be read again.
        """
        return self.given_probs or self.decided

    # Programs of the last stage and what they tell each other

    @property
    def emit_part(self) -> int:
        """Entries of a part of a block of the last stage."""
        return self.emit_block // self.emit_parts

    @property
    def emit_rounds(self) -> int:
        """How many runs of entries next to each other a part has."""
        return self.emit_part // self.emit_run

    @property
    def emit_words(self) -> int:
        """Words for what the last stage finds of a block: the sum, the largest weight and three masses of each part."""
        return 3 * self.emit_parts

    @property
    def sum_parts(self) -> int:
        """Parts of a block that have a sum of their own."""
        return 1 if self.holds else self.emit_parts

    @property
    def sum_part(self) -> int:
        """Entries of such a part."""
        return self.emit_block // self.sum_parts

    @property
    def part_lanes(self) -> int:
        """How many threads look at the parts of a row, each at neighbours: those of a warp, if they can hold them."""
        parts = self.max_emit_blocks * self.sum_parts
        return min(parts, max(WARP, parts // MAX_PARTS_EACH))

    @property
    def counts_programs(self) -> bool:
        """Whether programs of the last stage count who has arrived, or read a stop that was stored for them."""
        return self.decided or self.mass_scalar >= 0 or (self.weighs and not self.awaits)

    @property
    def awaits(self) -> bool:
        """Whether a program of the last stage waits for the sums that others find, as it needs nothing else of them."""
        elsewhere = self.lists or self.decided or self.mass_scalar >= 0
        needs_largest = self.residual is not None and self.recovered == "argmax"
        return self.in_order and self.weighs and not (elsewhere or needs_largest or self.loops)

    @property
    def awaited_words(self) -> int:
        """Words of 64 bits that it waits for in each part: the part's sum, and the masses that are checked."""
        return 3 if self.awaits and not self.holds else 0

    @property
    def holds(self) -> bool:
        """Whether each program stores all that it found in one word of the workspace, and may hold its weights."""
        return self.awaits and not self.given_probs

    @property
    def draws_held(self) -> bool:
        """Whether the program that the draw falls into writes the token, since nothing else is needed of it."""
        return self.holds and not (self.logprobs or self.has_bonus)
