"""The demo models' text: the Python standard library's sources, tokenizer and prompts."""

from __future__ import annotations

import hashlib
import re
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

if TYPE_CHECKING:
    from pathlib import Path

VOCABULARY: Final = 3072
CONTEXT: Final = 512
END_OF_TEXT: Final = "<|endoftext|>"
HELD_OUT_SHARE: Final = 0.04
PROMPTS: Final = 48
PROMPT_TOKENS: Final = (40, 100)
SKIPPED_FOLDERS: Final = ("site-packages", "dist-packages", "__pycache__")
# Tables and machine-written files: they would cost capacity and teach nothing about code.
EXCLUDED: Final = (
    "_sysconfigdata_*.py",
    "config-*/*",
    "encodings/*",
    "html/entities.py",
    "pydoc_data/topics.py",
    "re/_casefix.py",
    "stringprep.py",
    "test/test_codecencodings_*.py",
    "test/test_int_literal.py",
    "test/test_lzma.py",
    "test/test_stringprep.py",
    "test/test_strtod.py",
    "test/test_sunau.py",
    "test/test_wave.py",
)
OPENING: Final = re.compile(r"\s*(?:async )?def \w+\(|\s*class \w+[:(]|import \w|from [\w.]+ import ", re.ASCII)


class Source(NamedTuple):
    """One file of the corpus."""

    order: int  # depends on the path alone, uniform in 0 .. 2**32 - 1
    path: str
    text: str
    digest: str


class Corpus(NamedTuple):
    """The files, split into those trained on and those held out."""

    training: list[Source]
    held_out: list[Source]
    digest: str  # of the list of all files and their own sums


def read_corpus(folder: Path) -> Corpus:
    """Read every usable `.py` file under a folder, in a fixed order."""
    sources = []
    for file in sorted(folder.rglob("*.py")):
        relative = file.relative_to(folder)
        path = relative.as_posix()
        skipped = any(part in SKIPPED_FOLDERS for part in relative.parts)
        if skipped or not file.is_file() or any(fnmatch(path, name) for name in EXCLUDED):
            continue
        data = file.read_bytes()
        try:
            text = data.decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError:
            continue
        if text.strip():
            order = int(hashlib.sha256(path.encode()).hexdigest()[:8], 16)
            sources.append(Source(order, path, text, hashlib.sha256(data).hexdigest()))
    if not sources[1:]:  # one to train on and one to hold out
        message = f"{folder} holds fewer than two usable .py files"
        raise SystemExit(message)
    sums = "".join(f"{item.digest}  {item.path}\n" for item in sources)
    sources.sort()
    count = max(1, sum(item.order < HELD_OUT_SHARE * 2**32 for item in sources))
    return Corpus(sources[count:], sources[:count], hashlib.sha256(sums.encode()).hexdigest())


def train_tokenizer(sources: list[Source]) -> Tokenizer:
    """Train the byte-level BPE tokenizer that both models share."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((item.text for item in sources), trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, sources: list[Source]) -> torch.Tensor:
    """Encode files into one stream, each after an end-of-text token."""
    stream: list[int] = []
    for item in sources:
        stream.append(0)
        stream.extend(tokenizer.encode(item.text).ids)
    stream.append(0)
    return torch.tensor(stream)


def choose_prompts(tokenizer: Tokenizer, sources: list[Source]) -> list[dict[str, str]]:
    """Choose prompts that start at a definition or an import, evenly from the given files."""
    low, high = PROMPT_TOKENS
    rounds: list[tuple[int, dict[str, str]]] = []
    for item in sources:
        lines = item.text.split("\n")
        starts = [number for number, line in enumerate(lines) if OPENING.match(line)]
        starts.sort(key=lambda number: hashlib.sha256(f"{item.path}:{number}".encode()).digest())
        taken: set[int] = set()
        found = []
        for start in starts:
            end, size, prompt = start, 0, ""
            while end < len(lines) and size < low:
                end += 1
                # No line break at the end: the tokenizer joins it with the next line's indent.
                prompt = "\n".join(lines[start:end]).rstrip()
                size = len(tokenizer.encode(prompt).ids)
            if low <= size <= high and taken.isdisjoint(range(start, end)):
                found.append({"source": item.path, "text": prompt})
                taken.update(range(start, end))
        rounds.extend(enumerate(found))
    rounds.sort(key=lambda entry: entry[0])  # stable: every file's first, then every second, ...
    return [prompt for _, prompt in rounds[:PROMPTS]]
