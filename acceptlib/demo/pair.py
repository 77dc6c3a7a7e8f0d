"""Loading a draft and target pair: the bundled one, local folders, or models of the Hugging Face hub."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from acceptlib.demo import DRAFT, TARGET
from acceptlib.errors import InputError
from acceptlib.integrations.decoder import import_transformers
from acceptlib.tensors import as_device

CONFIG: Final = "config.json"
"""What every model folder of transformers has."""


@dataclass(frozen=True)
class ModelPair:
    """Two models over one tokenizer.

    Attributes:
        target: The transformers model whose text is wanted, in evaluation mode.
        draft: The smaller one that proposes tokens, in evaluation mode.
        tokenizer: The target's tokenizer.
    """

    target: Any
    draft: Any
    tokenizer: Any


def load_pair(
    target: str | Path | None = None, draft: str | Path | None = None, *, device: str | torch.device = "cpu"
) -> ModelPair:
    """Load a target and a draft.

    Args:
        target: A model folder, or a name on the Hugging Face hub; None is the bundled model. Only a name on the hub
            that is no local path uses the network.
        draft: The same for the draft.
        device: Where both go. On the CPU they are float32, elsewhere of the dtype they were saved in.

    Raises:
        InputError: There is no such device, a model is not there or cannot be loaded, or the two tokenizers'
            vocabularies differ.
        MissingPackageError: transformers is not installed.
    """
    transformers = import_transformers()
    device = as_device(device)
    names = {"target": TARGET if target is None else target, "draft": DRAFT if draft is None else draft}
    tokenizers = {role: _load(transformers.AutoTokenizer, role, name) for role, name in names.items()}
    vocabularies = {role: tokenizer.get_vocab() for role, tokenizer in tokenizers.items()}
    if vocabularies["target"] != vocabularies["draft"]:
        differing = len(vocabularies["target"].items() ^ vocabularies["draft"].items())
        sizes = {role: len(vocabulary) for role, vocabulary in vocabularies.items()}
        msg = (
            f"expected a target and a draft with one vocabulary, got {names['target']} ({sizes['target']} tokens) and "
            f"{names['draft']} ({sizes['draft']} tokens), which differ in {differing} entries"
        )
        raise InputError(msg)
    dtype = torch.float32 if device.type == "cpu" else "auto"
    models = {
        role: _load(transformers.AutoModelForCausalLM, role, name, dtype=dtype).to(device).eval()
        for role, name in names.items()
    }
    return ModelPair(target=models["target"], draft=models["draft"], tokenizer=tokenizers["target"])


def _load(loader: Any, role: str, name: str | Path, **options: Any) -> Any:
    """Return what `loader` makes of a folder or a name on the hub."""
    path = Path(name).expanduser()
    is_local = os.path.exists(path)  # noqa: PTH110 - Path.exists raises where a name is too long
    # A name on the hub is `model` or `owner/model`; anything else can only be meant as a path.
    if not is_local and (
        isinstance(name, Path) or path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1
    ):
        msg = f"{role}: expected a model folder, got {str(name)!r}, which does not exist"
        raise InputError(msg)
    if is_local and not (path / CONFIG).is_file():  # transformers would ask for the packages of other tokenizers
        msg = f"{role}: expected a model folder, got {str(name)!r}, which has no {CONFIG}"
        raise InputError(msg)
    try:
        return loader.from_pretrained(str(path) if is_local else name, local_files_only=is_local, **options)
    except Exception as error:  # each file format has errors of its own
        no_folder = f"there is no such folder (a local one is written ./{name})"
        what = "as a model folder" if is_local else f"from the Hugging Face hub, and {no_folder}"
        msg = f"{role}: {str(name)!r} cannot be loaded {what}: {error}"
        raise InputError(msg) from error
