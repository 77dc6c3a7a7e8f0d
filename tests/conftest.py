"""Settings of the whole suite."""

from __future__ import annotations

import torch

# Tests run several at a time, and their tensors are small: more threads than cores would only wait for each other.
torch.set_num_threads(1)
