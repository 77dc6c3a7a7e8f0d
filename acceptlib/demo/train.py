"""Train the bundled draft and target models from scratch.

Run as `python -m acceptlib.demo.train`. The text is the Python standard library's own sources: by default those of the
running interpreter, else those under `--corpus`. They are Copyright (c) 2001 Python Software Foundation and used under
the PSF License Agreement (https://docs.python.org/3/license.html).

The run is deterministic on a given kind of device and set of library versions. Ctrl-C ends it with a checkpoint, from
which it continues when started again with the same options.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import os
import platform
import shutil
import signal
import sysconfig
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

# cuBLAS reads this when it is first used; without it its products are not reproducible.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from rich.console import Console
from rich.progress import Progress
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from acceptlib.demo.corpus import (
    CONTEXT,
    END_OF_TEXT,
    Corpus,
    choose_prompts,
    encode,
    read_corpus,
    train_tokenizer,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Model: TypeAlias = LlamaForCausalLM


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The shape of one model and how it is trained."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    steps: int
    rate: float
    method: str
    distillation: float = 0.0  # the weight of the divergence from the target in the loss
    warmup: int = 200
    floor: float = 0.05  # the last learning rate, as a share of the highest
    decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0


CROSS_ENTROPY: Final = "next-token cross-entropy"
MIXTURE: Final = f"0.2 x {CROSS_ENTROPY} + 0.8 x KL(target || draft)"
TARGET: Final = Recipe("target", 256, 640, 6, 8, 2000, 2e-3, CROSS_ENTROPY)
DRAFT: Final = Recipe("draft", 96, 256, 2, 3, 10000, 4e-3, MIXTURE, distillation=0.8)


def build(recipe: Recipe, vocabulary: int, seed: int) -> Model:
    """Make an untrained model; the seed alone decides its weights, whatever the device."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=recipe.hidden,
        intermediate_size=recipe.intermediate,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    return LlamaForCausalLM(config)


def convert(module: torch.nn.Module, kind: torch.device | torch.dtype) -> None:
    """Move a model to a device or a number format, in place."""
    module.to(kind)


def logits_of(model: Model, tokens: torch.Tensor) -> torch.Tensor:
    """Return one float32 row of logits for each given token, the batch flattened."""
    logits: torch.Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits.flatten(0, 1).float()


@torch.no_grad()
def evaluate(rows: torch.Tensor, batch: int, model: Model, draft: Model | None = None) -> float:
    """Return a mean over all positions: the loss in nats or, given a draft, alpha.

    Alpha is `sum_x min(p(x), q(x))` at temperature 1.
    """
    total = 0.0
    for start in range(0, len(rows), batch):
        tokens = rows[start : start + batch, :-1]
        targets = rows[start : start + batch, 1:].flatten()
        p = logits_of(model, tokens).log_softmax(-1)
        if draft is None:
            total += functional.nll_loss(p, targets, reduction="sum").item()
        else:
            q = logits_of(draft, tokens).log_softmax(-1)
            total += torch.minimum(p, q).exp().sum().item()
    return total / rows[:, 1:].numel()


def rate_at(recipe: Recipe, step: int) -> float:
    """Return the learning rate of a step: a linear warm-up, then a cosine."""
    if step < recipe.warmup:
        return recipe.rate * (step + 1) / recipe.warmup
    done = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    cosine = (1 + math.cos(math.pi * done)) / 2
    return recipe.rate * (recipe.floor + (1 - recipe.floor) * cosine)


class Trainer:
    """Trains models one after the other, with checkpoints in one folder."""

    def __init__(self, args: argparse.Namespace, corpus: Corpus, tokenizer: Tokenizer) -> None:
        """Encode the corpus and move it to the device."""
        self.args = args
        self.console = Console()
        self.device = torch.device(args.device)
        self.gpu = self.device.type == "cuda"
        # bfloat16 on a GPU, float32 on a CPU
        self.autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=self.gpu)
        self.folder: Path = args.output / ".checkpoints"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.digest = corpus.digest
        self.vocabulary = tokenizer.get_vocab_size()
        self.training = encode(tokenizer, corpus.training).to(self.device)
        held_out = encode(tokenizer, corpus.held_out).to(self.device)
        size = sum(len(item.text.encode()) for item in corpus.held_out)
        self.bytes_per_token = size / (len(held_out) - 1)
        width = min(CONTEXT, len(held_out) - 1)
        self.rows = held_out.unfold(0, width + 1, width)  # the predicted tokens do not overlap
        self.stopping = False
        signal.signal(signal.SIGINT, self.stop)
        signal.signal(signal.SIGTERM, self.stop)

    def stop(self, *_: object) -> None:
        """Ask the training loop to end after the step in hand."""
        self.stopping = True

    def draw(self, recipe: Recipe, step: int) -> torch.Tensor:
        """Return a step's batch; it depends on the seed and the step alone, so resuming is easy."""
        key = hashlib.sha256(f"{self.args.seed}:{recipe.name}:{step}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key[:7], "big"))
        width = min(CONTEXT, len(self.training) - 1)
        high = len(self.training) - width
        starts = torch.randint(0, high, (self.args.batch, 1), generator=generator)
        return self.training[(starts + torch.arange(width + 1)).to(self.device)]

    def loss(self, model: Model, teacher: Model | None, recipe: Recipe, step: int) -> torch.Tensor:
        """Return a step's loss: cross-entropy, mixed with the teacher's divergence if any."""
        rows = self.draw(recipe, step)
        with self.autocast:
            logits = logits_of(model, rows[:, :-1])
            loss = functional.cross_entropy(logits, rows[:, 1:].flatten())
            if teacher is None:
                return loss
            with torch.no_grad():
                guide = logits_of(teacher, rows[:, :-1]).log_softmax(-1)
            ours = logits.log_softmax(-1)
            divergence = functional.kl_div(ours, guide, reduction="batchmean", log_target=True)
            return (1 - recipe.distillation) * loss + recipe.distillation * divergence

    def train(self, recipe: Recipe, teacher: Model | None = None) -> tuple[Model, dict[str, Any]]:
        """Train one model, or continue; return it, rounded to float16, with a record."""
        model = build(recipe, self.vocabulary, self.args.seed)
        convert(model, self.device)
        groups: list[dict[str, Any]] = [
            {"params": [item for item in model.parameters() if item.ndim > 1]},
            {"params": [item for item in model.parameters() if item.ndim == 1], "weight_decay": 0},
        ]
        options: dict[str, Any] = {"betas": recipe.betas, "weight_decay": recipe.decay}
        optimizer = torch.optim.AdamW(groups, fused=self.gpu, **options)
        path = self.folder / f"{recipe.name}.pt"
        # A checkpoint of another run must not be continued.
        key = json.dumps([dataclasses.asdict(recipe), self.args.seed, self.args.batch, self.digest])
        record: dict[str, Any] = {"step": 0, "seconds": 0.0, "curve": []}
        if path.exists():
            saved = torch.load(path, map_location=self.device, weights_only=True)
            if saved["key"] == key:
                model.load_state_dict(saved["model"])
                optimizer.load_state_dict(saved["optimizer"])
                record = saved["record"]
                self.console.print(f"{recipe.name}: continuing at step {record['step']}")

        def save() -> None:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({"key": key, "record": record, **state}, path.with_suffix(".new"))
            path.with_suffix(".new").replace(path)

        model.train()
        with Progress(console=self.console) as progress:
            bar = progress.add_task(recipe.name, total=recipe.steps, completed=record["step"])
            began = time.perf_counter()
            for step in range(record["step"], recipe.steps):
                for group in optimizer.param_groups:
                    group["lr"] = rate_at(recipe, step)
                loss = self.loss(model, teacher, recipe, step)
                torch.autograd.backward(loss)
                torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
                optimizer.step()
                optimizer.zero_grad()
                record["step"] = done = step + 1
                if done % 20 == 0 or done == recipe.steps:  # reading the loss makes a GPU wait
                    label = f"{recipe.name} {done}: loss {loss.item():.3f}"
                    progress.update(bar, completed=done, description=label)
                pausing = done % self.args.every == 0
                if pausing or self.stopping or done == recipe.steps:
                    record["seconds"] += time.perf_counter() - began
                    if pausing:
                        with self.autocast:
                            held_out = evaluate(self.rows, self.args.batch, model)
                        record["curve"].append([done, round(held_out, 4)])
                        line = f"{recipe.name} {done}: loss {loss.item():.4f}, held-out {held_out:.4f}"
                        self.console.print(line, f"{record['seconds']:.0f} s")
                    save()
                    began = time.perf_counter()
                if self.stopping:
                    self.console.print(f"stopped after step {done}; start again to continue")
                    raise SystemExit(130)
        # What is measured from here on, and what the draft learns from, is what is shipped.
        convert(model, torch.float16)
        convert(model, torch.float32)
        return model, record


def write_model(folder: Path, model: Model, tokenizer: Tokenizer, card: dict[str, Any]) -> None:
    """Write one complete model folder."""
    folder.mkdir(parents=True, exist_ok=True)
    template = Path(__file__).with_name("card.md").read_text(encoding="utf-8")
    convert(model, torch.float16)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    # Written by hand: this class name is known to every transformers release.
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],  # version 4 gives token types too, which no Llama takes
    }
    write_json(folder / "tokenizer_config.json", settings)
    (folder / "README.md").write_text(template.format(**card), encoding="utf-8")


def write_json(path: Path, value: object) -> None:
    """Write readable JSON."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    stdlib = Path(sysconfig.get_path("stdlib"))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    version = platform.python_version()
    parser.add_argument("--output", type=Path, default=Path("demo-models"), help="folder to write")
    parser.add_argument("--corpus", type=Path, default=stdlib, help="folder of .py files")
    parser.add_argument("--corpus-version", default=version, help="the Python it is from")
    parser.add_argument("--steps", type=int, help="steps of both models, instead of their own")
    parser.add_argument("--batch", type=int, default=64, help="sequences in a step")
    parser.add_argument("--every", type=int, default=250, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the data order")
    parser.add_argument("--device", default=device, help="torch device")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Train both models and write everything."""
    args = parse(argv)
    torch.use_deterministic_algorithms(mode=True)
    deterministic: Any = torch.utils.deterministic
    deterministic.fill_uninitialized_memory = False  # only hides bugs, and costs time
    corpus = read_corpus(args.corpus)
    tokenizer = train_tokenizer(corpus.training)
    trainer = Trainer(args, corpus, tokenizer)
    change = {"steps": args.steps} if args.steps else {}
    recipes = [dataclasses.replace(item, **change) for item in (TARGET, DRAFT)]
    target, target_record = trainer.train(recipes[0])
    draft, draft_record = trainer.train(recipes[1], teacher=target)
    # Nothing is left to be saved first.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    alpha = round(evaluate(trainer.rows, args.batch, target, draft), 4)
    sources = [*corpus.training, *corpus.held_out]
    command = f"python -m acceptlib.demo.train --batch {args.batch} --seed {args.seed}"
    if args.steps:
        command += f" --steps {args.steps}"
    facts: dict[str, Any] = {
        "acceptance": alpha,
        "corpus": {
            "python": args.corpus_version,
            "licence": "PSF-2.0",
            "files": len(sources),
            "bytes": sum(len(item.text.encode()) for item in sources),
            "sha256": corpus.digest,
            "training_tokens": len(trainer.training) - 1,
            "held_out_tokens": trainer.rows[:, 1:].numel(),
            "held_out_files": sorted(item.path for item in corpus.held_out),
        },
        "seed": args.seed,
        "batch": args.batch,
        "context": CONTEXT,
        "vocabulary": trainer.vocabulary,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(trainer.device) if trainer.gpu else "CPU",
        "command": command,
    }
    results = {}
    for recipe, model, record in zip(recipes, (target, draft), (target_record, draft_record), strict=True):
        nats = evaluate(trainer.rows, args.batch, model)
        results[recipe.name] = {
            **dataclasses.asdict(recipe),
            "parameters": sum(item.numel() for item in model.parameters()),
            "nats_per_token": round(nats, 4),
            "bits_per_byte": round(nats / math.log(2) / trainer.bytes_per_token, 4),
            "seconds": round(record["seconds"], 1),
            "held_out_loss_at_step": record["curve"],
        }
        card = {**facts, **facts["corpus"], **results[recipe.name]}
        write_model(args.output / recipe.name, model, tokenizer, card)
        trainer.console.print(f"{recipe.name}: held-out {nats:.4f} nats per token")
    trainer.console.print(f"alpha {alpha}")
    write_json(args.output / "training.json", {**facts, **results})
    write_json(args.output / "prompts.json", choose_prompts(tokenizer, corpus.held_out))
    shutil.rmtree(trainer.folder)


if __name__ == "__main__":
    main()
